"""Whether two function bodies do the same: everything of them but names, metadata, types and shapes, as one key."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np
import onnx_ir as ir

from htp_export.model.content_hash import array_hash

__all__ = ["body_key", "constant_key", "is_constant"]


def body_key(graph: ir.Graph, *, constants: bool = True) -> Hashable:
    """What two bodies have in common if one can stand for the other.

    Operators, attributes with the values of their tensors, who reads what, subgraphs, inputs and outputs in order.
    Bodies whose nodes do the same in another order are told apart.

    Args:
        graph: The body of a function: it reads nothing from outside.
        constants: Whether the values of ``Constant`` nodes count, too; those in subgraphs always do.

    Examples:
        >>> import onnx_ir as ir
        >>> def body(name, op):
        ...     x = ir.val(name)
        ...     node = ir.node(op, [x])
        ...     return ir.Graph([x], node.outputs, nodes=[node])
        >>> body_key(body("a", "Relu")) == body_key(body("b", "Relu")), body_key(body("a", "Relu")) == body_key(
        ...     body("a", "Neg")
        ... )
        (True, False)
    """
    return _graph_key(graph, {}, constants=constants)


def is_constant(node: ir.Node) -> bool:
    """Whether a node is a ``Constant``."""
    return (node.domain, node.op_type) == ("", "Constant")


def constant_key(node: ir.Node) -> Hashable:
    """The value of a ``Constant`` node."""
    return tuple((name, _attribute_key(attribute, {})) for name, attribute in node.attributes.items())


def _graph_key(graph: ir.Graph, numbers: dict[ir.Value, int], *, constants: bool = True) -> Hashable:
    for value in (*graph.inputs, *graph.initializers.values()):
        numbers.setdefault(value, len(numbers))
    tensors = tuple(_tensor_key(value.const_value) for value in graph.initializers.values())
    nodes = tuple(_node_key(node, numbers, constants=constants) for node in graph)
    return len(graph.inputs), tensors, nodes, tuple(numbers[value] for value in graph.outputs)


def _node_key(node: ir.Node, numbers: dict[ir.Value, int], *, constants: bool) -> Hashable:
    if is_constant(node) and not constants:
        numbers[node.outputs[0]] = len(numbers)
        return "Constant", tuple(node.attributes)
    inputs = tuple(None if value is None else numbers[value] for value in node.inputs)
    attributes = tuple(
        (name, int(attribute.type), _attribute_key(attribute, numbers))
        for name, attribute in sorted(node.attributes.items())
    )
    for value in node.outputs:
        numbers[value] = len(numbers)
    return *node.op_identifier(), inputs, tuple(bool(value.name) for value in node.outputs), attributes


def _attribute_key(attribute: ir.Attr, numbers: dict[ir.Value, int]) -> Hashable:
    kind = ir.AttributeType
    if attribute.is_ref():
        return ("ref", attribute.ref_attr_name)
    if attribute.type == kind.GRAPH:
        return _graph_key(attribute.as_graph(), numbers)
    if attribute.type == kind.GRAPHS:
        return tuple(_graph_key(graph, numbers) for graph in attribute.as_graphs())
    if attribute.type == kind.TENSOR:
        return _tensor_key(attribute.as_tensor())
    if attribute.type == kind.TENSORS:
        return tuple(map(_tensor_key, attribute.as_tensors()))
    return tuple(_plain(attribute.value))


def _plain(value: object) -> Iterator[Hashable]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _plain(item)
    elif isinstance(value, float):
        yield np.float64(value).tobytes()  # a NaN is equal to itself here, and 0.0 is not -0.0
    elif isinstance(value, (int, str, bytes)):
        yield value
    else:  # types, sparse tensors
        yield repr(value)


def _tensor_key(tensor: ir.TensorProtocol | None) -> Hashable:
    if tensor is None:
        return None
    shape, dtype = tuple(tensor.shape.numpy()), int(tensor.dtype)
    if isinstance(tensor, ir.ExternalTensor):  # told by its place: reading it could take gigabytes
        return dtype, shape, tensor.path, tensor.offset, tensor.length
    if tensor.dtype == ir.DataType.STRING:
        return dtype, shape, tuple(tensor.numpy().ravel().tolist())
    return dtype, shape, array_hash(np.asarray(tensor.numpy()))
