"""Removal of nodes that repeat the computation of another."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import CommonSubexpressionEliminationPass

from htp_export.capabilities.optimize.registry import register


@register("eliminate_common_subexpressions", level="exact")
class EliminateCommonSubexpressions(ir.passes.InPlacePass):
    """Keeps one of several nodes with equal operators and inputs.

    The node belongs to the modules of all of them.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return CommonSubexpressionEliminationPass()(model)
