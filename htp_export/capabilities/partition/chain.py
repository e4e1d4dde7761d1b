"""A model as a chain of modules in execution order, the borders where it can be cut, and stages."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

import onnx_ir as ir

from htp_export.capabilities.partition.partitions import Partition, Stage, StageTensor
from htp_export.editing.cut_models import (
    describe_part,
    edit_of_cut,
    narrow_owners,
    output_name,
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
    """A place between two modules at which the chain can be cut.

    No tensor flows back over it, and every module except its ancestors is on one side. ``place``
    is the number of units before it, ``module`` the outermost that begins there, and ``tensors``
    the number that cross it. ``cuts`` is the number of ancestors that run and are cut, except for
    the root. ``sequential``: the module uses results of the modules right before it, and does not
    run beside them.
    """

    place: int
    module: str
    tensors: int
    cuts: int
    sequential: bool


class Chain:
    """The innermost modules of a model in a row, and the place of every node among them.

    A *unit* is a module with nodes, none of whose submodules has any. Nodes that a module computes
    around its submodules have their place right after the last unit whose results they use. Nodes
    that use only the model's inputs have theirs right before their first consumer, and computations
    on sizes of tensors right after these tensors. Places therefore never decrease along an edge of
    the graph, and each cut of the chain divides the graph into parts that run one after another.

    Attributes:
        tagged: The model.
        units: Number of units.
        spans: Module path → its first and last unit, for modules with nodes in their regions.
        places: Node of the main graph → the unit at which it runs, without constants that are
            repeated in each stage.
    """

    def __init__(self, tagged: TaggedModel) -> None:
        self.tagged = tagged
        self.cutter = Cutter(tagged)
        self.constants = constants = Constants(tagged, self.cutter)
        self._nodes = [node for node in tagged.model.graph if not constants.is_repeated(node)]
        first: dict[str, int] = {}
        for number, node in enumerate(self._nodes):
            if constants.is_common(node):
                continue
            for path in tags.ancestors(self.owner(node)):
                if path in first:
                    break
                first[path] = number
        self.spans = self._number(first)
        self.units = self.spans[""][1] + 1
        self.places: Mapping[ir.Node, int] = self._place()

    def reads(self, node: ir.Node) -> Iterator[ir.Value]:
        """The values that a node uses, in its subgraphs too, without repeated constants."""
        return (value for value in self.cutter.reads(node) if not self.constants.comes_along(value))

    def _producers(self, node: ir.Node) -> set[ir.Node]:
        producers = {value.producer() for value in self.reads(node)}
        return {producer for producer in producers if producer is not None}

    def owner(self, node: ir.Node) -> str:
        """The first owner of a node: shared work is placed where it is first needed."""
        return next(iter(self.tagged.owners_of(node)), "")

    def _span(self, node: ir.Node) -> tuple[int, int]:
        """The range of units in which a node must run."""
        anywhere = (0, self.units - 1)
        if self.constants.is_common(node):
            return anywhere
        return self.spans.get(self.owner(node), anywhere)

    # --- places ---------------------------------------------------------------------------------

    def _number(self, first: Mapping[str, int]) -> dict[str, tuple[int, int]]:
        """Number the units in the order of their first run; return every module's span."""
        spans: dict[str, tuple[int, int]] = {}
        units = 0
        waiting = [""]
        # A stack instead of recursion: modules may be nested deeper than Python's limit.
        while waiting:
            path = waiting.pop()
            if path in spans:  # all descendants have their spans
                spans[path] = (spans[path][0], units - 1)
                continue
            spans[path] = (units, units)
            children = self.tagged.hierarchy.children(path)
            below = sorted((child for child in children if child in first), key=first.__getitem__)
            units += not below
            waiting += [path, *reversed(below)]
        return spans

    def _place(self) -> dict[ir.Node, int]:
        """Node → unit: after its producers; before its consumers if it only needs model inputs."""
        places: dict[ir.Node, int] = {}
        moving: set[ir.Node] = set()
        for node in self._nodes:
            low, high = self._span(node)
            producers = self._producers(node)
            places[node] = max([low, *(places[producer] for producer in producers)])
            if low < high and producers <= moving:
                moving.add(node)
        for node in reversed(self._nodes):
            if node in moving:
                self._delay(node, places)
        return places

    def _delay(self, node: ir.Node, places: dict[ir.Node, int]) -> None:
        """Move a node that only needs the model's inputs to its first consumer."""
        if any(value.is_graph_output() for value in node.outputs):
            return
        consumers = set[ir.Node]()
        for value in node.outputs:
            for use in value.uses():
                # The node of the main graph that contains the consumer.
                consumers.add([*self.tagged.index.scopes(use.node)][-1])
        if consumers:
            latest = min(self._span(node)[1], *(places[consumer] for consumer in consumers))
            places[node] = max(places[node], latest)

    def owned_places(self) -> Iterator[tuple[ir.Node, int]]:
        """Nodes with their places, without computations on sizes, which may be at any module."""
        return (
            (node, place) for node, place in self.places.items() if node not in self.constants.sizes
        )

    @cached_property
    def weight_places(self) -> Mapping[ir.Value, int]:
        """Weight → the first unit that uses it."""
        first: dict[ir.Value, int] = {}
        for node, place in self.places.items():
            for value in self.reads(node):
                if value in self.constants.weights:
                    first[value] = min(first.get(value, place), place)
        return first

    # --- borders --------------------------------------------------------------------------------

    @cached_property
    def borders(self) -> tuple[Border, ...]:
        """Every place where the chain can be cut, in order."""
        outermost: dict[int, str] = {}
        for path, (low, _) in self.spans.items():
            outermost.setdefault(low, path)
        called = self.tagged.hierarchy.called
        cuts = self._astride(span for path, span in self.spans.items() if path and path in called)
        crossing = self._astride(self._crossing())
        sequential = self._sequential_modules()
        borders = []
        for place in range(1, self.units):
            if not self._blocked[place]:
                module = outermost[place]
                is_sequential = module in sequential
                borders.append(Border(place, module, crossing[place], cuts[place], is_sequential))
        return tuple(borders)

    def _astride(self, spans: Iterable[tuple[int, int]]) -> list[int]:
        """For each place, the number of spans with units on both sides."""
        steps = [0] * (self.units + 1)
        for low, high in spans:
            steps[low + 1] += 1
            steps[high + 1] -= 1
        return list(itertools.accumulate(steps))

    @cached_property
    def _blocked(self) -> list[int]:
        """For each place, the number of nodes after it whose modules are before it.

        Such modules run again, or their results are used too early.
        """
        ends = ((self._span(node)[1], place) for node, place in self.places.items())
        return self._astride((end, place) for end, place in ends if end < place)

    def astride(self, place: int) -> str | None:
        """The module on both sides of a place that is no border; None at a border."""
        for node, unit in self.places.items():
            if self._span(node)[1] < place <= unit:
                return self.owner(node)
        return None

    def _crossing(self) -> Iterator[tuple[int, int]]:
        """The units between which each tensor, except sizes, must be kept: producer, last consumer.

        For a weight, the first unit is that of its first consumer.
        """
        for flow in part_tensors(self.tagged, self.places, self._is_sent):
            consumers = flow.consumers - {OUTSIDE}
            first = flow.producer
            if flow.value is not None:
                first = self.weight_places.get(flow.value, first)
            if consumers and first < max(consumers):
                yield first, max(consumers)

    def _is_sent(self, value: ir.Value) -> bool:
        """Whether a tensor is sent between units: a weight, or a result that depends on inputs.

        Sizes are not sent.
        """
        producer = value.producer()
        if producer is None:
            return value in self.constants.weights
        return not self.constants.comes_along(value) and producer not in self.constants.sizes

    def _sequential_modules(self) -> set[str]:
        """The modules that use results of the sibling right before them, or of nodes in between."""
        sequential: set[str] = set()
        # Module → the first unit of the sibling that runs right before it.
        before: dict[str, int] = {}
        for path in self.spans:
            children = [
                child for child in self.tagged.hierarchy.children(path) if child in self.spans
            ]
            children.sort(key=lambda child: self.spans[child][0])
            for sibling, child in itertools.pairwise(children):
                before[child] = self.spans[sibling][0]
        for node in self.places:
            if self.constants.is_common(node):
                continue
            producers = self._producers(node)
            for path in tags.ancestors(self.owner(node)):
                if path in before:
                    near = before[path]
                    start = self.spans[path][0]
                    if any(near <= self.places[producer] < start for producer in producers):
                        sequential.add(path)
        return sequential


def stages_of(chain: Chain, starts: Sequence[int]) -> Partition:
    """Cut a model before some units of its chain, in order; each is the start of a stage.

    The stages are cut from the last to the first: the inputs of a stage are the required outputs of
    earlier ones.

    Raises:
        InputError: A stage computes nothing that is needed.
    """
    tagged = chain.tagged
    graph = chain.tagged.model.graph
    homes = _Homes(chain, starts)
    required: list[dict[str, ir.Value]] = [{} for _ in range(len(starts) + 1)]
    for value in graph.outputs:
        required[homes.of(value)][output_name(value)] = value
    cuts: list[tuple[Cut, dict[str, int | None]]] = []
    for number in reversed(range(len(required))):
        if not required[number]:
            _raise_useless(chain, starts[number - 1] if number else 0)
        cuts.append(_cut_stage(homes, number, required))
    modules = _whole_modules(chain, homes)
    seen: set[ir.Value] = set()
    stages = []
    for number, (part, sources) in enumerate(reversed(cuts)):
        new = [value for value in part.initializers if value not in seen]
        seen.update(new)
        size = weight_bytes(new) + sum(map(constant_bytes, part.nodes))
        stages.append(_stage(tagged, part, modules[number], sources, size))
    return Partition(
        name=tagged.hierarchy.root.simple_class or graph.name or "model",
        stages=tuple(stages),
        inputs=_stage_tensors(value for value in graph.inputs if not value.is_initializer()),
        outputs={str(value.name): (homes.of(value), output_name(value)) for value in graph.outputs},
        versions=_versions(tagged),
    )


def _cut_stage(
    homes: _Homes, number: int, required: Sequence[dict[str, ir.Value]]
) -> tuple[Cut, dict[str, int | None]]:
    """Cut one stage; return it with the sources of its inputs, which become required."""
    part = homes.cut(number, required[number])
    inputs: dict[str, ir.Value] = {}
    sources: dict[str, int | None] = {}
    for value in part.inputs.values():
        if value.is_graph_input() and not value.is_initializer():
            name = str(value.name)
            sources[name] = None
        else:
            name = output_name(value)
            sources[name] = source = homes.of(value)
            required[source][name] = value
        inputs[name] = value
    return replace(part, inputs=inputs), sources


def _raise_useless(chain: Chain, place: int) -> NoReturn:
    """Raise an `InputError` for a stage that computes nothing for other stages or outputs."""
    module = ""
    for border in chain.borders:
        if border.place == place:
            module = border.module
            break
    raise InputError(
        f"the stage that begins at module {module!r} would compute nothing that the stages after it or the "
        "model's outputs need; leave it out"
    )


def _stage_tensors(values: Iterable[ir.Value]) -> dict[str, StageTensor]:
    return {str(value.name): StageTensor.of(value) for value in values}


class _Homes:
    """The stage of each value and node."""

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
        """The stage of a value: of its producer, or of a weight's first consumer.

        Inputs and cheap constants, which have no place, count for the first stage.
        """
        producer = value.producer()
        if producer is None:
            return self._weights.get(value, 0)
        return self.of_node.get(producer, 0)

    def cut(self, number: int, wanted: Mapping[str, ir.Value]) -> Cut:
        """A stage, with the cheap constants that it needs, and the weights that it uses first."""
        constants = self._chain.constants

        def comes_along(value: ir.Value) -> bool:
            is_own_weight = value in constants.weights and self.of(value) == number
            return constants.comes_along(value) or is_own_weight

        return self._chain.cutter.cut_nodes(self._nodes[number], wanted, comes_along)


def _whole_modules(chain: Chain, homes: _Homes) -> Mapping[int, Sequence[str]]:
    """Stage → the outermost modules that are completely in it, in execution order.

    Constants and sizes do not count: they may be anywhere.
    """
    stages: defaultdict[str, set[int]] = defaultdict(set)
    first: dict[str, int] = {}
    starts: dict[tuple[str, int], int] = {}  # owner and stage → first unit
    for node, place in chain.owned_places():
        key = (chain.owner(node), homes.of_node[node])
        starts[key] = min(starts.get(key, place), place)
    for (owner, stage), place in starts.items():
        for path in filter(chain.tagged.hierarchy.__contains__, tags.ancestors(owner)):
            stages[path].add(stage)
            first[path] = min(first.get(path, place), place)
    whole = {path: next(iter(numbers)) for path, numbers in stages.items() if len(numbers) == 1}
    outermost: defaultdict[int, list[str]] = defaultdict(list)
    for path in sorted(whole, key=first.__getitem__):
        if chain.tagged.hierarchy.parent(path) not in whole:
            outermost[whole[path]].append(path)
    return outermost


def _stage(
    tagged: TaggedModel,
    part: Cut,
    modules: Sequence[str],
    sources: Mapping[str, int | None],
    parameter_bytes: int,
) -> Stage:
    """A stage with its stand-alone model."""
    model = _stage_model(tagged, part, frozenset(modules))
    return Stage(
        modules=tuple(modules),
        inputs=_stage_tensors(value for value in model.graph.inputs if not value.is_initializer()),
        outputs=_stage_tensors(model.graph.outputs),
        sources=sources,
        nodes=sum(1 for _ in model.graph.all_nodes()),
        parameter_bytes=parameter_bytes,
        model=model,
        session_config=safe_entries(model),
    )


def _stage_model(tagged: TaggedModel, part: Cut, modules: frozenset[str]) -> ir.Model:
    """A stand-alone model of a stage, with its modules, their ancestors and descendants."""
    edit, _ = edit_of_cut(tagged, part)
    model = edit.tagged.model
    tree = tagged.hierarchy
    whole = {path for path in tree if not modules.isdisjoint(tags.ancestors(path))}
    owners = filter(None, map(tagged.owners_of, all_nodes(model)))
    first = {node_owners[0] for node_owners in owners}
    inside = whole | first | tags.all_above(first) | {""}
    stage_tree = Hierarchy(tree[path] for path in tree if path in inside)
    with edit:
        narrow_owners(
            edit,
            tagged,
            lambda work: filter(inside.__contains__, work.owners),
            lambda call: call if call.path in inside else None,
            "",
            tagged.calls,
        )
        edit.signatures = {
            path: list(calls) for path, calls in tagged.signatures.items() if path in whole
        }
        calls = tagged.calls.among(stage_tree)
        describe_part(edit, tagged, stage_tree, calls, inside.__contains__)
    return model


def _versions(tagged: TaggedModel) -> dict[str, Any]:
    """The versions in the manifest."""
    try:
        ours = version("htp-export")
    except PackageNotFoundError:  # not installed: run from its sources
        ours = "unknown"
    return {
        "htp_export": ours,
        "ir_version": tagged.model.ir_version,
        "opset": dict(tagged.model.opset_imports),
    }
