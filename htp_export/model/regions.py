"""Regions: the nodes of a module, and the tensors that enter and leave them.

The graph is onnx_ir's; what is added here is made in one pass over it: which nodes lie in which module, which node
holds which subgraph, where functions are called, and which values are the same whatever the model is given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.format.call_tree import CallTree, Instance, Work
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.model.operators import RANDOM

__all__ = ["GraphIndex", "Region", "all_nodes", "subgraphs"]


def all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Every node of a model: of its graph, with those inside subgraphs after the node that holds them; of functions.

    Examples:
        >>> import onnx_ir as ir
        >>> relu = ir.node("Relu", [ir.val("x")])
        >>> graph = ir.Graph(relu.inputs, relu.outputs, nodes=[relu], opset_imports={"": 20})
        >>> [node.op_type for node in all_nodes(ir.Model(graph, ir_version=10))]
        ['Relu']
    """
    yield from model.graph.all_nodes()
    for function in model.functions.values():
        yield from function.all_nodes()


class GraphIndex:
    """What one pass over a model tells about every region of it.

    It is made of the model as it is; once the graph is changed, make a new one.

    Args:
        model: The model.
        work_of: Whose work a node does; that of nobody for an untagged one.

    Attributes:
        nodes: Every node, in the order of ``all_nodes``.
        works: Node → whose work it does.
        owners: Node → its owners.
        below: Module path → the nodes in its region, in order: those with an owner at or below it, but for what such
            a module computed when another one called it.
        bodies: Node → its subgraphs, for nodes that have any.
    """

    def __init__(self, model: ir.Model, work_of: Callable[[ir.Node], Work]) -> None:
        self.model = model
        self.nodes = list(all_nodes(model))
        self.works = {node: work_of(node) for node in self.nodes}
        self.owners = {node: work.owners for node, work in self.works.items()}
        below: defaultdict[str, list[ir.Node]] = defaultdict(list)
        for node, work in self.works.items():
            for path in work.modules:
                below[path].append(node)
        self.below: Mapping[str, Sequence[ir.Node]] = dict(below)
        self.bodies = {node: bodies for node in self.nodes if (bodies := subgraphs(node))}
        self._holder = {body: node for node, bodies in self.bodies.items() for body in bodies}
        self._functions = {function.graph: function for function in model.functions.values()}

    @cached_property
    def _calls(self) -> dict[ir.Graph, list[ir.Node]]:
        """Body of a function of the model → the nodes that call it."""
        if not self._functions:
            return {}
        by_identifier = {function.identifier(): graph for graph, function in self._functions.items()}
        calls: dict[ir.Graph, list[ir.Node]] = {graph: [] for graph in self._functions}
        for node in self.nodes:
            if node.op_identifier() in by_identifier:
                calls[by_identifier[node.op_identifier()]].append(node)
        return calls

    @cached_property
    def constant(self) -> frozenset[ir.Value]:
        """The values that nodes compute from initializers and constants alone, the same in every run."""
        found: set[ir.Value] = set()
        called = {node for calls in self._calls.values() for node in calls}
        for node in self.nodes:
            if node.op_type in RANDOM or node in self.bodies or node in called:
                continue
            if all(value is None or value in found or self.initializer(value) for value in node.inputs):
                found.update(node.outputs)
        return frozenset(found)

    def captured(self, node: ir.Node) -> Iterator[ir.Value]:
        """What a node's subgraphs, and those inside them, read of the graph that the node is in."""
        for body in self.bodies.get(node, ()):
            for inner in body.all_nodes():
                yield from (value for value in inner.inputs if value is not None and value.graph is node.graph)
                for deeper in self.bodies.get(inner, ()):
                    yield from (value for value in deeper.outputs if value.graph is node.graph)
            yield from (value for value in body.outputs if value.graph is node.graph)

    def scopes(self, node: ir.Node) -> Iterator[ir.Node]:
        """The node, then the nodes whose subgraphs it lies in, innermost first."""
        current: ir.Node | None = node
        while current is not None:
            yield current
            current = self._holder.get(current.graph) if current.graph is not None else None

    def holders(self, graph: ir.Graph | None) -> Sequence[ir.Node]:
        """The nodes that run a graph: the one it is a subgraph of, or the calls of the function; none for the main."""
        if graph is None or graph is self.model.graph:
            return ()
        return (self._holder[graph],) if graph in self._holder else self._calls.get(graph, ())

    def initializer(self, value: ir.Value) -> ir.Value | None:
        """The initializer that a value is, directly or as the argument of the one call of its function."""
        seen: set[ir.Value] = set()
        while not value.is_initializer():
            if value in seen:  # a function that calls itself: no valid model, but files come from anywhere
                return None
            seen.add(value)
            calls = self._calls.get(value.graph, ()) if value.graph is not None else ()
            if not value.is_graph_input() or len(calls) != 1 or value.graph is None:
                return None
            position = next(k for k, formal in enumerate(value.graph.inputs) if formal is value)
            argument = calls[0].inputs[position] if position < len(calls[0].inputs) else None
            if argument is None:
                return None
            value = argument
        return value


class Region:
    """The nodes of a module, and its boundary.

    A node's subgraphs (the branches of an ``If``) count with the node: what they capture enters the region.

    Args:
        index: The model's index.
        hierarchy: The module tree.
        calls: Which call ran in which.
        path: The module.
        call: Only the nodes of this call of the module; all calls where it is None.
    """

    def __init__(
        self, index: GraphIndex, hierarchy: Hierarchy, calls: CallTree, path: str, call: int | None = None
    ) -> None:
        self._index = index
        self._hierarchy = hierarchy
        self._calls = calls
        self._call = call
        self.path = path

    def __repr__(self) -> str:
        call = "" if self._call is None else f", call {self._call}"
        return f"<Region {self.path!r} ({self.info.simple_class or 'class unknown'}{call}): {len(self.nodes)} nodes>"

    @property
    def info(self) -> ModuleInfo:
        """The module: class, calls, fate."""
        return self._hierarchy[self.path]

    @property
    def class_name(self) -> str:
        """The module's fully qualified class."""
        return self.info.class_name

    @property
    def calls(self) -> int:
        """How many times the module ran."""
        return self.info.calls

    @property
    def fate(self) -> str:
        """What became of the module, one of ``hierarchy.FATES``."""
        return self.info.fate

    @property
    def children(self) -> list[str]:
        """The paths of the modules right below."""
        return list(self._hierarchy.children(self.path))

    def owners_of(self, node: ir.Node) -> tuple[str, ...]:
        """The owners of a node, of this region or another."""
        return self._index.owners.get(node, ())

    @cached_property
    def nodes(self) -> list[ir.Node]:
        """The nodes that the module computes, it or modules below it or called by it, in graph order.

        With those in subgraphs and functions. What a module below it computed when another one called it is that one's.
        """
        below = self._index.below.get(self.path, ())
        return [node for node in below if self._call is None or self._index.works[node].in_call(self._instance)]

    @cached_property
    def own_nodes(self) -> list[ir.Node]:
        """The nodes that the module's own ``forward`` computes, and no module below it."""
        return [node for node in self.nodes if self.path in self.owners_of(node)]

    @cached_property
    def inputs(self) -> list[ir.Value]:
        """The tensors that enter, by first use; no initializers, and nothing that depends on no input of the model."""
        read = dict.fromkeys(value for node in self._closure for value in self._reads(node))
        return [value for value in read if self._enters(value)]

    @cached_property
    def outputs(self) -> list[ir.Value]:
        """The tensors that leave, by order of production.

        A tensor leaves if the model returns it or if a node outside reads it. A node with several owners does for each
        of them what that one would do alone: what it gives to another of them, or to the block around that one, leaves
        none; see ``Work.others``. What depends on no input of the model leaves only where the model returns it.
        """
        return [value for node in self._closure for value in node.outputs if self._leaves(node, value)]

    @cached_property
    def parameters(self) -> list[ir.Value]:
        """The initializers that the region's nodes read, each once, by first use."""
        read = (self._index.initializer(value) for node in self._closure for value in self._reads(node))
        return list(dict.fromkeys(value for value in read if value is not None))

    def call(self, number: int) -> Region:
        """The region of one call of a module that ran several times.

        It has the nodes that the module, and whatever ran inside it, computed in that call. A file that was exported
        by an older version does not say in which call a module below ran: then it is taken to have run equally often
        in every call, or, where it ran some other number of times, its nodes are in no call's region. A warning is
        logged.

        Args:
            number: The call, from 0.

        Raises:
            InputError: If the module did not run that often.
        """
        if not 0 <= number < self.calls:
            raise InputError(f"module {self.path!r} has no call {number}: it ran {self.calls} times, counted from 0")
        self._calls.warn(self.path)
        return Region(self._index, self._hierarchy, self._calls, self.path, number)

    @property
    def _instance(self) -> Instance:
        return Instance(self.path, self._call or 0)

    @cached_property
    def _members(self) -> frozenset[ir.Node]:
        return frozenset(self.nodes)

    @cached_property
    def _closure(self) -> list[ir.Node]:
        """The nodes and, after each, what its subgraphs hold, whoever owns that."""
        if not self._index.bodies:
            return self.nodes
        inner = {
            node: [held for body in bodies for held in body.all_nodes()]
            for node, bodies in self._index.bodies.items()
            if node in self._members
        }
        return list(dict.fromkeys(held for node in self.nodes for held in (node, *inner.get(node, ()))))

    def _inside(self, node: ir.Node) -> bool:
        return any(scope in self._members for scope in self._index.scopes(node))

    def _reads(self, node: ir.Node) -> Iterator[ir.Value]:
        """What a node reads; a subgraph that gives back a value from outside reads it too."""
        yield from (value for value in node.inputs if value is not None)
        for body in self._index.bodies.get(node, ()):
            yield from (value for value in body.outputs if value.graph is not body)

    def _enters(self, value: ir.Value) -> bool:
        if value in self._index.constant or self._index.initializer(value) is not None:
            return False
        producer = value.producer()
        if producer is not None:
            return not self._inside(producer)
        return not any(self._inside(holder) for holder in self._index.holders(value.graph))

    def _leaves(self, node: ir.Node, value: ir.Value) -> bool:
        if value.is_graph_output():
            holders = self._index.holders(value.graph)
            if not holders or not all(self._inside(holder) for holder in holders):
                return True
        if value in self._index.constant:
            return False
        work = self._index.works.get(node, Work())
        others, calls = work.others([self.path]), self._other_calls(work)
        return any(
            not self._inside(use.node)
            and not any(self._belongs(scope, others, calls) for scope in self._index.scopes(use.node))
            for use in value.uses()
        )

    def _other_calls(self, work: Work) -> list[Instance]:
        """Of the region of one call, the other calls of the module for which a node does the same."""
        if self._call is None:
            return []
        apart = (part.running for part in work.parts if self._instance not in part.running)
        return [call for running in apart for call in running if call.path == self.path]

    def _belongs(self, node: ir.Node, paths: Collection[str], calls: Sequence[Instance]) -> bool:
        """Whether a node is in the region of one of the modules, or of one of the calls."""
        work = self._index.works.get(node, Work())
        return not work.modules.isdisjoint(paths) or any(map(work.in_call, calls))


def subgraphs(node: ir.Node) -> tuple[ir.Graph, ...]:
    """The graphs in a node's attributes: branches and loop bodies."""
    if not node.attributes:
        return ()
    found: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            found.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            found.extend(attribute.as_graphs())
    return tuple(found)
