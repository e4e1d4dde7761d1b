"""A plan as tools other than htp_export see it: names of nodes, each with its precision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import onnx_ir as ir

from htp_export.capabilities.quantize.method import Precision
from htp_export.capabilities.quantize.methods.weights import Blocks
from htp_export.errors import InputError, RuleError
from htp_export.model.tagged import TaggedModel
from htp_export.weights.products import Product, products_of

Expressed: TypeAlias = Mapping[str, Mapping[str, tuple[Any, ...]]]
"""What a tool can be told: method → field of a precision → its values. Other fields do not restrict a rule."""

_USUAL: Mapping[str, tuple[Any, ...]] = {"format": ("default",), "accuracy_level": (None, 0)}
"""Values that tools take which say nothing else: they write their own operators, with no level of arithmetic."""


IN_BLOCKS = ("MatMul", "Gather")
"""Operators whose weights ONNX Runtime and Olive cut into blocks."""


@dataclass(frozen=True)
class TargetFile:
    """What a tool reads.

    Attributes:
        content: Plain data, written as JSON.
        notes: What the user does with it, and what the tool cannot be told, a line each.
    """

    content: dict[str, object]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedModel:
    """A model whose nodes have precisions.

    Attributes:
        tagged: The model, without functions.
        precisions: Node → its precision, for the nodes that the plan names.
        rules: Selector → precision, as the plan has them.
    """

    tagged: TaggedModel
    precisions: Mapping[ir.Node, Precision]
    rules: Mapping[str, Precision]

    @cached_property
    def nodes(self) -> tuple[ir.Node, ...]:
        """The nodes of the main graph; tools do not look into the graphs of branches and loops."""
        return tuple(self.tagged.model.graph)

    def of(self, method: str) -> dict[Precision, list[ir.Node]]:
        """Precision → its nodes, for the precisions with a method."""
        found: dict[Precision, list[ir.Node]] = {}
        for node in self.nodes:
            precision = self.precisions.get(node)
            if precision is not None and precision.method == method:
                found.setdefault(precision, []).append(node)
        return found

    def others(self, chosen: Iterable[ir.Node]) -> list[ir.Node]:
        """The nodes with names that are not chosen."""
        among = set(chosen)
        return [node for node in self.nodes if node not in among and node.name]

    def weighted(self, nodes: Iterable[ir.Node]) -> list[Product]:
        """The weights that nodes multiply with or look up."""
        return list(products_of(self.tagged, nodes))

    def check(self, target: str, expressed: Expressed) -> None:
        """Refuse a plan with a precision that a tool does not have; the message names the rule (`RuleError`)."""
        for selector, precision in self.rules.items():
            if precision.method == "keep":
                continue
            if precision.method not in expressed:
                known = ", ".join(sorted({*expressed, "keep"}))
                raise RuleError(selector, f"{target} has no {precision}; it takes the methods {known}")
            for name, allowed in {**_USUAL, **expressed[precision.method]}.items():
                value = getattr(precision, name)
                if value not in allowed:
                    known = ", ".join(str(each) for each in allowed if each is not None)
                    raise RuleError(selector, f"{target} has no {precision} with {name} {value}; it takes {known}")

    def check_alike(self, target: str, method: str, *fields: str) -> None:
        """Refuse rules of a method that differ in fields of which a tool has one value in a run (`RuleError`)."""
        used = {*self.precisions.values()}
        listed = [(key, each) for key, each in self.rules.items() if each.method == method and each in used]
        for name in fields:
            for selector, precision in listed[1:]:
                first, value = (value_of(each, name) for each in (listed[0][1], precision))
                if value != first:
                    raise RuleError(selector, f"{target} has one {name} in a run; the plan has {first} and {value}")

    def check_names(self) -> None:
        """Refuse nodes without a name of their own (`InputError`): tools know a node by its name."""
        counts = Counter(node.name for node in self.nodes)
        for node in self.nodes:
            if node in self.precisions and (not node.name or counts[node.name] > 1):
                owner = next(iter(self.tagged.owners_of(node)), "")
                problem = "has no name" if not node.name else f"shares the name {node.name!r} with another node"
                raise InputError(
                    f"a {node.op_type} of module {owner or '(root)'!r} {problem}; tools know nodes by their names"
                )

    def block_notes(self, tool: str) -> tuple[str, ...]:
        """A line about weights that a tool does not cut into blocks, because of their operators."""
        weighted = [use.node.op_type for nodes in self.of("weights").values() for use in self.weighted(nodes)]
        left_out = [kind for kind in weighted if kind not in IN_BLOCKS]
        kinds = ", ".join(sorted(set(left_out)))
        return (f"{len(left_out)} nodes keep their weights: {tool} has no blocks in {kinds}",) if left_out else ()

    def subgraph_notes(self) -> tuple[str, ...]:
        """A line about nodes that the tool cannot be told of: those of branches and loops."""
        count = len(self.precisions.keys() - set(self.nodes))
        left_out = f"{count} nodes in branches or loops are left out: the file names nodes of the main graph"
        return (left_out,) if count else ()


def value_of(precision: Precision, field: str) -> Any:
    """The value of a field; for the level of arithmetic the one that is used where none is given."""
    return Blocks(precision).accuracy_level if field == "accuracy_level" else getattr(precision, field)


def names(nodes: Iterable[ir.Node]) -> list[str]:
    """The names of nodes."""
    return [str(node.name) for node in nodes]
