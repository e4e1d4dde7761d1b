"""The difference of two states of a graph: which nodes replace which.

A node that remains computes the same as before. If it reads another value than before, the two
values are equal, and so are values with the same name. The value that replaces another one is the
recorded one, if the pass recorded it. Between these pairs are the removed nodes, and the nodes that
replace them. A node that is read in place of an equal one replaces that one, too. Nothing replaces
a removed node that returned its input.

A record alone makes no pair: a value that was replaced on the way to a constant has no consumer
left whose work the replacement could do.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import onnx_ir as ir

from htp_export.errors import HtpExportError
from htp_export.lineage.owner_rule import OwnerRule, Replacement, Work
from htp_export.lineage.records import last_replacement_of, replacement_of
from htp_export.lineage.tagging import NO_OWNERS, Owned
from htp_export.model.boundaries import dependence, given_values, reads_and_results
from htp_export.shapes.operator_kinds import (
    LAYOUT,
    RANDOM,
    SIZES_ONLY,
    base_op,
    is_standard,
    moves,
    operator_of,
    resembles,
    subgraphs,
    without_copies,
)
from htp_export.shapes.schemas import settings

_Slots = Sequence[ir.Value | None]


class _Seen(NamedTuple):
    """A node at the time of a snapshot.

    ``metadata`` is that of the node itself, which does not change after its removal.
    """

    inputs: _Slots
    outputs: Sequence[ir.Value]
    operator: tuple[object, ...]
    metadata: Mapping[str, str]


class Snapshot:
    """The nodes of a model at one time, with their inputs, outputs and owners."""

    def __init__(self, model: ir.Model) -> None:
        self.nodes: dict[ir.Node, _Seen] = {}
        self.makers: dict[ir.Value, ir.Node] = {}
        self.names: dict[ir.Value, str | None] = {}
        self._holders: dict[ir.Node, ir.Node] = {}
        self._works: dict[ir.Node, Work] = {}
        self._ends = {
            "inputs": [value.name for value in model.graph.inputs],
            "outputs": [value.name for value in model.graph.outputs],
        }
        self.results: dict[ir.Graph, tuple[ir.Value, ...]] = {}
        # read or computed value → the value that was recorded to replace it, up to this time
        self.replaced: dict[ir.Value, ir.Value] = {}
        self._add(model.graph, model.opset_imports)
        for function in model.functions.values():
            self._add(function.graph, function.opset_imports)
        self._dependence = [*reads_and_results(self.nodes)], given_values(model)

    @cached_property
    def live(self) -> Collection[ir.Value | None]:
        """The values that depend on values of the model's inputs, not only on their sizes."""
        return dependence(*self._dependence)

    def is_live(self, node: ir.Node) -> bool:
        """Whether an output of a node depends on values of the model's inputs."""
        return any(value in self.live for value in self.nodes[node].outputs)

    def work_of(self, node: ir.Node) -> Work:
        """The tags of a node; always the same object for a node."""
        if node not in self._works:
            self._works[node] = Work.of(self.nodes[node].metadata)
        return self._works[node]

    def holders(self, node: ir.Node) -> tuple[ir.Node, ...]:
        """The node whose subgraph contains a node, if there is one."""
        return (self._holders[node],) if node in self._holders else ()

    def holds(self, holder: ir.Node, node: ir.Node) -> bool:
        """Whether a node is in a subgraph of another one, at any depth."""
        around = self._holders.get(node)
        while around is not None and around is not holder:
            around = self._holders.get(around)
        return around is holder

    def equals(self, other: Snapshot) -> bool:
        """Whether both have the same nodes, with the same inputs, outputs and attributes, in order."""
        return [*self.nodes.items()] == [*other.nodes.items()]

    def check(self, before: Snapshot) -> None:
        """Check the contract of passes: inputs and outputs keep their names, tensors have producers.

        ``optimize(verify=True)`` checks the level of a pass, which is a part of the contract, too.
        """
        for side, names in self._ends.items():
            if names != before._ends[side]:
                raise HtpExportError(
                    f"the {side} of the model were {before._ends[side]}, and are {names}"
                )
        for node, seen in self.nodes.items():
            for value in seen.inputs:
                if value is not None and not self.is_available(value):
                    raise HtpExportError(
                        f"{node.op_type} {node.name!r} reads {value.name!r}, which has no producer"
                    )
        for results in self.results.values():
            for value in results:
                if not self.is_available(value):
                    raise HtpExportError(f"the output {value.name!r} has no producer")

    def is_available(self, value: ir.Value) -> bool:
        """Whether a value is computed, stored, or an input."""
        return value in self.makers or value.is_graph_input() or value.is_initializer()

    def _add(
        self, graph: ir.Graph, versions: Mapping[str, int], holder: ir.Node | None = None
    ) -> None:
        self.results[graph] = tuple(graph.outputs)
        for node in graph:
            operator = (node.domain, node.op_type, node.overload, *settings(node, versions))
            self.nodes[node] = _Seen(node.inputs, node.outputs, operator, node.metadata_props)
            if holder is not None:
                self._holders[node] = holder
            for value in node.outputs:
                self.makers[value], self.names[value] = node, value.name
            stored = (read for read in node.inputs if read is not None and not read.producer())
            for known in (*node.outputs, *stored):  # other inputs are outputs of nodes
                replacement = replacement_of(known)
                if replacement is not None:
                    self.replaced[known] = replacement
            for body in subgraphs(node):
                self._add(body, versions, node)


@dataclass(frozen=True)
class PassDifference:
    """The changes of a graph by a pass."""

    before: Snapshot
    after: Snapshot
    removed: Mapping[ir.Node, None]  # nodes that were removed or changed in place, in order
    added: Mapping[ir.Node, None]  # new nodes, and those that were changed in place, in order
    # old value → the equal value that replaces it
    equal: dict[ir.Value, ir.Value] = field(default_factory=dict)
    # nodes that remain, and also replace others
    merged: dict[ir.Node, None] = field(default_factory=dict)

    @classmethod
    def between(cls, before: Snapshot, after: Snapshot) -> PassDifference:
        """Compare two snapshots of one model."""
        old, new = before.nodes, after.nodes
        changed = {
            node
            for node, seen in old.items()
            if node in new and seen.operator != new[node].operator
        }
        removed = dict.fromkeys(node for node in old if node not in new or node in changed)
        added = dict.fromkeys(node for node in new if node not in old or node in changed)
        difference = cls(before, after, removed, added)
        difference._pair(changed)
        return difference

    def __bool__(self) -> bool:
        return bool(self.removed or self.added or self.equal)

    def check_records(self) -> None:
        """Compare the recorded replacements with the inputs of nodes before and after.

        Raises:
            HtpExportError: If the recorded replacement of a tensor is not the tensor that its
                consumers read.
        """
        for node, seen in self.before.nodes.items():
            if node not in self.after.nodes:
                continue
            for was, now in zip(seen.inputs, self.after.nodes[node].inputs, strict=False):
                if was is None or now is None or was is now:
                    continue
                if now.is_initializer():  # a constant for this consumer only
                    continue
                recorded = replacement_of(was)
                if recorded is None or recorded is self.before.replaced.get(was):
                    continue
                if last_replacement_of(recorded) is not last_replacement_of(now):
                    raise HtpExportError(
                        f"{node.op_type} {node.name!r} reads {now.name!r} in place of {was.name!r}, and "
                        f"{recorded.name!r} was recorded to replace it"
                    )

    def _pair(self, changed: Collection[ir.Node]) -> None:
        """Pair old values with the values that replace them: by consumers, names and records."""
        for node, seen in self.before.nodes.items():
            if node in self.after.nodes and node not in changed:
                self._pair_slots(seen.inputs, self.after.nodes[node].inputs)
        for graph, results in self.before.results.items():
            self._pair_slots(results, self.after.results.get(graph, ()))
        for node in changed:  # changed in place; it may produce the same result
            for value in self.before.nodes[node].outputs:
                self.equal[value] = value
        self._pair_names()
        self._pair_by_node_names()
        self._pair_chains()

    def _pair_values(self, old: ir.Value, new: ir.Value) -> None:
        """Pair an old value with the one that was recorded to replace it, or else with ``new``."""
        self.equal[old] = self._recorded.get(old, new)

    @cached_property
    def _recorded(self) -> dict[ir.Value, ir.Value]:
        """The pairs that the pass recorded: old value → the last one that replaces it."""
        pairs: dict[ir.Value, ir.Value] = {}
        for value in self.before.makers:
            recorded = replacement_of(value)
            if recorded is None or recorded is self.before.replaced.get(value):
                continue
            last = last_replacement_of(recorded)
            if last is not value and self.after.is_available(last):
                pairs[value] = last
        return pairs

    def _pair_names(self) -> None:
        """Pair outputs of removed nodes with outputs of new nodes of the same name."""
        removed: dict[str, ir.Value] = {}
        for node in self.removed:
            for value in self.before.nodes[node].outputs:
                name = self.before.names[value]
                if name:
                    removed[name] = value
        for node in self.added:
            for value in self.after.nodes[node].outputs:
                old = removed.get(value.name or "")
                if old is not None and old not in self.equal:
                    self._pair_values(old, value)

    def _pair_chains(self) -> None:
        """Pair outputs of removed nodes with remaining values, if equal nodes read equal values.

        Of two equal chains of nodes, consumers pair only the last results: inner values have no
        other consumers.
        """
        twins: dict[ir.Node, ir.Node] = {}
        for old, new in list(self.equal.items()):
            for was, now in _twins(self, old, new):
                twins.setdefault(self.before.makers[was], self.after.makers[now])
        for gone in self.removed:  # in order, so that the inputs of a node are paired first
            remaining = twins.get(gone)
            if remaining is None or is_standard(gone, *RANDOM):
                continue
            seen, twin = self.before.nodes[gone], self.after.nodes[remaining]
            if seen.operator == twin.operator and self.same(gone, remaining):
                for old, new in zip(seen.outputs, twin.outputs, strict=False):
                    if old not in self.equal:
                        self._pair_values(old, new)

    def _pair_by_node_names(self) -> None:
        """Pair outputs of a removed node and a new one with the same name and operator.

        Only if nothing else pairs them. A quantizer may replace a node so that it outputs another
        precision of the tensor, under another name.
        """
        named: dict[tuple[str, str], ir.Node] = {}
        for node in self.removed:
            if node.name and node not in self.added:
                named[node.name, node.op_type] = node
        for node in self.added:
            gone = named.get((str(node.name), node.op_type))
            if gone is None:
                continue
            outputs = self.before.nodes[gone].outputs, self.after.nodes[node].outputs
            for was, now in zip(*outputs, strict=False):
                if was not in self.equal and now.uses():
                    self._pair_values(was, now)

    def _pair_slots(self, old: _Slots, new: _Slots) -> None:
        if old == new:
            return
        for was, now in zip(old, new, strict=False):
            if was is not now and was is not None and now is not None:
                self._pair_values(was, now)

    def neighbours_of(self, nodes: Iterable[ir.Node]) -> dict[ir.Node, None]:
        """The consumers and producers of some nodes, and the nodes whose subgraphs contain them."""
        around: dict[ir.Node, None] = {}
        for node in nodes:
            for near in (node.successors(), node.predecessors(), self.after.holders(node)):
                around.update(dict.fromkeys(near))
        return around

    def same(self, gone: ir.Node, remaining: ir.Node) -> bool:
        """Whether a removed node and a remaining one have the same operator and equal inputs."""
        old, new = self.before.nodes[gone], self.after.nodes[remaining]
        if (gone.domain, gone.op_type) != (remaining.domain, remaining.op_type):
            return False
        if len(old.inputs) != len(new.inputs):
            return False
        for was, now in zip(old.inputs, new.inputs, strict=True):
            is_equal = was is now or (was is not None and self.equal.get(was) is now)
            if not is_equal:
                return False
        return True

    def counterpart(self, value: ir.Value, remaining: Collection[ir.Value]) -> ir.Value | None:
        """The remaining value that equals an old one; None without one.

        The consumers of the old value may be removed, too: of two nodes in a row that returned
        their input, no remaining node reads the result of the first.
        """
        seen = {value}
        while value not in remaining:
            equal = self.equal.get(value) or replacement_of(value) or self._copied(value)
            if equal is None or equal in seen:
                return None
            seen.add(equal)
            value = equal
        return value

    def _copied(self, value: ir.Value) -> ir.Value | None:
        """The value that an ``Identity`` copied."""
        maker = self.before.makers.get(value)
        if maker is None or not is_standard(maker, "Identity"):
            return None
        return self.before.nodes[maker].inputs[0]

    def replaced(self, value: ir.Value) -> tuple[list[ir.Node], set[ir.Value]]:
        """The removed nodes that produce an old value, back to paired values, and these values."""
        return _slice(value, self.before, self.removed, self.equal)

    def replacing(self, value: ir.Value) -> list[ir.Node]:
        """The new nodes that produce a value, back to values that replace an old one."""
        return _slice(value, self.after, self.added, self._replacing_values)[0]

    @cached_property
    def _replacing_values(self) -> frozenset[ir.Value]:
        return frozenset(self.equal.values())


def _slice(
    value: ir.Value, snapshot: Snapshot, among: Collection[ir.Node], stops: Collection[ir.Value]
) -> tuple[list[ir.Node], set[ir.Value]]:
    """The subset of nodes that a value depends on, and the values at which the search ended.

    The search ends at values of ``stops``, and at values that other nodes produce.
    """
    behind: dict[ir.Node, None] = {}
    ends: set[ir.Value] = set()
    queue = [value]
    while queue:
        current = queue.pop()
        maker = snapshot.makers.get(current)
        if maker is None or maker not in among or (current in stops and current is not value):
            ends.add(current)
        elif maker not in behind:
            behind[maker] = None
            queue.extend(read for read in snapshot.nodes[maker].inputs if read is not None)
    return list(behind), ends


@dataclass(frozen=True)
class _NodesAfter:
    """The graph after a change, for the rule of owners."""

    snapshot: Snapshot
    scope: Collection[ir.Node] | None = None  # the nodes that count as neighbours; all if None

    def consumers(self, node: ir.Node) -> Iterable[ir.Node]:
        return self._in_scope(node.successors())

    def producers(self, node: ir.Node) -> Iterable[ir.Node]:
        return self._in_scope(node.predecessors())

    def _in_scope(self, nodes: Iterable[ir.Node]) -> Iterable[ir.Node]:
        return nodes if self.scope is None else [node for node in nodes if node in self.scope]

    def holders(self, node: ir.Node) -> Iterable[ir.Node]:
        return self.snapshot.holders(node)

    def is_live(self, node: ir.Node) -> bool:
        return self.snapshot.is_live(node)

    def reads_size(self, node: ir.Node) -> bool:
        return node.op_type in SIZES_ONLY


def owners_after(
    difference: PassDifference, rule: OwnerRule, part: Collection[ir.Node] | None = None
) -> dict[ir.Node, Owned]:
    """The owners of nodes that a change added or merged others into; set ``merged`` of the difference.

    Args:
        difference: The change.
        rule: The rule of owners.
        part: The nodes that the change was limited to, or None. A new node that replaces none has
            the owners of its neighbours among these and the new nodes, or else of any neighbours.
    """
    replacements = _Replacements(difference).find()
    new = dict.fromkeys(difference.added)
    for each in replacements:
        new.setdefault(each.node)
    known: dict[ir.Node, Owned] = {}
    for node in difference.neighbours_of(new):
        owners = Owned.of(node.metadata_props)
        if node not in new and owners.paths:
            known[node] = owners
    added = [*difference.added]
    owned = known
    if part is not None:
        owned = rule.owners(
            replacements, owned, added, _NodesAfter(difference.after, {*part, *added})
        )
        replacements = []
    owned = rule.owners(replacements, owned, added, _NodesAfter(difference.after))
    return {node: owned.get(node, NO_OWNERS) for node in new}


class _Replacements:
    """For each node after a change, the nodes that it replaces."""

    def __init__(self, difference: PassDifference) -> None:
        self._difference = difference
        self._before, self._after = difference.before, difference.after
        # node → the nodes that it replaces, by result of the change
        self._results: defaultdict[ir.Node, list[list[ir.Node]]] = defaultdict(list)
        # results by identity → the tags of their nodes, once for all nodes that replace them
        self._works: dict[tuple[int, ...], list[Work]] = {}

    def find(self) -> list[Replacement[ir.Node]]:
        """Follow each pair of equal values back to the nodes that compute them."""
        added = self._difference.added
        for old, new in list(self._difference.equal.items()):
            maker = self._after.makers.get(new)
            if maker is None:  # an input or an initializer now
                continue
            replaced, ends = self._difference.replaced(old)
            if maker in added:
                self._replace_by_new(new, replaced)
                new = without_copies(new)  # a copy that keeps the name of a result
            is_old = self._after.makers.get(new) not in added
            if replaced and new not in ends and is_old:
                for was, now in _twins(self._difference, old, new):
                    self._replace_by_twin(was, now)
        for node in added:
            if len(self._results.get(node, ())) > 1 and not self._after.is_live(node):
                del self._results[node]  # it computes sizes for results, not the results
        return [self._replacement(node) for node in self._results]

    def _replacement(self, node: ir.Node) -> Replacement[ir.Node]:
        """The nodes that a node replaces: by result, or together if it does different work for each.

        A product of queries, keys and values does a part of the work of all three layers. A mask
        that is computed once does the work of each module as a whole.
        """
        results = self._results[node]
        if node in self._difference.added and not self._is_equal_work(node, results):
            return Replacement(node, [self._works_of(*results)])
        return Replacement(node, [self._works_of(result) for result in results])

    def _works_of(self, *results: list[ir.Node]) -> list[Work]:
        """The tags of the nodes of some results; always the same object for the same results."""
        key = tuple(map(id, results))
        if key not in self._works:
            nodes = dict.fromkeys(itertools.chain(*results))
            self._works[key] = [self._before.work_of(node) for node in nodes]
        return self._works[key]

    def _is_equal_work(self, node: ir.Node, results: Sequence[Sequence[ir.Node]]) -> bool:
        """Whether a node does the same work for all owners of some results.

        If nodes of its operator were replaced, all owners computed one of their tensors. Otherwise,
        a node of one output serves all of them alike, as an Expand of a mask does; a Split does not.
        """
        replaced = list(itertools.chain(*results))
        owners = {self._before.work_of(old).owners for old in replaced} - {()}
        if len(owners) < 2:
            return True
        steps = defaultdict[int, set[tuple[str, ...]]](set)
        of_operator = set[int]()
        for old in replaced:
            number = self._numbers[old]
            steps[number].add(self._before.work_of(old).owners)
            if resembles(operator_of(node), operator_of(old)):
                of_operator.add(number)
        if not of_operator:
            return len(node.outputs) == 1
        return any(owners <= steps[number] for number in of_operator)

    @cached_property
    def _numbers(self) -> dict[ir.Node, int]:
        """Removed node → a number, equal for nodes that computed equal tensors."""
        numbers: dict[ir.Node, int] = {}
        # operator and inputs → the nodes with them, whose attributes may differ
        alike = defaultdict[tuple[object, ...], list[ir.Node]](list)
        for node, seen in self._before.nodes.items():
            if node not in self._difference.removed:
                continue
            key = node.domain, node.op_type, *(self._input(value, numbers) for value in seen.inputs)
            for other in alike[key]:
                if self._before.nodes[other].operator == seen.operator:
                    numbers[node] = numbers[other]
                    break
            else:
                numbers[node] = len(numbers)
                alike[key].append(node)
        return numbers

    def _input(self, value: ir.Value | None, numbers: Mapping[ir.Node, int]) -> object:
        """An input of a removed node, equal for equal tensors."""
        if value is None:
            return None
        maker = self._before.makers.get(value)
        if maker is None or maker not in numbers:
            return self._difference.equal.get(value, value)
        return numbers[maker], value.index()

    def _replace_by_new(self, new: ir.Value, replaced: list[ir.Node]) -> None:
        """Record that the new nodes that produce a value replace some nodes together."""
        # Nodes that compute on constants and sizes count only if there are no others.
        live = [*filter(self._before.is_live, replaced)] or replaced
        maker = self._after.makers[new]
        for node in self._difference.replacing(new):
            if node is maker or not _is_inserted(node, replaced):
                self._results[node].append(live)

    def _replace_by_twin(self, was: ir.Value, now: ir.Value) -> None:
        """Record that the producer of an equal value also replaces a removed node."""
        gone, remaining = self._before.makers[was], self._after.makers[now]
        if remaining in self._difference.added:
            # A new node replaces one of several equal chains, and thereby all of them.
            replaced, _ = self._difference.replaced(was)
            for node in self._difference.replacing(now):
                self._results[node].append(replaced)
            return
        if not self._before.is_live(gone) and not self._difference.same(gone, remaining):
            return  # sizes may come from any equal tensor
        if self._before.holds(gone, remaining):
            return  # an inlined branch: the node that held it only returned its results
        work, other = self._before.work_of(gone), self._before.work_of(remaining)
        if (work.owners, work.calls) != (other.owners, other.calls):
            self._results[remaining] += [[remaining], [gone]]
            self._difference.merged[remaining] = None


def _is_inserted(node: ir.Node, replaced: Collection[ir.Node]) -> bool:
    """Whether a new node moves numbers or changes their precision, and no replaced node does."""
    operator = operator_of(node)
    if not moves(operator):
        return False
    kinds = LAYOUT if base_op(operator) in LAYOUT else {base_op(operator)}
    return not any(base_op(operator_of(gone)) in kinds for gone in replaced)


def _twins(
    difference: PassDifference, old: ir.Value, new: ir.Value
) -> Iterator[tuple[ir.Value, ir.Value]]:
    """An output of a removed node and the equal output of another node, and such pairs before them.

    The search goes back along both, as long as the nodes have the same operator.
    """
    before, after = difference.before, difference.after
    queue, seen = [(old, new)], set[ir.Node]()
    while queue:
        was, now = queue.pop()
        gone, remaining = before.makers.get(was), after.makers.get(now)
        if gone is None or remaining is None or gone is remaining:
            continue
        if gone not in difference.removed or gone in seen:
            continue
        seen.add(gone)
        yield was, now
        same_operator = (gone.domain, gone.op_type) == (remaining.domain, remaining.op_type)
        if not same_operator or gone.op_type in SIZES_ONLY:
            continue
        inputs = before.nodes[gone].inputs, after.nodes[remaining].inputs
        for one, other in zip(*inputs, strict=False):
            if one is None or other is None or one is other:
                continue
            if one not in difference.equal:
                queue.append((one, other))
