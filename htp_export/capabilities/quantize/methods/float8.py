"""Products in floats of 8 bits, E4M3, with ranges measured ahead: QuantizeLinear and DequantizeLinear at their inputs.

The largest value of a range becomes 448, the largest of the type, as ModelOpt and TensorRT do (https://arxiv.org/abs/2209.05433).
What products make is not quantized: engines add up in a wider type.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.quantize.methods.static import Static, is_divisible
from htp_export.capabilities.quantize.work import Facts, Work
from htp_export.editing.editing import add_initializer
from htp_export.editing.submodels import Submodel, constant_of
from htp_export.files.filesystem import temporary_folder
from htp_export.files.model_files import write_for_tool
from htp_export.format.recipes import step
from htp_export.model.recipes import recipe_of
from htp_export.runtime.arrays import Array
from htp_export.weights.products import weight_axes

_TYPE = ir.DataType.FLOAT8E4M3FN
_LARGEST = 448.0  # of float8e4m3fn
_FIRST = 19  # opset
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
        return not node.domain and node.op_type in _PRODUCTS and facts.has_floats(node)

    def bytes_of(self, node: ir.Node, place: int, tensor: ir.TensorProtocol, facts: Facts) -> int | None:
        if place > 1:
            return None
        channels = self.channels(node) if place == 1 else 0
        return math.prod(tensor.shape.numpy()) + 5 * channels

    def quantize(self, part: Submodel, work: Work) -> tuple[ir.Model, str]:
        with temporary_folder() as folder:
            file = folder / "part.onnx"
            write_for_tool(part.model, file)
            ranges = self._ranges(part, file, sorted(_PRODUCTS), work)
        largest = {name: np.abs(np.asarray(each.range_value, np.float64)).max() for name, each in ranges.items()}
        left = self._write(part.model.graph, largest)
        note = f"{left} nodes stay in fp32: they read values that fill masks and cannot be scaled" if left else ""
        return part.model, note

    def _write(self, graph: ir.Graph, largest: dict[str, float]) -> int:
        """Quantize the inputs of products, in place, each tensor once; the number of nodes that stay as they are."""
        made: dict[tuple[ir.Value, int | None], ir.Value] = {}
        left = 0
        for node in list(graph):
            values = [value for value in node.inputs[:2] if value is not None]
            if not all(_is_bounded(value, largest) for value in values):
                left += 1
                continue
            for place, value in enumerate(values):
                axes = weight_axes(node, place) if place == 1 and self.channels(node) else None
                axis = None if axes is None else axes[1]
                if (value, axis) not in made:
                    made[value, axis] = _quantized(graph, node, value, axis, largest)
                node.replace_input_with(place, made[value, axis])
        return left


METHOD = Float8


def _is_bounded(value: ir.Value, largest: dict[str, float]) -> bool:
    """Whether a value can be scaled; the largest value of a weight is added to those that were measured."""
    if (tensor := constant_of(value)) is not None:
        largest[str(value.name)] = float(np.abs(tensor.numpy()).max(initial=0))
    return is_divisible([largest.get(str(value.name), np.inf)])


def _quantized(
    graph: ir.Graph, reader: ir.Node, value: ir.Value, axis: int | None, largest: Mapping[str, float]
) -> ir.Value:
    """A value in the type and back, before its first reader; of a weight, the way there is gone ahead.

    ``axis``: that of a weight along which each element has its own scale; None for one scale.
    """
    tensor = constant_of(value)
    array = np.asarray(largest[str(value.name)]) if tensor is None else np.asarray(tensor.numpy())
    others = None if axis is None else tuple(k for k in range(array.ndim) if k != axis % array.ndim)
    measured = np.abs(array).max(others, keepdims=True) / _LARGEST
    scale = np.where(measured > np.finfo(np.float32).tiny, measured, 1).astype(np.float32)  # zeros have some scale
    scales = scale.reshape(() if axis is None else -1)
    recipe = step("computed", *([] if tensor is None else [recipe_of(value)]), "quantized")

    def constant(array: Array, end: str) -> ir.Value:
        return add_initializer(graph, ir.Tensor(np.asarray(array)), f"{value.name}_{end}", recipe)

    def made(op_type: str, read: ir.Value, to: ir.DataType) -> ir.Value:
        node = ir.node(op_type, [read, *by], {} if axis is None else {"axis": axis}, name=f"{value.name}_{op_type}")
        [result] = node.outputs
        result.name, result.type, result.shape = f"{node.name}_output", ir.TensorType(to), value.shape
        graph.insert_before(reader, node)
        return result

    by = constant(scales, "scale"), constant(np.zeros(scales.shape, _TYPE.numpy()), "zero_point")
    if tensor is None:
        narrow = made("QuantizeLinear", value, _TYPE)
    else:
        narrow = constant(np.clip(array / scale, -_LARGEST, _LARGEST).astype(_TYPE.numpy()), "quantized")
    return made("DequantizeLinear", narrow, ir.DataType.FLOAT)
