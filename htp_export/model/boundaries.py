"""The boundaries of modules in any graph whose nodes have owners, and dependence on inputs.

A tensor enters a module if a node of the module reads it and a node outside produces it. It leaves
if a node of the module produces it, and a node outside reads it or the graph returns it. Equal work
of two blocks that was merged into one node feeds both (`NodeCalls.blocks_outside`).

Values depend on all values that their node and its subgraphs read: ``Shape`` and ``Size`` read no
values, ``CastLike`` none of its second input. The node that holds a subgraph computes its inputs.
Inputs of functions are starts, as the inputs of the model are. Random operators depend on no input
(see ``GraphIndex.constant``).
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
"""Key in a value's ``meta``: a boundary tensor of a module, which is exact while it exists."""

OUTSIDE = -1  # instead of a node: for inputs and outputs of the graph, and for weights

Key = TypeVar("Key", bound=Hashable)
T = TypeVar("T")


def nodes_below(nodes: Iterable[tuple[T, NodeCalls]]) -> dict[str, list[T]]:
    """Module path → the nodes with an owner at or below it, except for callers outside."""
    listed = list(nodes)
    alike: dict[frozenset[str], list[int]] = {}
    for place, (_, work) in enumerate(listed):
        alike.setdefault(work.modules, []).append(place)
    below: dict[str, list[int]] = {}
    for modules, places in alike.items():
        for path in modules:
            below.setdefault(path, []).extend(places)
    nodes_of: dict[str, list[T]] = {}
    for path, places in below.items():
        nodes_of[path] = [listed[place][0] for place in sorted(places)]
    return nodes_of


class Boundaries(Generic[Key]):
    """The nodes of each module, and the tensors between them and all other nodes.

    Args:
        nodes: The values that each node reads and produces, in order of execution; two empty lists
            for a node that is left out. A tensor that several nodes produce (an argument of a
            function, by each call of it) enters only regions that contain none of them.
        works: The owners and calls of each node.
        counts: Whether a tensor counts, for example because it depends on the model's inputs.
        results: The tensors that the graph returns.
        holders: For each node, the node that holds its subgraph and takes it into its regions, or
            `OUTSIDE`; empty if nodes in subgraphs are in regions by themselves.
        fused: Nodes that do parts of the work of several modules, not equal work of each.

    Attributes:
        works: The owners and calls of each node.
        fused: As above.
        below: Module path → the nodes in its region, in order; without nodes in their subgraphs.

    Examples:
        >>> from htp_export.format.call_tree import CallTree
        >>> from htp_export.format.hierarchy import Hierarchy, ModuleInfo
        >>> work = CallTree(Hierarchy([ModuleInfo("", "Net", 1)])).work
        >>> nodes = [(["x"], ["h"]), (["h"], ["y"])]
        >>> works = [work(("fc",)), work(("act",))]
        >>> boundaries = Boundaries(nodes, works, {"x", "h", "y"}.__contains__, {"y"})
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
        pairs = enumerate(zip(nodes, works, strict=True))
        present = ((index, work) for index, (passed, work) in pairs if any(passed))
        self.below: Mapping[str, Sequence[int]] = nodes_below(present)
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
        # module → the crossings of its boundary
        self._of_one: dict[str, list[tuple[Key, int, bool]]] = {}
        self._leaving = [
            self._edges_out(index, makes, results) for index, (_, makes) in enumerate(nodes)
        ]
        self._entering = [self._edges_in(index, reads) for index, (reads, _) in enumerate(nodes)]

    def _edges_out(
        self, index: int, makes: Sequence[Key], results: Container[Key]
    ) -> list[tuple[Key, int]]:
        """Outputs of a node with the consumers that may be in another region, or `OUTSIDE`."""
        edges: list[tuple[Key, int]] = []
        for key in makes:
            if not self._counts(key):
                continue
            if key in results:
                edges.append((key, OUTSIDE))
            consumers = self._readers.get(key, ())
            edges += [(key, other) for other in consumers if not self._together(index, other)]
        return edges

    def _edges_in(self, index: int, reads: Sequence[Key]) -> list[tuple[Key, Sequence[int]]]:
        """Inputs of a node whose producers may all be in another region, with these."""
        edges: list[tuple[Key, Sequence[int]]] = []
        for key in reads:
            if not self._counts(key):
                continue
            makers = self._makers.get(key, (OUTSIDE,))
            if not any(maker != OUTSIDE and self._together(index, maker) for maker in makers):
                edges.append((key, makers))
        return edges

    def _together(self, first: int, second: int) -> bool:
        """Whether two nodes are in the same regions."""
        if self.works[first] is not self.works[second]:
            return False
        return not self._holders or self._holders[first] == self._holders[second]

    def owners(self, node: int) -> tuple[str, ...]:
        """The owners of a node; the root for `OUTSIDE`, and for a node without owners."""
        owners = () if node == OUTSIDE else self.works[node].owners
        return owners or ("",)

    def of(self, paths: Sequence[str]) -> Iterator[tuple[Key, int, bool]]:
        """The crossings of the common boundary of modules.

        Each is ``(tensor, node on the other side or OUTSIDE, whether it leaves)``. Crossings of one
        module are found once: many modules may be fused with the one around them.
        """
        path = self._outermost(paths)
        if path is None:
            region = {index for path in paths for index in self.below.get(path, ())}
            return self.around(sorted(region), paths)
        if path not in self._of_one:
            self._of_one[path] = list(self.around(self.below.get(path, ()), [path]))
        return iter(self._of_one[path])

    def _outermost(self, paths: Sequence[str]) -> str | None:
        """The module that contains all others of some modules; None if there is none."""
        if len(paths) == 1:
            return paths[0]
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
        """The crossings of a region of nodes, in order: of one call, or with nodes in subgraphs."""
        nodes = list(nodes)
        region = {*nodes}
        for index in nodes:
            outwards = [edge for edge in self._leaving[index] if edge[1] not in region]
            others = self.works[index].blocks_outside(paths, call) if outwards else ()
            for key, reader in outwards:
                if not (others and self._is_for(reader, others)):
                    yield key, reader, True
            for key, makers in self._entering[index]:
                if region.isdisjoint(makers):
                    yield key, makers[0], False

    def beside(self, is_wanted: Callable[[Key], bool]) -> Iterator[NodeCalls]:
        """The owners of the producers of some tensors, or else of their consumers."""
        for key in dict.fromkeys((*self._makers, *self._readers)):
            if is_wanted(key) and self._counts(key):
                for node in self._makers.get(key) or self._readers[key]:
                    yield self.works[node]

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
    """Each value that depends on a start, or is one → the united bits of these starts.

    Args:
        steps: The values that each node reads and produces, producers before consumers; without
            nodes that read only sizes.
        starts: Start → a bit, or several.

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
    """For each node: inputs, with the values that subgraphs read, and values that depend on them.

    Nodes in subgraphs come after the node that holds these.
    """
    for node in nodes:
        if is_standard(node, *SIZES_ONLY):
            continue
        bodies = subgraphs(node)
        if not bodies:
            yield _values_of(node), node.outputs
            continue
        reads, results = [*node.inputs], [*node.outputs]
        for body in bodies:
            results.extend(body.inputs)
            reads.extend(body.outputs)
            for inner in body.all_nodes():
                if not is_standard(inner, *SIZES_ONLY):
                    reads.extend(_values_of(inner))
                for deeper in subgraphs(inner):
                    reads.extend(deeper.outputs)
        yield reads, results


def _values_of(node: ir.Node) -> Sequence[ir.Value | None]:
    return values_read(operator_of(node), node.inputs)


def given_values(model: ir.Model) -> Mapping[ir.Value | None, int]:
    """The starts of dependence in a model: its inputs, and the inputs of its functions."""
    starts = [value for value in model.graph.inputs if not value.is_initializer()]
    for function in model.functions.values():
        starts.extend(function.inputs)
    return dict.fromkeys(starts, 1)


def input_dependent_values(model: ir.Model, nodes: Iterable[ir.Node]) -> set[ir.Value]:
    """The values that depend on values of the model's inputs, not only on their sizes.

    ``nodes``: the nodes of the model, as of ``all_nodes``.

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
