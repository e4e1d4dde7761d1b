"""A product of a batch of matrices with one matrix and a bias, as one node between two reshapes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.declining import decline
from htp_export.capabilities.optimize.node_pass import NodePass
from htp_export.capabilities.optimize.passes.fuse_matmul_add import product_and_bias
from htp_export.capabilities.optimize.passes.simplify_shape_chains import reshape_target
from htp_export.capabilities.optimize.registry import register
from htp_export.editing.editing import add_constant, is_constant, replace


@register("fuse_matmul_add_3d", level="tolerant")
class FuseMatmulAdd3d(NodePass):
    """Makes ``Reshape``, ``Gemm``, ``Reshape`` of ``MatMul`` and ``Add`` with a batch.

    It saves nodes where reshapes merge, and costs exactness there: the result of the linear layer is no tensor of the
    file any more.
    """

    operators = ("Add",)

    def rewrite(self, node: ir.Node) -> bool:
        parts = product_and_bias(node)
        if parts is None:
            return False
        product, bias = parts
        source, weight = product.inputs
        source_shape, matrix, result = map(self.known.shape, (source, weight, node.outputs[0]))
        if source_shape is None or matrix is None or result is None or len(source_shape) < 3 or len(matrix) != 2:
            return False
        if not is_constant(weight):
            decline("matmul_add_3d", [product, node], "the weight is computed")
            return False
        if self.known.shape(bias) != matrix[-1:]:
            decline("matmul_add_3d", [product, node], "the bias does not fit the columns of the weight")
            return False
        back = _back(source_shape, result)
        if back is None or not isinstance(matrix[0], int):
            decline("matmul_add_3d", [product, node], "more than one size of the result is not known beforehand")
            return False
        name = str(node.outputs[0].name)
        rows = ir.node(
            "Reshape", [source, add_constant(self.graph, np.array([-1, matrix[0]], np.int64), f"{name}_rows")]
        )
        gemm = ir.node("Gemm", [rows.outputs[0], weight, bias])
        shaped = ir.node(
            "Reshape", [gemm.outputs[0], add_constant(self.graph, np.array(back, np.int64), f"{name}_shape")]
        )
        replace(node, [rows, gemm, shaped])
        return True


def _back(source_shape: tuple[object, ...], result: tuple[object, ...]) -> list[int] | None:
    """The target of a ``Reshape`` from rows to the result: at most one size may be open."""
    target = reshape_target((), result)  # type: ignore[arg-type]
    return target if target is not None and source_shape[:-1] == result[:-1] else None
