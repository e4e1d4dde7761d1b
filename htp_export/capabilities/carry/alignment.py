"""The counterpart of each tensor of a tool's result in the original model, by value number.

Evidence, the strongest first: equal computations of equal tensors (`Numbering`), weights being equal by name or by
contents; names of tensors; names of nodes, or of their outputs. Then backwards from the outputs: a node that remains
reads what it read before. If that contradicts a name, another tensor took over the name, as in optimisers that fold
BatchNorm into a Conv.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from htp_export.capabilities.carry.backwards import go_backwards
from htp_export.capabilities.carry.counterparts import LOOK_BACK, Counterparts, repeats
from htp_export.capabilities.carry.graph_summary import NOTHING, GraphSummary, SummaryNode
from htp_export.format.tags import Reason
from htp_export.shapes.operator_kinds import base_op, moves, resembles

if TYPE_CHECKING:
    from htp_export.capabilities.carry.likenesses import Likeness

_FEW = 4  # consumers of a weight (a constant like 1 has more), and original nodes that one node replaces

_MOST_FOLLOWERS = 4
"""Nodes after a product that one fused node may have taken in: bias, residual, scale and activation."""


@dataclass
class AlignmentEvidence:
    """What is known of tensors after besides names and structure, by their places in the summary."""

    inputs: Mapping[int, int] = field(default_factory=dict)  # input → original input
    weights: Mapping[int, Likeness] = field(default_factory=dict)  # weight, or what is made of weights → originals
    values: Mapping[int, Likeness] = field(default_factory=dict)  # tensor → the original tensors with its numbers
    unequal: Collection[int] = frozenset()  # tensors that were compared, and that have the numbers of no original
    compared: Collection[int] = frozenset()  # original tensors that took part
    idle: Mapping[int, int] = field(default_factory=dict)  # original node → the input that it gives back here


class Alignment(Counterparts):
    """The counterparts of the tensors after a tool, as far as they are known."""

    def __init__(self, before: GraphSummary, after: GraphSummary, evidence: AlignmentEvidence | None = None) -> None:
        self.evidence = AlignmentEvidence() if evidence is None else evidence
        layouts = {
            node: value for node, value in self.evidence.idle.items() if moves(before.nodes[node].op, views=True)
        }
        super().__init__(before, after, layouts)
        self._settled = set[int]()
        self._node_names = {node.name: index for index, node in enumerate(before.nodes) if node.name}
        self._sources()
        self._look()

    def _look(self) -> None:
        """Forwards and backwards once, for all tensors that are not settled."""
        nodes = self.after.nodes
        for node in nodes:
            self._forward(node)
        self.known = {number for number in self.counterpart if number != NOTHING}
        go_backwards(self)
        self.counterpart = [self.numbers.current(number) for number in self.counterpart]
        self.known = {number for number in self.counterpart if number != NOTHING}

    # --- inputs, outputs and constants ---

    def _sources(self) -> None:
        before, after = self.before, self.after
        for index, value in enumerate(after.values):
            if value.kind == "node":
                continue
            same = self.numbers.constant(value.content) if value.content else NOTHING
            candidate = same
            if same == NOTHING:
                renamed = self.evidence.weights.get(index)
                candidate = before.find(value.name, value.scope) if renamed is None else renamed.originals[0]
                if candidate != NOTHING and (before.values[candidate].content or not self.alike(index, candidate)):
                    candidate = NOTHING  # the same name, but other contents
                candidate = NOTHING if candidate == NOTHING else self.numbers.number[candidate]
            self.match(index, candidate, True)
        for ours, theirs in ((after.inputs, before.inputs), (after.outputs, before.outputs)):
            if len(ours) == len(theirs):
                for index, original in zip(ours, theirs, strict=True):
                    if self.counterpart[index] == NOTHING and self.after.values[index].kind != "initializer":
                        self.match(index, self.numbers.number[original], self.alike(index, original))

    # --- forwards ---

    def _forward(self, node: SummaryNode) -> None:
        if self._settled.issuperset(node.outputs):
            return
        reads = [value if value == NOTHING else self.counterpart[value] for value in node.inputs]
        complete = all(number != NOTHING or value == NOTHING for number, value in zip(reads, node.inputs, strict=True))
        if repeats(node) and reads[0] != NOTHING and len(node.outputs) == 1:
            named = (
                Reason.TENSOR
                if self.before.find(self.after.values[node.outputs[0]].name, node.scope) != NOTHING
                else ""
            )
            self.match(node.outputs[0], reads[0], self.exact[node.inputs[0]], named)
            return
        same = self.numbers.made_by(node, reads) if complete else None
        for place, value in enumerate(node.outputs):
            if value == NOTHING or value in self._settled:
                continue
            candidate = self._by_name(value, node)
            if same is not None and place < len(same.outputs) and same.outputs[place] != NOTHING:
                alike = candidate != NOTHING and self.alike(value, candidate)
                exact = alike or all(self.exact[v] for v in node.inputs if v != NOTHING)  # else in its inputs' layout
                self.match(
                    value,
                    self.numbers.number[same.outputs[place]],
                    exact,
                    Reason.TENSOR if candidate != NOTHING else "",
                )
            elif candidate != NOTHING:
                self.match(value, self.numbers.number[candidate], self.alike(value, candidate), Reason.TENSOR)
            elif place == 0 and not moves(node.op):
                candidate = self._by_node_name(node, {number for number in reads if number != NOTHING})
                if candidate != NOTHING:
                    self.match(value, self.numbers.number[candidate], False, Reason.NODE)
                else:
                    self._by_weights(node, value)

    def _by_name(self, value: int, node: SummaryNode) -> int:
        """The original output of this name; of constants that are known on both sides, one with the same contents."""
        found = self.after.values[value]
        candidate, content = self.before.find(found.name, node.scope), found.content
        if candidate != NOTHING and content and self.before.values[candidate].content not in ("", content):
            return self.numbers.constant(content)
        return candidate

    def _by_node_name(self, node: SummaryNode, reads: set[int]) -> int:
        """The original output of a node by its name: that of an original node or tensor, possibly with a suffix."""
        name = node.name
        while name:
            candidate = self.before.find(name)
            if candidate == NOTHING and name in self._node_names:
                outputs = self.before.nodes[self._node_names[name]].outputs
                candidate = outputs[0] if outputs else NOTHING
            maker = self.before.maker[candidate] if candidate != NOTHING else NOTHING
            if maker != NOTHING and self.before.nodes[maker].scope == node.scope:
                return self._followed(node, candidate, reads) if self._may_make(node, maker, reads) else NOTHING
            name = name[: max(name.rfind("_"), name.rfind("/"), 0)]
        return NOTHING

    def _may_make(self, node: SummaryNode, maker: int, reads: set[int]) -> bool:
        """Whether a node can replace an original one, by their operators.

        One that replaces several may have the name of the last, and the operator of one shortly before (Conv, Relu).
        """
        queue, seen = [maker], set[int]()
        while queue and len(seen) < _FEW:
            at = queue.pop(0)
            if resembles(node.op, self.before.nodes[at].op):
                return True
            seen.add(at)
            behind = (v for v in self.before.nodes[at].inputs if v != NOTHING and self.before.live[v])
            makers = (self.before.maker[v] for v in behind if self.numbers.number[v] not in reads)
            queue += [
                producer for producer in makers if producer != NOTHING and producer not in seen and "::" in node.op
            ]
        return False

    def _by_weights(self, node: SummaryNode, value: int) -> None:
        """Match the output of a node by its weights; where names hold, these say no more."""

    def _followed(self, node: SummaryNode, value: int, reads: set[int]) -> int:
        """A later tensor, if the node reads more than this one depends on, or names an operator that it absorbed."""
        before, number = self.before, self.numbers.number
        missing = self._operands_besides(node, value)
        if not missing:
            missing = {read for read in reads if before.live[read]} - self._made_of(value)
        at = value
        for _ in range(_MOST_FOLLOWERS):
            readers = [reader for reader in before.readers[at] if not self.numbers.idle[reader]]
            if len(readers) != 1 or NOTHING in before.nodes[readers[0]].outputs:
                break
            follower = before.nodes[readers[0]]
            took = base_op(follower.op) in node.words
            if not missing and not took:
                break
            missing -= {number[v] for v in follower.inputs if v != NOTHING}
            at = follower.outputs[0]
            if not missing:
                value = at
        return value

    def _operands_besides(self, node: SummaryNode, value: int) -> set[int]:
        """The inputs of a node beyond those of an original one, if it has more: the other operand of a sum."""
        old = self.before.nodes[self.before.maker[value]]
        mine = Counter(self.counterpart[v] for v in node.inputs if v != NOTHING and self.after.live[v])
        theirs = Counter(self.numbers.number[v] for v in old.inputs if v != NOTHING and self.before.live[v])
        return set(mine - theirs) - {NOTHING} if mine.total() > theirs.total() else set()

    def _made_of(self, value: int) -> set[int]:
        """The numbers of the tensors on which one depends, a few nodes back."""
        queue, behind = [value], set[int]()
        while queue and len(behind) < LOOK_BACK:
            maker = self.before.maker[queue.pop(0)]
            if maker != NOTHING:
                sources = [v for v in self.before.nodes[maker].inputs if v != NOTHING and self.before.live[v]]
                queue.extend(v for v in sources if self.numbers.number[v] not in behind)
                behind.update(self.numbers.number[v] for v in sources)
        return behind
