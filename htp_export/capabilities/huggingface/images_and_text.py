"""The files of a model that replaces image tokens by features of a vision encoder, such as LLaVA.

The features of ``vision_encoder`` replace the embeddings of image tokens, which ``embed_tokens``
computes. In transformers.js, its own code replaces them; for ONNX Runtime GenAI, ``embed_tokens``
does. If a model also adds image features to later layers (DeepStack), the embedding of an image
token is the concatenation of the features for all these layers; for other tokens, it is padded with
zeros.
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
    grid_tensors,
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
"""Model type → input → its name in the class of transformers.js (``image_grid_thw_name``)."""
_FEATURES: dict[str, Axes] = {"image_features": {0: "num_image_tokens"}}


class ImagesAndText(Calls):
    """The calls of the files of a model that replaces image tokens by image features."""

    def calls(self, embeds_images: bool = False) -> dict[str, ExampleCall]:
        """The calls of all files.

        With ``embeds_images``, ``embed_tokens`` has the input ``image_features``, and replaces the
        embeddings of image tokens by them.

        Raises:
            InputError: The model does not replace image tokens, or uses images in other ways, too.
        """
        if self._token is None or not hasattr(self.model, "get_image_features"):
            raise self.refused("does not replace tokens by images")
        if "inputs_embeds" not in named_parameters(self.model):
            raise self.refused("takes no inputs_embeds")
        try:
            runs = self._decoder_runs()
            agrees = self._agrees(runs)
        except InputError:
            raise
        except Exception as error:  # from a model that requires other images
            problem = (
                f"cannot be called with images as its config describes them ({described(error)})"
            )
            raise self.refused(problem) from error
        if not agrees:
            raise self.refused("does more with images than to replace tokens by them")
        embed = {"input_ids": self._whole["input_ids"]}
        if embeds_images:
            embed["image_features"] = self._features
        embed_axes = {**_EMBEDDED, **_FEATURES}
        decoder_axes = {**DECODER, **_EMBEDDED, **self._position_axes}
        return {
            "vision_encoder": self._vision_encoder({} if embeds_images else _IN_TRANSFORMERS_JS),
            "embed_tokens": self.call({"embed": embed}, adapt=self._embed, axes=embed_axes),
            "decoder_model_merged": self.call(runs, adapt=self._decoder_adapt, axes=decoder_axes),
        }

    @property
    def _token(self) -> Any:
        """The id of image tokens; None if the config has none."""
        return find(self.model.config, "image_token_id", "image_token_index")

    @cached_property
    def _encoder(self) -> Any:
        """The module whose inputs are patches and their grids; None for images of one size."""
        takes_grids = GRID in inspect.signature(self.model.get_image_features).parameters
        return encoder_of_grids(self.model) if takes_grids else None

    @property
    def _position_axes(self) -> dict[str, Axes]:
        """The axes of positions in time, height and width (M-RoPE); empty for other positions."""
        positions = self._whole.get("position_ids")
        if positions is None or positions.dim() != 3:
            return {}
        return {"position_ids": {1: "batch_size", 2: "sequence_length"}}

    def _vision_encoder(self, names: Mapping[str, Mapping[str, str]]) -> ExampleCall:
        """The call of ``vision_encoder``; ``names``: model type → input → name in the file."""
        axes: dict[str, Axes] = {name: {0: "num_images"} for name in self._images}
        if self._encoder is not None:
            axes["pixel_values"] = {0: "num_patches"}
        elif self._images["pixel_values"].dim() == 4:
            axes["pixel_values"] = {0: "num_images", 1: "num_channels", 2: "height", 3: "width"}
        in_one_batch = self._is_same_in_one_batch()
        if self._encoder is not None and not in_one_batch:
            raise self.refused(
                f"computes other features if {GRID} is not constant; try --attention sdpa"
            )
        encode = self._encode_in_one_batch if in_one_batch else self._encode
        call = self.call({"encode": self._images}, adapt=encode, axes={**axes, **_FEATURES})
        name_of = names.get(self.model.config.model_type, {})
        return replace(
            call,
            input_names=tuple(name_of.get(name, name) for name in call.input_names),
            axes={name_of.get(name, name): dims for name, dims in call.axes.items()},
        )

    def _is_same_in_one_batch(self) -> bool:
        """Whether the features are the same without splitting the batch of images: their number can then vary."""
        import torch

        try:
            with adapted(self.model, self._encode_in_one_batch, self._images):
                features = run(self.model, self._images)["image_features"]
        except Exception:  # from a model that requires separate images
            return False
        # The attention of encoders with grids is masked then, and rounds in another way.
        rounding = 0.0 if self._encoder is None else torch.finfo(features.dtype).eps ** 0.5
        tolerance = rounding * float(self._features.abs().max())
        if features.shape != self._features.shape:
            return False
        return torch.allclose(features, self._features, rtol=0, atol=tolerance)

    def _encode(self, _: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
        """The computation of ``vision_encoder``: one row of features for each image token, image after image."""
        import torch

        returned = self.model.get_image_features(**arguments)
        more = getattr(returned, "deepstack_features", None) or ()
        layers = []
        for layer in (getattr(returned, "pooler_output", returned), *more):
            pieces = [layer] if isinstance(layer, torch.Tensor) else layer
            layers.append(torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in pieces]))
        return {"image_features": torch.cat(layers, -1) if len(layers) > 1 else layers[0]}

    def _encode_in_one_batch(
        self, forward: Callable[..., Any], arguments: dict[str, Any]
    ) -> dict[str, Any]:
        """Like `_encode`, with all images in one tensor that is never split."""
        pixels, grid = arguments["pixel_values"], arguments.get(GRID)
        if self._encoder is None or grid is None:
            with _undivided(pixels.shape[0]):
                return self._encode(forward, arguments)
        with _undivided(grid.shape[0]), attending_by_sequence(self._encoder):
            positions = grid_tensors(self._encoder, grid, pixels.shape[0])
            return self._encode(forward, {**arguments, **positions})

    @cached_property
    def _images(self) -> dict[str, Any]:
        """Example arguments for the images, one image for each text."""
        import torch

        if self._encoder is not None:
            generator = torch.Generator().manual_seed(self.seed)
            return example_images(self._encoder, self.sizes["batch_size"], generator)
        # An object with the model's name, for messages, whose forward are its image features.
        stand_in_class = type(type(self.model).__name__, (SimpleNamespace,), {})
        stand_in: Any = stand_in_class(
            config=self.model.config,
            forward=self.model.get_image_features,
            main_input_name="pixel_values",
            dtype=self.model.dtype,
        )
        return example_inputs(
            stand_in, batch=self.sizes["batch_size"], seed=self.seed, processor=self.processor
        )

    @cached_property
    def _features(self) -> torch.Tensor:
        """The features of the example images."""
        with adapted(self.model, self._encode, self._images):
            features: torch.Tensor = run(self.model, self._images)["image_features"]
        return features

    @cached_property
    def _whole(self) -> dict[str, Any]:
        """All tokens of the example, with the tokens of an image in each text, their mask and positions."""
        image = self._features.shape[0] // self.sizes["batch_size"]
        length = self.sizes["past_sequence_length"] + image + self.sizes["sequence_length"]
        whole = self.tokens(length)
        # Text stands before and after the image.
        whole["input_ids"][:, 2 : 2 + image] = self._token
        owners = [module for module in self.model.modules() if hasattr(module, "get_rope_index")]
        if owners and "position_ids" in whole:
            get_rope_index = owners[-1].get_rope_index
            arguments = {
                **whole,
                **self._images,
                "mm_token_type_ids": (whole["input_ids"] == self._token).int(),
            }
            accepted = inspect.signature(get_rope_index).parameters
            arguments = {name: value for name, value in arguments.items() if name in accepted}
            whole["position_ids"], _ = get_rope_index(**arguments)
        return whole

    @property
    def _layers(self) -> int:
        """The number of decoder layers that image features are added to; 1 without DeepStack."""
        embedding_size = int(self.model.get_input_embeddings().weight.shape[-1])
        return int(self._features.shape[-1]) // embedding_size

    def _embed(self, _: Callable[..., Any] | None, arguments: dict[str, Any]) -> dict[str, Any]:
        """The computation of ``embed_tokens``."""
        import torch

        embeddings, ids = self.model.get_input_embeddings(), arguments["input_ids"]
        embedded = ids
        # An image token outside of the vocabulary has no embedding: use that of the first token.
        if self._token >= embeddings.weight.shape[0]:
            embedded = torch.where(ids == self._token, 0, ids)
        rows: torch.Tensor = embeddings(embedded)
        if self._layers > 1:
            rows = torch.nn.functional.pad(rows, (0, (self._layers - 1) * rows.shape[-1]))
        features = arguments.get("image_features")
        if features is not None:
            is_image = ids == self._token
            index = is_image.flatten().cumsum(0).reshape(ids.shape).sub(1).clamp(min=0)
            # A row of zeros, because without images there are no features to select from.
            features = torch.cat([features.to(rows.dtype), torch.zeros_like(rows[0, :1])])
            rows = torch.where(is_image[..., None], features[index], rows)
        return {"inputs_embeds": rows}

    def _decode(self, forward: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """The computation of the decoder on concatenated features for several layers."""
        import torch

        rows = arguments["inputs_embeds"]
        first, *later = rows.split(rows.shape[-1] // self._layers, -1)
        # All rows of all texts: the features of other tokens are zeros.
        deepstack = {
            "visual_pos_masks": torch.arange(rows.shape[0], device=rows.device),
            "deepstack_visual_embeds": later,
        }
        [decoder] = [
            module
            for module in self.model.modules()
            if deepstack.keys() <= named_parameters(module).keys()
        ]

        def add(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return args, {**kwargs, **deepstack}

        hook = functools.partial(decoder.register_forward_pre_hook, add, with_kwargs=True)
        with restored(lambda changes: changes.will_undo(hook().remove)):
            return forward(**{**arguments, "inputs_embeds": first})

    def _decoder_runs(self) -> dict[str, dict[str, Any]]:
        """The runs of the decoder on embeddings, with the image features in them."""
        whole = dict(self._whole)
        ids = whole.pop("input_ids")
        arguments = {"input_ids": ids, "image_features": self._features}
        embedded: torch.Tensor = self._embed(None, arguments)["inputs_embeds"]
        whole["inputs_embeds"] = embedded.detach().clone()
        split = ids.shape[1] - self.sizes["sequence_length"]
        with self._decoding():
            return self.prefill_and_decode(whole, split)

    def _decoding(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block, the model has the arguments of ``decoder_model_merged``."""
        names = dict.fromkeys(named_parameters(self.model))
        return adapted(self.model, self._decoder_adapt, names)

    @property
    def _decoder_adapt(self) -> Adapt | None:
        """The adapter of the decoder; None if image features are for the first layer alone."""
        return self._decode if self._layers > 1 else None

    def _agrees(self, runs: Mapping[str, dict[str, Any]]) -> bool:
        """Whether the files together compute the logits of the model."""
        import torch

        expected = run(self.model, {**self._whole, **self._images}).logits
        with self._decoding():
            logits = [run(self.model, copy.deepcopy(kwargs)).logits for kwargs in runs.values()]
        return is_same(torch.cat(logits, 1), expected)


class _All(int):
    """The size of the only piece of a tensor that is not divided."""


def _undivided(images: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside the block, do not split tensors of ``images`` images into lists, whose length a trace would fix."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Undivided(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, _: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            # By name, because transformers' exporters replace the functions themselves.
            name = getattr(function, "__name__", "")
            if name == "split" and _is_undivided(args[1]):
                return (args[0],)
            # In the first dimension: other arguments name another one.
            is_splitting = name in whole and args[1:] in ((), (0,)) and not kwargs
            if is_splitting and self._has_images(args[0]):
                return whole[name](args[0])
            return function(*args, **(kwargs or {}))

        def _has_images(self, tensor: Any) -> bool:
            """Whether the first size of a tensor is the number of images."""
            if not isinstance(tensor, torch.Tensor) or not tensor.dim():
                return False
            # As text: a comparison of symbols would make one of them a constant.
            return str(tensor.shape[0]) == str(images)

    # Function that splits a tensor → its result for a tensor in one piece.
    whole: dict[str, Callable[[torch.Tensor], Any]] = {
        "unbind": lambda tensor: (tensor,),
        "__len__": lambda _: 1,
        "item": lambda _: _All(),
        "tolist": lambda _: [_All()],
    }
    return Undivided()


def _is_undivided(sizes: Any) -> bool:
    """Whether sizes of pieces come from a tensor that was not divided."""
    return isinstance(sizes, list) and any(isinstance(size, _All) for size in sizes)
