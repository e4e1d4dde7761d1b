"""Which tensors of a model are still there in what ONNX Runtime made of it, known by their names.

ONNX Runtime writes no word about where a node came from, but it keeps names: the last node of a fused chain gives its
output's name to the kernel that does the chain's work, constants that it folds keep the name of the tensor that they
are, and where an output is renamed, the kernel's own name begins with the name of the node or tensor that it was.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator

import onnx_ir as ir

__all__ = ["Correspondence", "bodies_of", "reads_of"]


def bodies_of(node: ir.Node) -> dict[str, list[ir.Graph]]:
    """Attribute name → the subgraphs in it."""
    found = {}
    for name, attribute in node.attributes.items():
        if not attribute.is_ref() and attribute.type == ir.AttributeType.GRAPH:
            found[name] = [attribute.as_graph()]
        elif not attribute.is_ref() and attribute.type == ir.AttributeType.GRAPHS:
            found[name] = list(attribute.as_graphs())
    return found


def reads_of(node: ir.Node) -> list[ir.Value]:
    """What a node reads from outside: its inputs, and what its subgraphs capture."""
    read = [value for value in node.inputs if value is not None]
    bodies = [body for graphs in bodies_of(node).values() for body in graphs]
    if not bodies:
        return read
    inner = [each for body in bodies for each in body.all_nodes()]
    within = {*bodies, *(body for each in inner for graphs in bodies_of(each).values() for body in graphs)}
    read += [value for each in inner for value in each.inputs if value is not None]
    read += [value for body in within for value in body.outputs]
    return [value for value in read if _home(value) not in within]


class Correspondence:
    """The tensors and subgraph holders of an optimised graph that are those of the original.

    Args:
        original: The model as it was given, without functions.
        optimized: What ONNX Runtime made of it.

    Attributes:
        known: Tensor of the optimised graph → the original tensor that it is.
        named: Node of the optimised graph none of whose outputs is known → the original tensors that its name says it
            computes.
        makers: Original tensor → the node that gives it in the optimised graph; None for inputs and constants.
        retained: Original nodes with subgraphs that are still there.
    """

    def __init__(self, original: ir.Model, optimized: ir.Model) -> None:
        self._values: defaultdict[str, list[ir.Value]] = defaultdict(list)
        self._nodes: defaultdict[str, list[ir.Node]] = defaultdict(list)
        self._outer: dict[ir.Graph, ir.Graph | None] = {original.graph: None}
        self._read(original.graph)
        self.known: dict[ir.Value, ir.Value] = {}
        self.makers: dict[ir.Value, ir.Node | None] = {}
        self.retained: set[ir.Node] = set()
        self._unknown: list[tuple[ir.Node, ir.Graph | None]] = []
        self._match(optimized.graph, original.graph)
        self.named: dict[ir.Node, tuple[ir.Value, ...]] = {}
        for node, graph in self._unknown:
            said = tuple(value for value in self._said(node, graph) if self._may_make(node, value))
            if said:
                self.named[node] = said

    def _read(self, graph: ir.Graph) -> None:
        for value in (*graph.inputs, *graph.initializers.values()):
            if value.name:
                self._values[value.name].append(value)
        for node in graph:
            if node.name:
                self._nodes[node.name].append(node)
            for value in node.outputs:
                if value.name:
                    self._values[value.name].append(value)
            for bodies in bodies_of(node).values():
                for body in bodies:
                    self._outer[body] = graph
                    self._read(body)

    def _match(self, optimized: ir.Graph, original: ir.Graph | None) -> None:
        """Find the tensors of one graph, and of the graphs inside it, by name.

        Args:
            optimized: The graph.
            original: What it is in the original; None where that is not known.
        """
        for value in (*optimized.inputs, *optimized.initializers.values()):
            self._know(value, None, original)
        for node in optimized:
            for value in node.outputs:
                self._know(value, node, original)
            if not any(value in self.known for value in node.outputs):
                self._unknown.append((node, original))
            bodies = bodies_of(node)
            if bodies:
                holder = self._holder(node, original)
                before = bodies_of(holder) if holder is not None else {}
                if holder is not None:
                    self.retained.add(holder)
                for name, graphs in bodies.items():
                    pairs = before.get(name, [])
                    for position, graph in enumerate(graphs):
                        self._match(graph, pairs[position] if position < len(pairs) else None)

    def _know(self, value: ir.Value, maker: ir.Node | None, graph: ir.Graph | None) -> None:
        found = self._here(self._values.get(value.name or "", []), graph)
        if found is not None:
            self.known[value] = found
            self.makers.setdefault(found, maker)

    def _holder(self, node: ir.Node, graph: ir.Graph | None) -> ir.Node | None:
        """The original of a node with subgraphs: by its outputs, else by its name."""
        made_by = (self.known[value].producer() for value in node.outputs if value in self.known)
        by_name = self._here_node(self._nodes.get(node.name or "", []), graph)
        for candidate in (*made_by, by_name):
            if candidate is not None and candidate.op_identifier() == node.op_identifier():
                return candidate
        return None

    def _chain(self, graph: ir.Graph | None) -> Iterator[ir.Graph]:
        while graph is not None:
            yield graph
            graph = self._outer.get(graph)

    def _here(self, candidates: list[ir.Value], graph: ir.Graph | None) -> ir.Value | None:
        """The one of several tensors of a name that can be seen in a graph: branches may use a name each for itself."""
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        homes = {_home(value): value for value in candidates}
        return next((homes[scope] for scope in self._chain(graph) if scope in homes), None)

    def _here_node(self, candidates: list[ir.Node], graph: ir.Graph | None) -> ir.Node | None:
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        here = [node for node in candidates if node.graph is graph]
        return here[0] if len(here) == 1 else None

    def _said(self, node: ir.Node, graph: ir.Graph | None) -> tuple[ir.Value, ...]:
        """The original tensors that the longest known beginning of a node's name stands for."""
        name = node.name or ""
        for end in range(len(name), 0, -1):
            if end < len(name) and name[end].isalnum():
                continue
            value = self._here(self._values.get(name[:end], []), graph)
            if value is not None and value.producer() is not None:
                return (value,)
            original = self._here_node(self._nodes.get(name[:end], []), graph)
            if original is not None:
                return tuple(original.outputs)
        return ()

    def _may_make(self, node: ir.Node, value: ir.Value) -> bool:
        """Whether a node whose name begins like a tensor's may compute it.

        It does not where another gives that tensor, unless what the node gives is brought into its old form there: a
        convolution in blocked layout, and the node behind it that takes the blocks apart.
        """
        if value not in self.makers:
            return True
        maker = self.makers[value]
        queue, seen = deque([node]), {node}
        while queue:
            for output in queue.popleft().outputs:
                if output in self.known:
                    continue
                for use in output.uses():
                    if use.node is maker:
                        return True
                    if use.node not in seen:
                        seen.add(use.node)
                        queue.append(use.node)
        return False


def _home(value: ir.Value) -> ir.Graph | ir.Function | None:
    producer = value.producer()
    return producer.graph if producer is not None else value.graph
