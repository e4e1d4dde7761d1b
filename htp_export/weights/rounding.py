"""Rounding of weights to integers: levels, scales and zero points, as quantizers compute them.

A scheme is a name and its numbers, the setting of the step ``round`` of a recipe (``docs/format.md``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from htp_export.extras import required
from htp_export.format.recipes import NO_AXIS
from htp_export.model.graph_facts import Array
from htp_export.model.strips import in_strips, strips
from htp_export.weights.fixed_point import FixedFormat
from htp_export.weights.microscaling import MX_ELEMENTS, microscaled

_LARGEST, _MIDDLE = 127, 128  # of int8 with a symmetric range; the zero point of uint8


@dataclass(frozen=True)
class Rounding:
    """A rounded weight: its scales, its zero points, and a function that computes its levels."""

    scales: Array
    zero_points: Array
    levels: Callable[[], Array]

    def part(self, name: str) -> Array:
        """Return a part by its name in recipes."""
        if name == "levels":
            return np.asarray(self.levels())
        return np.asarray(self.scales if name == "scales" else self.zero_points)


def rounding(weight: Array, scheme: list[Any]) -> Rounding:
    """Round a weight.

    Args:
        weight: The weight, in floats.
        scheme: ``["linear", element type, axis, symmetric, reduced]``: ONNX Runtime's quantizer,
            with one scale, or one for each index of an axis. ``["channels", axis]``: ours for
            convolutions. ``["rows", bits, block size, symmetric]``: blocks of the rows of a table,
            ours with 8 bits, ONNX Runtime's with 4. ``["fixed", width, fractional bits]``: fixed
            point (`FixedFormat`). ``["mx", type of elements, axis]``: blocks of 32 with scales of
            powers of two (`microscaled`).

    Examples:
        >>> rounding(np.float32([-1.0, 0.5]), ["linear", "int8", -1, 1, 0]).part("levels").tolist()
        [-127, 64]
    """
    kind, *numbers = scheme
    made: Rounding = _SCHEMES[kind](weight, *numbers)
    return made


def dequantized(levels: Array, scales: Array, zero_points: Array, axis: int) -> Array:
    """Return the floats of integers, as DequantizeLinear computes them.

    ``axis``: The axis along which each index has its own scale; ignored for a single scale.

    Examples:
        >>> dequantized(np.int8([4, -2]), np.float32(0.5), np.int8(2), 0)
        array([ 1., -2.], dtype=float32)
    """
    shape: list[int] = []
    if scales.size > 1:
        shape = [1] * levels.ndim
        shape[axis] = scales.size
    points = np.broadcast_to(zero_points, scales.shape).reshape(shape)
    scales = scales.reshape(shape)
    shifted = levels.astype(np.int64) - points.astype(np.int64)
    return np.asarray(shifted.astype(scales.dtype) * scales)


class Roundings:
    """Rounded weights, each rounded once although its parts are stored, and read, one by one.

    Scales and zero points are kept. Of the levels, which are large, only those of the last weight
    are kept, until they are read: files have the parts of a weight one after the other.
    """

    def __init__(self) -> None:
        self._small: dict[str, Rounding] = {}
        self._last: tuple[str, Array] | None = None

    def part(self, weight: str, name: str, compute: Callable[[], Rounding]) -> Array:
        """Return a part of a rounded weight.

        Args:
            weight: A key of the weight and of its scheme.
            name: The part.
            compute: Rounds the weight.
        """
        # One read of each attribute: another thread may replace it.
        known, last = self._small.get(weight), self._last
        if known is not None and name != "levels":
            return known.part(name)
        if last is not None and last[0] == weight and name == "levels":
            self._last = None
            return last[1]
        made = compute()
        levels = made.part("levels")
        self._small[weight] = Rounding(made.scales, made.zero_points, _dropped)
        if name == "levels":
            return levels
        self._last = weight, levels
        return made.part(name)


def _dropped() -> Array:
    raise AssertionError("the levels of a weight are not kept")


def rounded_bias(bias: Array, scales: Array, part: str, scale: float) -> Array:
    """Return a part of a bias in int32; its scales are the scale of the input times those of the weight.

    Args:
        bias: The bias, in floats.
        scales: The scales of the weight of the same operator.
        part: ``"levels"`` or ``"scales"``.
        scale: The scale of the input.
    """
    made = np.asarray(np.array([scale], bias.dtype) * scales.reshape(-1))
    if part == "scales":
        return made
    levels = np.round(bias.astype(np.float64) / made.astype(np.float64))
    limits = np.iinfo(np.int32)
    return np.asarray(np.clip(levels, limits.min, limits.max).astype(np.int32).reshape(bias.shape))


def _linear(weight: Array, kind: str, axis: int, symmetric: int, reduced: int) -> Rounding:
    """Round as ONNX Runtime's quantizer does (``quant_utils.quantize_data``)."""
    tools = required("onnxruntime.quantization.quant_utils", "rounding to integers")

    onnx_type = int(ir.DataType[kind.upper()])
    channels = weight[np.newaxis] if axis == NO_AXIS else np.moveaxis(weight, axis, 0)
    found = [
        tools.compute_data_quant_params(each.reshape(-1), onnx_type, bool(symmetric), bool(reduced))
        for each in channels
    ]
    scales = np.array([scale for _, scale in found], weight.dtype)
    points = _typed(np.array([point for point, _ in found]), kind)

    def levels() -> Array:
        made: Array = np.empty(weight.shape, ir.DataType[kind.upper()].numpy())
        of_channels = made[np.newaxis] if axis == NO_AXIS else np.moveaxis(made, axis, 0)
        for place, (point, scale) in enumerate(found):
            # with the ellipsis, a channel of one number is an array, too, and no copy
            channel, into = channels[place, ...], of_channels[place, ...]
            _round_linear(tools, onnx_type, channel, into, scale, point)
        return made

    if axis == NO_AXIS:
        scales, points = scales.reshape(()), points.reshape(())
    return Rounding(scales, points, levels)


def _round_linear(
    tools: Any, onnx_type: int, channel: Array, into: Array, scale: Any, point: Any
) -> None:
    """Round the numbers of one channel, a few rows at a time."""
    if channel.ndim == 0:
        channel, into = channel[np.newaxis], into[np.newaxis]
    for rows in strips(channel):
        part = channel[rows]
        levels = tools.quantize_nparray(onnx_type, part.reshape(-1), scale, point)
        into[rows] = np.asarray(levels).astype(into.dtype).reshape(part.shape)


def _typed(array: Any, kind: str) -> Array:
    return np.asarray(array).astype(ir.DataType[kind.upper()].numpy())


def _channels(weight: Array, axis: int) -> Rounding:
    """Round to symmetric int8, with one scale for each index of an axis."""
    others = tuple(place for place in range(weight.ndim) if place != axis)
    largest: Array = np.maximum(weight.max(axis=others), -weight.min(axis=others))
    scales = np.where(largest == 0, 1, largest / _LARGEST).astype(weight.dtype)

    def levels() -> Array:
        def of_rows(rows: Array, factors: Array) -> Array:
            wide = np.round(rows.astype(np.float32) / factors)
            return np.asarray(np.clip(wide, -_LARGEST, _LARGEST).astype(np.int8))

        return in_strips(of_rows, np.int8, weight, np.expand_dims(scales, others))

    return Rounding(scales, np.zeros(scales.shape, np.int8), levels)


def _rows(weight: Array, bits: int, size: int, symmetric: int) -> Rounding:
    """Round blocks of the rows of a table, each with a scale and a zero point."""
    if bits == 4:
        return _rows_of_four_bits(weight, size, bool(symmetric))
    columns = weight.shape[1]
    starts = np.arange(0, columns, size)
    array = weight.astype(np.float32, copy=False)
    least, most = (each.reduceat(array, starts, axis=1) for each in (np.minimum, np.maximum))
    if symmetric:
        most = np.maximum(np.abs(least), np.abs(most)) * (2 * _MIDDLE - 1) / _LARGEST / 2
        least = -most
    else:
        least, most = np.minimum(least, 0), np.maximum(most, 0)
    width = (most - least) / (2 * _MIDDLE - 1)
    scales = np.where(width == 0, 1, width).astype(weight.dtype)
    if symmetric:
        points = np.full(scales.shape, _MIDDLE, np.uint8)
    else:
        points = _in_bytes(-least / scales)

    def of_rows(numbers: Array, scales: Array, points: Array) -> Array:
        spread, shift = (np.repeat(each, size, axis=1)[:, :columns] for each in (scales, points))
        return _in_bytes(numbers / spread + shift)

    def levels() -> Array:
        return in_strips(of_rows, np.uint8, array, scales, points)

    return Rounding(scales, points, levels)


def _in_bytes(levels: Array) -> Array:
    return np.clip(np.round(levels), 0, 2 * _MIDDLE - 1).astype(np.uint8)


def _rows_of_four_bits(weight: Array, size: int, symmetric: bool) -> Rounding:
    """Round as ONNX Runtime's quantizer of tables does; a byte contains two numbers."""
    tools = required("onnxruntime.quantization.matmul_nbits_quantizer", "rounding to 4 bits")
    quantizer = tools.DefaultWeightOnlyQuantizer
    # the quantizer holds its weight several times; strips of many rows begin with a whole byte
    made = [quantizer.quantize_ndarray(weight[rows], 1, size, symmetric) for rows in strips(weight)]
    packed = np.concatenate([part[0] for part in made])
    scales = np.concatenate([part[1] for part in made])
    kind = "INT4" if symmetric else "UINT4"
    if symmetric:
        zero_points = np.zeros(scales.shape, ir.DataType.INT4.numpy())
    else:
        points = np.concatenate([part[2] for part in made])
        zero_points = _unpacked(points, scales.shape, kind)

    def levels() -> Array:
        return _unpacked(packed, weight.shape, kind)

    return Rounding(scales, zero_points, levels)


def _unpacked(packed: Array, shape: tuple[int, ...], kind: str) -> Array:
    onnx_type = onnx.TensorProto.DataType.Value(kind)
    proto = onnx.helper.make_tensor("", onnx_type, shape, packed.tobytes(), True)
    return np.asarray(ir.serde.deserialize_tensor(proto).numpy())


def _fixed(weight: Array, width: int, fraction: int) -> Rounding:
    """Round to fixed point, with one scale for all formats of these fractional bits."""
    known = FixedFormat(width, fraction)
    zero = np.zeros((), known.storage.numpy())
    return Rounding(np.asarray(known.scale, weight.dtype), zero, lambda: known.levels(weight))


def _mx(weight: Array, element: str, axis: int) -> Rounding:
    """Round to the numbers of a microscaling format; scales are in float32."""
    known = MX_ELEMENTS[element]
    elements, scales = microscaled(weight, known, axis)
    zeros = np.zeros(scales.shape, known.stored.numpy())
    return Rounding(scales, zeros, lambda: elements.astype(known.stored.numpy()))


_SCHEMES: Mapping[str, Callable[..., Rounding]] = {
    "linear": _linear,
    "channels": _channels,
    "rows": _rows,
    "fixed": _fixed,
    "mx": _mx,
}


def linear_schemes(weight: Array, kind: str, scales: int) -> Iterator[list[Any]]:
    """Return the schemes of ONNX Runtime's quantizer with this number of scales, without the part."""
    axes = [NO_AXIS] if scales == 1 else []
    axes += [axis for axis, size in enumerate(weight.shape) if size == scales and size > 1]
    for axis in axes:
        for symmetric in (1, 0):
            for reduced in (0, 1):
                yield ["linear", kind, axis, symmetric, reduced]
