"""ONNX Runtime's operators for attention, skip connections, GELU, and rotary embedding."""

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
from htp_export.lineage.difference import Snapshot
from htp_export.model.neighbours import only_consumer, producer_of
from htp_export.model.recipes import recipes_of_computed, replaced_by
from htp_export.process.quiet import quiet
from htp_export.shapes.known import Shape
from htp_export.shapes.operator_kinds import is_standard, without_copies
from htp_export.shapes.sizes import product
from htp_export.shapes.symbolic import Symbolic, written_shape

_HIDDEN = "htp_export.hidden"
_LARGE = 1 << 20  # elements of a constant result: 4 MB as float32, far more than sizes and masks


@register("fuse_for_onnxruntime", level="fused")
class FuseForOnnxruntime(LibraryPass):
    """Fuses attention, skip connections with normalization, GELU and rotary embedding.

    The rules are onnxscript's.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        from onnxscript.rewriter.ort_fusions import optimize_for_ort

        before, stored = Snapshot(model), _contents(model.graph)
        results = [value.name for value in model.graph.outputs]
        # Forms that the rules match are written first; nodes that they would get wrong are hidden.
        _Unflatten()(model)
        _WriteReciprocals()(model)
        hidden = [node for node in model.graph.all_nodes() if _is_unsound(node)]
        growing = _growing(model.graph)
        with (
            quiet("onnx_ir", "onnxscript"),
            _hidden(model, [*hidden, *growing]),
            changed_rules() as unhandled,
        ):
            present = _contents(model.graph)
            computed = recipes_of_computed(model.graph)
            rewritten, _ = optimize_for_ort(model)
        # The rules lose registrations, names of results, recipes, types and versions.
        register_constants(rewritten.graph)
        _join_results(rewritten.graph, results)
        replaced_by("onnxscript", rewritten, present, computed)
        _write_batch_transposes(rewritten)
        _complete(rewritten)
        left = {str(node.name): why for node, why in unhandled.items() if node.graph is not None}
        is_same = Snapshot(rewritten).equals(before) and _hold_the_same(
            stored, _contents(rewritten.graph)
        )
        return LibraryResult(rewritten, not is_same, left)


_Contents = dict[str, ir.TensorProtocol | None]


def _contents(graph: ir.Graph) -> _Contents:
    """Initializer → its tensor."""
    return {name: value.const_value for name, value in graph.initializers.items()}


def _hold_the_same(before: _Contents, after: _Contents) -> bool:
    """Whether two graphs have the same initializers with the same tensor objects."""
    return before.keys() == after.keys() and all(before[name] is after[name] for name in before)


def _is_unsound(node: ir.Node) -> bool:
    """Whether a rule would write a node that fails, computes something else, or overflows."""
    # the rule for group normalization matches it: its operator runs on GPUs only
    if is_standard(node, "InstanceNormalization"):
        return True
    # between reshapes, a rule replaces it by a product without the transpose
    if is_standard(node, "Gemm"):
        return _transposes(node)
    if is_standard(node, "Div"):  # a rule multiplies by the reciprocal
        return constant_array(node.inputs[1], 1) is not None and multiple(node) is None
    is_folded = is_standard(node, "BatchNormalization") and all(map(is_constant, node.inputs[1:]))
    return is_folded and has_large_factors(node)


def _transposes(gemm: ir.Node) -> bool:
    """Whether a ``Gemm`` transposes a factor."""
    return any(gemm.attributes.get_int(key, 0) for key in ("transA", "transB"))


def _growing(graph: ir.Graph) -> list[ir.Node]:
    """Nodes with large constant results.

    onnxscript folds constants before it checks the size of the result.
    """
    known: Symbolic | None = None
    growing: list[ir.Node] = []
    for node in graph:
        inputs = [value for value in node.inputs if value is not None]
        tensors = [ir.convenience.get_const_tensor(value) for value in inputs]
        constants = [tensor for tensor in tensors if tensor is not None]
        if node.domain or len(constants) < len(tensors):
            continue
        known = known or Symbolic(graph)
        most = _LARGE + sum(tensor.size for tensor in constants)
        if not all(_is_at_most(known.shape(value), most) for value in node.outputs):
            growing.append(node)
    return growing


def _is_at_most(shape: Shape | None, most: int) -> bool:
    """Whether a tensor has a known number of elements, and at most this one."""
    size = None if shape is None else product(shape)
    return isinstance(size, int) and size <= most


@contextlib.contextmanager
def _hidden(model: ir.Model, nodes: Sequence[ir.Node]) -> Iterator[None]:
    """Hide nodes from rules: they are in another domain until the end."""
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
    """Replaces a ``Gemm`` between reshapes that flatten the leading axes by ``MatMul`` and ``Add``.

    onnxscript's rules for attention do not match these reshapes, or mistake the flattened shape for
    the original one.
    """

    operators = ("Gemm",)

    def rewrite(self, node: ir.Node) -> bool:
        known, attributes = self.known, node.attributes
        first = producer_of(node.inputs[0], "Reshape")
        last = only_consumer(node.outputs[0], "Reshape")
        if first is None or last is None or len(node.inputs) < 3:
            return False
        is_scaled = any(attributes.get_float(key, 1.0) != 1.0 for key in ("alpha", "beta"))
        if is_scaled or _transposes(node):
            return False
        source, result = first.inputs[0], known.shape(last.outputs[0])
        shape, matrix = known.shape(source), known.shape(node.inputs[1])
        if source is None or shape is None or matrix is None or result is None or len(result) < 3:
            return False
        if result[-1] != matrix[1] or known.rank(node.inputs[2]) != 1:
            return False
        wanted = (*result[:-1], matrix[0])
        nodes: list[ir.Node] = []
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
    """Rewrites ``1 / Sqrt(ReduceMean + epsilon)`` of TorchScript as dynamo writes it.

    onnxscript matches RMS norms in this form.
    """

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
    """Restore a tensor that is two outputs of the graph: onnxscript copies it for the second."""
    for position, (value, name) in enumerate(zip(graph.outputs, names, strict=True)):
        copy = value.producer()
        if value.name == name or copy is None:
            continue
        source = without_copies(value)
        if source.name == name:
            graph.outputs[position] = source
            graph.remove(copy, safe=True)


def _write_batch_transposes(model: ir.Model) -> None:
    """Replace ``transBatchA`` and ``transBatchB`` of a ``FusedMatMul`` by a ``Transpose``.

    ONNX Runtime accepts them only if both factors have the same rank, which onnxscript's rules do
    not check.
    """
    known: Symbolic | None = None
    for node in list(model.graph):
        if (node.domain, node.op_type) != ("com.microsoft", "FusedMatMul"):
            continue
        flags = ("transBatchA", "transBatchB")
        transposed = [k for k, flag in enumerate(flags) if node.attributes.get_int(flag, 0)]
        if not transposed:
            continue
        known = known or Symbolic(model.graph)
        if known.rank(node.inputs[0]) == known.rank(node.inputs[1]):
            continue
        for position in transposed:
            value, rank = node.inputs[position], known.rank(node.inputs[position])
            if value is None or rank is None:
                continue
            perm = {"perm": [*range(1, rank - 1), 0, rank - 1]}
            name = f"{node.name}_Transpose{position}"
            transpose = ir.node("Transpose", [value], perm, name=name)
            model.graph.insert_before(node, transpose)
            node.replace_input_with(position, transpose.outputs[0])
            node.attributes.pop(flags[position])


def _is_unused(value: ir.Value) -> bool:
    return not value.uses() and not value.is_graph_output()


def _complete(model: ir.Model) -> None:
    """Remove unused optional outputs of ONNX Runtime's operators, and set the shapes of the others.

    onnxscript's rules leave both to others: the sum before a normalization, and shapes that later
    passes need.
    """
    known = Symbolic(model.graph)
    for node in model.graph:
        if node.domain != "com.microsoft":
            continue
        count = len(node.outputs)
        while count > 1 and _is_unused(node.outputs[count - 1]):
            count -= 1
        node.resize_outputs(count)
        for value in node.outputs:
            shape, dtype = known.shape(value), known.dtype(value)
            if value.shape is None and shape is not None and dtype is not None:
                value.shape, value.type = written_shape(shape), ir.TensorType(dtype)
