"""Linear layers of a graph: what goes in and what comes out, whatever operators an exporter made of them."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.model.tagged import Region, TaggedModel
from htp_export.shapes.operator_kinds import operator_of
from htp_export.weights.products import LINEAR

__all__ = ["Linear", "linear_paths", "linears_of", "unquantized"]


@dataclass(frozen=True)
class Linear:
    """One call of a linear layer.

    Attributes:
        path: The module.
        call: The number of the call.
        product: The node that multiplies with the weight.
        x: What is multiplied, of the shape (..., inputs).
        y: What the product gives, of the shape (..., outputs); with the bias or before it is added; behind the
            quantization of the layer's result, whose range knows nothing of an adapter.
        inputs: Size of the last dimension of ``x``.
        outputs: Size of the last dimension of ``y``.
    """

    path: str
    call: int
    product: ir.Node
    x: ir.Value
    y: ir.Value
    inputs: int
    outputs: int


def linear_paths(tagged: TaggedModel) -> list[str]:
    """The modules that multiply what they are given with a constant matrix, in the order of the tree.

    If the file says which parameters modules have, only those that have a matrix.
    """
    works = tagged.index.works
    owners = {path for node in tagged.nodes if _is_product(tagged, node) for path in works[node].doing}
    if tagged.parameters is not None:
        shapes = {path: held.shapes.values() for path, held in tagged.parameters.items()}
        owners = {path for path in owners if any(len(shape) == 2 for shape in shapes.get(path, ()))}
    return [path for path in tagged if path in owners]


def linears_of(tagged: TaggedModel, path: str) -> list[Linear]:
    """The calls of a linear layer.

    Raises:
        InputError: If the module is no single linear layer, or is merged with its neighbours.
    """
    calls = tagged[path].calls
    return [_linear(tagged, path, tagged[path].call(k) if calls > 1 else tagged[path], k) for k in range(max(calls, 1))]


def _is_product(tagged: TaggedModel, node: ir.Node) -> bool:
    if operator_of(node) not in LINEAR or len(node.inputs) < 2 or node.inputs[0] is None or node.inputs[1] is None:
        return False
    return not _is_constant(tagged, node.inputs[0]) and _is_constant(tagged, node.inputs[1])


def _is_constant(tagged: TaggedModel, value: ir.Value) -> bool:
    return value in tagged.index.constant or (
        not value.is_graph_input() and tagged.index.initializer(value) is not None
    )


def _linear(tagged: TaggedModel, path: str, region: Region, call: int) -> Linear:
    products = [node for node in region.nodes if _is_product(tagged, node) and path in tagged.index.works[node].doing]
    if len(products) != 1:
        raise InputError(f"module {path!r} is no linear layer: it has {len(products)} products with constant matrices")
    [product] = products
    if product.graph is not tagged.model.graph:
        raise InputError(f"module {path!r} runs in a branch or loop ({product.op_type} {product.name!r})")
    x, y = product.inputs[0], product.outputs[0]
    assert x is not None
    if tagged.index.works[product].doing != (
        path,
    ):  # layers were merged: the part of this one begins behind the product
        y = _result(tagged, path, region, call)
    y = _behind_quantization(tagged, path, y)
    sizes = [shape[-1] if (shape := tagged.inferred.shape(value)) else None for value in (x, y)]
    inputs, outputs = sizes
    if product.attributes.get_int("transA", 0) or tagged.inferred.rank(x) != tagged.inferred.rank(y):
        raise InputError(f"module {path!r}: {product.op_type} {product.name!r} does not multiply the last dimension")
    if not isinstance(inputs, int) or not isinstance(outputs, int):
        raise InputError(f"module {path!r}: the sizes of {x.name!r} and {y.name!r} are not known")
    return Linear(path, call, product, x, y, inputs, outputs)


def unquantized(value: ir.Value) -> ir.Value:
    """What a tensor was before it was quantized and dequantized; else the tensor itself."""
    dequantize = value.producer()
    if dequantize is None or dequantize.op_type != "DequantizeLinear" or dequantize.inputs[0] is None:
        return value
    quantize = dequantize.inputs[0].producer()
    if quantize is None or quantize.op_type != "QuantizeLinear" or quantize.inputs[0] is None:
        return value
    return quantize.inputs[0]


def _behind_quantization(tagged: TaggedModel, path: str, y: ir.Value) -> ir.Value:
    """The last tensor that is ``y``, quantized and dequantized, possibly with the bias of the module."""
    add = None
    if (first := _dequantized(y)) is not None:
        add = _only_reader(first, "Add")
    elif (add := _only_reader(y, "Add")) is None:
        return y
    end = first or y
    if add is None or tagged.owners_of(add) != (path,):
        return end
    has_bias = any(value is not None and _is_constant(tagged, value) for value in add.inputs)
    return (_dequantized(add.outputs[0]) if has_bias else None) or end


def _dequantized(value: ir.Value) -> ir.Value | None:
    quantize = _only_reader(value, "QuantizeLinear")
    dequantize = quantize and _only_reader(quantize.outputs[0], "DequantizeLinear")
    return dequantize.outputs[0] if dequantize else None


def _only_reader(value: ir.Value, op_type: str) -> ir.Node | None:
    """The one node that reads a tensor, if it is such an operator."""
    if value.is_graph_output() or len(value.uses()) != 1:
        return None
    [node] = {use.node for use in value.uses()}
    return node if node.op_type == op_type else None


def _result(tagged: TaggedModel, path: str, region: Region, call: int) -> ir.Value:
    """The result of a module, which it alone computes."""
    if not tagged.hierarchy[path].fate.is_exact:
        raise InputError(f"module {path!r} is {tagged.hierarchy[path].fate}: its result is not in the graph by itself")
    signature = tagged.signature(path, call)
    named = [tagged.values.get(name or "") for name in signature.outputs] if signature else []
    results = [value for value in named if value is not None] or region.outputs
    producer = results[0].producer() if len(results) == 1 else None
    if producer is None:
        raise InputError(f"module {path!r} is no linear layer: it gives {len(results)} tensors")
    owners = tagged.index.works[producer].doing
    if owners != (path,):
        listed = ", ".join(map(repr, owners))
        raise InputError(f"module {path!r}: {producer.op_type} {producer.name!r}, its result, is also that of {listed}")
    return results[0]
