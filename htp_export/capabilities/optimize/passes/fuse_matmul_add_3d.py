"""A product with a batch, and a bias, as one node between two reshapes."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.capabilities.optimize.passes.fuse_matmul_add import product_and_bias
from htp_export.capabilities.optimize.passes.simplify_shape_chains import reshape_target
from htp_export.capabilities.optimize.registry import NodePass, decline, integers, register
from htp_export.editing.editing import is_constant, replace


@register("fuse_matmul_add_3d", level="tolerant")
class FuseMatmulAdd3d(NodePass):
    """Fuses ``MatMul`` and ``Add`` with a batch into ``Reshape``, ``Gemm``, ``Reshape``.

    It removes nodes if the reshapes merge with others. Modules become inexact: the result of the
    linear layer is no tensor of the file any more.
    """

    operators = ("Add",)

    def rewrite(self, node: ir.Node) -> bool:
        parts = product_and_bias(node)
        if parts is None:
            return False
        product, bias = parts
        source, weight = product.inputs
        source_shape, matrix, result = map(self.known.shape, (source, weight, node.outputs[0]))
        if source_shape is None or matrix is None or result is None:
            return False
        if len(source_shape) < 3 or len(matrix) != 2:
            return False
        # one size may be open
        target = reshape_target((), result) if source_shape[:-1] == result[:-1] else None
        if not is_constant(weight):
            why = "the weight is computed"
        elif self.known.shape(bias) != matrix[-1:]:
            why = "the bias does not fit the columns of the weight"
        elif target is None or not isinstance(matrix[0], int):
            why = "more than one size of the result is not known beforehand"
        else:
            rows = ir.node("Reshape", [source, integers(node, [-1, matrix[0]], "rows")])
            gemm = ir.node("Gemm", [rows.outputs[0], weight, bias])
            shaped = ir.node("Reshape", [gemm.outputs[0], integers(node, target, "shape")])
            replace(node, [rows, gemm, shaped])
            return True
        return decline("matmul_add_3d", [product, node], why)
