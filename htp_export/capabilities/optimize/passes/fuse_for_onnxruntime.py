"""ONNX Runtime's own operators for attention, normalisation with skip connections, GELU and rotary embedding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from htp_export.capabilities.optimize.onnxscript_rules import changed_rules
from htp_export.capabilities.optimize.passes.fuse_conv_batchnorm import has_large_factors
from htp_export.capabilities.optimize.passes.simplify_shape_chains import reshape_target
from htp_export.capabilities.optimize.registry import (
    LibraryPass,
    LibraryResult,
    NodePass,
    integers,
    register,
)
from htp_export.editing.editing import (
    constant_array,
    is_constant,
    multiple,
    register_constants,
    replace,
)
from htp_export.model.neighbours import only_consumer, producer_of
from htp_export.model.recipes import recipes_of_computed, replaced_by
from htp_export.process.quiet import quiet
from htp_export.shapes.operator_kinds import is_standard, without_copies
from htp_export.shapes.sizes import product
from htp_export.shapes.symbolic import Symbolic, written_shape

_HIDDEN = "htp_export.hidden"
_LARGE = 1 << 20  # values


@register("fuse_for_onnxruntime", level="fused")
class FuseForOnnxruntime(LibraryPass):
    """Fuses attention, skip connections with normalisation, GELU and rotary embedding, with onnxscript's rules."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        from onnxscript.rewriter.ort_fusions import optimize_for_ort

        before, results = list(model.graph), [value.name for value in model.graph.outputs]
        _Unflatten()(model)
        _WriteReciprocals()(model)
        hidden = [node for node in model.graph.all_nodes() if _is_unsound(node)]
        growing = _growing(model.graph)
        with (
            quiet("onnx_ir", "onnxscript"),
            _hidden(model, [*hidden, *growing]),
            changed_rules() as unhandled,
        ):
            stored = {name: value.const_value for name, value in model.graph.initializers.items()}
            computed = recipes_of_computed(model.graph)
            rewritten, _ = optimize_for_ort(model)
        register_constants(rewritten.graph)
        _join_results(rewritten.graph, results)
        replaced_by("onnxscript", rewritten, stored, computed)
        _turn_batches(rewritten)
        _complete(rewritten)
        left = {str(node.name): why for node, why in unhandled.items() if node.graph is not None}
        return LibraryResult(rewritten, list(rewritten.graph) != before, left)


def _is_unsound(node: ir.Node) -> bool:
    """Whether rules would make of a node what does not run, computes something else, or is not finite where it was."""
    # taken for group normalization: an operator that runs on GPUs only
    if is_standard(node, "InstanceNormalization"):
        return True
    # between reshapes, it becomes a product of its factors as they are
    if is_standard(node, "Gemm"):
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
        read = [
            ir.convenience.get_const_tensor(value) for value in node.inputs if value is not None
        ]
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

    onnxscript's rules for attention do not match these reshapes, or mistake the joined shape for
    the original one.
    """

    operators = ("Gemm",)

    def rewrite(self, node: ir.Node) -> bool:
        known, settings = self.known, node.attributes
        first, last = (
            producer_of(node.inputs[0], "Reshape"),
            only_consumer(node.outputs[0], "Reshape"),
        )
        is_scaled = any(settings.get_float(key, 1.0) != 1.0 for key in ("alpha", "beta"))
        if first is None or last is None or len(node.inputs) < 3 or _is_turned(node) or is_scaled:
            return False
        source, shape, matrix = (
            first.inputs[0],
            known.shape(first.inputs[0]),
            known.shape(node.inputs[1]),
        )
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
            settings = {
                **mean.attributes,
                "noop_with_empty_axes": ir.AttrInt64("noop_with_empty_axes", 0),
            }
            replace(mean, [ir.node("ReduceMean", mean.inputs, settings)])
        replace(node, [ir.node("Reciprocal", root.outputs)])
        return True


def _join_results(graph: ir.Graph, names: Sequence[str | None]) -> None:
    """Return a tensor twice that was returned twice: onnxscript copies it under a name of its own for the second."""
    for place, (value, name) in enumerate(zip(graph.outputs, names, strict=True)):
        copying = value.producer()
        if (
            value.name != name
            and copying is not None
            and (source := without_copies(value)).name == name
        ):
            graph.outputs[place] = source
            graph.remove(copying, safe=True)


def _turn_batches(model: ir.Model) -> None:
    """Insert a ``Transpose`` in place of ``transBatchA`` or ``transBatchB`` of a ``FusedMatMul`` with other ranks.

    ONNX Runtime runs these only if both factors have the same rank, which onnxscript's rules do not
    check.
    """
    known: Symbolic | None = None
    for node in list(model.graph):
        if (node.domain, node.op_type) != ("com.microsoft", "FusedMatMul"):
            continue
        turned = [
            place
            for place, side in enumerate("AB")
            if node.attributes.get_int(f"transBatch{side}", 0)
        ]
        known = known or (Symbolic(model.graph) if turned else None)
        if known is None or known.rank(node.inputs[0]) == known.rank(node.inputs[1]):
            continue
        for place in turned:
            value, rank = node.inputs[place], known.rank(node.inputs[place])
            if value is not None and rank is not None:
                perm = [*range(1, rank - 1), 0, rank - 1]
                back = ir.node(
                    "Transpose", [value], {"perm": perm}, name=f"{node.name}_Transpose{place}"
                )
                model.graph.insert_before(node, back)
                node.replace_input_with(place, back.outputs[0])
                node.attributes.pop(f"transBatch{'AB'[place]}")


def _complete(model: ir.Model) -> None:
    """Remove optional outputs of ONNX Runtime's operators that nothing reads, and set the shapes of the others.

    onnxscript's rules leave both to others: the sum before a normalisation, and shapes that later
    passes need.
    """
    known = Symbolic(model.graph)
    for node in model.graph:
        if node.domain != "com.microsoft":
            continue
        count = len(node.outputs)
        while (
            count > 1
            and not node.outputs[count - 1].uses()
            and not node.outputs[count - 1].is_graph_output()
        ):
            count -= 1
        node.resize_outputs(count)
        for value in node.outputs:
            shape, dtype = known.shape(value), known.dtype(value)
            if value.shape is None and shape is not None and dtype is not None:
                value.shape, value.type = written_shape(shape), ir.TensorType(dtype)
