"""Small changes to a graph that keep the names of tensors if possible."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from htp_export.errors import InputError
from htp_export.format.recipes import CONSTANT, Recipe
from htp_export.lineage.records import record_replacement
from htp_export.model.boundaries import BOUNDARY
from htp_export.model.neighbours import only_consumer
from htp_export.model.recipes import recorded
from htp_export.model.regions import all_values
from htp_export.model.tagged import TaggedModel
from htp_export.model.tensor_names import UsedNames
from htp_export.shapes.operator_kinds import is_standard, subgraphs

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


def is_boundary(value: ir.Value) -> bool:
    """Whether a value is an input or output of a module; the pipeline marks these values."""
    return BOUNDARY in value.meta


def add_constant(graph: ir.Graph, array: Array, name: str, recipe: Recipe = CONSTANT) -> ir.Value:
    """Add an initializer with an array; ``recipe``: how it was computed from parameters, if it was.

    The name becomes unique only among initializers: `separate_names` compares it with others
    after each change.
    """
    return add_initializer(graph, ir.tensor(array), name, recipe)


def add_initializer(
    graph: ir.Graph, tensor: ir.TensorProtocol, name: str, recipe: Recipe
) -> ir.Value:
    """Add an initializer with a tensor; integers without a recipe are constants."""
    if tensor.dtype.is_floating_point() or recipe != CONSTANT:
        tensor = recorded(tensor, recipe)
    shape = ir.Shape(tensor.shape.numpy())
    value = ir.Value(
        name=_unique(graph, name), shape=shape, type=ir.TensorType(tensor.dtype), const_value=tensor
    )
    graph.register_initializer(value)
    return value


def _unique(graph: ir.Graph, name: str) -> str:
    """The name, or the first numbered one that no initializer has."""
    candidate, numbers = name, itertools.count(1)
    while candidate in graph.initializers:
        candidate = f"{name}_{next(numbers)}"
    return candidate


def register_constants(graph: ir.Graph) -> None:
    """Register constants that nodes read as initializers: onnxscript's rules forget some."""
    used: UsedNames | None = None
    for node in graph:
        for value in node.inputs:
            if value is None or value.const_value is None:
                continue
            if value.producer() is not None or value.graph is not None:
                continue
            if used is None:
                used = UsedNames((each.name for each in all_values(graph) if each.name), first=1)
            value.name = used.unused(value.name or "constant")
            graph.register_initializer(value)


def constant_array(value: ir.Value | None, largest: int = 4096) -> Array | None:
    """The elements of a small constant, else None; large constants are not read."""
    if value is None or value.const_value is None or value.is_graph_input():
        return None
    if value.const_value.size > largest:
        return None
    array: Array = value.const_value.numpy()
    return array


def bytes_of(tensor: ir.TensorProtocol | None) -> int:
    """Bytes of the elements of a tensor; for strings, of their characters."""
    if tensor is None:
        return 0
    if isinstance(tensor, ir.StringTensor):
        return sum(map(len, tensor.string_data()))
    return tensor.nbytes


def is_constant(value: ir.Value | None) -> bool:
    """Whether a value is an initializer, and not also an input of the graph."""
    return value is not None and value.const_value is not None and not value.is_graph_input()


def multiple(node: ir.Node | None) -> tuple[ir.Value, Array] | None:
    """The value that a node multiplies by one float, and the float; None if the rank may change.

    Examples:
        >>> x, half = ir.val("x"), ir.Value(name="two", const_value=ir.tensor(2.0))
        >>> value, number = multiple(ir.node("Div", [x, half]))
        >>> value is x, number.item()
        (True, 0.5)
    """
    for place in (1, 0) if is_standard(node, "Mul") else (1,) if is_standard(node, "Div") else ():
        number, value = constant_array(node.inputs[place], 1), node.inputs[1 - place]  # type: ignore[union-attr]
        if number is None or value is None or number.dtype.kind != "f" or number.size != 1:
            continue
        assert node is not None
        tensors = (value, node.outputs[0])
        ranks = [None if tensor.shape is None else len(tensor.shape) for tensor in tensors]
        if number.ndim == 0 or (ranks[0] == ranks[1] is not None):
            factor = number if is_standard(node, "Mul") else _reciprocal(number)
            return None if factor is None else (value, factor.reshape(()))
    return None


def _reciprocal(number: Array) -> Array | None:
    with np.errstate(all="ignore"):
        return _normal(np.divide(1, number, dtype=number.dtype), np.zeros(1, bool))


def times(one: Array, other: Array) -> Array | None:
    """The product of two factors; None if an element overflows or underflows.

    Two multiplications, one after the other, might not.
    """
    with np.errstate(all="ignore"):
        return _normal(np.multiply(one, other, dtype=other.dtype), (one == 0) | (other == 0))


def _normal(result: Array, zeros: Array) -> Array | None:
    """The result if its elements are normal numbers, or expected ``zeros``; else None."""
    normal = np.isfinite(result) & (np.abs(result) >= np.finfo(result.dtype).tiny)
    return np.asarray(result) if (normal | (zeros & (result == 0))).all() else None


def scaled(value: ir.Value | None) -> tuple[ir.Value, Array] | None:
    """The factors of a product with one number, if it has one consumer and is no boundary."""
    if value is None or only_consumer(value) is None or is_boundary(value):
        return None
    return multiple(value.producer())


def replace_with(old: ir.Value, new: ir.Value) -> bool:
    """Replace a value by an equal one everywhere; return False if that is impossible.

    An output of the graph keeps its name: the new value is renamed, unless its own name is fixed.
    """
    if old.is_graph_output():
        fixed = new.is_graph_output() or new.is_graph_input() or new.is_initializer()
        if fixed or new.producer() is None or new.graph is not old.graph:
            return False
        replace_uses(old, new)
    else:
        old.replace_all_uses_with(new)
        new.type, new.shape = new.type or old.type, old.shape if new.shape is None else new.shape
    record_replacement(old, new)
    _keep_boundary(old, new)
    return True


def _keep_boundary(old: ir.Value, new: ir.Value) -> None:
    """Mark a value that replaces an input or output of a module: it is one, too."""
    if is_boundary(old):
        new.meta[BOUNDARY] = True


def replace_uses(
    old: ir.Value,
    new: ir.Value,
    readers: Iterable[tuple[ir.Node, int]] | None = None,
    rest: str | None = None,
) -> None:
    """Replace a value by another one, which gets its name, consumers and place as an output.

    It also gets missing type and shape.

    Args:
        old: The replaced value.
        new: The value.
        readers: The only consumers that read ``new``, each with the position of an input; None for
            all.
        rest: The name of ``old`` afterwards.
    """
    record_replacement(old, new)
    name, chosen = old.name, list(old.uses() if readers is None else readers)
    if old.is_graph_output() and old.graph is not None:
        outputs = old.graph.outputs
        for at in [at for at, value in enumerate(outputs) if value is old]:
            outputs[at] = new
    for reader, at in chosen:
        reader.replace_input_with(at, new)
    new.type, new.shape = new.type or old.type, old.shape if new.shape is None else new.shape
    old.name, new.name = rest, name


def insert_behind(graph: ir.Graph, value: ir.Value, node: ir.Node) -> None:
    """Insert a node directly after the producer of a value, or at the beginning of the graph."""
    if (producer := value.producer()) is not None:
        graph.insert_after(producer, node)
    elif len(graph):
        graph.insert_before(graph[0], node)
    else:
        graph.append(node)


def replace(old: ir.Node, new: Sequence[ir.Node]) -> None:
    """Replace a node with one output by new nodes, the last of which computes this output.

    Examples:
        >>> x = ir.val("x", ir.DataType.FLOAT, [2])
        >>> square = ir.node("Mul", [x, x], outputs=[ir.val("y")])
        >>> graph = ir.Graph([x], square.outputs, nodes=[square], opset_imports={"": 20})
        >>> replace(square, [ir.node("Pow", [x, x])])
        >>> [(node.op_type, node.outputs[0].name) for node in graph]
        [('Pow', 'y')]
    """
    graph = old.graph
    assert graph is not None
    result = new[-1].outputs[0]
    for place, node in enumerate(new, 1 - len(new)):
        node.name = old.name if place == 0 else f"{old.name}_{node.op_type}{-place}"
    _keep_boundary(old.outputs[0], result)
    record_replacement(old.outputs[0], result)
    ir.convenience.replace_nodes_and_values(
        graph, old, [old], list(new), [old.outputs[0]], [result]
    )


def release(node: ir.Node) -> None:
    """Disconnect the subgraphs of a node before its removal: else they count as consumers."""
    for body in subgraphs(node):
        for inner in body.all_nodes():
            for place in range(len(inner.inputs)):
                inner.replace_input_with(place, None)


def remove_unused(model: ir.Model) -> None:
    """Remove nodes whose outputs have no consumer."""
    RemoveUnusedNodesPass()(model)


_FIRST = 18
"""Before it, axes are attributes or inputs, by version; torch's dynamo exports begin with it."""

_IR_VERSION = 10
"""The first one with the integers of 4 bits."""

_OTHER_MEANING = {"DFT": 20, "GridSample": 20, "GroupNormalization": 21}
"""Operator → the opset in which the meaning of its inputs or attributes changes.

Others only accept more types or attributes (https://github.com/onnx/onnx/blob/main/docs/Changelog.md).
"""


def raised(tagged: TaggedModel, opset: int) -> TaggedModel:
    """Convert a model to an opset; return the same model if it is later, or cannot be converted.

    Raises:
        InputError: If the meaning of an operator of the model changes in that opset.
    """
    before = tagged.model.graph.opset_imports.get("", 1)
    if not _FIRST <= before < opset:
        return tagged
    copy = tagged.clone()
    for node in copy.model.graph.all_nodes():
        if not node.domain and before < _OTHER_MEANING.get(node.op_type, 0) <= opset:
            raise InputError(
                f"{node.op_type} {node.name!r} means something else from opset {opset} on, and the model has {before}: "
                f"export it with opset_version={opset}"
            )
        if not node.domain and node.version is not None:
            node.version = opset
    copy.model.graph.opset_imports[""] = opset
    copy.model.ir_version = max(copy.model.ir_version, _IR_VERSION)
    return copy
