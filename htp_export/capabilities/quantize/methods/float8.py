"""Products in floats of 8 bits, E4M3, with ranges measured ahead: QuantizeLinear and DequantizeLinear at their inputs.

The largest value of a range becomes 448, the largest of the type, as ModelOpt and TensorRT do (https://arxiv.org/abs/2209.05433).
What products make is not quantized: engines add up in a wider type.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.quantize.method import Method
from htp_export.capabilities.quantize.methods.static import Static, is_divisible
from htp_export.capabilities.quantize.work import Facts, Work
from htp_export.editing.submodels import Submodel, constant_of
from htp_export.files.filesystem import temporary_folder
from htp_export.files.model_files import write_for_tool
from htp_export.model.tensor_names import Names
from htp_export.runtime.arrays import Array
from htp_export.weights.products import weight_axes

_TYPE = ir.DataType.FLOAT8E4M3FN
_LARGEST = 448.0
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

    def shared_by(self, node: ir.Node, place: int) -> Any:
        return Method.shared_by(self, node, place)

    def quantize(self, part: Submodel, work: Work) -> tuple[ir.Model, str]:
        with temporary_folder() as folder:
            file = folder / "part.onnx"
            write_for_tool(part.model, file)
            ranges = self._ranges(part, file, sorted(_PRODUCTS), work)
        largest = {name: np.abs(np.asarray(each.range_value, np.float64)).max() for name, each in ranges.items()}
        left = _Writing(self, part.model, largest).run()
        note = f"{left} nodes stay in fp32: they read values that fill masks and cannot be scaled" if left else ""
        return part.model, note


METHOD = Float8


class _Writing:
    """The inputs of products of a part are quantized, each tensor once."""

    def __init__(self, method: Float8, model: ir.Model, largest: dict[str, float]) -> None:
        self._method, self._graph, self._largest, self._names = method, model.graph, largest, Names(model)
        self._made: dict[tuple[ir.Value, int | None], ir.Value] = {}

    def run(self) -> int:
        """Quantize; the number of nodes that stay."""
        left = 0
        for node in list(self._graph):
            values = [value for value in node.inputs[:2] if value is not None]
            if node.op_type not in _PRODUCTS or not all(map(self._is_bounded, values)):
                left += 1
                continue
            for place, value in enumerate(values):
                axis = self._axis(node, place)
                if (value, axis) not in self._made:
                    self._made[value, axis] = self._quantized(node, value, axis)
                node.replace_input_with(place, self._made[value, axis])
        return left

    def _is_bounded(self, value: ir.Value) -> bool:
        tensor = constant_of(value)
        if tensor is not None:
            self._largest[str(value.name)] = float(np.abs(tensor.numpy()).max(initial=0))
        return is_divisible([self._largest.get(str(value.name), np.inf)])

    def _axis(self, node: ir.Node, place: int) -> int | None:
        """The axis of a weight along which each element has its own scale; None for one scale."""
        axes = weight_axes(node, place)
        return axes[1] if axes is not None and place == 1 and self._method.channels(node) else None

    def _quantized(self, reader: ir.Node, value: ir.Value, axis: int | None) -> ir.Value:
        """A value in the type and back, before its first reader; of a weight, the way there is gone ahead."""
        tensor = constant_of(value)
        if tensor is None:
            read = self._scales(value, _positive(self._largest[str(value.name)] / _LARGEST))
            narrow = self._node("QuantizeLinear", value, [value, *read], {}, _TYPE)
        else:
            array = tensor.numpy()
            others = None if axis is None else tuple(k for k in range(array.ndim) if k != axis % array.ndim)
            scale = _positive(np.abs(array).max(others, keepdims=True) / _LARGEST)
            rounded = np.clip(array / scale, -_LARGEST, _LARGEST).astype(_TYPE.numpy())
            narrow = self._constant(f"{value.name}_quantized", rounded)
            read = self._scales(value, scale.reshape(() if axis is None else -1))
        attributes = {} if axis is None else {"axis": axis}
        made = self._node("DequantizeLinear", value, [narrow, *read], attributes, ir.DataType.FLOAT)
        for result in (narrow, made):
            if (maker := result.producer()) is not None:
                self._graph.insert_before(reader, maker)
        return made

    def _scales(self, value: ir.Value, scale: Array) -> list[ir.Value]:
        points = np.zeros(scale.shape, _TYPE.numpy())
        return [self._constant(f"{value.name}_scale", scale), self._constant(f"{value.name}_zero_point", points)]

    def _constant(self, name: str, array: Array) -> ir.Value:
        name = self._names.tensors.unused(name)
        tensor = ir.Tensor(np.asarray(array), name=name)
        value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        self._graph.register_initializer(value)
        return value

    def _node(
        self, op_type: str, of: ir.Value, read: list[ir.Value], attributes: dict[str, Any], to: ir.DataType
    ) -> ir.Value:
        name = f"{of.name}_{op_type}"
        node = ir.node(op_type, read, attributes, name=self._names.nodes.unused(name))
        [result] = node.outputs
        result.name, result.type, result.shape = (
            self._names.tensors.unused(f"{name}_output"),
            ir.TensorType(to),
            of.shape,
        )
        return result


def _positive(scale: Any) -> Array:
    """Scales of 32 bits; what has only zeros has some scale."""
    return np.where(np.asarray(scale) > np.finfo(np.float32).tiny, scale, 1).astype(np.float32)
