"""Each node's owners, from what PyTorch ran and from what became of it.

Where captured operations made the tensor that a node computes, the calls that ran them own the
node: one as a rule, several where equal work was merged. Operations whose tensors are nowhere in
the graph any more were absorbed: their calls own the merged node as well. A node that computes no
captured tensor takes its owners from those that read it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from htp_export.exporter.capture.calls import NO_CALL, CallLog, Key, Node, Operation, Record
from htp_export.format.tags import Reason
from htp_export.lineage.owner_rule import complete
from htp_export.model.boundaries import dependence


def varying(steps: list[Operation] | list[Node], inputs: set[Key]) -> set[Key]:
    """The tensors whose values depend on the values of ``inputs``; sizes of tensors do not count as their values."""
    reading = ((step.inputs, step.outputs) for step in steps if not step.shape_only)
    return set(dependence(reading, dict.fromkeys(inputs, 1)))


def needed(
    operations: list[Operation], outputs: list[Key], *, values_only: bool = False
) -> list[bool]:
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
        return cls(
            varying(record.operations, record.inputs), needed(record.operations, record.outputs)
        )


def relocate_operations(record: Record, flow: Flow) -> set[int]:
    """Set the call of each operation that the exporter moved out of the module that uses it; their indices.

    ``torch.export`` reads each size once, from an input of the model. Operations on sizes have the
    scope of one of the modules that use them, or none. One without a call is assigned to the
    innermost call around its consumers; one that reads the size of a tensor which its call neither
    produces nor reads otherwise, to the innermost call that does.
    """
    if not record.log.calls:
        return set()
    placed = {
        index for index, operation in enumerate(record.operations) if operation.call == NO_CALL
    }
    if placed:
        _place_between(record, placed)
    return placed | _place_sizes(record, flow)


def _place_between(record: Record, unscoped: set[int]) -> None:
    """Assign each operation without a scope to the innermost call around its consumers."""
    log = record.log
    outermost = next(index for index, call in enumerate(log.calls) if call.parent == NO_CALL)
    # tensor → calls around readers
    around: dict[Key, tuple[int, ...]] = dict.fromkeys(record.outputs, (outermost,))

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
    measured = {
        key for operation in record.operations if operation.shape_only for key in operation.inputs
    } & flow.live
    # tensor → calls that make it or read its values
    near: dict[Key, set[int]] = {key: set() for key in measured}
    for operation in record.operations:
        touched = (
            operation.outputs if operation.shape_only else (*operation.inputs, *operation.outputs)
        )
        for key in touched:
            if key in near:
                near[key].update(log.chain(operation.call))
    placed = set()
    for index, operation in enumerate(record.operations):
        if not operation.shape_only or not any(key in near for key in operation.inputs):
            continue
        chain = log.chain(operation.call)
        has = [
            call
            for call in chain
            if all(call in near[key] for key in operation.inputs if key in near)
        ]
        if chain and (call := has[0] if has else chain[-1]) != operation.call:
            operation.call = call
            placed.add(index)
    return placed


def calls_sharing(record: Record) -> dict[int, set[int]]:
    """Operation that computes a size of sizes → further calls that do, where torch does it once for all of them.

    Torch represents sizes by symbols, and keeps the operation of the first module only. Another one
    that uses the result computed it itself, unless the first runs around it, and gave it the size.
    """
    log = record.log
    shared: dict[int, set[int]] = {}
    users: dict[Key, set[int]] = {
        key: set() for each in record.operations if each.symbolic for key in each.outputs
    }
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
_NOBODY: Calls = frozenset()
_LOOK_BACK = 31
"""Operations between one and the one that reverses it, at most: both are in one module, with few operations between."""


@dataclass(frozen=True, slots=True)
class Ownership:
    """The owners of one node, and the evidence for them."""

    paths: tuple[str, ...]  # the owners' module paths in order of execution, never empty
    # ``scope``, ``shared``, ``fused``, ``flow`` or ``parameters``; see ``docs/owners.md``
    reason: Reason
    calls: tuple[int, ...]  # indices of the calls that the paths come from


class Origins:
    """The calls that computed each tensor of the exported graph, and the calls whose work was absorbed."""

    def __init__(self, record: Record, flow: Flow) -> None:
        # exported tensor → calls of the operations that produced the same tensor
        self.made: dict[Key, set[int]] = {}
        self.placed: set[Key] = set()  # exported tensors whose calls are known by flow only
        # Exported tensor → calls of further operations whose own tensors are gone
        self.absorbed: dict[Key, set[int]] = {}
        # exported tensor → calls of operations on which no result depends
        self.unneeded: dict[Key, set[int]] = {}
        self._first: dict[Key, int] = {}  # exported tensor → operation that made it first
        self._maker: dict[Key, int] = {}
        self._final, self._live = record.final, flow.live
        self._captured = set(record.final.values())
        self._nodes = {key: node for node in record.nodes for key in node.outputs}
        relocated, shared = relocate_operations(record, flow), calls_sharing(record)
        final, live = record.final, flow.live
        # lost tensor → calls that it took, and what they read
        lost: dict[Key, tuple[Calls, frozenset[Key]]] = {}
        for index, operation in enumerate(record.operations):
            if not flow.wanted[index]:
                for key in final.keys() & operation.outputs:
                    self.unneeded.setdefault(final[key], set()).add(operation.call)
                continue
            calls = _NOBODY
            reads: set[Key] = set()
            for key in operation.inputs:
                if key in lost:
                    calls, more = calls | lost[key][0], lost[key][1]
                    reads |= more
                elif key in final:
                    reads.add(final[key])
            # what reads the size of a tensor does none of the work that made it
            if operation.shape_only:
                calls = _NOBODY
            self._maker.update(dict.fromkeys(operation.outputs, index))
            for key in operation.outputs:
                counterpart = final.get(key)
                if counterpart is None:  # work on constants and sizes is folded and not absorbed
                    works = key in live and operation.passed_on is None
                    lost[key] = (calls | {operation.call} if works else calls, frozenset(reads))
                elif counterpart not in reads and not self._undoes(
                    record.operations, index, counterpart
                ):
                    self._first.setdefault(counterpart, index)
                    self.made.setdefault(counterpart, set()).update(
                        {operation.call}, shared.get(index, ())
                    )
                    if index in relocated:
                        self.placed.add(counterpart)
                    absorbed = calls | self._done_again(record.operations, operation, counterpart)
                    if absorbed:
                        self.absorbed.setdefault(counterpart, set()).update(absorbed)

    def _undoes(self, operations: list[Operation], index: int, counterpart: Key) -> bool:
        """Return whether an operation only returns the tensor from which its inputs were computed.

        No node computes such an operation: a size that becomes a vector again, a transposition that
        is reversed. Its inputs depend on the tensor that stands for its result. Equal work of two
        modules is different: neither depends on the other, unless the tensor that both read was
        computed again in between, and not by the call itself.
        """
        origin = self._first.get(counterpart)
        if origin is None:
            return False
        reads, call = self._reads(operations[index]), operations[index].call
        repeats = reads == self._reads(operations[origin]) and None not in reads
        seen: set[int] = set()
        queue = [index]
        while queue and len(seen) <= _LOOK_BACK:
            for key in operations[queue.pop(0)].inputs:
                maker = self._maker.get(key, -1)
                if maker == origin:
                    return True
                if (
                    maker > origin
                    and maker not in seen
                    and (not repeats or operations[maker].call == call)
                ):
                    seen.add(maker)
                    queue.append(maker)
        return False

    def _done_again(
        self, operations: list[Operation], operation: Operation, counterpart: Key
    ) -> Calls:
        """The calls of earlier operations whose work the node of an operation does once more.

        The node reads what those read, in place of their result, which other nodes still read: of
        two transpositions torch makes one, and keeps the first one as well.
        """
        node = self._nodes.get(counterpart)
        keys = (key for key in operation.inputs if key in self._live)
        read = {self._final[key]: key for key in keys if key in self._final}
        if node is None or read.keys() <= set(node.inputs):
            return _NOBODY
        sources = self._sources(node)
        skipped = [key for now, key in read.items() if now not in sources]
        return _NOBODY.union(*(self._between(operations, key, sources) for key in skipped))

    def _sources(self, node: Node) -> set[Key]:
        """The captured tensors that a node is computed from, directly or through tensors that nobody captured."""
        found: set[Key] = set()
        waiting, seen = [*node.inputs], set[Key]()
        while waiting:
            key = waiting.pop()
            if key in self._captured:
                found.add(key)
            elif key not in seen and key in self._nodes:
                seen.add(key)
                waiting.extend(self._nodes[key].inputs)
        return found

    def _between(self, operations: list[Operation], key: Key, sources: set[Key]) -> Calls:
        """The calls of the operations that compute a tensor from others alone; nobody if it depends on more."""
        waiting, makers = [key], dict[int, None]()
        while waiting:
            maker = self._maker.get(waiting.pop())
            if maker is None or len(makers) > _LOOK_BACK:
                return _NOBODY
            if maker not in makers:
                makers[maker] = None
                reads = (each for each in operations[maker].inputs if each in self._live)
                waiting.extend(each for each in reads if self._final.get(each) not in sources)
        return frozenset(
            operations[maker].call for maker in makers if operations[maker].passed_on is None
        )

    def _reads(self, operation: Operation) -> frozenset[Key]:
        """Return the exported counterparts of the inputs of an operation, without those that do not vary."""
        return frozenset(self._final.get(key) for key in operation.inputs if key in self._live)


@dataclass(frozen=True, slots=True)
class _Entry:
    """The calls that own a node, and ``works``: these, and the calls whose work the node absorbed."""

    calls: Calls
    reason: Reason
    works: Calls


class _ExportedGraph:
    """The nodes of an exported graph by their places, as the rule of owners reads them.

    A node that computes a captured tensor has owners by it: only the consumers of other tensors
    count for their producers.
    """

    def __init__(self, nodes: list[Node], captured: Collection[Key]) -> None:
        self._nodes = nodes
        self._maker = {key: place for place, node in enumerate(nodes) for key in node.outputs}
        self._consumers: dict[int, list[int]] = {}
        for place, node in enumerate(nodes):
            for key in node.inputs:
                if key not in captured and key in self._maker:
                    self._consumers.setdefault(self._maker[key], []).append(place)

    def consumers(self, node: int) -> Iterable[int]:
        return self._consumers.get(node, ())

    def producers(self, node: int) -> Iterable[int]:
        return [self._maker[key] for key in self._nodes[node].inputs if key in self._maker]

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

    def served(place: int, near: Sequence[_Entry]) -> _Entry | None:
        """The calls that a node without captured tensors works for; no result may need it."""
        node, calls = (
            record.nodes[place],
            _NOBODY.union(*(entry.works for entry in near)) - {NO_CALL},
        )
        reason = Reason.FLOW if calls else Reason.SCOPE
        calls = calls or _calls_of(node, origins.unneeded)
        return _Entry(calls, reason, calls | _calls_of(node, origins.absorbed)) if calls else None

    complete(
        range(len(record.nodes)), entries, _ExportedGraph(record.nodes, origins.made.keys()), served
    )
    nobodys = _Entry(_NOBODY, Reason.FLOW, _NOBODY)
    found = (entries.get(place, nobodys) for place in range(len(record.nodes)))
    return [_ownership(record.log, entry.calls, entry.reason) for entry in found]


def _calls_of(node: Node, calls: Mapping[Key, set[int]]) -> Calls:
    """The calls for the outputs of a node."""
    return _NOBODY.union(*(calls.get(key, ()) for key in node.outputs)) - {NO_CALL}


def _captured_calls(node: Node, origins: Origins) -> tuple[Calls, Reason]:
    """The calls that computed the tensors of a node, or that other evidence names; nobody if none is known."""
    calls = _calls_of(node, origins.made)
    by_flow = not origins.placed.isdisjoint(node.outputs)
    if calls and not (by_flow and node.hint != NO_CALL):
        absorbed = _calls_of(node, origins.absorbed)
        if absorbed - calls or _differ(node, origins):
            return calls | absorbed, Reason.FUSED
        return calls, Reason.FLOW if by_flow else Reason.SCOPE
    if node.hint != NO_CALL:
        return frozenset({node.hint}), node.evidence
    return _NOBODY, Reason.FLOW


def _differ(node: Node, origins: Origins) -> bool:
    """Whether different calls made the outputs of a node: a sum of one module, and what the next one normalizes."""
    calls = [origins.made[key] for key in node.outputs if key in origins.made]
    return any(each != calls[0] for each in calls)


def _ownership(log: CallLog, calls: Calls, reason: Reason) -> Ownership:
    ordered = tuple(sorted(calls))
    if len(ordered) == 1:
        paths = log.owners(ordered[0])
    else:
        paths = tuple(dict.fromkeys(path for call in ordered for path in log.owners(call)))
    if reason == Reason.SCOPE and len({log.calls[call].path for call in ordered}) > 1:
        reason = Reason.SHARED
    return Ownership(paths or ("",), reason, ordered)
