"""The tensors of a JIT graph through its changes: changed, rewritten, translated, or copied.

The tracer gives a tensor that was changed as a whole a new number. If a part of it was changed,
through a view of it, the whole keeps its number; only a later pass, which replaces changes in place
by operations, shows which operations read it before the change and which after. Until then each of
its states has a key of its own: `Versions`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from htp_export.exporter.capture.calls import Key, Operation, last_in_place
from htp_export.exporter.capture.jit_parts import Inner, Parts
from htp_export.exporter.capture.torchscript_internals import (
    Copy,
    JitStep,
    Reading,
    nodes_of,
    numbers_of_outputs,
    viewed,
)

_CONSTANT = "constant"
# operator → for its first inputs, in order, the attribute that applies to this input alone
_INPUT_ATTRIBUTES = {"onnx::Gemm": ("transA", "transB")}


class State(NamedTuple):
    """A tensor after a part of it was changed in place."""

    tensor: int  # its number
    change: int  # number of the result of the change: the part


class Versions:
    """The states of the tensors of one trace; the steps must be added in order before any query."""

    def __init__(self) -> None:
        self._base: dict[int, int] = {}  # tensor → the tensor whose memory it has
        self._whole: set[int] = set()  # the keys of `_base` that have all of that memory
        # base → (operation, state after it)
        self._states: defaultdict[int, list[tuple[int, Key]]] = defaultdict(list)

    def __bool__(self) -> bool:
        """Whether any tensor was changed."""
        return bool(self._states)

    def operation(
        self,
        index: int,
        step: JitStep,
        call: int,
        shape_only: bool,
    ) -> Operation:
        """Add a step, and return it as an operation on states."""
        reads: list[Key] = [self.state(number, index) for number in step.inputs]
        results: list[Key] = list(step.outputs)
        if step.writes >= 0 and step.outputs:
            self._add_change(index, step, reads, results)
        else:
            self._add_view(step)
        return Operation(call, tuple(reads), tuple(results), shape_only)

    def _add_change(
        self,
        index: int,
        step: JitStep,
        reads: list[Key],
        results: list[Key],
    ) -> None:
        """Add the state after a change in place to the keys of the step's inputs and outputs."""
        changed = step.inputs[step.writes]
        result = step.outputs[0]
        base = self._base.get(changed, changed)
        self._base[result] = base
        if changed == base or changed in self._whole:
            self._whole.add(result)
            self._states[base].append((index, result))
            return
        state = State(base, result)
        reads.append(self._current(base, index))
        results.append(state)
        self._states[base].append((index, state))

    def _add_view(self, step: JitStep) -> None:
        position = viewed(step.kind, len(step.inputs))
        if 0 <= position < len(step.inputs):
            source = step.inputs[position]
            self._base.update(dict.fromkeys(step.outputs, self._base.get(source, source)))

    def state(self, number: Any, index: int | None) -> Any:
        """The key of a tensor right before the operation ``index``.

        It is the tensor's own number if no part of it was changed. Without an operation, the state
        of a tensor that is changed somewhere is unknown (None).
        """
        if not self:
            return number
        base = self._base.get(number, number)
        if index is None:
            return None if base in self._states else number
        if number != base and number not in self._whole:
            return number
        current = self._current(base, index)
        if isinstance(current, State):
            return current
        return number

    def _current(self, base: int, index: int) -> Key:
        states = [key for at, key in self._states.get(base, ()) if at < index]
        return states[-1] if states else base

    def settle(
        self,
        operations: Sequence[Operation],
        outputs: list[Key],
        before: Reading,
        after: Reading,
    ) -> Reading:
        """Remove states that no operation reads, once changes in place are operations (``after``).

        ``operations`` and ``outputs`` are modified; ``before``, the graph as it was traced, is
        returned with states.
        """
        if not self:
            return before
        steps_after = {step.outputs[0]: step for step in after.steps if step.outputs}
        steps = []
        for operation, step in zip(operations, before.steps, strict=True):
            count = len(step.inputs)
            if any(isinstance(key, State) for key in operation.inputs) and step.outputs:
                same = steps_after.get(step.outputs[0])
                if same is not None and len(same.inputs) == count:
                    own = operation.inputs[:count]
                    added = operation.inputs[count:]
                    operation.inputs = (*self._read_by(step.inputs, same.inputs, own), *added)
            steps.append(step._replace(inputs=operation.inputs[:count], outputs=operation.outputs))
        outputs[:] = self._read_by(before.outputs, after.outputs, outputs)
        return replace(before, steps=steps, outputs=outputs)

    @staticmethod
    def _read_by(
        before: Sequence[int],
        after: Sequence[int],
        states: Sequence[Key],
    ) -> list[Key]:
        """The key of each input: a state only if the rewritten graph has another tensor there."""
        return [
            number if number == number_after else state
            for number, number_after, state in zip(before, after, states, strict=False)
        ]


class Stages:
    """The tensors of a graph through its stages, from one reading of it to the next."""

    def __init__(self, first: Reading) -> None:
        self.last = first  # the last reading of the graph
        self._stages: list[Mapping[Any, int]] = []
        self._after_translation = 0  # number of stages up to the translation
        # `equal_transposed` of the translated graph
        self._equal: Mapping[Any, Sequence[int]] = {}

    def rewritten(self, now: Reading) -> None:
        """Record the graph after it was rewritten in place."""
        self._add(follow(self.last, now), now)

    def translated(
        self,
        numbers: Mapping[int, int],
        now: Reading,
        operations: Sequence[Operation],
    ) -> list[Operation]:
        """Record the graph that it was translated into; ``numbers``: old → new, for node outputs.

        Returns the operations of the first graph, one for each node of the translation: `Parts`.
        """
        inputs = zip(self.last.inputs, now.inputs, strict=True)
        stage = {**numbers, **dict(inputs)}
        parts = Parts(operations, self.now, stage, now)
        self._add(stage, now)
        self._after_translation = len(self._stages)
        self._equal = equal_transposed(now)
        return parts.split()

    def copied(self, copy: Copy) -> None:
        """Record a copy of the graph, node by node with new numbers."""
        self._add(copy.numbers, copy.reading)

    def _add(self, stage: Mapping[Any, int], now: Reading) -> None:
        self._stages.append(stage)
        self.last = now

    def now(self, key: Any) -> Any:
        """The number of the tensor that has the value of a key of the first graph, or None."""
        before = self._stages[: self._after_translation]
        after = self._stages[self._after_translation :]
        number = key.tensor if isinstance(key, Inner) else _followed(key, before)
        last = _followed(number, after)
        if last is not None:
            return last
        for equal in self._equal.get(number, ()):
            last = _followed(equal, after)
            if last is not None:
                return last
        return None


def _followed(key: Any, stages: Iterable[Mapping[Any, int]]) -> Any:
    for stage in stages:
        key = stage.get(key)
    return key


def equal_transposed(graph: Reading) -> dict[int, list[int]]:
    """Results of transpositions in an ONNX graph → equal tensors before and after them.

    A tensor that is transposed and transposed back is the same tensor, whichever of the
    transpositions torch keeps.
    """
    inputs: dict[int, int] = {}  # result of a transposition → its input
    # result of a transposition → the order of axes relative to the tensor before all of them
    orders: dict[int, tuple[int, ...]] = {}
    equal: dict[int, list[int]] = {}
    for step in graph.steps:
        order = dict(step.attributes).get("perm") if step.kind == "onnx::Transpose" else None
        if order is None:
            continue
        result = step.outputs[0]
        before = step.inputs[0]
        if before in orders:
            order = tuple(orders[before][axis] for axis in order)
        inputs[result] = before
        orders[result] = order
        while before in orders:
            if orders[before] == order:
                equal.setdefault(before, []).append(result)
                equal.setdefault(result, []).append(before)
            before = inputs[before]
        if [*order] == sorted(order):
            equal.setdefault(result, []).append(before)
    return equal


def follow(before: Reading, after: Reading) -> dict[int, int]:
    """Tensor before a rewriting in place → the tensor that has its value afterwards, if any.

    A node of both graphs with another input shows which tensor replaced its former input. From
    there the search goes backwards (`_Rewriting`), then forwards (`_recomputed`).
    """
    counterparts = _Rewriting(before, after).counterparts()
    return _recomputed(before, after, counterparts)


class _Rewriting:
    """A graph before and after it was rewritten in place, and the tensors that were replaced.

    If an operation replaces another of its kind, its inputs replace that one's inputs. If it
    replaces one of another kind, and one of its own kind before that, it does the work of both.

    A node that merged with the next one keeps the number ``a`` of its result, although the result
    now has the value of the next one's, ``b``::

        before    a = conv(x, w)     b = batch_norm(a)    relu(b)
        after     a = conv(x, w2)                         relu(a)     b → a; a has no counterpart

    A node whose attributes changed as well is another operation: it does the work of an operation
    before it that it no longer reads, such as a transposition, and tells nothing about the result
    of that one.
    """

    def __init__(self, before: Reading, after: Reading) -> None:
        self._before = before
        self._after = after
        self._producers_before = _producers(before)
        self._producers_after = _producers(after)
        self._constant_inputs = {*after.parameters, *after.constants}
        self._replaced: dict[int, int] = {}  # tensor that is gone → the tensor that replaced it
        self._find_replaced()

    def _find_replaced(self) -> None:
        waiting = self._changed_reads()
        while waiting:
            old, new = waiting.pop()
            is_gone = old in self._producers_before and old not in self._producers_after
            if is_gone and old not in self._replaced:
                self._replaced[old] = new
                waiting.extend(self._replaced_inputs(old, new))

    def _changed_reads(self) -> list[tuple[int, int]]:
        """Outputs, and inputs of nodes of both graphs, that differ: before and after."""
        outputs = zip(self._before.outputs, self._after.outputs, strict=False)
        pairs = [(old, new) for old, new in outputs if old != new]
        for step in self._after.steps:
            same = self._producers_before.get(step.outputs[0]) if step.outputs else None
            if same is not None and same.inputs != step.inputs:
                pairs.extend(_replaced_pairs(same, step, self._constant_inputs))
        return pairs

    def _replaced_inputs(self, old: int, new: int) -> Iterable[tuple[int, int]]:
        """The inputs of a tensor's producer, paired with the tensors that replaced them."""
        producer = self._producers_before[old]
        if new in producer.inputs:  # the operation was removed
            return ()
        replacing = self._producers_before.get(new) or self._producers_after.get(new)
        if replacing is None:
            return ()
        if producer.kind == replacing.kind:
            return _replaced_pairs(producer, replacing, self._constant_inputs)
        for number in producer.inputs:
            absorbed = self._producers_before.get(number)
            if absorbed is None or number in self._producers_after:
                continue
            if absorbed.kind == replacing.kind:
                return _replaced_pairs(absorbed, replacing, self._constant_inputs)
        return ()

    def counterparts(self) -> dict[int, int]:
        """Tensor before → the tensor that has its value, as far as replaced inputs show it."""
        remaining = {*self._producers_after, *self._after.inputs, *self._after.constants}
        before = (*self._producers_before, *self._before.inputs)
        counterparts = {number: number for number in before if number in remaining}
        for number in self._replaced:
            last = last_in_place(number, self._replaced, self._producers_after)
            if last in remaining:
                counterparts[number] = last
            else:
                counterparts.pop(number, None)
        for number in self._merged_with_next():
            counterparts.pop(number, None)
        return counterparts

    def _merged_with_next(self) -> set[int]:
        """The tensors whose producer now computes the result of the operation after it instead."""
        constants = self._before.constants | self._after.constants
        merged = set()
        for old, new in self._replaced.items():
            producer = self._producers_before.get(new)
            producer_after = self._producers_after.get(new)
            if producer is None or producer_after is None:
                continue
            if new in self._producers_before[old].inputs and _is_changed(
                producer, producer_after, self._replaced, constants
            ):
                merged.add(new)
        return merged


def _producers(reading: Reading) -> dict[int, JitStep]:
    return {number: step for step in reading.steps for number in step.outputs}


def _recomputed(
    before: Reading,
    after: Reading,
    counterparts: Mapping[Any, Any],
) -> dict[int, int]:
    """The counterparts, and tensors that new operations compute from the same inputs as before.

    The search backwards misses them if the operations that read them were replaced by operations of
    another kind: the result of a change in place, or of an operation merged with an equal one, is
    read by ``aten::chunk``, which becomes ``prim::ConstantChunk``. Constants have other numbers in
    each graph: new operations of one kind that differ only in constants are paired in order.
    """
    found = dict(counterparts)
    old_constants = _constant_tensors(before)
    known = old_constants | found.keys()
    gone = [step for step in before.steps if known.isdisjoint(step.outputs)]
    if not gone:
        return found
    candidates = _by_computation(before, after, set(counterparts.values()))
    for step in gone:
        reads = tuple(
            _CONSTANT if number in old_constants else found.get(number, number)
            for number in step.inputs
        )
        equal = candidates.get((step.kind, step.attributes, reads))
        if equal:
            new = equal.popleft() if _CONSTANT in reads else equal[0]
            found.update(zip(step.outputs, new.outputs, strict=False))
    return found


def _by_computation(
    before: Reading,
    after: Reading,
    taken: Collection[int],
) -> Mapping[Any, deque[JitStep]]:
    """The operations of the rewritten graph by kind, attributes and inputs.

    One with constant inputs counts only if it is new, and its results are not in ``taken``.
    """
    constants = _constant_tensors(after)
    old_numbers = {number for step in before.steps for number in step.outputs}
    candidates: defaultdict[Any, deque[JitStep]] = defaultdict(deque)
    # result of a cast → its input; torch casts to the type of the tensor that is changed in place
    cast: dict[int, int] = {}
    for step in after.steps:
        uncast = [cast.get(number, number) for number in step.inputs]
        if step.kind == "aten::type_as":
            cast[step.outputs[0]] = uncast[0]
        reads = tuple(_CONSTANT if number in constants else number for number in uncast)
        is_new = old_numbers.isdisjoint(step.outputs)
        is_free = all(number not in taken for number in step.outputs)
        if _CONSTANT not in reads or (is_new and is_free):
            candidates[step.kind, step.attributes, reads].append(step)
    return candidates


def _constant_tensors(reading: Reading) -> set[int]:
    """Constants, and tensors computed from constants alone."""
    constant = set(reading.constants)
    for step in reading.steps:
        if constant.issuperset(step.inputs):
            constant.update(step.outputs)
    return constant


def _replaced_pairs(
    old: JitStep,
    new: JitStep,
    constant_inputs: Collection[int],
) -> Iterable[tuple[int, int]]:
    """The inputs of an operation, each with the input of the new operation that replaces it.

    Empty if the new one is of another kind, or has other additional inputs than constants at the
    end, such as a bias.
    """
    size = len(old.inputs)
    if old.kind != new.kind or len(new.inputs) < size:
        return ()
    if any(extra not in constant_inputs for extra in new.inputs[size:]):
        return ()
    pairs = enumerate(zip(old.inputs, new.inputs, strict=False))
    return [(a, b) for position, (a, b) in pairs if a != b and _is_used_alike(old, new, position)]


def _is_used_alike(old: JitStep, new: JitStep, position: int) -> bool:
    """Whether two operations of one kind have equal attributes for an input."""
    if old.attributes == new.attributes:
        return True
    names = _INPUT_ATTRIBUTES.get(old.kind)
    if names is None:
        return False
    name = names[position] if position < len(names) else ""
    old_setting = dict(old.attributes).get(name, 0)
    new_setting = dict(new.attributes).get(name, 0)
    return bool(old_setting == new_setting)


def _is_changed(
    before: JitStep,
    after: JitStep,
    replaced: Mapping[int, int],
    constants: Collection[int],
) -> bool:
    """Whether a node has other inputs than before, or is another operation."""
    if before.kind != after.kind or len(before.inputs) != len(after.inputs):
        return True
    for a, b in zip(before.inputs, after.inputs, strict=True):
        both_constant = a in constants and b in constants
        if a != b and replaced.get(a) != b and not both_constant:
            return True
    return False


class Translation:
    """One translation of a graph into ONNX operators, observed operator by operator."""

    def __init__(self) -> None:
        # number of a tensor in the graph → number in the new graph
        self.numbers: dict[int, int] = {}
        # class and outputs of each ``autograd.Function`` that is not translated yet, in order
        self._functions: list[tuple[str, tuple[int, ...]]] = []

    def begin(self, graph: Any, steps: Iterable[JitStep]) -> None:
        """Record the graph that is about to be translated, and has these steps."""
        if not any(step.kind == "prim::PythonOp" for step in steps):
            self._functions = []
            return
        functions = (node for node in nodes_of(graph) if node.kind() == "prim::PythonOp")
        self._functions = [(node.pyname(), numbers_of_outputs(node)) for node in functions]

    def node(self, node: Any, result: Any) -> None:
        """Record the translation of a node."""
        self._add(numbers_of_outputs(node), result)

    def function(self, name: str, result: Any) -> None:
        """Record the translation of an ``autograd.Function`` that defines ``symbolic``.

        torch does not report the node, but it translates these functions in order.
        """
        for position, (known, outputs) in enumerate(self._functions):
            if known == name:
                del self._functions[position]
                self._add(outputs, result)
                return

    def _add(self, outputs: tuple[int, ...], result: Any) -> None:
        results = result if isinstance(result, (tuple, list)) else (result,)
        for output, translated in zip(outputs, results, strict=False):
            if not hasattr(translated, "unique"):
                continue
            node = translated.node()
            if node.kind() == "prim::TupleConstruct":
                # A quantized tensor is a tuple: the tensor, its scale and its zero point.
                translated = node.inputsAt(0)
            self.numbers[output] = translated.unique()

    def through_blocks(self, steps: Iterable[JitStep]) -> None:
        """Record the outputs of ``autograd.Function``s without a translation.

        torch replaces such a node by the nodes of its block, the traced ``forward``.
        """
        for step in steps:
            for output, inner in zip(step.outputs, step.returned, strict=bool(step.returned)):
                if output not in self.numbers and inner in self.numbers:
                    self.numbers[output] = self.numbers[inner]
