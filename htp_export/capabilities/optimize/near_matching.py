"""onnxscript's search for patterns: numbers match equal numbers only, and several results are near each other.

A pattern's 0 matches each number below 1e-8 in onnxscript: ``x + 1e-15`` counts as ``x``, and ``log(x + 1e-15)`` of a
zero becomes infinite. While the context is open, numbers match by their relative difference alone.

onnxscript (0.7) looks for the further results of such a pattern among all nodes of the graph, for each of its nodes:
the time grows with the square of the graph. The nodes of a match hang together by the tensors that they share, so
those are enough that are as near as the pattern is large. If a tensor has very many consumers, they are all near each
other: at most `MOST` are searched, and a warning names the node.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

MOST = 64
"""Nodes in which the further results are looked for; each takes 0.1 ms. A match has its results within a block."""

_log = logging.getLogger(__name__)

_ONE_AT_A_TIME = threading.Lock()  # the changed class is shared by the whole process


@dataclass(frozen=True)
class _Part:
    """Some nodes of a graph, which stand in for the graph."""

    graph: ir.Graph
    nodes: list[ir.Node]

    def __iter__(self) -> Iterator[ir.Node]:
        return iter(self.nodes)


@contextlib.contextmanager
def near_matching(name: str) -> Iterator[None]:
    """Let onnxscript's rules match as described above, while the context is open."""
    from onnxscript.rewriter import pattern

    matcher: Any = pattern.SimplePatternMatcher
    original, original_constant = matcher.match, matcher._match_constant

    firsts: dict[Any, tuple[str, ...] | None] = {}
    crowded: dict[ir.Node, None] = {}

    def match(self: Any, model: ir.Model, graph: Any, node: ir.Node, **options: Any) -> Any:
        if self not in firsts:
            firsts[self] = self.pattern.output_nodes[0].op_identifier()
        first = firsts[self]
        if first is not None and first[:2] != (node.domain, node.op_type):
            return pattern.MatchResult().fail("The last node of the pattern is another operator.")
        if not self.pattern.has_single_output_node:
            nodes = near(node, len(self.pattern))
            if len(nodes) == MOST:
                crowded[node] = None
            graph = _Part(graph if isinstance(graph, ir.Graph) else graph.graph, nodes)
        return original(self, model, graph, node, **options)

    def match_constant(self: Any, constant: Any, value: ir.Value) -> bool:
        relative = type(constant)(constant.value, rel_tol=constant._rel_tol, abs_tol=0.0)
        return bool(original_constant(self, relative, value))

    with _ONE_AT_A_TIME:
        matcher.match, matcher._match_constant = match, match_constant
        try:
            yield
        finally:
            matcher.match, matcher._match_constant = original, original_constant
    if crowded:
        more = f" and {len(crowded) - 1} others" if len(crowded) > 1 else ""
        _log.warning(
            "pass %s: node %r (%s)%s: a tensor near it has very many consumers; patterns with several results were "
            "looked for among the nearest %d nodes only, and may have been missed",
            *(name, (first := next(iter(crowded))).name, first.op_type, more, MOST),
        )


def near(node: ir.Node, steps: int) -> list[ir.Node]:
    """The nearest nodes of the same graph that some tensors lead to, itself first, no more than `MOST`.

    Those that only read the same constants are not near.

    Examples:
        >>> x, one = ir.val("x"), ir.Value(name="one", const_value=ir.tensor(1.0))
        >>> first = ir.node("Relu", [x])
        >>> second, apart = ir.node("Add", [first.outputs[0], one]), ir.node("Neg", [one])
        >>> [each.op_type for each in near(first, 1)], [each.op_type for each in near(apart, 9)]
        (['Relu', 'Add'], ['Neg'])
    """
    nearest = {node: None}
    edge = [node]
    for _ in range(steps):
        beside, edge = (neighbour for reached in edge for neighbour in _neighbours(reached)), []
        for neighbour in beside:
            if neighbour.graph is not node.graph or neighbour in nearest:
                continue
            if len(nearest) == MOST:
                return list(nearest)
            nearest[neighbour] = None
            edge.append(neighbour)
    return list(nearest)


def _neighbours(node: ir.Node) -> Iterator[ir.Node]:
    for value in (*node.inputs, *node.outputs):
        if value is None or value.const_value is not None:
            continue
        producer = value.producer()
        if producer is not None:
            yield producer
        for use in value.uses():
            yield use.node
