"""The nodes of a graph arranged in module calls that hold together, so that each can become one node.

A set of nodes can become one node if no path leaves it and comes back (it is *convex*); several sets can at once, if
the graph in which each is one node has no cycle. Modules are like that as PyTorch runs them; merged work (a shape that
one layer computes for all) and calls that cross (a hook) make exceptions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import networkx as nx
import onnx_ir as ir

from htp_export.capabilities.functions.placing import Placement
from htp_export.format.call_tree import Instance, NodeCalls


@dataclass(frozen=True)
class Group:
    """What becomes one call of a function."""

    instance: Instance  # the module call
    items: tuple[Item, ...]  # its nodes and the groups inside it, in an order in which they can run


Item: TypeAlias = ir.Node | Group
_Key: TypeAlias = ir.Node | Instance


class Levels:
    """Arranges graphs; what cannot be part of a group is taken out of the placement's chains on the way.

    Where the groups of one level are in each other's way, a node that belongs to nobody else joins the group around
    it; else the nodes are left out that come before (or after) what lies between, whichever are fewer; and a group
    that would lose half of its nodes is none at all.
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
            held = {instance for scope in placement.scopes[node] for instance in placement.chains[scope]}
            if held:
                placement.chains[node] = tuple(one for one in placement.chains[node] if one not in held)
        return self.arrange(graph)

    def arrange(self, nodes: Iterable[ir.Node], depth: int = 0) -> tuple[Item, ...]:
        """Nodes of one graph that have the first ``depth`` instances in common, in groups of that level and below."""
        listed = list(nodes)
        level = self._level(listed, depth)
        while tangles := level.tangles():
            waiting = [(level, tangle) for tangle in reversed(tangles)]
            while waiting:  # each by itself: what is done to one puts nothing in the way of the others
                around, tangle = waiting.pop()
                self._loosen(around, tangle, depth)
                inside = self._level(around.nodes_of(tangle), depth)
                waiting += [(inside, each) for each in reversed(inside.tangles())]
            level = self._level(listed, depth)
        return tuple(
            Group(key, self.arrange(level.members[key], depth + 1)) if isinstance(key, Instance) else key
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
            joining = [other for other in tangle if isinstance(other, ir.Node) and self._may_join(other, key)]
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
        self._placement.flat[group.path] = f"it does not hold together: {listed} lies between its nodes"
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
        return (
            f"node {key.name!r} of {' and '.join(map(repr, self._works.get(key, NodeCalls()).owners)) or 'no module'}"
        )


_BETWEEN = "between"
"""A node that stands for all that lies between the nodes of a group."""


class _Level:
    """The graph of one level: groups with their nodes, and nodes that are in none, their own ``members``."""

    def __init__(
        self, nodes: Sequence[ir.Node], keys: Mapping[ir.Node, _Key], sources: Mapping[ir.Node, Collection[ir.Node]]
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
        components = [group for group in nx.strongly_connected_components(self._graph) if len(group) > 1]
        ordered = [sorted(group, key=self._rank.__getitem__) for group in components]
        return sorted(ordered, key=lambda group: self._rank[group[0]])

    def nodes_of(self, tangle: Collection[_Key]) -> list[ir.Node]:
        """The nodes of a tangle, in graph order."""
        return sorted((node for key in tangle for node in self.members[key]), key=self._place.__getitem__)

    def order(self) -> list[_Key]:
        """Everything in an order in which it can run, as near as can be to that of the graph."""
        return list(nx.lexicographical_topological_sort(self._graph, key=self._rank.__getitem__))

    def cut(self, group: Instance, tangle: Collection[_Key]) -> list[ir.Node]:
        """The nodes of a group without which it holds together: all before the others of its tangle, or all after."""
        inside = set(self.members[group])
        between = {key for key in tangle if key != group}  # each reads from the group and is read by it
        within = nx.DiGraph((source, node) for node in inside for source in self._sources[node] if source in inside)
        read = {source for key in between for node in self.members[key] for source in self._sources[node]}
        within.add_edges_from((node, _BETWEEN) for node in read & inside)
        before = nx.ancestors(within, _BETWEEN)
        within.remove_node(_BETWEEN)
        reading = (node for node in inside if any(self._keys.get(source) in between for source in self._sources[node]))
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
