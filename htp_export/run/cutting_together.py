"""The part of a graph that computes what several modules compute together, whose work was merged."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir

from htp_export.model.cutting import Cut
from htp_export.model.tagged import TaggedModel

__all__ = ["cut_together"]


def cut_together(
    tagged: TaggedModel, group: Sequence[str], inputs_of_modules: Collection[ir.Value], outputs: Sequence[ir.Value]
) -> Cut | None:
    """Cut modules that were merged out of a graph as one.

    The tensors that PyTorch passed between them are not in the file; those that it gave to them from outside are.

    Args:
        tagged: The file.
        group: The modules, the first of which gives the cut its name.
        inputs_of_modules: Tensors of the file that PyTorch gave to one of them.
        outputs: Tensors of the file that one of them gave back.

    Returns:
        The cut; None where the outputs are not computed by the modules.
    """
    index, graph = tagged.index, tagged.model.graph
    members = {node for each in group for node in index.below.get(each, ()) if node.graph is graph}
    needed: set[ir.Node] = set()
    entering: dict[ir.Value, None] = {}
    queue = list(outputs)
    while queue:
        value = queue.pop()
        node = value.producer()
        inside = node is not None and (node in members or value in index.constant)
        if value in inputs_of_modules or not (inside or value.is_initializer()):
            entering[value] = None
        elif node is not None and node not in needed:
            needed.add(node)
            queue.extend(_reads(tagged, node))
    if any(value in entering for value in outputs):
        return None
    nodes = tuple(node for node in graph if node in needed)
    weights = (value for node in nodes for value in _reads(tagged, node) if value.is_initializer())
    return Cut(group[0], 0, _named(entering), _named(outputs), nodes, tuple(dict.fromkeys(weights)))


def _reads(tagged: TaggedModel, node: ir.Node) -> list[ir.Value]:
    return [*(value for value in node.inputs if value is not None), *tagged.index.captured(node)]


def _named(values: Collection[ir.Value]) -> dict[str, ir.Value]:
    return {str(value.name): value for value in values}
