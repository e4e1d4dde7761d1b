"""Tensors that are changed in place while the TorchScript tracer watches.

The tracer gives a tensor that was changed as a whole a new number. Where a part of it was changed, through a view of
it, the whole keeps its number, and only the pass that makes such changes operations of their own, later, tells who
reads it as it was before and who as it was after. Until then each state of it has a key of its own here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from htp_export.exporter.capture.jit_graph import JitStep, Reading
from htp_export.exporter.capture.record import Key, Operation
from htp_export.exporter.capture.torchscript_internals import viewed


class State(NamedTuple):
    """A tensor as it is after a part of it was changed."""

    tensor: int  # its number
    change: int  # the number of what the change gave back: the part


class Versions:
    """The states of the tensors of one trace.

    Feed it the steps of the trace in order; then ask it.
    """

    def __init__(self) -> None:
        self._base: dict[int, int] = {}  # tensor that has the memory of another → that one
        self._whole: set[int] = set()  # of these, the ones that are all of it
        self._states: defaultdict[int, list[tuple[int, Key]]] = defaultdict(list)  # base → (operation, state after it)

    def __bool__(self) -> bool:
        """Whether any tensor was changed."""
        return bool(self._states)

    def operation(self, index: int, step: JitStep, call: int, shape_only: bool) -> Operation:
        """A step as an operation that reads and makes states."""
        reads: list[Key] = [self.state(number, index) for number in step.inputs]
        results: list[Key] = list(step.outputs)
        if step.writes >= 0 and step.outputs:
            changed, result = step.inputs[step.writes], step.outputs[0]
            base = self._base.get(changed, changed)
            self._base[result] = base
            if changed == base or changed in self._whole:
                self._whole.add(result)
                self._states[base].append((index, result))
            else:
                reads.append(self._current(base, index))
                results.append(State(base, result))
                self._states[base].append((index, results[-1]))
        else:
            seen = viewed(step.kind, len(step.inputs))
            if 0 <= seen < len(step.inputs):
                source = step.inputs[seen]
                self._base.update(dict.fromkeys(step.outputs, self._base.get(source, source)))
        return Operation(call, tuple(reads), tuple(results), shape_only)

    def state(self, number: Any, index: int) -> Any:
        """What stands for a tensor right before an operation; its own number where no part of it was changed."""
        if not self:
            return number
        base = self._base.get(number, number)
        if number != base and number not in self._whole:
            return number
        current = self._current(base, index)
        return current if isinstance(current, State) else number

    def _current(self, base: int, index: int) -> Key:
        states = [key for at, key in self._states.get(base, ()) if at < index]
        return states[-1] if states else base

    def settle(self, operations: Sequence[Operation], outputs: list[Key], before: Reading, after: Reading) -> Reading:
        """Take back the states that nobody reads, now that the trace says who reads what.

        Args:
            operations: Of the trace; changed.
            outputs: What the trace returns; changed.
            before: The graph as it was traced; a step for each of the operations. It is returned with states.
            after: The graph once changes in place are operations of their own.
        """
        if not self:
            return before
        now = {step.outputs[0]: step for step in after.steps if step.outputs}
        steps = []
        for operation, step in zip(operations, before.steps, strict=True):
            if any(isinstance(key, State) for key in operation.inputs) and step.outputs:
                same = now.get(step.outputs[0])
                if same is not None and len(same.inputs) == len(step.inputs):
                    more = operation.inputs[len(step.inputs) :]
                    operation.inputs = (*self._read_by(step.inputs, same.inputs, operation.inputs), *more)
            steps.append(step._replace(inputs=operation.inputs[: len(step.inputs)], outputs=operation.outputs))
        outputs[:] = self._read_by(before.outputs, after.outputs, outputs)
        return replace(before, steps=steps, outputs=outputs)

    @staticmethod
    def _read_by(before: Sequence[int], after: Sequence[int], states: Sequence[Key]) -> list[Key]:
        """What is read in each place: a state only where another tensor is read now."""
        return [was if was == now else state for was, now, state in zip(before, after, states, strict=False)]
