"""The nodes of a graph arranged in module calls that hold together, so that each can become one node.

A set of nodes can become one node if no path leaves it and comes back (it is *convex*); several sets can at once, if
the graph in which each is one node has no cycle. Modules are like that as PyTorch runs them; merged work (a shape that
one layer computes for all) and calls that cross (a hook) make exceptions.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import onnx_ir as ir

from htp_export.format.call_tree import NodeCalls
from htp_export.model.function_records import Instance
from htp_export.surgery.placing import Placement

__all__ = ["Group", "Item", "Levels"]


@dataclass(frozen=True)
class Group:
    """What becomes one call of a function.

    Attributes:
        instance: The module call.
        items: Its nodes and the groups inside it, in an order in which they can run.
    """

    instance: Instance
    items: tuple[Item, ...]


Item: TypeAlias = ir.Node | Group
_Key: TypeAlias = ir.Node | Instance


class Levels:
    """Arranges graphs; what cannot be part of a group is taken out of the placement's chains on the way.

    Where the groups of one level are in each other's way, a node that belongs to nobody else joins the group around
    it; else the nodes are left out that come before (or after) what lies between, whichever are fewer; and a group
    that would lose half of its nodes is none at all.

    Args:
        placement: The chain that each node should have.
        works: Node → whose work it does.
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
        """Nodes of one graph, in the groups of a level and those below it.

        Args:
            nodes: Nodes that have the first ``depth`` instances of their chains in common, in graph order.
            depth: How many instances these are.
        """
        listed = list(nodes)
        while True:
            level = _Level(listed, self._keys(listed, depth), self._sources)
            stuck = level.stuck()
            if not stuck:
                break
            self._loosen(level, stuck, depth)
        return tuple(
            Group(key, self.arrange(level.members[key], depth + 1)) if isinstance(key, Instance) else key
            for key in level.order()
        )

    def _keys(self, nodes: Sequence[ir.Node], depth: int) -> dict[ir.Node, _Key]:
        chains = self._placement.chains
        return {node: chains[node][depth] if len(chains[node]) > depth else node for node in nodes}

    def _loosen(self, level: _Level, stuck: Collection[_Key], depth: int) -> None:
        """Change the chains of some nodes, so that fewer groups are in each other's way."""
        cuts: list[tuple[int, Instance, list[ir.Node], set[_Key]]] = []
        for key in level.members:  # in graph order, so that equal models are cut equally
            if key not in stuck or not isinstance(key, Instance):
                continue
            between = level.between(key, stuck)
            if not between:
                continue
            joining = [other for other in between if isinstance(other, ir.Node) and self._may_join(other, key)]
            if joining:
                self._joined.update(joining)
                for node in joining:
                    self._placement.chains[node] = (*self._placement.chains[node][:depth], key)
                return
            cut = level.cut(key, between)
            cuts.append((len(cut), key, cut, between))
        # There is a group in every cycle, as the graph of the nodes has none.
        size, group, cut, between = min(cuts, key=lambda found: found[0])
        whole = self._sizes[group]
        rest = len(level.members[group]) - size
        if 2 * rest > whole:
            for node in cut:
                self._placement.without(node, self._placement.chains[node][depth:])
            return
        between_names = sorted({self._name(other) for other in between})
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


class _Level:
    """The graph of one level: groups, and nodes that are in none.

    Attributes:
        members: Group → its nodes; node that is in none → itself.
    """

    def __init__(
        self, nodes: Sequence[ir.Node], keys: Mapping[ir.Node, _Key], sources: Mapping[ir.Node, Collection[ir.Node]]
    ) -> None:
        self._keys, self._sources = keys, sources
        self.members: dict[_Key, list[ir.Node]] = {}
        for node in nodes:
            self.members.setdefault(keys[node], []).append(node)
        self._rank = {key: rank for rank, key in enumerate(self.members)}
        self._after: dict[_Key, dict[_Key, None]] = {key: {} for key in self.members}
        self._before: dict[_Key, dict[_Key, None]] = {key: {} for key in self.members}
        for node in nodes:
            for source in sources[node]:
                if source in keys and keys[source] != keys[node]:
                    self._after[keys[source]][keys[node]] = None
                    self._before[keys[node]][keys[source]] = None

    def stuck(self) -> set[_Key]:
        """What lies on a cycle, or on a way between two; empty if the level can run in some order."""
        left = set(self.members)
        for after, before in ((self._after, self._before), (self._before, self._after)):
            waiting = {key: sum(other in left for other in before[key]) for key in left}
            ready = [key for key, count in waiting.items() if not count]
            while ready:
                key = ready.pop()
                left.discard(key)
                for other in after[key]:
                    if other in left:
                        waiting[other] -= 1
                        if not waiting[other]:
                            ready.append(other)
        return left

    def order(self) -> list[_Key]:
        """Everything in an order in which it can run, as near as can be to that of the graph."""
        waiting = {key: len(before) for key, before in self._before.items()}
        keys = list(self.members)
        ready = [self._rank[key] for key, count in waiting.items() if not count]
        heapq.heapify(ready)
        ordered = []
        while ready:
            key = keys[heapq.heappop(ready)]
            ordered.append(key)
            for other in self._after[key]:
                waiting[other] -= 1
                if not waiting[other]:
                    heapq.heappush(ready, self._rank[other])
        return ordered

    def between(self, group: Instance, within: Collection[_Key]) -> set[_Key]:
        """What reads from a group and is read by it, directly or through others."""
        return _reached(group, self._after, within) & _reached(group, self._before, within)

    def cut(self, group: Instance, between: Collection[_Key]) -> list[ir.Node]:
        """The nodes of a group without which it holds together: all before what lies between, or all after it."""
        inside = set(self.members[group])
        readers: defaultdict[ir.Node, list[ir.Node]] = defaultdict(list)
        late: list[ir.Node] = []
        early: list[ir.Node] = []
        for key in (group, *between):
            for node in self.members[key]:
                for source in self._sources[node]:
                    if source in inside and node in inside:
                        readers[source].append(node)
                    elif source in inside:
                        early.append(source)
                    elif node in inside and self._keys.get(source) in between:
                        late.append(node)
        before = _closure(early, lambda node: [source for source in self._sources[node] if source in inside])
        after = _closure(late, lambda node: readers[node])
        smaller = before if len(before) <= len(after) else after
        return [node for node in self.members[group] if node in smaller]


def _reached(start: _Key, following: Mapping[_Key, Iterable[_Key]], within: Collection[_Key]) -> set[_Key]:
    found: set[_Key] = set()
    left = [key for key in following[start] if key in within]
    while left:
        key = left.pop()
        if key != start and key not in found:
            found.add(key)
            left.extend(other for other in following[key] if other in within)
    return found


def _closure(start: Iterable[ir.Node], following: Callable[[ir.Node], Iterable[ir.Node]]) -> set[ir.Node]:
    found: set[ir.Node] = set()
    left = list(start)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left.extend(following(node))
    return found


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
