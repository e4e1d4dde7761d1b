"""Counterparts of tensors where names prove nothing: weights and values do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from htp_export.alignment.alignment import Alignment, AlignmentEvidence
from htp_export.alignment.graph_summary import NOTHING, GraphSummary, SummaryNode
from htp_export.alignment.weight_similarity import NumericMatch
from htp_export.format.tags import Reason
from htp_export.runtime.carried_inputs import pair_names
from htp_export.shapes.operator_kinds import moves, resembles


class UnnamedAlignment(Alignment):
    """The counterparts of the tensors of a model that was not made of the original; its summary is `without_names`."""

    by_consumers = True

    def __init__(
        self, before: GraphSummary, after: GraphSummary, evidence: AlignmentEvidence
    ) -> None:
        super().__init__(before, after, evidence)
        if evidence.values and self._by_values():
            self._final = {
                value for value, number in enumerate(self.counterpart) if number != NOTHING
            }
            self._look()  # what is known now may tell more

    def match(self, value: int, number: int, exact: bool, evidence: str = "") -> None:
        """Match a value with a number, unless their numbers were compared and differ."""
        members = self.numbers.members.get(number, ()) if value in self.evidence.unequal else ()
        if not any(member in self.evidence.compared for member in members):
            super().match(value, number, exact, evidence)

    def _sources(self) -> None:
        numbers = self.numbers
        for index, value in enumerate(self.after.values):
            if value.content:
                self.match(index, numbers.constant(value.content), True)
        for index, original in self.evidence.inputs.items():
            self.match(index, numbers.number[original], self.is_compatible(index, original))
        for index, like in self.evidence.weights.items():
            self._take(index, like, Reason.INITIALIZER)

    def _forward(self, node: SummaryNode) -> None:
        if (
            self.numbers.returns_input(self.after, node)
            and self.counterpart[node.outputs[0]] == NOTHING
        ):
            source = node.inputs[0]
            self.match(node.outputs[0], self.counterpart[source], self.exact[source])
        else:
            super()._forward(node)

    def _by_values(self) -> bool:
        """Match tensors with equal values, even if structure contradicts; return whether that added matches."""
        before = list(self.counterpart), dict(self.parts)
        for value, like in self.evidence.values.items():
            numbers = {self.numbers.number[original] for original in like.originals}
            known = self.numbers.current(self.counterpart[value]) in numbers
            if known and like.same_shape:
                self.exact[value] = self.exact[value] or len(numbers) == 1
            elif self.after.values[value].kind == "node" and (like.joined or not known):
                self._take(value, like, Reason.VALUES)
                self.exact[value] = like.same_shape and len(numbers) == 1
        return before != (self.counterpart, self.parts)

    def _by_weights(self, node: SummaryNode, value: int) -> None:
        """Match the output of a node that reads one weight, or several joined ones, with the products of these."""
        weights = [v for v in node.inputs if v in self.evidence.weights]
        live = self.after.live_inputs(node)
        if len(weights) != 1 or len(live) != 1:
            return
        like = self.evidence.weights[weights[0]]
        products = [
            self._product(node, each)
            for each in (like.originals if like.joined else like.originals[:1])
        ]
        if products and NOTHING not in products and not self._has_absorbed(node, products[0]):
            number = self.numbers.number
            if len({self.read_by(self.before.maker[product]) for product in products}) == 1:
                exact = not like.joined and self.is_compatible(value, products[0])
                self.match(value, number[products[0]], exact, Reason.INITIALIZER)
                if like.joined and self.counterpart[value] != NOTHING:
                    self.parts[value] = tuple(products)

    def _has_absorbed(self, node: SummaryNode, product: int) -> bool:
        """Whether a node of the operator of an original product reads a further weight that the original has not.

        It is the bias that a BatchNormalization left: the node does the work of what follows the
        product, too.
        """
        if self.before.nodes[self.before.maker[product]].op != node.op:
            return False
        stored = (v for v in node.inputs if v != NOTHING and not self.after.live[v])
        return any(self.counterpart[v] == NOTHING for v in stored)

    def _product(self, node: SummaryNode, weight: int) -> int:
        """The output of the one original node that a node resembles and that reads a weight."""
        readers = [self.before.nodes[reader] for reader in self.before.readers[weight]]
        found = [old for old in readers if resembles(node.op, old.op) and len(old.outputs) == 1]
        return found[0].outputs[0] if len(found) == 1 and not found[0].scope else NOTHING

    def _take(self, value: int, like: NumericMatch, reason: str) -> None:
        number = self.numbers.number
        originals = (
            like.originals
            if like.joined or like.same_shape
            else self._in_chain(value, like.originals)
        )
        first = number[originals[0]]
        self.match(value, first, like.same_shape, reason)
        if like.joined:
            self.parts[value] = originals
        else:
            further = tuple(original for original in originals if number[original] != first)
            if further:
                self.further_originals[value] = further

    def _in_chain(self, value: int, originals: Sequence[int]) -> tuple[int, ...]:
        """Of tensors that layout operators make of each other, the first; or the last, for an output of such a one."""
        moved = {original: self._moved_from(original) & set(originals) for original in originals}
        maker = self.after.maker[value]
        if maker != NOTHING and moves(self.after.nodes[maker].op):
            sources = set[int]().union(*moved.values())
            chosen = tuple(original for original in originals if original not in sources)
        else:
            chosen = tuple(original for original in originals if not moved[original])
        return chosen or tuple(originals)

    def _moved_from(self, original: int) -> set[int]:
        maker = self.before.maker[original]
        if maker == NOTHING or not moves(self.before.nodes[maker].op):
            return set()
        return set(self.before.nodes[maker].inputs)

    def weights_of(self, value: int) -> tuple[int, ...]:
        """The original weights that a value stands for."""
        like = self.evidence.weights.get(value)
        return () if like is None else like.originals

    def anchors(self, value: int) -> set[int]:
        """The numbers of the original tensors that a value stands for, without those of small constants."""
        if value in self.evidence.weights or self.after.live[value]:
            return self.numbers_of(value)
        return set()


def without_names(summary: GraphSummary) -> GraphSummary:
    """A summary without the names and tags of a model that was not made of the original."""
    for index in range(len(summary.values)):
        summary.shape(index)  # inferred by names
    return GraphSummary(
        [replace(node, name="", owners=(), call="", reason="") for node in summary.nodes],
        [replace(value, name="") for value in summary.values],
        summary.inputs,
        summary.outputs,
    )


def input_pairs(before: GraphSummary, after: GraphSummary) -> dict[int, int]:
    """Input of a model → the original input that it stands for, by the words in their names."""
    ranks = [
        {
            value.name: None if value.shape is None else len(value.shape)
            for value in (each.values[index] for index in each.inputs)
            if value.kind == "input"
        }
        for each in (after, before)
    ]
    pairs = {after.find(mine): before.find(other) for mine, other in pair_names(*ranks).items()}
    return {mine: other for mine, other in pairs.items() if NOTHING not in (mine, other)}
