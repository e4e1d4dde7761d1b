"""Activation memory over the order of execution, traffic between memory and processor, and what fusing would save.

The model is simple, and the same for every runtime: nodes run in the order of the graph; a tensor takes memory from the
node that makes it to the last that reads it, inputs of the model from the start and its outputs to the end; ``Reshape``
and its like give back their input's memory, and no other node writes over what it reads. Weights are not activations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from htp_export.capabilities.cost.execution import Body, Run, RunStep, Tensor
from htp_export.shapes.operator_kinds import CONTROL_FLOW, RESHAPING, SIZES_ONLY

__all__ = ["Timeline", "traffic"]

_Bytes: TypeAlias = npt.NDArray[np.int64]

_NO_TRAFFIC = RESHAPING | SIZES_ONLY | CONTROL_FLOW | {"Constant", "Identity"}
# Of the first input, only what is picked is read.
_PICKING = frozenset(("Gather", "GatherElements", "GatherND", "Slice", "Compress"))


def traffic(step: RunStep) -> tuple[dict[Tensor, int], int]:
    """What one run of a node reads and writes.

    Returns:
        Memory that is read → bytes, and the bytes that are written. Nothing for views, and for nodes with subgraphs,
        whose nodes have their own.
    """
    if _moves_nothing(step):
        return {}, 0
    written = sum(tensor.bytes for tensor in step.outputs)
    read: defaultdict[Tensor, int] = defaultdict(int)
    for position, tensor in enumerate(step.inputs):
        if tensor is not None:
            picks = position == 0 and step.op[1] in _PICKING
            read[tensor.buffer] = max(read[tensor.buffer], min(tensor.bytes, written) if picks else tensor.bytes)
    return dict(read), written


def _moves_nothing(step: RunStep) -> bool:
    return step.op[0] == "" and step.op[1] in _NO_TRAFFIC


@dataclass(frozen=True, eq=False)
class Life:
    """How long a piece of memory is needed.

    Attributes:
        tensor: The tensor that has it.
        start: The step that makes it; 0 for inputs of the model.
        end: The last step that needs it.
        size: Its size in bytes.
        touched: The steps that make it, read it, or give it another shape.
        leaves: Whether it is an input or output of the model.
    """

    tensor: Tensor
    start: int
    end: int
    size: int
    touched: tuple[int, ...]
    leaves: bool


class Timeline:
    """The memory of a run, step by step.

    Attributes:
        live: Bytes of activations while each step runs, what its subgraphs take included.
        lives: Every activation that takes memory.
    """

    def __init__(self, run: Run) -> None:
        self._steps = run.steps
        self.lives = _lives(run.steps, run.outputs, "input")
        self._extra = np.array([_inside(step) for step in run.steps], dtype=np.int64)
        self.live: _Bytes = _occupied(self.lives, 0, len(run.steps)) + self._extra

    @property
    def peak(self) -> int:
        """The most that is live at once, in bytes."""
        return int(self.live.max(initial=0))

    @property
    def peak_step(self) -> int | None:
        """The first step at which it is reached; None for a model without nodes."""
        return int(self.live.argmax()) if len(self.live) else None

    def alive_at(self, step: int) -> list[Life]:
        """What is in memory while a step runs, the largest first."""
        return sorted(
            (life for life in self.lives if life.start <= step <= life.end), key=lambda life: -life.tensor.bytes
        )

    @cached_property
    def internal(self) -> Mapping[str, Sequence[Life]]:
        """Module path → the activations that nothing outside its region makes or reads."""
        lives: defaultdict[str, list[Life]] = defaultdict(list)
        for life in self.lives:
            if not life.leaves:
                for path in set[str].intersection(*({"", *self._steps[t].modules} for t in life.touched)):
                    lives[path].append(life)
        return lives

    @cached_property
    def _before(self) -> _Bytes:
        return np.maximum.accumulate(self.live)

    @cached_property
    def _after(self) -> _Bytes:
        return np.maximum.accumulate(self.live[::-1])[::-1]

    def peak_without(self, lives: Sequence[Life]) -> int:
        """The peak of the model if some activations took no memory."""
        if not lives:
            return self.peak
        start, end = min(life.start for life in lives), max(life.end for life in lives) + 1
        rest = int((self.live[start:end] - _occupied(lives, start, end)).max(initial=0))
        before = int(self._before[start - 1]) if start else 0
        after = int(self._after[end]) if end < len(self.live) else 0
        return max(before, rest, after)

    def peak_while(self, steps: Sequence[int], without: Sequence[Life] = ()) -> int:
        """The most that is live while one of some steps runs, if some activations took no memory."""
        live = self.live - _occupied(without, 0, len(self.live))
        return int(live[list(steps)].max(initial=0))

    @cached_property
    def _moved(self) -> Mapping[Tensor, int]:
        """Memory → bytes that are written into it and read from it by all steps."""
        moved: defaultdict[Tensor, int] = defaultdict(int)
        for step in self._steps:
            read, _ = traffic(step)
            for tensor, size in read.items():
                moved[tensor] += size
            if not _moves_nothing(step):
                for tensor in step.outputs:
                    moved[tensor.buffer] += tensor.bytes
        return moved

    def traffic_of(self, lives: Iterable[Life]) -> int:
        """Bytes that are moved because some activations are in memory."""
        return sum(self._moved.get(life.tensor, 0) for life in lives)


def _lives(steps: Sequence[RunStep], outputs: Sequence[Tensor], origin: str = "") -> list[Life]:
    """Activations of a graph, by the order in which they are first seen.

    Args:
        steps: What happens in it.
        outputs: What it gives back.
        origin: The origin of tensors that are its own though no step makes them; none, for a subgraph.
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


def _inside(step: RunStep) -> int:
    """What the subgraphs of a node take at their peak, besides what the node makes."""
    peak = 0
    for body in step.bodies:
        returned = {tensor.buffer for tensor in body.outputs}
        lives = [life for life in _lives(body.steps, body.outputs) if life.tensor not in returned]
        extra = np.array([_inside(inner) for inner in body.steps], dtype=np.int64)
        peak = max(peak, int((_occupied(lives, 0, len(body.steps)) + extra).max(initial=0)))
    return peak


def _occupied(lives: Iterable[Life], start: int, end: int) -> _Bytes:
    """Bytes that are live at each of the steps from ``start`` up to ``end``."""
    change = np.zeros(end - start + 1, dtype=np.int64)
    counted = [(life.start - start, life.end + 1 - start, life.size) for life in lives if life.size]
    if counted:
        starts, ends, sizes = zip(*counted, strict=True)
        np.add.at(change, list(starts), sizes)
        np.subtract.at(change, list(ends), sizes)
    return np.cumsum(change[:-1])
