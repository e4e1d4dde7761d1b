"""Linear layers of a graph: what goes in and comes out, whatever operators they became, and which take adapters."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.model_metadata import FACTORS, factor_name, read_lora
from htp_export.model.neighbours import only_consumer
from htp_export.model.regions import Region
from htp_export.model.tagged import TaggedModel
from htp_export.shapes.operator_kinds import dequantizes, operator_of, quantizes
from htp_export.weights.products import LINEAR


@dataclass(frozen=True)
class Linear:
    """One call of a linear layer: ``x``, of the shape (..., inputs), becomes ``y``, of the shape (..., outputs).

    ``y`` is with the bias or before it is added; behind the quantization of the layer's result,
    whose range knows nothing of an adapter.
    """

    path: str
    call: int
    product: ir.Node
    x: ir.Value
    y: ir.Value
    inputs: int
    outputs: int


class NotLinearError(InputError):
    """A module multiplies with constant matrices in another way than a linear layer does."""


def linear_paths(tagged: TaggedModel) -> list[str]:
    """The modules that multiply what they are given with a constant matrix, in the order of the tree.

    If the file says which parameters modules have, only those that have a matrix.
    """
    works = tagged.index.works
    owners = {
        path for node in tagged.nodes if _is_product(tagged, node) for path in works[node].doing
    }
    if tagged.parameters is not None:
        shapes = {path: held.shapes.values() for path, held in tagged.parameters.items()}
        owners = {path for path in owners if any(len(shape) == 2 for shape in shapes.get(path, ()))}
    return [path for path in tagged if path in owners]


def linears_of(tagged: TaggedModel, path: str) -> list[Linear]:
    """The calls of a linear layer that the model computes.

    An `InputError` if the module is merged with its neighbours; a `NotLinearError` if it is no
    single layer.
    """
    calls = tagged[path].calls
    regions = {call: tagged[path].call(call) for call in range(calls)} if calls > 1 else {}
    # others gave what nothing reads
    computed = {call: region for call, region in regions.items() if region.nodes}
    return [
        _linear(tagged, path, region, call)
        for call, region in (computed or {0: tagged[path]}).items()
    ]


def lora_layers(tagged: TaggedModel) -> dict[str, float]:
    """Module path → the factor by which its low-rank product is multiplied, for the layers that `lora.insert` made.

    If the metadata is not what the file format says, or names what the graph does not have:
    `InputError`.
    """
    try:
        layers = read_lora(tagged.model.metadata_props)
    except ValueError as error:
        raise InputError(f"model {tagged.model.graph.name!r}: {error}") from error
    for path in layers:
        if path not in tagged:
            raise InputError(f"{tags.LORA} names module {path!r}, which the model does not have")
        factor_inputs(tagged.model.graph, path)
    return layers


def factor_inputs(graph: ir.Graph, path: str) -> list[ir.Value]:
    """The two inputs that `lora.insert` made for a module; `InputError` if the graph does not have them."""
    given = {value.name: value for value in graph.inputs}
    names = [factor_name(path, factor) for factor in FACTORS]
    for name in names:
        if name not in given:
            raise InputError(
                f"{tags.LORA} names module {path!r}, and the graph has no input {name!r}"
            )
    return [given[name] for name in names]


def _is_product(tagged: TaggedModel, node: ir.Node) -> bool:
    if (
        operator_of(node) not in LINEAR
        or len(node.inputs) < 2
        or node.inputs[0] is None
        or node.inputs[1] is None
    ):
        return False
    return not _is_constant(tagged, node.inputs[0]) and _is_constant(tagged, node.inputs[1])


def _is_constant(tagged: TaggedModel, value: ir.Value) -> bool:
    return value in tagged.index.constant or (
        not value.is_graph_input() and tagged.index.initializer(value) is not None
    )


def _linear(tagged: TaggedModel, path: str, region: Region, call: int) -> Linear:
    products = [
        node
        for node in region.nodes
        if _is_product(tagged, node) and path in tagged.index.works[node].doing
    ]
    if len(products) != 1:
        many = f"it has {len(products)} products with constant matrices"
        raise NotLinearError(f"module {path!r} is no linear layer: {many}")
    [product] = products
    if product.graph is not tagged.model.graph:
        raise InputError(
            f"module {path!r} runs in a branch or loop ({product.op_type} {product.name!r})"
        )
    x, y = product.inputs[0], product.outputs[0]
    assert x is not None
    # layers were merged: that of this one begins behind the product
    if tagged.index.works[product].doing != (path,):
        y = _result(tagged, path, region, call)
    y = _behind_quantization(tagged, path, y)
    inputs, outputs = (
        shape[-1] if (shape := tagged.inferred.shape(value)) else None for value in (x, y)
    )
    if product.attributes.get_int("transA", 0) or tagged.inferred.rank(x) != tagged.inferred.rank(
        y
    ):
        how = f"{product.op_type} {product.name!r} does not multiply the last dimension by a matrix"
        raise NotLinearError(f"module {path!r} is no linear layer: {how}")
    if not isinstance(inputs, int) or not isinstance(outputs, int):
        raise InputError(f"module {path!r}: the sizes of {x.name!r} and {y.name!r} are not known")
    return Linear(path, call, product, x, y, inputs, outputs)


def unquantized(value: ir.Value) -> ir.Value:
    """What a tensor was before it was quantized and dequantized; else the tensor itself."""
    before: ir.Value | None = value
    for op_type in ("DequantizeLinear", "QuantizeLinear"):
        node = before.producer() if before is not None else None
        before = node.inputs[0] if node is not None and node.op_type == op_type else None
    return before or value


def _behind_quantization(tagged: TaggedModel, path: str, y: ir.Value) -> ir.Value:
    """The last tensor that is ``y``, quantized and dequantized, possibly with the bias of the module."""
    add = None
    if (first := _dequantized(y)) is not None:
        add = only_consumer(first, "Add")
    elif (add := only_consumer(y, "Add")) is None:
        return y
    end = first or y
    if add is None or tagged.owners_of(add) != (path,):
        return end
    has_bias = any(value is not None and _is_constant(tagged, value) for value in add.inputs)
    return (_dequantized(add.outputs[0]) if has_bias else None) or end


def _dequantized(value: ir.Value) -> ir.Value | None:
    quantize = only_consumer(value)
    dequantize = (
        only_consumer(quantize.outputs[0]) if quantize is not None and quantizes(quantize) else None
    )
    return dequantize.outputs[0] if dequantize is not None and dequantizes(dequantize) else None


def _result(tagged: TaggedModel, path: str, region: Region, call: int) -> ir.Value:
    """The result of a module, which it alone computes."""
    if not tagged.hierarchy[path].fate.is_exact:
        raise InputError(
            f"module {path!r} is {tagged.hierarchy[path].fate}: its result is not in the graph by itself"
        )
    signature = tagged.signature(path, call)
    named = [tagged.values.get(name or "") for name in signature.outputs] if signature else []
    results = [value for value in named if value is not None] or region.outputs
    producer = results[0].producer() if len(results) == 1 else None
    if producer is None:
        raise InputError(f"module {path!r} is no linear layer: it gives {len(results)} tensors")
    owners = tagged.index.works[producer].doing
    if owners != (path,):
        listed = ", ".join(map(repr, owners))
        raise InputError(
            f"module {path!r}: {producer.op_type} {producer.name!r}, its result, is also that of {listed}"
        )
    return results[0]
