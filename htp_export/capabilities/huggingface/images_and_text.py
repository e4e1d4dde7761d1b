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

from htp_export.capabilities.huggingface.configs import find
from htp_export.capabilities.huggingface.example_calls import DECODER, Calls, ExampleCall, adapted, is_same, run
from htp_export.capabilities.huggingface.inputs import example_inputs, named_parameters
from htp_export.capabilities.huggingface.tasks import Axes
from htp_export.errors import InputError, described

if TYPE_CHECKING:
    import torch

__all__ = ["ImagesAndText"]

_TOKENS: Axes = {0: "batch_size", 1: "sequence_length"}
_EMBEDDED: dict[str, Axes] = {"inputs_embeds": _TOKENS}


class ImagesAndText(Calls):
    """The calls of the files of a model that puts images in the places of tokens."""

    def calls(self) -> dict[str, ExampleCall]:
        """The calls of all files; an InputError if images are not put in the places of tokens, or do more than that."""
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
            problem = f"cannot be called with images as its config describes them ({described(error)})"
            raise self.refused(problem) from error
        if not agrees:
            raise self.refused("does more with images than to put them in the places of tokens")
        embed = {"embed": {"input_ids": self._whole["input_ids"]}}
        return {
            "vision_encoder": self._vision_encoder(),
            "embed_tokens": self.call(embed, adapt=self._embed, axes=_EMBEDDED),
            "decoder_model_merged": self.call(runs, axes={**DECODER, **_EMBEDDED}),
        }

    @property
    def _token(self) -> Any:
        return find(self.model.config, "image_token_id", "image_token_index")

    def _vision_encoder(self) -> ExampleCall:
        axes: dict[str, Axes] = {name: {0: "num_images"} for name in self._images}
        if self._images["pixel_values"].dim() == 4:
            axes["pixel_values"] = {0: "num_images", 1: "num_channels", 2: "height", 3: "width"}
        axes["image_features"] = {0: "num_image_tokens"}
        see = self._see_together if self._sees_images_together() else self._see
        return self.call({"encode": self._images}, adapt=see, axes=axes)

    def _sees_images_together(self) -> bool:
        """Whether the model finds the same in images that it does not take apart: their number can then vary."""
        try:
            with adapted(self.model, self._see_together, self._images):
                together = run(self.model, self._images)["image_features"]
        except Exception:  # whatever a model raises that needs its images one by one
            return False
        return together.shape == self._features.shape and bool((together == self._features).all())

    def _see(self, _: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
        """What ``vision_encoder`` computes: a row for each token of an image, image after image."""
        import torch

        returned = self.model.get_image_features(**arguments)
        features = getattr(returned, "pooler_output", returned)
        pieces = [features] if isinstance(features, torch.Tensor) else features
        return {"image_features": torch.cat([piece.reshape(-1, piece.shape[-1]) for piece in pieces])}

    def _see_together(self, forward: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
        """The same, with the images in one tensor."""
        with _undivided(arguments["pixel_values"].shape[0]):
            return self._see(forward, arguments)

    @cached_property
    def _images(self) -> dict[str, Any]:
        """What the model wants to know of an image for each text."""
        named = type(type(self.model).__name__, (SimpleNamespace,), {})  # for messages
        seeing: Any = named(
            config=self.model.config,
            forward=self.model.get_image_features,
            main_input_name="pixel_values",
            dtype=self.model.dtype,
        )
        return example_inputs(seeing, batch=self.sizes["batch_size"], seed=self.seed, processor=self.processor)

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
        whole = self.tokens(self.sizes["past_sequence_length"] + image + self.sizes["sequence_length"])
        whole["input_ids"][:, 2 : 2 + image] = self._token
        return whole

    def _embed(self, _: Callable[..., Any] | None, arguments: dict[str, Any]) -> dict[str, Any]:
        """What ``embed_tokens`` computes; a token of images that is in no vocabulary has the row of the first token."""
        import torch

        embeddings, ids = self.model.get_input_embeddings(), arguments["input_ids"]
        if self._token >= embeddings.weight.shape[0]:
            ids = torch.where(ids == self._token, 0, ids)
        return {"inputs_embeds": embeddings(ids)}

    def _decoder_runs(self) -> dict[str, dict[str, Any]]:
        """The tokens as a program gives them to the decoder: with the images in their places."""
        whole = dict(self._whole)
        ids = whole.pop("input_ids")
        embedded: torch.Tensor = self._embed(None, {"input_ids": ids})["inputs_embeds"].detach().clone()
        embedded[ids == self._token] = self._features.to(embedded.dtype)
        split = ids.shape[1] - self.sizes["sequence_length"]
        return self.prefill_and_decode({**whole, "inputs_embeds": embedded}, split)

    def _agrees(self, runs: Mapping[str, dict[str, Any]]) -> bool:
        """Whether the files compute together what the model does."""
        import torch

        wanted = run(self.model, {**self._whole, **self._images}).logits
        logits = [run(self.model, copy.deepcopy(kwargs)).logits for kwargs in runs.values()]
        return is_same(torch.cat(logits, 1), wanted)


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
