"""Activation memory over the order of execution, traffic between memory and processor, and what fusing would save.

``docs/cost.md`` describes the model, which is the same for every runtime.
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
from htp_export.shapes.operator_kinds import CONTROL_FLOW, RESHAPING, SIZES_ONLY

_Bytes: TypeAlias = npt.NDArray[Any]

_NO_TRAFFIC = RESHAPING | SIZES_ONLY | CONTROL_FLOW | {"Constant", "Identity"}
# Of the first input, only what is picked is read.
_PICKING = frozenset(("Gather", "GatherElements", "GatherND", "Slice", "Compress"))


def traffic(step: RunStep) -> Mapping[Tensor, int]:
    """Memory → bytes that one run of a node reads from it and writes into it.

    Nothing for views, and for nodes with subgraphs, whose nodes have their own.
    """
    if step.op[0] == "" and step.op[1] in _NO_TRAFFIC:
        return {}
    written = sum(tensor.bytes for tensor in step.outputs)
    moved: defaultdict[Tensor, int] = defaultdict(int)
    for position, tensor in enumerate(step.inputs):
        if tensor is not None:
            picks = position == 0 and step.op[1] in _PICKING
            moved[tensor.buffer] = max(
                moved[tensor.buffer], min(tensor.bytes, written) if picks else tensor.bytes
            )
    for tensor in step.outputs:
        moved[tensor.buffer] += tensor.bytes
    return moved


@dataclass(frozen=True, eq=False)
class Life:
    """A tensor with memory of its own: the first and last step that need it, and its size in bytes.

    ``touched`` are the steps that make, read or reshape it; ``leaves``: it is an input or output of
    the model.
    """

    tensor: Tensor
    start: int
    end: int
    size: int
    touched: tuple[int, ...]
    leaves: bool


class Timeline:
    """The memory of a run: ``live`` bytes at each step, those of subgraphs included, and every activation's life."""

    def __init__(self, run: Run) -> None:
        self._steps = run.steps
        self.lives = _lives(run.steps, run.outputs, "input")
        self.live: _Bytes = _occupied(self.lives, len(run.steps)) + _in_bodies(run.steps)

    def peak(self, *, without: Collection[Life] = (), steps: Sequence[int] | None = None) -> int:
        """The most that is live at once, in bytes: if some activations took no memory, while one of some steps runs."""
        live = self.live - _occupied(without, len(self.live)) if without else self.live
        return int((live if steps is None else live[list(steps)]).max(initial=0))

    @cached_property
    def internal(self) -> Mapping[str, Sequence[Life]]:
        """Module path → the activations that nothing outside its region makes or reads."""
        lives: defaultdict[str, list[Life]] = defaultdict(list)
        for life in self.lives:
            if not life.leaves:
                for path in set[str].intersection(
                    *({"", *self._steps[t].modules} for t in life.touched)
                ):
                    lives[path].append(life)
        return lives

    @cached_property
    def _moved(self) -> Counter[Tensor]:
        """Memory → bytes that all steps write into it and read from it."""
        moved = Counter[Tensor]()
        for step in self._steps:
            moved.update(traffic(step))
        return moved

    def traffic_of(self, lives: Iterable[Life]) -> int:
        """Bytes that are moved because some activations are in memory."""
        return sum(self._moved[life.tensor] for life in lives)


def _lives(steps: Sequence[RunStep], outputs: Sequence[Tensor], origin: str = "") -> list[Life]:
    """Activations of a graph, by the order in which they are first seen.

    Tensors of ``origin`` are its own though no step makes them; a subgraph has none.
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
    return [
        Life(
            tensor,
            at[0],
            last if tensor in returned else at[-1],
            tensor.bytes,
            tuple(dict.fromkeys(at)),
            tensor in returned or tensor in inputs,
        )
        for tensor, at in touched.items()
    ]


def _reads(step: RunStep) -> Iterator[Tensor]:
    """What a step reads; a subgraph reads what it takes from outside."""
    yield from (tensor for tensor in step.inputs if tensor is not None)
    for body in step.bodies:
        yield from _captured(body)


def _captured(body: Body) -> Iterator[Tensor]:
    inside = set(body.inputs)
    for step in body.steps:
        yield from (tensor for tensor in _reads(step) if tensor not in inside)
        inside.update(step.outputs)
    yield from (tensor for tensor in body.outputs if tensor not in inside)


def _in_bodies(steps: Sequence[RunStep]) -> _Bytes:
    """What the subgraphs of each step take at their peak, besides what the step makes."""
    peaks = [max(map(_body_peak, step.bodies), default=0) for step in steps]
    return np.array(peaks, dtype=_type_of(peaks))


def _body_peak(body: Body) -> int:
    returned = {tensor.buffer for tensor in body.outputs}
    lives = [life for life in _lives(body.steps, body.outputs) if life.tensor not in returned]
    return int((_occupied(lives, len(body.steps)) + _in_bodies(body.steps)).max(initial=0))


def _occupied(lives: Iterable[Life], steps: int) -> _Bytes:
    counted = [(life.start, life.end + 1, life.size) for life in lives if life.size]
    change = np.zeros(steps + 1, dtype=_type_of([size for _, _, size in counted]))
    if counted:
        starts, ends, sizes = zip(*counted, strict=True)
        np.add.at(change, list(starts), sizes)
        np.subtract.at(change, list(ends), sizes)
    return np.cumsum(change[:-1])


def _type_of(sizes: Sequence[int]) -> type[Any]:
    """The element type for sums of sizes: Python's integers where those of a file are too large for int64."""
    return np.int64 if sum(sizes) <= LARGEST else object


@dataclass(frozen=True)
class FusedCost:
    """Some modules of a model, and the same modules if each kept its intermediates on chip, all of them together.

    Traffic is what their nodes read and write; the peak is that of the whole model while one of
    them runs.
    """

    traffic_bytes: int
    fused_traffic_bytes: int
    peak_bytes: int
    fused_peak_bytes: int


def cost_of_fusing(
    model: ModelSource, groups: Mapping[str, Collection[str]]
) -> dict[str, FusedCost]:
    """What a model saves if all modules of a group are fused: name → memory and traffic; open sizes are 1.

    Each module is fused alone, and the modules of a group at the same time.
    """
    tagged = read_flat(model)
    run = run_by_shapes(tagged)
    timeline = Timeline(run)
    costs = {}
    for name, paths in groups.items():
        internal = list(
            dict.fromkeys(life for path in paths for life in timeline.internal.get(path, ()))
        )
        steps = [
            place
            for place, step in enumerate(run.steps)
            if not {*step.modules, ""}.isdisjoint(paths)
        ]
        moved = sum(sum(traffic(run.steps[place]).values()) for place in steps)
        costs[name] = FusedCost(
            traffic_bytes=moved,
            fused_traffic_bytes=moved - timeline.traffic_of(internal),
            peak_bytes=timeline.peak(steps=steps),
            fused_peak_bytes=timeline.peak(steps=steps, without=internal),
        )
    return costs
