"""The parts of a model that go to a device with limited memory, so that it does most of the work and few tensors cross.

The memory is filled with neighbours: from each part on, in order of execution and around the end,
those that still fit are taken. On BERT, Llama, ResNet and ViT, this finds as much work as the best
of all choices, `docs/placement.md`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.model.cutting import Cutter
from htp_export.model.neighbours import connected
from htp_export.model.parts import PartTensor, part_tensors
from htp_export.model.tagged import TaggedModel
from htp_export.plans.rules import parts_of
from htp_export.reporting.columns import si

if TYPE_CHECKING:
    from htp_export.costs.execution import Run, RunStep

_MOST_STARTS = 256  # a model of thousands of parts takes seconds


@dataclass(frozen=True)
class Item:
    """A part that is on the device as a whole, or not at all.

    A weight of several items needs memory once. ``peak``: bytes of activations while it runs;
    ``work``: what is saved.
    """

    weights: Mapping[object, int]
    peak: int
    work: int

    @property
    def memory(self) -> int:
        """The bytes that it needs by itself."""
        return self.peak + sum(self.weights.values())


class _Choice(NamedTuple):
    """The first items of those that fit together: ``size`` of ``taken``."""

    crossings: int
    work: int
    taken: list[int]
    size: int


def fill(
    items: Sequence[Item], tensors: Iterable[PartTensor], memory: int, slack: float = 0.1
) -> list[int]:
    """Choose the items that go to the device, by their numbers in the order of execution; none if nothing fits.

    Of the choices of neighbours that fit, with at least ``1 - slack`` of the most work, it is the
    one with the fewest crossings; of several, the one with the most work. A tensor crosses if the
    items that make and read it are not all on one side.
    """
    nets = [tensor.consumers | {tensor.producer} for tensor in tensors]
    nets_of: defaultdict[int, list[int]] = defaultdict(list)
    for number, parts in enumerate(nets):
        for part in parts:
            nets_of[part].append(number)
    starts = range(0, len(items), math.ceil(len(items) / _MOST_STARTS) or 1)
    choices = [
        choice for start in starts for choice in _choices_from(start, items, nets, nets_of, memory)
    ]
    least = (1 - slack) * max((choice.work for choice in choices), default=0)
    good = [choice for choice in choices if choice.work >= least]
    best = min(
        good, key=lambda choice: (choice.crossings, -choice.work), default=_Choice(0, 0, [], 0)
    )
    return sorted(best.taken[: best.size])


def _choices_from(
    start: int,
    items: Sequence[Item],
    nets: Sequence[frozenset[int]],
    nets_of: Mapping[int, Sequence[int]],
    memory: int,
) -> Iterator[_Choice]:
    """The items that fit from one on, and after each what was taken so far; ``nets_of``: item → its nets."""
    taken: list[int] = []
    weights: dict[object, int] = {}
    inside: Counter[int] = Counter()  # net → how many of its parts are taken
    used = peak = work = crossings = 0
    for number in (*range(start, len(items)), *range(start)):
        item = items[number]
        more = sum(size for weight, size in item.weights.items() if weight not in weights)
        if used + more + max(peak, item.peak) > memory:
            continue
        taken.append(number)
        weights.update(item.weights)
        used, peak, work = used + more, max(peak, item.peak), work + item.work
        for net in nets_of.get(number, ()):
            crosses_before = inside[net] > 0
            inside[net] += 1
            crossings += (inside[net] < len(nets[net])) - crosses_before
        yield _Choice(crossings, work, taken, len(taken))


_Part: TypeAlias = tuple[str, Sequence[ir.Node]]
"""Nodes that go to one device together, and the module that they are, or are of."""


def needs_of(
    tagged: TaggedModel,
    inputs: Mapping[str, Any] | None,
    dims: Mapping[str, int] | None,
    shapes: Mapping[str, Sequence[int]] | None,
    *,
    required: bool = False,
) -> Needs | None:
    """What the nodes of a model without functions need; None if sizes are unknown, not required, and none was given."""
    from htp_export.costs.execution import run_by_shapes

    try:
        run = run_by_shapes(tagged, inputs, dims, shapes)
    except InputError:
        if required or inputs or dims or shapes:
            raise
        return None
    return Needs(tagged, run)


class Needs:
    """What the nodes of a main graph need on a device; ``sizes``: tensor → bytes, where its shape is known."""

    def __init__(self, tagged: TaggedModel, run: Run) -> None:
        from htp_export.costs.execution import walk
        from htp_export.costs.memory import Timeline

        self.tagged, self.notes = tagged, run.notes
        tensors = (
            tensor for step, _ in walk(run.steps) for tensor in (*step.inputs, *step.outputs)
        )
        self.sizes = {
            one.name: one.bytes for one in tensors if one is not None and one.shape is not None
        }
        self._live = {
            step.node: int(live) for step, live in zip(run.steps, Timeline(run).live, strict=True)
        }
        self._steps: dict[ir.Node, RunStep] = {step.node: step for step in run.steps}

    def item(self, nodes: Iterable[ir.Node]) -> Item:
        """What nodes of the main graph need together, with their subgraphs."""
        from htp_export.costs.execution import walk
        from htp_export.costs.work import work_of

        weights: dict[object, int] = {}
        peak = work = 0
        for node in nodes:
            if node not in self._steps:
                continue
            peak, work = max(peak, self._live[node]), work + 1  # work that is not known counts, too
            for step, times in walk([self._steps[node]]):
                weights.update(
                    {
                        t: t.bytes
                        for t in step.inputs
                        if t is not None and t.origin in ("weight", "constant")
                    }
                )
                done = work_of(step)
                work += 0 if done is None else times * (2 * done.macs + done.other)
        return Item(weights, peak, work)

    @property
    def ordered(self) -> Sequence[ir.Node]:
        """The nodes of the main graph, in the order in which they run."""
        return list(self._steps)


def nodes_that_fit(
    needs: Needs, candidates: Collection[ir.Node], device: str, memory: int, slack: float
) -> set[ir.Node]:
    """The nodes that go to a device, so that it does most of the work that fits, and few tensors cross.

    Modules are not divided if they fit. What a divided module computes around the modules below it
    is divided into connected parts. If nothing fits, the `InputError` names the part that needs
    least.
    """
    nodes = [node for node in needs.ordered if node in candidates]
    if not nodes:
        raise InputError(
            f"a budget for {device} needs modules with nodes outside of branches and loops: others go where the node "
            "around them goes"
        )
    order = {node: number for number, node in enumerate(nodes)}
    parts = sorted(_divided(needs, nodes, memory), key=lambda part: order[part[1][0]])
    items = [needs.item(part) for _, part in parts]
    part_of = {node: number for number, (_, part) in enumerate(parts) for node in part}
    cutter = Cutter(needs.tagged)  # constants and sizes cost nothing
    tensors = part_tensors(
        needs.tagged, part_of, lambda value: not (cutter.is_free(value) or cutter.is_size(value))
    )
    chosen = fill(items, tensors, memory, slack)
    if not chosen:
        item, (path, _) = min(zip(items, parts, strict=True), key=lambda pair: pair[0].memory)
        raise InputError(
            f"nothing fits into {si(memory, 'B')} on {device}: the smallest part, of module {path or '(root)'!r}, "
            f"needs {si(item.memory, 'B')}: {si(item.memory - item.peak, 'B')} weights "
            f"and {si(item.peak, 'B')} activations"
        )
    return {node for number in chosen for node in parts[number][1]}


def _divided(needs: Needs, nodes: Sequence[ir.Node], memory: int) -> list[_Part]:
    """The outermost modules that fit, and what is left of those that do not."""
    waiting: list[_Part] = [("", nodes)]
    parts: list[_Part] = []
    while waiting:
        path, nodes = waiting.pop()
        below = _below(needs.tagged, path, nodes)
        if not below or needs.item(nodes).memory <= memory:
            parts.append((path, nodes))
            continue
        waiting += below.items()
        inside = {node for listed in below.values() for node in listed}
        own = [node for node in nodes if node not in inside]
        parts += [(path, group) for group in connected(own, reads=needs.tagged.index.reads)]
    return parts


def _below(
    tagged: TaggedModel, path: str, nodes: Iterable[ir.Node]
) -> Mapping[str, Sequence[ir.Node]]:
    """Module right below a path → its nodes of these; the first of several that a node belongs to."""
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
