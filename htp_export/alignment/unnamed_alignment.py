"""Counterparts of tensors in a model whose names prove nothing; weights and values prove them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from htp_export.alignment.alignment import Alignment, AlignmentEvidence
from htp_export.alignment.graph_summary import NOTHING, GraphSummary, SummaryNode
from htp_export.alignment.numbering import FLOATS
from htp_export.alignment.weight_similarity import NumericMatch
from htp_export.format.tags import Reason
from htp_export.runtime.carried_inputs import pair_names
from htp_export.shapes.operator_kinds import moves, resembles


class UnnamedAlignment(Alignment):
    """Counterparts of the tensors of a model that no tool derived from the original.

    Its summary has no names, see `without_names`.
    """

    by_consumers = True

    def __init__(
        self, before: GraphSummary, after: GraphSummary, evidence: AlignmentEvidence
    ) -> None:
        super().__init__(before, after, evidence)
        if evidence.values and self._by_values():
            self._final = {
                value for value, number in enumerate(self.counterpart) if number != NOTHING
            }
            self._look()  # structure may prove more, from the tensors that values proved

    def match(self, value: int, number: int, exact: bool, evidence: str = "") -> None:
        """Match a value with a number, unless their values were compared and differ."""
        if value in self.evidence.unequal:
            members = self.numbers.members.get(number, ())
            if any(member in self.evidence.compared for member in members):
                return
        super().match(value, number, exact, evidence)

    def _sources(self) -> None:
        numbers = self.numbers
        for index, value in enumerate(self.after.values):
            if value.content:
                self.match(index, numbers.constant(value.content), True)
        for index, original in self.evidence.inputs.items():
            self.match(index, numbers.number[original], self.is_compatible(index, original))
        for index, match in self.evidence.weights.items():
            self._match_originals(index, match, Reason.INITIALIZER)

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
        """Match equal values, even against structure; return whether that added matches."""
        before = list(self.counterpart), dict(self.parts)
        for value, match in self.evidence.values.items():
            numbers = {self.numbers.number[original] for original in match.originals}
            is_matched = self.numbers.current(self.counterpart[value]) in numbers
            if is_matched and match.same_shape:
                self.exact[value] = self.exact[value] or len(numbers) == 1
            elif self.after.values[value].kind == "node" and (match.joined or not is_matched):
                self._match_originals(value, match, Reason.VALUES)
                self.exact[value] = match.same_shape and len(numbers) == 1
        return before != (self.counterpart, self.parts)

    def _by_weights(self, node: SummaryNode, value: int) -> None:
        """Match the output of a node with one weight, or joined weights, with their products."""
        weights = [v for v in node.inputs if v in self.evidence.weights]
        live = self.after.live_inputs(node)
        if len(weights) != 1 or len(live) != 1:
            return
        match = self.evidence.weights[weights[0]]
        originals = match.originals if match.joined else match.originals[:1]
        products = [self._product(node, original) for original in originals]
        if not products or NOTHING in products or self._includes_more(node, products[0]):
            return
        makers = [self.before.maker[product] for product in products]
        if len(set(map(self.read_by, makers))) != 1:
            return
        exact = not match.joined and self.is_compatible(value, products[0])
        self.match(value, self.numbers.number[products[0]], exact, Reason.INITIALIZER)
        if match.joined and self.counterpart[value] != NOTHING:
            self.parts[value] = tuple(products)

    def _includes_more(self, node: SummaryNode, product: int) -> bool:
        """Whether a node of a product's operator has a weight as input that the original has not.

        The bias of a folded BatchNormalization is such a weight. The node also does the work of the
        nodes after the product then.
        """
        if self.before.nodes[self.before.maker[product]].op != node.op:
            return False
        return any(self.counterpart[v] == NOTHING for v in self.after.stored_inputs(node))

    def _product(self, node: SummaryNode, weight: int) -> int:
        """The output of the only original consumer of a weight that resembles the node."""
        consumers = [self.before.nodes[reader] for reader in self.before.readers[weight]]
        similar = [old for old in consumers if resembles(node.op, old.op) and len(old.outputs) == 1]
        if len(similar) != 1 or similar[0].scope:
            return NOTHING
        return similar[0].outputs[0]

    def _match_originals(self, value: int, match: NumericMatch, reason: str) -> None:
        """Match a value with the originals of equal contents, all of one tensor if it is their concatenation.

        Parts are a fact about contents. They are recorded even if `match` refuses the first part
        as a counterpart.
        """
        number, originals = self.numbers.number, match.originals
        if not match.joined and not match.same_shape:
            originals = self._in_chain(value, originals)
        first = number[originals[0]]
        self.match(value, first, match.same_shape, reason)
        if match.joined:
            self.parts[value] = originals
            return
        further = tuple(original for original in originals if number[original] != first)
        if further:
            self.further_originals[value] = further

    def _in_chain(self, value: int, originals: Sequence[int]) -> tuple[int, ...]:
        """Among tensors in a chain of layout operators, the first; the last after a layout operator."""
        sources = {original: self._layout_sources(original) for original in originals}
        maker = self.after.maker[value]
        if maker != NOTHING and moves(self.after.nodes[maker].op):
            inner = set[int]().union(*sources.values())
            chosen = tuple(original for original in originals if original not in inner)
        else:
            chosen = tuple(v for v in originals if sources[v].isdisjoint(originals))
        return chosen or tuple(originals)

    def _layout_sources(self, original: int) -> set[int]:
        """The inputs of the layout operator that produces an original value; else none."""
        maker = self.before.maker[original]
        if maker == NOTHING or not moves(self.before.nodes[maker].op):
            return set()
        return set(self.before.nodes[maker].inputs)

    def weights_of(self, value: int) -> tuple[int, ...]:
        """The original weights whose numbers a value has."""
        match = self.evidence.weights.get(value)
        return () if match is None else match.originals

    def is_unscaled(self, value: int) -> bool:
        """Whether a weight is the whole of its original, without a factor; true of small constants.

        Levels of a quantized weight have a factor, which is another input.
        """
        match = self.evidence.weights.get(value)
        if match is None:
            return True
        has_factor = match.scale != 1 or match.offset != 0
        is_float = self.after.shape(value)[1] in FLOATS
        return not match.parts and not (has_factor and is_float)

    def anchors(self, value: int) -> set[int]:
        """The numbers of a value's original tensors; none for a small constant."""
        if value in self.evidence.weights or self.after.live[value]:
            return self.numbers_of(value)
        return set()


def without_names(summary: GraphSummary) -> GraphSummary:
    """A summary without names and tags, for a model that no tool derived from the original."""
    for index in range(len(summary.values)):
        summary.shape(index)  # inference needs the names
    return GraphSummary(
        [replace(node, name="", owners=(), call="", reason="") for node in summary.nodes],
        [replace(value, name="") for value in summary.values],
        summary.inputs,
        summary.outputs,
    )


def input_pairs(before: GraphSummary, after: GraphSummary) -> dict[int, int]:
    """Input of a model → the original input that it corresponds to, by the words in their names."""
    pairs = dict[int, int]()
    for name, original in pair_names(_input_ranks(after), _input_ranks(before)).items():
        mine, theirs = after.find(name), before.find(original)
        if NOTHING not in (mine, theirs):
            pairs[mine] = theirs
    return pairs


def _input_ranks(summary: GraphSummary) -> dict[str, int | None]:
    """Input → its number of dimensions, None if unknown."""
    ranks = dict[str, int | None]()
    for index in summary.inputs:
        value = summary.values[index]
        if value.kind == "input":
            ranks[value.name] = None if value.shape is None else len(value.shape)
    return ranks
