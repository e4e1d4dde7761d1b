"""The flow of values through captured operations: what varies, what is needed, and operations in another call."""

from __future__ import annotations

from dataclasses import dataclass

from htp_export.exporter.capture.calls import NO_CALL, Key, Node, Operation, Record
from htp_export.model.boundaries import dependence


def varying(steps: list[Operation] | list[Node], inputs: set[Key]) -> set[Key]:
    """The tensors whose values depend on the values of ``inputs``; sizes of tensors do not count as their values."""
    reading = ((step.inputs, step.outputs) for step in steps if not step.shape_only)
    return set(dependence(reading, dict.fromkeys(inputs, 1)))


def needed(operations: list[Operation], outputs: list[Key], *, values_only: bool = False) -> list[bool]:
    """Return for each operation whether the outputs depend on it; with ``values_only``, on more than its sizes."""
    wanted = set(outputs)
    marks = [False] * len(operations)
    for index in range(len(operations) - 1, -1, -1):
        operation = operations[index]
        if not wanted.isdisjoint(operation.outputs):
            marks[index] = True
            if not (values_only and operation.shape_only):
                wanted.update(operation.inputs)
    return marks


@dataclass(frozen=True, slots=True)
class Flow:
    """The captured tensors and operations that count."""

    live: set[Key]  # the tensors whose values depend on the inputs
    wanted: list[bool]  # for each operation, whether the outputs depend on it

    @classmethod
    def of(cls, record: Record) -> Flow:
        """Compute the flow of a record, without its calls."""
        return cls(varying(record.operations, record.inputs), needed(record.operations, record.outputs))


def relocate_operations(record: Record, flow: Flow) -> set[int]:
    """Set the call of each operation that the exporter moved out of the module that uses it; their indices.

    ``torch.export`` reads each size once, from an input of the model. Operations on sizes have the scope of one of the
    modules that use them, or none. One without a call is assigned to the innermost call around its consumers; one that
    reads the size of a tensor which its call neither produces nor reads otherwise, to the innermost call that does.
    """
    if not record.log.calls:
        return set()
    placed = {index for index, operation in enumerate(record.operations) if operation.call == NO_CALL}
    if placed:
        _place_between(record, placed)
    return placed | _place_sizes(record, flow)


def _place_between(record: Record, unscoped: set[int]) -> None:
    """Assign each operation without a scope to the innermost call around its consumers."""
    log = record.log
    outermost = next(index for index, call in enumerate(log.calls) if call.parent == NO_CALL)
    around: dict[Key, tuple[int, ...]] = dict.fromkeys(record.outputs, (outermost,))  # tensor → calls around readers

    def common(first: tuple[int, ...] | None, second: tuple[int, ...]) -> tuple[int, ...]:
        return second if first is None else tuple(call for call in first if call in second)

    for index in range(len(record.operations) - 1, -1, -1):
        operation = record.operations[index]
        if index in unscoped:
            chain: tuple[int, ...] | None = None
            for key in operation.outputs:
                if key in around:
                    chain = common(chain, around[key])
            operation.call = chain[0] if chain else outermost
        for key in operation.inputs:
            around[key] = common(around.get(key), log.chain(operation.call))


def _place_sizes(record: Record, flow: Flow) -> set[int]:
    """Assign operations that read sizes to the innermost call that has the tensor."""
    log = record.log
    measured = {key for operation in record.operations if operation.shape_only for key in operation.inputs} & flow.live
    near: dict[Key, set[int]] = {key: set() for key in measured}  # tensor → calls that make it or read its values
    for operation in record.operations:
        touched = operation.outputs if operation.shape_only else (*operation.inputs, *operation.outputs)
        for key in touched:
            if key in near:
                near[key].update(log.chain(operation.call))
    placed = set()
    for index, operation in enumerate(record.operations):
        if not operation.shape_only or not any(key in near for key in operation.inputs):
            continue
        chain = log.chain(operation.call)
        has = [call for call in chain if all(call in near[key] for key in operation.inputs if key in near)]
        if chain and (call := has[0] if has else chain[-1]) != operation.call:
            operation.call = call
            placed.add(index)
    return placed


def calls_sharing(record: Record) -> dict[int, set[int]]:
    """Operation that computes a size of sizes → further calls that do, where torch does it once for all of them.

    Torch represents sizes by symbols, and keeps the operation of the first module only. Another one that uses the
    result computed it itself, unless the first runs around it, and gave it the size.
    """
    log = record.log
    shared: dict[int, set[int]] = {}
    users: dict[Key, set[int]] = {key: set() for each in record.operations if each.symbolic for key in each.outputs}
    for index in range(len(record.operations) - 1, -1, -1):
        operation = record.operations[index]
        calls = {operation.call}
        if operation.symbolic:
            used = set[int]().union(*(users[key] for key in operation.outputs))
            others = {call for call in used if operation.call not in log.chain(call)}
            if others:
                shared[index] = others
                calls |= others
        for key in operation.inputs:
            if key in users:
                users[key] |= calls
    return shared
