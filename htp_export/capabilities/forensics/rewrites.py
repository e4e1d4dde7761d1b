"""The rewrites of a pass: nodes that were eliminated together, and the nodes that replace them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

from htp_export.model.groups import Groups

if TYPE_CHECKING:
    from htp_export.capabilities.optimize.merging import PassDifference

__all__ = ["EqualConstants", "Rewrite", "equal_constants", "rewrites"]


@dataclass(frozen=True)
class Rewrite:
    """Nodes that a pass eliminated or changed together.

    Attributes:
        removed: The nodes, in the order in which they stood.
        added: New nodes in their place; a node that was changed is in both.
        inputs: The inputs of the first of them.
        readers: Other consumers of their outputs.
    """

    removed: tuple[ir.Node, ...]
    added: tuple[ir.Node, ...]
    inputs: Sequence[ir.Value | None]
    readers: tuple[ir.Node, ...]

    @property
    def operators(self) -> frozenset[str]:
        """Operators of the nodes that were eliminated."""
        return frozenset(node.op_type for node in self.removed)


def rewrites(difference: PassDifference, *, one_by_one: bool = False) -> Iterator[Rewrite]:
    """The rewrites of one run of a pass.

    A rewrite is what lies between a value and the equal value that replaced it. Those that share a node are one.
    A node that was eliminated with no value in its place belongs to the nodes that read it.

    Args:
        difference: What the pass did to the graph.
        one_by_one: Each node is a rewrite of its own, for passes that remove nodes without effect.
    """
    removed, added = dict.fromkeys(difference.removed), dict.fromkeys(difference.added)
    groups: Groups[ir.Node] = Groups()
    for node in (*removed, *(node for node in added if node not in removed)):
        groups.add(node)
    placed: set[ir.Node] = set()
    for old, new in () if one_by_one else difference.equal.items():
        replaced, _ = difference.replaced(old)
        together = [*replaced, *difference.replacing(new)] if replaced else []
        placed.update(together)
        for node in together[1:]:
            groups.join(together[0], node)
    for node in () if one_by_one else removed:
        for value in difference.before.nodes[node].inputs:
            producer = None if value is None else difference.before.makers.get(value)
            if producer in removed and not (node in placed and producer in placed):
                groups.join(producer, node)
    readers: dict[ir.Value, list[ir.Node]] = {}
    for node, seen in difference.before.nodes.items() if removed else ():
        for value in seen.inputs:
            if value is not None and difference.before.makers.get(value) in removed:
                readers.setdefault(value, []).append(node)
    for members in groups:
        gone = tuple(node for node in members if node in removed)
        if gone and not (one_by_one and members[0] in added):  # it stays, and only lost an attribute
            values = (value for node in gone for value in difference.before.nodes[node].outputs)
            read = dict.fromkeys(node for value in values for node in readers.get(value, ()))
            news = tuple(node for node in members if node in added)
            inputs = difference.before.nodes[gone[0]].inputs
            yield Rewrite(gone, news, inputs, tuple(node for node in read if node not in gone))


@dataclass(frozen=True)
class EqualConstants:
    """Equal constants of which a pass kept one.

    Attributes:
        values: The one that stayed, and the others.
        readers: The nodes that read them.
    """

    values: tuple[ir.Value, ...]
    readers: tuple[ir.Node, ...]


def equal_constants(difference: PassDifference) -> Iterator[EqualConstants]:
    """Constants that were replaced by an equal one in one run of a pass."""
    merged: defaultdict[ir.Value, list[ir.Value]] = defaultdict(list)
    for old, new in difference.equal.items():
        if old.producer() is None and new.producer() is None and None not in (old.const_value, new.const_value):
            merged[new].append(old)
    readers: defaultdict[ir.Value | None, list[ir.Node]] = defaultdict(list)
    for node, seen in difference.before.nodes.items() if merged else ():
        for value in dict.fromkeys(seen.inputs):
            readers[value].append(node)
    for kept, others in merged.items():
        values = (kept, *others)
        yield EqualConstants(values, tuple(dict.fromkeys(node for value in values for node in readers[value])))
