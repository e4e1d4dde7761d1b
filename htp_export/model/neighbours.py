"""Producers and consumers of a tensor, replaced inputs, searches, and connected sets of nodes."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

import onnx_ir as ir

from htp_export.shapes.operator_kinds import is_standard


def producer_of(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """The producer of a tensor; with ``op_types``, only a node of one of these ONNX operators.

    Examples:
        >>> relu = ir.node("Relu", [ir.val("x")])
        >>> producer_of(relu.outputs[0], "Relu") is relu, producer_of(relu.outputs[0], "Tanh"), producer_of(None)
        (True, None, None)
    """
    node = None if value is None else value.producer()
    return node if not op_types or is_standard(node, *op_types) else None


def only_consumer(value: ir.Value, *op_types: str) -> ir.Node | None:
    """The only consumer of a tensor, which reads it once.

    None if there are others, or if the tensor is an output of its graph. With ``op_types``, only a
    node of one of these ONNX operators.
    """
    uses = value.uses()
    if len(uses) != 1 or value.is_graph_output():
        return None
    node = next(iter(uses)).node
    return node if not op_types or is_standard(node, *op_types) else None


def replace_inputs(node: ir.Node, replaced: Mapping[ir.Value, ir.Value | None]) -> None:
    """Replace input values of a node, at all positions.

    Examples:
        >>> x, y = ir.val("x"), ir.val("y")
        >>> node = ir.node("Add", [x, x])
        >>> replace_inputs(node, {x: y})
        >>> node.inputs == (y, y), list(x.uses()), len(list(y.uses()))
        (True, [], 2)
    """
    for place, value in enumerate(node.inputs):
        if value is not None and value in replaced:
            node.replace_input_with(place, replaced[value])


_Item = TypeVar("_Item", bound=Hashable)


def reached(
    starts: Iterable[_Item], further: Callable[[_Item], Iterable[_Item]]
) -> Iterator[_Item]:
    """Iterate over the items that a search finds, each once, the starts included.

    ``further``: the items after one, such as the producers of a node's inputs; empty where the
    search ends.

    Examples:
        >>> reads = {"c": "ab", "b": "a", "a": "", "d": "c"}
        >>> sorted(reached("c", reads.get))
        ['a', 'b', 'c']
    """
    # no recursion: graphs are deeper than Python's limit
    waiting = [*starts]
    found = set[_Item]()
    while waiting:
        item = waiting.pop()
        if item not in found:
            found.add(item)
            yield item
            waiting.extend(further(item))


def dependencies_first(
    item: _Item, dependencies: Callable[[_Item], Iterable[_Item]], done: Container[_Item] = ()
) -> Iterator[_Item]:
    """Iterate over an item and all items that it depends on, each after its dependencies.

    ``done``: items that are left out, with their dependencies.

    Examples:
        >>> reads = {"d": "bc", "c": "a", "b": "a", "a": ""}
        >>> list(dependencies_first("d", reads.get)), list(dependencies_first("d", reads.get, "c"))
        (['a', 'b', 'c', 'd'], ['a', 'b', 'd'])
    """
    if item in done:
        return
    entered = {item}
    path = [(item, iter(dependencies(item)))]
    while path:
        current, remaining = path[-1]
        for dependency in remaining:
            if dependency not in entered and dependency not in done:
                entered.add(dependency)
                path.append((dependency, iter(dependencies(dependency))))
                break
        else:
            path.pop()
            yield current


class Groups(Generic[_Item]):
    """Disjoint sets (union-find), iterated in the order in which their first members were added.

    Examples:
        >>> groups = Groups()
        >>> for item in "abcd":
        ...     groups.add(item)
        >>> groups.join("a", "c")
        >>> list(groups)
        [('a', 'c'), ('b',), ('d',)]
    """

    def __init__(self) -> None:
        self._parent: dict[_Item, _Item] = {}

    def __contains__(self, item: object) -> bool:
        return item in self._parent

    def add(self, item: _Item) -> None:
        """Add an item; a new one is a set of its own."""
        self._parent.setdefault(item, item)

    def join(self, first: _Item, second: _Item) -> None:
        """Unite the sets of two items."""
        self._parent[self._root(second)] = self._root(first)

    def __iter__(self) -> Iterator[tuple[_Item, ...]]:
        sets: dict[_Item, list[_Item]] = {}
        for item in self._parent:
            sets.setdefault(self._root(item), []).append(item)
        yield from map(tuple, sets.values())

    def _root(self, item: _Item) -> _Item:
        while self._parent[item] != item:
            # halve the path, so that later searches are short
            self._parent[item] = self._parent[self._parent[item]]
            item = self._parent[item]
        return item


def connected(
    nodes: Iterable[ir.Node],
    belong: Callable[[ir.Node, ir.Node], bool] = lambda producer, node: True,
    reads: Callable[[ir.Node], Iterable[ir.Value | None]] = lambda node: node.inputs,
) -> Groups[ir.Node]:
    """Partition nodes into sets that are connected through their inputs.

    Args:
        nodes: The nodes, producers before consumers.
        belong: Whether a producer and its consumer are in one set.
        reads: Returns the values that a node reads; its inputs by default.

    Examples:
        >>> first = ir.node("Neg", [ir.val("x")])
        >>> second, other = ir.node("Abs", first.outputs), ir.node("Exp", [ir.val("y")])
        >>> [[node.op_type for node in nodes] for nodes in connected([first, other, second])]
        [['Neg', 'Abs'], ['Exp']]
    """
    groups: Groups[ir.Node] = Groups()
    for node in nodes:
        groups.add(node)
        for value in reads(node):
            producer = None if value is None else value.producer()
            if producer is not None and producer in groups and belong(producer, node):
                groups.join(producer, node)
    return groups
