"""Sizes that are computed while the model runs, and what they feed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import onnx_ir as ir

from htp_export.findings.finding import Match
from htp_export.findings.patterns.groups import connected
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.operators import SIZES_ONLY, is_standard

__all__ = ["shape_chains"]

_ON_SIZES = frozenset((
    "Abs", "Add", "And", "Cast", "Ceil", "Concat", "ConstantOfShape", "Div", "Equal", "Floor", "Gather", "Greater",
    "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "ReduceMax",
    "ReduceMin", "ReduceProd", "ReduceSum", "Reshape", "Slice", "Split", "Squeeze", "Sub", "Unsqueeze", "Where"
))  # fmt: skip
"""What sizes are computed with; a tensor of more than one dimension is no list of sizes any more."""


def shape_chains(facts: GraphFacts) -> Iterator[Match]:
    """Nodes that compute sizes from ``Shape``: of one module, those that read each other together."""
    chain, owners = _nodes_on_sizes(facts), facts.tagged.index.owners
    on_sizes = (node for node in facts.nodes if node in chain)
    for nodes in connected(on_sizes, lambda maker, node: owners[maker] == owners[node]):
        fed = Counter(
            use.node.op_type
            for node in nodes
            for value in node.outputs
            for use in value.uses()
            if use.node not in chain
        )
        leaves = any(value.is_graph_output() for node in nodes for value in node.outputs)
        feeds = [f"{op} x{count}" if count > 1 else op for op, count in fed.most_common()] + ["output"] * leaves
        what = ", ".join(feeds) or "sizes of other modules"
        yield Match("shape_chain", nodes, f"feeds {what}", _kept(facts, nodes, set(fed), chain))


def _nodes_on_sizes(facts: GraphFacts) -> set[ir.Node]:
    """``Shape`` and ``Size``, and what computes with nothing but their results and constants."""
    chain: set[ir.Node] = set()
    sizes: set[ir.Value] = set()
    for node in facts.nodes:
        starts = is_standard(node, *SIZES_ONLY)
        if not starts:
            if not is_standard(node) or node.op_type not in _ON_SIZES:
                continue
            if not any(value in sizes for value in node.inputs):
                continue
            if not all(value is None or value in sizes or facts.is_constant(value) for value in node.inputs):
                continue
            if (facts.rank(node.outputs[0]) or 0) > 1:
                continue
        chain.add(node)
        sizes.update(node.outputs)
    return chain


def _kept(facts: GraphFacts, nodes: tuple[ir.Node, ...], fed: set[str], chain: set[ir.Node]) -> str:
    """Why a chain stays, or the empty string."""
    if any(node.graph is not facts.tagged.model.graph for node in nodes):
        return "it lies in a subgraph or function"
    sources = [node.inputs[0] for node in nodes if node.op_type in SIZES_ONLY]
    fixed = all(isinstance(size, int) for value in sources for size in (facts.shape(value) or (None,)))
    reads_others = any(
        maker in chain and maker not in nodes
        for node in nodes
        for value in node.inputs
        if (maker := None if value is None else value.producer()) is not None
    )
    if fixed and sources and not reads_others:
        return ""
    ends = {use.node for node in nodes for value in node.outputs for use in value.uses() if use.node not in chain}
    if fed and fed <= {"Reshape"} and all(_at_most_one_free(facts, node) for node in ends):
        return ""
    return "the sizes depend on the model's inputs, and are needed"


def _at_most_one_free(facts: GraphFacts, node: ir.Node) -> bool:
    """Whether a shape that is reshaped to has one unknown size at most, which ``Reshape`` can find itself."""
    shape = facts.shape(node.outputs[0])
    given = facts.shape(node.inputs[0]) or ()
    if shape is None:
        return False
    free = [k for k, size in enumerate(shape) if not isinstance(size, int)]
    return sum(k >= len(given) or shape[k] is None or given[k] != shape[k] for k in free) <= 1
