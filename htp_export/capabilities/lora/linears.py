"""Linear layers of a graph, for any operators that they were exported to, and layers with LoRA inputs."""

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

    ``y`` may be before or after the bias. It is after the quantization of the layer's result,
    because that range was calibrated without an adapter.
    """

    path: str
    call: int
    product: ir.Node
    x: ir.Value
    y: ir.Value
    inputs: int
    outputs: int


class NotLinearError(InputError):
    """A module has products with constant matrices, but is not one linear layer."""


def linear_paths(tagged: TaggedModel) -> list[str]:
    """Modules that multiply an input by a constant matrix, in the order of the module tree.

    If the file records the parameters of modules, a module without a matrix is left out.
    """
    works = tagged.index.works
    owners: set[str] = set()
    for node in tagged.nodes:
        if _is_product(tagged, node):
            owners.update(works[node].doing)
    if tagged.parameters is not None:
        with_matrix = set()
        for path, held in tagged.parameters.items():
            if any(len(shape) == 2 for shape in held.shapes.values()):
                with_matrix.add(path)
        owners &= with_matrix
    return [path for path in tagged if path in owners]


def linears_of(tagged: TaggedModel, path: str) -> list[Linear]:
    """Calls of a linear layer that the graph computes.

    Raises:
        InputError: The module is merged with its neighbours.
        NotLinearError: The module is not one linear layer.
    """
    calls = tagged[path].calls
    regions: dict[int, Region] = {}
    for call in range(calls) if calls > 1 else ():
        region = tagged[path].call(call)
        # A call without nodes was removed: nothing consumed its result.
        if region.nodes:
            regions[call] = region
    regions = regions or {0: tagged[path]}
    return [_linear(tagged, path, region, call) for call, region in regions.items()]


def lora_layers(tagged: TaggedModel) -> dict[str, float]:
    """Module path → scaling of its low-rank product, for the layers that `lora.insert` added.

    Raises:
        InputError: The metadata is malformed, or names modules or inputs that the graph lacks.
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
    """The two graph inputs that `lora.insert` added for a module; `InputError` if the graph lacks one."""
    graph_inputs = {value.name: value for value in graph.inputs}
    names = [factor_name(path, factor) for factor in FACTORS]
    for name in names:
        if name not in graph_inputs:
            raise InputError(
                f"{tags.LORA} names module {path!r}, and the graph has no input {name!r}"
            )
    return [graph_inputs[name] for name in names]


def _is_product(tagged: TaggedModel, node: ir.Node) -> bool:
    """Whether a node multiplies a computed tensor by a constant one."""
    if operator_of(node) not in LINEAR or len(node.inputs) < 2:
        return False
    x, weight = node.inputs[:2]
    if x is None or weight is None:
        return False
    return not _is_constant(tagged, x) and _is_constant(tagged, weight)


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
    # Layers were merged into one product: this layer's own result is computed after it.
    if tagged.index.works[product].doing != (path,):
        y = _result(tagged, path, region, call)
    y = _behind_quantization(tagged, path, y)
    inputs, outputs = _last_size(tagged, x), _last_size(tagged, y)
    same_rank = tagged.inferred.rank(x) == tagged.inferred.rank(y)
    if product.attributes.get_int("transA", 0) or not same_rank:
        how = f"{product.op_type} {product.name!r} does not multiply the last dimension by a matrix"
        raise NotLinearError(f"module {path!r} is no linear layer: {how}")
    if not isinstance(inputs, int) or not isinstance(outputs, int):
        raise InputError(f"module {path!r}: the sizes of {x.name!r} and {y.name!r} are not known")
    return Linear(path, call, product, x, y, inputs, outputs)


def _last_size(tagged: TaggedModel, value: ir.Value) -> object:
    """The size of the last dimension: an int if it is a number, None if the shape is not known."""
    shape = tagged.inferred.shape(value)
    return shape[-1] if shape else None


def unquantized(value: ir.Value) -> ir.Value:
    """The tensor before a QuantizeLinear and DequantizeLinear pair; ``value`` itself without one."""
    dequantize = value.producer()
    if dequantize is None or dequantize.op_type != "DequantizeLinear":
        return value
    levels = dequantize.inputs[0]
    quantize = levels.producer() if levels is not None else None
    if quantize is None or quantize.op_type != "QuantizeLinear":
        return value
    return quantize.inputs[0] or value


def _behind_quantization(tagged: TaggedModel, path: str, y: ir.Value) -> ir.Value:
    """The layer's result after its QuantizeLinear and DequantizeLinear pairs.

    Tools quantize a product, its sum with the bias, or both. The bias is passed only if a pair
    follows it; otherwise the result before the bias is returned.
    """
    product = _dequantized(y) or y
    add = only_consumer(product, "Add")
    if add is None or tagged.owners_of(add) != (path,):
        return product
    has_bias = any(value is not None and _is_constant(tagged, value) for value in add.inputs)
    if not has_bias:
        return product
    return _dequantized(add.outputs[0]) or product


def _dequantized(value: ir.Value) -> ir.Value | None:
    """The output of the pair that alone consumes a tensor: QuantizeLinear, then DequantizeLinear."""
    quantize = only_consumer(value)
    if quantize is None or not quantizes(quantize):
        return None
    dequantize = only_consumer(quantize.outputs[0])
    if dequantize is None or not dequantizes(dequantize):
        return None
    return dequantize.outputs[0]


def _result(tagged: TaggedModel, path: str, region: Region, call: int) -> ir.Value:
    """The result of a module whose producer belongs to this module alone."""
    if not tagged.hierarchy[path].fate.is_exact:
        raise InputError(
            f"module {path!r} is {tagged.hierarchy[path].fate}: its result is not in the graph by itself"
        )
    signature = tagged.signature(path, call)
    results: list[ir.Value] = []
    for name in signature.outputs if signature else ():
        value = tagged.values.get(name or "")
        if value is not None:
            results.append(value)
    results = results or list(region.outputs)
    producer = results[0].producer() if len(results) == 1 else None
    if producer is None:
        raise InputError(f"module {path!r} is no linear layer: it returns {len(results)} tensors")
    owners = tagged.index.works[producer].doing
    if owners != (path,):
        listed = ", ".join(map(repr, owners))
        raise InputError(
            f"module {path!r}: {producer.op_type} {producer.name!r}, its result, is also that of {listed}"
        )
    return results[0]
