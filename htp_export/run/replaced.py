"""What each node of an optimised graph replaces in the original, and the modules that this belongs to.

ONNX Runtime fuses, rewrites, moves and inserts nodes when it loads a model. What one of its nodes does is found
without a list of its operators: it is the part of the original graph between the tensors that are still there.

1. A node that gives a tensor of the original does all that lies behind this tensor, back to tensors that are still
   there: the whole chain that was fused into it.
2. A node whose output is new, but whose name begins with that of an original node or tensor, does what made that.
3. What then lies between such a node and the next one is done by the first at whose place all operands are there: a
   sum and an activation in the convolution before them. If the next is a mere change of form, it may be either's.
4. What replaces nothing was inserted. It belongs to the modules of what reads it, or else of what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import onnx_ir as ir

from htp_export.run.correspondence import Correspondence, bodies_of, reads_of

__all__ = ["optimized_owners", "replaced_nodes"]


def optimized_owners(
    original: ir.Model, optimized: ir.Model, owners_of: Callable[[ir.Node], tuple[str, ...]]
) -> dict[ir.Node, tuple[str, ...]]:
    """The modules that each node of an optimised graph computes.

    Args:
        original: The model as it was given, without functions.
        optimized: What ONNX Runtime made of it.
        owners_of: The owners of an original node.

    Returns:
        Every node of the optimised graph, those in subgraphs too → module paths, in the order of the original nodes;
        empty where nothing is known.
    """
    replaced = replaced_nodes(original, optimized)
    owners = {
        node: tuple(dict.fromkeys(path for each in nodes for path in owners_of(each)))
        for node, nodes in replaced.items()
    }
    inserted = [node for node, nodes in replaced.items() if not nodes]
    for node in reversed(inserted):
        owners[node] = _union(owners, (use.node for value in node.outputs for use in value.uses()))
    for node in inserted:
        if not owners[node]:
            producers = (value.producer() for value in reads_of(node))
            owners[node] = _union(owners, (each for each in producers if each is not None))
    return owners


def _union(owners: dict[ir.Node, tuple[str, ...]], nodes: Iterable[ir.Node]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path for node in nodes for path in owners.get(node, ())))


def replaced_nodes(original: ir.Model, optimized: ir.Model) -> dict[ir.Node, tuple[ir.Node, ...]]:
    """The original nodes whose work each node of an optimised graph does; none for what was inserted.

    Args:
        original: The model as it was given, without functions.
        optimized: What ONNX Runtime made of it.

    Example:
        >>> import onnx_ir as ir
        >>> def chain(*ops: str) -> ir.Model:
        ...     x = ir.val("x", ir.DataType.FLOAT, [2])
        ...     first = ir.node(ops[0], [x], outputs=[ir.val("h" if len(ops) > 1 else "y")])
        ...     nodes = [first] + [ir.node(op, first.outputs, outputs=[ir.val("y")]) for op in ops[1:]]
        ...     return ir.Model(ir.Graph([x], nodes[-1].outputs, nodes=nodes, opset_imports={"": 20}), ir_version=10)
        >>> found = replaced_nodes(chain("Neg", "Exp"), chain("NegExp"))
        >>> [(node.op_type, [each.op_type for each in replaced]) for node, replaced in found.items()]
        [('NegExp', ['Neg', 'Exp'])]
    """
    work = _Work(original, Correspondence(original, optimized))
    nodes = list(optimized.graph.all_nodes())
    for node in nodes:  # producers first, so that what they turn out to do is not claimed again further on
        work.claim(node)
        work.share_with_producers(node)
    return {node: work.replaced(node) for node in nodes}


class _Work:
    """Who does what, as far as it is known."""

    def __init__(self, original: ir.Model, tensors: Correspondence) -> None:
        self._position = {node: k for k, node in enumerate(original.graph.all_nodes())}
        self._tensors = tensors
        self._named = {value for values in tensors.named.values() for value in values}
        self._stops = self._named | tensors.makers.keys()
        self._claims: dict[ir.Node, set[ir.Node]] = {}
        self._order: dict[ir.Node, int] = {}
        self._made: dict[ir.Node, set[ir.Value]] = {}

    def replaced(self, node: ir.Node) -> tuple[ir.Node, ...]:
        """The original nodes whose work it does, with the bodies of those that were dissolved, in their order."""
        found: set[ir.Node] = set()
        for each in self._claims[node]:
            found.add(each)
            if each not in self._tensors.retained:
                found.update(
                    inner for graphs in bodies_of(each).values() for body in graphs for inner in body.all_nodes()
                )
        return tuple(sorted(found, key=self._position.__getitem__))

    def claim(self, node: ir.Node) -> None:
        """Rules 1 and 2: what lies behind the tensors that it gives, or that its name says."""
        given = [self._tensors.known[value] for value in node.outputs if value in self._tensors.known]
        # A tensor that an earlier node computes in another form is only brought into its old form here.
        targets = {value for value in given if value not in self._named} | {*self._tensors.named.get(node, ())}
        self._made[node] = targets | {*given}
        self._order[node] = len(self._order)
        self._claims[node] = set()
        pending = list(targets)
        while pending:
            producer = pending.pop().producer()
            if producer is None or producer in self._claims[node]:
                continue
            self._claims[node].add(producer)
            pending.extend(value for value in reads_of(producer) if value not in self._stops)

    def share_with_producers(self, node: ir.Node) -> None:
        """Rule 3: what a node claims and its producers could do too, as all operands are there."""
        for producer in self._renamed_producers(node):
            there = self._there(producer)
            pinned = self._pinned(node)
            for each in sorted(self._claims[node] - pinned, key=self._position.__getitem__):
                operands = [value for value in reads_of(each) if not self._constant(value)]
                if any(value in self._made[producer] for value in operands) and there.issuperset(operands):
                    self._claims[producer].add(each)
                    self._made[producer].update(each.outputs)
                    self._stops.update(each.outputs)
                    there.update(each.outputs)
                    if pinned:
                        self._claims[node].discard(each)

    def _renamed_producers(self, node: ir.Node) -> Iterator[ir.Node]:
        """The nodes known by their names alone that it reads, the last first: it has most operands."""
        read = {value.producer(): None for value in node.inputs if value is not None}
        found = [producer for producer in read if producer in self._tensors.named]
        yield from sorted(found, key=self._order.__getitem__, reverse=True)

    def _there(self, node: ir.Node) -> set[ir.Value]:
        """The original tensors that a node has, by reading or by making them."""
        there = set(self._made[node])
        for value in (value for value in node.inputs if value is not None):
            producer = value.producer()
            if value in self._tensors.known:
                there.add(self._tensors.known[value])
            elif producer is not None:
                there |= self._made[producer]
        return there

    def _pinned(self, node: ir.Node) -> set[ir.Node]:
        """What is surely done at a node, of what it claims: operators of its own type, and all that reads them."""
        pinned: set[ir.Node] = set()
        for each in sorted(self._claims[node], key=self._position.__getitem__):
            if each.op_type == node.op_type or any(value.producer() in pinned for value in reads_of(each)):
                pinned.add(each)
        return pinned

    def _constant(self, value: ir.Value) -> bool:
        folded = value in self._tensors.makers and self._tensors.makers[value] is None and not value.is_graph_input()
        return folded or value.is_initializer()
