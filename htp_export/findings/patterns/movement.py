"""Nodes that move data or change its type, and do it for nothing or twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from htp_export.findings.finding import Match
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.operators import RESHAPING

__all__ = ["casts", "identities", "reshapes", "transposes"]

_IN_BETWEEN = "what lies between is read elsewhere"


def identities(facts: GraphFacts) -> Iterator[Match]:
    """``Identity``, of weights and of anything else."""
    for node in facts.nodes_of("Identity"):
        value = node.inputs[0]
        weight = facts.tagged.index.initializer(value) if value is not None else None
        leaves = node.outputs[0].is_graph_output()
        blocked = "a graph's output needs a name of its own" if leaves and _named(value) else ""
        if weight is not None and weight.name:
            yield Match("identity_weight", (node,), weight.name, blocked, (weight.name,))
        else:
            yield Match("identity", (node,), "", blocked)


def _named(value: ir.Value | None) -> bool:
    """Whether a value's name cannot be given away: it enters the graph, or leaves it itself."""
    if value is None:
        return True
    return value.is_graph_input() or value.is_initializer() or value.is_graph_output()


def transposes(facts: GraphFacts) -> Iterator[Match]:
    """A ``Transpose`` that moves nothing, and one after another."""
    for node in facts.nodes_of("Transpose"):
        perm = _permutation(facts, node)
        if perm is None:
            continue
        if perm == sorted(perm):
            yield Match("identity_transpose", (node,), _axes(perm))
            continue
        first = facts.maker(node.inputs[0], "Transpose")
        before = _permutation(facts, first) if first is not None else None
        if first is None or before is None or len(before) != len(perm):
            continue
        joint = [before[axis] for axis in perm]
        detail = f"{_axes(before)}, then {_axes(perm)}"
        if joint == sorted(joint):
            yield Match("cancelling_transposes", (first, node), detail)
        else:
            alone = facts.only_reader(first.outputs[0]) is not None
            yield Match("chained_transposes", (first, node), f"{detail}: {_axes(joint)}", "" if alone else _IN_BETWEEN)


def _permutation(facts: GraphFacts, node: ir.Node) -> list[int] | None:
    written = node.attributes.get_ints("perm")
    rank = facts.rank(node.inputs[0])
    if written is not None:
        return list(written)
    return None if rank is None else list(reversed(range(rank)))


def _axes(perm: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, perm)) + "]"


def reshapes(facts: GraphFacts) -> Iterator[Match]:
    """A ``Reshape`` to the shape that is there, and views in a row."""
    for node in facts.nodes_of(*sorted(RESHAPING)):
        given, result = facts.shape(node.inputs[0]), facts.shape(node.outputs[0])
        if given is not None and given == result and None not in given:
            yield Match("identity_reshape", (node,), f"{node.op_type} to {_sizes(given)}")
            continue
        first = facts.maker(node.inputs[0], *RESHAPING)
        if first is None or facts.is_constant(first.inputs[0]):
            continue
        alone = all(use.node.op_type in RESHAPING for use in first.outputs[0].uses())
        blocked = "" if alone and not first.outputs[0].is_graph_output() else _IN_BETWEEN
        free = 2 if result is None else sum(not isinstance(size, int) for size in result)
        if not blocked and free > 1 and not _kept(facts.shape(first.inputs[0]), result):
            blocked = "more than one size of the result is not known beforehand"
        yield Match("chained_reshapes", (first, node), f"{first.op_type}, then {node.op_type}", blocked)


def _kept(given: Sequence[object] | None, result: Sequence[object] | None) -> bool:
    """Whether all sizes but one are numbers or stand where they stood before, so that ``Reshape`` can name them."""
    if given is None or result is None:
        return False
    free = [k for k, size in enumerate(result) if not isinstance(size, int)]
    moved = [k for k in free if k >= len(given) or result[k] is None or given[k] != result[k]]
    return len(moved) <= 1


def _sizes(shape: Sequence[object]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def casts(facts: GraphFacts) -> Iterator[Match]:
    """A ``Cast`` to the type that is there, and one after another."""
    for node in facts.nodes_of("Cast"):
        to, given = _target(node), facts.dtype(node.inputs[0])
        if to is not None and given == to:
            yield Match("identity_cast", (node,), to.name)
            continue
        first = facts.maker(node.inputs[0], "Cast")
        source = facts.dtype(first.inputs[0]) if first is not None else None
        if first is None:
            continue
        between = _target(first)
        detail = " to ".join(kind.name if kind else "?" for kind in (source, between, to))
        narrows = source is None or between is None or not _holds(between, source)
        why = "the type in between holds less, so that both count" if narrows else ""
        yield Match("cast_chain", (first, node), detail, why)


def _target(node: ir.Node) -> ir.DataType | None:
    to = node.attributes.get("to")
    return None if to is None or to.is_ref() else ir.DataType(to.as_int())


def _holds(wide: ir.DataType, narrow: ir.DataType) -> bool:
    """Whether every value of one type is one of another."""
    if narrow == ir.DataType.BOOL:
        return True
    try:
        one, other = narrow.numpy(), wide.numpy()
    except TypeError:
        return False
    if one.kind in "fiu" and other.kind in "fiu":
        import numpy as np

        return bool(np.can_cast(one, other, "safe"))
    return False
