"""Removal of transposes without effect, and merging of consecutive ones."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.capabilities.optimize.passes.eliminate_identity_ops import NEEDS_A_NAME
from htp_export.capabilities.optimize.registry import NodePass, changed, decline, register
from htp_export.editing.editing import is_boundary, replace, replace_with
from htp_export.model.neighbours import producer_of
from htp_export.shapes.symbolic import Symbolic


@register("eliminate_redundant_transposes", level="exact")
class EliminateRedundantTransposes(NodePass):
    """Merges consecutive transposes, and removes transposes without effect."""

    operators = ("Transpose",)

    def rewrite(self, node: ir.Node) -> bool:
        joint, source = permutation(node, self.known), node.inputs[0]
        if joint is None or source is None:
            return False
        nodes, kind = [node], "identity_transpose"
        if joint != sorted(joint):
            first = producer_of(source, "Transpose")
            before = None if first is None else permutation(first, self.known)
            if first is None or first.inputs[0] is None or before is None:
                return False
            nodes, joint = [first, node], [before[axis] for axis in joint]
            kind = "cancelling_transposes" if joint == sorted(joint) else "chained_transposes"
            if is_boundary(source):
                return decline(kind, nodes, "a module has the tensor in between as input or output")
            source = first.inputs[0]
        if kind == "chained_transposes":
            replace(node, [ir.node("Transpose", [source], {"perm": joint})])
        elif not replace_with(node.outputs[0], source):
            return decline(kind, nodes, NEEDS_A_NAME)
        return changed(kind, node)


def permutation(node: ir.Node, known: Symbolic) -> list[int] | None:
    """The permutation of a ``Transpose``; None if there is no attribute and the rank is unknown."""
    written, rank = node.attributes.get_ints("perm"), known.rank(node.inputs[0])
    if written is not None:
        return list(written)
    return None if rank is None else list(reversed(range(rank)))
