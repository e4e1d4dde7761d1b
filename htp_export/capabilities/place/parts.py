"""The parts of a model that may go to a device with limited memory, and what each needs there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from htp_export.capabilities.place.filling import Item, fill
from htp_export.errors import InputError
from htp_export.model.cutting import Cutter
from htp_export.model.groups import connected
from htp_export.model.parts import PartTensor, part_tensors
from htp_export.model.tagged import TaggedModel
from htp_export.plans.deciders import parts_of
from htp_export.results.columns import si

if TYPE_CHECKING:
    from htp_export.capabilities.cost.bindings import Bindings
    from htp_export.capabilities.cost.execution import Run, RunStep

__all__ = ["Needs", "known_sizes", "nodes_that_fit", "tensor_sizes"]


@dataclass(frozen=True)
class _Part:
    """Nodes that go to one device together."""

    path: str
    nodes: Sequence[ir.Node]


def known_sizes(
    model: ir.Model,
    inputs: Mapping[str, Any] | None,
    dims: Mapping[str, int] | None,
    shapes: Mapping[str, Sequence[int]] | None,
    *,
    required: bool = False,
) -> Bindings | None:
    """The sizes of the inputs of a model; None if they are unknown, not required, and none was given.

    Raises:
        InputError: If what was given does not fit the model, or if required sizes are unknown.
    """
    from htp_export.capabilities.cost.bindings import bind

    try:
        return bind(model, inputs, dims, shapes)
    except InputError:
        if required or inputs or dims or shapes:
            raise
        return None


def tensor_sizes(run: Run) -> dict[str, int]:
    """Name of each tensor of a run → bytes; without those whose shapes are unknown."""
    from htp_export.capabilities.cost.execution import walk

    tensors = (tensor for step, _ in walk(run.steps) for tensor in (*step.inputs, *step.outputs))
    return {tensor.name: tensor.bytes for tensor in tensors if tensor is not None and tensor.shape is not None}


class Needs:
    """What the nodes of a main graph need on a device.

    Args:
        tagged: The model, without functions.
        run: What happens in one run of it.
    """

    def __init__(self, tagged: TaggedModel, run: Run) -> None:
        from htp_export.capabilities.cost.memory import Timeline

        self.tagged = tagged
        self.sizes = tensor_sizes(run)
        live = Timeline(run).live
        self._steps: dict[ir.Node, RunStep] = {step.node: step for step in run.steps}
        self._live = {step.node: int(bytes_) for step, bytes_ in zip(run.steps, live, strict=True)}

    def item(self, nodes: Iterable[ir.Node]) -> Item:
        """What nodes of the main graph need together, with their subgraphs."""
        from htp_export.capabilities.cost.execution import walk
        from htp_export.capabilities.cost.flops import work_of

        weights: dict[object, int] = {}
        peak = work = 0
        for node in nodes:
            if node not in self._steps:
                continue
            peak, work = max(peak, self._live[node]), work + 1  # work that is not known counts, too
            for step, times in walk([self._steps[node]]):
                weights.update(
                    {t: t.bytes for t in step.inputs if t is not None and t.origin in ("weight", "constant")}
                )
                done = work_of(step)
                work += 0 if done is None else times * (2 * done.macs + done.other)
        return Item(weights, peak, work)

    @property
    def ordered(self) -> Sequence[ir.Node]:
        """The nodes of the main graph, in the order in which they run."""
        return list(self._steps)


def memory_of(item: Item) -> int:
    """The bytes that an item needs by itself."""
    return item.peak + sum(item.weights.values())


def nodes_that_fit(
    needs: Needs, candidates: Collection[ir.Node], device: str, memory: int, slack: float
) -> set[ir.Node]:
    """The nodes that go to a device, so that it does most of the work that fits, and few tensors cross.

    Modules are not divided if they fit. What a divided module computes around the modules below it is divided into
    connected parts. See ``filling`` for how parts are chosen.

    Args:
        needs: What nodes need.
        candidates: The nodes of the main graph that may go there.
        device: Its name in errors.
        memory: Its bytes.
        slack: Which part of the work may be given up for fewer crossings.

    Raises:
        InputError: If nothing fits, or all candidates are in subgraphs; the message names the part that needs least.
    """
    nodes = [node for node in needs.ordered if node in candidates]
    if not nodes:
        raise InputError(
            f"a budget for {device} needs modules with nodes outside of branches and loops: others go where the node "
            "around them goes"
        )
    parts = _divided(needs, "", nodes, memory)
    order = {node: number for number, node in enumerate(nodes)}
    parts.sort(key=lambda part: order[part.nodes[0]])
    items = [needs.item(part.nodes) for part in parts]
    chosen = fill(items, _tensors(needs.tagged, parts), memory, slack)
    if not chosen:
        smallest = min(range(len(parts)), key=lambda number: memory_of(items[number]))
        item = items[smallest]
        weights = memory_of(item) - item.peak
        raise InputError(
            f"nothing fits into {si(memory, 'B')} on {device}: the smallest part, of module {parts[smallest].path!r}, "
            f"needs {si(memory_of(item), 'B')}: {si(weights, 'B')} weights and {si(item.peak, 'B')} activations"
        )
    return {node for number in chosen for node in parts[number].nodes}


def _divided(needs: Needs, path: str, nodes: Sequence[ir.Node], memory: int) -> list[_Part]:
    """The outermost modules that fit, and what is left of those that do not."""
    waiting, parts = [(path, nodes)], []
    while waiting:
        path, nodes = waiting.pop()
        if not nodes:
            continue
        below = _below(needs.tagged, path, nodes)
        if not below or memory_of(needs.item(nodes)) <= memory:
            parts.append(_Part(path, nodes))
            continue
        waiting += below.items()
        inside = {node for listed in below.values() for node in listed}
        own = [node for node in nodes if node not in inside]
        parts += [_Part(path, listed) for listed in connected(own, reads=needs.tagged.index.reads)]
    return parts


def _below(tagged: TaggedModel, path: str, nodes: Iterable[ir.Node]) -> Mapping[str, Sequence[ir.Node]]:
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


def _tensors(tagged: TaggedModel, parts: Sequence[_Part]) -> list[PartTensor]:
    """What parts give each other and the rest, without constants and sizes, which cost nothing."""
    part_of = {node: number for number, part in enumerate(parts) for node in part.nodes}
    cutter = Cutter(tagged)
    return list(part_tensors(tagged, part_of, lambda value: not (cutter.is_free(value) or cutter.is_size(value))))
