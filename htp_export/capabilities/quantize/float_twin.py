"""The float model of a quantized file: without the nodes that `quantize` inserted for measured ranges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.quantize.calibration_records import calibration_number, floats_of
from htp_export.editing.editing import add_initializer, replace_uses
from htp_export.editing.submodels import constant_of, remove_unused
from htp_export.errors import InputError
from htp_export.format.recipes import (
    CONSTANT,
    Recipe,
    parameters_in,
    recipe_in_words,
    step,
    why_not_exact,
)
from htp_export.model.recipes import recipe_of
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import dequantizes, quantizes, without_copies
from htp_export.weights.rebuilding import remade
from htp_export.weights.rounding import dequantized


def is_inserted(node: ir.Node | None) -> bool:
    """Whether `quantize` inserted a node: a QuantizeLinear or DequantizeLinear with a record."""
    if node is None or not (quantizes(node) or dequantizes(node)):
        return False
    return calibration_number(node) is not None


def float_twin(flat: TaggedModel, entries: Mapping[str, Any]) -> TaggedModel:
    """Return a copy of a model with floats in place of integers: activations as they are, weights of ``entries``.

    A tensor keeps its name, or gets that of the output of the model that is now computed from it.

    Raises:
        InputError: The floats of a constant or of a weight are not known, or a tool changed the
            inserted nodes.
    """
    twin = flat.clone()
    graph = twin.model.graph
    inserted = [node for node in graph if is_inserted(node)]
    for node in inserted:
        if not dequantizes(node):
            continue
        source = node.inputs[0]
        assert source is not None
        producer = source.producer()
        if is_inserted(producer) and quantizes(producer):
            assert producer is not None
            assert producer.inputs[0] is not None
            _bypass(graph, node, producer.inputs[0])
            continue
        tensor, recipe = _floats(node, entries)
        name = recipe if isinstance(recipe, str) else f"{source.name}_floats"
        weight = add_initializer(graph, tensor, name, recipe)
        node.outputs[0].replace_all_uses_with(weight)
    remove_unused([node.outputs[0] for node in inserted])
    for node in inserted:
        if node.graph is not None:
            raise InputError(
                f"{node.op_type} {node.name!r} is used in a way that a tool introduced"
            )
    return twin.refresh()


def name_in_twin(node: ir.Node) -> str:
    """Return the name in the float model of the tensor that a QuantizeLinear of the file rounds."""
    tensor = node.inputs[0]
    assert tensor is not None
    if tensor.is_graph_output() or tensor.is_graph_input():
        return str(tensor.name)
    for result in dequantized_from(node):
        if result.is_graph_output():
            return str(result.name)
    return str(tensor.name)


def dequantized_from(node: ir.Node) -> list[ir.Value]:
    """Return the results of the DequantizeLinear nodes that read a QuantizeLinear."""
    return [use.node.outputs[0] for use in node.outputs[0].uses() if dequantizes(use.node)]


def _bypass(graph: ir.Graph, node: ir.Node, tensor: ir.Value) -> None:
    """Replace the result of a DequantizeLinear by the tensor before it was rounded."""
    result = node.outputs[0]
    if not result.is_graph_output():
        result.replace_all_uses_with(tensor)
    elif tensor.is_graph_output() or tensor.is_graph_input():
        copy = ir.node("Identity", [tensor])
        graph.insert_after(node, copy)
        replace_uses(result, copy.outputs[0])
    else:
        replace_uses(result, tensor)


def _floats(node: ir.Node, entries: Mapping[str, Any]) -> tuple[ir.TensorProtocol, Recipe]:
    """Return the floats of a stored tensor before a DequantizeLinear, and their recipe."""
    source = node.inputs[0]
    levels = constant_of(source)
    if source is None or levels is None:
        raise InputError(f"{node.name!r} dequantizes a tensor whose floats are not in the file")
    recipe = recipe_of(without_copies(source))
    if recipe == CONSTANT:
        return ir.Tensor(_floats_of_constant(node, levels)), CONSTANT
    operand = _operand(recipe)
    if operand is None:
        raise InputError(f"the floats of {source.name!r} are not known: {recipe_in_words(recipe)}")
    absent = [name for name in parameters_in(operand) if name not in entries]
    if absent:
        raise InputError(f"{source.name!r} depends on {absent[0]!r}, which is not bound")
    # only the shape and the type of this tensor are used
    shape = tuple(levels.shape.numpy())
    like = ir.Tensor(np.broadcast_to(np.zeros((), np.float32), shape), name=source.name)
    return remade(like, operand, entries), operand


def _operand(recipe: Recipe) -> Recipe | None:
    """Return the recipe of the floats of rounded integers; None if it is not known."""
    if not isinstance(recipe, list) or why_not_exact(recipe):
        return None
    if recipe[0] in ("round", "round_bias") and recipe[-1][0] == "levels":
        found: Recipe = recipe[1]
        return found
    inner = _operand(recipe[1]) if recipe[0] == "reshape" else None
    return None if inner is None else step("reshape", inner, recipe[-1])


def _floats_of_constant(node: ir.Node, levels: ir.TensorProtocol) -> Array:
    scales, points = (constant_of(value) for value in (*node.inputs, None)[1:3])
    if scales is None:
        raise InputError(f"{node.name!r} has a computed scale")
    integers = np.asarray(levels.numpy())
    zeros = np.zeros((), integers.dtype) if points is None else np.asarray(points.numpy())
    axis = node.attributes.get_int("axis", 1)
    floats = floats_of(levels, dequantized(integers, np.asarray(scales.numpy()), zeros, axis))
    if floats is None:
        raise InputError(f"the floats of the constant {levels.name!r} are not in the file")
    return floats
