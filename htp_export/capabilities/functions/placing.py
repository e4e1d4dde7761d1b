"""The selected module calls that each node lies in, and the groups that can become one node."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import networkx as nx
import onnx_ir as ir

from htp_export.editing.function_records import given_values
from htp_export.format.call_tree import Instance, NodeCalls
from htp_export.model.regions import GraphIndex
from htp_export.model.tagged import TaggedModel
from htp_export.shapes.operator_kinds import is_standard, subgraphs, with_subgraphs

MOST_NESTED = 100
"""The most functions inside one another: https://github.com/onnx/onnx refuses more when it checks a
model."""

Chain: TypeAlias = tuple[Instance, ...]
"""The instances that a node lies in, outermost first."""


class Placement:
    """The chain of every node of a model's graph and its subgraphs, outside functions of the model.

    A node of several modules lies in the modules around all of them, and a node of an unknown call
    in none that ran several times. Instances that could not become one call of a function are in no
    chain.
    """

    def __init__(self, tagged: TaggedModel, index: GraphIndex, selected: Collection[str]) -> None:
        self._calls = tagged.calls
        self._selected = frozenset(selected)
        self._most = MOST_NESTED - _nested(tagged.model)
        self._around: dict[Instance, Chain] = {}
        # path of a selected module → why some instance of it is in no chain
        self.flat: dict[str, str] = {}
        # Node → the nodes whose subgraphs it lies in, outermost first.
        self.scopes = {
            node: [*index.scopes(node)][:0:-1] for node in tagged.model.graph.all_nodes()
        }
        self.chains = {node: self._chain_of(node, index.works[node]) for node in self.scopes}
        for path in self._selected:
            self._calls.warn(path)
        self._drop_instances_in_several_graphs()

    def without(self, node: ir.Node, instances: Iterable[Instance]) -> None:
        """Remove a node, with all nodes of its subgraphs, from some instances."""
        gone = frozenset(instances)
        for inner in with_subgraphs(node):
            self.chains[inner] = _chain_without(self.chains[inner], gone)

    def _chain_of(self, node: ir.Node, work: NodeCalls) -> Chain:
        if any(_returns_outer_value(body) for body in subgraphs(node)):
            return ()  # its outer value could not be an input of a function
        source = node.inputs[0] if is_standard(node, "Identity") else None
        if source is not None and source.is_initializer():
            # TorchScript writes it for a weight that is equal to another one; like that one, it is
            # an input of functions
            return ()
        return _common_start([self._selected_around(call) for call in work.calls])

    def _selected_around(self, call: Instance) -> Chain:
        """The known selected instances that a call ran in, outermost first."""
        chain = self._calls.chain(call)
        new: list[Instance] = []
        around: Chain = ()
        for running in chain:
            if running in self._around:
                around = self._around[running]
                break
            new.append(running)
        # an instance lies in the instances of its caller, and in itself
        for running in reversed(new):
            if running.path in self._selected and running.call >= 0:
                if len(around) < self._most:
                    around = (*around, running)
                else:
                    reason = f"ONNX allows {MOST_NESTED} functions inside one another"
                    self.flat[running.path] = reason
            self._around[running] = around
        return around

    def _drop_instances_in_several_graphs(self) -> None:
        """Drop instances with nodes in several graphs and no node around all of them."""
        homes: defaultdict[Instance, set[ir.Graph | None]] = defaultdict(set)
        for node, chain in self.chains.items():
            of_scopes = self.instances_of_scopes(node)
            for instance in chain:
                if instance not in of_scopes:
                    homes[instance].add(node.graph)
        gone = frozenset(instance for instance, graphs in homes.items() if len(graphs) > 1)
        if not gone:
            return
        for instance in gone:
            self.flat[instance.path] = "its nodes lie in several branches or loop bodies"
        for node, chain in self.chains.items():
            self.chains[node] = _chain_without(chain, gone)

    def instances_of_scopes(self, node: ir.Node) -> set[Instance]:
        """The instances of the nodes in whose subgraphs a node lies."""
        instances: set[Instance] = set()
        for scope in self.scopes[node]:
            instances.update(self.chains[scope])
        return instances


def _chain_without(chain: Chain, gone: Collection[Instance]) -> Chain:
    return tuple(instance for instance in chain if instance not in gone)


def _nested(model: ir.Model) -> int:
    """The depth of a model's functions inside one another, up to the limit of ONNX."""
    remaining: dict[ir.OperatorIdentifier, set[ir.OperatorIdentifier]] = {}
    for key, function in model.functions.items():
        remaining[key] = {node.op_identifier() for node in function.all_nodes()}
    levels = 0
    while remaining and levels < MOST_NESTED:
        called = set(itertools.chain(*remaining.values())) & remaining.keys()
        if len(called) == len(remaining):  # some call themselves
            break
        remaining = {key: inside for key, inside in remaining.items() if key in called}
        levels += 1
    return levels


def _common_start(chains: Sequence[Chain]) -> Chain:
    if not chains:
        return ()
    same = 0
    for instances in zip(*chains, strict=False):
        if len(set(instances)) > 1:
            break
        same += 1
    return chains[0][:same]


def _returns_outer_value(graph: ir.Graph) -> bool:
    """Whether a subgraph returns a value from outside; ONNX Runtime refuses that, too."""
    inside = {*given_values(graph), *(value for node in graph for value in node.outputs)}
    return not inside.issuperset(graph.outputs)


@dataclass(frozen=True)
class Group:
    """Nodes that become one call of a function."""

    instance: Instance  # the module call
    items: tuple[Item, ...]  # its nodes and the groups inside it, in an order in which they can run


Item: TypeAlias = ir.Node | Group
_Key: TypeAlias = ir.Node | Instance


class Levels:
    """Arranges the nodes of graphs in groups, and removes nodes from chains that prevent a group.

    Groups of one level may form a cycle: each needs results of the other. A node in it without
    another owner joins the group that may contain it. Otherwise, nodes are removed from a group:
    those before the nodes between, or those after, whichever are fewer. A group that would lose
    half of its nodes is dropped.
    """

    def __init__(self, placement: Placement, works: Mapping[ir.Node, NodeCalls]) -> None:
        self._placement = placement
        self._works = works
        self._sources = _sources(placement)
        self._joined: set[ir.Node] = set()
        self._sizes: Counter[Instance] = Counter()
        for node, chain in placement.chains.items():
            of_scopes = placement.instances_of_scopes(node)
            self._sizes.update(instance for instance in chain if instance not in of_scopes)

    def arrange_graph(self, graph: ir.Graph) -> tuple[Item, ...]:
        """The nodes of a graph in groups; of a subgraph, without groups that contain all of it."""
        chains = self._placement.chains
        for node in graph:
            of_scopes = self._placement.instances_of_scopes(node)
            if of_scopes:
                chains[node] = _chain_without(chains[node], of_scopes)
        return self.arrange(graph)

    def arrange(self, nodes: Iterable[ir.Node], depth: int = 0) -> tuple[Item, ...]:
        """Nodes of one graph with ``depth`` instances in common, in nested groups."""
        listed = list(nodes)
        level = self._level(listed, depth)
        while cycles := level.cycles():
            waiting = [(level, cycle) for cycle in reversed(cycles)]
            # each separately: the change of one adds nothing to the others
            while waiting:
                around, cycle = waiting.pop()
                self._loosen(around, cycle, depth)
                inside = self._level(around.nodes_of(cycle), depth)
                waiting += [(inside, inner) for inner in reversed(inside.cycles())]
            level = self._level(listed, depth)
        items: list[Item] = []
        for key in level.order():
            if isinstance(key, Instance):
                items.append(Group(key, self.arrange(level.members[key], depth + 1)))
            else:
                items.append(key)
        return tuple(items)

    def _level(self, nodes: Sequence[ir.Node], depth: int) -> _Level:
        chains = self._placement.chains
        keys = {node: chains[node][depth] if len(chains[node]) > depth else node for node in nodes}
        return _Level(nodes, keys, self._sources)

    def _loosen(self, level: _Level, cycle: Collection[_Key], depth: int) -> None:
        """Change the chains of some nodes, so that a cycle has fewer groups."""
        placement = self._placement
        cuts: list[tuple[Instance, list[ir.Node]]] = []
        for key in cycle:
            if not isinstance(key, Instance):
                continue
            nodes = [other for other in cycle if isinstance(other, ir.Node)]
            joining = [node for node in nodes if self._may_join(node, key)]
            if joining:
                self._joined.update(joining)
                for node in joining:
                    placement.chains[node] = (*placement.chains[node][:depth], key)
                return
            cuts.append((key, level.cut(key, cycle)))
        # Every cycle contains a group, as the graph of the nodes has no cycle.
        group, cut = min(cuts, key=lambda pair: len(pair[1]))
        rest = len(level.members[group]) - len(cut)
        if 2 * rest > self._sizes[group]:
            for node in cut:
                placement.without(node, placement.chains[node][depth:])
            return
        names_between = sorted({self._name(other) for other in cycle if other != group})
        listed = ", ".join(names_between[:3]) + (", …" if len(names_between) > 3 else "")
        placement.flat[group.path] = f"it does not hold together: {listed} lies between its nodes"
        for node in level.members[group]:
            placement.without(node, [group])

    def _may_join(self, node: ir.Node, group: Instance) -> bool:
        if node in self._joined:  # and was removed again
            return False
        work = self._works.get(node, NodeCalls())
        return not work.owners or group.path in work.modules

    def _name(self, key: _Key) -> str:
        if isinstance(key, Instance):
            return repr(key.path)
        owners = self._works.get(key, NodeCalls()).owners
        return f"node {key.name!r} of {' and '.join(map(repr, owners)) or 'no module'}"


_BETWEEN = "between"
"""A node that represents all nodes between the nodes of a group."""


class _Level:
    """The graph of one level.

    ``members``: the nodes of each group; a node in no group is its own member.
    """

    def __init__(
        self,
        nodes: Sequence[ir.Node],
        keys: Mapping[ir.Node, _Key],
        sources: Mapping[ir.Node, Collection[ir.Node]],
    ) -> None:
        self._keys, self._sources = keys, sources
        self.members: dict[_Key, list[ir.Node]] = {}
        for node in nodes:
            self.members.setdefault(keys[node], []).append(node)
        self._rank = {key: rank for rank, key in enumerate(self.members)}
        self._place = {node: place for place, node in enumerate(nodes)}
        self._graph = nx.DiGraph()
        self._graph.add_nodes_from(self.members)
        self._graph.add_edges_from(
            (keys[source], keys[node])
            for node in nodes
            for source in sources[node]
            if source in keys and keys[source] != keys[node]
        )

    def cycles(self) -> list[list[_Key]]:
        """The strongly connected parts of several members, in graph order; empty if it can run."""
        components = nx.strongly_connected_components(self._graph)
        parts = [sorted(part, key=self._rank.__getitem__) for part in components if len(part) > 1]
        return sorted(parts, key=lambda part: self._rank[part[0]])

    def nodes_of(self, cycle: Collection[_Key]) -> list[ir.Node]:
        """The nodes of a cycle, in graph order."""
        nodes = itertools.chain(*(self.members[key] for key in cycle))
        return sorted(nodes, key=self._place.__getitem__)

    def order(self) -> list[_Key]:
        """All members in an order in which they can run, near to the order of the graph."""
        return list(nx.lexicographical_topological_sort(self._graph, key=self._rank.__getitem__))

    def cut(self, group: Instance, cycle: Collection[_Key]) -> list[ir.Node]:
        """The fewest nodes to remove from a group so that it leaves a cycle.

        These are its nodes before the other members of the cycle, or its nodes after them.
        """
        inside = set(self.members[group])
        # each uses results of the group, and the group uses results of each
        between = {key for key in cycle if key != group}
        within = nx.DiGraph(
            (source, node) for node in inside for source in self._sources[node] if source in inside
        )
        used_between: set[ir.Node] = set()
        for key in between:
            for node in self.members[key]:
                used_between.update(self._sources[node])
        within.add_edges_from((node, _BETWEEN) for node in used_between & inside)
        before = nx.ancestors(within, _BETWEEN)
        within.remove_node(_BETWEEN)
        for node in inside:
            if any(self._keys.get(source) in between for source in self._sources[node]):
                within.add_edge(_BETWEEN, node)
        after = nx.descendants(within, _BETWEEN)
        fewer = before if len(before) <= len(after) else after
        return [node for node in self.members[group] if node in fewer]


def _sources(placement: Placement) -> dict[ir.Node, dict[ir.Node, None]]:
    """Node → the producers of its inputs in the same graph, also of inputs of its subgraphs."""
    sources: dict[ir.Node, dict[ir.Node, None]] = {node: {} for node in placement.scopes}
    for node, scopes in placement.scopes.items():
        for value in node.inputs:
            producer = None if value is None else value.producer()
            if producer is None:
                continue
            for outer in (node, *scopes):
                if outer.graph is producer.graph and outer is not producer:
                    sources[outer][producer] = None
    return sources
