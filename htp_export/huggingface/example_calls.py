"""One call of a transformers model as an export needs it: inputs, their names, and what may vary, by task."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.huggingface.caches import (
    emptied,
    empty_cache,
    leaf_name,
    let_torch_export_see_caches,
    named_leaves_of,
    translations,
)
from htp_export.huggingface.inputs import example_inputs, named_parameters
from htp_export.huggingface.models import split_task

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["CacheNames", "ExampleCall", "example_call"]

CacheNames = Literal["optimum", "transformers"]

_BATCH, _PAST, _NEW = 2, 5, 3  # all different, and none is 1: torch.export takes a size of 1 for a constant
_TOTAL_AXIS = "past_sequence_length + sequence_length"
_AXES = {
    "input_ids": {0: "batch_size", 1: "sequence_length"},
    "attention_mask": {0: "batch_size", 1: "sequence_length"},
    "position_ids": {0: "batch_size", 1: "sequence_length"},
    "logits": {0: "batch_size", 1: "sequence_length"},
}


@dataclass(frozen=True)
class ExampleCall:
    """One call of a model, and how its inputs and outputs are called in a file.

    Attributes:
        task: The task, with ``-with-past`` if there is a cache.
        model: The module that is called.
        kwargs: Its arguments, in the order of ``forward``'s signature.
        dynamic_shapes: Which dimensions may vary, as ``torch.export`` wants it for ``kwargs``.
        input_names: The names of the graph's inputs.
        output_names: The names of the graph's outputs.
        axes: Input or output → dimension → the name of the dimension.
        runs: Name → arguments of the same call, for a check of the file in each way in which it is used: ``prefill``
            with an empty cache, ``decode`` with tokens in it. Without a cache, there is one, ``forward``.
    """

    task: str
    model: nn.Module
    kwargs: dict[str, Any]
    dynamic_shapes: dict[str, Any]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    axes: Mapping[str, Mapping[int, str]]
    runs: Mapping[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of ``htp_export.export``, without the model and the file.

        Raises:
            InputError: If transformers is too old; see `translations`.
        """
        return {
            "kwargs": self.kwargs,
            "dynamic_shapes": self.dynamic_shapes,
            "input_names": list(self.input_names),
            "output_names": list(self.output_names),
            "custom_translation_table": translations(),
        }

    def name_dimensions(self, graph: ir.Graph) -> None:
        """Give the dimensions of a graph's inputs and outputs the names of ``axes``; fixed sizes stay.

        torch composes the name of a sum in an order of its own (``sequence_length + past_sequence_length``), and names
        no dimension that it was left to decide about.

        Args:
            graph: What ``htp_export.export`` made of this call; changed in place.
        """
        for value in (*graph.inputs, *graph.outputs):
            dims = self.axes.get(str(value.name), {})
            if value.shape is not None and dims:
                value.shape = ir.Shape(
                    dims.get(place, size) if isinstance(size, ir.SymbolicDim) else size
                    for place, size in enumerate(value.shape)
                )


def example_call(
    model: nn.Module, *, task: str = "text-generation-with-past", cache_names: CacheNames = "optimum", seed: int = 0
) -> ExampleCall:
    """A call of a model that generates text, with the names and dynamic axes that optimum gives its files.

    The same file serves for prefill (the cache is empty, ``past_sequence_length`` is 0) and for decoding.

    Args:
        model: A model of transformers with a ``past_key_values`` argument; its ``config.use_cache`` must be true for a
            task with ``-with-past``, and false for one without.
        task: ``"text-generation-with-past"`` or ``"text-generation"``.
        cache_names: Whose names the tensors of the cache have: optimum's (``past_key_values.0.key``,
            ``present.0.key``) or those of ``transformers.exporters`` (``input.past_key_values.layers.0.keys``).
        seed: Of the example tokens.

    Raises:
        InputError: If the model cannot be called so, or transformers is too old for an export with a cache.

    Examples:
        >>> from htp_export.huggingface import load_model
        >>> tiny = {"vocab_size": 32, "n_embd": 8, "n_layer": 1, "n_head": 2}
        >>> model = load_model("gpt2", task="text-generation-with-past", random_weights=True, overrides=tiny)
        >>> call = example_call(model)
        >>> call.input_names
        ('input_ids', 'past_key_values.0.key', 'past_key_values.0.value', 'attention_mask', 'position_ids')
        >>> call.output_names
        ('logits', 'present.0.key', 'present.0.value')
        >>> call.axes["present.0.key"]
        {0: 'batch_size', 2: 'past_sequence_length + sequence_length'}
    """
    _, has_cache = split_task(task)
    if not has_cache:
        kwargs = _text(model, _PAST + _NEW, seed)
        return _described(task, model, kwargs, {"forward": kwargs}, cache_names)
    let_torch_export_see_caches(model)
    prefill, decode = _cached_calls(model, seed)
    return _described(task, model, decode, {"prefill": prefill, "decode": decode}, cache_names)


def _cached_calls(model: nn.Module, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments with an empty cache, and arguments with a cache in which tokens are."""
    if "past_key_values" not in named_parameters(model):
        raise InputError(f"{type(model).__name__} takes no past_key_values; choose a task without -with-past")
    whole = _text(model, _PAST + _NEW, seed)
    first = {name: value[:, :_PAST] for name, value in whole.items()}
    cache = empty_cache(model)
    _run(model, _ordered(model, {**first, "past_key_values": cache}))
    rest = {name: value if name == "attention_mask" else value[:, _PAST:] for name, value in whole.items()}
    prefill = _ordered(model, {**first, "past_key_values": emptied(cache)})
    return prefill, _ordered(model, {**rest, "past_key_values": cache})


def _text(model: nn.Module, length: int, seed: int) -> dict[str, Any]:
    """Tokens, their mask and their positions, as far as the model takes them.

    One token of the last text is masked. It is not the first: a token that may look at no token at all has no defined
    result, and kernels differ in it.
    """
    import torch

    taken = named_parameters(model)
    ids = example_inputs(model, shapes={"input_ids": [_BATCH, length]}, seed=seed)["input_ids"]
    mask = torch.ones_like(ids)
    mask[-1, 1] = 0
    positions = mask.cumsum(-1) - 1
    made = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    return _ordered(model, {name: value for name, value in made.items() if name in taken})


def _ordered(model: nn.Module, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in named_parameters(model) if name in kwargs}


def _run(model: nn.Module, kwargs: dict[str, Any]) -> Any:
    import torch

    with torch.no_grad():
        return model(**kwargs)


def _described(
    task: str, model: nn.Module, kwargs: dict[str, Any], runs: Mapping[str, dict[str, Any]], cache_names: CacheNames
) -> ExampleCall:
    """A call with the names of its inputs and outputs, as the model returns them."""
    inputs = named_leaves_of(kwargs)
    outputs = named_leaves_of(_run(model, copy.deepcopy(kwargs)))
    has_cache = "past_key_values" in kwargs
    if has_cache and not any(path.startswith("past_key_values.") for path in outputs):
        problem = "its config has use_cache=False, or it uses a cache of its own"
        raise InputError(f"{type(model).__name__} returns no past_key_values: {problem}")
    input_axes = {path: _input_axes(path, tensor, has_cache) for path, tensor in inputs.items()}
    output_axes = {path: _output_axes(path, tensor) for path, tensor in outputs.items()}
    ins, outs = _names(inputs, outputs, cache_names)
    axes = {ins[path]: dims for path, dims in input_axes.items()}
    axes |= {outs[path]: dims for path, dims in output_axes.items()}
    shapes: dict[str, Any] = {name: input_axes.get(name) for name in kwargs}
    if has_cache:
        shapes["past_key_values"] = [dims for path, dims in input_axes.items() if path.startswith("past_key_values.")]
    return ExampleCall(task, model, kwargs, shapes, tuple(ins.values()), tuple(outs.values()), axes, runs)


def _names(
    inputs: Mapping[str, Any], outputs: Mapping[str, Any], cache_names: CacheNames
) -> tuple[dict[str, str], dict[str, str]]:
    """Path → name, of inputs and of outputs."""
    if cache_names == "optimum":
        ins = {path: leaf_name(path, "past_key_values") for path in inputs}
        return ins, {path: leaf_name(path, "present") for path in outputs}
    from transformers.exporters.utils import disambiguate_io_names

    named_in, named_out = disambiguate_io_names(list(inputs), list(outputs))
    return dict(zip(inputs, named_in, strict=True)), dict(zip(outputs, named_out, strict=True))


def _input_axes(path: str, tensor: torch.Tensor, has_cache: bool) -> dict[int, str]:
    if path.startswith("past_key_values."):
        return {0: "batch_size", 2: "past_sequence_length"}
    if path == "attention_mask" and has_cache:
        return {0: "batch_size", 1: _TOTAL_AXIS}
    return _AXES[path]


def _output_axes(path: str, tensor: torch.Tensor) -> dict[int, str]:
    if path.startswith("past_key_values."):
        return {0: "batch_size", 2: _TOTAL_AXIS}
    return _AXES.get(path, {0: "batch_size"})
