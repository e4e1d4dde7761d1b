"""Owners of the nodes of a graph that ONNX Runtime runs, without writing tags."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from htp_export.capabilities.carry.alignment import Alignment
from htp_export.capabilities.carry.graph_summary import summarize
from htp_export.capabilities.carry.ownership import Owned, owners_after
from htp_export.capabilities.carry.replaced_nodes import replaced_nodes
from htp_export.format.call_tree import CallTree, NodeCalls
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.model.tagged import TaggedModel

__all__ = ["optimized_owners", "optimized_works"]


def optimized_owners(
    original: ir.Model, optimized: ir.Model, owners_of: Callable[[ir.Node], tuple[str, ...]]
) -> dict[ir.Node, tuple[str, ...]]:
    """The owners of each node of an optimised graph, as `carry` finds them, whatever its tags.

    Args:
        original: The original model, without functions.
        optimized: The optimised model.
        owners_of: The owners of an original node.

    Returns:
        Every node of the optimised graph and its subgraphs → module paths, in the order of the original nodes; empty if
        nothing is known, or if the replaced nodes have no owners.

    Examples:
        >>> def chain(*ops: str) -> ir.Model:
        ...     x = ir.val("x", ir.DataType.FLOAT, [2])
        ...     first = ir.node(ops[0], [x], outputs=[ir.val("h" if len(ops) > 1 else "y")])
        ...     nodes = [first] + [ir.node(op, first.outputs, outputs=[ir.val("y")]) for op in ops[1:]]
        ...     return ir.Model(ir.Graph([x], nodes[-1].outputs, nodes=nodes, opset_imports={"": 20}), ir_version=10)
        >>> list(optimized_owners(chain("Neg", "Exp"), chain("NegExp"), lambda node: (node.op_type,)).values())
        [('Neg', 'Exp')]
    """
    tree = CallTree(Hierarchy([ModuleInfo("", "")]))
    owned = _owned(original, optimized, lambda node: tree.work(owners_of(node)), tree)
    return {node: entry.paths for node, entry in owned.items()}


def optimized_works(tagged: TaggedModel, optimized: ir.Model) -> dict[ir.Node, NodeCalls]:
    """The owners and calls of each node of an optimised graph; see ``optimized_owners``."""
    owned = _owned(tagged.model, optimized, tagged.work_of, tagged.calls)
    return {node: tagged.calls.work(entry.paths, entry.call) for node, entry in owned.items()}


def _owned(
    original: ir.Model, optimized: ir.Model, work_of: Callable[[ir.Node], NodeCalls], tree: CallTree
) -> dict[ir.Node, Owned]:
    before, before_nodes = summarize(original)
    after, after_nodes = summarize(optimized)
    for summarized, node in zip(before.nodes, before_nodes, strict=True):
        work = work_of(node)
        summarized.owners, summarized.call = work.owners, tree.encode_calls(work.owners, work.calls)
    for summarized in after.nodes:
        summarized.owners = ()
    return dict(
        zip(after_nodes, owners_after(before, after, replaced_nodes(Alignment(before, after)), tree), strict=True)
    )
