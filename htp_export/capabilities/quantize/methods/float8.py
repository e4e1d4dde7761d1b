"""Products in floats of 8 bits, E4M3, with ranges measured ahead: QuantizeLinear and DequantizeLinear at their inputs.

The largest value of a range becomes 448, the largest of the type, as ModelOpt and TensorRT do
(https://arxiv.org/abs/2209.05433). What products make is not quantized: engines add up in a wider
type.

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
_LARGEST = 448.0  # of float8e4m3fn
_FIRST = 21  # opset with the attribute output_dtype
_READ = 2  # inputs of a product; its bias stays
_PRODUCTS = frozenset(("MatMul", "Gemm", "Conv"))


class Float8(Static):
    """Products read floats of 8 bits."""

    activations = ("float8e4m3fn",)
    weights = ("float8e4m3fn",)
    with_producer = frozenset[str]()
    multiplies_integers = False

    def check(self) -> None:
        """Floats have a sign, and no other middle than zero."""

    @property
    def first_opset(self) -> int:
        return _FIRST

    def takes(self, node: ir.Node, facts: Facts) -> bool:
        """Whether it is a product of floats that were no floats of 8 bits before."""
        if node.domain or node.op_type not in _PRODUCTS or not facts.has_floats(node):
            return False
        before = [
            None if value is None else facts.dtypes.get(value) for value in facts.dequantized(node)
        ]
        return before != [_TYPE] * _READ

    def bytes_of(
        self, node: ir.Node, place: int, tensor: ir.TensorProtocol, facts: Facts
    ) -> int | None:
        if place >= _READ:
            return None
        return math.prod(tensor.shape.numpy()) + 5 * self.channels(node, place)

    def channels(self, node: ir.Node, place: int = 1) -> int:
        return (
            self.scales_along(channel_axis(node), constant_of(node.inputs[place]))
            if place == 1
            else 0
        )

    def shared_by(self, node: ir.Node, place: int) -> Hashable:
        return (
            ("axis", channel_axis(node) if self.channels(node, place) else None)
            if place < _READ
            else None
        )

    def ranged(self, node: ir.Node) -> Sequence[ir.Value | None]:
        return node.inputs[:_READ]

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
        """Quantize the inputs of products, in place, each tensor once, but for nodes that are left."""
        made: dict[tuple[ir.Value, int | None], ir.Value] = {}
        for node in [node for node in graph if node.name not in left]:
            for place, value in enumerate(node.inputs[:_READ]):
                assert value is not None
                if (tensor := constant_of(value)) is not None:
                    largest[str(value.name)] = float(np.abs(tensor.numpy()).max(initial=0))
                axis = channel_axis(node) if place == 1 and self.channels(node) else None
                if (value, axis) not in made:
                    made[value, axis] = _quantized(graph, node, value, axis, largest)
                node.replace_input_with(place, made[value, axis])


METHOD = Float8


def _quantized(
    graph: ir.Graph,
    reader: ir.Node,
    value: ir.Value,
    axis: int | None,
    largest: Mapping[str, float],
) -> ir.Value:
    """A value in the type and back, before its first reader; of a weight, the way there is gone ahead.

    ``axis``: that of a weight along which each element has its own scale; None for one scale.
    """
    tensor = constant_of(value)
    array = np.asarray(largest[str(value.name)]) if tensor is None else np.asarray(tensor.numpy())
    others = None if axis is None else tuple(k for k in range(array.ndim) if k != axis % array.ndim)
    measured = np.abs(array).max(others, keepdims=True, initial=0) / _LARGEST
    # zeros have some scale
    scale = np.where(measured > np.finfo(np.float32).tiny, measured, 1).astype(np.float32)
    scales = scale.reshape(() if axis is None else -1)
    recipe = step("computed", *([] if tensor is None else [recipe_of(value)]), "quantized")

    def constant(array: Array, end: str) -> ir.Value:
        return add_initializer(graph, ir.Tensor(np.asarray(array)), f"{value.name}_{end}", recipe)

    def made(op_type: str, read: ir.Value, to: ir.DataType, **attributes: int) -> ir.Value:
        node = ir.node(op_type, [read, *by], attributes, name=f"{value.name}_{op_type}")
        [result] = node.outputs
        result.name, result.type, result.shape = (
            f"{node.name}_output",
            ir.TensorType(to),
            value.shape,
        )
        graph.insert_before(reader, node)
        return result

    by = [constant(scales, "scale")]
    if tensor is None:
        narrow = made("QuantizeLinear", value, _TYPE, output_dtype=int(_TYPE))
        return made("DequantizeLinear", narrow, ir.DataType.FLOAT)
    by.append(constant(np.zeros(scales.shape, _TYPE.numpy()), "zero_point"))
    narrow = constant(
        np.clip(array / scale, -_LARGEST, _LARGEST).astype(_TYPE.numpy()), "quantized"
    )
    return made(
        "DequantizeLinear", narrow, ir.DataType.FLOAT, **({} if axis is None else {"axis": axis})
    )
