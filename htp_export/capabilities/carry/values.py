"""Evidence by values: both models run once on the same inputs, and tensors with equal values match.

It is the last evidence, and independent of all others. Tensors with few different numbers (masks, constants, zeros)
match nothing, and a tensor that equals several matches all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.carry.graph_summary import GraphSummary
from htp_export.runtime.arrays import PORTION_BYTES, Array, ArrayStore, StoredArray
from htp_export.runtime.bound_shapes import infer_bound
from htp_export.runtime.comparing import TOLERANCES
from htp_export.runtime.inputs import Inputs
from htp_export.runtime.runner import Runner, portions
from htp_export.runtime.sessions import SessionSettings
from htp_export.shapes.operator_kinds import base_op

__all__ = ["equal_values", "tensors_of_run"]

_FEWEST = 4  # different numbers; tensors with fewer, such as masks, are equal by chance
_LOOKED_AT = 64  # elements, before two tensors are compared in full

Kind = tuple[str, tuple[int, ...]]


def equal_values(
    before: tuple[ir.Model, GraphSummary],
    after: tuple[ir.Model, GraphSummary],
    inputs: Mapping[str, Any],
    portion_bytes: int = PORTION_BYTES,
) -> dict[int, tuple[int, ...]]:
    """Run both models on the same inputs, and find tensors of one in the other.

    Args:
        before: The original model and its summary.
        after: The result of the tool and its summary.
        inputs: Input name of ``before`` → array.
        portion_bytes: Bytes of tensors that are outputs of one run, as far as their sizes are known; and of original
            tensors that stay in memory. The others go to temporary files.

    Returns:
        Value after → values before with the same dtype, shape and numbers, within rounding. Only values of the main
        graphs that depend on the inputs, and not those with fewer than four different numbers in them.

    Raises:
        InputError: If the inputs are not those of the models, or ONNX Runtime cannot run one of them.
    """
    feed = Inputs.of(before[0]).feed(inputs)
    again = Inputs.of(after[0]).feed_again(feed.arrays)
    with ArrayStore.opened(portion_bytes) as store:
        known: dict[Kind, _Known] = {}
        for index, array in tensors_of_run(*before, feed.arrays, "the model before", portion_bytes):
            if _is_distinctive(array):
                known.setdefault(_kind(array), _Known()).add(index, store.keep(array))
        matches = {}
        for index, array in tensors_of_run(*after, again.arrays, "the model after", portion_bytes):
            same = known.get(_kind(array))
            equal = same.equal(array) if same is not None and _is_distinctive(array) else ()
            if equal:
                matches[index] = equal
    return matches


class _Known:
    """Tensors of one dtype and shape."""

    def __init__(self) -> None:
        self._indices: list[int] = []
        self._held: list[StoredArray] = []
        self._samples: list[Array] = []

    def add(self, index: int, held: StoredArray) -> None:
        self._indices.append(index)
        self._held.append(held)
        self._samples.append(_sample(held.array))

    def equal(self, array: Array) -> tuple[int, ...]:
        """Those with the values of ``array``."""
        sample, limit = _sample(array), _rounding(array)
        near = np.flatnonzero(_close(np.stack(self._samples), sample, limit).all(axis=1))
        return tuple(self._indices[k] for k in near if bool(_close(self._held[k].array, array, limit).all()))


def _kind(array: Array) -> Kind:
    return str(array.dtype), array.shape


def _sample(array: Array) -> Array:
    flat = array.reshape(-1)
    return flat[:: max(1, flat.size // _LOOKED_AT)]


def _is_distinctive(array: Array) -> bool:
    """Whether an array has so many different numbers that another one is not equal by chance."""
    if array.size < _FEWEST or array.dtype.kind in "OUS":
        return False
    return len(np.unique(_sample(array))) >= _FEWEST or len(np.unique(array)) >= _FEWEST


def _rounding(array: Array) -> float:
    """The rounding error of kernels that sum in other orders: a part of the root mean square."""
    tolerance = TOLERANCES.get(str(array.dtype))
    if tolerance is None:
        return 0.0
    numbers = np.abs(array.astype(np.complex128 if array.dtype.kind == "c" else np.float64))
    finite = numbers[np.isfinite(numbers)]
    return tolerance.relative * math.sqrt(float(np.square(finite).mean())) if finite.size else 0.0


def _close(first: Array, second: Array, limit: float) -> Array:
    if not limit:
        return np.asarray((first == second) | ((first != first) & (second != second)))
    wide = np.complex128 if first.dtype.kind == "c" else np.float64
    return np.isclose(first.astype(wide), second.astype(wide), rtol=0.0, atol=limit, equal_nan=True)


def tensors_of_run(
    model: ir.Model, summary: GraphSummary, feed: Mapping[str, Array], name: str, portion_bytes: int
) -> Iterator[tuple[int, Array]]:
    """Run a model, and yield its tensors with their places in its summary, each once.

    Args:
        model: The model.
        summary: Its summary.
        feed: Input name → array.
        name: Its name in errors.
        portion_bytes: Bytes of tensors that are outputs of one run, as far as their sizes are known.

    Raises:
        InputError: If ONNX Runtime cannot run it.
    """
    sizes: dict[str, int | None] = {}
    known = infer_bound(model, {name: array.shape for name, array in feed.items()})
    bytes_of = {value.name: known.bytes_of(value) for node in model.graph for value in node.outputs}
    for index, value in enumerate(summary.values):
        if value.scope or not value.name or not summary.live[index]:
            continue
        if value.kind == "input":
            yield index, feed[value.name]
        elif value.kind == "node" and _gives_tensors(summary.nodes[summary.maker[index]].op):
            sizes[value.name] = bytes_of.get(value.name)
    largest = max((size for size in sizes.values() if size is not None), default=0)
    runner = Runner(model, name, SessionSettings())
    for wanted in portions(
        {tensor: largest if size is None else size for tensor, size in sizes.items()}, portion_bytes
    ):
        arrays = runner.run(feed, wanted)
        for tensor in wanted:
            yield summary.find(tensor), arrays.pop(tensor)


def _gives_tensors(op: str) -> bool:
    """Whether an operator gives tensors; sequences and optionals have no values to compare."""
    return not base_op(op).startswith(("Sequence", "SplitToSequence", "Optional"))
