"""Nodes and functions on which no output depends."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedFunctionsPass, RemoveUnusedNodesPass

from htp_export.capabilities.optimize.registry import register


@register("eliminate_dead_nodes", level="exact")
class EliminateDeadNodes(ir.passes.InPlacePass):
    """Removes nodes and functions on which no output of the model depends."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = RemoveUnusedNodesPass()(model)
        functions = RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
        return ir.passes.PassResult(model, nodes.modified or functions.modified)
