"""The owners of the nodes of a graph that ONNX Runtime runs, for measuring: no tags are written."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from htp_export.provenance.alignment import Alignment
from htp_export.provenance.ownership import owners_after
from htp_export.provenance.sketch import draw
from htp_export.provenance.work import divide

__all__ = ["optimized_owners"]


def optimized_owners(
    original: ir.Model, optimized: ir.Model, owners_of: Callable[[ir.Node], tuple[str, ...]]
) -> dict[ir.Node, tuple[str, ...]]:
    """The modules that each node of an optimised graph computes, as `carry` finds them, whatever tags stand on it.

    Args:
        original: The model as it was given, without functions.
        optimized: What an optimiser made of it.
        owners_of: The owners of an original node.

    Returns:
        Every node of the optimised graph, those in subgraphs too → module paths, in the order of the original nodes;
        empty where nothing is known, or what it replaces has no owners.

    Example:
        >>> def chain(*ops: str) -> ir.Model:
        ...     x = ir.val("x", ir.DataType.FLOAT, [2])
        ...     first = ir.node(ops[0], [x], outputs=[ir.val("h" if len(ops) > 1 else "y")])
        ...     nodes = [first] + [ir.node(op, first.outputs, outputs=[ir.val("y")]) for op in ops[1:]]
        ...     return ir.Model(ir.Graph([x], nodes[-1].outputs, nodes=nodes, opset_imports={"": 20}), ir_version=10)
        >>> list(optimized_owners(chain("Neg", "Exp"), chain("NegExp"), lambda node: (node.op_type,)).values())
        [('Neg', 'Exp')]
    """
    before, before_nodes = draw(original)
    after, after_nodes = draw(optimized)
    for sketched, node in zip(before.nodes, before_nodes, strict=True):
        sketched.owners = owners_of(node)
    for sketched in after.nodes:
        sketched.owners = ()
    owned = owners_after(before, after, divide(Alignment(before, after)))
    return {node: one.paths for node, one in zip(after_nodes, owned, strict=True)}
