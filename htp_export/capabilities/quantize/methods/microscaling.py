"""Weights in the microscaling (MX) formats: blocks of 32 along the axis of the sum.

ONNX Runtime 1.32 has no kernel on its CPU for scales in E8M0, nor for floats of 4 bits. So the
default stores the same numbers in types that it dequantizes: scales, powers of two, in float32, and
elements in int8 or E4M3. ``e8m0`` writes ONNX's own types, for other engines.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from functools import partial

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.quantize.method import Made, Method
from htp_export.capabilities.quantize.weight_operators import (
    CONVOLUTIONS,
    FIRST_BLOCKS,
    RoundedParts,
    has_columns,
    store_by_rows,
)
from htp_export.capabilities.quantize.work import Facts, Work
from htp_export.editing.submodels import Submodel, constant_of, remove_unused
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import is_standard
from htp_export.weights.microscaling import BLOCK, MX_ELEMENTS, MXElement, blocks_of, microscaled
from htp_export.weights.products import weight_axes

_FIRST_E8M0 = 24
"""The first opset in which scales of ``DequantizeLinear`` can be float8e8m0."""

_WEIGHT = 1
"""The place of the weight among the inputs of a product."""


class Microscaling(Method):
    """Weights of products in blocks with a shared exponent; activations stay."""

    activations = ("float32",)
    weights = tuple(MX_ELEMENTS)
    formats = ("default", "e8m0")

    def check(self) -> None:
        if self.precision.block_size != BLOCK:
            raise self.precision.fault(
                f"block_size is {self.precision.block_size}, and blocks of MX formats have {BLOCK}"
            )

    @property
    def first_opset(self) -> int:
        return _FIRST_E8M0 if self._has_e8m0 else FIRST_BLOCKS

    @property
    def _has_e8m0(self) -> bool:
        return self.precision.format == "e8m0"

    @property
    def _element(self) -> MXElement:
        return MX_ELEMENTS[self.precision.weight]

    @property
    def _stored(self) -> ir.DataType:
        return self._element.standard if self._has_e8m0 else self._element.stored

    @property
    def _scales(self) -> ir.DataType:
        return ir.DataType.FLOAT8E8M0 if self._has_e8m0 else ir.DataType.FLOAT

    def takes(self, node: ir.Node, facts: Facts) -> bool:
        """Whether it is a product of floats with a stored weight."""
        if not is_standard(node, "MatMul", "Gemm", *CONVOLUTIONS) or not facts.has_floats(node):
            return False
        weight = constant_of(node.inputs[_WEIGHT])
        return weight is not None and weight.dtype == ir.DataType.FLOAT and len(weight.shape) > 1

    def bytes_of(
        self, node: ir.Node, place: int, tensor: ir.TensorProtocol, facts: Facts
    ) -> int | None:
        axes = weight_axes(node, place)
        if place != _WEIGHT or axes is None:
            return None
        sizes = [int(size) for size in tensor.shape.numpy()]
        elements = math.ceil(math.prod(sizes) * self._stored.bitwidth / 8)
        sizes[axes[0]] = blocks_of(sizes[axes[0]])
        return elements + math.prod(sizes) * self._scales.bitwidth // 8

    def shared_by(self, node: ir.Node, place: int) -> Hashable:
        tensor = constant_of(node.inputs[place])
        if place != _WEIGHT or tensor is None:
            return None
        return has_columns(node, tensor), weight_axes(node, place)

    def rounded(self, weight: Array, reduced: int) -> Array | None:
        elements, scales = microscaled(weight, self._element, reduced)
        spread = np.repeat(scales, BLOCK, reduced).take(range(weight.shape[reduced]), reduced)
        return np.asarray(elements * spread, np.float32)

    def quantize(self, part: Submodel, work: Work) -> Made:
        graph = part.model.graph
        written: dict[ir.Value, ir.Value] = {}
        for node in list(graph):
            store_by_rows(graph, node, partial(self._dequantized, graph, node, written))
        remove_unused(list(graph.initializers.values()))
        return Made(part.model)

    def _dequantized(
        self, graph: ir.Graph, reader: ir.Node, written: dict[ir.Value, ir.Value], value: ir.Value
    ) -> ir.Value:
        """Insert a ``DequantizeLinear`` in blocks of a stored tensor, once."""
        if value in written:
            return written[value]
        tensor, axes = value.const_value, weight_axes(reader, _WEIGHT)
        assert tensor is not None
        assert axes is not None
        shape = tuple(int(size) for size in tensor.shape.numpy())
        # A matrix has a row for each result here, in whatever layout its product reads it.
        is_matrix = is_standard(reader, "MatMul", "Gemm") and len(shape) == 2
        axis = 1 if is_matrix else axes[0] % len(shape)
        blocks = [*shape[:axis], blocks_of(shape[axis]), *shape[axis + 1 :]]
        parts = RoundedParts(graph, value, ["mx", self.precision.weight, axis])
        stored = [
            parts.add("elements", "levels", self._stored, shape),
            parts.add("scales", "scales", self._scales, blocks),
        ]
        attributes = {"axis": axis, "block_size": BLOCK}
        if self._has_e8m0:
            attributes["output_dtype"] = int(ir.DataType.FLOAT)
        name = f"{value.name}_DequantizeLinear"
        node = ir.node("DequantizeLinear", stored, attributes, name=name)
        [result] = node.outputs
        result.name, result.shape = f"{name}_output", ir.Shape(shape)
        result.type = ir.TensorType(ir.DataType.FLOAT)
        graph.insert_before(reader, node)
        written[value] = result
        return result


METHOD = Microscaling
