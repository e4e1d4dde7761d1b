"""Removal of weights without consumers."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.capabilities.optimize.registry import register
from htp_export.shapes.operator_kinds import graphs_in


@register("eliminate_unused_initializers", level="exact")
class EliminateUnusedInitializers(ir.passes.InPlacePass):
    """Removes initializers that no node uses, in subgraphs too."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for graph in graphs_in(model.graph):
            for name, value in list(graph.initializers.items()):
                if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
                    del graph.initializers[name]
                    modified = True
        return ir.passes.PassResult(model, modified)
