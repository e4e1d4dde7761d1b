"""The files of a model that puts what it sees in images in the places of tokens: LLaVA and its kin.

In transformers.js, a program puts the rows of ``vision_encoder`` in the places of their tokens in
those of ``embed_tokens``; for ONNX Runtime GenAI, ``embed_tokens`` does it. If a model adds images
to later layers, too (DeepStack), the row of an image token is the rows of all these layers, one
behind the other; other tokens have zeros.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from htp_export.capabilities.huggingface.configs import find
from htp_export.capabilities.huggingface.example_calls import (
    DECODER,
    Adapt,
    Calls,
    ExampleCall,
    adapted,
    is_same,
    run,
)
from htp_export.capabilities.huggingface.image_grids import (
    GRID,
    attending_by_sequence,
    encoder_of_grids,
    example_images,
    in_place_of_loops,
)
from htp_export.capabilities.huggingface.inputs import example_inputs, named_parameters
from htp_export.capabilities.huggingface.tasks import Axes
from htp_export.errors import InputError, described
from htp_export.process.restoring import restored

if TYPE_CHECKING:
    import torch

_TOKENS: Axes = {0: "batch_size", 1: "sequence_length"}
_EMBEDDED: dict[str, Axes] = {"inputs_embeds": _TOKENS}
_IN_TRANSFORMERS_JS = {"qwen2_vl": {GRID: "grid_thw"}}
"""Model type → the names of inputs that its class in transformers.js alone has (``image_grid_thw_name``)."""
_SEEN: dict[str, Axes] = {"image_features": {0: "num_image_tokens"}}


class ImagesAndText(Calls):
    """The calls of the files of a model that puts images in the places of tokens."""

    def calls(self, embeds_images: bool = False) -> dict[str, ExampleCall]:
        """The calls of all files; an InputError if images are not put in the places of tokens, or do more than that.

        With ``embeds_images``, ``embed_tokens`` takes ``image_features``, and puts them in their
        places.
        """
        if self._token is None or not hasattr(self.model, "get_image_features"):
            raise self.refused("does not put images in the places of tokens")
        if "inputs_embeds" not in named_parameters(self.model):
            raise self.refused("takes no inputs_embeds")
        try:
            runs = self._decoder_runs()
            agrees = self._agrees(runs)
        except InputError:
            raise
        except Exception as error:  # whatever a model raises that wants other images
            problem = (
                f"cannot be called with images as its config describes them ({described(error)})"
            )
            raise self.refused(problem) from error
        if not agrees:
            raise self.refused("does more with images than to put them in the places of tokens")
        embed = {"input_ids": self._whole["input_ids"]}
        if embeds_images:
            embed["image_features"] = self._features
        return {
            "vision_encoder": self._vision_encoder({} if embeds_images else _IN_TRANSFORMERS_JS),
            "embed_tokens": self.call(
                {"embed": embed}, adapt=self._embed, axes={**_EMBEDDED, **_SEEN}
            ),
            "decoder_model_merged": self.call(
                runs, adapt=self._later, axes={**DECODER, **_EMBEDDED, **self._positions}
            ),
        }

    @property
    def _token(self) -> Any:
        return find(self.model.config, "image_token_id", "image_token_index")

    @cached_property
    def _encoder(self) -> Any:
        """The module that takes patches and their grids; None for images of one size."""
        takes_grids = GRID in inspect.signature(self.model.get_image_features).parameters
        return encoder_of_grids(self.model) if takes_grids else None

    @property
    def _positions(self) -> dict[str, Axes]:
        """The axes of positions in time, height and width (M-RoPE)."""
        has_three = (
            self._whole["position_ids"].dim() == 3 if "position_ids" in self._whole else False
        )
        return {"position_ids": {1: "batch_size", 2: "sequence_length"}} if has_three else {}

    def _vision_encoder(self, names: Mapping[str, Mapping[str, str]]) -> ExampleCall:
        axes: dict[str, Axes] = {name: {0: "num_images"} for name in self._images}
        if self._images["pixel_values"].dim() == 4:
            axes["pixel_values"] = {0: "num_images", 1: "num_channels", 2: "height", 3: "width"}
        if self._encoder is not None:
            axes["pixel_values"] = {0: "num_patches"}
        together = self._sees_images_together()
        if self._encoder is not None and not together:
            raise self.refused(
                f"finds other things in images where {GRID} is not constant; try --attention sdpa"
            )
        see = self._see_together if together else self._see
        call = self.call({"encode": self._images}, adapt=see, axes={**axes, **_SEEN})
        name_of = names.get(self.model.config.model_type, {})
        inputs = tuple(name_of.get(name, name) for name in call.input_names)
        return replace(
            call,
            input_names=inputs,
            axes={name_of.get(name, name): dims for name, dims in call.axes.items()},
        )

    def _sees_images_together(self) -> bool:
        """Whether the model finds the same in images that it does not take apart: their number can then vary."""
        import torch

        try:
            with adapted(self.model, self._see_together, self._images):
                together = run(self.model, self._images)["image_features"]
        except Exception:  # whatever a model raises that needs its images one by one
            return False
        # of a mask in attention
        rounding = 0.0 if self._encoder is None else torch.finfo(together.dtype).eps ** 0.5
        allowed = rounding * float(self._features.abs().max())
        return together.shape == self._features.shape and torch.allclose(
            together, self._features, rtol=0, atol=allowed
        )

    def _see(self, _: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
        """What ``vision_encoder`` computes: a row for each token of an image, image after image."""
        import torch

        returned = self.model.get_image_features(**arguments)
        more = getattr(returned, "deepstack_features", None) or ()
        layers = []
        for layer in (getattr(returned, "pooler_output", returned), *more):
            pieces = [layer] if isinstance(layer, torch.Tensor) else layer
            layers.append(torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in pieces]))
        return {"image_features": torch.cat(layers, -1) if len(layers) > 1 else layers[0]}

    def _see_together(
        self, forward: Callable[..., Any], arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """The same, with the images in one tensor."""
        pixels, grid = arguments["pixel_values"], arguments.get(GRID)
        if self._encoder is None or grid is None:
            with _undivided(pixels.shape[0]):
                return self._see(forward, arguments)
        with _undivided(grid.shape[0]), attending_by_sequence(self._encoder):
            places = in_place_of_loops(self._encoder, grid, pixels.shape[0])
            return self._see(forward, {**arguments, **places})

    @cached_property
    def _images(self) -> dict[str, Any]:
        """What the model wants to know of an image for each text."""
        import torch

        if self._encoder is not None:
            generator = torch.Generator().manual_seed(self.seed)
            return example_images(self._encoder, self.sizes["batch_size"], generator)
        named = type(type(self.model).__name__, (SimpleNamespace,), {})  # for messages
        see, config, dtype = self.model.get_image_features, self.model.config, self.model.dtype
        seeing: Any = named(config=config, forward=see, main_input_name="pixel_values", dtype=dtype)
        return example_inputs(
            seeing, batch=self.sizes["batch_size"], seed=self.seed, processor=self.processor
        )

    @cached_property
    def _features(self) -> torch.Tensor:
        """What the model sees in the images."""
        with adapted(self.model, self._see, self._images):
            features: torch.Tensor = run(self.model, self._images)["image_features"]
        return features

    @cached_property
    def _whole(self) -> dict[str, Any]:
        """Tokens, among which are those of an image in each text, their mask and their positions."""
        image = self._features.shape[0] // self.sizes["batch_size"]
        whole = self.tokens(
            self.sizes["past_sequence_length"] + image + self.sizes["sequence_length"]
        )
        whole["input_ids"][:, 2 : 2 + image] = self._token
        places = [module for module in self.model.modules() if hasattr(module, "get_rope_index")]
        if places and "position_ids" in whole:
            taken = inspect.signature(places[-1].get_rope_index).parameters
            given = {
                **whole,
                **self._images,
                "mm_token_type_ids": (whole["input_ids"] == self._token).int(),
            }
            whole["position_ids"], _ = places[-1].get_rope_index(
                **{k: v for k, v in given.items() if k in taken}
            )
        return whole

    @property
    def _layers(self) -> int:
        """How many layers of the decoder the model adds images to."""
        return int(self._features.shape[-1]) // int(
            self.model.get_input_embeddings().weight.shape[-1]
        )

    def _embed(self, _: Callable[..., Any] | None, arguments: dict[str, Any]) -> dict[str, Any]:
        """What ``embed_tokens`` computes; a token of images that is in no vocabulary has the row of the first token."""
        import torch

        embeddings, ids = self.model.get_input_embeddings(), arguments["input_ids"]
        known = (
            torch.where(ids == self._token, 0, ids)
            if self._token >= embeddings.weight.shape[0]
            else ids
        )
        rows: torch.Tensor = embeddings(known)
        if self._layers > 1:
            rows = torch.nn.functional.pad(rows, (0, (self._layers - 1) * rows.shape[-1]))
        features = arguments.get("image_features")
        if features is not None:
            is_image = ids == self._token
            place = is_image.flatten().cumsum(0).reshape(ids.shape).sub(1).clamp(min=0)
            # never empty
            seen = torch.cat([features.to(rows.dtype), torch.zeros_like(rows[0, :1])])
            rows = torch.where(is_image[..., None], seen[place], rows)
        return {"inputs_embeds": rows}

    def _decode(self, forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """What the decoder computes from rows for several layers."""
        import torch

        rows = arguments["inputs_embeds"]
        first, *later = rows.split(rows.shape[-1] // self._layers, -1)
        given = {
            "visual_pos_masks": torch.arange(rows.shape[0], device=rows.device),
            "deepstack_visual_embeds": later,
        }
        [decoder] = [
            module for module in self.model.modules() if set(given) <= set(named_parameters(module))
        ]

        def add(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return args, {**kwargs, **given}

        hook = functools.partial(decoder.register_forward_pre_hook, add, with_kwargs=True)
        with restored(lambda changes: changes.will_undo(hook().remove)):
            return forward(**{**arguments, "inputs_embeds": first})

    def _decoder_runs(self) -> dict[str, dict[str, Any]]:
        """The tokens as a program gives them to the decoder: with the images in their places."""
        whole = dict(self._whole)
        ids = whole.pop("input_ids")
        given = {"input_ids": ids, "image_features": self._features}
        embedded: torch.Tensor = self._embed(None, given)["inputs_embeds"]
        split = ids.shape[1] - self.sizes["sequence_length"]
        with self._decoding():
            return self.prefill_and_decode(
                {**whole, "inputs_embeds": embedded.detach().clone()}, split
            )

    def _decoding(self) -> contextlib.AbstractContextManager[None]:
        """The model as ``decoder_model_merged`` runs it."""
        names = dict.fromkeys(named_parameters(self.model))
        return adapted(self.model, self._later, names)

    @property
    def _later(self) -> Adapt | None:
        return self._decode if self._layers > 1 else None

    def _agrees(self, runs: Mapping[str, dict[str, Any]]) -> bool:
        """Whether the files compute together what the model does."""
        import torch

        wanted = run(self.model, {**self._whole, **self._images}).logits
        with self._decoding():
            logits = [run(self.model, copy.deepcopy(kwargs)).logits for kwargs in runs.values()]
        return is_same(torch.cat(logits, 1), wanted)


class _All(int):
    """The size of the one piece of a tensor that is not divided."""


def _undivided(images: Any) -> contextlib.AbstractContextManager[Any]:
    """Leave tensors of this many images whole where a model asks for a list of them, whose length a trace would fix."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Undivided(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, _: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            # transformers' exporters replace the functions themselves
            name = getattr(function, "__name__", "")
            if (
                name == "split"
                and isinstance(args[1], list)
                and any(isinstance(size, _All) for size in args[1])
            ):
                return (args[0],)
            # Sizes are compared as text: comparing symbols would make one of them a constant.
            is_list = (
                name in lists
                and args[1:] in ((), (0,))
                and not kwargs
                and isinstance(args[0], torch.Tensor)
            )
            if is_list and args[0].dim() and str(args[0].shape[0]) == str(images):
                return lists[name](args[0])
            return function(*args, **(kwargs or {}))

    lists: dict[str, Callable[[torch.Tensor], Any]] = {
        "unbind": lambda tensor: (tensor,),
        "__len__": lambda _: 1,
        "item": lambda _: _All(),
        "tolist": lambda _: [_All()],
    }
    return Undivided()
