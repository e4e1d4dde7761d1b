"""Products in 8-bit floats (E4M3) with measured ranges, by QuantizeLinear and DequantizeLinear.

The largest value of a range becomes 448, the largest of the type, as in ModelOpt and TensorRT
(https://arxiv.org/abs/2209.05433). Results of products are not quantized: engines accumulate in a
wider type.

Activations have no zero point, and QuantizeLinear has its type as an attribute: with a zero point,
ONNX Runtime removes a Relu in front of it (`htp_export.runtime.faulty_optimizers`).
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.quantize.method import Made
from htp_export.capabilities.quantize.methods.static import Static, channel_axis
from htp_export.capabilities.quantize.work import Facts, Work
from htp_export.editing.editing import add_initializer
from htp_export.editing.submodels import Submodel, constant_of
from htp_export.files.filesystem import temporary_folder
from htp_export.files.model_files import write_for_tool
from htp_export.format.recipes import step
from htp_export.model.recipes import recipe_of
from htp_export.runtime.arrays import Array

_TYPE = ir.DataType.FLOAT8E4M3FN
_LARGEST = 448.0
"""The largest finite value of float8e4m3fn."""

_FIRST = 21
"""The first opset in which QuantizeLinear has the attribute ``output_dtype``."""

_FACTORS = 2
"""The first inputs of a product, which are quantized; its bias stays."""

_PRODUCTS = frozenset(("MatMul", "Gemm", "Conv"))


class Float8(Static):
    """Products read floats of 8 bits."""

    activations = ("float8e4m3fn",)
    weights = ("float8e4m3fn",)
    with_producer = frozenset[str]()
    multiplies_integers = False

    def check(self) -> None:
        """Nothing to check: floats have a sign, and zero is always the middle of the range."""

    @property
    def first_opset(self) -> int:
        return _FIRST

    def takes(self, node: ir.Node, facts: Facts) -> bool:
        """Whether it is a product of floats that are not dequantized from 8-bit floats already."""
        if node.domain or node.op_type not in _PRODUCTS or not facts.has_floats(node):
            return False
        sources = facts.dequantized(node)
        dtypes = [None if value is None else facts.dtypes.get(value) for value in sources]
        return dtypes != [_TYPE] * _FACTORS

    def bytes_of(
        self, node: ir.Node, place: int, tensor: ir.TensorProtocol, facts: Facts
    ) -> int | None:
        if place >= _FACTORS:
            return None
        # a scale in float32 and a zero point of one byte for each channel
        return math.prod(tensor.shape.numpy()) + 5 * self.channels(node, place)

    def channels(self, node: ir.Node, place: int = 1) -> int:
        if place != 1:
            return 0
        return self.scales_along(channel_axis(node), constant_of(node.inputs[place]))

    def shared_by(self, node: ir.Node, place: int) -> Hashable:
        if place >= _FACTORS:
            return None
        return "axis", channel_axis(node) if self.channels(node, place) else None

    def ranged(self, node: ir.Node) -> Sequence[ir.Value | None]:
        return node.inputs[:_FACTORS]

    def quantize(self, part: Submodel, work: Work) -> Made:
        with temporary_folder() as folder:
            file = folder / "part.onnx"
            write_for_tool(part.model, file)
            ranges = self.ranges(part, file, work, {})
        left = self.immeasurable(part, ranges)
        largest = {
            name: np.abs(np.asarray(bounds, np.float64)).max()
            for name, bounds in ranges.bounds.items()
        }
        self._write(part.model.graph, largest, left)
        return Made(part.model, left)

    def _write(self, graph: ir.Graph, largest: dict[str, float], left: Container[str]) -> None:
        """Quantize the inputs of the nodes that are not left, in place, each tensor once."""
        quantized: dict[tuple[ir.Value, int | None], ir.Value] = {}
        for node in [node for node in graph if node.name not in left]:
            for place, value in enumerate(node.inputs[:_FACTORS]):
                assert value is not None
                tensor = constant_of(value)
                if tensor is not None:
                    largest[str(value.name)] = float(np.abs(tensor.numpy()).max(initial=0))
                axis = channel_axis(node) if place == 1 and self.channels(node) else None
                if (value, axis) not in quantized:
                    quantized[value, axis] = _quantized(graph, node, value, axis, largest)
                node.replace_input_with(place, quantized[value, axis])


METHOD = Float8


def _quantized(
    graph: ir.Graph,
    reader: ir.Node,
    value: ir.Value,
    axis: int | None,
    largest: Mapping[str, float],
) -> ir.Value:
    """Insert QuantizeLinear and DequantizeLinear of a value before its first consumer.

    A weight is stored quantized, and gets a DequantizeLinear alone. ``axis`` of a weight is the one
    along which each element has its own scale; None for a single scale.
    """
    tensor = constant_of(value)
    array = np.asarray(largest[str(value.name)]) if tensor is None else np.asarray(tensor.numpy())
    reduced = None
    if axis is not None:
        reduced = tuple(other for other in range(array.ndim) if other != axis % array.ndim)
    measured = np.abs(array).max(reduced, keepdims=True, initial=0) / _LARGEST
    # a scale of 1 for zeros
    scale = np.where(measured > np.finfo(np.float32).tiny, measured, 1).astype(np.float32)
    scales = scale.reshape(() if axis is None else -1)
    sources = [] if tensor is None else [recipe_of(value)]
    recipe = step("computed", *sources, "quantized")

    def constant(array: Array, end: str) -> ir.Value:
        return add_initializer(graph, ir.Tensor(np.asarray(array)), f"{value.name}_{end}", recipe)

    def insert(op_type: str, inputs: Sequence[ir.Value], to: ir.DataType, **given: int) -> ir.Value:
        node = ir.node(op_type, inputs, given, name=f"{value.name}_{op_type}")
        [result] = node.outputs
        result.name = f"{node.name}_output"
        result.type, result.shape = ir.TensorType(to), value.shape
        graph.insert_before(reader, node)
        return result

    scale_value = constant(scales, "scale")
    if tensor is None:
        narrow = insert("QuantizeLinear", [value, scale_value], _TYPE, output_dtype=int(_TYPE))
        return insert("DequantizeLinear", [narrow, scale_value], ir.DataType.FLOAT)
    zero_point = constant(np.zeros(scales.shape, _TYPE.numpy()), "zero_point")
    rounded = np.clip(array / scale, -_LARGEST, _LARGEST).astype(_TYPE.numpy())
    stored = [constant(rounded, "quantized"), scale_value, zero_point]
    if axis is None:
        return insert("DequantizeLinear", stored, ir.DataType.FLOAT)
    return insert("DequantizeLinear", stored, ir.DataType.FLOAT, axis=axis)
