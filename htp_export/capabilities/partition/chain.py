"""A model as a chain of modules in the order in which they run, and the borders between them where it can be cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from htp_export.model.boundaries import OUTSIDE
from htp_export.model.cutting import Cutter
from htp_export.model.parts import Constants, part_tensors
from htp_export.model.tagged import TaggedModel


@dataclass(frozen=True)
class Border:
    """A place between two modules, such that no tensor flows back over it and every other module is on one side.

    Attributes:
        place: How many units of the chain lie before it.
        module: The outermost module that begins there.
        tensors: How many tensors cross it.
        cuts: How many modules it cuts: those around it that run, but for the root.
        sequential: Whether the module reads what the modules right before it compute, and does not run beside them.
    """

    place: int
    module: str
    tensors: int
    cuts: int
    sequential: bool


class Chain:
    """The innermost modules of a model, one after another, and the place of every node among them.

    A *unit* is a module with nodes, none of whose submodules has any. What a module computes around its submodules has
    its place right after the last of the units whose results it reads, or, where it reads only the model's inputs,
    right before the first one that reads it. What depends on sizes of tensors alone goes after these tensors. Places
    therefore never decrease along an edge of the graph, and cutting the chain anywhere cuts the graph into parts that
    run one after another.

    Attributes:
        tagged: The model.
        units: How many units there are.
        spans: Module path → its first and its last unit, for every module that has nodes of its own.
        places: Node of the main graph → the unit at which it runs. Constants that are repeated are not in it.
    """

    def __init__(self, tagged: TaggedModel) -> None:
        self.tagged, self.cutter = tagged, Cutter(tagged)
        self.constants = constants = Constants(tagged, self.cutter)
        self._nodes = [node for node in tagged.model.graph if not constants.is_repeated(node)]
        first: dict[str, int] = {}
        for number, node in enumerate(self._nodes):
            if not constants.is_common(node):
                for up in self.lineage(self.owner(node)):
                    first.setdefault(up, number)
        self.spans = self._number(first)
        self.units = self.spans[""][1] + 1
        self.places: Mapping[ir.Node, int] = self._place()

    def reads(self, node: ir.Node) -> Iterator[ir.Value]:
        """What a node reads of the main graph, in its subgraphs too, but for what comes along."""
        return (value for value in self.cutter.reads(node) if not self.constants.comes_along(value))

    def _makers(self, node: ir.Node) -> set[ir.Node]:
        return {producer for value in self.reads(node) if (producer := value.producer()) is not None}

    def lineage(self, path: str) -> Iterator[str]:
        """A module and those above it, innermost first."""
        current: str | None = path
        while current is not None:
            yield current
            current = self.tagged.hierarchy.parent(current)

    def owner(self, node: ir.Node) -> str:
        """The first module that a node computes: shared work is there when it is needed first."""
        return next(iter(self.tagged.owners_of(node)), "")

    def _span(self, node: ir.Node) -> tuple[int, int]:
        """The units between which a node has to run."""
        anywhere = (0, self.units - 1)
        return anywhere if self.constants.is_common(node) else self.spans.get(self.owner(node), anywhere)

    # --- places -----------------------------------------------------------------------------------------

    def _number(self, first: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """Number the units in the order in which they first run; every module's span."""
        spans: dict[str, tuple[int, int]] = {}
        units, waiting = 0, [""]
        while waiting:  # a stack of our own: modules may lie deeper than functions can call each other
            path = waiting.pop()
            if path in spans:  # all below it have theirs
                spans[path] = (spans[path][0], units - 1)
                continue
            spans[path] = (units, units)
            children = self.tagged.hierarchy.children(path)
            below = sorted((child for child in children if child in first), key=first.__getitem__)
            units += not below
            waiting += [path, *reversed(below)]
        return spans

    def _place(self) -> dict[ir.Node, int]:
        places: dict[ir.Node, int] = {}
        moving: set[ir.Node] = set()
        for node in self._nodes:
            low, high = self._span(node)
            makers = self._makers(node)
            places[node] = max([low, *(places[maker] for maker in makers)])
            if low < high and makers <= moving:
                moving.add(node)
        for node in reversed(self._nodes):
            if node in moving:
                self._delay(node, places)
        return places

    def _delay(self, node: ir.Node, places: dict[ir.Node, int]) -> None:
        """Move what only needs the model's inputs to where it is needed first."""
        uses = [use for value in node.outputs for use in value.uses()]
        users = {[*self.tagged.index.scopes(use.node)][-1] for use in uses}  # of the main graph
        if users and not any(value.is_graph_output() for value in node.outputs):
            places[node] = max(places[node], min(self._span(node)[1], *(places[user] for user in users)))

    def owned_places(self) -> Iterator[tuple[ir.Node, int]]:
        """Nodes with their places, without those that compute sizes: these may be at any module."""
        return ((node, place) for node, place in self.places.items() if node not in self.constants.sizes)

    @cached_property
    def weight_places(self) -> Mapping[ir.Value, int]:
        """Weight → the unit at which it is read first."""
        first: dict[ir.Value, int] = {}
        for node, place in self.places.items():
            for value in self.reads(node):
                if value in self.constants.weights:
                    first[value] = min(first.get(value, place), place)
        return first

    # --- borders ----------------------------------------------------------------------------------------

    @cached_property
    def borders(self) -> tuple[Border, ...]:
        """Every place where the chain can be cut, in order."""
        outermost: dict[int, str] = {}
        for path, (low, _) in self.spans.items():
            outermost.setdefault(low, path)
        called = self.tagged.hierarchy.called
        cuts = self._astride(span for path, span in self.spans.items() if path and path in called)
        crossing, sequential = self._astride(self._crossing()), self._read_from_neighbours()
        return tuple(
            Border(place, outermost[place], crossing[place], cuts[place], outermost[place] in sequential)
            for place in range(1, self.units)
            if not self._blocked[place]
        )

    def _astride(self, spans: Iterable[tuple[int, int]]) -> list[int]:
        """For each place, how many spans have units on both sides."""
        steps = [0] * (self.units + 1)
        for low, high in spans:
            steps[low + 1] += 1
            steps[high + 1] -= 1
        return list(itertools.accumulate(steps))

    @cached_property
    def _blocked(self) -> list[int]:
        """For each place, the nodes after it of modules before it, which run again or are read too early."""
        ends = ((self._span(node)[1], place) for node, place in self.places.items())
        return self._astride((end, place) for end, place in ends if end < place)

    def astride(self, place: int) -> str | None:
        """The module on both sides of a place that is no border; None at a border."""
        return next((self.owner(node) for node, at in self.places.items() if self._span(node)[1] < place <= at), None)

    def _crossing(self) -> Iterator[tuple[int, int]]:
        """The tensors between units, without sizes: where each is made, or a weight read first, and where read last."""
        for flow in part_tensors(self.tagged, self.places, self._is_sent):
            read = flow.consumers - {OUTSIDE}
            made = flow.producer if flow.value is None else self.weight_places.get(flow.value, flow.producer)
            if read and made < max(read):
                yield made, max(read)

    def _is_sent(self, value: ir.Value) -> bool:
        """Whether a tensor is sent to units that read it: a weight, or what is computed from inputs, but for sizes."""
        producer = value.producer()
        if producer is None:
            return value in self.constants.weights
        return not self.constants.comes_along(value) and producer not in self.constants.sizes

    def _read_from_neighbours(self) -> set[str]:
        """The modules that read what the sibling right before them, or what lies between, computes."""
        found: set[str] = set()
        before: dict[str, int] = {}  # the first unit of the sibling that runs right before a module
        for path in self.spans:
            children = [child for child in self.tagged.hierarchy.children(path) if child in self.spans]
            ordered = sorted(children, key=lambda child: self.spans[child][0])
            before.update((after, self.spans[sibling][0]) for sibling, after in itertools.pairwise(ordered))
        for node in self.places:
            if self.constants.is_common(node):
                continue
            makers = self._makers(node)
            for path in self.lineage(self.owner(node)):
                if path in before:
                    near, start = before[path], self.spans[path][0]
                    if any(near <= self.places[maker] < start for maker in makers):
                        found.add(path)
        return found
