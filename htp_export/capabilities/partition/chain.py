"""A model as a chain of modules in the order in which they run, the borders where it can be cut, and its stages."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import onnx_ir as ir

from htp_export.capabilities.partition.partitions import Partition, Stage, StageTensor
from htp_export.editing.cut_models import (
    cut_graph,
    model_around,
    narrow_owners,
    output_name,
    write_part_metadata,
)
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.hierarchy import Hierarchy
from htp_export.model.boundaries import OUTSIDE
from htp_export.model.cutting import Cut, Cutter
from htp_export.model.parts import Constants, constant_bytes, part_tensors, weight_bytes
from htp_export.model.regions import all_nodes
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.faulty_optimizers import safe_entries


@dataclass(frozen=True)
class Border:
    """A place between two modules, such that no tensor flows back over it and every other module is on one side.

    ``place`` units of the chain lie before it, ``module`` is the outermost that begins there, and
    ``tensors`` cross it. It cuts so many of the modules around it that run, but for the root.
    ``sequential``: the module reads what those right before it compute, and does not run beside
    them.
    """

    place: int
    module: str
    tensors: int
    cuts: int
    sequential: bool


class Chain:
    """The innermost modules of a model, one after another, and the place of every node among them.

    A *unit* is a module with nodes, none of whose submodules has any. What a module computes around
    its submodules has its place right after the last of the units whose results it reads, or, where
    it reads only the model's inputs, right before the first one that reads it. What depends on
    sizes of tensors alone goes after these tensors. Places therefore never decrease along an edge
    of the graph, and cutting the chain anywhere cuts the graph into parts that run one after
    another.

    Attributes:
        tagged: The model.
        units: How many units there are.
        spans: Module path → its first and its last unit, for every module that has nodes of its
            own.
        places: Node of the main graph → the unit at which it runs. Constants that are repeated are
            not in it.
    """

    def __init__(self, tagged: TaggedModel) -> None:
        self.tagged, self.cutter = tagged, Cutter(tagged)
        self.constants = constants = Constants(tagged, self.cutter)
        self._nodes = [node for node in tagged.model.graph if not constants.is_repeated(node)]
        first: dict[str, int] = {}
        for number, node in enumerate(self._nodes):
            if not constants.is_common(node):
                new = itertools.takewhile(
                    lambda up: up not in first, tags.ancestors(self.owner(node))
                )
                first.update(dict.fromkeys(new, number))
        self.spans = self._number(first)
        self.units = self.spans[""][1] + 1
        self.places: Mapping[ir.Node, int] = self._place()

    def reads(self, node: ir.Node) -> Iterator[ir.Value]:
        """What a node reads of the main graph, in its subgraphs too, but for what comes along."""
        return (value for value in self.cutter.reads(node) if not self.constants.comes_along(value))

    def _makers(self, node: ir.Node) -> set[ir.Node]:
        return {
            producer for value in self.reads(node) if (producer := value.producer()) is not None
        }

    def owner(self, node: ir.Node) -> str:
        """The first module that a node computes: shared work is there when it is needed first."""
        return next(iter(self.tagged.owners_of(node)), "")

    def _span(self, node: ir.Node) -> tuple[int, int]:
        """The units between which a node has to run."""
        anywhere = (0, self.units - 1)
        return (
            anywhere
            if self.constants.is_common(node)
            else self.spans.get(self.owner(node), anywhere)
        )

    # --- places -----------------------------------------------------------------------------------------

    def _number(self, first: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """Number the units in the order in which they first run; every module's span."""
        spans: dict[str, tuple[int, int]] = {}
        units, waiting = 0, [""]
        # a stack of our own: modules may lie deeper than functions can call each other
        while waiting:
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
            places[node] = max(
                places[node], min(self._span(node)[1], *(places[user] for user in users))
            )

    def owned_places(self) -> Iterator[tuple[ir.Node, int]]:
        """Nodes with their places, without those that compute sizes: these may be at any module."""
        return (
            (node, place) for node, place in self.places.items() if node not in self.constants.sizes
        )

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
            Border(
                place,
                outermost[place],
                crossing[place],
                cuts[place],
                outermost[place] in sequential,
            )
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
        return next(
            (
                self.owner(node)
                for node, at in self.places.items()
                if self._span(node)[1] < place <= at
            ),
            None,
        )

    def _crossing(self) -> Iterator[tuple[int, int]]:
        """The tensors between units, without sizes: where each is made, or a weight read first, and where read last."""
        for flow in part_tensors(self.tagged, self.places, self._is_sent):
            read = flow.consumers - {OUTSIDE}
            made = (
                flow.producer
                if flow.value is None
                else self.weight_places.get(flow.value, flow.producer)
            )
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
            children = [
                child for child in self.tagged.hierarchy.children(path) if child in self.spans
            ]
            ordered = sorted(children, key=lambda child: self.spans[child][0])
            before.update(
                (after, self.spans[sibling][0]) for sibling, after in itertools.pairwise(ordered)
            )
        for node in self.places:
            if self.constants.is_common(node):
                continue
            makers = self._makers(node)
            for path in tags.ancestors(self.owner(node)):
                if path in before:
                    near, start = before[path], self.spans[path][0]
                    if any(near <= self.places[maker] < start for maker in makers):
                        found.add(path)
        return found


def stages_of(chain: Chain, starts: Sequence[int]) -> Partition:
    """A model cut before some units of its chain, in order: every stage but the first begins at one.

    The stages are cut from the last one to the first: what one needs of those before it is what
    these have to give. An `InputError` names a stage that computes nothing that is needed.
    """
    tagged, graph, homes = chain.tagged, chain.tagged.model.graph, _Homes(chain, starts)
    wanted: list[dict[str, ir.Value]] = [{} for _ in range(len(starts) + 1)]
    for value in graph.outputs:
        wanted[homes.of(value)][output_name(value)] = value
    cuts: list[tuple[Cut, dict[str, int | None]]] = []
    for number in reversed(range(len(wanted))):
        if not wanted[number]:
            place = starts[number - 1] if number else 0
            begins = next((border.module for border in chain.borders if border.place == place), "")
            raise InputError(
                f"the stage that begins at module {begins!r} would compute nothing that the stages after it or the "
                "model's outputs need; leave it out"
            )
        part = homes.cut(number, wanted[number])
        inputs: dict[str, ir.Value] = {}
        sources: dict[str, int | None] = {}
        for value in part.inputs.values():
            given = value.is_graph_input() and not value.is_initializer()
            name = str(value.name) if given else output_name(value)
            inputs[name], sources[name] = value, None if given else homes.of(value)
            if not given:
                wanted[homes.of(value)][name] = value
        cuts.append((replace(part, inputs=inputs), sources))
    modules = _whole_modules(chain, homes)
    seen: set[ir.Value] = set()
    stages = []
    for number, (part, sources) in enumerate(reversed(cuts)):
        new = [value for value in part.initializers if value not in seen]
        seen.update(new)
        size = weight_bytes(new) + sum(map(constant_bytes, part.nodes))
        stages.append(_stage(tagged, part, modules[number], sources, size))
    return Partition(
        tagged.hierarchy.root.simple_class or graph.name or "model",
        tuple(stages),
        {
            str(value.name): StageTensor.of(value)
            for value in graph.inputs
            if not value.is_initializer()
        },
        {str(value.name): (homes.of(value), output_name(value)) for value in graph.outputs},
        _versions(tagged),
    )


class _Homes:
    """Which stage makes a value, and which nodes each has."""

    def __init__(self, chain: Chain, starts: Sequence[int]) -> None:
        self._chain = chain
        self._weights = {
            value: bisect_right(starts, place) for value, place in chain.weight_places.items()
        }
        self.of_node = {node: bisect_right(starts, place) for node, place in chain.places.items()}
        self._nodes: defaultdict[int, set[ir.Node]] = defaultdict(set)
        for node, stage in self.of_node.items():
            self._nodes[stage].add(node)

    def of(self, value: ir.Value) -> int:
        """The stage that makes a value or holds it; the first for what has no place, inputs and cheap constants."""
        producer = value.producer()
        return self._weights.get(value, 0) if producer is None else self.of_node.get(producer, 0)

    def cut(self, number: int, wanted: Mapping[str, ir.Value]) -> Cut:
        """A stage, with the cheap constants that it needs and the weights that it is the first to read."""
        constants = self._chain.constants

        def comes_along(value: ir.Value) -> bool:
            return constants.comes_along(value) or (
                value in constants.weights and self.of(value) == number
            )

        return self._chain.cutter.cut_nodes(self._nodes[number], wanted, comes_along)


def _whole_modules(chain: Chain, homes: _Homes) -> Mapping[int, Sequence[str]]:
    """Stage → the outermost modules all of whose nodes it has, but for constants and sizes that may be anywhere."""
    stages: defaultdict[str, set[int]] = defaultdict(set)
    first: dict[str, int] = {}
    starts: dict[tuple[str, int], int] = {}  # of an owner's nodes in a stage
    for node, place in chain.owned_places():
        key = (chain.owner(node), homes.of_node[node])
        starts[key] = min(starts.get(key, place), place)
    for (owner, stage), place in starts.items():
        for path in filter(chain.tagged.hierarchy.__contains__, tags.ancestors(owner)):
            stages[path].add(stage)
            first[path] = min(first.get(path, place), place)
    whole = {path: next(iter(where)) for path, where in stages.items() if len(where) == 1}
    found: defaultdict[int, list[str]] = defaultdict(list)
    for path in sorted(whole, key=first.__getitem__):
        if chain.tagged.hierarchy.parent(path) not in whole:
            found[whole[path]].append(path)
    return found


def _stage(
    tagged: TaggedModel,
    part: Cut,
    modules: Sequence[str],
    sources: Mapping[str, int | None],
    parameter_bytes: int,
) -> Stage:
    model = _stage_model(tagged, part, frozenset(modules))
    return Stage(
        tuple(modules),
        {
            str(value.name): StageTensor.of(value)
            for value in model.graph.inputs
            if not value.is_initializer()
        },
        {str(value.name): StageTensor.of(value) for value in model.graph.outputs},
        sources,
        sum(1 for _ in model.graph.all_nodes()),
        parameter_bytes,
        model=model,
        session_config=safe_entries(model),
    )


def _stage_model(tagged: TaggedModel, part: Cut, modules: frozenset[str]) -> ir.Model:
    """A stand-alone model of a stage, with the modules that have nodes in it, those above, and those below."""
    graph, _ = cut_graph(tagged, part)
    model = model_around(tagged, graph)
    tree = tagged.hierarchy
    whole = {path for path in tree if any(up in modules for up in tags.ancestors(path))}
    first = {owners[0] for node in all_nodes(model) if (owners := tagged.owners_of(node))}
    inside = whole | first | tags.all_above(first) | {""}
    narrow_owners(
        tagged,
        model,
        lambda work: filter(inside.__contains__, work.owners),
        lambda call: call if call.path in inside else None,
        "",
        tagged.calls,
    )
    stage_tree = Hierarchy(tree[path] for path in tree if path in inside)
    signatures = {path: calls for path, calls in tagged.signatures.items() if path in whole}
    write_part_metadata(
        tagged, model, stage_tree, tagged.calls.among(stage_tree), signatures, inside.__contains__
    )
    return model


def _versions(tagged: TaggedModel) -> dict[str, Any]:
    try:
        ours = version("htp-export")
    except PackageNotFoundError:  # run from its sources
        ours = "unknown"
    return {
        "htp_export": ours,
        "ir_version": tagged.model.ir_version,
        "opset": dict(tagged.model.opset_imports),
    }
