"""ONNX Runtime's ``GroupQueryAttention``: rotation, cache, repeated heads, mask and attention of a decoder layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.attention_masks import Mask, hides_rows, read_mask
from htp_export.capabilities.optimize.cache_lengths import CacheLengths, Lengths
from htp_export.capabilities.optimize.declining import decline
from htp_export.capabilities.optimize.node_pass import NodePass, integers
from htp_export.capabilities.optimize.passes.eliminate_redundant_transposes import permutation
from htp_export.capabilities.optimize.registry import register
from htp_export.capabilities.optimize.rotary import rotated, stated_twice, without_heads
from htp_export.editing.editing import add_constant, constant_array, multiple, remove_unused, replace, stand_in
from htp_export.model.neighbours import only_consumer, producer_of
from htp_export.model.recipes import lift_constants
from htp_export.shapes.known import axes_of, normalized
from htp_export.shapes.operator_kinds import is_standard
from htp_export.shapes.sizes import Dim
from htp_export.shapes.symbolic import Symbolic

_NAME = "fuse_group_query_attention"
_DOMAIN = "com.microsoft"
_HEADS_FIRST = [0, 2, 1, 3]
"""From batch, length, heads, features to batch, heads, length, features; and back."""


@register(_NAME, level="fused")
class FuseGroupQueryAttention(NodePass):
    """Makes ``GroupQueryAttention`` of rotation, cache and attention of a decoder.

    The node has the file's own mask as its bias: padding on any side, windows and summands by distance stay what they
    were. It takes the length of the cache from the model's other inputs, so that past and present can share one buffer.
    See https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.GroupQueryAttention.
    """

    operators = ("MatMul",)
    opset = 15  # Shape with a start and an end

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        if not _has_cache(model.graph):
            return ir.passes.PassResult(model, modified=False)
        prepared = _prepare(model)
        self._lengths = CacheLengths(model.graph)
        self._tables: dict[tuple[ir.Value, ...], list[ir.Value]] = {}
        self._sinks: dict[tuple[int, float], ir.Value] = {}
        result = super().call(model)
        if result.modified:
            model.opset_imports[_DOMAIN] = 1
            self._lengths.read_no_past(self.known)
            remove_unused(model)
            model.graph.sort()
        return ir.passes.PassResult(model, prepared or result.modified)

    def rewrite(self, node: ir.Node) -> bool:
        found = _match(node, self.known)
        if isinstance(found, str):
            return decline(_NAME, [node], found)
        if found is None:
            return False
        lengths = self._lengths.find(found.dims, found.past[0], self.known)
        if lengths is None:
            return decline(_NAME, [node], "no input but the cache has the sizes of the batch and of the new tokens")
        self._fuse(found, lengths)
        return True

    def _fuse(self, found: _Attention, lengths: Lengths) -> None:
        rotation = _rotation(found, self.known)
        queries, keys = (found.queries, found.keys) if rotation is None else (rotation.queries, rotation.keys)
        nodes: list[ir.Node] = []
        tables: Sequence[ir.Value | None] = [None, None, None]
        if rotation is not None:
            tables = self._tables_of(rotation, lengths, nodes)
        flat = [_flat(each, found, self.known, nodes) for each in (queries, keys, found.values)]
        total, last, new = self._lengths.of_rows(lengths)
        inputs = [*flat, *found.past, last, total, *tables, found.bias, self._sink(found), None, None, None, None, new]
        attributes: dict[str, float | int] = {
            "num_heads": found.heads,
            "kv_num_heads": found.shared_heads,
            "scale": found.scale,
            "softcap": found.softcap,
            "do_rotary": int(rotation is not None),
            "rotary_interleaved": int(rotation is not None and rotation.interleaved),
        }
        node = ir.node("GroupQueryAttention", inputs, attributes, domain=_DOMAIN, num_outputs=3)
        nodes.append(node)
        if not found.is_flat:
            shape = integers(found.end, [0, 0, found.heads, found.features], "heads")
            nodes.append(ir.node("Reshape", [node.outputs[0], shape]))
        present = [cache.outputs[0] for cache in found.caches]
        self._lengths.add_past(lengths, found.past)
        for value in present:
            self._lengths.replace_shape(value, lengths, lengths.total, self.known)
        replace(found.end, nodes)
        for old, new_value in zip(present, node.outputs[1:], strict=True):
            stand_in(old, new_value)

    def _tables_of(self, rotation: _Rotation, lengths: Lengths, nodes: list[ir.Node]) -> list[ir.Value]:
        """Cosines, sines and positions: the file's own, in a row for each token, and the number of this row.

        The operator asks for at least as many rows as there are tokens with the cache. Those that are missing are zeros
        and not read.
        """
        key = (rotation.cos, rotation.sin)
        if key not in self._tables:
            step, half = (2, rotation.features // 2) if rotation.interleaved else (1, rotation.features // 2)
            bounds = [self._numbers([number]) for number in (0, half * step, -1, step)]
            one = self.known.shape(rotation.cos)[0] == 1 != lengths.dims[0]  # type: ignore[index]
            pads, positions = self._lengths.missing(lengths, one=one)
            tables = []
            for value in key:
                for operator, more in (("Slice", bounds), ("Reshape", [self._numbers([-1, half])]), ("Pad", [pads])):
                    nodes.append(ir.node(operator, [value, *more]))
                    value = nodes[-1].outputs[0]
                tables.append(value)
            self._tables[key] = [*tables, positions]
        return self._tables[key]

    def _numbers(self, numbers: Sequence[int]) -> ir.Value:
        return add_constant(self.graph, np.array(numbers, np.int64), "rotary_numbers")

    def _sink(self, found: _Attention) -> ir.Value | None:
        """A score that each softmax has besides; it counts only for queries that see no key, and makes these zeros."""
        if found.mask is None:
            return None
        dtype = np.dtype(np.float16 if found.dtype == ir.DataType.FLOAT16 else np.float32)
        score = max(found.mask.hiding, float(np.finfo(dtype).min)) / 8
        key = (found.heads, score)
        if key not in self._sinks:
            self._sinks[key] = add_constant(self.graph, np.full(found.heads, score, dtype), "hidden_row_score")
        return self._sinks[key]


def _has_cache(graph: ir.Graph) -> bool:
    """Whether a graph adds to inputs of four dimensions, as to a cache."""
    inputs = [value for value in graph.inputs if value.shape is not None and len(value.shape) == 4]
    return any(is_standard(use.node, "Concat") for value in inputs for use in value.uses())


def _prepare(model: ir.Model) -> bool:
    """Make constants initializers, and leave out a ``Concat`` of one tensor, as TorchScript has them."""
    modified = lift_constants(model)
    for node in list(model.graph):
        if is_standard(node, "Concat") and len(node.inputs) == 1 and not node.outputs[0].is_graph_output():
            node.outputs[0].replace_all_uses_with(node.inputs[0])
            model.graph.remove(node, safe=True)
            modified = True
    return modified


class _Placed(NamedTuple):
    """A tensor of batch, heads, length and features; or, if it is not turned yet, of batch, length, heads, features."""

    value: ir.Value
    is_turned: bool = True


@dataclass(frozen=True)
class _Attention:
    """Attention of a decoder with a cache; sizes are numbers where the operator needs numbers."""

    end: ir.Node  # the last node, of batch, length and features; or of batch, length, heads and features
    is_flat: bool
    queries: _Placed
    keys: _Placed
    values: _Placed
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


def _match(last: ir.Node, known: Symbolic) -> _Attention | str | None:
    """The attention with a cache whose last product is a node; a text: why it cannot be the operator."""
    weights, is_guarded = _unguarded(last.inputs[0])
    softmax = producer_of(weights, "Softmax")
    values = _cached(last.inputs[1], known)
    scores = _scores(softmax.inputs[0], known) if softmax is not None else None
    if softmax is None or values is None or scores is None:
        return None
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
        if bias is None or len(bias) != 4 or bias[2:] != (new, total) or bias[0] not in (1, batch) or bias[1] not in (1, heads):
            return "its mask has not a number for each query and key"
    hides_nan = is_guarded and mask is not None and mask.hiding == -np.inf  # a row of it is NaN, and then zeros
    end = _end(last, mask, known, (batch, new, heads, features), gives_zeros=hides_nan)
    if isinstance(end, str):
        return end
    past = keys.inputs[0], values.inputs[0]
    new_keys, new_values = keys.inputs[1], values.inputs[1]
    if past[0] is None or past[1] is None or new_keys is None or new_values is None:
        return None
    return _Attention(
        *end,
        *(_Placed(value) for value in (scores.queries, new_keys, new_values)),
        (past[0], past[1]),
        (keys, values),
        *(heads, shared, features),
        (batch, new, total),
        *(scores.bias, mask, scores.scale, scores.softcap, dtype),
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
    """The ``Concat`` of past and new keys or values whose heads a tensor has, each repeated so that all queries' have one."""
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
    """The node that gives batch, length and features, or batch, length, heads and features; and which of these it is."""
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
    if turn is None or permutation(turn, known) != _HEADS_FIRST or known.shape(turn.outputs[0]) != shape:
        return "its heads are not joined as the operator joins them"
    join = only_consumer(turn.outputs[0], "Reshape")
    if join is not None and known.shape(join.outputs[0]) == (*shape[:2], shape[2] * shape[3]):
        return join, True
    return turn, False


class _Rotation(NamedTuple):
    """The rotation of queries and keys, and what they were before."""

    queries: _Placed
    keys: _Placed
    cos: ir.Value  # of batch, length and features
    sin: ir.Value
    features: int
    interleaved: bool


def _rotation(found: _Attention, known: Symbolic) -> _Rotation | None:
    """The rotation that the operator can do; None if there is none, or one of another kind: it stays outside then."""
    both = []
    for placed in (found.queries, found.keys):
        value, is_turned = placed
        turning = rotated(value, known)
        transpose = producer_of(value, "Transpose")
        if turning is None and transpose is not None and permutation(transpose, known) == _HEADS_FIRST:
            turning, is_turned = rotated(transpose.inputs[0], known), False
        if turning is None:
            return None
        cos, sin = (without_heads(each, 1 if is_turned else 2, known) for each in (turning.cos, turning.sin))
        if cos is None or sin is None:
            return None
        kind = (cos, sin, turning.features, turning.interleaved)
        both.append((_Placed(turning.source, is_turned), kind))
    (queries, kind), (keys, other) = both
    cos, sin, features, interleaved = kind
    if kind != other or features % 16 or found.features % 16 or (known.shape(cos) or ())[-1:] != (features,):
        return None
    if known.shape(cos) != known.shape(sin):
        return None
    if not all(stated_twice(each, known, interleaved) for each in (cos, sin)):
        return None
    return _Rotation(queries, keys, cos, sin, features, interleaved)


def _flat(placed: _Placed, found: _Attention, known: Symbolic, nodes: list[ir.Node]) -> ir.Value:
    """Queries, keys or values of batch, length and features: as they were before heads were set apart, or joined."""
    value, is_turned = placed
    sizes = known.shape(value) or ()
    heads = sizes[1 if is_turned else 2]
    turn = producer_of(value, "Transpose") if is_turned else None
    if turn is not None and permutation(turn, known) == _HEADS_FIRST and turn.inputs[0] is not None:
        value, is_turned = turn.inputs[0], False
    if is_turned:
        nodes.append(ir.node("Transpose", [value], {"perm": _HEADS_FIRST}))
        value = nodes[-1].outputs[0]
    apart = producer_of(value, "Reshape")
    joint = apart.inputs[0] if apart is not None else None
    if joint is not None and known.shape(joint) == (*found.dims[:2], heads * found.features):
        return joint
    nodes.append(ir.node("Reshape", [value, integers(found.end, [0, 0, -1], "joint")]))
    return nodes[-1].outputs[0]
