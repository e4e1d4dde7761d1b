"""ONNX Runtime's ``GroupQueryAttention``: rotation, cache, repeated heads, mask and attention of a decoder layer."""

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
    match_scores,
    read_mask,
    turned_back,
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
    """Makes ``GroupQueryAttention`` of rotation, cache and attention of a decoder.

    The node has the file's own mask as its bias: padding on any side, windows and summands by
    distance stay what they were. It takes the length of the cache from the model's other inputs, so
    that past and present can share one buffer. See
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
        if not _takes_query_seqlens():
            return decline(
                _NAME,
                [node],
                "the operator of the installed ONNX Runtime has no input query_seqlens",
            )
        lengths = self._lengths.find(found.dims, found.past[0], self.known)
        if lengths is None:
            return decline(
                _NAME,
                [node],
                "no input but the cache has the sizes of the batch and of the new tokens",
            )
        self._fuse(found, lengths)
        return True

    def _fuse(self, found: _CachedAttention, lengths: Lengths) -> None:
        queries, keys, values = (Placed(value) for value in (found.scores.queries, *found.new))
        nodes: list[ir.Node] = []
        tables: Sequence[ir.Value | None] = [None, None, None]
        rotated = match_rotation(queries, keys, self.known)
        if rotated is not None:
            queries, keys, rotation = rotated
            tables = self._tables_of(rotation, lengths, nodes)
        flat = [_flat(each, found.end, self.known, nodes) for each in (queries, keys, values)]
        total, last, new = self._lengths.of_rows(lengths)
        bias, sink = found.scores.bias, self._sink(found)
        inputs = [*flat, *found.past, last, total, *tables, bias, sink, None, None, None, None, new]
        attributes: dict[str, float | int] = {
            "num_heads": found.heads,
            "kv_num_heads": found.shared_heads,
            "scale": found.scores.scale,
            "softcap": found.scores.softcap,
            "do_rotary": int(rotated is not None),
            "rotary_interleaved": int(rotated is not None and rotation.interleaved),
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
            replace_with(old, new_value)

    def _tables_of(
        self, rotation: Rotation, lengths: Lengths, nodes: list[ir.Node]
    ) -> list[ir.Value]:
        """Cosines, sines and positions: the file's own, in a row for each token, and the number of this row.

        The operator asks for at least as many rows as there are tokens with the cache. Those that
        are missing are zeros and not read.
        """
        key = (rotation.cos, rotation.sin)
        if key not in self._tables:
            step, half = (
                (2, rotation.features // 2) if rotation.interleaved else (1, rotation.features // 2)
            )
            bounds = [self._numbers([number]) for number in (0, half * step, -1, step)]
            one = self.known.shape(rotation.cos)[0] == 1 != lengths.dims[0]  # type: ignore[index]
            pads, positions = self._lengths.missing(lengths, one=one)
            tables = []
            for value in key:
                for operator, more in (
                    ("Slice", bounds),
                    ("Reshape", [self._numbers([-1, half])]),
                    ("Pad", [pads]),
                ):
                    nodes.append(ir.node(operator, [value, *more]))
                    value = nodes[-1].outputs[0]
                tables.append(value)
            self._tables[key] = [*tables, positions]
        return self._tables[key]

    def _numbers(self, numbers: Sequence[int]) -> ir.Value:
        return add_constant(self.graph, np.array(numbers, np.int64), "rotary_numbers")

    def _sink(self, found: _CachedAttention) -> ir.Value | None:
        """A score that each softmax has besides; it counts only for queries that see no key, and makes these zeros."""
        if found.mask is None:
            return None
        dtype = np.float16 if found.dtype == ir.DataType.FLOAT16 else np.float32
        score = max(found.mask.hiding, float(np.finfo(dtype).min)) / 8
        key = (found.heads, score)
        if key not in self._sinks:
            self._sinks[key] = add_constant(
                self.graph, np.full(found.heads, score, dtype), "hidden_row_score"
            )
        return self._sinks[key]


@cache
def _takes_query_seqlens() -> bool:
    """Whether the operator has the input with which several new tokens of several texts follow a cache, as 1.32 has."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    schemas = (
        schema for schema in get_all_operator_schema() if schema.name == "GroupQueryAttention"
    )
    return any(given.name == "query_seqlens" for schema in schemas for given in schema.inputs)


def _has_cache(graph: ir.Graph) -> bool:
    """Whether a graph adds to inputs of four dimensions, as to a cache."""
    inputs = [value for value in graph.inputs if value.shape is not None and len(value.shape) == 4]
    return any(is_standard(use.node, "Concat") for value in inputs for use in value.uses())


def _prepare(model: ir.Model) -> bool:
    """Make constants initializers, and leave out a ``Concat`` of one tensor, as TorchScript has them."""
    modified = lift_constants(model)
    for node in list(model.graph):
        only = node.inputs[0] if is_standard(node, "Concat") and len(node.inputs) == 1 else None
        if only is not None and replace_with(node.outputs[0], only):
            model.graph.remove(node, safe=True)
            modified = True
    return modified


def _flat(placed: Placed, end: ir.Node, known: Symbolic, nodes: list[ir.Node]) -> ir.Value:
    """Queries, keys or values of batch, length and features: as they were before heads were set apart, or joined."""
    value, is_turned = placed = placed.before_turning(known)
    joint = placed.joint(known)
    if joint is not None:
        return joint
    if is_turned:
        nodes.append(ir.node("Transpose", [value], {"perm": HEADS_FIRST}))
        value = nodes[-1].outputs[0]
    nodes.append(ir.node("Reshape", [value, integers(end, [0, 0, -1], "joint")]))
    return nodes[-1].outputs[0]


@dataclass(frozen=True)
class _CachedAttention:
    """Attention of a decoder with a cache; sizes are numbers where the operator needs numbers."""

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
    """The attention with a cache whose last product is a node; a text: why it cannot be the operator."""
    weights = guarded(producer_of(last.inputs[0], "Where"))
    softmax = producer_of(last.inputs[0] if weights is None else weights, "Softmax")
    values = _cached(last.inputs[1], known)
    if softmax is None or values is None:
        return None
    scores = match_scores(softmax.inputs[0])
    if scores is None:
        return "its scores are not a product that is scaled, capped and added to a mask"
    keys = _cached(_untransposed(scores.keys, known), known)
    shape, cache = (
        known.shape(scores.queries),
        known.shape(keys.outputs[0]) if keys is not None else None,
    )
    if keys is None or shape is None or cache is None or len(shape) != 4:
        return None
    (batch, heads, new, features), (_, shared, total, _) = shape, cache
    dtype, of_values = known.dtype(scores.queries), known.shape(values.outputs[0])
    if not (isinstance(heads, int) and isinstance(shared, int) and isinstance(features, int)):
        return "the numbers of heads and features are not known"
    if of_values is None or cache[:3] != of_values[:3] or heads % shared:
        return "keys and values have other heads or lengths"
    if not features == cache[3] == of_values[3]:
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
        bias = known.shape(scores.bias) or ()
        if (
            len(bias) != 4
            or bias[2:] != (new, total)
            or bias[0] not in (1, batch)
            or bias[1] not in (1, heads)
        ):
            return "its mask has not a number for each query and key"
    # its row is NaN, and then zeros
    hides_nan = weights is not None and mask is not None and mask.hiding == -np.inf
    end = _end(last, mask, known, (batch, new, heads, features), gives_zeros=hides_nan)
    if isinstance(end, str):
        return end
    dims = batch, new, total
    return _CachedAttention(
        *end, scores, (keys, values), heads, shared, features, dims, mask, dtype
    )


def _untransposed(value: ir.Value | None, known: Symbolic) -> ir.Value | None:
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
        before, after = (
            (known.shape(expand.inputs[0]), known.shape(expand.outputs[0]))
            if expand
            else (None, None)
        )
        shape = known.shape(value)
        if (
            unsqueeze is None
            or axes != [2]
            or before is None
            or after is None
            or shape is None
            or len(after) != 5
        ):
            return None
        if (
            shape != (after[0], after[1] * after[2], *after[3:])
            or before[1] != after[1]
            or before[3:] != after[3:]
        ):
            return None
        value = unsqueeze.inputs[0]
    cache = producer_of(value, "Concat")
    if cache is None or len(cache.inputs) != 2 or known.rank(value) != 4:
        return None
    return cache if normalized(cache.attributes["axis"].as_int(), 4) == 2 else None


def _end(
    last: ir.Node,
    mask: Mask | None,
    known: Symbolic,
    shape: tuple[Dim, Dim, int, int],
    *,
    gives_zeros: bool,
) -> tuple[ir.Node, bool] | str:
    """The last node, and whether it gives batch, length and features, or still has a dimension for the heads."""
    value = last.outputs[0]
    guard = only_consumer(value, "Where")
    if guard is not None and guard.inputs[2] is value:
        zero = constant_array(guard.inputs[1], 1)
        if (
            mask is None
            or zero is None
            or zero.any()
            or not hides_rows(guard.inputs[0], mask.visible, known)
        ):
            return "its result depends on another condition than its mask"
        value = guard.outputs[0]
    elif mask is not None and not mask.by_keys and not gives_zeros:
        return (
            "it averages all values for queries without a visible key, and the operator gives zeros"
        )
    while (copy := only_consumer(value, "Reshape", "Identity")) is not None:
        if known.shape(copy.outputs[0]) != known.shape(value) or copy.inputs[0] is not value:
            break
        value = copy.outputs[0]
    turn, join = turned_back(value, known)
    if turn is None or known.shape(turn.outputs[0]) != shape:
        return "its heads are not joined as the operator joins them"
    return (turn, False) if join is None else (join, True)
