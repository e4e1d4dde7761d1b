"""The ONNX nodes that each operation of a JIT graph was translated into, as operations of the same call.

Torch translates one operation into several nodes: a recurrent layer with ``batch_first`` into a
transposition, the layer, and a transposition back. Later passes merge and remove single nodes. With
an operation for each node it is known which: if only the last transposition is gone, no other node
does the work of the layer.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from htp_export.exporter.capture.calls import Key, Operation
from htp_export.exporter.capture.torchscript_internals import LIST, SHAPE_KINDS, Reading

_T = TypeVar("_T")


class Inner(NamedTuple):
    """An intermediate tensor of the translation of one operation."""

    operation: int  # the operation's index
    tensor: int  # the tensor's number in the translated graph


class Parts:
    """The operations of a graph, each with the nodes of its translation.

    Args:
        operations: The operations as they were traced.
        before: The number of a tensor in the graph that was translated; None for one that was gone
            by then.
        translated: The numbers of that graph → those of the translated graph.
        graph: The translated graph.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        before: Callable[[Key], int | None],
        translated: Mapping[int, int],
        graph: Reading,
    ) -> None:
        self._operations, self._steps = operations, graph.steps
        self._before: dict[Key, int] = {}
        self._numbers: dict[Key, int] = {}  # in the translated graph
        # number in the translated graph → the last tensor that has it
        self._captured: dict[int, Key] = {}
        keys = (key for operation in operations for key in (*operation.inputs, *operation.outputs))
        for key in dict.fromkeys(keys):
            number = before(key)
            if number is not None:
                self._before[key] = number
                if number in translated:
                    self._numbers[key] = translated[number]
                    self._captured[translated[number]] = key
        steps = (number for step in graph.steps for number in step.outputs)
        # numbers in the translated graph
        self._there = {*graph.inputs, *graph.parameters, *graph.constants, *steps}
        elements = {step.outputs[0]: step.inputs for step in graph.steps if step.kind == LIST}
        self._reads = [tuple(_without_lists(step.inputs, elements)) for step in graph.steps]
        makes = ((place, step) for place, step in enumerate(graph.steps) if step.kind != LIST)
        self._producers = {number: place for place, step in makes for number in step.outputs}
        # What an operation reads and computes, in numbers of the graph before → the places of its
        # nodes
        self._found: dict[tuple[frozenset[int], frozenset[int]], list[int]] = {}
        self._claimed: set[int] = set()  # the places of all nodes so far
        # List → what is in it: torch translates no list, and the nodes of its reader read what is
        # in it
        self._lists: dict[Key, tuple[Key, ...]] = {
            key: operation.inputs
            for operation in operations
            for key in operation.outputs
            if key in self._before and key not in self._numbers
        }

    def split(self) -> list[Operation]:
        """The operations, those of several nodes replaced by one for each node."""
        produced: set[Key] = set()
        found: list[Operation] = []
        for index, operation in enumerate(self._operations):
            places = self._places(operation)
            if not places and (given := self._passed_on(operation)) is not None:
                found.append(replace(operation, passed_on=given))
            elif len(places) < 2 or operation.shape_only:
                # an operation on sizes is moved between calls as a whole
                found.append(operation)
            else:
                # Tensors that are gone by now: which of the nodes absorbed the work behind them is
                # not known.
                lost = tuple(
                    key
                    for key in self._read_by(operation)
                    if key in produced and self._is_gone(key)
                )
                found.extend(self._nodes(index, places, lost))
            produced.update(operation.outputs)
        return found

    def _places(self, operation: Operation) -> list[int]:
        """The places of the nodes that compute the results of an operation from captured tensors, in order.

        Equal operations that torch merged have the same nodes. An operation that returns its input
        has none.
        """
        same = self._known_before(operation.inputs), self._known_before(operation.outputs)
        if same in self._found:
            return self._found[same]
        waiting = [self._numbers[key] for key in operation.outputs if key in self._numbers]
        places: set[int] = set()
        while waiting:
            place = self._producers.get(waiting.pop())
            if place is None or place in places or place in self._claimed:
                continue
            places.add(place)
            waiting.extend(number for number in self._reads[place] if number not in self._captured)
        self._claimed |= places
        self._found[same] = sorted(places)
        return self._found[same]

    def _passed_on(self, operation: Operation) -> Key | None:
        """The input that is the result of an operation: both were translated into the same tensor."""
        results = {self._numbers.get(key) for key in operation.outputs}
        same = (
            key
            for key in operation.inputs
            if key in self._numbers and results == {self._numbers[key]}
        )
        return next(same, None)

    def _known_before(self, keys: Iterable[Key]) -> frozenset[int]:
        return frozenset(self._before[key] for key in keys if key in self._before)

    def _is_gone(self, key: Key) -> bool:
        return self._numbers.get(key) not in self._there

    def _read_by(self, operation: Operation) -> Iterator[Key]:
        """The tensors that an operation reads, those in lists in place of the lists."""
        return _without_lists(operation.inputs, self._lists)

    def _nodes(
        self, index: int, places: Sequence[int], lost: tuple[Key, ...]
    ) -> Iterator[Operation]:
        """One operation for each node of an operation, and one for results that none of these nodes computes."""
        operation = self._operations[index]
        results = {self._numbers[key]: key for key in operation.outputs if key in self._numbers}
        made: dict[int, Any] = {}
        for place in places:
            made.update(
                (number, results.get(number, Inner(index, number)))
                for number in self._steps[place].outputs
            )
        own = {self._numbers[key]: key for key in self._read_by(operation) if key in self._numbers}
        known = ChainMap(made, own, self._captured)
        for place in places:
            step = self._steps[place]
            reads = tuple(known[number] for number in self._reads[place] if number in known)
            makes = tuple(made[number] for number in step.outputs)
            yield Operation(operation.call, (*reads, *lost), makes, step.kind in SHAPE_KINDS)
        others = tuple(key for key in operation.outputs if self._numbers.get(key) not in made)
        if others:
            yield Operation(operation.call, operation.inputs, others)


def _without_lists(keys: Sequence[_T], elements: Mapping[_T, Sequence[_T]]) -> Iterator[_T]:
    """Tensors, with those in lists in place of the lists."""
    waiting = [*reversed(keys)]
    while waiting:
        key = waiting.pop()
        if key in elements:
            waiting.extend(reversed(elements[key]))
        else:
            yield key
