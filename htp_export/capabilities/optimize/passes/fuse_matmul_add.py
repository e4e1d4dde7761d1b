"""A product of matrices and a bias, as one node."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.capabilities.optimize.registry import NodePass, decline, register
from htp_export.editing.editing import is_boundary, is_constant, replace
from htp_export.model.neighbours import only_consumer, producer_of
from htp_export.shapes.symbolic import Symbolic


@register("fuse_matmul_add", level="tolerant")
class FuseMatmulAdd(NodePass):
    """Fuses ``MatMul`` and ``Add`` of matrices into ``Gemm``."""

    operators = ("Add",)

    def rewrite(self, node: ir.Node) -> bool:
        parts = product_and_bias(node)
        if parts is None or not all(self.known.rank(value) == 2 for value in parts[0].inputs):
            return False
        product, bias = parts
        if not _fits(self.known, product, bias):
            why = "the bias does not fit the columns of the weight"
            return decline("matmul_add_2d", [product, node], why)
        replace(node, [ir.node("Gemm", [*product.inputs, bias])])
        return True


def product_and_bias(node: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """The ``MatMul`` and the constant that an ``Add`` adds, if nothing else uses the product."""
    for product, bias in (node.inputs, tuple(reversed(node.inputs))):
        matmul = producer_of(product, "MatMul")
        if product is None or bias is None or matmul is None or not is_constant(bias):
            continue
        if is_boundary(product):
            why = "the product is an output of a module"
        elif only_consumer(product) is None:
            why = "other nodes use the product without its bias"
        else:
            return matmul, bias
        shapes = [value.shape if value is not None else None for value in matmul.inputs]
        is_2d = all(shape is not None and len(shape) == 2 for shape in shapes)
        decline("matmul_add_2d" if is_2d else "matmul_add_3d", [matmul, node], why)
    return None


def _fits(known: Symbolic, product: ir.Node, bias: ir.Value) -> bool:
    """Whether a bias can be broadcast to the shape of a product."""
    result, shape = known.shape(product.outputs[0]), known.shape(bias)
    if result is None or shape is None or len(shape) > 2:
        return False
    return all(
        dim in (1, size) for dim, size in zip(reversed(shape), reversed(result), strict=False)
    )
