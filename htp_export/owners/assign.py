"""Each node's owners, from what PyTorch ran and from what became of it.

A node of the exported graph computes some tensor. Where captured operations made the same tensor, the calls that ran
those operations own the node: one call as a rule, several where equal work was merged. Operations whose tensors are
nowhere in the graph any more were absorbed: a merged node did their work, so their calls own it as well. A node that
computes no captured tensor lies inside the work of the nodes that read it, and takes its owners from them.

Everything here is one walk over the operations and one over the nodes in each direction: linear in their number.
"""

from __future__ import annotations

from dataclasses import dataclass

from htp_export import tags
from htp_export.capture.calls import NO_CALL, CallLog
from htp_export.capture.record import Key, Node, Operation, Record

SCOPE = "scope"
SHARED = "shared"
FUSED = "fused"
FLOW = "flow"

Calls = frozenset[int]
_NOBODY: Calls = frozenset()


@dataclass(frozen=True, slots=True)
class Ownership:
    """Who owns one node, and how that is known.

    Attributes:
        paths: The owners' module paths in order of execution, never empty.
        reason: ``scope``, ``shared``, ``fused`` or ``flow``; see ``docs/owners.md``.
        calls: Indices of the calls that the paths come from.
    """

    paths: tuple[str, ...]
    reason: str
    calls: tuple[int, ...]


def varying(steps: list[Operation] | list[Node], inputs: set[Key]) -> set[Key]:
    """The tensors whose values depend on the values of ``inputs``; sizes of tensors do not count as their values."""
    live = set(inputs)
    for step in steps:
        if not step.shape_only and not live.isdisjoint(step.inputs):
            live.update(step.outputs)
    return live


def needed(operations: list[Operation], outputs: list[Key]) -> list[bool]:
    """For each operation, whether what the model returns depends on it."""
    wanted = set(outputs)
    marks = [False] * len(operations)
    for index in range(len(operations) - 1, -1, -1):
        operation = operations[index]
        if not wanted.isdisjoint(operation.outputs):
            marks[index] = True
            wanted.update(operation.inputs)
    return marks


class Origins:
    """For every tensor of the exported graph, the calls that computed it, and those whose work went into it.

    Attributes:
        made: Exported tensor → calls of the operations that made the same tensor.
        absorbed: Exported tensor → calls of further operations whose own tensors are gone.
    """

    def __init__(self, record: Record) -> None:
        self.made: dict[Key, set[int]] = {}
        self.absorbed: dict[Key, set[int]] = {}
        final, live = record.final, varying(record.operations, record.inputs)
        lost: dict[Key, tuple[Calls, frozenset[Key]]] = {}  # lost tensor → calls that it took, and what they read
        for operation, wanted in zip(record.operations, needed(record.operations, record.outputs), strict=True):
            if not wanted:
                continue
            calls, reads = _NOBODY, set()
            for key in operation.inputs:
                if key in lost:
                    calls, more = calls | lost[key][0], lost[key][1]
                    reads |= more
                elif key in final:
                    reads.add(final[key])
            for key in operation.outputs:
                here = final.get(key)
                if here is None:
                    if key in live:
                        lost[key] = (calls | {operation.call}, frozenset(reads))
                elif here not in reads:  # else it gave back what it read: eliminated, no node computes it
                    self.made.setdefault(here, set()).add(operation.call)
                    if calls:
                        self.absorbed.setdefault(here, set()).update(calls)


def assign(record: Record) -> list[Ownership]:
    """Owners of every node of the exported graph, in the order of ``record.nodes``."""
    origins = Origins(record)
    demand: dict[Key, set[int]] = {}  # tensor that no captured operation made → calls whose work reads it
    found: list[tuple[Calls, str] | None] = [None] * len(record.nodes)
    for index in range(len(record.nodes) - 1, -1, -1):
        node = record.nodes[index]
        calls, reason = _calls_of(node, origins, demand)
        if not calls:
            continue
        found[index] = calls, reason
        takes = calls.union(*(origins.absorbed.get(key, ()) for key in node.outputs))
        for key in node.inputs:
            if key not in origins.made:
                demand.setdefault(key, set()).update(takes)
    _fill_forward(record.nodes, found)
    return [_ownership(record.log, *(entry or (_NOBODY, FLOW))) for entry in found]


def _calls_of(node: Node, origins: Origins, demand: dict[Key, set[int]]) -> tuple[Calls, str]:
    made = _NOBODY.union(*(origins.made.get(key, ()) for key in node.outputs)) - {NO_CALL}
    if made:
        absorbed = _NOBODY.union(*(origins.absorbed.get(key, ()) for key in node.outputs)) - {NO_CALL}
        if absorbed - made and not _computed_above(node, origins):
            return made | absorbed, FUSED
        return made, SCOPE
    if node.hint != NO_CALL:
        return frozenset({node.hint}), SCOPE
    return _NOBODY.union(*(demand.get(key, ()) for key in node.outputs)) - {NO_CALL}, FLOW


def _computed_above(node: Node, origins: Origins) -> bool:
    return False


def _fill_forward(nodes: list[Node], found: list[tuple[Calls, str] | None]) -> None:
    """Give nodes that nothing reads the owners of what they read."""
    if all(found):
        return
    by_output: dict[Key, Calls] = {}
    for index, node in enumerate(nodes):
        entry = found[index]
        if entry is None:
            calls = _NOBODY.union(*(by_output.get(key, _NOBODY) for key in node.inputs))
            if calls:
                found[index] = entry = calls, FLOW
        if entry is not None:
            by_output.update(dict.fromkeys(node.outputs, entry[0]))


def _ownership(log: CallLog, calls: Calls, reason: str) -> Ownership:
    ordered = tuple(sorted(calls))
    if len(ordered) == 1:
        paths = log.owners(ordered[0])
    else:
        paths = tuple(dict.fromkeys(path for call in ordered for path in log.owners(call)))
    if reason == SCOPE and len({log.calls[call].path for call in ordered}) > 1:
        reason = SHARED
    return Ownership(paths or ("",), reason, ordered)


def common_module(ownership: Ownership) -> str:
    """The owner, or the deepest module above all owners."""
    return ownership.paths[0] if len(ownership.paths) == 1 else tags.common_ancestor(ownership.paths)
