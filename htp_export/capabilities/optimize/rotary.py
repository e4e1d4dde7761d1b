"""Rotary position embedding in single nodes: ``x * cos + turned(x) * sin``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import onnx_ir as ir

from htp_export.capabilities.optimize.attention_matching import Placed
from htp_export.capabilities.optimize.passes.eliminate_whole_gathers import stacked
from htp_export.capabilities.optimize.passes.merge_slices import part_of
from htp_export.editing.editing import constant_array, multiple
from htp_export.model.neighbours import producer_of
from htp_export.shapes.known import axes_of, normalized
from htp_export.shapes.symbolic import Symbolic


class Rotation(NamedTuple):
    """A rotation of the first features of a tensor; the others are unchanged."""

    source: ir.Value  # the tensor before
    cos: ir.Value  # the factors of the features: of batch, length and features
    sin: ir.Value  # the factors of the turned features
    features: int  # the number of rotated features
    # whether adjacent features are a pair; otherwise, a feature of each half
    interleaved: bool


def match_rotation(
    queries: Placed, keys: Placed, known: Symbolic
) -> tuple[Placed, Placed, Rotation] | None:
    """Queries and keys before a rotation of ``GroupQueryAttention``, and the rotation."""
    sources: list[Placed] = []
    rotations: list[Rotation] = []
    for placed in (queries, keys):
        rotation = _rotation(placed.value, known)
        if rotation is None:
            placed = placed.before_transpose(known)
            rotation = _rotation(placed.value, known)
        if rotation is None:
            return None
        heads_axis = 1 if placed.heads_first else 2
        cos = _without_heads(rotation.cos, heads_axis, known)
        sin = _without_heads(rotation.sin, heads_axis, known)
        if cos is None or sin is None:
            return None
        sources.append(Placed(rotation.source, placed.heads_first))
        rotations.append(rotation._replace(cos=cos, sin=sin))
    first, second = rotations
    if first[1:] != second[1:] or not _is_supported(first, known):
        return None
    return sources[0], sources[1], first


def _is_supported(rotation: Rotation, known: Symbolic) -> bool:
    """Whether the operator can compute a rotation: tables of one shape, with each angle twice."""
    shape = known.shape(rotation.source)
    cos_shape, sin_shape = known.shape(rotation.cos), known.shape(rotation.sin)
    if shape is None or cos_shape is None or cos_shape != sin_shape:
        return False
    if cos_shape[-1:] != (rotation.features,):
        return False
    # ONNX Runtime requires multiples of 16
    if rotation.features % 16 or shape[-1] % 16:  # type: ignore[operator]
        return False
    tables = (rotation.cos, rotation.sin)
    return all(_has_angles_twice(table, known, rotation.interleaved) for table in tables)


def _rotation(value: ir.Value | None, known: Symbolic) -> Rotation | None:
    """The rotation whose result a tensor is, also of a part of the features."""
    shape, joined = known.shape(value), _joined(value, known)
    if shape is not None and joined is not None and len(joined) == 2:
        rotated, rest = _whole(joined[0], known), _part(joined[1], known)
        if rotated is not None and rest is not None:
            source, features = rest[0], rotated.features
            is_rest = rest[1:] == (features, shape[-1], 1)
            if is_rest and _part(rotated.source, known) == (source, 0, features, 1):
                return rotated._replace(source=source)
    return _whole(value, known)


def _whole(value: ir.Value | None, known: Symbolic) -> Rotation | None:
    """The rotation of all features whose result a tensor is."""
    shape, total = known.shape(value), producer_of(value, "Add")
    if shape is None or not isinstance(shape[-1], int) or total is None:
        return None
    for plain, turned_product in (total.inputs, reversed(total.inputs)):
        for turned, sin in _factors(turned_product):
            pairs = _turned(turned, known)
            if pairs is None:
                continue
            source, interleaved = pairs
            for factor, cos in _factors(plain):
                if factor is source:
                    return Rotation(source, cos, sin, shape[-1], interleaved)
    return None


def _factors(value: ir.Value | None) -> Iterator[tuple[ir.Value, ir.Value]]:
    """The two factors of a product, in both orders."""
    product = producer_of(value, "Mul")
    if product is not None and product.inputs[0] is not None and product.inputs[1] is not None:
        yield product.inputs[0], product.inputs[1]
        yield product.inputs[1], product.inputs[0]


def _turned(value: ir.Value, known: Symbolic) -> tuple[ir.Value, bool] | None:
    """The tensor of whose pairs (a, b) a tensor has (-b, a), and whether pairs are adjacent."""
    shape, joined = known.shape(value), _joined(value, known)
    is_interleaved = not joined
    parts = _stacked(value, known) if joined is None else joined
    if shape is None or not isinstance(shape[-1], int) or parts is None or len(parts) != 2:
        return None
    second, first = _part(_negated(parts[0]), known), _part(parts[1], known)
    if first is None or second is None or first[0] is not second[0]:
        return None
    half, last = shape[-1] // 2, shape[-1]
    if is_interleaved:
        are_pairs = first[1:] == (0, last, 2) and second[1:] == (1, last, 2)
    else:
        are_pairs = first[1:] == (0, half, 1) and second[1:] == (half, last, 1)
    return (first[0], is_interleaved) if are_pairs else None


def _joined(value: ir.Value | None, known: Symbolic) -> list[ir.Value] | None:
    """The tensors that are concatenated along the last axis."""
    node, rank = producer_of(value, "Concat"), known.rank(value)
    if node is None or rank is None:
        return None
    if normalized(node.attributes["axis"].as_int(), rank) != rank - 1:
        return None
    return [part for part in node.inputs if part is not None]


def _stacked(value: ir.Value | None, known: Symbolic) -> list[ir.Value] | None:
    """The tensors whose features a tensor has in turn: stacked along a new axis, then flattened."""
    node, flat = producer_of(value, "Reshape"), known.shape(value)
    shape = known.shape(node.inputs[0]) if node is not None else None
    if node is None or shape is None or flat is None or flat[:-1] != shape[:-2]:
        return None
    return stacked(node.inputs[0], known)


def _negated(value: ir.Value) -> ir.Value | None:
    node = producer_of(value, "Neg")
    if node is not None:
        return node.inputs[0]
    factor = multiple(value.producer())
    return factor[0] if factor is not None and factor[1] == -1 else None


def _part(value: ir.Value | None, known: Symbolic) -> tuple[ir.Value, int, int, int] | None:
    """The tensor of whose last axis a tensor is a slice, and the start, end and step there."""
    part = part_of(value, known)
    if part is None or part.step < 1 or known.rank(part.source) != part.axis + 1:
        return None
    return part.source, part.start, part.end, part.step


def _without_heads(value: ir.Value, heads_axis: int, known: Symbolic) -> ir.Value | None:
    """The factors of a rotation that is the same for all heads, without the axis of the heads.

    The axis stays, with size 1, if no ``Unsqueeze`` added it.
    """
    shape, node = known.shape(value), producer_of(value, "Unsqueeze")
    if shape is None or len(shape) != 4 or shape[heads_axis] != 1:
        return None
    axes = axes_of(node, known) if node is not None else None
    if node is None or axes is None or [axis % 4 for axis in axes] != [heads_axis]:
        return value
    return node.inputs[0]


def _has_angles_twice(value: ir.Value | None, known: Symbolic, interleaved: bool) -> bool:
    """Whether a table has each angle twice: in both halves; if interleaved, side by side."""
    # exports have fewer nodes here; the bound ends long chains of copies
    for _ in range(16):
        node = producer_of(
            value, "Cos", "Sin", "Cast", "Mul", "Div", "Identity", "Concat", "Reshape", "Unsqueeze"
        )
        if node is None:
            return False
        if node.op_type == "Concat":
            halves = _joined(node.outputs[0], known)
            return not interleaved and _are_equal_pair(halves)
        if node.op_type == "Reshape":
            return interleaved and _repeats_features(node, known)
        if node.op_type in ("Mul", "Div"):
            computed = [arg for arg in node.inputs if constant_array(arg, 1) is None]
            if len(node.inputs) - len(computed) != 1:
                return False
            value = computed[0] if computed else None
        else:
            before, after = known.shape(node.inputs[0]), known.shape(node.outputs[0])
            if before is None or after is None or before[-1] != after[-1]:
                return False
            value = node.inputs[0]
    return False


def _are_equal_pair(parts: list[ir.Value] | None) -> bool:
    return parts is not None and len(parts) == 2 and parts[0] is parts[1]


def _repeats_features(node: ir.Node, known: Symbolic) -> bool:
    """Whether a ``Reshape`` flattens a last axis of two equal elements: expanded, or stacked."""
    stacked = _stacked(node.outputs[0], known)
    if stacked is not None:
        return _are_equal_pair(stacked)
    expand = producer_of(node.inputs[0], "Expand", "Tile")
    if expand is None:
        return False
    before, after = known.shape(expand.inputs[0]), known.shape(expand.outputs[0])
    flat = known.shape(node.outputs[0])
    if before is None or after is None or flat is None or len(before) != len(after):
        return False
    return before[-1] == 1 and after[-1] == 2 and flat[:-1] == after[:-2]
