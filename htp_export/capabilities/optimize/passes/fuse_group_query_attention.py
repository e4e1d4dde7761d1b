"""ONNX Runtime's ``GroupQueryAttention`` for a decoder: rotation, cache, mask and attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.attention_matching import (
    HEADS_FIRST,
    Mask,
    Placed,
    Scores,
    guarded,
    hides_rows,
    match_head_merge,
    match_scores,
    read_mask,
)
from htp_export.capabilities.optimize.cache_lengths import CacheLengths, Lengths
from htp_export.capabilities.optimize.passes.eliminate_redundant_transposes import permutation
from htp_export.capabilities.optimize.registry import NodePass, decline, integers, register
from htp_export.capabilities.optimize.rotary import Rotation, match_rotation
from htp_export.editing.editing import (
    add_constant,
    constant_array,
    remove_unused,
    replace,
    replace_with,
)
from htp_export.extras import required
from htp_export.model.neighbours import only_consumer, producer_of
from htp_export.model.recipes import lift_constants
from htp_export.shapes.known import axes_of, normalized
from htp_export.shapes.operator_kinds import is_standard
from htp_export.shapes.sizes import Dim
from htp_export.shapes.symbolic import Symbolic

_NAME = "fuse_group_query_attention"
_DOMAIN = "com.microsoft"


@register(_NAME, level="fused")
class FuseGroupQueryAttention(NodePass):
    """Fuses rotation, cache and attention of a decoder into ``GroupQueryAttention``.

    The mask of the file becomes the bias of the node: padding on any side, windows and position
    biases are unchanged. The length of the cache is computed from the model's other inputs, so that
    past and present can share one buffer. See
    https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.GroupQueryAttention.
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
            self._lengths.replace_past_lengths(self.known)
            remove_unused(model)
            model.graph.sort()
        return ir.passes.PassResult(model, prepared or result.modified)

    def rewrite(self, node: ir.Node) -> bool:
        attention = _match(node, self.known)
        if attention is None:
            return False
        if isinstance(attention, str):
            return decline(_NAME, [node], attention)
        if not _takes_query_seqlens():
            why = "the operator of the installed ONNX Runtime has no input query_seqlens"
            return decline(_NAME, [node], why)
        lengths = self._lengths.find(attention.dims, attention.past[0], self.known)
        if lengths is None:
            why = "no input but the cache has the sizes of the batch and of the new tokens"
            return decline(_NAME, [node], why)
        self._fuse(attention, lengths)
        return True

    def _fuse(self, attention: _CachedAttention, lengths: Lengths) -> None:
        scores, end = attention.scores, attention.end
        queries, keys, values = (Placed(value) for value in (scores.queries, *attention.new))
        nodes: list[ir.Node] = []
        tables: Sequence[ir.Value | None] = [None, None, None]
        rotated = match_rotation(queries, keys, self.known)
        if rotated is not None:
            queries, keys, rotation = rotated
            tables = self._tables_of(rotation, lengths, nodes)
        flat = [_flat(placed, end, self.known, nodes) for placed in (queries, keys, values)]
        total, last, new = self._lengths.of_rows(lengths)
        inputs = [
            *flat,
            *attention.past,
            last,
            total,
            *tables,
            scores.bias,
            self._sink(attention),
            *[None] * 4,
            new,
        ]
        attributes: dict[str, float | int] = {
            "num_heads": attention.heads,
            "kv_num_heads": attention.shared_heads,
            "scale": scores.scale,
            "softcap": scores.softcap,
            "do_rotary": int(rotated is not None),
            "rotary_interleaved": int(rotated is not None and rotation.interleaved),
        }
        node = ir.node("GroupQueryAttention", inputs, attributes, domain=_DOMAIN, num_outputs=3)
        nodes.append(node)
        if not attention.is_flat:
            shape = integers(end, [0, 0, attention.heads, attention.features], "heads")
            nodes.append(ir.node("Reshape", [node.outputs[0], shape]))
        present = [cache.outputs[0] for cache in attention.caches]
        self._lengths.add_past(lengths, attention.past)
        for value in present:
            self._lengths.replace_shape(value, lengths, lengths.total, self.known)
        replace(end, nodes)
        for old, new_value in zip(present, node.outputs[1:], strict=True):
            replace_with(old, new_value)

    def _tables_of(
        self, rotation: Rotation, lengths: Lengths, nodes: list[ir.Node]
    ) -> list[ir.Value]:
        """Tables of cosines and sines with one row a token, and the row of each token.

        The operator requires at least as many rows as there are tokens with the cache. Missing rows
        are zeros, and are not read.
        """
        key = (rotation.cos, rotation.sin)
        if key not in self._tables:
            half = rotation.features // 2
            step = 2 if rotation.interleaved else 1  # every angle once: tables have it twice
            bounds = [self._numbers([number]) for number in (0, half * step, -1, step)]
            one = self.known.shape(rotation.cos)[0] == 1 != lengths.dims[0]  # type: ignore[index]
            pads, positions = self._lengths.missing(lengths, one=one)
            tables: list[ir.Value] = []
            for value in key:
                sliced = ir.node("Slice", [value, *bounds])
                rows = ir.node("Reshape", [sliced.outputs[0], self._numbers([-1, half])])
                padded = ir.node("Pad", [rows.outputs[0], pads])
                nodes += [sliced, rows, padded]
                tables.append(padded.outputs[0])
            self._tables[key] = [*tables, positions]
        return self._tables[key]

    def _numbers(self, numbers: Sequence[int]) -> ir.Value:
        return add_constant(self.graph, np.array(numbers, np.int64), "rotary_numbers")

    def _sink(self, attention: _CachedAttention) -> ir.Value | None:
        """The score of an additional key without a value, for each head: the attention sink.

        It only counts for queries that see no key, whose results become zeros.
        """
        if attention.mask is None:
            return None
        dtype = np.float16 if attention.dtype == ir.DataType.FLOAT16 else np.float32
        hidden_score = max(attention.mask.hiding, float(np.finfo(dtype).min))
        # Far above the scores of hidden keys, so that a row of them has no weight, and far below
        # those of visible keys, so that the sink has none: an eighth of the lowest number is both.
        score = hidden_score / 8
        key = (attention.heads, score)
        if key not in self._sinks:
            array = np.full(attention.heads, score, dtype)
            self._sinks[key] = add_constant(self.graph, array, "hidden_row_score")
        return self._sinks[key]


@cache
def _takes_query_seqlens() -> bool:
    """Whether the operator has the input ``query_seqlens``, as in ONNX Runtime 1.32.

    With it, several new tokens of several texts can follow a cache.
    """
    bindings = required("onnxruntime.capi.onnxruntime_pybind11_state", "fuse-group-query-attention")
    names: set[str] = set()
    for schema in bindings.get_all_operator_schema():
        if schema.name == "GroupQueryAttention":
            names.update(formal.name for formal in schema.inputs)
    return "query_seqlens" in names


def _has_cache(graph: ir.Graph) -> bool:
    """Whether a graph concatenates to an input of four dimensions, as to a cache."""
    inputs = [value for value in graph.inputs if value.shape is not None and len(value.shape) == 4]
    return any(is_standard(use.node, "Concat") for value in inputs for use in value.uses())


def _prepare(model: ir.Model) -> bool:
    """Convert constants to initializers, and remove each ``Concat`` of one tensor.

    TorchScript writes both.
    """
    modified = lift_constants(model)
    for node in list(model.graph):
        only = node.inputs[0] if is_standard(node, "Concat") and len(node.inputs) == 1 else None
        if only is not None and replace_with(node.outputs[0], only):
            model.graph.remove(node, safe=True)
            modified = True
    return modified


def _flat(placed: Placed, end: ir.Node, known: Symbolic, nodes: list[ir.Node]) -> ir.Value:
    """Queries, keys or values of batch, length and features.

    They are the input of the split into heads, or the result of nodes that merge the heads.
    """
    placed = placed.before_transpose(known)
    merged = placed.merged(known)
    if merged is not None:
        return merged
    value = placed.value
    if placed.heads_first:
        nodes.append(ir.node("Transpose", [value], {"perm": HEADS_FIRST}))
        value = nodes[-1].outputs[0]
    nodes.append(ir.node("Reshape", [value, integers(end, [0, 0, -1], "joint")]))
    return nodes[-1].outputs[0]


@dataclass(frozen=True)
class _CachedAttention:
    """Attention of a decoder with a cache; sizes are numbers if the operator requires numbers."""

    # the last node, of batch, length and features; or of batch, length, heads and features
    end: ir.Node
    is_flat: bool
    scores: Scores
    caches: tuple[ir.Node, ir.Node]
    heads: int
    shared_heads: int
    features: int
    dims: tuple[Dim, Dim, Dim]  # batch, new tokens, all tokens
    mask: Mask | None
    dtype: ir.DataType

    @property
    def past(self) -> list[ir.Value]:
        """Keys and values of earlier tokens."""
        return [cache.inputs[0] for cache in self.caches]  # type: ignore[misc]

    @property
    def new(self) -> list[ir.Value]:
        """Keys and values of new tokens."""
        return [cache.inputs[1] for cache in self.caches]  # type: ignore[misc]


def _match(last: ir.Node, known: Symbolic) -> _CachedAttention | str | None:
    """The attention with a cache whose last product is this node.

    A text is the reason why it cannot be the operator; None: it is no attention with a cache.
    """
    weights = guarded(producer_of(last.inputs[0], "Where"))
    softmax = producer_of(last.inputs[0] if weights is None else weights, "Softmax")
    values = _cached(last.inputs[1], known)
    if softmax is None or values is None:
        return None
    scores = match_scores(softmax.inputs[0])
    if scores is None:
        return "its scores are not a product that is scaled, capped and added to a mask"
    keys = _cached(_untransposed(scores.keys, known), known)
    if keys is None:
        return None
    sizes = _sizes_of(scores, keys, values, known)
    if sizes is None or isinstance(sizes, str):
        return sizes
    if only_consumer(last.inputs[0]) is None:  # type: ignore[arg-type]
        return "other nodes read the weights of the attention"
    mask = read_mask(scores.bias, known) if scores.bias is not None else None
    problem = _mask_problem(scores.bias, mask, sizes, known)
    if problem:
        return problem
    # the row of a query that sees no key is NaN, and the guard replaces it by zeros
    hides_nan = weights is not None and mask is not None and mask.hiding == -np.inf
    end = _end(last, mask, known, sizes, gives_zeros=hides_nan)
    if isinstance(end, str):
        return end
    end_node, is_flat = end
    return _CachedAttention(
        end=end_node,
        is_flat=is_flat,
        scores=scores,
        caches=(keys, values),
        heads=sizes.heads,
        shared_heads=sizes.shared_heads,
        features=sizes.features,
        dims=(sizes.batch, sizes.new, sizes.total),
        mask=mask,
        dtype=sizes.dtype,
    )


@dataclass(frozen=True)
class _Sizes:
    """Sizes and type of an attention with a cache: ``new`` and ``total`` are numbers of tokens."""

    batch: Dim
    new: Dim
    total: Dim
    heads: int
    shared_heads: int
    features: int
    dtype: ir.DataType


def _sizes_of(
    scores: Scores, keys: ir.Node, values: ir.Node, known: Symbolic
) -> _Sizes | str | None:
    """The sizes of an attention, or the reason why the operator cannot have them."""
    queries_shape, keys_shape = known.shape(scores.queries), known.shape(keys.outputs[0])
    values_shape, dtype = known.shape(values.outputs[0]), known.dtype(scores.queries)
    if queries_shape is None or keys_shape is None or len(queries_shape) != 4:
        return None
    batch, heads, new, features = queries_shape
    _, shared_heads, total, key_features = keys_shape
    if not (isinstance(heads, int) and isinstance(shared_heads, int) and isinstance(features, int)):
        return "the numbers of heads and features are not known"
    if values_shape is None or keys_shape[:3] != values_shape[:3] or heads % shared_heads:
        return "keys and values have other heads or lengths"
    if not features == key_features == values_shape[3]:
        return "queries, keys and values have heads of different sizes"
    if features % 8:
        return f"heads have {features} features; the operator takes multiples of 8"
    if dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        return f"it computes in {dtype}, and the operator in float32 and float16"
    return _Sizes(batch, new, total, heads, shared_heads, features, dtype)


def _mask_problem(bias: ir.Value | None, mask: Mask | None, sizes: _Sizes, known: Symbolic) -> str:
    """Why the operator cannot have a mask; empty if it can."""
    if bias is None:
        return "" if sizes.new == 1 else "it has no mask, and the operator hides later tokens"
    if mask is None or not mask.causal:
        return "its mask is not known to hide later tokens, which the operator always does"
    shape = known.shape(bias) or ()
    if len(shape) != 4 or shape[2:] != (sizes.new, sizes.total):
        return "its mask has not a number for each query and key"
    if shape[0] not in (1, sizes.batch) or shape[1] not in (1, sizes.heads):
        return "its mask has not a number for each query and key"
    return ""


def _untransposed(value: ir.Value | None, known: Symbolic) -> ir.Value | None:
    """The input of a transpose of the last two axes.

    Also if the leading axes were flattened for it.
    """
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
    """The ``Concat`` of past and new keys or values, before its heads are repeated."""
    if producer_of(value, "Reshape") is not None:
        value = _before_repeating(value, known)
    cache = producer_of(value, "Concat")
    if cache is None or len(cache.inputs) != 2 or known.rank(value) != 4:
        return None
    return cache if normalized(cache.attributes["axis"].as_int(), 4) == 2 else None


def _before_repeating(value: ir.Value | None, known: Symbolic) -> ir.Value | None:
    """The tensor whose heads Unsqueeze, Expand and Reshape repeat; None for other nodes."""
    reshape = producer_of(value, "Reshape")
    expand = producer_of(reshape.inputs[0], "Expand") if reshape is not None else None
    unsqueeze = producer_of(expand.inputs[0], "Unsqueeze") if expand is not None else None
    if expand is None or unsqueeze is None or axes_of(unsqueeze, known) != [2]:
        return None
    before, after = known.shape(expand.inputs[0]), known.shape(expand.outputs[0])
    shape = known.shape(value)
    if before is None or after is None or shape is None or len(after) != 5:
        return None
    repeats_heads = before[1] == after[1] and before[3:] == after[3:]
    if not repeats_heads or shape != (after[0], after[1] * after[2], *after[3:]):
        return None
    return unsqueeze.inputs[0]


def _end(
    last: ir.Node, mask: Mask | None, known: Symbolic, sizes: _Sizes, *, gives_zeros: bool
) -> tuple[ir.Node, bool] | str:
    """The last node of an attention, and whether it merges the heads.

    Or why it is not the operator.

    ``gives_zeros``: the results of queries that see no key are zeros before.
    """
    value = last.outputs[0]
    guard = only_consumer(value, "Where")
    if guard is not None and guard.inputs[2] is value:
        if not _clears_hidden_rows(guard, mask, known):
            return "its result depends on another condition than its mask"
        value = guard.outputs[0]
    elif mask is not None and not mask.by_keys and not gives_zeros:
        return (
            "it averages all values for queries without a visible key, "
            "and the operator returns zeros"
        )
    while (copy := only_consumer(value, "Reshape", "Identity")) is not None:
        if known.shape(copy.outputs[0]) != known.shape(value) or copy.inputs[0] is not value:
            break
        value = copy.outputs[0]
    transpose, merge = match_head_merge(value, known)
    shape = (sizes.batch, sizes.new, sizes.heads, sizes.features)
    if transpose is None or known.shape(transpose.outputs[0]) != shape:
        return "its heads are not joined as the operator joins them"
    return (transpose, False) if merge is None else (merge, True)


def _clears_hidden_rows(guard: ir.Node, mask: Mask | None, known: Symbolic) -> bool:
    """Whether a ``Where`` replaces the results of queries that see no key by zeros."""
    zero = constant_array(guard.inputs[1], 1)
    if mask is None or zero is None or zero.any():
        return False
    return hides_rows(guard.inputs[0], mask.visible, known)
