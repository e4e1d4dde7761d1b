"""Rounding of weights to integers: levels, scales and zero points, as quantizers compute them.

A scheme is a name and its numbers, the setting of the step ``round`` of a recipe (``docs/format.md``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from htp_export.extras import required
from htp_export.format.recipes import NO_AXIS
from htp_export.model.graph_facts import Array

_LARGEST, _MIDDLE = 127, 128  # of int8 with a symmetric range; the zero point of uint8


def rounded(weight: Array, scheme: list[Any]) -> Array:
    """Return one part of a rounded weight: its levels, its scales or its zero points.

    Args:
        weight: The weight, in floats.
        scheme: ``[part, "linear", element type, axis, symmetric, reduced]``: ONNX Runtime's
            quantizer, with one scale, or one for each index of an axis. ``[part, "channels",
            axis]``: ours for convolutions. ``[part, "rows", bits, block size, symmetric]``: blocks
            of the rows of a table, ours with 8 bits, ONNX Runtime's with 4.

    Examples:
        >>> rounded(np.float32([-1.0, 0.5]), ["levels", "linear", "int8", -1, 1, 0]).tolist()
        [-127, 64]
    """
    part, kind, *numbers = scheme
    return np.asarray(_SCHEMES[kind](weight, part, *numbers))


def rounded_bias(bias: Array, weight: Array, scheme: list[Any]) -> Array:
    """Return a part of a bias in int32; its scales are the scale of the input times the scales of the weight.

    Args:
        bias: The bias, in floats.
        weight: The weight of the same operator.
        scheme: ``[part, scale of the input, "linear", ...]``, the rest as for `rounded`.
    """
    part, scale, *rest = scheme
    scales = rounded(weight, ["scales", *rest]).reshape(-1)
    made = np.asarray(np.array([scale], bias.dtype) * scales)
    if part == "scales":
        return made
    levels = np.round(bias.astype(np.float64) / made.astype(np.float64))
    limits = np.iinfo(np.int32)
    return np.asarray(np.clip(levels, limits.min, limits.max).astype(np.int32).reshape(bias.shape))


def _linear(weight: Array, part: str, kind: str, axis: int, symmetric: int, reduced: int) -> Array:
    """Round as ONNX Runtime's quantizer does (``quant_utils.quantize_data``)."""
    tools = required("onnxruntime.quantization.quant_utils", "rounding to integers")

    onnx_type = int(ir.DataType[kind.upper()])
    channels = (
        [weight] if axis == NO_AXIS else [weight.take(k, axis) for k in range(weight.shape[axis])]
    )
    found = [
        tools.compute_data_quant_params(each.flatten(), onnx_type, bool(symmetric), bool(reduced))
        for each in channels
    ]
    if part == "scales":
        scales = np.array([scale for _, scale in found], weight.dtype)
        return scales.reshape(()) if axis == NO_AXIS else scales
    if part == "zero_points":
        points = _typed(np.array([point for point, _ in found]), kind)
        return points.reshape(()) if axis == NO_AXIS else points
    levels = [
        _typed(tools.quantize_nparray(onnx_type, each.flatten(), scale, point), kind)
        for each, (point, scale) in zip(channels, found, strict=True)
    ]
    if axis == NO_AXIS:
        return levels[0].reshape(weight.shape)
    ones = [1 if place == axis else size for place, size in enumerate(weight.shape)]
    return np.asarray(np.concatenate([each.reshape(ones) for each in levels], axis))


def _typed(array: Any, kind: str) -> Array:
    return np.asarray(array).astype(ir.DataType[kind.upper()].numpy())


def _channels(weight: Array, part: str, axis: int) -> Array:
    """Round to symmetric int8, with one scale for each index of an axis."""
    others = tuple(place for place in range(weight.ndim) if place != axis)
    largest: Array = np.abs(weight).max(axis=others)
    scales = np.where(largest == 0, 1, largest / _LARGEST).astype(weight.dtype)
    if part == "scales":
        return scales
    if part == "zero_points":
        return np.zeros(scales.shape, np.int8)
    wide = np.round(weight.astype(np.float32) / np.expand_dims(scales, others))
    return np.asarray(np.clip(wide, -_LARGEST, _LARGEST).astype(np.int8))


def _rows(weight: Array, part: str, bits: int, size: int, symmetric: int) -> Array:
    """Round blocks of the rows of a table, each with a scale and a zero point."""
    if bits == 4:
        return _rows_of_four_bits(weight, part, size, bool(symmetric))
    columns = weight.shape[1]
    starts = np.arange(0, columns, size)
    array = weight.astype(np.float32)
    least, most = (each.reduceat(array, starts, axis=1) for each in (np.minimum, np.maximum))
    if symmetric:
        most = np.maximum(np.abs(least), np.abs(most)) * (2 * _MIDDLE - 1) / _LARGEST / 2
        least = -most
    else:
        least, most = np.minimum(least, 0), np.maximum(most, 0)
    width = (most - least) / (2 * _MIDDLE - 1)
    scales = np.where(width == 0, 1, width).astype(weight.dtype)
    if part == "scales":
        return scales
    if symmetric:
        points = np.full(scales.shape, _MIDDLE, np.uint8)
    else:
        points = _in_bytes(-least / scales)
    if part == "zero_points":
        return points
    spread, shift = (np.repeat(each, size, axis=1)[:, :columns] for each in (scales, points))
    return _in_bytes(array / spread + shift)


def _in_bytes(levels: Array) -> Array:
    return np.clip(np.round(levels), 0, 2 * _MIDDLE - 1).astype(np.uint8)


def _rows_of_four_bits(weight: Array, part: str, size: int, symmetric: bool) -> Array:
    """Round as ONNX Runtime's quantizer of tables does; a byte contains two numbers."""
    tools = required("onnxruntime.quantization.matmul_nbits_quantizer", "rounding to 4 bits")
    quantizer = tools.DefaultWeightOnlyQuantizer
    packed, scales, points = quantizer.quantize_ndarray(weight, 1, size, symmetric)
    kind = "INT4" if symmetric else "UINT4"
    if part == "scales":
        return np.asarray(scales)
    if part == "levels":
        return _unpacked(packed, weight.shape, kind)
    return _unpacked(points, scales.shape, kind)


def _unpacked(packed: Array, shape: tuple[int, ...], kind: str) -> Array:
    onnx_type = onnx.TensorProto.DataType.Value(kind)
    proto = onnx.helper.make_tensor("", onnx_type, shape, packed.tobytes(), True)
    return np.asarray(ir.serde.deserialize_tensor(proto).numpy())


_SCHEMES: Mapping[str, Any] = {"linear": _linear, "channels": _channels, "rows": _rows}


def linear_schemes(weight: Array, kind: str, scales: int) -> Iterator[list[Any]]:
    """Return the schemes of ONNX Runtime's quantizer with this number of scales, without the part."""
    axes = [NO_AXIS] if scales == 1 else []
    axes += [axis for axis, size in enumerate(weight.shape) if size == scales and size > 1]
    for axis in axes:
        for symmetric in (1, 0):
            for reduced in (0, 1):
                yield ["linear", kind, axis, symmetric, reduced]
