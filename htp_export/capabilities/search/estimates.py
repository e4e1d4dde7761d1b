"""How much a precision changes the results of a module, estimated from its weights and inputs: nothing is quantized."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from htp_export.model.tagged import TaggedModel
from htp_export.runtime.arrays import Array
from htp_export.weights.products import Product, products_of

if TYPE_CHECKING:
    from htp_export.capabilities.quantize.method import Precision
    from htp_export.runtime.data import Samples


def estimated_errors(
    tagged: TaggedModel,
    paths: Sequence[str],
    precisions: Iterable[Precision],
    samples: Samples,
) -> dict[tuple[str, str], float]:
    """Module path and precision → the error that rounding its weights makes in its results.

    For each product in any region of the module, the sum of the squared changes of its weights times the mean square of
    its inputs is the expected squared change of its results, if the elements of the inputs are independent. This is
    divided by the square of the results, so that it compares with ``Deviation.error``. Products of a module add up. For
    a table that is looked up, it is the change of the table divided by its square. The model, without functions, runs
    once on each of the samples.
    """
    uses: dict[str, list[Product]] = {path: [] for path in paths}
    read: dict[ir.Value, None] = {}
    for use in products_of(tagged, tagged.nodes):
        for path in {"", *tagged.index.works[use.node].modules}.intersection(uses):
            uses[path].append(use)
            read.update(dict.fromkeys(_values_of(use)))
    squares = _mean_squares(tagged, list(read), samples)
    errors: dict[tuple[Product, str], float] = {}
    found = {}
    for precision in precisions:
        for path in paths:
            for use in uses[path]:
                if (use, precision.name) not in errors:
                    errors[use, precision.name] = _relative_change(use, precision, squares)
            found[path, precision.name] = sum(errors[use, precision.name] for use in uses[path])
    return found


def _values_of(use: Product) -> tuple[ir.Value, ...]:
    """The value that a weight is multiplied with, and the result; nothing for a table."""
    return () if use.activation is None else (use.activation, use.node.outputs[0])


def _mean_squares(tagged: TaggedModel, values: Sequence[ir.Value], samples: Samples) -> dict[ir.Value, float]:
    """The mean squares of tensors of the main graph."""
    from htp_export.capabilities.quantize.calibration_data import activations

    known = {*tagged.model.graph.inputs, *(value for node in tagged.model.graph for value in node.outputs)}
    read = {str(value.name): value for value in values if value in known}
    sums, counts = dict.fromkeys(read.values(), 0.0), dict.fromkeys(read.values(), 0)
    with activations(tagged.model, "the model", samples, list(read)) as runs:
        for arrays in runs:
            for name, array in arrays.items():
                sums[read[name]] += float(np.square(np.asarray(array, np.float64)).sum())
                counts[read[name]] += array.size
    return {value: sums[value] / counts[value] if counts[value] else 0.0 for value in sums}


def _relative_change(use: Product, precision: Precision, squares: Mapping[ir.Value, float]) -> float:
    assert use.value.const_value is not None
    weight = np.asarray(use.value.const_value.numpy(), np.float32)
    wide = weight.astype(np.float64)
    change = float(np.square(wide - rounded(weight, precision, use.reduced, use.channels)).sum())
    values = _values_of(use)
    if not values:
        whole = float(np.square(wide).sum())
        return change / whole if whole else 0.0
    multiplied, result = (squares.get(value, 0.0) for value in values)
    return change / weight.shape[use.channels] * multiplied / result if result else 0.0


def rounded(weight: Array, precision: Precision, reduced: int = 0, channels: int = -1) -> Array:
    """A weight as a precision represents it; ``reduced``: the axis that is cut into blocks, ``channels``: of results.

    Examples:
        >>> from htp_export.capabilities.quantize.precisions import PRECISIONS
        >>> rounded(np.float32([[127.0, -5.4], [30.2, 254.0]]), PRECISIONS["int8"]).tolist()
        [[127.0, -6.0], [30.0, 254.0]]
    """
    if precision.is_kept or not weight.size:
        return weight
    if precision.method == "cast":
        import ml_dtypes

        kind = np.float16 if precision.weight == "float16" else ml_dtypes.bfloat16
        return np.asarray(weight.astype(kind), np.float32)
    if precision.method == "weights":
        return _in_blocks(weight, precision, reduced % weight.ndim)
    bits = precision.bits - (1 if precision.reduce_range and precision.bits == 8 else 0)
    axes = tuple(axis for axis in range(weight.ndim) if not precision.per_channel or axis != channels % weight.ndim)
    scale = np.abs(weight).max(axis=axes, keepdims=True) / (2 ** (bits - 1) - 1)
    return _scaled(weight, scale, bits)


def _in_blocks(weight: Array, precision: Precision, axis: int) -> Array:
    moved = np.moveaxis(weight, axis, -1)
    length = moved.shape[-1]
    padding = [(0, 0)] * (moved.ndim - 1) + [(0, -length % precision.block_size)]
    blocks = np.pad(moved, padding).reshape(*moved.shape[:-1], -1, precision.block_size)
    if precision.symmetric:
        scale = np.abs(blocks).max(axis=-1, keepdims=True) / (2 ** (precision.bits - 1))
        found = _scaled(blocks, scale, precision.bits)
    else:
        low = np.minimum(blocks.min(axis=-1, keepdims=True), 0)
        scale = (np.maximum(blocks.max(axis=-1, keepdims=True), 0) - low) / (2**precision.bits - 1)
        scale = np.where(scale > 0, scale, 1)
        zero = np.round(-low / scale)
        found = (np.clip(np.round(blocks / scale) + zero, 0, 2**precision.bits - 1) - zero) * scale
    restored = found.reshape(*moved.shape[:-1], -1)[..., :length]
    return np.moveaxis(restored, -1, axis)


def _scaled(weight: Array, scale: Array, bits: int) -> Array:
    scale = np.where(scale > 0, scale, 1)
    half = 2 ** (bits - 1)
    return np.asarray(np.clip(np.round(weight / scale), -half, half - 1) * scale)
