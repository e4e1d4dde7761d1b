"""Outputs and optional inputs that are added to a graph; what was there stays as it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from htp_export.editing.edit import ROOT, Edit
from htp_export.editing.editing import add_initializer
from htp_export.errors import InputError
from htp_export.format.recipes import CONSTANT
from htp_export.model.regions import GraphIndex
from htp_export.shapes.operator_kinds import CONTROL_FLOW, subgraphs


def add_output(edit: Edit, value: ir.Value, name: str, like: ir.Value) -> ir.Value:
    """Add an output that has the elements of a value, which keeps its own name: an ``Identity`` between them.

    Its type and shape are those of ``like``; its node belongs to no module.
    """
    result = ir.Value(name=name, type=like.type, shape=like.shape)
    edit.graph.append(edit.node("Identity", [value], ROOT, name, outputs=[result]))
    edit.graph.outputs.append(result)
    return result


def add_zeros_input(
    graph: ir.Graph, name: str, dtype: ir.DataType, shape: Sequence[int]
) -> ir.Value:
    """Add an input that is zero where a run does not give it: an initializer of the same name (IR version 4 and up)."""
    value = add_initializer(
        graph, ir.Tensor(np.zeros(shape, dtype.numpy()), dtype=dtype, name=name), name, CONSTANT
    )
    graph.inputs.append(value)
    return value


@contextlib.contextmanager
def without_defaults(graph: ir.Graph) -> Iterator[Callable[[ir.Graph], None]]:
    """Let optional inputs be plain inputs for a time, because onnxscript's passes take their defaults for constants.

    Gives what puts the defaults into a graph that a pass returns in place of this one.
    """
    defaults = {value.name: value.const_value for value in graph.inputs if value.is_initializer()}

    def put_back(graph: ir.Graph) -> None:
        for value in graph.inputs:
            if value.name in defaults:
                value.const_value = defaults[value.name]
                graph.register_initializer(value)

    for value in graph.inputs:
        if value.name in defaults:
            graph.initializers.pop(str(value.name))
            value.const_value = None
    try:
        yield put_back
    finally:
        put_back(graph)


def lift(edit: Edit, values: Sequence[ir.Value], name: str) -> tuple[ir.Value, list[str]]:
    """Return a value out of branches and loop bodies: each becomes an output of its body, and of the node around it.

    The other branch of an ``If`` gives an empty tensor. A ``Loop`` or ``Scan`` gives what each of
    its iterations had, one after the other in a new first dimension.

    Args:
        edit: The edit of the model; new nodes belong to no module.
        values: One value, or one in each of several bodies, of which only one runs.
        name: The beginning of the names of new tensors.

    Returns:
        The value in the main graph, and the names of all new tensors; an InputError, with the
        reason, if it cannot be.
    """
    index, names = edit.tagged.index, edit.names
    by_graph = {value.graph: value for value in values}
    made: list[str] = []

    def new(
        op: str,
        inputs: Sequence[ir.Value],
        graph: ir.Graph,
        like: ir.Value,
        **facts: ir.TensorProtocol,
    ) -> ir.Value:
        shape = ir.Shape(facts["value"].shape.numpy()) if facts else like.shape
        result = ir.Value(name=names.tensors.unused(f"{name}.body"), type=like.type, shape=shape)
        made.append(str(result.name))
        graph.append(edit.node(op, inputs, ROOT, str(result.name), facts, outputs=[result]))
        return result

    while inner := [graph for graph in by_graph if graph is not index.model.graph]:
        depths = {graph: _depth(index, graph) for graph in inner}
        deepest = max(inner, key=depths.__getitem__)
        holder = next(iter(index.holders(deepest)), None)
        if holder is None or holder.op_type not in CONTROL_FLOW or deepest not in subgraphs(holder):
            raise InputError(
                "it lies in a function, whose results cannot be extended; use inline(...) before"
            )
        bodies, value = subgraphs(holder), by_graph[deepest]
        shape = None if value.shape is None else ir.Shape([None] * len(value.shape))
        if value.dtype is None or value.shape is None:
            raise InputError(
                f"the file does not say the type and rank of {value.name!r} in its body"
            )
        for body in bodies:
            own = by_graph.pop(body, None)
            if own is None:
                own = new("Constant", [], body, value, value=_empty(value))
            elif (
                own.dtype != value.dtype or own.shape is None or len(own.shape) != len(value.shape)
            ):
                raise InputError(
                    f"the branches give tensors of different types: {own.name!r} and {value.name!r}"
                )
            body.outputs.append(own if own.name in made else new("Identity", [own], body, own))
        _resize_outputs(holder, 1)
        outer = holder.outputs[-1]
        outer.name, outer.type = names.tensors.unused(f"{name}.body"), value.type
        outer.shape = shape if holder.op_type == "If" else ir.Shape([None, *value.shape])
        made.append(str(outer.name))
        if (graph := holder.graph) in by_graph or not isinstance(graph, ir.Graph):
            raise InputError(
                "it runs in a branch and outside of it in the same call; name one call of it"
            )
        by_graph[graph] = outer
    if len(by_graph) != 1:
        raise InputError("its parts lie in several bodies; name one call of it")
    return next(iter(by_graph.values())), made


def _resize_outputs(node: ir.Node, more: int) -> None:
    """Give a node one output more or less at its end; a ``Scan`` may say of each the axis and the direction."""
    node.resize_outputs(len(node.outputs) + more)
    for name in ("scan_output_axes", "scan_output_directions"):
        if name in node.attributes:
            listed = node.attributes[name].as_ints()
            node.attributes[name] = ir.AttrInt64s(name, [*listed, 0] if more > 0 else listed[:-1])


def _depth(index: GraphIndex, graph: ir.Graph | None) -> int:
    depth = 0
    while graph is not None and (holders := index.holders(graph)):
        found = holders[0].graph
        graph, depth = found if isinstance(found, ir.Graph) else None, depth + 1
    return depth


def _empty(value: ir.Value) -> ir.TensorProtocol:
    if value.shape is None or value.dtype is None or not len(value.shape):
        raise InputError(
            f"{value.name!r} is one number: the branch without it could give none in its place, as every tensor has one"
        )
    sizes = [
        0 if place == 0 or not isinstance(size, int) else size
        for place, size in enumerate(value.shape)
    ]
    return ir.Tensor(np.zeros(sizes, value.dtype.numpy()), dtype=value.dtype)


def remove_outputs(model: ir.Model, names: Sequence[str], made: Sequence[str]) -> None:
    """Remove outputs of the graph, and what only they needed: tensors whose names are among ``made``."""
    gone, ours = set(names), {*made, *names}
    graph = model.graph
    for place in reversed(
        [place for place, value in enumerate(graph.outputs) if value.name in gone]
    ):
        graph.outputs.pop(place)  # ``del`` would not tell the value
    for node in reversed(list(graph)):
        if node.op_type not in CONTROL_FLOW and not _is_needed(node, ours):
            graph.remove(node, safe=True)
    for node in list(graph.all_nodes()):  # a node before those in its bodies
        if node.op_type in CONTROL_FLOW:
            _shrink(node, ours)


def _is_needed(node: ir.Node, ours: set[str]) -> bool:
    return any(
        value.name not in ours or value.uses() or value.is_graph_output() for value in node.outputs
    )


def _shrink(node: ir.Node, ours: set[str]) -> None:
    """Remove the last outputs of a node, and of its bodies, that are among ``ours`` and that nothing reads."""
    while (
        (last := node.outputs[-1]).name in ours and not last.uses() and not last.is_graph_output()
    ):
        for body in subgraphs(node):
            producer = body.outputs.pop().producer()
            if (
                producer is not None
                and producer.op_type not in CONTROL_FLOW
                and not _is_needed(producer, ours)
            ):
                body.remove(producer, safe=True)
        _resize_outputs(node, -1)
