"""What became of the tensors of a JIT graph: changed, rewritten in place, translated into another graph, or copied.

The tracer gives a tensor that was changed as a whole a new number. Where a part of it was changed,
through a view of it, the whole keeps its number, and only the pass that makes such changes
operations of their own, later, tells who reads it as it was before and who as it was after. Until
then each state of it has a key of its own: `Versions`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from htp_export.exporter.capture.calls import Key, Operation, last_in_place
from htp_export.exporter.capture.jit_parts import Inner, Parts
from htp_export.exporter.capture.torchscript_internals import (
    JitStep,
    Reading,
    nodes_of,
    numbers_of_outputs,
    viewed,
)

_CONSTANT = "constant"
# Attributes of operators with several inputs that say how one input is read: those of the first
# input, the second, ...
_OF_ONE_INPUT = {"onnx::Gemm": ("transA", "transB")}


class State(NamedTuple):
    """A tensor as it is after a part of it was changed."""

    tensor: int  # its number
    change: int  # the number of what the change gave back: the part


class Versions:
    """The states of the tensors of one trace; feed it the steps in order, then ask it."""

    def __init__(self) -> None:
        self._base: dict[int, int] = {}  # tensor that has the memory of another → that one
        self._whole: set[int] = set()  # of these, the ones that are all of it
        # base → (operation, state after it)
        self._states: defaultdict[int, list[tuple[int, Key]]] = defaultdict(list)

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

    def state(self, number: Any, index: int | None) -> Any:
        """What stands for a tensor right before an operation; its own number where no part of it was changed.

        Of a tensor that is changed somewhere, nothing is known where no operation is (None).
        """
        if not self:
            return number
        base = self._base.get(number, number)
        if index is None:
            return None if base in self._states else number
        if number != base and number not in self._whole:
            return number
        current = self._current(base, index)
        return current if isinstance(current, State) else number

    def _current(self, base: int, index: int) -> Key:
        states = [key for at, key in self._states.get(base, ()) if at < index]
        return states[-1] if states else base

    def settle(
        self, operations: Sequence[Operation], outputs: list[Key], before: Reading, after: Reading
    ) -> Reading:
        """Take back the states that nobody reads, once changes in place are operations of their own (``after``).

        ``operations`` and ``outputs`` are changed; ``before``, the graph as it was traced, is
        returned with states.
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
                    operation.inputs = (
                        *self._read_by(step.inputs, same.inputs, operation.inputs),
                        *more,
                    )
            steps.append(
                step._replace(
                    inputs=operation.inputs[: len(step.inputs)], outputs=operation.outputs
                )
            )
        outputs[:] = self._read_by(before.outputs, after.outputs, outputs)
        return replace(before, steps=steps, outputs=outputs)

    @staticmethod
    def _read_by(before: Sequence[int], after: Sequence[int], states: Sequence[Key]) -> list[Key]:
        """What is read in each place: a state only where another tensor is read now."""
        return [
            was if was == now else state
            for was, now, state in zip(before, after, states, strict=False)
        ]


class Stages:
    """Where the tensors of a graph are, from one reading of it to the next."""

    def __init__(self, first: Reading) -> None:
        self.last = first  # the graph as it was read last
        self._stages: list[Mapping[Any, int]] = []
        self._after_translation = 0  # stages until the graph was translated
        # as of `equal_transposed`, in the translated graph
        self._equal: Mapping[Any, Sequence[int]] = {}

    def rewritten(self, now: Reading) -> None:
        """Note the graph after it was rewritten in place."""
        self._add(follow(self.last, now), now)

    def translated(
        self, numbers: Mapping[int, int], now: Reading, operations: Sequence[Operation]
    ) -> list[Operation]:
        """Note the graph that it was translated into; ``numbers`` are those of its nodes, old → new.

        Returns the operations of the first graph, one for each node of the translation: `Parts`.
        """
        stage = {**numbers, **dict(zip(self.last.inputs, now.inputs, strict=True))}
        parts = Parts(operations, self.now, stage, now)
        self._add(stage, now)
        self._after_translation, self._equal = len(self._stages), equal_transposed(now)
        return parts.split()

    def copied(self, copy: Reading) -> None:
        """Note a copy that was made node by node, with new numbers."""
        self._add(self.last.paired_with(copy), copy)

    def _add(self, stage: Mapping[Any, int], now: Reading) -> None:
        self._stages.append(stage)
        self.last = now

    def now(self, key: Any) -> Any:
        """The number of the tensor that holds a value of the first graph; None where none does."""
        before, after = (
            self._stages[: self._after_translation],
            self._stages[self._after_translation :],
        )
        number = key.tensor if isinstance(key, Inner) else _followed(key, before)
        found = _followed(number, after)
        for equal in () if found is not None else self._equal.get(number, ()):
            found = _followed(equal, after) if found is None else found
        return found


def _followed(key: Any, stages: Iterable[Mapping[Any, int]]) -> Any:
    for stage in stages:
        key = stage.get(key)
    return key


def equal_transposed(graph: Reading) -> dict[int, list[int]]:
    """The results of transpositions in an ONNX graph → equal tensors before and after them.

    What is transposed, and then transposed back, is the same tensor, whichever of the
    transpositions torch keeps.
    """
    inputs: dict[int, int] = {}  # the result of a transposition → what it transposes
    # the same → the order of axes, from the tensor before all transpositions
    orders: dict[int, tuple[int, ...]] = {}
    equal: dict[int, list[int]] = {}
    for step in graph.steps:
        order = dict(step.attributes).get("perm") if step.kind == "onnx::Transpose" else None
        if order is None:
            continue
        result, before = step.outputs[0], step.inputs[0]
        inputs[result] = before
        orders[result] = order = (
            tuple(orders[before][axis] for axis in order) if before in orders else order
        )
        while before in orders:
            if orders[before] == order:
                equal.setdefault(before, []).append(result)
                equal.setdefault(result, []).append(before)
            before = inputs[before]
        if [*order] == sorted(order):
            equal.setdefault(result, []).append(before)
    return equal


def follow(before: Reading, after: Reading) -> dict[int, int]:
    """Where a rewriting of a graph in place left each tensor: the tensor that now holds its value, if there is one.

    A node that is in both graphs and reads another tensor in a place shows what that place's tensor
    became. From there backwards: where one operation stands in for another of its kind, so do the
    tensors that they read; and where it stands in for one of another kind after one of its own,
    both are gone, and it does the work of both. Where a node made ``a``, the next computed ``b``
    from it, and now a changed node makes ``a`` and everything that read ``b`` reads it, then the
    changed node does the work of both, and the tensor called ``a`` holds the value of ``b``. A node
    whose attributes changed as well is another operation: it does the work of what it no longer
    reads, a transposition the work of the one before it, so that it says nothing of what became of
    that tensor. What is still not found then is looked for forwards: `_recomputed`.
    """
    producers_before = {number: step for step in before.steps for number in step.outputs}
    producers_after = {number: step for step in after.steps for number in step.outputs}
    constant_inputs = {*after.parameters, *after.constants}
    became: dict[int, int] = {}
    queue = [(a, b) for a, b in zip(before.outputs, after.outputs, strict=False) if a != b]
    for step in after.steps:
        old = producers_before.get(step.outputs[0]) if step.outputs else None
        if old is not None and old.inputs != step.inputs:
            queue.extend(_replaced(old, step, constant_inputs))
    while queue:
        old_number, new_number = queue.pop()
        if (
            old_number in producers_after
            or old_number in became
            or old_number not in producers_before
        ):
            continue
        became[old_number] = new_number
        stands_in = producers_before.get(new_number) or producers_after.get(new_number)
        if stands_in is not None:
            old = producers_before[old_number]
            absorbed = [
                producers_before[read]
                for read in old.inputs
                if read in producers_before and read not in producers_after
            ]
            same = [step for step in (old, *absorbed) if step.kind == stands_in.kind][:1]
            # else it is what the old one read: an operation was left out
            if new_number not in old.inputs:
                queue.extend(
                    pair for step in same for pair in _replaced(step, stands_in, constant_inputs)
                )
    remaining = {*producers_after, *after.inputs, *after.constants}
    moved = {
        number: number for number in (*producers_before, *before.inputs) if number in remaining
    }
    moved.update((number, last_in_place(number, became, producers_after)) for number in became)
    constants = before.constants | after.constants
    for old_number, new_number in became.items():
        producer, remade = producers_before.get(new_number), producers_after.get(new_number)
        reads_it = producer is not None and new_number in producers_before[old_number].inputs
        if reads_it and remade is not None and _changed(producer, remade, became, constants):  # type: ignore[arg-type]
            del moved[new_number]
    counterparts = {old: new for old, new in moved.items() if new in remaining}
    return {**_recomputed(before, after, counterparts), **counterparts}


def _recomputed(before: Reading, after: Reading, counterparts: Mapping[Any, Any]) -> dict[int, int]:
    """Tensors that are gone, and those that other operations make of the same inputs in the same way.

    Backwards, they are not found where the operations that read them were replaced by others: what
    an operation in place made, or one that was merged with an equal one, where ``aten::chunk`` read
    it, which becomes ``prim::ConstantChunk``. Constants have other numbers in each graph: new
    operations of one kind that differ in them alone are taken in order.
    """
    moved = dict(counterparts)
    old_constants, new_constants = _made_of_constants(before), _made_of_constants(after)
    known = old_constants | moved.keys()
    gone = [step for step in before.steps if known.isdisjoint(step.outputs)]
    if not gone:
        return moved
    producers, taken = (
        {number: step for step in before.steps for number in step.outputs},
        set(counterparts.values()),
    )
    others: defaultdict[Any, deque[JitStep]] = defaultdict(deque)
    # what torch casts to the type of the tensor that is changed in place → what it was
    cast: dict[int, int] = {}
    for step in after.steps:
        was = next((producers[number] for number in step.outputs if number in producers), None)
        uncast = [cast.get(number, number) for number in step.inputs]
        if step.kind == "aten::type_as":
            cast[step.outputs[0]] = uncast[0]
        reads = tuple(_CONSTANT if number in new_constants else number for number in uncast)
        if _CONSTANT not in reads or (was is None and taken.isdisjoint(step.outputs)):
            others[step.kind, step.attributes, reads].append(step)
    for step in gone:
        reads = tuple(
            _CONSTANT if number in old_constants else moved.get(number, number)
            for number in step.inputs
        )
        same = others.get((step.kind, step.attributes, reads))
        if same:
            new = same.popleft() if _CONSTANT in reads else same[0]
            moved.update(zip(step.outputs, new.outputs, strict=False))
    return moved


def _made_of_constants(reading: Reading) -> set[int]:
    """Constants, and what is computed from them alone."""
    constant = set(reading.constants)
    for step in reading.steps:
        if constant.issuperset(step.inputs):
            constant.update(step.outputs)
    return constant


def _replaced(
    old: JitStep, new: JitStep, constant_inputs: Collection[int]
) -> Iterable[tuple[int, int]]:
    """What one operation reads in place of what another read; a weight at the end may be new, as a bias is."""
    size = len(old.inputs)
    if (
        old.kind != new.kind
        or len(new.inputs) < size
        or any(extra not in constant_inputs for extra in new.inputs[size:])
    ):
        return ()
    pairs = enumerate(zip(old.inputs, new.inputs, strict=False))
    return ((a, b) for place, (a, b) in pairs if a != b and _read_alike(old, new, place))


def _read_alike(old: JitStep, new: JitStep, place: int) -> bool:
    """Whether the attributes of two operations of one kind agree on what is done with an input."""
    if old.attributes == new.attributes:
        return True
    own = _OF_ONE_INPUT.get(old.kind)
    if own is None:
        return False
    name = own[place] if place < len(own) else ""
    return bool(dict(old.attributes).get(name, 0) == dict(new.attributes).get(name, 0))


def _changed(
    producer: JitStep, remade: JitStep, became: dict[int, int], constants: set[int]
) -> bool:
    """Whether a node reads other tensors than before, or is another operation."""
    if producer.kind != remade.kind or len(producer.inputs) != len(remade.inputs):
        return True
    pairs = zip(producer.inputs, remade.inputs, strict=True)
    return any(
        a != b and became.get(a) != b and not (a in constants and b in constants) for a, b in pairs
    )


class Translation:
    """One translation of a graph into ONNX operators, as it happens: operator by operator."""

    def __init__(self) -> None:
        # number of a tensor in the graph → number in the new graph
        self.numbers: dict[int, int] = {}
        # Class and outputs of each ``autograd.Function`` that is not translated yet, in order
        self._functions: list[tuple[str, tuple[int, ...]]] = []

    def begin(self, graph: Any) -> None:
        """Note the graph that is about to be translated."""
        functions = (node for node in nodes_of(graph) if node.kind() == "prim::PythonOp")
        self._functions = [(node.pyname(), numbers_of_outputs(node)) for node in functions]

    def node(self, node: Any, result: Any) -> None:
        """Note what a node became."""
        self._note(numbers_of_outputs(node), result)

    def function(self, name: str, result: Any) -> None:
        """Note what an ``autograd.Function`` with a translation of its own became: torch does not say which node."""
        called = next(
            (place for place, (known, _) in enumerate(self._functions) if known == name), None
        )
        if called is not None:
            _, outputs = self._functions.pop(called)
            self._note(outputs, result)

    def _note(self, outputs: tuple[int, ...], result: Any) -> None:
        results = result if isinstance(result, (tuple, list)) else (result,)
        for output, value in zip(outputs, results, strict=False):
            if hasattr(value, "unique"):
                # A quantized tensor is a tuple: the tensor, its scale and its zero point.
                made = (
                    value.node().inputsAt(0)
                    if value.node().kind() == "prim::TupleConstruct"
                    else value
                )
                self.numbers[output] = made.unique()

    def through_blocks(self, steps: Iterable[JitStep]) -> None:
        """Note what became of nodes whose one block was dissolved: ``autograd.Function``s without a translation."""
        for step in steps:
            for output, inner in zip(step.outputs, step.returned, strict=bool(step.returned)):
                if output not in self.numbers and inner in self.numbers:
                    self.numbers[output] = self.numbers[inner]
