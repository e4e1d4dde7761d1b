"""Attention: where its queries and keys come from, and whether it is causal, determined by computing its mask."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.model.graph_facts import Array, GraphFacts
from htp_export.shapes.operator_kinds import is_standard
from htp_export.shapes.symbolic import Symbolic

if TYPE_CHECKING:
    from htp_export.capabilities.forensics.patterns import MaskUse

_FUSED = frozenset((
    "Attention", "MultiHeadAttention", "GroupQueryAttention", "PackedMultiHeadAttention",
    "DecoderMaskedMultiHeadAttention"
))  # fmt: skip
MIXING = frozenset((
    "Attention", "Conv", "ConvInteger", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "MatMulInteger",
    "QLinearConv", "RNN", "Softmax"
))  # fmt: skip
"""The results of these are computed features, and no longer the input in another form, or a mask."""
_MOST_NODES = 400  # that compute a mask; beyond that, the value is a feature of the model
_MOST_ELEMENTS = 1 << 22  # of a mask that is computed
_FAR_BELOW = 1e3  # a score that is lower than another one by this much has no weight after a softmax


def attention_kinds(facts: GraphFacts, inferred: Symbolic, reaching: Mapping[ir.Value | None, int]) -> Counter[str]:
    """``"causal"``, ``"bidirectional"``, ``"cross"``, ``"learned queries"`` → how many attentions are of the kind.

    In ``inferred``, all inputs have sizes. ``reaching``: value → the data inputs that it depends on, one bit each.
    """
    from htp_export.capabilities.forensics.patterns import attention_steps

    is_causal = functools.cache(functools.partial(_is_causal, facts, inferred))  # layers share masks
    kinds: Counter[str] = Counter()

    def add(causal: bool, queries: ir.Value | None, keys: ir.Value | None) -> None:
        asked, answered = reaching.get(queries, 0), reaching.get(keys, 0)
        if asked:  # keys of earlier calls, which a cache holds, are of more inputs than the queries
            other = "cross" if asked & ~answered else "bidirectional"
        else:
            other = "learned queries" if answered else "bidirectional"
        kinds["causal" if causal else other] += 1

    for steps in attention_steps(facts):
        add(any(map(is_causal, steps.masks)), *steps.scores.inputs[:2])
    for node in facts.nodes:
        if node.op_type in _FUSED:
            written = any(node.attributes.get_int(name, 0) for name in ("is_causal", "unidirectional"))
            mask = _mask(node)
            causal = written or node.op_type == "GroupQueryAttention" or (mask is not None and is_causal(mask))
            packed = node.op_type == "Attention" and not is_standard(node)  # its second input is a weight
            keys = node.inputs[1] if len(node.inputs) > 1 and not packed else None
            add(causal, node.inputs[0], keys or node.inputs[0])
    return kinds


def _mask(node: ir.Node) -> MaskUse | None:
    """The mask of an attention operator."""
    from htp_export.capabilities.forensics.patterns import MaskUse

    mask = next(iter(node.inputs[3 if is_standard(node) else 5 :]), None)
    floating = mask is not None and (mask.dtype is None or mask.dtype.is_floating_point())
    return None if mask is None else MaskUse(mask, "added" if floating else "kept")


def _is_causal(facts: GraphFacts, inferred: Symbolic, mask: MaskUse) -> bool:
    """Whether what lies above the diagonal is masked, and the diagonal not; False where that cannot be computed.

    Rows and columns are the last two dimensions, except for those of size one after them: scores may have several
    channels for each pair of positions.
    """
    array = _elements(facts, inferred, mask.value)
    while array is not None and array.ndim > 2 and array.shape[-1] == 1:
        array = array[..., 0]
    if array is None or array.ndim < 2 or (mask.role == "added" and array.dtype.kind != "f"):
        return False
    if mask.role == "added":
        numbers = np.nan_to_num(array.astype(np.float64), nan=-np.inf)
        hidden = numbers < numbers.max(initial=-np.inf) - _FAR_BELOW
    else:
        hidden = array.astype(bool) == (mask.role == "dropped")
    rows, columns = hidden.shape[-2:]
    earlier = max(columns - rows, 0)  # keys of earlier calls come first
    ahead = np.triu(np.ones((rows, columns), bool), k=1 + earlier)
    now = np.eye(rows, columns, k=earlier, dtype=bool)
    return bool(ahead.any() and hidden[..., ahead].all() and not hidden[..., now].all())


def _elements(facts: GraphFacts, inferred: Symbolic, value: ir.Value) -> Array | None:
    """The elements of a value that depends on sizes, constants and masks; None where it takes more than that.

    Inputs of the model are all ones, so that nothing is padding.
    """
    from onnx.reference import ReferenceEvaluator

    nodes: set[ir.Node] = set()
    feeds: dict[ir.Value, Array] = {}
    pending = [value]
    while pending:
        current = pending.pop()
        node = current.producer()
        if current in feeds or node in nodes:
            continue
        known = _known(facts, inferred, current)
        if known is not None:
            feeds[current] = known
        elif node is None or node.op_type in MIXING or node in facts.tagged.index.bodies or len(nodes) >= _MOST_NODES:
            return None
        else:
            nodes.add(node)
            pending += [operand for operand in node.inputs if operand is not None]
    if value in feeds or len({node.graph for node in nodes}) > 1:
        return feeds.get(value)
    opsets = dict(facts.tagged.model.graph.opset_imports)
    ordered = [node for node in facts.nodes if node in nodes]
    graph = ir.GraphView(list(feeds), [value], nodes=ordered, opset_imports=opsets, name="mask").clone()
    try:
        with np.errstate(all="ignore"):
            evaluator = ReferenceEvaluator(ir.to_proto(ir.Model(graph, ir_version=10)))
            return np.asarray(next(iter(evaluator.run(None, {str(of.name): array for of, array in feeds.items()}))))
    except Exception:  # it raises whatever numpy does on what does not fit
        return None


def _known(facts: GraphFacts, inferred: Symbolic, value: ir.Value) -> Array | None:
    """The elements of a constant, of sizes that are known, and ones for an input."""
    source = facts.tagged.index.initializer(value)
    sizes = [size for size in facts.shape(value) or () if isinstance(size, int)]
    dtype, rank = facts.dtype(value), facts.rank(value)
    if dtype is None or len(sizes) != rank or math.prod(sizes) > _MOST_ELEMENTS:
        return None
    if source is not None and source.const_value is not None:
        try:
            return np.asarray(source.const_value.numpy())
        except (OSError, FileError):
            return None
    contents = inferred.constant(value)
    if contents is not None:
        return np.array(contents, dtype.numpy()).reshape(sizes)
    return np.ones(sizes, dtype.numpy()) if value.producer() is None else None
