"""Which kind of finding a rewrite is."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from htp_export.capabilities.forensics.finding import KINDS
from htp_export.capabilities.forensics.rewrites import Rewrite
from htp_export.shapes.operator_kinds import RESHAPING

__all__ = ["ONE_BY_ONE", "kind_of"]

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
