"""ONNX Runtime's own operators for attention, normalisation with skip connections, GELU and rotary embedding."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from htp_export.capabilities.optimize.passes.fuse_conv_batchnorm import has_large_factors
from htp_export.capabilities.optimize.passes.simplify_shape_chains import reshape_target
from htp_export.capabilities.optimize.registry import NodePass, integers, register
from htp_export.editing.editing import (
    constant_array,
    is_constant,
    multiple,
    register_constants,
    replace,
)
from htp_export.model.neighbours import only_consumer, producer_of
from htp_export.model.recipes import replaced_by
from htp_export.process.forking import Mutex
from htp_export.process.restoring import Changes, restored, set_attribute
from htp_export.shapes.operator_kinds import is_standard, without_copies
from htp_export.shapes.sizes import product
from htp_export.shapes.symbolic import Symbolic, written_shape

_HIDDEN = "htp_export.hidden"
_LARGE = 1 << 20  # values

MOST = 64
"""Nodes in which the further results are looked for; each takes 0.1 ms. A match has its results within a block."""

_log = logging.getLogger(__name__)

_ONE_AT_A_TIME = Mutex()  # the changed class is shared by the whole process


@register("fuse_for_onnxruntime", level="fused")
class FuseForOnnxruntime(ir.passes.InPlacePass):
    """Fuses attention, skip connections with normalisation, GELU and rotary embedding, with onnxscript's rules."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        from onnxscript.rewriter.ort_fusions import optimize_for_ort

        before, results = list(model.graph), [value.name for value in model.graph.outputs]
        _Unflatten()(model)
        _WriteReciprocals()(model)
        hidden = [node for node in model.graph.all_nodes() if _is_unsound(node)]
        with _hidden(model, [*hidden, *_growing(model.graph)]), near_matching():
            stored = {name: value.const_value for name, value in model.graph.initializers.items()}
            rewritten, _ = optimize_for_ort(model)
        register_constants(rewritten.graph)
        _join_results(rewritten.graph, results)
        replaced_by("onnxscript", rewritten, stored)
        _turn_batches(rewritten)
        _complete(rewritten)
        return ir.passes.PassResult(rewritten, list(rewritten.graph) != before)


def _is_unsound(node: ir.Node) -> bool:
    """Whether rules would make of a node what does not run, computes something else, or is not finite where it was."""
    if is_standard(node, "InstanceNormalization"):  # taken for group normalization: an operator that runs on GPUs only
        return True
    if is_standard(node, "Gemm"):  # between reshapes, it becomes a product of its factors as they are
        return _is_turned(node)
    if is_standard(node, "Div"):  # multiplied by the reciprocal
        return constant_array(node.inputs[1], 1) is not None and multiple(node) is None
    is_folded = is_standard(node, "BatchNormalization") and all(map(is_constant, node.inputs[1:]))
    return is_folded and has_large_factors(node)


def _is_turned(gemm: ir.Node) -> bool:
    """Whether a ``Gemm`` transposes a factor."""
    return any(gemm.attributes.get_int(key, 0) for key in ("transA", "transB"))


def _growing(graph: ir.Graph) -> list[ir.Node]:
    """Nodes with large constant results: onnxscript folds constants before it checks the size of the result."""
    known: Symbolic | None = None
    growing = []
    for node in graph:
        read = [ir.convenience.get_const_tensor(value) for value in node.inputs if value is not None]
        if node.domain or not all(tensor is not None for tensor in read):
            continue
        known = known or Symbolic(graph)
        shapes = [known.shape(value) for value in node.outputs]
        sizes = [None if shape is None else product(shape) for shape in shapes]
        most = _LARGE + sum(tensor.size for tensor in read if tensor is not None)
        if not all(isinstance(size, int) and size <= most for size in sizes):
            growing.append(node)
    return growing


@contextlib.contextmanager
def _hidden(model: ir.Model, nodes: Sequence[ir.Node]) -> Iterator[None]:
    """Hide nodes from rules: they get another domain for the time."""
    if nodes:
        model.opset_imports[_HIDDEN] = 1
    for node in nodes:
        node.domain = _HIDDEN
    try:
        yield
    finally:
        for node in nodes:
            node.domain = ""
        model.opset_imports.pop(_HIDDEN, None)


class _Unflatten(NodePass):
    """Replaces a ``Gemm`` between reshapes that join the dimensions before the last by ``MatMul`` and ``Add``.

    onnxscript's rules for attention do not match these reshapes, or mistake the joined shape for the original one.
    """

    operators = ("Gemm",)

    def rewrite(self, node: ir.Node) -> bool:
        known, settings = self.known, node.attributes
        first, last = producer_of(node.inputs[0], "Reshape"), only_consumer(node.outputs[0], "Reshape")
        is_scaled = any(settings.get_float(key, 1.0) != 1.0 for key in ("alpha", "beta"))
        if first is None or last is None or len(node.inputs) < 3 or _is_turned(node) or is_scaled:
            return False
        source, shape, matrix = first.inputs[0], known.shape(first.inputs[0]), known.shape(node.inputs[1])
        result = known.shape(last.outputs[0])
        if source is None or shape is None or matrix is None or result is None or len(result) < 3:
            return False
        if result[-1] != matrix[1] or known.rank(node.inputs[2]) != 1:
            return False
        wanted, nodes = (*result[:-1], matrix[0]), []
        if shape != wanted:
            target = reshape_target(shape, wanted)
            if target is None:
                return False
            nodes.append(ir.node("Reshape", [source, integers(last, target, "rows")]))
            source = nodes[0].outputs[0]
        product = ir.node("MatMul", [source, node.inputs[1]])
        replace(last, [*nodes, product, ir.node("Add", [product.outputs[0], node.inputs[2]])])
        return True


class _WriteReciprocals(NodePass):
    """Writes ``1 / Sqrt(ReduceMean + epsilon)`` of TorchScript as dynamo does: onnxscript matches RMS norms so."""

    operators = ("Div",)

    def rewrite(self, node: ir.Node) -> bool:
        root = producer_of(node.inputs[1], "Sqrt")
        total = producer_of(root.inputs[0], "Add") if root is not None else None
        mean = producer_of(total.inputs[0], "ReduceMean") if total is not None else None
        number = constant_array(node.inputs[0], 1)
        if root is None or mean is None or number is None or number.ndim or number.item() != 1:
            return False
        if len(mean.inputs) == 2 and "noop_with_empty_axes" not in mean.attributes:
            settings = {**mean.attributes, "noop_with_empty_axes": ir.AttrInt64("noop_with_empty_axes", 0)}
            replace(mean, [ir.node("ReduceMean", mean.inputs, settings)])
        replace(node, [ir.node("Reciprocal", root.outputs)])
        return True


def _join_results(graph: ir.Graph, names: Sequence[str | None]) -> None:
    """Return a tensor twice that was returned twice: onnxscript copies it under a name of its own for the second."""
    for place, (value, name) in enumerate(zip(graph.outputs, names, strict=True)):
        copying = value.producer()
        if value.name != name and copying is not None and (source := without_copies(value)).name == name:
            graph.outputs[place] = source
            graph.remove(copying, safe=True)


def _turn_batches(model: ir.Model) -> None:
    """Insert a ``Transpose`` in place of ``transBatchA`` or ``transBatchB`` of a ``FusedMatMul`` with other ranks.

    ONNX Runtime runs these only if both factors have the same rank, which onnxscript's rules do not check.
    """
    known: Symbolic | None = None
    for node in list(model.graph):
        if (node.domain, node.op_type) != ("com.microsoft", "FusedMatMul"):
            continue
        turned = [place for place, side in enumerate("AB") if node.attributes.get_int(f"transBatch{side}", 0)]
        known = known or (Symbolic(model.graph) if turned else None)
        if known is None or known.rank(node.inputs[0]) == known.rank(node.inputs[1]):
            continue
        for place in turned:
            value, rank = node.inputs[place], known.rank(node.inputs[place])
            if value is not None and rank is not None:
                perm = [*range(1, rank - 1), 0, rank - 1]
                back = ir.node("Transpose", [value], {"perm": perm}, name=f"{node.name}_Transpose{place}")
                model.graph.insert_before(node, back)
                node.replace_input_with(place, back.outputs[0])
                node.attributes.pop(f"transBatch{'AB'[place]}")


def _complete(model: ir.Model) -> None:
    """Remove optional outputs of ONNX Runtime's operators that nothing reads, and set the shapes of the others.

    onnxscript's rules leave both to others: the sum before a normalisation, and shapes that later passes need.
    """
    known = Symbolic(model.graph)
    for node in model.graph:
        if node.domain != "com.microsoft":
            continue
        count = len(node.outputs)
        while count > 1 and not node.outputs[count - 1].uses() and not node.outputs[count - 1].is_graph_output():
            count -= 1
        node.resize_outputs(count)
        for value in node.outputs:
            shape, dtype = known.shape(value), known.dtype(value)
            if value.shape is None and shape is not None and dtype is not None:
                value.shape, value.type = written_shape(shape), ir.TensorType(dtype)


@dataclass(frozen=True)
class _Part:
    """Some nodes of a graph, which stand in for the graph."""

    graph: ir.Graph
    nodes: list[ir.Node]

    def __iter__(self) -> Iterator[ir.Node]:
        return iter(self.nodes)


@contextlib.contextmanager
def near_matching() -> Iterator[None]:
    """While it is open, numbers match equal numbers only, and several results of a pattern are near each other.

    There is no rule for ``SkipLayerNormalization``: on the CPU, ONNX Runtime 1.32 takes 3 to 9 times as long for it as
    for ``Add`` and ``LayerNormalization`` (docs/passes.md), and the normalisation is not exact any more.

    A pattern's 0 matches each number below 1e-8 in onnxscript: ``x + 1e-15`` counts as ``x``, and ``log(x + 1e-15)`` of
    a zero becomes infinite. Here, numbers match by their relative difference alone.

    onnxscript (0.7) looks for the further results of a pattern among all nodes of the graph, for each of its nodes: the
    time grows with the square of the graph. The nodes of a match hang together by the tensors that they share, so those
    are enough that are as near as the pattern is large. If a tensor has very many consumers, they are all near each
    other: at most `MOST` are searched, and a warning names the node.
    """
    from onnxscript.rewriter import pattern
    from onnxscript.rewriter.ort_fusions import _core

    matcher = pattern.SimplePatternMatcher
    places = [(matcher, "match"), (matcher, "_match_constant"), (_core, "fuse_skip_layer_normalization")]
    originals = [getattr(owner, name) for owner, name in places]
    crowded: dict[ir.Node, None] = {}

    def match(self: Any, model: ir.Model, graph: Any, node: ir.Node, **options: Any) -> Any:
        first = self.pattern.output_nodes[0].op_identifier()
        if first is not None and first[:2] != (node.domain, node.op_type):
            return pattern.MatchResult().fail("The last node of the pattern is another operator.")
        if not self.pattern.has_single_output_node:
            nodes = near(node, len(self.pattern))
            if len(nodes) == MOST:
                crowded[node] = None
            graph = _Part(graph if isinstance(graph, ir.Graph) else graph.graph, nodes)
        return originals[0](self, model, graph, node, **options)

    def match_constant(self: Any, constant: Any, value: ir.Value) -> bool:
        relative = type(constant)(constant.value, rel_tol=constant._rel_tol, abs_tol=0.0)
        return bool(originals[1](self, relative, value))

    def make(changes: Changes) -> None:
        for (owner, name), changed in zip(places, (match, match_constant, lambda model, debug=False: 0), strict=True):
            set_attribute(changes, owner, name, changed)

    with _ONE_AT_A_TIME.lock, restored(make):
        yield
    if crowded:
        node, *others = crowded
        _log.warning(
            "pass fuse_for_onnxruntime: node %r (%s)%s: a tensor near it has very many consumers; patterns with "
            "several results were looked for among the nearest %d nodes only, and may have been missed",
            *(node.name, node.op_type, f" and {len(others)} others" if others else "", MOST),
        )


def near(node: ir.Node, steps: int) -> list[ir.Node]:
    """The nearest nodes of the same graph that some tensors lead to, itself first, no more than `MOST`.

    Those that only read the same constants are not near.

    Examples:
        >>> x, one = ir.val("x"), ir.Value(name="one", const_value=ir.tensor(1.0))
        >>> first = ir.node("Relu", [x])
        >>> second, apart = ir.node("Add", [first.outputs[0], one]), ir.node("Neg", [one])
        >>> [each.op_type for each in near(first, 1)], [each.op_type for each in near(apart, 9)]
        (['Relu', 'Add'], ['Neg'])
    """
    nearest = {node: None}
    edge = [node]
    for _ in range(steps):
        beside, edge = (neighbour for reached in edge for neighbour in _neighbours(reached)), []
        for neighbour in beside:
            if neighbour.graph is not node.graph or neighbour in nearest:
                continue
            if len(nearest) == MOST:
                return list(nearest)
            nearest[neighbour] = None
            edge.append(neighbour)
    return list(nearest)


def _neighbours(node: ir.Node) -> Iterator[ir.Node]:
    for value in (*node.inputs, *node.outputs):
        if value is None or value.const_value is not None:
            continue
        producer = value.producer()
        if producer is not None:
            yield producer
        for use in value.uses():
            yield use.node
