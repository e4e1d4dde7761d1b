"""The selected module call in which each node lies, as far as tags tell, and the groups that can become one node."""

from __future__ import annotations

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
"""As many functions may call one another: https://github.com/onnx/onnx refuses more when it checks a model."""

Chain: TypeAlias = tuple[Instance, ...]
"""The instances that a node lies in, outermost first."""


class Placement:
    """The chain of every node of a model's graph and its subgraphs; what lies in functions already has none.

    A node of several modules lies in those that hold all of them, and one whose call is not known
    lies in none that ran several times. Instances that could not become one call of a function are
    in no chain.
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
        self._drop_those_in_several_graphs()

    def without(self, node: ir.Node, instances: Iterable[Instance]) -> None:
        """Take a node, with all that its subgraphs hold, out of some instances."""
        gone = frozenset(instances)
        for held in with_subgraphs(node):
            self.chains[held] = tuple(
                instance for instance in self.chains[held] if instance not in gone
            )

    def _chain_of(self, node: ir.Node, work: NodeCalls) -> Chain:
        if any(_gives_back_from_outside(body) for body in subgraphs(node)):
            return ()  # its outer value could not be an input of a function
        if (
            is_standard(node, "Identity")
            and node.inputs[0] is not None
            and node.inputs[0].is_initializer()
        ):
            # of a weight that TorchScript found to be equal to another one's: an input of
            # functions, as that
            return ()
        return _common_start([self._selected_around(call) for call in work.calls])

    def _selected_around(self, call: Instance) -> Chain:
        """The selected instances that a call ran in, outermost first, as far as they are known."""
        chain = self._calls.chain(call)
        known = next(
            (place for place, running in enumerate(chain) if running in self._around), len(chain)
        )
        around = self._around[chain[known]] if known < len(chain) else ()
        # each call is in those of its caller, and in itself
        for running in reversed(chain[:known]):
            if running.path in self._selected and running.call >= 0:
                if len(around) < self._most:
                    around = (*around, running)
                else:
                    self.flat[running.path] = (
                        f"ONNX allows {MOST_NESTED} functions inside one another"
                    )
            self._around[running] = around
        return around

    def _drop_those_in_several_graphs(self) -> None:
        """Leave out instances that have nodes in several graphs, and no node of theirs that holds them all."""
        homes: defaultdict[Instance, set[ir.Graph | None]] = defaultdict(set)
        for node, chain in self.chains.items():
            held = {instance for scope in self.scopes[node] for instance in self.chains[scope]}
            for instance in chain:
                if instance not in held:
                    homes[instance].add(node.graph)
        gone = {instance for instance, graphs in homes.items() if len(graphs) > 1}
        self.flat.update(
            {instance.path: "its nodes lie in several branches or loop bodies" for instance in gone}
        )
        for node, chain in self.chains.items() if gone else ():
            self.chains[node] = tuple(instance for instance in chain if instance not in gone)


def _nested(model: ir.Model) -> int:
    """How many functions of a model call one another, at most; counted up to what ONNX allows."""
    left = {
        key: {node.op_identifier() for node in each.all_nodes()}
        for key, each in model.functions.items()
    }
    levels = 0
    while left and levels < MOST_NESTED:
        called = {key for inside in left.values() for key in inside if key in left}
        if len(called) == len(left):  # some call themselves
            break
        left = {key: inside for key, inside in left.items() if key in called}
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


def _gives_back_from_outside(graph: ir.Graph) -> bool:
    """Whether a subgraph returns a value that it does not make; ONNX Runtime refuses that too."""
    inside = {*given_values(graph), *(value for node in graph for value in node.outputs)}
    return not inside.issuperset(graph.outputs)


@dataclass(frozen=True)
class Group:
    """What becomes one call of a function."""

    instance: Instance  # the module call
    items: tuple[Item, ...]  # its nodes and the groups inside it, in an order in which they can run


Item: TypeAlias = ir.Node | Group
_Key: TypeAlias = ir.Node | Instance


class Levels:
    """Arranges graphs; what cannot be part of a group is taken out of the placement's chains on the way.

    Where the groups of one level are in each other's way, a node that belongs to nobody else joins
    the group around it; else the nodes are left out that come before (or after) what lies between,
    whichever are fewer; and a group that would lose half of its nodes is none at all.
    """

    def __init__(self, placement: Placement, works: Mapping[ir.Node, NodeCalls]) -> None:
        self._placement = placement
        self._works = works
        self._sources = _sources(placement)
        self._joined: set[ir.Node] = set()
        self._sizes = Counter(
            instance
            for node, chain in placement.chains.items()
            for instance in chain
            if not any(instance in placement.chains[scope] for scope in placement.scopes[node])
        )

    def arrange_graph(self, graph: ir.Graph) -> tuple[Item, ...]:
        """The nodes of a graph; for a subgraph, in the groups that do not hold the whole of it."""
        placement = self._placement
        for node in graph:
            held = {
                instance for scope in placement.scopes[node] for instance in placement.chains[scope]
            }
            if held:
                placement.chains[node] = tuple(
                    one for one in placement.chains[node] if one not in held
                )
        return self.arrange(graph)

    def arrange(self, nodes: Iterable[ir.Node], depth: int = 0) -> tuple[Item, ...]:
        """Nodes of one graph that have the first ``depth`` instances in common, in groups of that level and below."""
        listed = list(nodes)
        level = self._level(listed, depth)
        while tangles := level.tangles():
            waiting = [(level, tangle) for tangle in reversed(tangles)]
            # each by itself: what is done to one puts nothing in the way of the others
            while waiting:
                around, tangle = waiting.pop()
                self._loosen(around, tangle, depth)
                inside = self._level(around.nodes_of(tangle), depth)
                waiting += [(inside, each) for each in reversed(inside.tangles())]
            level = self._level(listed, depth)
        return tuple(
            Group(key, self.arrange(level.members[key], depth + 1))
            if isinstance(key, Instance)
            else key
            for key in level.order()
        )

    def _level(self, nodes: Sequence[ir.Node], depth: int) -> _Level:
        chains = self._placement.chains
        keys = {node: chains[node][depth] if len(chains[node]) > depth else node for node in nodes}
        return _Level(nodes, keys, self._sources)

    def _loosen(self, level: _Level, tangle: Collection[_Key], depth: int) -> None:
        """Change the chains of some nodes, so that fewer groups of a tangle are in each other's way."""
        cuts: list[tuple[int, Instance, list[ir.Node]]] = []
        for key in tangle:
            if not isinstance(key, Instance):
                continue
            joining = [
                other
                for other in tangle
                if isinstance(other, ir.Node) and self._may_join(other, key)
            ]
            if joining:
                self._joined.update(joining)
                for node in joining:
                    self._placement.chains[node] = (*self._placement.chains[node][:depth], key)
                return
            cut = level.cut(key, tangle)
            cuts.append((len(cut), key, cut))
        # There is a group in every cycle, as the graph of the nodes has none.
        size, group, cut = min(cuts, key=lambda found: found[0])
        whole = self._sizes[group]
        rest = len(level.members[group]) - size
        if 2 * rest > whole:
            for node in cut:
                self._placement.without(node, self._placement.chains[node][depth:])
            return
        between_names = sorted({self._name(other) for other in tangle if other != group})
        listed = ", ".join(between_names[:3]) + (", …" if len(between_names) > 3 else "")
        self._placement.flat[group.path] = (
            f"it does not hold together: {listed} lies between its nodes"
        )
        for node in level.members[group]:
            self._placement.without(node, [group])

    def _may_join(self, node: ir.Node, group: Instance) -> bool:
        if node in self._joined:  # and was left out again
            return False
        work = self._works.get(node, NodeCalls())
        return not work.owners or group.path in work.modules

    def _name(self, key: _Key) -> str:
        if isinstance(key, Instance):
            return repr(key.path)
        owners = self._works.get(key, NodeCalls()).owners
        return f"node {key.name!r} of {' and '.join(map(repr, owners)) or 'no module'}"


_BETWEEN = "between"
"""A node that stands for all that lies between the nodes of a group."""


class _Level:
    """The graph of one level: groups with their nodes, and nodes that are in none, their own ``members``."""

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

    def tangles(self) -> list[list[_Key]]:
        """What lies on cycles, together where on the same ones, in graph order; empty if the level can run."""
        components = [
            group for group in nx.strongly_connected_components(self._graph) if len(group) > 1
        ]
        ordered = [sorted(group, key=self._rank.__getitem__) for group in components]
        return sorted(ordered, key=lambda group: self._rank[group[0]])

    def nodes_of(self, tangle: Collection[_Key]) -> list[ir.Node]:
        """The nodes of a tangle, in graph order."""
        return sorted(
            (node for key in tangle for node in self.members[key]), key=self._place.__getitem__
        )

    def order(self) -> list[_Key]:
        """Everything in an order in which it can run, as near as can be to that of the graph."""
        return list(nx.lexicographical_topological_sort(self._graph, key=self._rank.__getitem__))

    def cut(self, group: Instance, tangle: Collection[_Key]) -> list[ir.Node]:
        """The nodes of a group without which it holds together: all before the others of its tangle, or all after."""
        inside = set(self.members[group])
        # each reads from the group and is read by it
        between = {key for key in tangle if key != group}
        within = nx.DiGraph(
            (source, node) for node in inside for source in self._sources[node] if source in inside
        )
        read = {
            source
            for key in between
            for node in self.members[key]
            for source in self._sources[node]
        }
        within.add_edges_from((node, _BETWEEN) for node in read & inside)
        before = nx.ancestors(within, _BETWEEN)
        within.remove_node(_BETWEEN)
        reading = (
            node
            for node in inside
            if any(self._keys.get(source) in between for source in self._sources[node])
        )
        within.add_edges_from((_BETWEEN, node) for node in reading)
        after = nx.descendants(within, _BETWEEN)
        smaller = before if len(before) <= len(after) else after
        return [node for node in self.members[group] if node in smaller]


def _sources(placement: Placement) -> dict[ir.Node, dict[ir.Node, None]]:
    """Node → the nodes of the same graph from which it reads, in its subgraphs too."""
    found: dict[ir.Node, dict[ir.Node, None]] = {node: {} for node in placement.scopes}
    for node, scopes in placement.scopes.items():
        for value in node.inputs:
            producer = None if value is None else value.producer()
            if producer is None:
                continue
            for holder in (node, *scopes):
                if holder.graph is producer.graph and holder is not producer:
                    found[holder][producer] = None
    return found
