"""The rewrites of a pass: nodes eliminated together, those that replace them, and which kind of finding that is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx_ir as ir

from htp_export.capabilities.forensics.finding import KINDS
from htp_export.model.neighbours import Groups
from htp_export.shapes.operator_kinds import RESHAPING

if TYPE_CHECKING:
    from htp_export.capabilities.optimize.merging import PassDifference


@dataclass(frozen=True)
class Rewrite:
    """Nodes that a pass eliminated or changed together, in order, with the inputs of the first of them.

    ``added``: new nodes in their place; a node that was changed is in both. ``readers``: other consumers of their
    outputs.
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
    """The rewrites of one run of a pass; with ``one_by_one``, each node is one of its own.

    A rewrite is what lies between a value and the equal value that replaced it. Those that share a node are one.
    A node that was eliminated with no value in its place belongs to the nodes that read it.
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


def equal_constants(difference: PassDifference) -> Iterator[tuple[tuple[ir.Value, ...], tuple[ir.Node, ...]]]:
    """Equal constants of which a pass kept the first one, and the nodes that read them."""
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
        yield values, tuple(dict.fromkeys(node for value in values for node in readers[value]))


ONE_BY_ONE = "eliminate_identity_ops"
"""The pass whose every node is a finding of its own, also if several are consecutive."""


def kind_of(name: str, rewrite: Rewrite) -> str:
    """The kind of what a pass changed: a key of `KINDS`, or the name of the pass."""
    if name in _SEVERAL:
        return _SEVERAL[name](rewrite) or name
    return next((kind for kind, known in KINDS.items() if known.fixed_by == name), name)


def _identity(rewrite: Rewrite) -> str | None:
    node = rewrite.removed[0]
    if node.op_type == "Identity":
        value = rewrite.inputs[0]
        return "identity" if value is None or value.const_value is None else "identity_weight"
    if node.op_type in RESHAPING:
        return "identity_reshape"
    return {"Cast": "identity_cast", "Transpose": "identity_transpose"}.get(node.op_type)


def _transposes(rewrite: Rewrite) -> str:
    if rewrite.added:
        return "chained_transposes"
    perm = rewrite.removed[0].attributes.get_ints("perm")
    alone = len(rewrite.removed) == 1 and perm is not None and list(perm) == sorted(perm)
    return "identity_transpose" if alone else "cancelling_transposes"


def _for_onnxruntime(rewrite: Rewrite) -> str | None:
    made = {node.op_type for node in rewrite.added}
    if any(op.endswith("Attention") for op in made):
        return "attention"
    if any(op.endswith("Gelu") for op in made):
        return next((kind for op, kind in _GELUS.items() if op in rewrite.operators), None)
    return "rms_norm" if any("Simplified" in op or op.startswith("RMS") for op in made) else None


_GELUS = {"Erf": "gelu_erf", "Tanh": "gelu_tanh"}

_SEVERAL: Mapping[str, Callable[[Rewrite], str | None]] = {
    "eliminate_identity_ops": _identity,
    "eliminate_redundant_transposes": _transposes,
    "fuse_for_onnxruntime": _for_onnxruntime,
    "fuse_attention": lambda _: "attention",
}
"""Passes that change more than one kind of nodes."""
