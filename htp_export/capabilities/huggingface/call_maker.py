"""What the calls of all files of a model have in common: its tokens, its caches, and how they are described."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from htp_export import errors
from htp_export.capabilities.huggingface.caches import emptied, empty_cache
from htp_export.capabilities.huggingface.example_calls import CacheNames, ExampleCall, example_of_runs, run
from htp_export.capabilities.huggingface.inputs import example_inputs, named_parameters
from htp_export.capabilities.huggingface.processors import Processor
from htp_export.capabilities.huggingface.task_names import Axes
from htp_export.errors import InputError

if TYPE_CHECKING:
    import torch

__all__ = ["CACHE", "DECODER", "CallMaker", "is_same"]

CACHE = "past_key_values."
_TOTAL = "past_sequence_length + sequence_length"
DECODER: dict[str, Axes] = {
    "attention_mask": {0: "batch_size", 1: _TOTAL},
    CACHE: {0: "batch_size", 2: "past_sequence_length"},
    f"present.{CACHE}": {0: "batch_size", 2: _TOTAL},
}
"""Dimensions of a decoder that takes a cache."""

_DIFFERENT = 0.02  # of the largest logit: more than kernels differ by in half precision


@dataclass(frozen=True)
class CallMaker:
    """Makes the calls of one model.

    Attributes:
        model: A model of transformers.
        task: The task.
        cache_names: Whose names the tensors of a cache have.
        sizes: Name of a dimension → its size in the example.
        seed: Of the example inputs.
        processor: The tokenizer and the image processor of the model.
    """

    model: Any
    task: str
    cache_names: CacheNames
    sizes: Mapping[str, int]
    seed: int
    processor: Processor | None = None

    def call(self, runs: Mapping[str, dict[str, Any]], **options: Any) -> ExampleCall:
        """The call that a file is exported from.

        Args:
            runs: Name → arguments; see `ExampleCall`.
            **options: Of `example_of_runs`; ``model``, if it is not the whole one, too.
        """
        return example_of_runs(self.task, options.pop("model", self.model), runs, self.cache_names, **options)

    def inputs(self, shapes: Mapping[str, Any] | None, batch: int = 1) -> dict[str, Any]:
        """Example inputs of the model; see `example_inputs`."""
        made = example_inputs(self.model, shapes=shapes, batch=batch, seed=self.seed, processor=self.processor)
        return dict(made)

    def tokens(self, length: int) -> dict[str, Any]:
        """Tokens, their mask and their positions, as far as the model takes them.

        One token of the last text is masked. It is not the first: a token that may look at no token at all has no
        defined result, and kernels differ in it.
        """
        import torch

        ids = self.inputs({"input_ids": [self.sizes["batch_size"], length]})["input_ids"]
        mask = torch.ones_like(ids)
        mask[-1, 1:2] = 0
        made = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(-1) - 1}
        return {name: made[name] for name in named_parameters(self.model) if name in made}

    def prefill_and_decode(self, whole: Mapping[str, Any], length: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments with an empty cache, and arguments with a cache in which the first tokens are.

        Args:
            whole: Arguments for all tokens; the second dimension is that of the tokens.
            length: How many of the tokens are in the cache.

        Raises:
            InputError: If the model takes no such cache.
        """
        first = {name: value[:, :length] for name, value in whole.items()}
        rest = {name: value if name == "attention_mask" else value[:, length:] for name, value in whole.items()}
        cache = empty_cache(self.model)
        try:
            run(self.model, {**first, "past_key_values": cache})
        except Exception as error:  # whatever a model raises that has a cache of its own
            problem = f"cannot be called with a {type(cache).__name__} ({errors.described(error)})"
            raise InputError(f"{type(self.model).__name__} {problem}; choose a task without -with-past") from error
        return self._ordered(first, emptied(cache)), self._ordered(rest, cache)

    def _ordered(self, kwargs: Mapping[str, Any], cache: Any) -> dict[str, Any]:
        given = {**kwargs, "past_key_values": cache}
        return {name: given[name] for name in named_parameters(self.model) if name in given}


def is_same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether logits that were computed in two ways are the same, but for the rounding of kernels."""
    import torch

    return torch.allclose(found, wanted, rtol=0, atol=_DIFFERENT * float(wanted.abs().max()))
