"""Regions: the nodes of a module, and the tensors that enter and leave them.

One pass over the graph finds which nodes are in which module, which node holds which subgraph,
which nodes call functions, and which values are the same for all inputs.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.call_tree import CallTree, Instance, NodeCalls
from htp_export.format.fates import Fate
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.format.model_metadata import Tap
from htp_export.format.tags import Reason
from htp_export.model.boundaries import OUTSIDE, Boundaries, input_dependent_values, nodes_below
from htp_export.reporting.columns import many
from htp_export.reporting.result import html_table
from htp_export.shapes.operator_kinds import (
    RANDOM,
    nodes_in,
    reads_of,
    subgraphs,
    with_subgraphs,
)


def all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Every node of a model's graph and functions; a node comes before those in its subgraphs."""
    yield from nodes_in(model.graph)
    for function in model.functions.values():
        yield from nodes_in(function)


def name_of_node(node: ir.Node) -> str:
    """The name of a node, or of its first output if it has none."""
    return node.name or next((value.name for value in node.outputs if value.name), "")


def all_values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Every value of a graph and its subgraphs: inputs, initializers, and the outputs of nodes."""
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs
        for body in subgraphs(node):
            yield from all_values(body)


class GraphIndex:
    """The facts that one pass over a model finds for all its regions.

    After a change of the graph, create a new one. Nodes that only the outputs ``taps`` need are
    left out of boundaries.

    Attributes:
        nodes: Every node, in the order of ``all_nodes``.
        works: Node → its owners and calls.
        owners: Node → its owners.
        bodies: Node → its subgraphs, for nodes that have any.
    """

    def __init__(
        self,
        model: ir.Model,
        work_of: Callable[[ir.Node], NodeCalls],
        taps: Mapping[str, Tap] | None = None,
    ) -> None:
        self.model = model
        self._work_of = work_of
        self._taps = taps or {}
        self.nodes = list(all_nodes(model))
        self.works = {node: work_of(node) for node in self.nodes}
        self.owners = {node: work.owners for node, work in self.works.items()}
        self.bodies = {node: bodies for node in self.nodes if (bodies := subgraphs(node))}
        self._holder = {body: node for node, bodies in self.bodies.items() for body in bodies}
        self._functions = {function.graph: function for function in model.functions.values()}

    def clone(self) -> GraphIndex:
        """Return the same for a copy of the model."""
        return GraphIndex(self.model.clone(), self._work_of, self._taps)

    @cached_property
    def place(self) -> Mapping[ir.Node, int]:
        """Node → its index in ``nodes``."""
        return {node: place for place, node in enumerate(self.nodes)}

    @cached_property
    def below(self) -> Mapping[str, Sequence[ir.Node]]:
        """Module path → the nodes in its region, in order."""
        return nodes_below(self.works.items())

    def counts(self, kind: Callable[[ir.Node], str]) -> dict[str, dict[str, int]]:
        """Module path → kind of nodes → count in its region, most frequent first.

        Nodes of kind ``""`` are not counted.
        """
        # modules → counts of the nodes that are in exactly their regions
        by_modules: defaultdict[frozenset[str], Counter[str]] = defaultdict(Counter)
        for node, work in self.works.items():
            name = kind(node)
            if name:
                by_modules[work.modules][name] += 1
        by_path: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for modules, counts in by_modules.items():
            for path in {"", *modules}:
                for name, count in counts.items():
                    by_path[path][name] += count
        return {path: dict(counts.most_common()) for path, counts in by_path.items()}

    @cached_property
    def _called(self) -> dict[ir.Node, list[ir.Graph]]:
        bodies = {function.identifier(): [graph] for graph, function in self._functions.items()}
        if not bodies:
            return {}
        return {
            node: bodies[node.op_identifier()]
            for node in self.nodes
            if node.op_identifier() in bodies
        }

    @cached_property
    def calls(self) -> Mapping[ir.Graph, Sequence[ir.Node]]:
        """Body of a function of the model → the nodes that call it."""
        calls: dict[ir.Graph, list[ir.Node]] = {graph: [] for graph in self._functions}
        for node, (graph,) in self._called.items():
            calls[graph].append(node)
        return calls

    @cached_property
    def constant(self) -> frozenset[ir.Value]:
        """The values that depend only on initializers and constants, the same in every run."""
        values: set[ir.Value] = set()
        for node in self.nodes:
            if node.op_type in RANDOM or node in self.bodies or node in self._called:
                continue
            if all(
                value is None or value in values or self.initializer(value) for value in node.inputs
            ):
                values.update(node.outputs)
        return frozenset(values)

    @cached_property
    def boundaries(self) -> Boundaries[ir.Value]:
        """The boundaries of regions: all values that are not the same in every run, also sizes.

        A region contains all nodes in the subgraphs of its nodes. A result of the graph leaves also
        if it is constant.
        """

        def counts(value: ir.Value) -> bool:
            if value in self.constant and not value.is_graph_output():
                return False
            return self.initializer(value) is None

        holders: list[int] = []
        if self.bodies:
            for node in self.nodes:
                holder = self._holder_of(node)
                holders.append(OUTSIDE if holder is None else self.place[holder])
        return self._boundaries(counts, holders)

    @cached_property
    def boundaries_by_values(self) -> Boundaries[ir.Value]:
        """The boundaries of modules as in PyTorch: values that depend on values of the inputs.

        A node in a subgraph is in regions by itself.
        """
        return self._boundaries(input_dependent_values(self.model, self.nodes).__contains__, ())

    def _boundaries(
        self, counts: Callable[[ir.Value], bool], holders: Sequence[int]
    ) -> Boundaries[ir.Value]:
        results = {value for value in self.model.graph.outputs if value.name not in self._taps}
        for graph, calls in self.calls.items():
            if not calls:  # nothing else consumes the results of the function
                results.update(graph.outputs)
        taps = self._tap_nodes()
        tapped = {value for node in taps for value in node.outputs}
        passed: list[tuple[list[ir.Value], list[ir.Value]]] = []
        fused = set[int]()
        for place, node in enumerate(self.nodes):
            passed.append(([], []) if node in taps else self.passed(node))
            if node.metadata_props.get(tags.REASON) == Reason.FUSED:
                fused.add(place)
        return Boundaries(
            passed,
            [self.works[node] for node in self.nodes],
            lambda value: value not in tapped and counts(value),
            results,
            holders,
            fused,
        )

    def _tap_nodes(self) -> set[ir.Node]:
        """The nodes that ``tap`` inserted for its outputs."""
        tensors = {name for tap in self._taps.values() for name in tap.made}
        if not tensors:
            return set()
        nodes: set[ir.Node] = set()
        for node in filter(is_inserted, self.nodes):
            if all(value.name in tensors for value in node.outputs):
                nodes.add(node)
        return nodes

    def passed(self, node: ir.Node) -> tuple[list[ir.Value], list[ir.Value]]:
        """The values that a node reads and produces, with those of its subgraphs or function."""
        reads, makes = [value for value in node.inputs if value is not None], [*node.outputs]
        for graph in (*self.bodies.get(node, ()), *self._called.get(node, ())):
            reads.extend(graph.outputs)
            makes.extend(graph.inputs)
        return reads, makes

    def reads(self, node: ir.Node) -> Iterator[ir.Value]:
        """The values of its own graph that a node and its subgraphs read."""
        return (value for value in reads_of(node) if value.graph is node.graph)

    def scopes(self, node: ir.Node) -> Iterator[ir.Node]:
        """The node, then the nodes whose subgraphs contain it, innermost first."""
        current: ir.Node | None = node
        while current is not None:
            yield current
            current = self._holder_of(current)

    def _holder_of(self, node: ir.Node) -> ir.Node | None:
        return self._holder.get(node.graph) if node.graph is not None else None

    def holders(self, graph: ir.Graph | None) -> Sequence[ir.Node]:
        """The node that holds a subgraph, or the calls of a function; none for the main graph."""
        if graph is None or graph is self.model.graph:
            return ()
        return (self._holder[graph],) if graph in self._holder else self.calls.get(graph, ())

    def initializer(self, value: ir.Value) -> ir.Value | None:
        """The initializer of a value: itself, or an argument of the only call of its function."""
        seen: set[ir.Value] = set()
        while not value.is_initializer():
            # A function that calls itself is not valid, but the file may be untrusted.
            if value in seen:
                return None
            seen.add(value)
            calls = self.calls.get(value.graph, ()) if value.graph is not None else ()
            if not value.is_graph_input() or len(calls) != 1 or value.graph is None:
                return None
            position = next(k for k, formal in enumerate(value.graph.inputs) if formal is value)
            argument = calls[0].inputs[position] if position < len(calls[0].inputs) else None
            if argument is None:
                return None
            value = argument
        return value


def is_inserted(node: ir.Node) -> bool:
    """Whether this package inserted a node that the original model does not have."""
    return node.metadata_props.get(tags.REASON) == Reason.INSERTED


class Region:
    """The nodes of a module, and its boundary.

    A region contains the subgraphs of its nodes (the branches of an ``If``): tensors that these
    capture enter the region. With ``call``, it has only the nodes of this call of the module.
    """

    def __init__(
        self,
        index: GraphIndex,
        hierarchy: Hierarchy,
        calls: CallTree,
        path: str,
        call: int | None = None,
    ) -> None:
        self._index = index
        self._hierarchy = hierarchy
        self._calls = calls
        self._call = call
        self.path = path

    def __deepcopy__(self, memo: dict[int, object]) -> Region:
        """Return the region in a copy of the model; regions that are copied together share it."""
        index = memo.get(id(self._index))
        if not isinstance(index, GraphIndex):
            memo[id(self._index)] = index = self._index.clone()
        return Region(index, self._hierarchy, self._calls, self.path, self._call)

    def __repr__(self) -> str:
        call = "" if self._call is None else f", call {self._call}"
        kind = self.info.simple_class or "class unknown"
        return f"<Region {self.path or '.'!r} ({kind}{call}): {len(self.nodes)} nodes>"

    def _repr_html_(self) -> str:
        """The nodes, and the tensors of the boundary, for notebooks."""
        lines = []
        for node in self.nodes:
            owners = ", ".join(path or "(root)" for path in self.owners_of(node))
            outputs = ", ".join(str(value.name) for value in node.outputs)
            lines.append((node.name or "", node.op_type, owners, outputs))
        notes = [repr(self)]
        for title, values in (("inputs", self.inputs), ("outputs", self.outputs)):
            names = ", ".join(str(value.name) for value in values)
            notes.append(f"{title}: {names or 'none'}")
        return html_table(("node", "operator", "modules", "outputs"), lines, notes)

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
        """The number of calls of the module."""
        return self.info.calls

    @property
    def fate(self) -> Fate:
        """The fate of the module."""
        return self.info.fate

    @property
    def children(self) -> list[str]:
        """The paths of the direct children."""
        return list(self._hierarchy.children(self.path))

    def owners_of(self, node: ir.Node) -> tuple[str, ...]:
        """The owners of any node of the model."""
        return self._index.owners.get(node, ())

    @cached_property
    def nodes(self) -> list[ir.Node]:
        """The nodes that the module and its descendants compute, also in modules that they call.

        Nodes of subgraphs and functions are included, in graph order. Nodes that a descendant
        computed for a caller outside are not.
        """
        below = self._index.below.get(self.path, ())
        call = None if self._call is None else Instance(self.path, self._call)
        return [node for node in below if call is None or self._index.works[node].in_call(call)]

    @cached_property
    def own_nodes(self) -> list[ir.Node]:
        """The nodes that the module's own ``forward`` computes, without descendants."""
        return [node for node in self.nodes if self.path in self.owners_of(node)]

    @cached_property
    def inputs(self) -> list[ir.Value]:
        """The tensors that enter, by first use; no initializers, and no constants."""
        entering = dict.fromkeys(value for value, leaves in self._crossing if not leaves)
        return [value for value in entering if value not in self._index.constant]

    @cached_property
    def outputs(self) -> list[ir.Value]:
        """The tensors that leave, by order of production.

        A tensor that a node with several owners passes to another of them, or to its block, does
        not leave; see ``NodeCalls.blocks_outside``. A constant leaves only if the model returns it.
        """
        return list(dict.fromkeys(value for value, leaves in self._crossing if leaves))

    @cached_property
    def parameters(self) -> list[ir.Value]:
        """The initializers that the region's nodes read, each once, by first use."""
        found: dict[ir.Value, None] = {}
        for place in self._closure:
            read, _ = self._index.passed(self._index.nodes[place])
            for value in read:
                initializer = self._index.initializer(value)
                if initializer is not None:
                    found[initializer] = None
        return list(found)

    def call(self, number: int) -> Region:
        """The region of one call of a module that ran several times.

        It has the nodes that the module, and modules that ran in it, computed in that call, counted
        from 0. A file of an older version does not record in which call a descendant ran. Then the
        calls of a descendant are divided equally among the calls of the module; if that is not
        possible, it is in none. A warning is logged.

        Raises:
            InputError: If the module did not run that often.
        """
        if not 0 <= number < self.calls:
            raise InputError(
                f"module {self.path!r} has no call {number}: it ran {many(self.calls, 'time')}, counted from 0"
            )
        self._calls.warn(self.path)
        return Region(self._index, self._hierarchy, self._calls, self.path, number)

    @cached_property
    def _closure(self) -> list[int]:
        """The indices of the nodes and of all nodes in their subgraphs, of any owner, in order."""
        index = self._index
        return sorted({index.place[inner] for node in self.nodes for inner in with_subgraphs(node)})

    @cached_property
    def _crossing(self) -> list[tuple[ir.Value, bool]]:
        call = None if self._call is None else Instance(self.path, self._call)
        crossing = self._index.boundaries.around(self._closure, [self.path], call)
        return [(value, leaves) for value, _, leaves in crossing]
