"""``If`` whose condition is constant."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.capabilities.optimize.registry import register
from htp_export.editing.editing import release, remove_unused, replace_with
from htp_export.model.regions import all_values
from htp_export.model.tensor_names import UsedNames
from htp_export.shapes.operator_kinds import graphs_in, is_standard
from htp_export.shapes.symbolic import Symbolic


@register("inline_branches", level="exact")
class InlineBranches(ir.passes.InPlacePass):
    """Replaces an ``If`` with a constant condition by the nodes of its branch."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for graph in graphs_in(model.graph):
            conditionals = [node for node in graph if is_standard(node, "If")]
            known = Symbolic(graph, model.opset_imports) if conditionals else None
            for node in conditionals:
                condition = known.constant(node.inputs[0]) if known is not None else None
                if condition is not None and len(condition) == 1:
                    name = "then_branch" if condition[0] else "else_branch"
                    modified |= inline_branch(model, graph, node, name)
        if modified:
            remove_unused(model)
        return ir.passes.PassResult(model, modified)


def inline_branch(model: ir.Model, graph: ir.Graph, node: ir.Node, name: str) -> bool:
    """Replace an ``If`` by the nodes of its ``then_branch`` or ``else_branch``.

    False if an output of the ``If`` is an output of the graph, and the branch does not compute it.
    """
    branch = node.attributes[name].as_graph()
    results = list(branch.outputs)
    if any(value.is_graph_output() for value in node.outputs):
        # a graph has to compute its outputs itself
        for value in results:
            if value.producer() is None or value.graph is not branch:
                return False
    others = (value.name for value in all_values(model.graph) if value.graph is not branch)
    used = UsedNames(other for other in others if other)
    for value in list(branch.initializers.values()):
        branch.initializers.pop(str(value.name))
        value.name = used.unused(str(value.name))
        graph.register_initializer(value)
    branch.outputs.clear()
    for inner in list(branch):
        branch.remove(inner)
        for value in inner.outputs:
            if value.name:
                value.name = used.unused(str(value.name))
        graph.insert_before(node, inner)
    for old, new in zip(node.outputs, results, strict=True):
        replace_with(old, new)
    release(node)
    graph.remove(node)
    return True
