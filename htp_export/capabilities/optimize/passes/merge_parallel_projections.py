"""Linear layers with the same input, such as those of queries, keys and values."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.declining import decline
from htp_export.capabilities.optimize.node_pass import integers
from htp_export.capabilities.optimize.passes.fuse_matmul_add import product_and_bias
from htp_export.capabilities.optimize.registry import register
from htp_export.editing.editing import add_constant, add_initializer, is_constant, remove_unused, replace
from htp_export.format.recipes import step
from htp_export.model.recipes import recipe_of
from htp_export.shapes.operator_kinds import is_standard

_FEWEST = 3
"""Three layers are six nodes; merged they are two, and one slice each."""


@register("merge_parallel_projections", level="tolerant")
class MergeParallelProjections(ir.passes.InPlacePass):
    """Makes one product of three or more linear layers that read the same tensor, and slices their results.

    Each layer stays exact: its slice is its own, and the product belongs to all. The joint weights are concatenated
    when they are written, so that no second set is held in memory.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        layers: defaultdict[ir.Value | None, list[_Layer]] = defaultdict(list)
        for node in model.graph:
            parts = product_and_bias(node) if is_standard(node, "Add") else None
            if parts is not None and _is_linear(*parts):
                layers[parts[0].inputs[0]].append((node, *parts))
        modified = False
        for parallel in layers.values():
            if len(parallel) >= _FEWEST:
                _merge(model.graph, parallel)
                modified = True
        _decline(model.graph)
        if modified:
            remove_unused(model)
        return ir.passes.PassResult(model, modified)


_Layer = tuple[ir.Node, ir.Node, ir.Value]
"""The sum, the product and the bias of a linear layer."""


def _is_linear(product: ir.Node, bias: ir.Value) -> bool:
    weight = product.inputs[1]
    if weight is None or weight.const_value is None or weight.is_graph_input() or bias.const_value is None:
        return False
    shape = weight.const_value.shape
    return len(shape) == 2 and list(bias.const_value.shape) == [shape[1]]


def _merge(graph: ir.Graph, layers: Sequence[_Layer]) -> None:
    weights: list[Any] = [product.inputs[1].const_value for _, product, _ in layers]  # type: ignore[union-attr]
    biases: list[Any] = [bias.const_value for _, _, bias in layers]
    height, widths = weights[0].shape.numpy()[0], [tensor.shape.numpy()[1] for tensor in weights]
    first, earliest, _ = layers[0]
    name = str(first.outputs[0].name)
    whole = sum(widths)
    read = [product.inputs[1] for _, product, _ in layers], [added for _, _, added in layers]
    recipes = [step("concat", *map(recipe_of, parts), -1) for parts in read]  # type: ignore[arg-type]
    weight = add_initializer(graph, _joined(weights, [height, whole]), f"{name}_joint_weight", recipes[0])
    bias = add_initializer(graph, _joined(biases, [whole]), f"{name}_joint_bias", recipes[1])
    product = ir.node("MatMul", [earliest.inputs[0], weight], name=f"{first.name}_joint_MatMul")
    joint = ir.node("Add", [product.outputs[0], bias], name=f"{first.name}_joint_Add")
    graph.insert_before(earliest, [product, joint])
    axis, start = integers(first, [-1], "axis"), 0
    for (node, _, _), width in zip(layers, widths, strict=True):
        bounds = [add_constant(graph, np.array([at], np.int64), f"{name}_bound") for at in (start, start + width)]
        replace(node, [ir.node("Slice", [joint.outputs[0], *bounds, axis])])
        start += width


def _joined(tensors: Sequence[ir.TensorProtocol], shape: Sequence[int]) -> ir.TensorProtocol:
    """Tensors side by side."""
    return ir.LazyTensor(
        lambda: ir.tensor(np.concatenate([tensor.numpy() for tensor in tensors], axis=-1)),
        tensors[0].dtype,
        ir.Shape(shape),
    )


def _decline(graph: ir.Graph) -> None:
    """Note why products stay that look like projections to queries, keys and values."""
    readers: defaultdict[ir.Value | None, list[ir.Node]] = defaultdict(list)
    for node in graph:
        if is_standard(node, "MatMul", "Gemm") and is_constant(node.inputs[1]):
            readers[node.inputs[0]].append(node)
    for nodes in readers.values():
        if len(nodes) != _FEWEST or not _fit_together([_columns(node) for node in nodes]):
            continue
        added = [any(is_standard(use.node, "Add") for use in node.outputs[0].uses()) for node in nodes]
        if any(node.op_type == "Gemm" for node in nodes):
            why = "they are Gemm, not MatMul and Add"
        else:
            why = "not all of them have a bias of their own" if any(added) else "they have no bias"
        decline("qkv_projections", nodes, why)


def _columns(node: ir.Node) -> int | None:
    shape = None if node.inputs[1] is None else node.inputs[1].shape
    turned = node.attributes.get_int("transB", 0)
    columns = None if shape is None or len(shape) != 2 else shape[0 if turned else 1]
    return columns if isinstance(columns, int) else None


def _fit_together(columns: Sequence[int | None]) -> bool:
    """Whether three widths are equal, or two are and the third is a multiple, as with grouped queries."""
    (narrow, count), *rest = Counter(columns).most_common()
    if narrow is None or count == 1:
        return False
    return not rest or (isinstance(wide := rest[0][0], int) and wide > narrow and wide % narrow == 0)
