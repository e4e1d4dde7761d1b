"""The ONNX nodes that each operation of a JIT graph was translated into, as operations of its call.

Torch translates one operation into several nodes: a recurrent layer with ``batch_first`` into a
transposition, the layer, and a transposition back. Later passes merge and remove single nodes. With
one operation for each node, the work of each node is known: if only the last transposition is
removed, no other node does the work of the layer.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from htp_export.exporter.capture.calls import Key, Operation
from htp_export.exporter.capture.torchscript_internals import (
    LIST,
    SHAPE_KINDS,
    Reading,
    without_lists,
)
from htp_export.model.neighbours import reached


class Inner(NamedTuple):
    """An intermediate tensor in the translation of one operation."""

    operation: int  # the operation's index
    tensor: int  # the tensor's number in the translated graph


class Parts:
    """The operations of a graph, each with the nodes of its translation.

    Args:
        operations: The operations as they were traced.
        before: Key → the tensor's number in the graph that was translated; None if it was removed
            before the translation.
        translated: Number in that graph → number in the translated graph.
        graph: The translated graph.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        before: Callable[[Key], int | None],
        translated: Mapping[int, int],
        graph: Reading,
    ) -> None:
        self._operations = operations
        self._steps = graph.steps
        self._before = _numbers_before(operations, before)
        self._numbers: dict[Key, int] = {
            key: translated[number] for key, number in self._before.items() if number in translated
        }
        # number in the translated graph → the last key that has it
        self._captured: dict[int, Key] = {number: key for key, number in self._numbers.items()}
        # numbers in the translated graph
        self._remaining = {*graph.inputs, *graph.parameters, *graph.constants}
        elements: dict[int, tuple[Any, ...]] = {}  # list → its elements
        self._producers: dict[int, int] = {}  # number in the translated graph → place of its node
        for place, step in enumerate(graph.steps):
            self._remaining.update(step.outputs)
            if step.kind == LIST:
                elements[step.outputs[0]] = step.inputs
            else:
                self._producers.update(dict.fromkeys(step.outputs, place))
        self._reads = [tuple(without_lists(step.inputs, elements)) for step in graph.steps]
        # (inputs, outputs) of an operation in the graph before → the places of its nodes
        self._found: dict[tuple[frozenset[int], frozenset[int]], list[int]] = {}
        self._claimed: set[int] = set()  # the places of all nodes assigned so far
        self._lists = self._translated_away()

    def _translated_away(self) -> dict[Key, tuple[Key, ...]]:
        """List → its elements, for lists without a counterpart in the translated graph.

        torch translates no list: the nodes of its consumers read the elements.
        """
        lists: dict[Key, tuple[Key, ...]] = {}
        for operation in self._operations:
            for key in operation.outputs:
                if key in self._before and key not in self._numbers:
                    lists[key] = operation.inputs
        return lists

    def split(self) -> list[Operation]:
        """The operations; one with several nodes is replaced by one operation for each node."""
        produced: set[Key] = set()
        result: list[Operation] = []
        for index, operation in enumerate(self._operations):
            places = self._places(operation)
            passed_on = None if places else self._passed_on(operation)
            if passed_on is not None:
                result.append(replace(operation, passed_on=passed_on))
            elif len(places) < 2 or operation.shape_only:
                # an operation on sizes moves between calls as a whole
                result.append(operation)
            else:
                # Inputs that were removed: it is unknown which of the nodes absorbed their work.
                read = self._read_by(operation)
                lost = tuple(key for key in read if key in produced and self._is_gone(key))
                result.extend(self._nodes(index, places, lost))
            produced.update(operation.outputs)
        return result

    def _places(self, operation: Operation) -> list[int]:
        """The places of the nodes that compute an operation's results, in order.

        The search ends at captured tensors. Equal operations that torch merged have the same nodes.
        An operation that returns its input has none.
        """
        same = self._known_before(operation.inputs), self._known_before(operation.outputs)
        if same in self._found:
            return self._found[same]

        def producers(numbers: Iterable[int]) -> list[int]:
            places = (self._producers.get(number) for number in numbers)
            return [place for place in places if place is not None and place not in self._claimed]

        def before(place: int) -> list[int]:
            return producers(
                number for number in self._reads[place] if number not in self._captured
            )

        results = [self._numbers[key] for key in operation.outputs if key in self._numbers]
        places = sorted(reached(producers(results), before))
        self._claimed.update(places)
        self._found[same] = places
        return places

    def _passed_on(self, operation: Operation) -> Key | None:
        """The input that an operation returns: both were translated into the same tensor."""
        results = {self._numbers.get(key) for key in operation.outputs}
        for key in operation.inputs:
            if key in self._numbers and results == {self._numbers[key]}:
                return key
        return None

    def _known_before(self, keys: Iterable[Key]) -> frozenset[int]:
        return frozenset(self._before[key] for key in keys if key in self._before)

    def _keys_by_number(self, keys: Iterable[Key]) -> dict[int, Key]:
        """Number in the translated graph → key, for keys that are in it."""
        return {self._numbers[key]: key for key in keys if key in self._numbers}

    def _is_gone(self, key: Key) -> bool:
        return self._numbers.get(key) not in self._remaining

    def _read_by(self, operation: Operation) -> Iterator[Key]:
        """The tensors that an operation reads, with the elements of lists in place of the lists."""
        return without_lists(operation.inputs, self._lists)

    def _nodes(
        self,
        index: int,
        places: Sequence[int],
        lost: tuple[Key, ...],
    ) -> Iterator[Operation]:
        """One operation for each node of an operation, and one for results without a node."""
        operation = self._operations[index]
        results = self._keys_by_number(operation.outputs)
        produced: dict[int, Any] = {}
        for place in places:
            for number in self._steps[place].outputs:
                produced[number] = results.get(number, Inner(index, number))
        own = self._keys_by_number(self._read_by(operation))
        keys = ChainMap(produced, own, self._captured)
        for place in places:
            step = self._steps[place]
            reads = tuple(keys[number] for number in self._reads[place] if number in keys)
            outputs = tuple(produced[number] for number in step.outputs)
            yield Operation(operation.call, (*reads, *lost), outputs, step.kind in SHAPE_KINDS)
        others = tuple(key for key in operation.outputs if self._numbers.get(key) not in produced)
        if others:
            yield Operation(operation.call, operation.inputs, others)


def _numbers_before(
    operations: Sequence[Operation], before: Callable[[Key], int | None]
) -> dict[Key, int]:
    """The numbers of the operations' tensors in the graph that was translated."""
    keys = (key for operation in operations for key in (*operation.inputs, *operation.outputs))
    numbers: dict[Key, int] = {}
    for key in dict.fromkeys(keys):
        number = before(key)
        if number is not None:
            numbers[key] = number
    return numbers
