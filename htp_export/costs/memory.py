"""Activation memory over time, traffic between memory and processor, and savings by fusing.

``docs/cost.md`` describes the memory model, which is the same for every runtime.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from htp_export.costs.execution import Body, Run, RunStep, Tensor, run_by_shapes
from htp_export.editing.flattening import read_flat
from htp_export.format.bounds import LARGEST
from htp_export.model.tagged import ModelSource
from htp_export.shapes.operator_kinds import CONTROL_FLOW, RESHAPING, SIZES_ONLY, is_standard
from htp_export.shapes.operators.elementwise import ELEMENTWISE, LIKE_FIRST

_Bytes: TypeAlias = npt.NDArray[Any]

_NO_TRAFFIC = RESHAPING | SIZES_ONLY | CONTROL_FLOW | {"Constant", "Identity"}
# These read only the selected elements of their first input.
_PICKING = frozenset(("Gather", "GatherElements", "GatherND", "Slice", "Compress"))


def moves(step: RunStep) -> Iterator[tuple[Tensor, int, bool]]:
    """Yield the tensors that one run of a node reads and writes, their bytes, and whether it writes.

    Nothing for views, and for nodes with subgraphs, whose nodes have their own. Of inputs with
    one buffer, only the largest is read.
    """
    if step.op[0] == "" and step.op[1] in _NO_TRAFFIC:
        return
    written = sum(tensor.bytes for tensor in step.outputs)
    read: dict[Tensor, tuple[Tensor, int]] = {}
    for position, tensor in enumerate(step.inputs):
        if tensor is None:
            continue
        size = tensor.bytes
        if position == 0 and step.op[1] in _PICKING:
            size = min(size, written)
        if tensor.buffer not in read or size > read[tensor.buffer][1]:
            read[tensor.buffer] = tensor, size
    for tensor, size in read.values():
        yield tensor, size, False
    for tensor in step.outputs:
        yield tensor, tensor.bytes, True


def traffic(step: RunStep) -> Mapping[Tensor, int]:
    """Buffer → bytes that one run of a node reads from it and writes into it, as of `moves`."""
    moved: defaultdict[Tensor, int] = defaultdict(int)
    for tensor, size, _ in moves(step):
        moved[tensor.buffer] += size
    return moved


def moved_bytes(steps: Iterable[RunStep]) -> tuple[int, int]:
    """The bytes that one run of each node reads, and the bytes that it writes, as of `moves`."""
    read, written = 0, 0
    for step in steps:
        for _, size, is_written in moves(step):
            if is_written:
                written += size
            else:
                read += size
    return read, written


@dataclass(frozen=True, eq=False)
class Life:
    """The life of a buffer: the first and last step that need it, and its size in bytes.

    ``touched`` are the steps that write, read or reshape it; ``leaves`` is True for an input or
    output of the model.
    """

    tensor: Tensor
    start: int
    end: int
    size: int
    touched: tuple[int, ...]
    leaves: bool


class Timeline:
    """The memory of a run: ``live`` bytes at each step, with subgraphs, and lives of buffers."""

    def __init__(self, run: Run) -> None:
        self._steps = run.steps
        self.lives = _lives(run.steps, run.outputs, "input")
        self.live: _Bytes = _occupied(self.lives, len(run.steps)) + _in_bodies(run.steps)

    def peak(self, *, without: Collection[Life] = (), steps: Sequence[int] | None = None) -> int:
        """The peak of live bytes; of some steps only, or if some buffers took no memory."""
        live = self.live
        if without:
            live = live - _occupied(without, len(live))
        if steps is not None:
            live = live[list(steps)]
        return int(live.max(initial=0))

    @cached_property
    def internal(self) -> Mapping[str, Sequence[Life]]:
        """Module path → the buffers that only nodes in its region write or read."""
        lives: defaultdict[str, list[Life]] = defaultdict(list)
        for life in self.lives:
            if life.leaves:
                continue
            regions = ({"", *self._steps[t].modules} for t in life.touched)
            for path in set[str].intersection(*regions):
                lives[path].append(life)
        return lives

    @cached_property
    def _moved(self) -> Counter[Tensor]:
        """Buffer → bytes that all steps read from it and write into it."""
        moved = Counter[Tensor]()
        for step in self._steps:
            moved.update(traffic(step))
        return moved

    def traffic_of(self, lives: Iterable[Life]) -> int:
        """The traffic that is caused by keeping some buffers in memory."""
        return sum(self._moved[life.tensor] for life in lives)


def _lives(steps: Sequence[RunStep], outputs: Sequence[Tensor], origin: str = "") -> list[Life]:
    """The activations of a graph, in the order of their first use.

    Tensors of ``origin`` belong to the graph though no step computes them; in subgraphs, none do.
    """
    touched: dict[Tensor, list[int]] = {}
    inputs: set[Tensor] = set()
    for t, step in enumerate(steps):
        for tensor in _reads(step):
            buffer = tensor.buffer
            if buffer.origin == origin and buffer not in touched:
                touched[buffer] = [0]
                inputs.add(buffer)
            if buffer in touched:
                touched[buffer].append(t)
        for tensor in step.outputs:
            buffer = tensor.buffer
            if buffer.origin == "made":
                touched.setdefault(buffer, []).append(t)
    returned = {tensor.buffer for tensor in outputs}
    last = len(steps) - 1
    lives = []
    for buffer, at in touched.items():
        is_returned = buffer in returned
        life = Life(
            tensor=buffer,
            start=at[0],
            end=last if is_returned else at[-1],
            size=buffer.bytes,
            touched=tuple(dict.fromkeys(at)),
            leaves=is_returned or buffer in inputs,
        )
        lives.append(life)
    return lives


def _reads(step: RunStep) -> Iterator[Tensor]:
    """The inputs of a step, with the outer values that its subgraphs use."""
    yield from (tensor for tensor in step.inputs if tensor is not None)
    for body in step.bodies:
        yield from _captured(body)


def _captured(body: Body) -> Iterator[Tensor]:
    """The values from outside that a subgraph uses."""
    inside = set(body.inputs)
    for step in body.steps:
        yield from (tensor for tensor in _reads(step) if tensor not in inside)
        inside.update(step.outputs)
    yield from (tensor for tensor in body.outputs if tensor not in inside)


def _in_bodies(steps: Sequence[RunStep]) -> _Bytes:
    """The peak of the subgraphs of each step, without the outputs of the step."""
    peaks = [max(map(_body_peak, step.bodies), default=0) for step in steps]
    return np.array(peaks, dtype=_type_of(peaks))


def _body_peak(body: Body) -> int:
    returned = {tensor.buffer for tensor in body.outputs}
    lives = [life for life in _lives(body.steps, body.outputs) if life.tensor not in returned]
    return int((_occupied(lives, len(body.steps)) + _in_bodies(body.steps)).max(initial=0))


def _occupied(lives: Iterable[Life], steps: int) -> _Bytes:
    """The bytes that some buffers occupy at each step."""
    counted = [(life.start, life.end + 1, life.size) for life in lives if life.size]
    change = np.zeros(steps + 1, dtype=_type_of([size for _, _, size in counted]))
    if counted:
        starts, ends, sizes = zip(*counted, strict=True)
        np.add.at(change, list(starts), sizes)
        np.subtract.at(change, list(ends), sizes)
    return np.cumsum(change[:-1])


def _type_of(sizes: Sequence[int]) -> type[Any]:
    """The element type for sums of sizes: Python integers if a file's are too large for int64."""
    return np.int64 if sum(sizes) <= LARGEST else object


@dataclass(frozen=True)
class FusedCost:
    """The cost of a group of modules, now and if each of them kept its intermediates on chip.

    The traffic is that of their nodes; the peak is that of the whole model while one of them runs.
    """

    traffic_bytes: int
    fused_traffic_bytes: int
    peak_bytes: int
    fused_peak_bytes: int


def cost_of_fusing(
    model: ModelSource, groups: Mapping[str, Collection[str]]
) -> dict[str, FusedCost]:
    """The effect of fusing all modules of a group: name → memory and traffic. Open sizes are 1.

    Each module is fused on its own, and all modules of a group at the same time.
    """
    tagged = read_flat(model)
    run = run_by_shapes(tagged)
    timeline = Timeline(run)
    costs = {}
    for name, paths in groups.items():
        internal: dict[Life, None] = {}
        for path in paths:
            internal.update(dict.fromkeys(timeline.internal.get(path, ())))
        steps = []
        for index, step in enumerate(run.steps):
            if not {*step.modules, ""}.isdisjoint(paths):
                steps.append(index)
        moved = sum(sum(traffic(run.steps[index]).values()) for index in steps)
        costs[name] = FusedCost(
            traffic_bytes=moved,
            fused_traffic_bytes=moved - timeline.traffic_of(internal),
            peak_bytes=timeline.peak(steps=steps),
            fused_peak_bytes=timeline.peak(steps=steps, without=internal),
        )
    return costs


def fusible_traffic(model: ModelSource, opaque: Collection[str] = ()) -> tuple[int, int]:
    """The traffic of a model, and the part that fusing pointwise operators saves.

    As a compiler does, an operator of the shape of its input is fused with the producer of this
    input, if nothing else reads it: the tensor between them is neither written nor read. Open sizes
    are 1.

    Args:
        model: The model.
        opaque: Modules that are one operation: nothing inside of them is fused.
    """
    run = run_by_shapes(read_flat(model))
    timeline = Timeline(run)
    inside = set(opaque)
    saved = []
    for life in timeline.lives:
        if life.leaves or len(life.touched) != 2:
            continue
        producer, reader = (run.steps[place] for place in life.touched)
        is_pointwise = is_standard(reader.node, *LIKE_FIRST, *ELEMENTWISE)
        has_its_shape = reader.outputs[0].elements == life.tensor.elements
        is_seen = inside.isdisjoint(producer.modules & reader.modules)
        if is_pointwise and has_its_shape and is_seen:
            saved.append(life)
    total = sum(sum(traffic(step).values()) for step in run.steps)
    return total, timeline.traffic_of(saved)
