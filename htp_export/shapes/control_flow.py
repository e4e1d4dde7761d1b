"""``If``, ``Loop`` and ``Scan``: what they make, by what their subgraphs give back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

import onnx_ir as ir

from htp_export.shapes.known import Fact, Operation, objects
from htp_export.shapes.sizes import Dim

if TYPE_CHECKING:
    from htp_export.shapes.inference import Inference

__all__ = ["CONTROL_FLOW_RULES"]

_MOST_TRIPS = 2**31
"""A loop that only its condition ends has a trip count of so much or more, which says nothing of its results."""

ControlFlowRule: TypeAlias = Callable[["Inference", Operation], list[Fact]]


def _if(walk: Inference, operation: Operation) -> list[Fact]:
    decided = walk.constant(operation.inputs[0])
    taken = ("then_branch", "else_branch") if decided is None else ("then_branch" if decided[0] else "else_branch",)
    results = [walk.body(name, operation.attributes[name].as_graph(), (), 1) for name in taken]
    if len(results) == 1:
        return results[0]
    return [walk.either(first, second) for first, second in zip(*results, strict=True)]


def _loop(walk: Inference, operation: Operation) -> list[Fact]:
    graph = operation.attributes["body"].as_graph()
    most, condition, *_ = (*operation.inputs, None, None)  # both may be left out
    count, goes_on = walk.contents(most), walk.constant(condition)
    trips: Dim | None = None if count is None else count.reshape(-1)[0]
    if goes_on is not None and not all(goes_on):
        trips = 0
    elif isinstance(trips, int) and not 0 <= trips < _MOST_TRIPS:
        trips = None
    counter = Fact(ir.TensorType(ir.DataType.INT64), ())
    runs = Fact(ir.TensorType(ir.DataType.BOOL), (), objects(True))
    state = [_forgetful(walk.fact(value)) for value in operation.inputs[2:]]
    times = trips if isinstance(trips, int) else None
    results: list[Fact] = []

    def run(state: list[Fact]) -> list[Fact]:
        results[:] = walk.body("body", graph, (counter, runs, *state), times)
        return results[1 : 1 + len(state)]

    state = walk.repeat(state, run)
    again = results[0].contents  # as the body runs only while its condition holds
    trips = walk.trips(trips, trips == 0 or (again is not None and again.reshape(-1).tolist() == [True]))
    return [*state, *(_stacked(fact, trips) for fact in results[1 + len(state) :])]


def _scan(walk: Inference, operation: Operation) -> list[Fact]:
    graph, count = operation.attributes["body"].as_graph(), operation.attributes["num_scan_inputs"].as_int()
    first = len(operation.inputs) - count
    facts = [_forgetful(walk.fact(value)) for value in operation.inputs]
    state, scanned = facts[:first], facts[first:]
    axes = operation.attributes.get_ints("scan_input_axes") or [0] * count
    sizes = [fact.shape[axis] for fact, axis in zip(scanned, axes, strict=True) if fact.shape]
    trips = next((size for size in sizes if isinstance(size, int)), sizes[0] if sizes else None)
    slices = [_without_axis(fact, axis) for fact, axis in zip(scanned, axes, strict=True)]
    times = trips if isinstance(trips, int) else None
    results: list[Fact] = []

    def run(state: list[Fact]) -> list[Fact]:
        results[:] = walk.body("body", graph, (*state, *slices), times)
        return results[: len(state)]

    state = walk.repeat(state, run)
    out_axes = operation.attributes.get_ints("scan_output_axes") or [0] * len(results)
    trips = walk.trips(trips, True)
    stacked = (_stacked(fact, trips, axis) for fact, axis in zip(results[first:], out_axes, strict=False))
    return [*state, *stacked]


CONTROL_FLOW_RULES: Mapping[str, ControlFlowRule] = {"If": _if, "Loop": _loop, "Scan": _scan}


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
