"""The owners of the nodes of a model that no tool derived from the original.

`replaced_nodes` returns the original nodes that a node replaces. Some of these it chooses by
operators alone, or divides among modules; that proves no owner. Scopes in names decide then, if
they are proved. Otherwise the owner is unknown.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
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
from htp_export.lineage.tagging import Owned
from htp_export.shapes.operator_kinds import (
    IN_PLACE,
    LAYOUT,
    SIZES_ONLY,
    base_op,
    includes,
    moves,
    resembles,
)


def _unknown(paths: Iterable[str]) -> Owned:
    """An unknown owner among some modules, represented by the innermost module around them."""
    return Owned((common_ancestor(list(paths)),), Reason.UNKNOWN)


def _is_near(module: str, paths: Sequence[str]) -> bool:
    """Whether one of some owners is a module, its descendant or its ancestor."""
    return any(is_under(path, module) or is_under(module, path) for path in paths)


def _work_attributes(node: SummaryNode) -> list[str]:
    """The attributes of a node, without the layout of its weight."""
    return [part for part in node.attributes.split(";") if part not in ("", "transB=1")]


class ProvedOwners:
    """The owners of nodes that weights, values, structure or proved scopes determine.

    Args:
        alignment: The counterparts of the tensors.
        scopes: The scope in the name of each node.
        tree: The calls of the modules.
        holders: Original weight → the module that has it as a parameter.
        passed: The original tensors that PyTorch passes into and out of modules.
    """

    def __init__(
        self,
        alignment: UnnamedAlignment,
        scopes: Sequence[Scope | None],
        tree: CallTree,
        holders: Mapping[int, str],
        passed: Iterable[int],
    ) -> None:
        self._alignment, self._scopes, self._holders = alignment, scopes, holders
        self._before, self._after = alignment.before, alignment.after
        self._numbers = alignment.numbers
        self._passed = {self._numbers.number[value] for value in passed}
        # Original nodes that do not depend on the inputs of a node are not evidence for its owner.
        self._works = []
        for node, work in zip(self._after.nodes, replaced_nodes(alignment), strict=True):
            nodes, among = self._dependent(node, work.nodes), self._dependent(node, work.among)
            self._works.append(replace(work, nodes=nodes, among=among))
        self._decisions = OwnersAfter(alignment, self._works, tree)
        # number → the nodes that return this tensor unchanged
        self._copies = defaultdict[int, list[int]](list)
        for index, node in enumerate(self._after.nodes):
            if self._returns_input(index):
                self._copies[self._number(node.outputs[0])].append(index)

    def owners(self) -> list[Owned]:
        """The owners of every node; an owner that is not proved has the reason ``unknown``."""
        decided = self._by_parameters()
        indices = range(len(self._works))
        open_nodes = [index for index in indices if index not in decided and self._is_open(index)]
        first = self._decisions.decide(decided)
        by_weight: dict[int, Owned] = {}
        for index in open_nodes:
            owned = self._by_weight(index)
            if owned is not None:
                by_weight[index] = owned

        # The owners that are known without names prove the modules of scopes.
        proved = [by_weight.get(index, entry) for index, entry in enumerate(first)]
        names = self._proved_scopes(proved, {*open_nodes} - {*by_weight})
        decided |= self._open_owners(open_nodes, first, by_weight, names)

        found = self._decisions.decide(decided)
        for index, entry in enumerate(found):
            if entry.reason not in (Reason.UNKNOWN, Reason.INSERTED):
                found[index] = self._of_whole_work(found, index)
        # Backwards: consumers come before the inserted nodes whose owners they prove.
        for index in reversed(indices):
            is_joined = self._has_joined(self._after.nodes[index].inputs)
            if found[index].reason == Reason.INSERTED and not is_joined:
                found[index] = self._of_inserted(found, index, names)
        return found

    def _open_owners(
        self,
        open_nodes: Sequence[int],
        first: Sequence[Owned],
        by_weight: Mapping[int, Owned],
        names: NameScopes,
    ) -> dict[int, Owned]:
        """The owners of open nodes, those without proof by structure; unknown if nothing proves one.

        A weight proves its module. A name is only a hypothesis, which `_by_name` tests against the
        owners of the neighbours. Open neighbours count with their own hypotheses; those without
        any are left out, since an unknown owner contradicts nothing.

        ``first``: The owners of all nodes by structure.
        """
        modules = {index: self._module_by_name(index, names) for index in open_nodes}
        assumed = {index: entry.paths for index, entry in enumerate(first)}
        for index in open_nodes:
            del assumed[index]
            module = modules[index]
            if index in by_weight:
                assumed[index] = by_weight[index].paths
            elif module is not None:
                assumed[index] = (module,)
        owners: dict[int, Owned] = {}
        for index in open_nodes:
            evident = by_weight.get(index) or self._by_name(index, modules[index], assumed)
            owners[index] = evident or _unknown(self._candidates(index))
        return owners

    # --- facts of nodes ---

    def _has_joined(self, values: Iterable[int]) -> bool:
        """Whether one of some values is the concatenation of original tensors."""
        return not self._alignment.parts.keys().isdisjoint(values)

    def _candidates(self, index: int) -> list[str]:
        """The modules that may own a node: the owners of all original nodes around it."""
        return list(dict.fromkeys(self._owners_of(self._works[index].among)))

    def _number(self, value: int) -> int:
        return self._numbers.current(self._alignment.counterpart[value])

    def _owners_of(self, nodes: Iterable[int]) -> list[str]:
        return [path for old in nodes for path in self._before.nodes[old].owners]

    def _live_reads(self, node: SummaryNode) -> list[int]:
        return [value for value in node.reads if self._after.live[value]]

    def _weights(self, node: SummaryNode) -> set[int]:
        """The original weights among the inputs of a node."""
        return set[int]().union(*map(self._alignment.weights_of, node.inputs))

    def _dependent(self, node: SummaryNode, part: tuple[int, ...]) -> tuple[int, ...]:
        """The subset of original nodes that depend on the inputs of the node.

        An attention operator that takes positions as an input computes the rotary angles itself: it
        reads no angles, and the original nodes that compute these have no counterparts.
        """
        anchors = self._alignment.anchors
        if len(part) < 2 or not any(map(anchors, self._live_reads(node))):
            return part
        number, kept = self._numbers.number, list[int]()
        reached = set[int]().union(*map(anchors, node.reads))
        for old in part:
            if any(number[value] in reached for value in self._before.nodes[old].reads):
                kept.append(old)
                reached.update(number[value] for value in self._before.nodes[old].makes)
        return tuple(kept) or part

    # --- nodes that weights, values and structure do not decide ---

    def _is_open(self, index: int) -> bool:
        """Whether structure does not prove the owner of a node."""
        node, work = self._after.nodes[index], self._works[index]
        if self._shares_work(node) and len(self._candidates(index)) > 1:
            return bool(work.nodes) or not moves(node.op)
        if not work.nodes:
            return self._after.depends(index) and not work.ends and not moves(node.op, views=True)
        if self._misses_weights(index):
            return True
        # Values do not distinguish several layout operators of one tensor.
        is_ambiguous = work.chosen or moves(node.op)
        return is_ambiguous and self._before.with_several_owners(work.nodes)

    def _misses_weights(self, index: int) -> bool:
        """Whether a node has a weight as input, and replaces no original consumer of it."""
        weights = self._weights(self._after.nodes[index])
        readers = {reader for weight in weights for reader in self._before.readers[weight]}
        return bool(readers) and readers.isdisjoint(self._works[index].nodes)

    def _shares_work(self, node: SummaryNode) -> bool:
        """Whether a tensor between a node and a neighbour is unknown: they may share one work."""
        passed = (*node.reads, *(value for value in node.makes if self._after.readers[value]))
        live = (value for value in passed if self._after.live[value])
        return not all(map(self._alignment.numbers_of, live))

    def _by_parameters(self) -> dict[int, Owned]:
        """Nodes that replace none and compute on one parameter: the original stores their results."""
        found = {}
        for index, (node, work) in enumerate(zip(self._after.nodes, self._works, strict=True)):
            if self._after.depends(index) or work.nodes or moves(node.op):
                continue
            parameters = [weight for weight in self._weights(node) if weight in self._holders]
            holders = {self._holders[weight] for weight in parameters}
            if len(holders) == 1:
                found[index] = Owned((holders.pop(),), Reason.PARAMETERS)
        return found

    def _by_weight(self, index: int) -> Owned | None:
        """The owners of the original nodes that compute with the weights of a node.

        None if the node has further inputs, or weights of further nodes: then it does other work,
        too.
        """
        products = self._products(index)
        if not products or not self._is_within(index, products):
            return None
        read = {value for old in products for value in self._before.nodes[old].inputs}
        for value in self._after.nodes[index].inputs:
            if not read.issuperset(self._alignment.parts.get(value, ())):
                return None
        return self._decisions.owned_by(products, Reason.INITIALIZER)

    def _products(self, index: int) -> list[int]:
        """The original nodes that compute with the weights of a node."""
        node, number = self._after.nodes[index], self._numbers.number
        weights = {number[weight] for weight in self._weights(node)}
        if not weights or moves(node.op):
            return []
        products = []
        for old in self._works[index].among:
            original = self._before.nodes[old]
            reads_weight = not weights.isdisjoint(number[value] for value in original.inputs)
            if reads_weight and resembles(node.op, original.op):
                products.append(old)
        return products

    # --- names ---

    def _proved_scopes(self, found: Sequence[Owned], open_nodes: Container[int]) -> NameScopes:
        """The scopes that the known owners of nodes prove."""
        known = []
        for index, (scope, entry) in enumerate(zip(self._scopes, found, strict=True)):
            if scope is None or index in open_nodes:
                continue
            if entry.reason != Reason.INSERTED and entry.paths:
                known.append((scope, entry.paths))
        return NameScopes(known, {path for node in self._before.nodes for path in node.owners})

    def _module_by_name(self, index: int, names: NameScopes) -> str | None:
        """The module of a node's scope, if it may own the node."""
        module = names.module(self._scopes[index])
        return module if module in self._candidates(index) else None

    def _by_name(
        self, index: int, module: str | None, paths: Mapping[int, tuple[str, ...]]
    ) -> Owned | None:
        """The owner of a node by its name.

        None if a consumer is in a module that does not read tensors of this one.
        """
        op = self._after.nodes[index].op
        if module is None or self._has_other_weights(index):
            return None
        if moves(op) and base_op(op) not in LAYOUT:
            return None  # casts are named after tensors, not modules
        consumers = (reader for reader in self._after.consumers(index) if reader in paths)
        if not all(_is_near(module, paths[reader]) for reader in consumers):
            return None
        among, nodes = self._works[index].among, self._before.nodes
        mine = [old for old in among if nodes[old].owners == (module,)]
        inside = {other for other, owners in paths.items() if owners == (module,)}
        if not self._is_within(index, mine, inside):
            return None
        return self._decisions.owned_by(mine, Reason.NODE, (module,))

    def _has_other_weights(self, index: int) -> bool:
        """Whether a node has a large weight that is none of the original.

        An optimizer may have computed it from the weights of several modules.
        """
        for value in self._after.stored_inputs(self._after.nodes[index]):
            entry = self._after.values[value]
            is_large = entry.kind == "initializer" and not entry.content
            is_known = self._alignment.counterpart[value] != NOTHING
            if is_large and not is_known and not self._alignment.weights_of(value):
                return True
        return False

    def _is_within(self, index: int, part: Collection[int], inside: Container[int] = ()) -> bool:
        """Whether a node has at most as many inputs and outputs as original nodes together.

        Otherwise it does other work, too. ``inside``: Nodes that do a part of the same work; tensors
        that they compute do not count.
        """
        inputs, outputs = self._boundary_before(part)
        node, maker = self._after.nodes[index], self._after.maker
        # Several tensors of one node count once. An input of the graph has no node: each one counts.
        reads = set[tuple[int, int]]()
        for value in self._live_reads(node):
            if maker[value] not in inside:
                reads.add((maker[value], value if maker[value] == NOTHING else NOTHING))
        passed = 0
        for value in {*node.makes}:
            passed += bool(self._after.readers[value]) or value in self._after.outputs
        return len(reads) <= len(inputs) and passed <= len(outputs)

    def _boundary_before(self, part: Collection[int]) -> tuple[set[int], set[int]]:
        """The numbers of the inputs and outputs of original nodes, taken together."""
        before, number = self._before, self._numbers.number
        computed, inputs, outputs = set[int](), set[int](), set[int]()
        for old in part:
            node = before.nodes[old]
            inputs.update(number[value] for value in node.reads if before.live[value])
            for value in node.makes:
                computed.add(number[value])
                is_read = any(reader not in part for reader in before.readers[value])
                if is_read or value in before.outputs:
                    outputs.add(number[value])
        return inputs - computed, outputs

    # --- nodes without a counterpart ---

    def _of_inserted(self, found: Sequence[Owned], index: int, names: NameScopes) -> Owned:
        """The owners of a node that replaces none.

        The first that applies: the owners of an equal original node that returns its input, of the
        neighbours, of the scope in its name, of the modules that need the layout it produces.
        """
        entry, node = found[index], self._after.nodes[index]
        repeated = self._of_copy(index)
        if repeated is not None:
            return repeated
        if self._neighbours_prove(found, index):
            return entry
        around = [*entry.paths, *self._around(found, index)]
        named = names.module(self._scopes[index])
        is_live_layout = base_op(node.op) in LAYOUT and self._after.depends(index)
        if named is not None and named in around and is_live_layout:
            return Owned((named,), Reason.NODE)
        user = self._user_of_layout(found, index)
        return _unknown(around) if user is None else Owned((user,), Reason.INSERTED)

    def _user_of_layout(self, found: Sequence[Owned], index: int) -> str | None:
        """The module that works in another layout, if an inserted node enters or leaves it.

        Between modules, a tensor has the layout of PyTorch. A node that changes this layout works
        for its consumers. A node that restores it works for the module that computes the tensor.
        A tensor that PyTorch passes between no modules may have another layout in the original: a
        tool may have moved a layout operator there.
        """
        node = self._after.nodes[index]
        if base_op(node.op) not in LAYOUT or not self._keeps_number(index):
            return None
        if self._number(node.outputs[0]) not in self._passed:
            return None
        was_exact = self._alignment.exact[node.inputs[0]]
        is_exact = self._alignment.exact[node.outputs[0]]
        if was_exact == is_exact:
            return None
        if was_exact:
            consumers = [found[reader] for reader in self._after.consumers(index)]
            if any(entry.reason == Reason.UNKNOWN for entry in consumers):
                return None
            users = {path for entry in consumers for path in entry.paths}
        else:
            users = {*self._makers_paths(found, index)}
            makers = self._alignment.makers(self._number(node.outputs[0]))
            if users != {*self._owners_of(makers)}:
                return None
        return users.pop() if len(users) == 1 else None

    def _keeps_number(self, index: int) -> bool:
        """Whether the first input of a node and its one output have the same original tensor."""
        node = self._after.nodes[index]
        if len(node.outputs) != 1 or not node.inputs:
            return False
        if NOTHING in (node.inputs[0], node.outputs[0]):
            return False
        number = self._alignment.counterpart[node.outputs[0]]
        return number != NOTHING and self._numbers.current(number) == self._number(node.inputs[0])

    def _neighbours_prove(self, found: Sequence[Owned], index: int) -> bool:
        """Whether the owners of an inserted node's neighbours prove its own owners.

        The rule of owners assigns an inserted node to its consumers. If it is at a boundary between
        modules, that is a guess: it may belong to either side. It is proved for

        - a constant, which exists for its consumers,
        - a layout operator or cast of a weight, if one module consumes it,
        - a node that changes the precision, if the original nodes in its place are of this module,
          and so are the producers, if it ends a quantized computation,
        - any other layout operator or cast, if producers and consumers are of one module.

        It is not proved for a node that computes or reads a size, or has an unknown producer or
        consumer.
        """
        # Many branches: each early return is one of these cases, in order.
        node, paths = self._after.nodes[index], set(found[index].paths)
        consumers = [found[reader] for reader in self._after.consumers(index)]
        if not moves(node.op) or base_op(node.op) in SIZES_ONLY:
            return False
        if any(consumer.reason == Reason.UNKNOWN for consumer in consumers):
            return False
        if not node.inputs:
            return bool(paths)  # a constant may be of several modules
        if len(paths) != 1:
            return False
        if not self._after.depends(index):
            return self._is_weight(node.inputs[0])
        if any(self._is_unknown(found, maker) for maker in self._makers(found, index)):
            return False
        makers = set(self._makers_paths(found, index))
        if self._changes_precision(node):
            copies = set(self._owners_of(self._original_copies(self._number(node.outputs[0]))))
            return copies <= paths and (makers == paths or not self._ends_quantized(index))
        if makers != paths or any(value in self._after.outputs for value in node.outputs):
            return False
        consumed = {path for consumer in consumers for path in consumer.paths}
        return not consumed or consumed == paths

    def _is_weight(self, value: int) -> bool:
        """Whether a tensor is a stored weight, also in another form: floats or quantized levels.

        Integers of more bits are indices and sizes.
        """
        maker = self._after.maker[value]
        is_computed = maker != NOTHING and not moves(self._after.nodes[maker].op)
        return not is_computed and self._after.shape(value)[1] in FLOATS | LEVELS

    def _ends_quantized(self, index: int) -> bool:
        """Whether a node dequantizes the result of a node that computes with integers.

        Such a node has the owner of the node that computes.
        """
        node = self._after.nodes[index]
        maker = self._after.maker[node.inputs[0]]
        if base_op(node.op) != "DequantizeLinear" or maker == NOTHING:
            return False
        return not moves(self._after.nodes[maker].op)

    def _changes_precision(self, node: SummaryNode) -> bool:
        """Whether a node quantizes, dequantizes or casts between floats, as inserted nodes do."""
        base = base_op(node.op)
        if base not in IN_PLACE:
            return base == "DynamicQuantizeLinear"
        if base.endswith("Linear"):
            return True
        types = {self._after.shape(value)[1] for value in (node.inputs[0], node.outputs[0])} - {0}
        return base == "Cast" and len(types) > 1 and types <= FLOATS

    @staticmethod
    def _is_unknown(found: Sequence[Owned], maker: int) -> bool:
        return maker != NOTHING and found[maker].reason == Reason.UNKNOWN

    def _makers(self, found: Sequence[Owned], index: int) -> Iterator[int]:
        """Yield the producers of a node, before inserted nodes; NOTHING for an input."""
        queue, seen = [index], set[int]()
        while queue:
            for value in self._live_reads(self._after.nodes[queue.pop()]):
                if value in seen:
                    continue
                seen.add(value)
                maker = self._after.maker[value]
                if maker != NOTHING and found[maker].reason == Reason.INSERTED:
                    queue.append(maker)
                else:
                    yield maker

    def _makers_paths(self, found: Sequence[Owned], index: int) -> list[str]:
        """The owners of the producers of a node, before inserted nodes; the root for an input."""
        paths = dict[str, None]()
        for maker in self._makers(found, index):
            paths.update(dict.fromkeys(("",) if maker == NOTHING else found[maker].paths))
        return [*paths]

    def _around(self, found: Sequence[Owned], index: int) -> list[str]:
        """The owners of a node's producers and consumers; the root at the ends of the graph."""
        consumers: list[str] = []
        for reader in self._after.consumers(index):
            consumers += found[reader].paths
        producers = self._makers_paths(found, index)
        return [*(producers or [""]), *(consumers or [""])]

    def _of_copy(self, index: int) -> Owned | None:
        """The owner of a node that returns its input.

        None if the original does not have as many such nodes for the tensor.
        """
        node = self._after.nodes[index]
        if not self._returns_input(index):
            return None
        number, base = self._number(node.outputs[0]), base_op(node.op)
        before, after = self._before.nodes, self._after.nodes
        mine = [other for other in self._copies[number] if base_op(after[other].op) == base]
        originals = self._original_copies(number)
        theirs = [old for old in originals if base_op(before[old].op) == base]
        if len(mine) == 1 and len(theirs) > 1:
            return self._of_merged_copies(index, theirs)
        if not theirs or len(theirs) != len(mine):
            return None
        original = before[theirs[mine.index(index)]]
        reason = original.reason if len(original.owners) > 1 else Reason.VALUES
        return Owned(original.owners, reason, original.call)

    def _of_merged_copies(self, index: int, originals: Sequence[int]) -> Owned | None:
        """The owners of original nodes that return one tensor, if a single node is left of them.

        It replaces those whose results the consumers read before; None if that is not known of a
        consumer.
        """
        read = dict[int, None]()
        for consumer in self._after.consumers(index):
            replaced = {*self._works[consumer].nodes}
            before = [
                old for old in originals if replaced.intersection(self._before.consumers(old))
            ]
            if not before:
                return None
            read.update(dict.fromkeys(before))
        if not read:
            return None
        owners = {self._before.nodes[old].owners for old in read}
        reason = Reason.SHARED if len(owners) > 1 else Reason.VALUES
        return self._decisions.owned_by(sorted(read), reason)

    def _original_copies(self, number: int) -> list[int]:
        """The original nodes that return a tensor unchanged."""
        return [maker for maker in self._alignment.makers(number) if self._numbers.idle[maker]]

    def _returns_input(self, index: int) -> bool:
        """Whether the one output of a node is one of its inputs, in shape and element type, too."""
        node, counterpart = self._after.nodes[index], self._alignment.counterpart
        if len(node.outputs) != 1 or node.outputs[0] == NOTHING:
            return False
        output = node.outputs[0]
        number = counterpart[output]
        if number == NOTHING:
            return False
        same = (value for value in node.inputs if value != NOTHING and counterpart[value] == number)
        return any(self._after.shape(value) == self._after.shape(output) for value in same)

    # --- several nodes for one original ---

    def _of_whole_work(self, found: Sequence[Owned], index: int) -> Owned:
        """The owners of a node, or unknown if it may do only a part of the work of several modules.

        Another node may replace the same original node, or the same one of several equal tensors.
        """
        entry, node = found[index], self._after.nodes[index]
        if self._is_surplus(index):
            around = self._around(found, index)
            if len(entry.paths) > 1 or {*around} != {*entry.paths}:
                return _unknown([*entry.paths, *around])
        # A concatenation has all its owners.
        is_joined = self._has_joined((*node.inputs, *node.outputs))
        if len(entry.paths) > 1 and not is_joined:
            alone = [old for old in self._works[index].nodes if self._claims[old] == 1]
            misses_owner = not {*self._owners_of(alone)}.issuperset(entry.paths)
            if misses_owner or self._has_a_loose_neighbour(index):
                return _unknown(entry.paths)
        if self._misses_producer(index) or self._differs_from_product(index):
            return _unknown([*entry.paths, *self._candidates(index)])
        return entry

    @cached_property
    def _claims(self) -> Counter[int]:
        """Original node → how many nodes replace it."""
        return Counter(old for work in self._works for old in work.nodes)

    @cached_property
    def _layout_results(self) -> dict[int, int]:
        """Layout operator → the number of its result, `NOTHING` for a tensor without a counterpart.

        An operator that only changes the layout of an original tensor does not produce that tensor.
        """
        results = {}
        for index, node in enumerate(self._after.nodes):
            if base_op(node.op) not in LAYOUT or not self._after.depends(index):
                continue
            if not self._keeps_number(index):
                results[index] = self._number(node.outputs[0]) if node.outputs else NOTHING
        return results

    @cached_property
    def _layout_operators_left(self) -> Counter[int]:
        """Number → original layout operators that produce it, less those of the other model."""
        originals = (node for node in self._before.nodes if base_op(node.op) in LAYOUT)
        left = Counter(self._numbers.number[node.outputs[0]] for node in originals)
        left.subtract(self._layout_results.values())
        return left

    def _is_surplus(self, index: int) -> bool:
        """Whether the original has fewer layout operators that produce the result of this one."""
        if index not in self._layout_results:
            return False
        return self._layout_operators_left[self._layout_results[index]] < 0

    def _has_a_loose_neighbour(self, index: int) -> bool:
        """Whether a neighbour is a layout operator without an original: a part of fused work, maybe."""
        makers = (self._after.maker[value] for value in self._live_reads(self._after.nodes[index]))
        for near in {*makers, *self._after.consumers(index)} - {NOTHING}:
            other = self._after.nodes[near]
            if self._works[near].nodes or not self._after.depends(near):
                continue
            is_part = moves(other.op, views=True) and not self._changes_precision(other)
            if is_part and not self._returns_input(near):
                return True
        return False

    def _differs_from_product(self, index: int) -> bool:
        """Whether a node may do another work than the original product with its weights.

        An exporter moves work of other modules into a product: a padding into the ``pads`` of a
        Conv, a factor into ``alpha`` or the weight, a transposition into ``transA``. The one file
        may have this work in a neighbour of the product. It is no other work if the tensors around
        the node are known.
        """
        node = self._after.nodes[index]
        products = self._products(index)
        if not products or not self._shares_work(node):
            return False
        return not all(self._does_work_of(node, old) for old in products)

    def _does_work_of(self, node: SummaryNode, old: int) -> bool:
        """Whether a node does exactly the work of an original product, as far as is known.

        A product of one module may have other attributes, such as the format of its weight, if its
        result is an original tensor. A product of several modules has to be the same in everything.
        """
        original, stored = self._before.nodes[old], self._after.stored_inputs(node)
        has_same_weights = all(map(self._alignment.is_unscaled, stored))
        if len(original.owners) < 2:
            if has_same_weights and _work_attributes(node) == _work_attributes(original):
                return True
            return not self._alignment.evidence.values.keys().isdisjoint(node.makes)
        if not has_same_weights or not includes(node.op, original.op):
            return False
        if original.attributes and _work_attributes(node) != _work_attributes(original):
            return False
        return len(stored) >= len(self._before.stored_inputs(original))

    def _misses_producer(self, index: int) -> bool:
        """Whether a node outputs an original tensor, and does not replace the producer of it."""
        node, replaced = self._after.nodes[index], set(self._works[index].nodes)
        if not replaced or moves(node.op):
            return False
        for value in node.makes:
            if not self._alignment.exact[value]:
                continue
            makers = self._alignment.makers(self._number(value))
            if makers and replaced.isdisjoint(makers):
                return True
        return False
