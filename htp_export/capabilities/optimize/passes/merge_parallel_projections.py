"""Merging of linear layers with the same input, such as the layers of queries, keys and values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.passes.fuse_matmul_add import product_and_bias
from htp_export.capabilities.optimize.registry import decline, integers, register
from htp_export.editing.editing import Array, add_initializer, is_constant, remove_unused, replace
from htp_export.format.recipes import step
from htp_export.model.recipes import recipe_of
from htp_export.shapes.operator_kinds import is_standard
from htp_export.weights.products import changed_when_written

_FEWEST = 3
"""Three layers are six nodes; merged, two and three slices. Two layers would not become fewer
nodes."""


@register("merge_parallel_projections", level="tolerant")
class MergeParallelProjections(ir.passes.InPlacePass):
    """Merges three or more linear layers with the same input into one, and slices its result.

    Each layer stays exact: its slice is its own, and the product belongs to all. The joint weights
    are concatenated when they are written, so that memory holds no second set.
    `pack_attention_inputs` does the same for an attention, also for layers without a bias, and for
    quantized ones.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        layers: defaultdict[ir.Value | None, list[Layer]] = defaultdict(list)
        for node in model.graph:
            layer = layer_of(node.outputs[0]) if is_standard(node, "Add") else None
            if layer is not None and is_standard(layer.product, "MatMul"):
                layers[layer.product.inputs[0]].append(layer)
        modified = False
        for parallel in layers.values():
            joint = joint_product(model.graph, parallel)
            if joint is not None:
                _slice(joint, parallel)
                modified = True
        _decline(model.graph)
        if modified:
            remove_unused(model)
        return ir.passes.PassResult(model, modified)


@dataclass(frozen=True)
class Layer:
    """A linear layer: the node of its result, its product, and the bias that is added to that."""

    end: ir.Node
    product: ir.Node
    bias: ir.Value | None

    @property
    def columns(self) -> int:
        """The size of the last dimension of the result."""
        if is_standard(self.product, "MatMul"):
            weight: Any = self.product.inputs[1]  # a constant
            return int(weight.const_value.shape.numpy()[1])
        return self.product.attributes["N"].as_int()

    @property
    def settings(self) -> tuple[object, ...]:
        """The properties that layers must share to be merged: all but the number of columns."""
        product = self.product
        parameters = (*product.inputs[1:], self.bias)
        dtypes = [None if value is None else value.dtype for value in parameters]
        attributes = {**product.attributes, "N": None}
        return product.inputs[0], product.op_type, attributes, dtypes


def layer_of(value: ir.Value | None) -> Layer | None:
    """The linear layer whose result a value is."""
    end = value.producer() if value is not None else None
    if end is None:
        return None
    product, bias = end, None
    if is_standard(end, "Add"):
        parts = product_and_bias(end)
        if parts is None:
            return None
        product, bias = parts
    if not _has_constant_matrix(product):
        return None
    layer = Layer(end, product, bias)
    bias_tensor = None if bias is None else bias.const_value
    if bias_tensor is not None and list(bias_tensor.shape) != [layer.columns]:
        return None
    return layer


def _has_constant_matrix(product: ir.Node) -> bool:
    """Whether a node is a product with one constant matrix, perhaps a quantized one."""
    if is_standard(product, "MatMul"):
        weight: Any = product.inputs[1]
        return is_constant(weight) and len(weight.const_value.shape) == 2
    if (product.domain, product.op_type) != ("com.microsoft", "MatMulNBits"):
        return False
    if any(product.inputs[4:5]):  # the order of the rows
        return False
    parameters = (*product.inputs[1:4], *product.inputs[5:])
    return all(part is None or is_constant(part) for part in parameters)


def joint_product(graph: ir.Graph, layers: Sequence[Layer]) -> ir.Value | None:
    """The result of a new product that has the columns of all layers in order.

    None if they differ.
    """
    if len(layers) < _FEWEST or len({layer.end for layer in layers}) < len(layers):
        return None
    first = layers[0]
    if any(layer.settings != first.settings for layer in layers):
        return None
    products = {layer.product for layer in layers}
    earliest = next(node for node in graph if node in products)
    name = str(first.end.outputs[0].name)
    attributes = dict(first.product.attributes)
    if "N" in attributes:
        attributes["N"] = ir.AttrInt64("N", sum(layer.columns for layer in layers))
    inputs = _joint_inputs(graph, [layer.product for layer in layers], name)
    joint = ir.node(first.product.op_type, inputs, attributes, domain=first.product.domain)
    nodes = [joint]
    if first.bias is not None:
        bias = _joined(graph, [layer.bias for layer in layers], -1, f"{name}_joint_bias")
        nodes.append(ir.node("Add", [joint.outputs[0], bias]))
    for node in nodes:
        node.name = f"{first.end.name}_joint_{node.op_type}"
    graph.insert_before(earliest, nodes)
    return nodes[-1].outputs[0]


def _joint_inputs(graph: ir.Graph, products: Sequence[ir.Node], name: str) -> list[ir.Value | None]:
    """The input of all products, and their weights side by side."""
    axis = -1 if is_standard(products[0], "MatMul") else 0  # blocks are stored column by column
    inputs = [products[0].inputs[0]]
    for position in range(1, len(products[0].inputs)):
        parts = [product.inputs[position] for product in products]
        kind = "weight" if position == 1 else f"input{position}"
        inputs.append(_joined(graph, parts, axis, f"{name}_joint_{kind}"))
    return inputs


def _slice(joint: ir.Value, layers: Sequence[Layer]) -> None:
    """Replace layers by slices of their joint result.

    Each slice belongs to the module of its layer.
    """
    last, start = integers(layers[0].end, [-1], "axis"), 0
    for layer in layers:
        bounds = [integers(layer.end, [at], "bound") for at in (start, start + layer.columns)]
        replace(layer.end, [ir.node("Slice", [joint, *bounds, last])])
        start += layer.columns


def _joined(
    graph: ir.Graph, values: Sequence[ir.Value | None], axis: int, name: str
) -> ir.Value | None:
    """A new initializer of tensors side by side, concatenated when it is written.

    None without tensors.
    """
    present = [value for value in values if value is not None]
    if not present:
        return None
    tensors: list[Any] = [value.const_value for value in present]
    shape = list(tensors[0].shape.numpy())
    shape[axis] = sum(tensor.shape.numpy()[axis] for tensor in tensors)

    def concatenated(first: Array) -> Array:
        return np.concatenate([first, *(tensor.numpy() for tensor in tensors[1:])], axis=axis)

    recipe = step("concat", *map(recipe_of, present), axis)
    tensor = changed_when_written(tensors[0], concatenated, recipe, shape)
    return add_initializer(graph, tensor, name, recipe)


def _decline(graph: ir.Graph) -> None:
    """Record why products stay that look like projections to queries, keys and values."""
    consumers: defaultdict[ir.Value | None, list[ir.Node]] = defaultdict(list)
    for node in graph:
        if is_standard(node, "MatMul", "Gemm") and is_constant(node.inputs[1]):
            consumers[node.inputs[0]].append(node)
    for nodes in consumers.values():
        # grouped queries are wider than keys
        if len(nodes) != _FEWEST or len({*map(_columns, nodes)}) == _FEWEST:
            continue
        if any(node.op_type == "Gemm" for node in nodes):
            why = "they are Gemm, not MatMul and Add"
        elif any(_has_bias(node) for node in nodes):
            why = "not all of them have a bias of their own"
        else:
            why = "they have no bias"
        decline("qkv_projections", nodes, why)


def _has_bias(product: ir.Node) -> bool:
    return any(is_standard(use.node, "Add") for use in product.outputs[0].uses())


def _columns(product: ir.Node) -> int:
    weight: Any = product.inputs[1]  # a constant
    shape = weight.const_value.shape.numpy()
    return int(shape[-2 if product.attributes.get_int("transB", 0) else -1])
