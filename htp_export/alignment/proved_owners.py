"""The owners of the nodes of a model that was not made of the original.

`replaced_nodes` says which original nodes a node replaces. What it chooses by operators alone, or
shares out among modules, is not known here: scopes in names decide, if they are proved, and
otherwise nothing does.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from htp_export.alignment.carried_owners import OwnersAfter
from htp_export.alignment.graph_summary import NOTHING, SummaryNode
from htp_export.alignment.name_scopes import NameScopes, Scope
from htp_export.alignment.numbering import FLOATS, LEVELS
from htp_export.alignment.replaced_nodes import replaced_nodes
from htp_export.alignment.unnamed_alignment import UnnamedAlignment
from htp_export.format.call_tree import CallTree
from htp_export.format.tags import Reason, common_ancestor, is_under
from htp_export.lineage.owner_rule import Owned
from htp_export.shapes.operator_kinds import IN_PLACE, LAYOUT, SIZES_ONLY, base_op, moves, resembles


def _unknown(paths: Iterable[str]) -> Owned:
    """What is known of a node that one of some modules owns: the module around them."""
    return Owned((common_ancestor(list(paths)),), Reason.UNKNOWN)


def _is_near(module: str, paths: Sequence[str]) -> bool:
    """Whether one of some owners is a module, is in it, or is around it."""
    return any(is_under(path, module) or is_under(module, path) for path in paths)


class ProvedOwners:
    """``scopes``: In the names of the nodes. ``holders``: Original weight → the module that holds it as a parameter."""

    def __init__(
        self,
        alignment: UnnamedAlignment,
        scopes: Sequence[Scope | None],
        tree: CallTree,
        holders: Mapping[int, str],
    ) -> None:
        self._known, self._scopes, self._holders = alignment, scopes, holders
        self._before, self._after, self._numbers = (
            alignment.before,
            alignment.after,
            alignment.numbers,
        )
        self._works = [
            replace(
                work,
                nodes=self._on_the_way(node, work.nodes),
                among=self._on_the_way(node, work.among),
            )
            for node, work in zip(self._after.nodes, replaced_nodes(alignment), strict=True)
        ]
        self._decisions = OwnersAfter(alignment, self._works, tree)
        # number → the nodes that give this tensor back
        self._passing = defaultdict[int, list[int]](list)
        for index, node in enumerate(self._after.nodes):
            if self._gives_back(index):
                self._passing[self._number(node.outputs[0])].append(index)

    def owners(self) -> list[Owned]:
        """The owners of every node; those that are not known have the reason ``unknown``."""
        settled = self._by_parameters()
        open_nodes = [
            index
            for index in range(len(self._works))
            if index not in settled and self._is_open(index)
        ]
        first = self._decisions.decide(settled)
        by_weight = {
            index: owned for index in open_nodes if (owned := self._by_weight(index)) is not None
        }
        names = self._names(
            [by_weight.get(k, entry) for k, entry in enumerate(first)], {*open_nodes} - {*by_weight}
        )
        named = {
            index: self._module_by_name(index, names)
            for index in open_nodes
            if index not in by_weight
        }
        paths = {index: entry.paths for index, entry in enumerate(first) if index not in open_nodes}
        paths |= {index: owned.paths for index, owned in by_weight.items()}
        paths |= {index: (module,) for index, module in named.items() if module is not None}
        for index in open_nodes:
            evident = by_weight.get(index) or self._by_name(index, named[index], paths)
            settled[index] = evident or _unknown(self._candidates(index))
        found = self._decisions.decide(settled)
        for index, entry in enumerate(found):
            if entry.reason not in (Reason.UNKNOWN, Reason.INSERTED):
                found[index] = self._of_whole_work(found, index)
        for index in range(len(found) - 1, -1, -1):
            is_joined = not self._known.parts.keys().isdisjoint(self._after.nodes[index].inputs)
            if found[index].reason == Reason.INSERTED and not is_joined:
                found[index] = self._of_inserted(found, index, names)
        return found

    # --- facts of nodes ---

    def _candidates(self, index: int) -> list[str]:
        return [
            *dict.fromkeys(
                path for old in self._works[index].among for path in self._before.nodes[old].owners
            )
        ]

    def _number(self, value: int) -> int:
        return self._numbers.current(self._known.counterpart[value])

    def _owners_of(self, nodes: Iterable[int]) -> list[str]:
        return [path for old in nodes for path in self._before.nodes[old].owners]

    def _live_reads(self, node: SummaryNode) -> list[int]:
        return [value for value in node.reads if self._after.live[value]]

    def _weights(self, node: SummaryNode) -> set[int]:
        return {weight for value in node.inputs for weight in self._known.weights_of(value)}

    def _on_the_way(self, node: SummaryNode, part: tuple[int, ...]) -> tuple[int, ...]:
        """Of some original nodes, those that compute something from what the node reads.

        An operator for attention that takes positions reads no angles: who computes these has no
        nodes here.
        """
        if len(part) < 2 or not any(self._known.anchors(value) for value in self._live_reads(node)):
            return part
        number, kept = self._numbers.number, list[int]()
        reached = set[int]().union(*(self._known.anchors(value) for value in node.reads))
        for old in part:
            if any(number[value] in reached for value in self._before.nodes[old].reads):
                kept.append(old)
                reached.update(number[value] for value in self._before.nodes[old].makes)
        return tuple(kept) or part

    # --- what is not decided by weights, values and structure ---

    def _is_open(self, index: int) -> bool:
        node, work = self._after.nodes[index], self._works[index]
        if self._is_shared(node) and len(self._candidates(index)) > 1:
            return bool(work.nodes) or not moves(node.op)
        if work.nodes:
            # which of several layout operators it is, values do not say
            unclear = work.chosen or moves(node.op)
            return self._misses_weights(index) or (
                unclear and self._before.with_several_owners(work.nodes)
            )
        return self._after.depends(index) and not work.ends and not moves(node.op, views=True)

    def _misses_weights(self, index: int) -> bool:
        """Whether a node reads a weight, and the original nodes that read it are none of those that it replaces."""
        weights = self._weights(self._after.nodes[index])
        readers = {reader for weight in weights for reader in self._before.readers[weight]}
        return bool(readers) and readers.isdisjoint(self._works[index].nodes)

    def _is_shared(self, node: SummaryNode) -> bool:
        """Whether a node is next to others that do a part of the same work: a tensor between them is not known."""
        passed = (*node.reads, *(value for value in node.makes if self._after.readers[value]))
        return any(
            self._after.live[value] and not self._known.numbers_of(value) for value in passed
        )

    def _by_parameters(self) -> dict[int, Owned]:
        """Nodes that replace none, as the original has their results as constants, and read one parameter."""
        found = {}
        for index, (node, work) in enumerate(zip(self._after.nodes, self._works, strict=True)):
            holders = {
                self._holders[weight] for weight in self._weights(node) if weight in self._holders
            }
            if (
                not self._after.depends(index)
                and not work.nodes
                and not moves(node.op)
                and len(holders) == 1
            ):
                found[index] = Owned((holders.pop(),), Reason.PARAMETERS)
        return found

    def _by_weight(self, index: int) -> Owned | None:
        """The owners of the original nodes that compute with the same weights, if the node reads no more."""
        node, number = self._after.nodes[index], self._numbers.number
        weights = {number[weight] for weight in self._weights(node)}
        if not weights or moves(node.op):
            return None
        products = []
        for old in self._works[index].among:
            original = self._before.nodes[old]
            if weights & {number[value] for value in original.inputs} and resembles(
                node.op, original.op
            ):
                products.append(old)
        if not products or not self._reads_no_more(index, products):
            return None
        return self._decisions.owned_by(products, Reason.INITIALIZER)

    # --- names ---

    def _names(self, found: Sequence[Owned], open_nodes: Container[int]) -> NameScopes:
        known = [
            (scope, entry.paths)
            for index, (scope, entry) in enumerate(zip(self._scopes, found, strict=True))
            if scope is not None
            and index not in open_nodes
            and entry.reason != Reason.INSERTED
            and entry.paths
        ]
        return NameScopes(known, {path for node in self._before.nodes for path in node.owners})

    def _module_by_name(self, index: int, names: NameScopes) -> str | None:
        """The module for which the scope of a node stands, if it may own the node."""
        module = names.module(self._scopes[index])
        return module if module in self._candidates(index) else None

    def _by_name(
        self, index: int, module: str | None, paths: Mapping[int, tuple[str, ...]]
    ) -> Owned | None:
        """The owner of a node by its name, unless a consumer is in a module that does not read from there."""
        op = self._after.nodes[index].op
        # casts are named after tensors, not modules
        if module is None or (moves(op) and base_op(op) not in LAYOUT):
            return None
        mine = [
            old for old in self._works[index].among if self._before.nodes[old].owners == (module,)
        ]
        near = (
            _is_near(module, paths[reader])
            for reader in self._after.consumers(index)
            if reader in paths
        )
        inside = {other for other, owners in paths.items() if owners == (module,)}
        if not self._reads_no_more(index, mine, inside) or not all(near):
            return None
        return self._decisions.owned_by(mine, Reason.NODE, (module,))

    def _reads_no_more(
        self, index: int, part: Collection[int], inside: Container[int] = ()
    ) -> bool:
        """Whether a node reads and gives no more tensors than original nodes: otherwise it computes others, too.

        ``inside``: Nodes that do a part of the same work; what is read from them does not count.
        """
        node, before, after, number = (
            self._after.nodes[index],
            self._before,
            self._after,
            self._numbers.number,
        )
        outputs = [value for old in part for value in before.nodes[old].makes]
        read = {
            number[value] for old in part for value in before.nodes[old].reads if before.live[value]
        }
        read -= {number[value] for value in outputs}
        given = {
            number[value]
            for value in outputs
            if value in before.outputs
            or any(reader not in part for reader in before.readers[value])
        }
        # Several tensors of one node count once; an input of the graph has no node, and counts for
        # itself.
        sources = (
            (after.maker[value], value)
            for value in self._live_reads(node)
            if after.maker[value] not in inside
        )
        reads = {(maker, value if maker == NOTHING else NOTHING) for maker, value in sources}
        gives = {value for value in node.makes if after.readers[value] or value in after.outputs}
        return len(reads) <= len(read) and len(gives) <= len(given)

    # --- nodes without a counterpart ---

    def _of_inserted(self, found: Sequence[Owned], index: int, names: NameScopes) -> Owned:
        """The owners of a node that replaces none: of its consumers, or by its name, or by the form of its tensors."""
        entry, node = found[index], self._after.nodes[index]
        repeated = self._repeated(index)
        if repeated is not None:
            return repeated
        if self._serves(found, index):
            return entry
        around, named = (
            [*entry.paths, *self._around(found, index)],
            names.module(self._scopes[index]),
        )
        if (
            named is not None
            and named in around
            and base_op(node.op) in LAYOUT
            and self._after.depends(index)
        ):
            return Owned((named,), Reason.NODE)
        user = self._user_of_form(found, index)
        return _unknown(around) if user is None else Owned((user,), Reason.INSERTED)

    def _user_of_form(self, found: Sequence[Owned], index: int) -> str | None:
        """The module that works on an original tensor in another form, if an inserted node makes or undoes this form.

        Between modules, the tensor is as PyTorch had it. So a node that turns it into another form
        works for its consumers, and a node that turns a result back into the form of PyTorch works
        for the module that computes it.
        """
        node = self._after.nodes[index]
        if base_op(node.op) not in LAYOUT or not self._keeps_number(index):
            return None
        was_exact, is_exact = (
            self._known.exact[value] for value in (node.inputs[0], node.outputs[0])
        )
        if was_exact and not is_exact:
            consumers = [found[reader] for reader in self._after.consumers(index)]
            if any(entry.reason == Reason.UNKNOWN for entry in consumers):
                return None
            users = {path for entry in consumers for path in entry.paths}
        elif is_exact and not was_exact:
            users = {*self._makers_paths(found, index)}
            if users != {*self._owners_of(self._known.makers(self._number(node.outputs[0])))}:
                return None
        else:
            return None
        return users.pop() if len(users) == 1 else None

    def _keeps_number(self, index: int) -> bool:
        """Whether the first input of a node and its one output stand for the same original tensor."""
        node, counterpart = self._after.nodes[index], self._known.counterpart
        if (
            len(node.outputs) != 1
            or not node.inputs
            or NOTHING in (node.inputs[0], node.outputs[0])
        ):
            return False
        number = counterpart[node.outputs[0]]
        return number != NOTHING and self._numbers.current(number) == self._number(node.inputs[0])

    def _serves(self, found: Sequence[Owned], index: int) -> bool:
        """Whether an inserted node is certainly of the module that its neighbours say."""
        node, paths = self._after.nodes[index], set(found[index].paths)
        consumers = [found[reader] for reader in self._after.consumers(index)]
        if (
            not moves(node.op)
            or base_op(node.op) in SIZES_ONLY
            or any(c.reason == Reason.UNKNOWN for c in consumers)
        ):
            return False
        if not node.inputs:
            return bool(paths)  # a constant may be of several modules
        if len(paths) != 1:
            return False
        if not self._after.depends(index):
            return self._is_weight(node.inputs[0])
        makers = set(self._makers_paths(found, index))
        if self._changes_precision(node):
            idle = {*self._owners_of(self._idle(self._number(node.outputs[0])))}
            return idle <= paths and (not self._ends_quantized(index) or makers == paths)
        consumed = {path for consumer in consumers for path in consumer.paths}
        ends = any(value in self._after.outputs for value in node.outputs)
        return makers == paths and (consumed == paths or not consumed) and not ends

    def _is_weight(self, value: int) -> bool:
        """Whether a tensor that no input has an effect on has floats or levels, and is no index or size."""
        maker = self._after.maker[value]
        is_computed = maker != NOTHING and not moves(self._after.nodes[maker].op)
        return not is_computed and self._after.shape(value)[1] in FLOATS | LEVELS

    def _ends_quantized(self, index: int) -> bool:
        """Whether a node dequantizes what another one computes with integers: it belongs to that one."""
        node = self._after.nodes[index]
        maker = self._after.maker[node.inputs[0]]
        return (
            base_op(node.op) == "DequantizeLinear"
            and maker != NOTHING
            and not moves(self._after.nodes[maker].op)
        )

    def _changes_precision(self, node: SummaryNode) -> bool:
        """Whether a node quantizes, dequantizes, or casts between floats: what tools insert between modules."""
        base = base_op(node.op)
        if base not in IN_PLACE:
            return base == "DynamicQuantizeLinear"
        kinds = {self._after.shape(value)[1] for value in (node.inputs[0], node.outputs[0])} - {0}
        return base.endswith("Linear") or (base == "Cast" and len(kinds) > 1 and kinds <= FLOATS)

    def _makers_paths(self, found: Sequence[Owned], index: int) -> list[str]:
        """The owners of the nodes that compute what a node reads, before inserted ones; the root for an input."""
        paths, queue, seen = dict[str, None](), [index], set[int]()
        while queue:
            for value in self._live_reads(self._after.nodes[queue.pop()]):
                if value in seen:
                    continue
                seen.add(value)
                maker = self._after.maker[value]
                if maker != NOTHING and found[maker].reason == Reason.INSERTED:
                    queue.append(maker)
                else:
                    paths.update(dict.fromkeys(("",) if maker == NOTHING else found[maker].paths))
        return [*paths]

    def _around(self, found: Sequence[Owned], index: int) -> list[str]:
        """The owners of what is before and after a node; the root at the ends of the graph."""
        consumers = [
            path for reader in self._after.consumers(index) for path in found[reader].paths
        ]
        return [*(self._makers_paths(found, index) or [""]), *(consumers or [""])]

    def _repeated(self, index: int) -> Owned | None:
        """The owner of a node that gives back its input, if the original has as many such nodes for this tensor."""
        node = self._after.nodes[index]
        if not self._gives_back(index):
            return None
        number, base = self._number(node.outputs[0]), base_op(node.op)
        mine = [
            other
            for other in self._passing.get(number, ())
            if base_op(self._after.nodes[other].op) == base
        ]
        theirs = [old for old in self._idle(number) if base_op(self._before.nodes[old].op) == base]
        if not theirs or len(theirs) != len(mine):
            return None
        original = self._before.nodes[theirs[mine.index(index)]]
        reason = original.reason if len(original.owners) > 1 else Reason.VALUES
        return Owned(original.owners, reason, original.call)

    def _idle(self, number: int) -> list[int]:
        """The original nodes that give back a tensor."""
        return [maker for maker in self._known.makers(number) if self._numbers.idle[maker]]

    def _gives_back(self, index: int) -> bool:
        node, known = self._after.nodes[index], self._known
        if len(node.outputs) != 1 or node.outputs[0] == NOTHING:
            return False
        number = known.counterpart[node.outputs[0]]
        same = [
            v
            for v in node.inputs
            if v != NOTHING and number != NOTHING and known.counterpart[v] == number
        ]
        return any(self._after.shape(v) == self._after.shape(node.outputs[0]) for v in same)

    # --- several nodes for one original ---

    def _of_whole_work(self, found: Sequence[Owned], index: int) -> Owned:
        """The owners of a node, unless it may do only a part of what several modules compute.

        That is so where another node replaces the same original one, or the same one of several
        equal tensors.
        """
        entry, node = found[index], self._after.nodes[index]
        surplus = self._is_surplus(index) and (
            len(entry.paths) > 1 or {*self._around(found, index)} != {*entry.paths}
        )
        if surplus:
            return _unknown([*entry.paths, *self._around(found, index)])
        # it has all its owners
        is_joined = not self._known.parts.keys().isdisjoint((*node.inputs, *node.outputs))
        if len(entry.paths) > 1 and not is_joined:
            alone = {
                *self._owners_of(old for old in self._works[index].nodes if self._claims[old] == 1)
            }
            if not alone.issuperset(entry.paths) or self._has_a_loose_neighbour(index):
                return _unknown(entry.paths)
        if self._misses_producer(index):
            return _unknown([*entry.paths, *self._candidates(index)])
        return entry

    @cached_property
    def _claims(self) -> Counter[int]:
        """Original node → how many nodes replace it."""
        return Counter(old for work in self._works for old in work.nodes)

    @cached_property
    def _moved(self) -> dict[int, int]:
        """Layout operator → the number of its result; those between tensors that are not known have one, too.

        An operator that only changes the form of an original tensor does not make that tensor.
        """
        moved = {}
        for index, node in enumerate(self._after.nodes):
            if (
                base_op(node.op) in LAYOUT
                and self._after.depends(index)
                and not self._keeps_number(index)
            ):
                moved[index] = self._number(node.outputs[0]) if node.outputs else NOTHING
        return moved

    @cached_property
    def _movers_left(self) -> Counter[int]:
        """Number → the original layout operators that give it, less those of the other file."""
        originals = (node for node in self._before.nodes if base_op(node.op) in LAYOUT)
        left = Counter(self._numbers.number[node.outputs[0]] for node in originals)
        left.subtract(self._moved.values())
        return left

    def _is_surplus(self, index: int) -> bool:
        """Whether a node is a layout operator, and the original has fewer that give its result."""
        return index in self._moved and self._movers_left[self._moved[index]] < 0

    def _has_a_loose_neighbour(self, index: int) -> bool:
        """Whether a node next to one moves numbers, and is none of the original: it may be a part of a fused one."""
        makers = (self._after.maker[value] for value in self._live_reads(self._after.nodes[index]))
        return any(
            not self._works[k].nodes
            and moves(other.op, views=True)
            and not self._changes_precision(other)
            for k in {*makers, *self._after.consumers(index)} - {NOTHING}
            if self._after.depends(k) and (other := self._after.nodes[k])
        )

    def _misses_producer(self, index: int) -> bool:
        """Whether a node gives an original tensor, and does not replace the node that computes it."""
        node, work = self._after.nodes[index], set(self._works[index].nodes)
        for value in node.makes if work and not moves(node.op) else ():
            makers = self._known.makers(self._number(value)) if self._known.exact[value] else []
            if makers and work.isdisjoint(makers):
                return True
        return False
