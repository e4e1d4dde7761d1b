"""Integer operators whose ranges are measured at run time: ONNX Runtime's dynamic quantizer."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence

import onnx_ir as ir

from htp_export.capabilities.quantize.method import Made, Method
from htp_export.capabilities.quantize.ort_quantizers import (
    groups_in_memory,
    made_file,
    quantizers,
    quietly,
)
from htp_export.capabilities.quantize.rounding_recipes import float_weights, record_rounding
from htp_export.capabilities.quantize.weight_operators import (
    can_be_product,
    way_as_product,
    write_products,
)
from htp_export.capabilities.quantize.work import Facts, Work
from htp_export.editing.submodels import Submodel, constant_of
from htp_export.files.model_files import read_model
from htp_export.weights.products import weight_axes, weight_place

_FIRST_DYNAMIC, _FIRST_PER_CHANNEL = 10, 13
"""The first opsets with integer operators, and with scales by channel."""

_WITH_WEIGHT = frozenset(("MatMul", "Gemm", "Conv", "Gather", "LSTM"))
_PRODUCTS = frozenset(("MatMul", "Gemm"))
_BY_CHANNEL = frozenset(("MatMul", "Gemm", "LSTM"))

_SCALE_BYTES = 5
"""A scale in float32, and a zero point of 8 bits."""


class Dynamic(Method):
    """Weights are integers; activations are quantized at run time."""

    activations = ("uint8",)
    weights = ("int8", "uint8")
    order = 2
    multiplies_integers = True

    @property
    def first_opset(self) -> int:
        return _FIRST_PER_CHANNEL if self.precision.per_channel else _FIRST_DYNAMIC

    def takes(self, node: ir.Node, facts: Facts) -> bool:
        """Whether it is an operator of the main graph with a constant weight."""
        if node.domain or node.op_type not in _WITH_WEIGHT:
            return False
        if not _is_float(constant_of(node.inputs[weight_place(node)])):
            return False
        if node.op_type == "LSTM":
            has_usual_layout = not node.attributes.get_int("layout", 0)
            return has_usual_layout and _is_float(constant_of(node.inputs[2]))
        return node.op_type not in _PRODUCTS or can_be_product(node)

    def bytes_of(
        self, node: ir.Node, place: int, tensor: ir.TensorProtocol, facts: Facts
    ) -> int | None:
        axes = weight_axes(node, place)
        is_recurrent = node.op_type == "LSTM"
        if place != weight_place(node) and (axes is None or not is_recurrent):
            if place == 0:
                return tensor.size  # a constant input is quantized with the weight
            return None if self.shared_by(node, place) is None else tensor.nbytes
        shape = [int(size) for size in tensor.shape.numpy()]
        directions = shape[0] if is_recurrent else 1
        # A single scale is a scalar, which is no weight; an LSTM has a vector of one per direction.
        scales = directions if is_recurrent else 0
        if axes is not None and self._has_scales_by_channel(node):
            scales = directions * shape[axes[1]] or scales
        return math.prod(shape) + _SCALE_BYTES * scales

    def shared_by(self, node: ir.Node, place: int) -> Hashable:
        if place == 0:
            return "operand"
        if node.op_type in _PRODUCTS:
            return way_as_product(node, place)
        return node.op_type if weight_axes(node, place) is not None else None

    def groups(self, nodes: Sequence[ir.Node], work: Work) -> Iterable[Sequence[ir.Node]]:
        """Groups that fit into memory; nodes with a single scale, and each LSTM, are apart.

        ONNX Runtime has one option for all nodes of a model: whether scales are by channel. It
        transposes the weights of an LSTM in place, even if another LSTM reads them.
        """
        recurrent = [node for node in nodes if node.op_type == "LSTM"]
        others = [node for node in nodes if node.op_type != "LSTM"]
        yield from groups_in_memory([node for node in others if not _has_one_scale(node)])
        yield from groups_in_memory([node for node in others if _has_one_scale(node)])
        yield from ([node] for node in recurrent)

    def _has_scales_by_channel(self, node: ir.Node) -> bool:
        is_supported = self.precision.per_channel and node.op_type in _BY_CHANNEL
        return is_supported and not _has_one_scale(node)

    def quantize(self, part: Submodel, work: Work) -> Made:
        graph = part.model.graph
        write_products(graph)
        weights = float_weights(graph)
        kinds = {node.op_type for node in graph}
        has_convolutions = "Conv" in kinds
        by_channel = not has_convolutions and any(map(self._has_scales_by_channel, graph))
        tool = quantizers()
        # ONNX Runtime runs ConvInteger only with unsigned weights.
        is_unsigned = self.precision.weight == "uint8" or has_convolutions
        with made_file() as target, quietly():
            tool.quantize_dynamic(
                part.proto(),
                target,
                op_types_to_quantize=sorted(kinds),
                per_channel=by_channel,
                reduce_range=self.precision.reduce_range,
                weight_type=tool.QuantType.QUInt8 if is_unsigned else tool.QuantType.QInt8,
                extra_options={"MatMulConstBOnly": True},  # not products of two activations
            )
            made = read_model(target)
        record_rounding(made.graph, weights)
        return Made(made)


METHOD = Dynamic


def _has_one_scale(node: ir.Node) -> bool:
    """Whether a node multiplies by a vector or by several matrices: it has a single scale."""
    weight = constant_of(node.inputs[1]) if node.op_type == "MatMul" else None
    return weight is not None and len(weight.shape) != 2


def _is_float(tensor: ir.TensorProtocol | None) -> bool:
    return tensor is not None and tensor.dtype == ir.DataType.FLOAT
