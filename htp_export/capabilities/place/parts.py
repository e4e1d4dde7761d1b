"""The parts of a model for a device with limited memory: most of the work, few crossings.

The memory is filled with neighbours: starting at each part, in execution order and around the end,
every part that still fits is taken. On BERT, Llama, ResNet and ViT, this finds as much work as the
best of all choices, see `docs/placement.md`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.model.cutting import Cutter
from htp_export.model.neighbours import connected
from htp_export.model.parts import PartTensor, part_tensors
from htp_export.model.tagged import TaggedModel
from htp_export.plans.rules import parts_of
from htp_export.reporting.columns import si
from htp_export.runtime.settings import RunSettings

if TYPE_CHECKING:
    from htp_export.costs.execution import Run, RunStep

_MOST_STARTS = 256  # start parts that are tried: a model of thousands of parts takes seconds


@dataclass(frozen=True)
class Item:
    """A part that is on the device as a whole, or not at all.

    Several items share the memory of a common weight. ``peak``: bytes of activations while it runs;
    ``work``: operations that are moved to the device.
    """

    weights: Mapping[object, int]
    peak: int
    work: int

    @property
    def memory(self) -> int:
        """Bytes of memory if it is alone on the device."""
        return self.peak + sum(self.weights.values())


class _Choice(NamedTuple):
    """Items that fit together: the first ``size`` of ``taken``."""

    crossings: int
    work: int
    taken: list[int]
    size: int


def fill(
    items: Sequence[Item], tensors: Iterable[PartTensor], memory: int, slack: float = 0.1
) -> list[int]:
    """Choose the items for the device, by index in execution order; empty if nothing fits.

    Of the choices of neighbours that fit, with at least ``1 - slack`` of the most work, the result
    has the fewest crossings, and then the most work. A tensor crosses if its producer and its
    consumers are not all on one side.
    """
    nets = [tensor.consumers | {tensor.producer} for tensor in tensors]
    nets_of: defaultdict[int, list[int]] = defaultdict(list)
    for number, parts in enumerate(nets):
        for part in parts:
            nets_of[part].append(number)
    starts = range(0, len(items), math.ceil(len(items) / _MOST_STARTS) or 1)
    choices: list[_Choice] = []
    for start in starts:
        choices.extend(_choices_from(start, items, nets, nets_of, memory))
    if not choices:
        return []
    least = (1 - slack) * max(choice.work for choice in choices)
    sufficient = [choice for choice in choices if choice.work >= least]
    best = min(sufficient, key=lambda choice: (choice.crossings, -choice.work))
    return sorted(best.taken[: best.size])


def _choices_from(
    start: int,
    items: Sequence[Item],
    nets: Sequence[frozenset[int]],
    nets_of: Mapping[int, Sequence[int]],
    memory: int,
) -> Iterator[_Choice]:
    """Take items that fit, from one on, and yield each prefix; ``nets_of``: item → its nets."""
    taken: list[int] = []
    weights: dict[object, int] = {}
    inside: Counter[int] = Counter()  # net → number of its parts that are taken
    used = peak = work = crossings = 0
    for number in (*range(start, len(items)), *range(start)):
        item = items[number]
        more = sum(size for weight, size in item.weights.items() if weight not in weights)
        if used + more + max(peak, item.peak) > memory:
            continue
        taken.append(number)
        weights.update(item.weights)
        used += more
        peak = max(peak, item.peak)
        work += item.work
        for net in nets_of.get(number, ()):
            crosses_before = inside[net] > 0
            inside[net] += 1
            crossings += (inside[net] < len(nets[net])) - crosses_before
        yield _Choice(crossings, work, taken, len(taken))


_Part: TypeAlias = tuple[str, Sequence[ir.Node]]
"""A module, and nodes of it or all its nodes, which go to one device together."""


def needs_of(tagged: TaggedModel, settings: RunSettings, *, required: bool = False) -> Needs | None:
    """Memory and work of a model's nodes; None if sizes are unknown and not required."""
    from htp_export.costs.execution import run_by_shapes

    try:
        run = run_by_shapes(tagged, settings)
    except InputError:
        if required or settings.has_inputs:
            raise
        return None
    return Needs(tagged, run)


class Needs:
    """Memory and work of main-graph nodes on a device; ``sizes``: tensor → bytes, if known."""

    def __init__(self, tagged: TaggedModel, run: Run) -> None:
        from htp_export.costs.execution import walk
        from htp_export.costs.memory import Timeline

        self.tagged = tagged
        self.notes = run.notes
        self.sizes: dict[str, int] = {}
        for step, _ in walk(run.steps):
            for tensor in (*step.inputs, *step.outputs):
                if tensor is not None and tensor.shape is not None:
                    self.sizes[tensor.name] = tensor.bytes
        self._live: dict[ir.Node, int] = {}
        for step, live in zip(run.steps, Timeline(run).live, strict=True):
            self._live[step.node] = int(live)
        self._steps: dict[ir.Node, RunStep] = {step.node: step for step in run.steps}

    def item(self, nodes: Iterable[ir.Node]) -> Item:
        """The item of main-graph nodes, with their subgraphs."""
        from htp_export.costs.execution import walk
        from htp_export.costs.work import work_of

        weights: dict[object, int] = {}
        peak = work = 0
        for node in nodes:
            if node not in self._steps:
                continue
            peak = max(peak, self._live[node])
            work += 1  # so that a node of unknown work counts, too
            for step, times in walk([self._steps[node]]):
                for tensor in step.inputs:
                    if tensor is not None and tensor.origin in ("weight", "constant"):
                        weights[tensor] = tensor.bytes
                done = work_of(step)
                if done is not None:
                    work += times * (2 * done.macs + done.other)
        return Item(weights, peak, work)

    @property
    def ordered(self) -> Sequence[ir.Node]:
        """The nodes of the main graph, in execution order."""
        return list(self._steps)


def nodes_that_fit(
    needs: Needs, candidates: Collection[ir.Node], device: str, memory: int, slack: float
) -> set[ir.Node]:
    """The nodes for a device, so that it does most of the work that fits, and few tensors cross.

    Modules are not divided if they fit. Nodes of a divided module outside of its children are
    divided into connected parts.

    Raises:
        InputError: Nothing fits; the message names the smallest part.
    """
    nodes = [node for node in needs.ordered if node in candidates]
    if not nodes:
        raise InputError(
            f"a budget for {device} needs modules with nodes outside of branches and loops: nodes inside a subgraph "
            "run on the device of the node that holds it"
        )
    order = {node: number for number, node in enumerate(nodes)}
    parts = sorted(_divided(needs, nodes, memory), key=lambda part: order[part[1][0]])
    items = [needs.item(part_nodes) for _, part_nodes in parts]
    part_of: dict[ir.Node, int] = {}
    for number, (_, part_nodes) in enumerate(parts):
        part_of.update(dict.fromkeys(part_nodes, number))
    cutter = Cutter(needs.tagged)

    def crosses(value: ir.Value) -> bool:
        """Whether passing a value between devices has a cost: constants and sizes have none."""
        return not (cutter.is_free(value) or cutter.is_size(value))

    tensors = part_tensors(needs.tagged, part_of, crosses)
    chosen = fill(items, tensors, memory, slack)
    if not chosen:
        item, (path, _) = min(zip(items, parts, strict=True), key=lambda pair: pair[0].memory)
        raise InputError(
            f"nothing fits into {si(memory, 'B')} on {device}: the smallest part, of module {path or '(root)'!r}, "
            f"needs {si(item.memory, 'B')}: {si(item.memory - item.peak, 'B')} weights "
            f"and {si(item.peak, 'B')} activations"
        )
    fitting: set[ir.Node] = set()
    for number in chosen:
        fitting.update(parts[number][1])
    return fitting


def _divided(needs: Needs, nodes: Sequence[ir.Node], memory: int) -> list[_Part]:
    """The outermost modules that fit, and connected parts of the rest."""
    waiting: list[_Part] = [("", nodes)]
    parts: list[_Part] = []
    while waiting:
        path, nodes = waiting.pop()
        below = _below(needs.tagged, path, nodes)
        if not below or needs.item(nodes).memory <= memory:
            parts.append((path, nodes))
            continue
        waiting += below.items()
        inside: set[ir.Node] = set().union(*below.values())
        own = [node for node in nodes if node not in inside]
        parts += [(path, group) for group in connected(own, reads=needs.tagged.index.reads)]
    return parts


def _below(
    tagged: TaggedModel, path: str, nodes: Iterable[ir.Node]
) -> Mapping[str, Sequence[ir.Node]]:
    """Child of a module → its subset of ``nodes``; a node belongs to the first of several."""
    child_of: dict[ir.Node, str] = {}
    for child in tagged.hierarchy.children(path):
        for node in tagged.index.below.get(child, ()):
            first, *more = parts_of(tagged, node)
            if not more or child in first.modules:
                child_of.setdefault(node, child)
    below: defaultdict[str, list[ir.Node]] = defaultdict(list)
    for node in nodes:
        if node in child_of:
            below[child_of[node]].append(node)
    return below
