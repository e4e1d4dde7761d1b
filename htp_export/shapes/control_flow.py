"""``If``, ``Loop`` and ``Scan``: what they make, by what their subgraphs give back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from htp_export.shapes.known import Fact, Known, Operation, objects
from htp_export.shapes.sizes import Dim

_MOST_TRIPS = 2**31
"""A loop that only its condition ends has a trip count of so much or more, which says nothing of its results."""


class ControlFlow(Known):
    """What is known of tensors, and how it follows from runs of subgraphs."""

    def body(self, name: str, graph: ir.Graph, inputs: Sequence[Fact], times: int | None) -> list[Fact]:
        """Walk over the subgraph of an attribute, which runs so many times if that is known; what it gives back."""
        raise NotImplementedError

    def run_subgraphs(self, operation: Operation) -> list[Fact]:
        """What an operator of control flow makes."""
        return {"If": self._if, "Loop": self._loop, "Scan": self._scan}[operation.op_type](operation)

    def either(self, first: Fact, second: Fact) -> Fact:
        """What is true of two tensors, as those that two branches give."""
        kind = first.type if first.type == second.type else None
        shape = None
        if first.shape is not None and second.shape is not None and len(first.shape) == len(second.shape):
            shape = tuple(a if a == b else None for a, b in zip(first.shape, second.shape, strict=True))
        if first.contents is None or second.contents is None or first.contents.shape != second.contents.shape:
            return Fact(kind, shape)
        same = all(a == b for a, b in zip(first.contents.reshape(-1), second.contents.reshape(-1), strict=True))
        return Fact(kind, shape, first.contents if same else None)

    def repeat(self, state: list[Fact], run: Callable[[list[Fact]], list[Fact]]) -> list[Fact]:
        """What is true of the state of a loop before each run of its body, and after the last one."""
        while True:  # each round forgets at least one dimension
            after = run(state)
            common = [self.either(b, a).forgetting_values() for b, a in zip(state, after, strict=False)]
            if all(b.shape == c.shape and b.type == c.type for b, c in zip(state, common, strict=False)):
                return common
            state = common

    def trips(self, trips: Dim | None, certain: bool) -> Dim | None:
        """How often the body of a loop runs: as often as it may, if it is certain that nothing ends it before."""
        return trips if certain else None

    def _if(self, operation: Operation) -> list[Fact]:
        decided = self.constant(operation.inputs[0])
        taken = ("then_branch", "else_branch") if decided is None else ("then_branch" if decided[0] else "else_branch",)
        results = [self.body(name, operation.attributes[name].as_graph(), (), 1) for name in taken]
        if len(results) == 1:
            return results[0]
        return [self.either(first, second) for first, second in zip(*results, strict=True)]

    def _loop(self, operation: Operation) -> list[Fact]:
        graph = operation.attributes["body"].as_graph()
        most, condition, *_ = (*operation.inputs, None, None)  # both may be left out
        count, goes_on = self.contents(most), self.constant(condition)
        trips: Dim | None = None if count is None else count.reshape(-1)[0]
        if goes_on is not None and not all(goes_on):
            trips = 0
        elif isinstance(trips, int) and not 0 <= trips < _MOST_TRIPS:
            trips = None
        counter = Fact(ir.TensorType(ir.DataType.INT64), ())
        runs = Fact(ir.TensorType(ir.DataType.BOOL), (), objects(True))
        state = [_forgetful(self.fact(value)) for value in operation.inputs[2:]]
        times = trips if isinstance(trips, int) else None
        results: list[Fact] = []

        def run(state: list[Fact]) -> list[Fact]:
            results[:] = self.body("body", graph, (counter, runs, *state), times)
            return results[1 : 1 + len(state)]

        state = self.repeat(state, run)
        again = results[0].contents  # as the body runs only while its condition holds
        trips = self.trips(trips, trips == 0 or (again is not None and again.reshape(-1).tolist() == [True]))
        return [*state, *(_stacked(fact, trips) for fact in results[1 + len(state) :])]

    def _scan(self, operation: Operation) -> list[Fact]:
        graph, count = operation.attributes["body"].as_graph(), operation.attributes["num_scan_inputs"].as_int()
        first = len(operation.inputs) - count
        facts = [_forgetful(self.fact(value)) for value in operation.inputs]
        state, scanned = facts[:first], facts[first:]
        axes = operation.attributes.get_ints("scan_input_axes") or [0] * count
        sizes = [fact.shape[axis] for fact, axis in zip(scanned, axes, strict=True) if fact.shape]
        trips = next((size for size in sizes if isinstance(size, int)), sizes[0] if sizes else None)
        slices = [_without_axis(fact, axis) for fact, axis in zip(scanned, axes, strict=True)]
        times = trips if isinstance(trips, int) else None
        results: list[Fact] = []

        def run(state: list[Fact]) -> list[Fact]:
            results[:] = self.body("body", graph, (*state, *slices), times)
            return results[: len(state)]

        state = self.repeat(state, run)
        out_axes = operation.attributes.get_ints("scan_output_axes") or [0] * len(results)
        trips = self.trips(trips, True)
        stacked = (_stacked(fact, trips, axis) for fact, axis in zip(results[first:], out_axes, strict=False))
        return [*state, *stacked]


def _forgetful(fact: Fact | None) -> Fact:
    return Fact() if fact is None else fact.forgetting_values()


def _without_axis(fact: Fact, axis: int) -> Fact:
    if fact.shape is None:
        return fact
    axis %= max(1, len(fact.shape))
    return Fact(fact.type, (*fact.shape[:axis], *fact.shape[axis + 1 :]))


def _stacked(fact: Fact, trips: Dim | None, axis: int = 0) -> Fact:
    if fact.shape is None:
        return fact.forgetting_values()
    axis %= len(fact.shape) + 1
    return Fact(fact.type, (*fact.shape[:axis], trips, *fact.shape[axis:]))
