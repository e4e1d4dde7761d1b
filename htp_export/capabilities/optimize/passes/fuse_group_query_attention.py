"""ONNX Runtime's ``GroupQueryAttention``: rotation, cache, repeated heads, mask and attention of a decoder layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.cache_lengths import CacheLengths, Lengths
from htp_export.capabilities.optimize.cached_attention import (
    HEADS_FIRST,
    CachedAttention,
    Placed,
    Rotation,
    match_attention,
    match_rotation,
)
from htp_export.capabilities.optimize.node_pass import NodePass, decline, integers
from htp_export.capabilities.optimize.passes.eliminate_redundant_transposes import permutation
from htp_export.capabilities.optimize.registry import register
from htp_export.editing.editing import add_constant, remove_unused, replace, stand_in
from htp_export.model.neighbours import producer_of
from htp_export.model.recipes import lift_constants
from htp_export.shapes.operator_kinds import is_standard
from htp_export.shapes.symbolic import Symbolic

_NAME = "fuse_group_query_attention"
_DOMAIN = "com.microsoft"


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
        found = match_attention(node, self.known)
        if isinstance(found, str):
            return decline(_NAME, [node], found)
        if found is None:
            return False
        if not _takes_query_seqlens():
            return decline(_NAME, [node], "the operator of the installed ONNX Runtime has no input query_seqlens")
        lengths = self._lengths.find(found.dims, found.past[0], self.known)
        if lengths is None:
            return decline(_NAME, [node], "no input but the cache has the sizes of the batch and of the new tokens")
        self._fuse(found, lengths)
        return True

    def _fuse(self, found: CachedAttention, lengths: Lengths) -> None:
        rotation = match_rotation(found, self.known)
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

    def _tables_of(self, rotation: Rotation, lengths: Lengths, nodes: list[ir.Node]) -> list[ir.Value]:
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

    def _sink(self, found: CachedAttention) -> ir.Value | None:
        """A score that each softmax has besides; it counts only for queries that see no key, and makes these zeros."""
        if found.mask is None:
            return None
        dtype = np.float16 if found.dtype == ir.DataType.FLOAT16 else np.float32
        score = max(found.mask.hiding, float(np.finfo(dtype).min)) / 8
        key = (found.heads, score)
        if key not in self._sinks:
            self._sinks[key] = add_constant(self.graph, np.full(found.heads, score, dtype), "hidden_row_score")
        return self._sinks[key]


@cache
def _takes_query_seqlens() -> bool:
    """Whether the operator has the input with which several new tokens of several texts follow a cache, as 1.32 has."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    schemas = (schema for schema in get_all_operator_schema() if schema.name == "GroupQueryAttention")
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
        if only is not None and not node.outputs[0].is_graph_output():
            node.outputs[0].replace_all_uses_with(only)
            model.graph.remove(node, safe=True)
            modified = True
    return modified


def _flat(placed: Placed, found: CachedAttention, known: Symbolic, nodes: list[ir.Node]) -> ir.Value:
    """Queries, keys or values of batch, length and features: as they were before heads were set apart, or joined."""
    value, is_turned = placed
    sizes = known.shape(value) or ()
    heads = sizes[1 if is_turned else 2]
    turn = producer_of(value, "Transpose") if is_turned else None
    if turn is not None and permutation(turn, known) == HEADS_FIRST and turn.inputs[0] is not None:
        value, is_turned = turn.inputs[0], False
    if is_turned:
        nodes.append(ir.node("Transpose", [value], {"perm": HEADS_FIRST}))
        value = nodes[-1].outputs[0]
    apart = producer_of(value, "Reshape")
    joint = apart.inputs[0] if apart is not None else None
    if joint is not None and known.shape(joint) == (*found.dims[:2], heads * found.features):
        return joint
    nodes.append(ir.node("Reshape", [value, integers(found.end, [0, 0, -1], "joint")]))
    return nodes[-1].outputs[0]
