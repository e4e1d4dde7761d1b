"""Rotary position embedding, as models write it: ``x * cos + turned(x) * sin``."""

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
    """A rotation of the first features of a tensor; the others stay."""

    source: ir.Value  # the tensor before
    cos: ir.Value  # what the features are multiplied by: of batch, length and features
    sin: ir.Value  # the same of the turned features
    features: int  # how many features are rotated
    # whether neighbouring features are a pair, and not the first half and the second
    interleaved: bool


def match_rotation(
    queries: Placed, keys: Placed, known: Symbolic
) -> tuple[Placed, Placed, Rotation] | None:
    """Queries and keys before the rotation that ``GroupQueryAttention`` can do, and this rotation; None if none."""
    sources, rotations = [], []
    for placed in (queries, keys):
        if (turning := _rotation(placed.value, known)) is None:
            placed = placed.before_turning(known)
            turning = _rotation(placed.value, known)
        if turning is None:
            return None
        cos, sin = (
            _without_heads(each, 1 if placed.is_turned else 2, known)
            for each in (turning.cos, turning.sin)
        )
        if cos is None or sin is None:
            return None
        sources.append(Placed(turning.source, placed.is_turned))
        rotations.append(turning._replace(cos=cos, sin=sin))
    rotation, other = rotations
    _, cos, sin, features, interleaved = rotation
    shape, *sizes = (known.shape(value) for value in rotation[:3])
    if rotation[1:] != other[1:] or shape is None or sizes[0] is None or sizes[0] != sizes[1]:
        return None
    if sizes[0][-1:] != (features,) or features % 16 or shape[-1] % 16:  # type: ignore[operator]
        return None
    if not all(_stated_twice(each, known, interleaved) for each in (cos, sin)):
        return None
    return sources[0], sources[1], rotation


def _rotation(value: ir.Value | None, known: Symbolic) -> Rotation | None:
    """The rotation that a tensor is the result of."""
    shape, joined = known.shape(value), _joined(value, known)
    # a part of the features stays
    if shape is not None and joined is not None and len(joined) == 2:
        first, rest = _whole(joined[0], known), _part(joined[1], known)
        if first is not None and rest is not None:
            part = _part(first.source, known)
            if part == (rest[0], 0, first.features, 1) and rest[1:] == (
                first.features,
                shape[-1],
                1,
            ):
                return first._replace(source=rest[0])
    return _whole(value, known)


def _whole(value: ir.Value | None, known: Symbolic) -> Rotation | None:
    shape, total = known.shape(value), producer_of(value, "Add")
    if shape is None or not isinstance(shape[-1], int) or total is None:
        return None
    for plain, turning in (total.inputs, reversed(total.inputs)):
        for turned, sin in _factors(turning):
            found = _turned(turned, known)
            if found is None:
                continue
            source, interleaved = found
            for other, cos in _factors(plain):
                if other is source:
                    return Rotation(source, cos, sin, shape[-1], interleaved)
    return None


def _factors(value: ir.Value | None) -> Iterator[tuple[ir.Value, ir.Value]]:
    """The two factors of a product, in both orders."""
    product = producer_of(value, "Mul")
    if product is not None and product.inputs[0] is not None and product.inputs[1] is not None:
        yield product.inputs[0], product.inputs[1]
        yield product.inputs[1], product.inputs[0]


def _turned(value: ir.Value, known: Symbolic) -> tuple[ir.Value, bool] | None:
    """The tensor of which a tensor has the second features, negated, before the first; and if they are neighbours."""
    shape, joined = known.shape(value), _joined(value, known)
    if joined is None:
        joined = _stacked(value, known)
    if shape is None or not isinstance(shape[-1], int) or joined is None or len(joined) != 2:
        return None
    second, first = _part(_negated(joined[0]), known), _part(joined[1], known)
    if first is None or second is None or first[0] is not second[0]:
        return None
    half, last = shape[-1] // 2, shape[-1]
    if first[1:] == (0, half, 1) and second[1:] == (half, last, 1) and _joined(value, known):
        return first[0], False
    if first[1:] == (0, last, 2) and second[1:] == (1, last, 2) and not _joined(value, known):
        return first[0], True
    return None


def _joined(value: ir.Value | None, known: Symbolic) -> list[ir.Value] | None:
    """The tensors that are joined along the last dimension."""
    node, rank = producer_of(value, "Concat"), known.rank(value)
    if (
        node is None
        or rank is None
        or normalized(node.attributes["axis"].as_int(), rank) != rank - 1
    ):
        return None
    return [each for each in node.inputs if each is not None]


def _stacked(value: ir.Value | None, known: Symbolic) -> list[ir.Value] | None:
    """The tensors of whose features a tensor has one of each in turn: stacked along a new last dimension."""
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
    """The tensor of whose last dimension a tensor is a part: its start, end and step there."""
    part = part_of(value, known)
    if part is None or part.step < 1 or known.rank(part.source) != part.axis + 1:
        return None
    return part.source, part.start, part.end, part.step


def _without_heads(value: ir.Value, heads: int, known: Symbolic) -> ir.Value | None:
    """What rotates all heads alike, of batch, length and features; or with a dimension of 1, the heads' one, if so."""
    shape, node = known.shape(value), producer_of(value, "Unsqueeze")
    if shape is None or len(shape) != 4 or shape[heads] != 1:
        return None
    axes = axes_of(node, known) if node is not None else None
    return (
        node.inputs[0]
        if node is not None and axes is not None and [axis % 4 for axis in axes] == [heads]
        else value
    )


def _stated_twice(value: ir.Value | None, known: Symbolic, interleaved: bool) -> bool:
    """Whether the first half of a tensor's features is equal to the second; interleaved: each one to its neighbour."""
    for _ in range(16):
        node = producer_of(
            value, "Cos", "Sin", "Cast", "Mul", "Div", "Identity", "Concat", "Reshape", "Unsqueeze"
        )
        if node is None:
            return False
        if node.op_type in ("Mul", "Div"):
            scalars = [constant_array(each, 1) for each in node.inputs]
            value = next(
                (x for x, number in zip(node.inputs, scalars, strict=True) if number is None), None
            )
            if sum(number is not None for number in scalars) != 1:
                return False
        elif node.op_type == "Concat":
            joined = _joined(node.outputs[0], known)
            return (
                not interleaved
                and joined is not None
                and len(joined) == 2
                and joined[0] is joined[1]
            )
        elif node.op_type == "Reshape":
            return interleaved and _repeated(node, known)
        else:
            shapes = [known.shape(each) for each in (node.inputs[0], node.outputs[0])]
            if shapes[0] is None or shapes[1] is None or shapes[0][-1] != shapes[1][-1]:
                return False
            value = node.inputs[0]
    return False


def _repeated(node: ir.Node, known: Symbolic) -> bool:
    """Whether a ``Reshape`` joins two equal neighbours of each feature: an expanded last dimension, or two stacked."""
    stacked = _stacked(node.outputs[0], known)
    if stacked is not None:
        return len(stacked) == 2 and stacked[0] is stacked[1]
    expand = producer_of(node.inputs[0], "Expand", "Tile")
    before, after = (
        (known.shape(expand.inputs[0]), known.shape(expand.outputs[0])) if expand else (None, None)
    )
    flat = known.shape(node.outputs[0])
    if before is None or after is None or flat is None:
        return False
    return (
        before[-1] == 1 and after[-1] == 2 and len(before) == len(after) and flat[:-1] == after[:-2]
    )
