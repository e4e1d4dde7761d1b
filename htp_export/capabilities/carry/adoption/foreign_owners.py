"""The owners of the nodes of a file that others exported.

The engine of `carry` says which original nodes a node replaces. What it then chooses by operators alone, or shares out
among modules, is not known here, as the file was not made from the original: names decide, if they are proved, and
otherwise nothing does.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from htp_export.capabilities.carry.adoption.foreign_alignment import ForeignAlignment
from htp_export.capabilities.carry.adoption.name_scopes import NameScopes, Scope
from htp_export.capabilities.carry.counterparts import FLOATS, LEVELS
from htp_export.capabilities.carry.graph_summary import NOTHING, SummaryNode
from htp_export.capabilities.carry.ownership import Owned, owners_after
from htp_export.capabilities.carry.replaced_nodes import replaced_nodes
from htp_export.format.call_tree import CallTree
from htp_export.format.reasons import Reason
from htp_export.format.tags import common_ancestor, is_under
from htp_export.shapes.operator_kinds import IN_PLACE, LAYOUT, SIZES_ONLY, base_op, moves, resembles

__all__ = ["foreign_owners"]


def foreign_owners(
    alignment: ForeignAlignment, scopes: Sequence[Scope | None], tree: CallTree, holders: Mapping[int, str]
) -> list[Owned]:
    """The owners of every node; those that are not known have the reason ``unknown``.

    Args:
        alignment: The counterparts of its tensors.
        scopes: The scopes in the names of the nodes.
        tree: The calls of the modules.
        holders: Original weight → the module that holds it as a parameter.
    """
    return _Foreign(alignment, scopes, tree, holders).owners()


class _Foreign:
    def __init__(
        self, alignment: ForeignAlignment, scopes: Sequence[Scope | None], tree: CallTree, holders: Mapping[int, str]
    ) -> None:
        self._known, self._scopes, self._tree, self._holders = alignment, scopes, tree, holders
        self._before, self._after = alignment.before, alignment.after
        self._works = [
            replace(work, nodes=self._on_the_way(node, work.nodes), among=self._on_the_way(node, work.among))
            for node, work in zip(self._after.nodes, replaced_nodes(alignment), strict=True)
        ]
        self._passing = defaultdict[int, list[int]](list)
        for index, node in enumerate(self._after.nodes):
            if self._gives_back(index):
                self._passing[alignment.numbers.current(alignment.counterpart[node.outputs[0]])].append(index)

    def owners(self) -> list[Owned]:
        settled = self._by_parameters()
        open_nodes = [index for index in range(len(self._works)) if index not in settled and self._is_open(index)]
        first = owners_after(self._before, self._after, self._works, self._tree, settled)
        by_weight = {index: owned for index in open_nodes if (owned := self._by_weight(index)) is not None}
        names = self._names([by_weight.get(k, entry) for k, entry in enumerate(first)], {*open_nodes} - {*by_weight})
        named = {index: self._module_by_name(index, names) for index in open_nodes if index not in by_weight}
        paths = {index: entry.paths for index, entry in enumerate(first) if index not in open_nodes}
        paths |= {index: owned.paths for index, owned in by_weight.items()}
        paths |= {index: (module,) for index, module in named.items() if module is not None}
        for index in open_nodes:
            evident = by_weight.get(index) or self._by_name(index, named[index], paths)
            settled[index] = evident or Owned((common_ancestor(self._candidates(index)),), Reason.UNKNOWN)
        found = owners_after(self._before, self._after, self._works, self._tree, settled)
        self._divide_copies(found)
        self._check_shares(found)
        self._check_inserted(found, names)
        return [entry if entry.paths else Owned(("",), Reason.UNKNOWN) for entry in found]

    def _candidates(self, index: int) -> list[str]:
        """The modules that may own a node."""
        return [*dict.fromkeys(path for old in self._works[index].among for path in self._before.nodes[old].owners)]

    def _readers(self, index: int) -> list[int]:
        return [r for v in self._after.nodes[index].outputs if v != NOTHING for r in self._after.readers[v]]

    # --- what is not decided by weights, values and structure ---

    def _is_open(self, index: int) -> bool:
        node, work = self._after.nodes[index], self._works[index]
        if self._is_shared(node) and len(self._candidates(index)) > 1:
            return bool(work.nodes) or not moves(node.op)
        if work.nodes:
            unclear = work.chosen or moves(node.op)  # which of several layout operators it is, values do not say
            return self._misses_weights(index) or (unclear and self._several(work.nodes))
        lives = any(v != NOTHING and self._after.live[v] for v in node.outputs)
        return lives and not work.ends and not moves(node.op, views=True)

    def _misses_weights(self, index: int) -> bool:
        """Whether a node reads a weight, and the original nodes that read it are none of those that it replaces."""
        weights = [w for v in self._after.nodes[index].inputs if v != NOTHING for w in self._known.weights_of(v)]
        readers = {reader for weight in weights for reader in self._before.readers[weight]}
        return bool(readers) and readers.isdisjoint(self._works[index].nodes)

    def _several(self, part: Sequence[int]) -> bool:
        return len({(self._before.nodes[old].owners, self._before.nodes[old].call) for old in part}) > 1

    def _is_shared(self, node: SummaryNode) -> bool:
        """Whether a node is next to others that do a part of the same work: a tensor between them is not known."""
        passed = (v for v in (*node.reads, *(v for v in node.outputs if v != NOTHING and self._after.readers[v])))
        return any(v != NOTHING and self._after.live[v] and not self._known.numbers_of(v) for v in passed)

    def _by_parameters(self) -> dict[int, Owned]:
        """Nodes that replace none, as the original has their results as constants, and read one parameter."""
        found = {}
        for index, (node, work) in enumerate(zip(self._after.nodes, self._works, strict=True)):
            numbers = set[int]().union(*(self._known.weights_of(v) for v in node.inputs if v != NOTHING))
            holders = {self._holders[original] for original in numbers if original in self._holders}
            lives = any(v != NOTHING and self._after.live[v] for v in node.outputs)
            if not lives and not work.nodes and not moves(node.op) and len(holders) == 1:
                found[index] = Owned((holders.pop(),), Reason.PARAMETERS)
        return found

    def _by_weight(self, index: int) -> Owned | None:
        """The owners of the one original node that computes with the same weights, if the node reads no more."""
        node, number = self._after.nodes[index], self._known.numbers.number
        weights = {number[original] for v in node.inputs if v != NOTHING for original in self._known.weights_of(v)}
        if not weights or moves(node.op):
            return None
        products = [
            old
            for old in self._works[index].among
            if weights & {number[v] for v in self._before.nodes[old].inputs if v != NOTHING}
            and resembles(node.op, self._before.nodes[old].op)
        ]
        if not products or not self._reads_no_more(index, products):
            return None
        nodes = [self._before.nodes[old] for old in products]
        paths = tuple(dict.fromkeys(path for old in nodes for path in old.owners))
        return Owned(
            paths, Reason.INITIALIZER, self._tree.encode_merged_calls(paths, [(old.owners, old.call) for old in nodes])
        )

    # --- names ---

    def _names(self, found: Sequence[Owned], open_nodes: Container[int]) -> NameScopes:
        known = [
            (scope, entry.paths)
            for index, (scope, entry) in enumerate(zip(self._scopes, found, strict=True))
            if scope is not None and index not in open_nodes and entry.reason != Reason.INSERTED and entry.paths
        ]
        return NameScopes(known, {path for node in self._before.nodes for path in node.owners})

    def _module_by_name(self, index: int, names: NameScopes) -> str | None:
        """The module for which the scope of a node stands, if it may own the node."""
        module = names.module(self._scopes[index])
        return module if module in self._candidates(index) else None

    def _by_name(self, index: int, module: str | None, paths: Mapping[int, tuple[str, ...]]) -> Owned | None:
        """The owner of a node by its name, unless a consumer is in a module that does not read from there."""
        op = self._after.nodes[index].op
        if module is None or (moves(op) and base_op(op) not in LAYOUT):  # casts are named after tensors, not modules
            return None
        mine = [old for old in self._works[index].among if self._before.nodes[old].owners == (module,)]
        near = (_is_near(module, paths[reader]) for reader in self._readers(index) if reader in paths)
        inside = {other for other, owners in paths.items() if owners == (module,)}
        if not self._reads_no_more(index, mine, inside) or not all(near):
            return None
        calls = [(self._before.nodes[old].owners, self._before.nodes[old].call) for old in mine]
        return Owned((module,), Reason.NODE, self._tree.encode_merged_calls((module,), calls))

    def _reads_no_more(self, index: int, part: Sequence[int], inside: Container[int] = ()) -> bool:
        """Whether a node reads and gives no more tensors than original nodes: otherwise it computes others, too.

        ``inside``: Nodes that do a part of the same work; what is read from them does not count.
        """
        node, before, after = self._after.nodes[index], self._before, self._after
        number = self._known.numbers.number
        made = {number[v] for old in part for v in before.nodes[old].outputs if v != NOTHING}
        read = {number[v] for old in part for v in before.nodes[old].reads if v != NOTHING and before.live[v]} - made
        given = {
            number[v]
            for old in part
            for v in before.nodes[old].outputs
            if v != NOTHING and (v in before.outputs or any(reader not in part for reader in before.readers[v]))
        }
        live = [v for v in node.reads if v != NOTHING and after.live[v]]
        reads = {after.maker[v] if after.maker[v] != NOTHING else -2 - v for v in live if after.maker[v] not in inside}
        gives = {v for v in node.outputs if v != NOTHING and (after.readers[v] or v in after.outputs)}
        return len(reads) <= len(read) and len(gives) <= len(given)

    # --- nodes without a counterpart ---

    def _check_inserted(self, found: list[Owned], names: NameScopes) -> None:
        """Only an operator that keeps its input's numbers serves its consumers; other nodes are not known."""
        for index in range(len(found) - 1, -1, -1):
            entry, node = found[index], self._after.nodes[index]
            if entry.reason != Reason.INSERTED or not self._known.parts.keys().isdisjoint(node.inputs):
                continue
            repeated = self._repeated(index)
            if repeated is not None:
                found[index] = repeated
            elif not self._serves(found, index):
                around, named = [*entry.paths, *self._around(found, index)], names.module(self._scopes[index])
                if base_op(node.op) in LAYOUT and self._lives(node) and named in around:
                    found[index] = Owned((str(named),), Reason.NODE)
                else:
                    found[index] = Owned((common_ancestor(around),), Reason.UNKNOWN)

    def _lives(self, node: SummaryNode) -> bool:
        return any(v != NOTHING and self._after.live[v] for v in node.outputs)

    def _serves(self, found: Sequence[Owned], index: int) -> bool:
        """Whether an inserted node is certainly of the module that its neighbours say."""
        node, paths = self._after.nodes[index], set(found[index].paths)
        consumers = [found[reader] for reader in self._readers(index)]
        if not moves(node.op) or base_op(node.op) in SIZES_ONLY or any(c.reason == Reason.UNKNOWN for c in consumers):
            return False
        if not node.inputs:
            return bool(paths)  # a constant may be of several modules
        if len(paths) != 1:
            return False
        if not self._lives(node):
            return self._is_weight(node.inputs[0])
        makers = self._makers_paths(found, index)
        if self._changes_precision(node):
            number = self._known.numbers.current(self._known.counterpart[node.outputs[0]])
            idle = {path for old in self._idle(number) for path in self._owners(old)}
            return idle <= paths and (not self._ends_quantized(index) or set(makers) == paths)
        consumed = {path for consumer in consumers for path in consumer.paths}
        ends = any(v in self._after.outputs for v in node.outputs)
        return set(makers) == paths and (consumed == paths or not consumed) and not ends

    def _is_weight(self, value: int) -> bool:
        """Whether a tensor that no input has an effect on has floats or levels, and is no index or size."""
        maker = self._after.maker[value] if value != NOTHING else NOTHING
        if maker != NOTHING and not moves(self._after.nodes[maker].op):
            return False
        return value != NOTHING and self._after.shape(value)[1] in FLOATS | LEVELS

    def _ends_quantized(self, index: int) -> bool:
        """Whether a node dequantizes what another one computes with integers: it belongs to that one."""
        node = self._after.nodes[index]
        maker = self._after.maker[node.inputs[0]]
        return base_op(node.op) == "DequantizeLinear" and maker != NOTHING and not moves(self._after.nodes[maker].op)

    def _changes_precision(self, node: SummaryNode) -> bool:
        """Whether a node quantizes, dequantizes, or casts between floats: what tools insert between modules."""
        base = base_op(node.op)
        if base not in IN_PLACE:
            return base == "DynamicQuantizeLinear"
        kinds = {self._after.shape(value)[1] for value in (node.inputs[0], node.outputs[0]) if value != NOTHING}
        return base.endswith("Linear") or (base == "Cast" and len(kinds) > 1 and kinds <= FLOATS)

    def _makers_paths(self, found: Sequence[Owned], index: int) -> list[str]:
        """The owners of the nodes that compute what a node reads, before inserted ones; the root for an input."""
        paths, queue, seen = dict[str, None](), [index], set[int]()
        while queue:
            for value in self._after.nodes[queue.pop()].reads:
                if value == NOTHING or not self._after.live[value] or value in seen:
                    continue
                seen.add(value)
                maker = self._after.maker[value]
                if maker != NOTHING and found[maker].reason == Reason.INSERTED:
                    queue.append(maker)
                else:
                    paths.update(dict.fromkeys(("",) if maker == NOTHING else found[maker].paths))
        return [*paths]

    def _repeated(self, index: int) -> Owned | None:
        """The owner of a node that gives back its input, if the original has as many such nodes for this tensor."""
        node, numbers = self._after.nodes[index], self._known.numbers
        if not self._gives_back(index):
            return None
        number = numbers.current(self._known.counterpart[node.outputs[0]])
        mine = [k for k in self._passing.get(number, ()) if base_op(self._after.nodes[k].op) == base_op(node.op)]
        theirs = [old for old in self._idle(number) if base_op(self._before.nodes[old].op) == base_op(node.op)]
        if not theirs or len(theirs) != len(mine):
            return None
        old = self._before.nodes[theirs[mine.index(index)]]
        return Owned(old.owners, Reason.VALUES, old.call)

    def _idle(self, number: int) -> list[int]:
        """The original nodes that give back a tensor."""
        numbers = self._known.numbers
        makers = (self._before.maker[value] for value in numbers.members.get(number, ()))
        return [old for old in makers if old != NOTHING and numbers.idle[old]]

    def _gives_back(self, index: int) -> bool:
        node, known = self._after.nodes[index], self._known
        if len(node.outputs) != 1 or node.outputs[0] == NOTHING:
            return False
        number = known.counterpart[node.outputs[0]]
        same = [v for v in node.inputs if v != NOTHING and number != NOTHING and known.counterpart[v] == number]
        return any(self._after.shape(v) == self._after.shape(node.outputs[0]) for v in same)

    # --- several nodes for one original ---

    def _has_a_loose_neighbour(self, index: int) -> bool:
        """Whether a node next to one moves numbers, and is none of the original: it may be a part of a fused one."""
        node = self._after.nodes[index]
        makers = {self._after.maker[v] for v in node.inputs if v != NOTHING and self._after.live[v]} - {NOTHING}
        return any(
            not self._works[k].nodes and moves(other.op, views=True) and not self._changes_precision(other)
            for k in (*makers, *self._readers(index))
            if self._lives(other := self._after.nodes[k])
        )

    def _misses_producer(self, index: int) -> bool:
        """Whether a node gives an original tensor, and does not replace the node that computes it."""
        node, numbers, work = self._after.nodes[index], self._known.numbers, set(self._works[index].nodes)
        for value in node.outputs if work and not moves(node.op) else ():
            if value != NOTHING and self._known.exact[value]:
                number = numbers.current(self._known.counterpart[value])
                makers = {self._before.maker[member] for member in numbers.members.get(number, ())} - {NOTHING}
                if makers and makers.isdisjoint(work):
                    return True
        return False

    def _movers(self) -> tuple[dict[int, int], Counter[int]]:
        """Layout operator → the number of its result; number → original ones for it, less those of the other file."""
        numbers, moved = self._known.numbers, dict[int, int]()
        for index, node in enumerate(self._after.nodes):
            number = self._known.counterpart[node.outputs[0]] if node.outputs else NOTHING
            if base_op(node.op) in LAYOUT and self._lives(node):
                moved[index] = numbers.current(number)  # those between tensors that are not known are in doubt, too
        movers = Counter(numbers.number[node.outputs[0]] for node in self._before.nodes if base_op(node.op) in LAYOUT)
        movers.subtract(moved.values())
        return moved, movers

    def _agrees(self, found: Sequence[Owned], index: int) -> bool:
        """Whether the nodes before and after one are of the module that it seems to be of."""
        return {*self._around(found, index)} == set(found[index].paths)

    def _around(self, found: Sequence[Owned], index: int) -> list[str]:
        consumers = [path for reader in self._readers(index) for path in found[reader].paths]
        return [*(self._makers_paths(found, index) or [""]), *(consumers or [""])]

    def _check_shares(self, found: list[Owned]) -> None:
        """A node that may do only a part of what several modules compute has owners that are not known.

        That is so where another node replaces the same original one, or the same one of several equal tensors.
        """
        claims = Counter(old for work in self._works for old in work.nodes)
        moved, movers = self._movers()
        for index, entry in enumerate(found):
            if entry.reason in (Reason.UNKNOWN, Reason.INSERTED):
                continue
            number = moved.get(index)
            if number is not None and movers[number] < 0 and (len(entry.paths) > 1 or not self._agrees(found, index)):
                found[index] = Owned((common_ancestor([*entry.paths, *self._around(found, index)]),), Reason.UNKNOWN)
                continue
            if self._misses_producer(index):
                found[index] = Owned((common_ancestor([*entry.paths, *self._candidates(index)]),), Reason.UNKNOWN)
            node = self._after.nodes[index]
            if len(entry.paths) < 2 or not self._known.parts.keys().isdisjoint((*node.inputs, *node.outputs)):
                continue  # what is joined has all its owners
            alone = {path for old in self._works[index].nodes if claims[old] == 1 for path in self._owners(old)}
            if not alone.issuperset(entry.paths) or self._has_a_loose_neighbour(index):
                found[index] = Owned((common_ancestor(entry.paths),), Reason.UNKNOWN)

    # --- work that the original does once ---

    def _divide_copies(self, found: list[Owned]) -> None:
        """Several nodes may do again what the original does once for several modules: each does it for its readers."""
        replacing = Counter(old for work in self._works for old in work.nodes)
        for index in range(len(found) - 1, -1, -1):
            entry, nodes = found[index], [self._before.nodes[old] for old in self._works[index].nodes]
            repeated = {old for old in self._works[index].nodes if replacing[old] > 1 and self._is_common(old)}
            if len(entry.paths) < 2 or not repeated or entry.reason == Reason.UNKNOWN:
                continue
            own = {path for old in self._works[index].nodes if old not in repeated for path in self._owners(old)}
            around = [tuple(own)] if own else [found[reader].paths for reader in self._readers(index)]
            mine = {p for node in nodes for p in node.owners if p in own or any(_is_near(p, near) for near in around)}
            if mine and len(mine) < len(entry.paths):
                found[index] = replace(entry, paths=tuple(path for path in entry.paths if path in mine), call="")

    def _is_common(self, old: int) -> bool:
        return self._before.nodes[old].reason == Reason.SHARED

    def _owners(self, old: int) -> tuple[str, ...]:
        return self._before.nodes[old].owners

    # --- the nodes that a node replaces ---

    def _on_the_way(self, node: SummaryNode, part: tuple[int, ...]) -> tuple[int, ...]:
        """Of some original nodes, those that compute something from what the node reads.

        Example: an operator for attention that takes positions reads no angles; the module that computes these in the
        original has no nodes here.
        """
        reads = [v for v in node.reads if v != NOTHING]
        starts = set[int]().union(*(self._known.anchors(v) for v in reads))
        if len(part) < 2 or not any(self._after.live[v] and self._known.anchors(v) for v in reads):
            return part
        number, reached, kept = self._known.numbers.number, set(starts), list[int]()
        for old in part:
            if any(number[value] in reached for value in self._before.nodes[old].reads if value != NOTHING):
                kept.append(old)
                reached.update(number[value] for value in self._before.nodes[old].outputs if value != NOTHING)
        return tuple(kept) or part


def _is_near(module: str, paths: Sequence[str]) -> bool:
    """Whether one of some owners is a module, is in it, or is around it."""
    return any(is_under(path, module) or is_under(module, path) for path in paths)
