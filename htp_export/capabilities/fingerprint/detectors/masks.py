"""Whether a mask is causal, determined by computing it."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.model.graph_facts import Array, GraphFacts
from htp_export.shapes.operator_kinds import SIZES_ONLY, is_standard

if TYPE_CHECKING:
    from htp_export.capabilities.forensics.attention_steps import MaskUse

__all__ = ["CausalMasks"]

_log = logging.getLogger(__name__)

_MOST_NODES = 400
"""Nodes that compute a mask at most; beyond that, the value is a feature of the model."""
_MOST_ELEMENTS = 1 << 22
"""Elements of a mask that is computed at most."""
_FAR_BELOW = 1e3
"""A score that is lower than another one by this much has no weight after a softmax."""
_HEAVY = frozenset((
    "Attention", "Conv", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "RNN", "Softmax"
))  # fmt: skip


class CausalMasks:
    """Determines which masks are causal: each position sees only those before it.

    A mask is computed from what it depends on; inputs of the model are all ones, so that nothing is padding. Equal
    questions are answered once.

    Args:
        facts: The graph; its inputs have sizes.
    """

    def __init__(self, facts: GraphFacts) -> None:
        self._facts = facts
        self._known: dict[MaskUse, bool | None] = {}

    def is_causal(self, mask: MaskUse) -> bool | None:
        """Whether a mask is causal; None where it cannot be computed."""
        if mask not in self._known:
            array = _evaluate(self._facts, mask.value)
            self._known[mask] = None if array is None else _causal(array, mask.role)
        return self._known[mask]


def _causal(array: Array, role: str) -> bool | None:
    """Whether what lies above the diagonal is masked, and the diagonal not; None for a mask of one position.

    Rows and columns are the last two dimensions, except for those of size one after them: scores may have several
    channels for each pair of positions.
    """
    while array.ndim > 2 and array.shape[-1] == 1:
        array = array[..., 0]
    if array.ndim < 2 or array.shape[-2] < 2 or array.shape[-1] < 2:
        return None if array.ndim >= 2 and array.shape[-1] < 2 else False
    if role == "added":
        if array.dtype.kind != "f":
            return None
        numbers = np.nan_to_num(array.astype(np.float64), nan=-np.inf)
        hidden = numbers < numbers.max() - _FAR_BELOW
    else:
        hidden = array.astype(bool) if role == "dropped" else ~array.astype(bool)
    rows, columns = hidden.shape[-2:]
    offset = max(columns - rows, 0)  # keys of earlier calls come first
    ahead = np.triu(np.ones((rows, columns), bool), k=1 + offset)
    if not ahead.any():
        return False
    now = np.eye(rows, columns, k=offset, dtype=bool)
    return bool(hidden[..., ahead].all() and not hidden[..., now].all())


def _evaluate(facts: GraphFacts, value: ir.Value) -> Array | None:
    """The elements of a value that depends on sizes, constants and masks; None where it takes more than that."""
    held = facts.array(value)
    if held is not None:
        return held
    needed = _needed(facts, value)
    if needed is None:
        return None
    nodes, feeds = needed
    if value in feeds:
        return feeds[value]
    from onnx.reference import ReferenceEvaluator

    opsets = dict(facts.tagged.model.graph.opset_imports)
    ordered = [node for node in facts.nodes if node in nodes]
    graph = ir.GraphView(list(feeds), [value], nodes=ordered, opset_imports=opsets, name="mask").clone()
    try:
        evaluator = ReferenceEvaluator(ir.to_proto(ir.Model(graph, ir_version=10)))
        with np.errstate(all="ignore"):
            (result,) = evaluator.run(None, {str(each.name): array for each, array in feeds.items()})
    except Exception as error:  # it raises whatever numpy does on what does not fit
        _log.debug("mask %s cannot be computed: %s", value.name, error)
        return None
    return np.asarray(result)


def _needed(facts: GraphFacts, value: ir.Value) -> tuple[set[ir.Node], dict[ir.Value, Array]] | None:
    """The nodes that compute a value, and the sizes, tables and inputs that they start from, with their elements."""
    nodes: set[ir.Node] = set()
    feeds: dict[ir.Value, Array] = {}
    pending = [value]
    while pending:
        current = pending.pop()
        node = current.producer()
        if current in feeds or node in nodes:
            continue
        known = _leaf(facts, current) if node is None else _sizes(facts, node)
        if known is not None:
            feeds[current] = known
        elif node is None or node.op_type in _HEAVY or node in facts.tagged.index.bodies or len(nodes) >= _MOST_NODES:
            return None
        else:
            nodes.add(node)
            pending += [operand for operand in node.inputs if operand is not None]
    graphs = {node.graph for node in nodes}
    return (nodes, feeds) if len(graphs) <= 1 else None


def _leaf(facts: GraphFacts, value: ir.Value) -> Array | None:
    """The elements of a value without producer: those of an initializer, or ones for an input."""
    source = facts.tagged.index.initializer(value)
    if source is not None and source.const_value is not None:
        if source.const_value.size > _MOST_ELEMENTS:
            return None
        try:
            return np.asarray(source.const_value.numpy())
        except (OSError, FileError):
            return None
    sizes, dtype = _static(facts, value), facts.dtype(value)
    if sizes is None or dtype is None or value.producer() is not None or math.prod(sizes) > _MOST_ELEMENTS:
        return None
    return np.ones(sizes, dtype.numpy())


def _sizes(facts: GraphFacts, node: ir.Node) -> Array | None:
    """What ``Shape``, ``Size`` or ``ConstantOfShape`` gives, where that is known without looking further."""
    if is_standard(node, "ConstantOfShape"):
        return _filled(facts, node)
    sizes = _static(facts, node.inputs[0]) if is_standard(node, *SIZES_ONLY) else None
    if sizes is None:
        return None
    if node.op_type == "Size":
        return np.array(math.prod(sizes), np.int64)
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", None)
    return np.array(sizes[start:end], np.int64)


def _filled(facts: GraphFacts, node: ir.Node) -> Array | None:
    """What ``ConstantOfShape`` gives, where its size is known, whatever that is computed from."""
    sizes, written = _static(facts, node.outputs[0]), node.attributes.get("value")
    if sizes is None or math.prod(sizes) > _MOST_ELEMENTS or (written is not None and written.is_ref()):
        return None
    number = np.zeros(1, np.float32) if written is None else np.asarray(written.as_tensor().numpy())
    return np.full(sizes, number.reshape(())[()], number.dtype)


def _static(facts: GraphFacts, value: ir.Value | None) -> list[int] | None:
    shape = facts.shape(value)
    sizes = [size for size in shape or () if isinstance(size, int)]
    return sizes if shape is not None and len(sizes) == len(shape) else None
