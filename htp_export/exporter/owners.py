"""The owners of each node, from the operations that PyTorch ran and their exported tensors.

If captured operations produced the tensor that a node computes, the calls that ran them own the
node: usually one, several if equal work was merged. Operations whose tensors are no longer in the
graph were absorbed: their calls own the merged node as well. A node that computes no captured
tensor inherits the owners of its consumers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from htp_export.exporter.capture.calls import NO_CALL, CallLog, Key, Node, Operation, Record
from htp_export.format.tags import Reason
from htp_export.lineage.owner_rule import complete
from htp_export.model.boundaries import dependence
from htp_export.model.neighbours import reached


def varying(steps: list[Operation] | list[Node], inputs: set[Key]) -> set[Key]:
    """The tensors whose values depend on the values of ``inputs``; sizes do not count as values."""
    computing = ((step.inputs, step.outputs) for step in steps if not step.shape_only)
    return set(dependence(computing, dict.fromkeys(inputs, 1)))


def needed(
    operations: list[Operation],
    outputs: list[Key],
    *,
    values_only: bool = False,
) -> list[bool]:
    """For each operation, whether the outputs depend on it.

    With ``values_only``, operations of which they only read sizes do not count.
    """
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
    """The captured tensors and operations between the inputs and the outputs of the model."""

    live: set[Key]  # tensors whose values depend on the inputs
    wanted: list[bool]  # for each operation, whether the outputs depend on it

    @classmethod
    def of(cls, record: Record) -> Flow:
        """Compute the flow of a record; it does not depend on the calls."""
        live = varying(record.operations, record.inputs)
        return cls(live, needed(record.operations, record.outputs))


def relocate_operations(record: Record, flow: Flow) -> set[int]:
    """Correct the calls of operations that the exporter moved between modules.

    Returns the indices of these operations. ``torch.export`` reads each size once, from an input of
    the model. Operations on sizes have the scope of one of the modules that use them, or none. One
    without a call is assigned to the innermost call around its consumers. One that reads the size
    of a tensor which its call neither produces nor reads otherwise is assigned to the innermost
    call that does.
    """
    if not record.log.calls:
        return set()
    unscoped = {
        index for index, operation in enumerate(record.operations) if operation.call == NO_CALL
    }
    if unscoped:
        _assign_unscoped(record, unscoped)
    return unscoped | _assign_sizes(record, flow)


def _assign_unscoped(record: Record, unscoped: set[int]) -> None:
    """Assign each operation without a scope to the innermost call around its consumers."""
    log = record.log
    outermost = next(index for index, call in enumerate(log.calls) if call.parent == NO_CALL)
    # tensor → calls around all its consumers, innermost first
    around: dict[Key, tuple[int, ...]] = dict.fromkeys(record.outputs, (outermost,))

    def common(first: tuple[int, ...] | None, second: tuple[int, ...]) -> tuple[int, ...]:
        if first is None:
            return second
        return tuple(call for call in first if call in second)

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


def _assign_sizes(record: Record, flow: Flow) -> set[int]:
    """Assign operations that read sizes to the innermost call that uses the tensor.

    Returns the indices of these operations.
    """
    log = record.log
    users = _users_of_measured(record, flow)
    assigned = set()
    for index, operation in enumerate(record.operations):
        if not operation.shape_only:
            continue
        measured = [key for key in operation.inputs if key in users]
        chain = log.chain(operation.call)
        if not measured or not chain:
            continue
        call = chain[-1]
        for caller in chain:
            if all(caller in users[key] for key in measured):
                call = caller
                break
        if call != operation.call:
            operation.call = call
            assigned.add(index)
    return assigned


def _users_of_measured(record: Record, flow: Flow) -> dict[Key, set[int]]:
    """Tensor whose size is read → the calls that produce it or read its values."""
    users: dict[Key, set[int]] = {}
    for operation in record.operations:
        if operation.shape_only:
            users.update((key, set()) for key in operation.inputs if key in flow.live)
    for operation in record.operations:
        keys = operation.outputs
        if not operation.shape_only:
            keys = (*operation.inputs, *keys)
        for key in keys:
            if key in users:
                users[key].update(record.log.chain(operation.call))
    return users


def calls_sharing(record: Record) -> dict[int, set[int]]:
    """Operation that computes a size from sizes → further calls that compute the same size.

    Torch represents sizes by symbols, and keeps only the operation of the first module. Another
    module that uses the result computed it itself, unless the first one runs around it and passed
    the size to it.
    """
    log = record.log
    shared: dict[int, set[int]] = {}
    # result of such an operation → calls that use it
    users: dict[Key, set[int]] = {}
    for operation in record.operations:
        if operation.symbolic:
            users.update((key, set()) for key in operation.outputs)
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


Calls = frozenset[int]
_NO_CALLS: Calls = frozenset()
_LOOK_BACK = 31
"""The largest number of operations between one and the one that reverses it.

Both are in one module, with few operations between; the limit keeps the search linear."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """The owners of one node, and the evidence for them."""

    paths: tuple[str, ...]  # the owners' module paths in order of execution, never empty
    # ``scope``, ``shared``, ``fused``, ``flow`` or ``parameters``; see ``docs/owners.md``
    reason: Reason
    calls: tuple[int, ...]  # indices of the calls that the paths come from


class Origins:
    """The calls that computed each tensor of the exported graph, and the calls that it absorbed."""

    def __init__(self, record: Record, flow: Flow) -> None:
        # exported tensor → calls of the operations that produced the same tensor
        self.computed_by: dict[Key, set[int]] = {}
        self.by_flow: set[Key] = set()  # exported tensors whose calls are known by flow only
        # exported tensor → calls of further operations whose own tensors are gone
        self.absorbed: dict[Key, set[int]] = {}
        # exported tensor → calls of operations that no output depends on
        self.unneeded: dict[Key, set[int]] = {}
        self._first: dict[Key, int] = {}  # exported tensor → the first operation that produced it
        self._producer: dict[Key, int] = {}  # captured tensor → operation
        self._operations = record.operations
        self._final = record.final
        self._live = flow.live
        self._captured = set(record.final.values())
        self._nodes = {key: node for node in record.nodes for key in node.outputs}
        self._relocated = relocate_operations(record, flow)
        self._shared = calls_sharing(record)
        self._lost: dict[Key, _LostTensor] = {}
        for index, operation in enumerate(record.operations):
            if flow.wanted[index]:
                self._add(index, operation)
            else:
                for key in self._final.keys() & operation.outputs:
                    self.unneeded.setdefault(self._final[key], set()).add(operation.call)

    def _add(self, index: int, operation: Operation) -> None:
        """Record the results of an operation, exported or lost."""
        calls, reads = self._lost_before(operation)
        self._producer.update(dict.fromkeys(operation.outputs, index))
        for key in operation.outputs:
            counterpart = self._final.get(key)
            if counterpart is not None:
                if counterpart not in reads and not self._undoes(index, counterpart):
                    self._add_exported(index, operation, counterpart, calls)
                continue
            # work on constants and sizes is folded, not absorbed
            works = key in self._live and operation.passed_on is None
            own_calls = calls | {operation.call} if works else calls
            self._lost[key] = _LostTensor(own_calls, frozenset(reads))

    def _lost_before(self, operation: Operation) -> tuple[Calls, set[Key]]:
        """The calls behind lost inputs of an operation, and the exported tensors it depends on."""
        calls = _NO_CALLS
        reads: set[Key] = set()
        for key in operation.inputs:
            lost = self._lost.get(key)
            if lost is not None:
                calls |= lost.calls
                reads |= lost.reads
            elif key in self._final:
                reads.add(self._final[key])
        # an operation that reads the size of a tensor does none of the work that computed it
        return _NO_CALLS if operation.shape_only else calls, reads

    def _add_exported(
        self,
        index: int,
        operation: Operation,
        counterpart: Key,
        lost_calls: Calls,
    ) -> None:
        """Record an operation that produced an exported tensor, and the calls that it absorbed."""
        self._first.setdefault(counterpart, index)
        calls = self.computed_by.setdefault(counterpart, set())
        calls.add(operation.call)
        calls.update(self._shared.get(index, ()))
        if index in self._relocated:
            self.by_flow.add(counterpart)
        absorbed = lost_calls | self._done_again(operation, counterpart)
        if absorbed:
            self.absorbed.setdefault(counterpart, set()).update(absorbed)

    def _undoes(self, index: int, counterpart: Key) -> bool:
        """Whether an operation only returns the tensor from which its inputs were computed.

        No node computes such an operation: a size that becomes a vector again, a transposition that
        is reversed. Its inputs depend on the counterpart of its result. Equal work of two modules
        is different: neither depends on the other, unless the tensor that both read was computed
        again in between, and not by the call itself.
        """
        origin = self._first.get(counterpart)
        if origin is None:
            return False
        operation = self._operations[index]
        reads = self._exported_inputs(operation)
        is_repeated = reads == self._exported_inputs(self._operations[origin]) and None not in reads
        seen: set[int] = set()
        queue = [index]
        while queue and len(seen) <= _LOOK_BACK:
            for key in self._operations[queue.pop(0)].inputs:
                producer = self._producer.get(key, -1)
                if producer == origin:
                    return True
                if producer < origin or producer in seen:
                    continue
                if not is_repeated or self._operations[producer].call == operation.call:
                    seen.add(producer)
                    queue.append(producer)
        return False

    def _done_again(self, operation: Operation, counterpart: Key) -> Calls:
        """The calls of earlier operations whose work is repeated by the node of an operation.

        The node has their inputs instead of their result, which still has other consumers. For
        example, torch merges two transpositions into one, and keeps the first one as well::

            captured     t = transpose(x)    u = transpose(t)     relu(t)
            exported     t = transpose(x)    u = transpose2(x)    relu(t)     u repeats t
        """
        node = self._nodes.get(counterpart)
        inputs: dict[Key, Key] = {}  # exported → captured
        for key in operation.inputs:
            exported = self._final.get(key)
            if exported is not None and key in self._live:
                inputs[exported] = key
        if node is None or inputs.keys() <= set(node.inputs):
            return _NO_CALLS
        sources = self._sources(node)
        calls = _NO_CALLS
        for exported, key in inputs.items():
            if exported not in sources:
                calls |= self._calls_between(key, sources)
        return calls

    def _sources(self, node: Node) -> set[Key]:
        """The captured tensors that a node depends on, also through tensors not captured."""

        def before(key: Key) -> Iterable[Key]:
            if key in self._captured or key not in self._nodes:
                return ()
            return self._nodes[key].inputs

        return {key for key in reached(node.inputs, before) if key in self._captured}

    def _calls_between(self, key: Key, sources: set[Key]) -> Calls:
        """The calls of the operations that compute a tensor from ``sources`` alone.

        Empty if it depends on other tensors.
        """
        waiting = [key]
        producers = dict[int, None]()
        while waiting:
            producer = self._producer.get(waiting.pop())
            if producer is None or len(producers) > _LOOK_BACK:
                return _NO_CALLS
            if producer in producers:
                continue
            producers[producer] = None
            reads = (read for read in self._operations[producer].inputs if read in self._live)
            waiting.extend(read for read in reads if self._final.get(read) not in sources)
        operations = [self._operations[producer] for producer in producers]
        return frozenset(operation.call for operation in operations if operation.passed_on is None)

    def _exported_inputs(self, operation: Operation) -> frozenset[Key]:
        """The exported counterparts of the inputs of an operation, without constant inputs."""
        return frozenset(self._final.get(key) for key in operation.inputs if key in self._live)


@dataclass(frozen=True, slots=True)
class _LostTensor:
    """A captured tensor without a counterpart in the exported graph."""

    calls: Calls  # the calls whose work it is, to be absorbed by its consumers
    reads: frozenset[Key]  # the exported tensors that it depends on


@dataclass(frozen=True, slots=True)
class _Entry:
    """The calls that own a node."""

    calls: Calls
    reason: Reason
    works: Calls  # `calls`, and the calls whose work the node absorbed


class _ExportedGraph:
    """The nodes of an exported graph by their places, and their neighbours for the owner rule.

    A node that computes a captured tensor has owners by it: only the consumers of other tensors
    count for their producers.
    """

    def __init__(self, nodes: list[Node], captured: Collection[Key]) -> None:
        self._nodes = nodes
        self._producer = {key: place for place, node in enumerate(nodes) for key in node.outputs}
        self._consumers: dict[int, list[int]] = {}
        for place, node in enumerate(nodes):
            for key in node.inputs:
                if key not in captured and key in self._producer:
                    self._consumers.setdefault(self._producer[key], []).append(place)

    def consumers(self, node: int) -> Iterable[int]:
        return self._consumers.get(node, ())

    def producers(self, node: int) -> Iterable[int]:
        return [self._producer[key] for key in self._nodes[node].inputs if key in self._producer]

    def holders(self, node: int) -> Iterable[int]:
        return ()


def assign(record: Record, flow: Flow) -> list[Ownership]:
    """Return the owners of every node of the exported graph, in the order of ``record.nodes``."""
    origins = Origins(record, flow)
    entries: dict[int, _Entry] = {}
    for place, node in enumerate(record.nodes):
        calls, reason = _captured_calls(node, origins)
        if calls:
            entries[place] = _Entry(calls, reason, calls | _calls_of(node, origins.absorbed))

    def inherited(place: int, near: Sequence[_Entry]) -> _Entry | None:
        """The entry of a node without captured tensors, from its neighbours; None without calls."""
        node = record.nodes[place]
        calls = _NO_CALLS.union(*(entry.works for entry in near)) - {NO_CALL}
        reason = Reason.FLOW
        if not calls:
            calls = _calls_of(node, origins.unneeded)
            reason = Reason.SCOPE
        if not calls:
            return None
        return _Entry(calls, reason, calls | _calls_of(node, origins.absorbed))

    places = range(len(record.nodes))
    graph = _ExportedGraph(record.nodes, origins.computed_by.keys())
    complete(places, entries, graph, inherited)
    unowned = _Entry(_NO_CALLS, Reason.FLOW, _NO_CALLS)
    ordered = (entries.get(place, unowned) for place in places)
    return [_ownership(record.log, entry.calls, entry.reason) for entry in ordered]


def _calls_of(node: Node, calls: Mapping[Key, set[int]]) -> Calls:
    """The calls of the outputs of a node."""
    return _NO_CALLS.union(*(calls.get(key, ()) for key in node.outputs)) - {NO_CALL}


def _captured_calls(node: Node, origins: Origins) -> tuple[Calls, Reason]:
    """The calls that computed the tensors of a node, or that its hint names; none if unknown."""
    calls = _calls_of(node, origins.computed_by)
    by_flow = not origins.by_flow.isdisjoint(node.outputs)
    # other evidence takes precedence over flow
    if calls and not (by_flow and node.hint != NO_CALL):
        absorbed = _calls_of(node, origins.absorbed)
        if absorbed - calls or _differ(node, origins):
            return calls | absorbed, Reason.FUSED
        return calls, Reason.FLOW if by_flow else Reason.SCOPE
    if node.hint != NO_CALL:
        return frozenset({node.hint}), node.evidence
    return _NO_CALLS, Reason.FLOW


def _differ(node: Node, origins: Origins) -> bool:
    """Whether different calls produced the outputs of a node, such as a sum and a normalization."""
    by_output = [origins.computed_by[key] for key in node.outputs if key in origins.computed_by]
    return any(calls != by_output[0] for calls in by_output)


def _ownership(log: CallLog, calls: Calls, reason: Reason) -> Ownership:
    ordered = tuple(sorted(calls))
    if len(ordered) == 1:
        paths = log.owners(ordered[0])
    else:
        paths = tuple(dict.fromkeys(path for call in ordered for path in log.owners(call)))
    if reason == Reason.SCOPE and len({log.calls[call].path for call in ordered}) > 1:
        reason = Reason.SHARED
    return Ownership(paths or ("",), reason, ordered)
