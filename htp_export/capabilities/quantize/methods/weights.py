"""Weights in few bits: of products and tables block by block, by ONNX Runtime's MatMulNBitsQuantizer.

Convolutions and tables in 8 bits, which it does not know: `eight_bits`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir

from htp_export.capabilities.quantize.eight_bits import CONVOLUTIONS, store_in_eight_bits
from htp_export.capabilities.quantize.method import Method
from htp_export.capabilities.quantize.ort_quantizers import (
    groups_in_memory,
    made_file,
    quantizers,
    quietly,
    write_products,
)
from htp_export.capabilities.quantize.work import Facts, Work
from htp_export.editing.submodels import Submodel, constant_of
from htp_export.files.model_files import read_model
from htp_export.format.recipes import Recipe, step
from htp_export.model.recipes import recipe_of, recorded
from htp_export.weights.products import is_matrix_product, weight_axes, weight_place

__all__ = ["METHOD", "Blocks"]

_PACKING = ("rtn", "k-quant")
"""Algorithms that pack two zero points of a column into a byte, and fail on an odd number of them."""

_FIRST_BY_CHANNEL = 13  # opset of DequantizeLinear with an axis


class Blocks(Method):
    """Weights are rounded in blocks with a scale each; activations stay."""

    activations = ("float32",)
    weights = ("int4", "int8")
    algorithms = ("default", "rtn", "hqq", "k-quant")
    order = 1
    in_subgraphs = True

    def check(self) -> None:
        if self.precision.bits != 4 and self.precision.algorithm == "hqq":
            raise self.precision.fault(f"with hqq, ONNX Runtime runs 4 bits, not {self.precision.bits}")

    def takes(self, node: ir.Node, facts: Facts) -> bool:
        """Whether its weight is constant: a matrix on the right, a table, or with 8 bits that of a convolution."""
        if node.domain or node.op_type not in ("MatMul", "Gemm", "Gather", *CONVOLUTIONS):
            return False
        weight = constant_of(node.inputs[weight_place(node)])
        if weight is None or weight.dtype != ir.DataType.FLOAT:
            return False
        precision = self.precision
        if node.op_type in CONVOLUTIONS:
            return precision.bits == 8 and precision.algorithm == "default" and facts.opset >= _FIRST_BY_CHANNEL
        if len(weight.shape) != 2:
            return False
        if node.op_type == "Gather":
            return precision.algorithm == "default" and node.attributes.get_int("axis", 0) == 0
        return is_matrix_product(node) and not self._is_refused(node)

    def _is_refused(self, node: ir.Node) -> bool:
        """Whether the algorithm fails on the zero points of a product."""
        precision = self.precision
        if precision.algorithm not in _PACKING or precision.bits != 4:
            return False
        return self._has_points() and -(-_sizes(node)[0] // precision.block_size) % 2 == 1

    def _has_points(self) -> bool:
        return not self.precision.symmetric or self.precision.algorithm == "k-quant"

    def bytes_of(self, node: ir.Node, place: int, tensor: ir.TensorProtocol, facts: Facts) -> int | None:
        if place != weight_place(node):
            return None
        if node.op_type in CONVOLUTIONS:
            axes = weight_axes(node, place)
            return tensor.size + 4 * int(tensor.shape.numpy()[axes[1]]) if axes is not None else None
        bits, size = self.precision.bits, self.precision.block_size
        along, across = _sizes(node)
        blocks = -(-along // size)
        if node.op_type == "Gather":
            packed, points = (along * across * bits + 7) // 8, (across * blocks * bits + 7) // 8
        else:
            packed, points = across * blocks * size * bits // 8, across * ((blocks * bits + 7) // 8)
        if self.precision.algorithm == "hqq":
            points = across * blocks * 4  # floats
        elif not self._has_points():
            points = 0
        return packed + across * blocks * 4 + points

    def groups(self, nodes: Sequence[ir.Node], work: Work) -> Iterable[Sequence[ir.Node]]:
        apart: dict[ir.Graph | ir.Function | None, list[ir.Node]] = {}
        for node in nodes:
            if self._in_eight_bits(node):
                apart.setdefault(node.graph, []).append(node)
        yield from apart.values()  # nothing of them is in memory
        yield from groups_in_memory([node for node in nodes if not self._in_eight_bits(node)])

    def _in_eight_bits(self, node: ir.Node) -> bool:
        return self.precision.bits == 8 and node.op_type in ("Gather", *CONVOLUTIONS)

    def quantize(self, part: Submodel, work: Work) -> tuple[ir.Model, str]:
        if any(self._in_eight_bits(node) for node in part.model.graph):
            store_in_eight_bits(part.model.graph, self.precision.block_size, symmetric=self.precision.symmetric)
            return part.model, ""
        tool = quantizers("matmul_nbits_quantizer")
        write_products(part.model.graph)
        weights = {
            f"{value.name}_": recipe_of(value)
            for value in part.model.graph.initializers.values()
            if all(use.node.op_type == "MatMul" for use in value.uses())
        }
        quantizer = tool.MatMulNBitsQuantizer(
            part.proto(),
            block_size=self.precision.block_size,
            is_symmetric=self.precision.symmetric,
            algo_config=self._algorithm(tool, part),
        )
        with quietly():
            quantizer.process()
        made: onnx.ModelProto = quantizer.model.model
        unique = {tensor.name: tensor for tensor in made.graph.initializer}  # two readers of a weight write it twice
        del made.graph.initializer[:]
        made.graph.initializer.extend(unique.values())
        with made_file() as file:
            onnx.save(made, file)
            quantized = read_model(file)
        if self.precision.algorithm == "default":
            self._record(quantized.graph, weights)
        return quantized, ""

    def _record(self, graph: ir.Graph, weights: Mapping[str, Recipe]) -> None:
        """Say of what the levels, scales and zero points were made."""
        bits, size, symmetric = self.precision.bits, self.precision.block_size, int(self.precision.symmetric)
        for end, what in ((f"Q{bits}", "levels"), ("scales", "scales"), ("zero_points", "zero_points")):
            for weight, recipe in weights.items():
                value = graph.initializers.get(f"{weight}{end}")
                if value is not None and value.const_value is not None:
                    made = step("quantize", recipe, [what, bits, size, symmetric])
                    value.const_value = recorded(value.const_value, made)

    def _algorithm(self, tool: Any, part: Submodel) -> Any:
        """The configuration of the algorithm, for the nodes of a part."""
        algorithm, bits, size = self.precision.algorithm, self.precision.bits, self.precision.block_size
        if algorithm in ("rtn", "k-quant"):
            by_node = {str(node.name): {"bits": bits, "group_size": size} for node in part.model.graph}
            config = tool.RTNWeightOnlyQuantConfig if algorithm == "rtn" else tool.KQuantWeightOnlyQuantConfig
            return config(customized_weight_config=by_node)
        if algorithm == "hqq":
            return tool.HQQWeightOnlyQuantConfig(block_size=size, bits=bits)
        kinds = ("MatMul", "Gather") if any(node.op_type == "Gather" for node in part.model.graph) else ("MatMul",)
        symmetric = self.precision.symmetric
        return tool.DefaultWeightOnlyQuantConfig(size, symmetric, bits=bits, op_types_to_quantize=kinds)


METHOD = Blocks


def _sizes(node: ir.Node) -> tuple[int, int]:
    """The elements of a weight along a block, and across."""
    weight, axes = constant_of(node.inputs[weight_place(node)]), weight_axes(node, weight_place(node))
    assert weight is not None
    assert axes is not None
    first, second = (int(size) for size in weight.shape.numpy())
    return (second, first) if axes[0] % 2 else (first, second)
