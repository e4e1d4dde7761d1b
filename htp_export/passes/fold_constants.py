"""Work that is the same in every run, done now."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass

from htp_export.passes.editing import Array, add_initializer, is_constant, is_standard, remove_unused, stand_in
from htp_export.passes.registry import register
from htp_export.passes.sizes import product
from htp_export.passes.symbolic import Symbolic

__all__ = ["FoldConstants"]

_SMALL = 1 << 14
"""Constants of more elements are not read, and results of more are not made."""

_RANDOM = frozenset(
    ("Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
)


@register("fold_constants", level="exact")
class FoldConstants(ir.passes.InPlacePass):
    """Computes what depends on constants alone, with the kernels of ONNX Runtime: the results are what they were.

    Weights are not copied: a transposed or reshaped weight is a view, laid out when the file is written.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model).modified
        views = [_view(model.graph, node) for node in model.graph if is_standard(node, "Transpose")]
        foldable = _foldable(model.graph)
        if foldable:
            modified |= _fold(model, foldable)
        if modified or any(views):
            remove_unused(model)
        return ir.passes.PassResult(model, modified or any(views))


def _view(graph: ir.Graph, node: ir.Node) -> bool:
    """Fold the transposition of a weight of any size."""
    weight = node.inputs[0]
    if weight is None or not is_constant(weight) or weight.const_value is None or node.outputs[0].is_graph_output():
        return False
    if weight.const_value.size <= _SMALL:
        return False
    tensor = weight.const_value
    perm = list(node.attributes.get_ints("perm") or reversed(range(len(tensor.shape))))
    shape = ir.Shape([tensor.shape.numpy()[axis] for axis in perm])
    turned = ir.LazyTensor(lambda: ir.tensor(tensor.numpy().transpose(perm)), tensor.dtype, shape)
    return stand_in(node.outputs[0], add_initializer(graph, turned, str(node.outputs[0].name)))


def _foldable(graph: ir.Graph) -> list[ir.Node]:
    """The nodes that compute small constants from small constants."""
    known: Symbolic | None = None
    constant: set[ir.Value] = set()
    found = []
    for node in graph:
        if node.domain != "" or node.op_type in _RANDOM or not _has_plain_attributes(node):
            continue
        if any(value.is_graph_output() for value in node.outputs):
            continue
        if not all(value is None or value in constant or _is_small(value) for value in node.inputs):
            continue
        known = known or Symbolic(graph)
        sizes = [product(shape) if (shape := known.shape(value)) is not None else None for value in node.outputs]
        if all(isinstance(size, int) and size <= _SMALL for size in sizes):
            found.append(node)
            constant.update(node.outputs)
    return found


def _has_plain_attributes(node: ir.Node) -> bool:
    graphs = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
    return all(not attribute.is_ref() and attribute.type not in graphs for attribute in node.attributes.values())


def _is_small(value: ir.Value) -> bool:
    return is_constant(value) and value.const_value is not None and value.const_value.size <= _SMALL


def _fold(model: ir.Model, nodes: Sequence[ir.Node]) -> bool:
    """Compute what nodes make that others read, and put it in their place."""
    inside = set(nodes)
    wanted = [
        value
        for node in nodes
        for value in node.outputs
        if not value.is_graph_output() and any(use.node not in inside for use in value.uses())
    ]
    wanted = [value for value in wanted if value.type is None or isinstance(value.type, ir.TensorType)]
    if not wanted:
        return False
    folded = False
    for value, array in zip(wanted, _computed(model, nodes, wanted), strict=True):
        tensor = ir.tensor(array, name=value.name)
        folded |= stand_in(value, add_initializer(model.graph, tensor, str(value.name)))
    return folded


def _computed(model: ir.Model, nodes: Sequence[ir.Node], wanted: Sequence[ir.Value]) -> list[Array]:
    """Run nodes that need no input in ONNX Runtime."""
    import onnxruntime as ort

    mapping: dict[ir.Value, ir.Value] = {}
    constants: dict[str, ir.Value] = {}
    copies = []
    for node in nodes:
        for value in node.inputs:
            if value is not None and value not in mapping:
                assert value.const_value is not None
                constant = ir.tensor(value.const_value.numpy())  # external data, too, goes into what is run here
                mapping[value] = constants[str(value.name)] = ir.Value(name=value.name, const_value=constant)
        outputs = [ir.Value(name=value.name) for value in node.outputs]
        mapping.update(zip(node.outputs, outputs, strict=True))
        inputs = [None if value is None else mapping[value] for value in node.inputs]
        copies.append(ir.node(node.op_type, inputs, node.attributes, outputs=outputs))
    results = [mapping[value] for value in wanted]
    graph = ir.Graph(
        [], results, nodes=copies, initializers=list(constants.values()), opset_imports=model.opset_imports, name="fold"
    )
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    proto = ir.to_proto(ir.Model(graph, ir_version=model.ir_version))
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    arrays: list[Array] = session.run([value.name for value in results], {})
    return arrays
