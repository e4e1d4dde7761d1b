"""Attention of a decoder with a key-value cache, and the rotation of its queries and keys, as files write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.attention_masks import Mask, hides_rows, read_mask
from htp_export.capabilities.optimize.passes.eliminate_redundant_transposes import permutation
from htp_export.capabilities.optimize.rotary import rotated, stated_twice, without_heads
from htp_export.editing.editing import constant_array, multiple
from htp_export.model.neighbours import only_consumer, producer_of
from htp_export.shapes.known import axes_of, normalized
from htp_export.shapes.sizes import Dim
from htp_export.shapes.symbolic import Symbolic

HEADS_FIRST = [0, 2, 1, 3]
"""From batch, length, heads, features to batch, heads, length, features; and back."""


class Placed(NamedTuple):
    """A tensor of batch, heads, length and features; or, if it is not turned yet, of batch, length, heads, features."""

    value: ir.Value
    is_turned: bool = True


@dataclass(frozen=True)
class CachedAttention:
    """Attention of a decoder with a cache; sizes are numbers where the operator needs numbers."""

    end: ir.Node  # the last node, of batch, length and features; or of batch, length, heads and features
    is_flat: bool
    queries: Placed
    keys: Placed
    values: Placed
    past: tuple[ir.Value, ir.Value]
    caches: tuple[ir.Node, ir.Node]
    heads: int
    shared_heads: int
    features: int
    dims: tuple[Dim, Dim, Dim]  # batch, new tokens, all tokens
    bias: ir.Value | None
    mask: Mask | None
    scale: float
    softcap: float
    dtype: ir.DataType


def match_attention(last: ir.Node, known: Symbolic) -> CachedAttention | str | None:
    """The attention with a cache whose last product is a node; a text: why it cannot be the operator."""
    weights, is_guarded = _unguarded(last.inputs[0])
    softmax = producer_of(weights, "Softmax")
    values = _cached(last.inputs[1], known)
    if softmax is None or values is None:
        return None
    scores = _scores(softmax.inputs[0], known)
    if scores is None:
        return "its scores are not a product that is scaled, capped and added to a mask"
    transposed = _transposed(scores.keys, known)
    keys = _cached(transposed, known)
    shape, cache = known.shape(scores.queries), known.shape(keys.outputs[0]) if keys is not None else None
    if keys is None or shape is None or cache is None or len(shape) != 4:
        return None
    batch, heads, new, features = shape
    shared, total = cache[1], cache[2]
    dtype = known.dtype(scores.queries)
    if not (isinstance(heads, int) and isinstance(shared, int) and isinstance(features, int)):
        return "the numbers of heads and features are not known"
    if cache[:3] != (known.shape(values.outputs[0]) or ())[:3] or heads % shared:
        return "keys and values have other heads or lengths"
    if features != cache[3] or known.shape(values.outputs[0])[3] != features:  # type: ignore[index]
        return "queries, keys and values have heads of different sizes"
    if features % 8:
        return f"heads have {features} features; the operator takes multiples of 8"
    if dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        return f"it computes in {dtype}, and the operator in float32 and float16"
    if only_consumer(last.inputs[0]) is None:  # type: ignore[arg-type]
        return "other nodes read the weights of the attention"
    mask = read_mask(scores.bias, known) if scores.bias is not None else None
    if scores.bias is None and new != 1:
        return "it has no mask, and the operator hides later tokens"
    if scores.bias is not None:
        if mask is None or not mask.causal:
            return "its mask is not known to hide later tokens, which the operator always does"
        bias = known.shape(scores.bias)
        if (
            bias is None
            or len(bias) != 4
            or bias[2:] != (new, total)
            or bias[0] not in (1, batch)
            or bias[1] not in (1, heads)
        ):
            return "its mask has not a number for each query and key"
    hides_nan = is_guarded and mask is not None and mask.hiding == -np.inf  # a row of it is NaN, and then zeros
    end = _end(last, mask, known, (batch, new, heads, features), gives_zeros=hides_nan)
    if isinstance(end, str):
        return end
    past = keys.inputs[0], values.inputs[0]
    new_keys, new_values = keys.inputs[1], values.inputs[1]
    if past[0] is None or past[1] is None or new_keys is None or new_values is None:
        return None
    return CachedAttention(
        *end,
        queries=Placed(scores.queries),
        keys=Placed(new_keys),
        values=Placed(new_values),
        past=(past[0], past[1]),
        caches=(keys, values),
        heads=heads,
        shared_heads=shared,
        features=features,
        dims=(batch, new, total),
        bias=scores.bias,
        mask=mask,
        scale=scores.scale,
        softcap=scores.softcap,
        dtype=dtype,
    )


def _unguarded(value: ir.Value | None) -> tuple[ir.Value | None, bool]:
    """The weights, and whether zeros are in the place of those that are not numbers."""
    guard = producer_of(value, "Where")
    test = producer_of(guard.inputs[0], "IsNaN") if guard is not None else None
    zero = constant_array(guard.inputs[1], 1) if guard is not None else None
    if guard is None or test is None or zero is None or zero.any() or test.inputs[0] is not guard.inputs[2]:
        return value, False
    return guard.inputs[2], True


class _Scores(NamedTuple):
    """The parts of scores: a product of queries and turned keys, scaled, capped, and with a summand."""

    queries: ir.Value
    keys: ir.Value
    bias: ir.Value | None
    scale: float
    softcap: float


def _scores(value: ir.Value | None, known: Symbolic) -> _Scores | None:
    total = producer_of(value, "Add")
    if total is None:
        return _product(value, None, known)
    for place in (0, 1):
        found = _product(total.inputs[place], total.inputs[1 - place], known)
        if found is not None:
            return found
    return None


def _product(value: ir.Value | None, bias: ir.Value | None, known: Symbolic) -> _Scores | None:
    softcap = 0.0
    value, scale = _unscaled(value)
    capped = producer_of(value, "Tanh")
    if capped is not None:
        value, inner = _unscaled(capped.inputs[0])
        softcap, scale = scale, inner * scale
    product = producer_of(value, "MatMul")
    if product is None:
        return None
    queries, first = _unscaled(product.inputs[0])
    keys, second = _unscaled(product.inputs[1])
    scale *= first * second
    if queries is None or keys is None or not 0 < scale < np.inf or not 0 <= softcap < np.inf:
        return None
    return _Scores(queries, keys, bias, scale, softcap)


def _unscaled(value: ir.Value | None) -> tuple[ir.Value | None, float]:
    """The tensor that a tensor is a multiple of, and the factor."""
    factor = 1.0
    while value is not None and (found := multiple(value.producer())) is not None:
        value, factor = found[0], factor * float(found[1])
    return value, factor


def _transposed(value: ir.Value | None, known: Symbolic) -> ir.Value | None:
    """The tensor whose last two dimensions a tensor has in turn; with the others joined for the time, maybe."""
    node, shape = producer_of(value, "Transpose", "Reshape"), known.shape(value)
    if node is None or shape is None or len(shape) != 4:
        return None
    if node.op_type == "Transpose":
        return node.inputs[0] if permutation(node, known) == [0, 1, 3, 2] else None
    inner = producer_of(node.inputs[0], "Transpose")
    outer = producer_of(inner.inputs[0], "Reshape") if inner is not None else None
    if inner is None or outer is None or permutation(inner, known) != [0, 2, 1]:
        return None
    before, joined = known.shape(outer.inputs[0]), known.shape(outer.outputs[0])
    if before is None or joined is None or len(before) != 4 or len(joined) != 3:
        return None
    same = before == (*shape[:2], shape[3], shape[2]) and joined[1:] == before[2:]
    return outer.inputs[0] if same else None


def _cached(value: ir.Value | None, known: Symbolic) -> ir.Node | None:
    """The ``Concat`` of past and new keys or values whose heads a tensor has, repeated for the heads of queries."""
    node = producer_of(value, "Reshape")
    if node is not None:
        expand = producer_of(node.inputs[0], "Expand")
        unsqueeze = producer_of(expand.inputs[0], "Unsqueeze") if expand is not None else None
        axes = axes_of(unsqueeze, known) if unsqueeze is not None else None
        before, after = (known.shape(expand.inputs[0]), known.shape(expand.outputs[0])) if expand else (None, None)
        shape = known.shape(value)
        if unsqueeze is None or axes != [2] or before is None or after is None or shape is None or len(after) != 5:
            return None
        if shape != (after[0], after[1] * after[2], *after[3:]) or before[1] != after[1] or before[3:] != after[3:]:
            return None
        value = unsqueeze.inputs[0]
    cache = producer_of(value, "Concat")
    if cache is None or len(cache.inputs) != 2 or known.rank(value) != 4:
        return None
    return cache if normalized(cache.attributes["axis"].as_int(), 4) == 2 else None


def _end(
    last: ir.Node, mask: Mask | None, known: Symbolic, shape: tuple[Dim, Dim, int, int], *, gives_zeros: bool
) -> tuple[ir.Node, bool] | str:
    """The last node, and whether it gives batch, length and features, or still has a dimension for the heads."""
    value = last.outputs[0]
    guard = only_consumer(value, "Where")
    if guard is not None and guard.inputs[2] is value:
        zero = constant_array(guard.inputs[1], 1)
        if mask is None or zero is None or zero.any() or not hides_rows(guard.inputs[0], mask.visible, known):
            return "its result depends on another condition than its mask"
        value = guard.outputs[0]
    elif mask is not None and not mask.by_keys and not gives_zeros:
        return "it averages all values for queries without a visible key, and the operator gives zeros"
    while (copy := only_consumer(value, "Reshape", "Identity")) is not None:
        if known.shape(copy.outputs[0]) != known.shape(value) or copy.inputs[0] is not value:
            break
        value = copy.outputs[0]
    turn = only_consumer(value, "Transpose")
    if turn is None or permutation(turn, known) != HEADS_FIRST or known.shape(turn.outputs[0]) != shape:
        return "its heads are not joined as the operator joins them"
    join = only_consumer(turn.outputs[0], "Reshape")
    if join is not None and known.shape(join.outputs[0]) == (*shape[:2], shape[2] * shape[3]):
        return join, True
    return turn, False


class Rotation(NamedTuple):
    """The rotation of queries and keys, and what they were before."""

    queries: Placed
    keys: Placed
    cos: ir.Value  # of batch, length and features
    sin: ir.Value
    features: int
    interleaved: bool


def match_rotation(found: CachedAttention, known: Symbolic) -> Rotation | None:
    """The rotation that the operator can do; None if there is none, or one of another kind: it stays outside then."""
    both = []
    for placed in (found.queries, found.keys):
        value, is_turned = placed
        turning = rotated(value, known)
        transpose = producer_of(value, "Transpose")
        if turning is None and transpose is not None and permutation(transpose, known) == HEADS_FIRST:
            turning, is_turned = rotated(transpose.inputs[0], known), False
        if turning is None:
            return None
        cos, sin = (without_heads(each, 1 if is_turned else 2, known) for each in (turning.cos, turning.sin))
        if cos is None or sin is None:
            return None
        kind = (cos, sin, turning.features, turning.interleaved)
        both.append((Placed(turning.source, is_turned), kind))
    (queries, kind), (keys, other) = both
    cos, sin, features, interleaved = kind
    if kind != other or features % 16 or found.features % 16 or (known.shape(cos) or ())[-1:] != (features,):
        return None
    if known.shape(cos) != known.shape(sin):
        return None
    if not all(stated_twice(each, known, interleaved) for each in (cos, sin)):
        return None
    return Rotation(queries, keys, cos, sin, features, interleaved)
