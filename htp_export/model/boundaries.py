"""What crosses the boundaries of modules, in any graph whose nodes do the work of modules, and what depends on inputs.

A tensor enters a module if a node of the module reads it and a node outside makes it. It leaves if
a node of the module makes it and a node outside reads it, or the graph returns it; but equal work
of two blocks that was merged into one node feeds both (`NodeCalls.others`). Values depend on what
their node and its subgraphs read: ``Shape`` and ``Size`` read no values, ``CastLike`` none of its
second input; inputs of a subgraph are given by its node; those of a function are starts, as the
inputs of the model are. Random operators depend on no input (see ``GraphIndex.constant``).
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Collection,
    Container,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Generic, TypeVar

import onnx_ir as ir

from htp_export.format import tags
from htp_export.format.call_tree import Block, Instance, NodeCalls
from htp_export.shapes.operator_kinds import (
    SIZES_ONLY,
    is_standard,
    operator_of,
    subgraphs,
    values_read,
)

BOUNDARY = "htp_export.boundary"
"""Key in a value's ``meta``: it is an input or output of a module, which is exact as long as the value exists."""

OUTSIDE = -1  # in place of a node: the graph's own inputs and outputs, weights

Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")


def nodes_below(nodes: Iterable[tuple[T, NodeCalls]]) -> dict[str, list[T]]:
    """Module path → the nodes with an owner at or below it, without what such a module computed for other callers."""
    listed = list(nodes)
    alike: dict[frozenset[str], list[int]] = {}
    for place, (_, work) in enumerate(listed):
        alike.setdefault(work.modules, []).append(place)
    below: dict[str, list[int]] = {}
    for modules, places in alike.items():
        for path in modules:
            below.setdefault(path, []).extend(places)
    return {path: [listed[place][0] for place in sorted(places)] for path, places in below.items()}


class Boundaries(Generic[Key]):
    """The nodes of each module, and the tensors that pass between them and all others.

    Args:
        nodes: What each node reads and what it makes, in order of execution; two empty tuples for
            one that is to be left out. A tensor that several nodes make (an argument of a function,
            by each call of it) comes from outside of those regions alone that have none of them.
        works: Whose work each node does.
        counts: Whether a tensor counts, as one whose values depend on the model's inputs.
        results: The tensors that the graph returns.
        holders: For each node, the one in whose subgraph it stands and with which it belongs to a
            module, or `OUTSIDE`; empty where all nodes stand for themselves.
        fused: Nodes that do the work of several modules one after the other, not equal work of
            each.

    Attributes:
        works: Whose work each node does.
        fused: As above.
        below: Module path → the nodes in its region, in order; without those that they hold.

    Examples:
        >>> from htp_export.format.call_tree import CallTree
        >>> from htp_export.format.hierarchy import Hierarchy, ModuleInfo
        >>> work = CallTree(Hierarchy([ModuleInfo("", "Net", 1)])).work
        >>> nodes = [(["x"], ["h"]), (["h"], ["y"])]
        >>> boundaries = Boundaries(nodes, [work(("fc",)), work(("act",))], {"x", "h", "y"}.__contains__, {"y"})
        >>> list(boundaries.of(["fc"]))
        [('h', 1, True), ('x', -1, False)]
    """

    def __init__(
        self,
        nodes: Sequence[tuple[Sequence[Key], Sequence[Key]]],
        works: Sequence[NodeCalls],
        counts: Callable[[Key], bool],
        results: Container[Key],
        holders: Sequence[int] = (),
        fused: Container[int] = (),
    ) -> None:
        self.works, self.fused = works, fused
        listed = (
            (k, work) for k, (each, work) in enumerate(zip(nodes, works, strict=True)) if any(each)
        )
        self.below: Mapping[str, Sequence[int]] = nodes_below(listed)
        self._holders, self._counts = holders, counts
        self._makers: dict[Key, list[int]] = {}
        self._readers: dict[Key, list[int]] = {}
        for index, (reads, makes) in enumerate(nodes):
            for key in makes:
                self._makers.setdefault(key, []).append(index)
            for key in reads:
                self._readers.setdefault(key, []).append(index)
        # A module and one around it → whether all its work is in the other
        self._inside: dict[tuple[str, str], bool] = {}
        # module → what crosses its boundary
        self._of_one: dict[str, list[tuple[Key, int, bool]]] = {}
        self._leaving = [
            self._edges_out(index, makes, results) for index, (_, makes) in enumerate(nodes)
        ]
        self._entering = [self._edges_in(index, reads) for index, (reads, _) in enumerate(nodes)]

    def _edges_out(
        self, index: int, makes: Sequence[Key], results: Container[Key]
    ) -> list[tuple[Key, int]]:
        edges: list[tuple[Key, int]] = []
        for key in makes:
            if self._counts(key):
                if key in results:
                    edges.append((key, OUTSIDE))
                edges += [
                    (key, reader)
                    for reader in self._readers.get(key, ())
                    if not self._together(index, reader)
                ]
        return edges

    def _edges_in(self, index: int, reads: Sequence[Key]) -> list[tuple[Key, Sequence[int]]]:
        edges: list[tuple[Key, Sequence[int]]] = []
        for key in reads:
            if self._counts(key):
                makers = self._makers.get(key, (OUTSIDE,))
                if not any(maker != OUTSIDE and self._together(index, maker) for maker in makers):
                    edges.append((key, makers))
        return edges

    def _together(self, first: int, second: int) -> bool:
        same = self.works[first] is self.works[second]
        return same and (not self._holders or self._holders[first] == self._holders[second])

    def owners(self, node: int) -> tuple[str, ...]:
        """The modules that own a node; the root for what is outside, and for nodes that nobody owns."""
        return (() if node == OUTSIDE else self.works[node].owners) or ("",)

    def of(self, paths: Sequence[str]) -> Iterator[tuple[Key, int, bool]]:
        """``(tensor, node on the other side or OUTSIDE, whether it leaves)`` for the common boundary of modules.

        What crosses the boundary of one module is found once: many modules may be fused with the
        one around them.
        """
        path = self._outermost(paths)
        if path is None:
            region = {index for path in paths for index in self.below.get(path, ())}
            return self.around(sorted(region), paths)
        if path not in self._of_one:
            self._of_one[path] = list(self.around(self.below.get(path, ()), [path]))
        return iter(self._of_one[path])

    def _outermost(self, paths: Sequence[str]) -> str | None:
        """The module of some that all others are inside of; None if there are several such."""
        outer: str | None = None
        for path in paths:
            if any(self._is_inside(path, other) for other in paths):
                continue
            if outer is not None:
                return None
            outer = path
        return outer

    def _is_inside(self, path: str, around: str) -> bool:
        """Whether a module is below another one, and computes nothing for callers outside of it."""
        if path == around or not tags.is_under(path, around):
            return False
        if (path, around) not in self._inside:
            works = {self.works[index] for index in self.below.get(path, ())}
            self._inside[path, around] = all(work.is_inside(path, around) for work in works)
        return self._inside[path, around]

    def around(
        self, nodes: Iterable[int], paths: Sequence[str], call: Instance | None = None
    ) -> Iterator[tuple[Key, int, bool]]:
        """The same for a region whose nodes are given, in order: those of one call, or with all that they hold."""
        nodes = list(nodes)
        region = {*nodes}
        for index in nodes:
            outwards = [edge for edge in self._leaving[index] if edge[1] not in region]
            others = self.works[index].others(paths, call) if outwards else ()
            for key, reader in outwards:
                if not (others and self._is_for(reader, others)):
                    yield key, reader, True
            for key, makers in self._entering[index]:
                if region.isdisjoint(makers):
                    yield key, makers[0], False

    def beside(self, is_wanted: Callable[[Key], bool]) -> Iterator[NodeCalls]:
        """Whose work the nodes do that make some tensors; for tensors from outside, the nodes that read them."""
        for key in dict.fromkeys((*self._makers, *self._readers)):
            if is_wanted(key) and self._counts(key):
                yield from (
                    self.works[node] for node in self._makers.get(key) or self._readers[key]
                )

    def _is_for(self, node: int, blocks: Collection[Block]) -> bool:
        """Whether a node, or one that holds it, does work of one of some blocks."""
        while node != OUTSIDE:
            if self.works[node].is_for(blocks):
                return True
            node = self._holders[node] if self._holders else OUTSIDE
        return False


_Key = TypeVar("_Key", bound=Hashable)


def dependence(
    steps: Iterable[tuple[Iterable[_Key], Iterable[_Key]]], starts: Mapping[_Key, int]
) -> dict[_Key, int]:
    """Each value that depends on a start, itself included → the bits of those starts.

    Args:
        steps: What each node reads and makes, in an order in which it can run; without those that
            read sizes alone.
        starts: Where to start → a bit, or several.

    Examples:
        >>> steps = [(("x", "w"), ("h",)), (("w",), ("v",)), (("h", "y"), ("z",))]
        >>> dependence(steps, {"x": 1, "y": 2})
        {'x': 1, 'y': 2, 'h': 1, 'z': 3}
    """
    bits_of = dict(starts)
    for reads, results in steps:
        bits = 0
        for key in reads:
            bits |= bits_of.get(key, 0)
        if bits:
            for key in results:
                bits_of[key] = bits
    return bits_of


def reads_and_results(
    nodes: Iterable[ir.Node],
) -> Iterator[tuple[Sequence[ir.Value | None], Sequence[ir.Value]]]:
    """What nodes read the values of, and what these go into; nodes in subgraphs come after the one that holds them."""
    for node in nodes:
        if is_standard(node, *SIZES_ONLY):
            continue
        bodies = subgraphs(node)
        if not bodies:
            yield _values_of(node), node.outputs
            continue
        reads = [*node.inputs]
        for body in bodies:
            reads.extend(body.outputs)
            for inner in body.all_nodes():
                reads.extend(() if is_standard(inner, *SIZES_ONLY) else _values_of(inner))
                reads.extend(value for deeper in subgraphs(inner) for value in deeper.outputs)
        yield reads, (*node.outputs, *(value for body in bodies for value in body.inputs))


def _values_of(node: ir.Node) -> Sequence[ir.Value | None]:
    return values_read(operator_of(node), node.inputs)


def given_values(model: ir.Model) -> Mapping[ir.Value | None, int]:
    """Where dependence starts in a model: its inputs, and those of its functions."""
    starts = [value for value in model.graph.inputs if not value.is_initializer()]
    for function in model.functions.values():
        starts.extend(function.inputs)
    return dict.fromkeys(starts, 1)


def input_dependent_values(model: ir.Model, nodes: Iterable[ir.Node]) -> set[ir.Value]:
    """The values that depend on values of the model's inputs, not on their sizes alone.

    ``nodes`` are those of the model, as of ``all_nodes``.

    Examples:
        >>> x = ir.val("x")
        >>> size, double = ir.node("Shape", [x]), ir.node("Add", [x, x])
        >>> graph = ir.Graph([x], [], nodes=[size, double], opset_imports={"": 20})
        >>> found = input_dependent_values(ir.Model(graph, ir_version=10), graph)
        >>> [value in found for value in (x, *size.outputs, *double.outputs)]
        [True, False, True]
    """
    return {
        value
        for value in dependence(reads_and_results(nodes), given_values(model))
        if value is not None
    }
