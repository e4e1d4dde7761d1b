"""The files of a model that puts what it sees in images in the places of tokens: LLaVA and its kin.

They are those of transformers.js: a program gives tokens to ``embed_tokens`` and images to ``vision_encoder``, puts the
rows of the images in the places of their tokens, and gives the result to ``decoder_model_merged``.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from htp_export.capabilities.huggingface.call_maker import DECODER, CallMaker, is_same
from htp_export.capabilities.huggingface.configs import find
from htp_export.capabilities.huggingface.example_calls import Adapt, ExampleCall, adapted, run
from htp_export.capabilities.huggingface.inputs import example_inputs, named_parameters
from htp_export.capabilities.huggingface.task_names import Axes
from htp_export.errors import InputError, described

if TYPE_CHECKING:
    import torch

__all__ = ["ImagesAndText"]

_TOKENS: Axes = {0: "batch_size", 1: "sequence_length"}
_EMBEDDED: dict[str, Axes] = {"inputs_embeds": _TOKENS}


class ImagesAndText:
    """The calls of the files of one model.

    Args:
        maker: Of the model.

    Raises:
        InputError: If its images are not put in the places of tokens, or if the model does more with them.
    """

    def __init__(self, maker: CallMaker) -> None:
        self._maker, self._model, self._sizes = maker, maker.model, maker.sizes
        self._token = find(self._model.config, "image_token_id", "image_token_index")
        if self._token is None or not hasattr(self._model, "get_image_features"):
            raise self._refused("does not put images in the places of tokens")
        if "inputs_embeds" not in named_parameters(self._model):
            raise self._refused("takes no inputs_embeds")

    def calls(self) -> dict[str, ExampleCall]:
        """The calls of all files."""
        try:
            ids, runs = self._whole["input_ids"], self._decoder_runs()
            agrees = self._agrees(runs)
        except InputError:
            raise
        except Exception as error:  # whatever a model raises that wants other images
            said = described(error)
            raise self._refused(f"cannot be called with images as its config describes them ({said})") from error
        if not agrees:
            raise self._refused("does more with images than to put them in the places of tokens")
        call = self._maker.call
        return {
            "vision_encoder": self._vision_encoder(),
            "embed_tokens": call({"embed": {"input_ids": ids}}, adapt=self._embed, axes=_EMBEDDED),
            "decoder_model_merged": call(runs, axes={**DECODER, **_EMBEDDED}),
        }

    def _vision_encoder(self) -> ExampleCall:
        axes: dict[str, Axes] = {name: {0: "num_images"} for name in self._images}
        if self._images["pixel_values"].dim() == 4:
            axes["pixel_values"] = {0: "num_images", 1: "num_channels", 2: "height", 3: "width"}
        axes["image_features"] = {0: "num_image_tokens"}
        see = _seeing(self._model, together=self._sees_images_together())
        return self._maker.call({"encode": self._images}, adapt=see, axes=axes)

    def _sees_images_together(self) -> bool:
        """Whether the model finds the same in images that it does not take apart: their number can then vary."""
        try:
            found = self._seen(together=True)
        except Exception:  # whatever a model raises that needs its images one by one
            return False
        return found.shape == self._features.shape and bool((found == self._features).all())

    @cached_property
    def _images(self) -> dict[str, Any]:
        """What the model wants to know of an image for each text."""
        named = type(type(self._model).__name__, (SimpleNamespace,), {})  # for messages
        seeing: Any = named(
            config=self._model.config,
            forward=self._model.get_image_features,
            main_input_name="pixel_values",
            dtype=self._model.dtype,
        )
        maker, batch = self._maker, self._sizes["batch_size"]
        return dict(example_inputs(seeing, batch=batch, seed=maker.seed, processor=maker.processor))

    @cached_property
    def _features(self) -> torch.Tensor:
        """What the model sees in the images."""
        return self._seen(together=False)

    def _seen(self, *, together: bool) -> torch.Tensor:
        with adapted(self._model, _seeing(self._model, together=together), self._images):
            features: torch.Tensor = run(self._model, self._images)["image_features"]
        return features

    @cached_property
    def _whole(self) -> dict[str, Any]:
        """Tokens, among which are those of an image in each text, their mask and their positions."""
        sizes = self._sizes
        image = self._features.shape[0] // sizes["batch_size"]
        whole = self._maker.tokens(sizes["past_sequence_length"] + image + sizes["sequence_length"])
        whole["input_ids"][:, 2 : 2 + image] = self._token
        return whole

    @cached_property
    def _embedded(self) -> torch.Tensor:
        """The tokens as a program gives them to the decoder: with the images in their places."""
        ids = self._whole["input_ids"]
        embedded: torch.Tensor = self._embed(None, {"input_ids": ids})["inputs_embeds"].detach().clone()
        embedded[ids == self._token] = self._features.to(embedded.dtype)
        return embedded

    def _embed(self, _: Callable[..., Any] | None, arguments: dict[str, Any]) -> dict[str, Any]:
        """What ``embed_tokens`` computes; a token of images that is in no vocabulary has the row of the first token."""
        import torch

        embeddings, ids = self._model.get_input_embeddings(), arguments["input_ids"]
        if self._token >= embeddings.weight.shape[0]:
            ids = torch.where(ids == self._token, 0, ids)
        return {"inputs_embeds": embeddings(ids)}

    def _decoder_runs(self) -> dict[str, dict[str, Any]]:
        embedded = {**self._whole, "inputs_embeds": self._embedded}
        split = embedded.pop("input_ids").shape[1] - self._sizes["sequence_length"]
        prefill, decode = self._maker.prefill_and_decode(embedded, split)
        return {"prefill": prefill, "decode": decode}

    def _agrees(self, runs: Mapping[str, dict[str, Any]]) -> bool:
        """Whether the files compute together what the model does."""
        import torch

        wanted = run(self._model, {**self._whole, **self._images}).logits
        found = [run(self._model, copy.deepcopy(kwargs)).logits for kwargs in runs.values()]
        return is_same(torch.cat(found, 1), wanted)

    def _refused(self, problem: str) -> InputError:
        advice = "choose a task without -with-past"
        return InputError(f"{type(self._model).__name__} {problem}; {advice}")


def _seeing(model: Any, *, together: bool) -> Adapt:
    """What ``vision_encoder`` computes: a row for each token of an image, image after image.

    Args:
        model: The model.
        together: Whether the images stay in one tensor.
    """
    import torch

    def see(_: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
        images = arguments["pixel_values"].shape[0]
        with _undivided(images) if together else contextlib.nullcontext():
            returned = model.get_image_features(**arguments)
        features = getattr(returned, "pooler_output", returned)
        pieces = [features] if isinstance(features, torch.Tensor) else features
        return {"image_features": torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in pieces])}

    return see


def _undivided(images: Any) -> contextlib.AbstractContextManager[Any]:
    """Leave tensors of this many images whole where a model asks for a list of them, whose length a trace would fix."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Undivided(TorchFunctionMode):
        def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            is_list = function in (torch.Tensor.unbind, torch.Tensor.__len__) and args[1:] in ((), (0,)) and not kwargs
            # Sizes are compared as text: comparing symbols would make one of them a constant.
            if is_list and args[0].dim() and str(args[0].shape[0]) == str(images):
                return 1 if function is torch.Tensor.__len__ else (args[0],)
            return function(*args, **(kwargs or {}))

    return Undivided()
