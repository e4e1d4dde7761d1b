"""Outputs and optional inputs that are added to a graph; existing ones do not change."""

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
    """Add an output with the elements of a value, which keeps its own name, by an ``Identity``.

    It has the type and shape of ``like``. The node belongs to no module.
    """
    result = ir.Value(name=name, type=like.type, shape=like.shape)
    edit.graph.append(edit.node("Identity", [value], ROOT, name, outputs=[result]))
    edit.graph.outputs.append(result)
    return result


def add_zeros_input(
    graph: ir.Graph, name: str, dtype: ir.DataType, shape: Sequence[int]
) -> ir.Value:
    """Add an input that is zero by default: an initializer of its name (IR version 4 and later)."""
    value = add_initializer(
        graph, ir.Tensor(np.zeros(shape, dtype.numpy()), dtype=dtype, name=name), name, CONSTANT
    )
    graph.inputs.append(value)
    return value


@contextlib.contextmanager
def without_defaults(graph: ir.Graph) -> Iterator[Callable[[ir.Graph], None]]:
    """Temporarily make optional inputs required: onnxscript's passes treat defaults as constants.

    Yields a function that restores the defaults in a graph that a pass returns instead of this one.
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
    """Return a value out of branches and loop bodies, as an output of each body and of its node.

    The other branch of an ``If`` returns an empty tensor. A ``Loop`` or ``Scan`` returns the values
    of all iterations along a new first dimension.

    Args:
        edit: The edit of the model; new nodes belong to no module.
        values: One value, or one in each of several bodies, of which only one runs.
        name: The prefix of the names of new tensors.

    Returns:
        The value in the main graph, and the names of all new tensors.

    Raises:
        InputError: If that is impossible; the message has the reason.
    """
    lifting = _Lifting(edit, name)
    by_graph = {value.graph: value for value in values}
    index = edit.tagged.index
    while inner := [graph for graph in by_graph if graph is not index.model.graph]:
        depths = {graph: _depth(index, graph) for graph in inner}
        lifting.lift_out_of(max(inner, key=depths.__getitem__), by_graph)
    if len(by_graph) != 1:
        raise InputError("its parts lie in several bodies; name one call of it")
    return next(iter(by_graph.values())), lifting.made


class _Lifting:
    """Lifts values out of one body after the other.

    Attributes:
        made: The names of all new tensors.
    """

    def __init__(self, edit: Edit, name: str) -> None:
        self._edit, self._name = edit, name
        self.made: list[str] = []

    def lift_out_of(
        self, deepest: ir.Graph | None, by_graph: dict[ir.Graph | None, ir.Value]
    ) -> None:
        """Replace the values of a body, and of the other bodies of its node, by one around them.

        ``by_graph``: Graph → its value; updated.
        """
        holder = next(iter(self._edit.tagged.index.holders(deepest)), None)
        if holder is None or holder.op_type not in CONTROL_FLOW or deepest not in subgraphs(holder):
            raise InputError(
                "it lies in a function, whose results cannot be extended; use inline(...) before"
            )
        value = by_graph[deepest]
        if value.dtype is None or value.shape is None:
            raise InputError(
                f"the file does not say the type and rank of {value.name!r} in its body"
            )
        for body in subgraphs(holder):
            own = by_graph.pop(body, None)
            if own is None:
                own = self._new("Constant", [], body, value, value=_empty(value))
            elif not _is_of_type(own, value):
                raise InputError(
                    f"the branches give tensors of different types: {own.name!r} and {value.name!r}"
                )
            is_new = own.name in self.made
            body.outputs.append(own if is_new else self._new("Identity", [own], body, own))
        _resize_outputs(holder, 1)
        outer = holder.outputs[-1]
        outer.name, outer.type = self._unused_name(), value.type
        if holder.op_type == "If":
            outer.shape = ir.Shape([None] * len(value.shape))
        else:
            outer.shape = ir.Shape([None, *value.shape])
        self.made.append(str(outer.name))
        graph = holder.graph
        if graph in by_graph or not isinstance(graph, ir.Graph):
            raise InputError(
                "it runs in a branch and outside of it in the same call; name one call of it"
            )
        by_graph[graph] = outer

    def _new(
        self,
        op: str,
        inputs: Sequence[ir.Value],
        graph: ir.Graph,
        like: ir.Value,
        **attributes: ir.TensorProtocol,
    ) -> ir.Value:
        """The output of a new node at the end of a body; its type is that of ``like``."""
        shape = ir.Shape(attributes["value"].shape.numpy()) if attributes else like.shape
        result = ir.Value(name=self._unused_name(), type=like.type, shape=shape)
        self.made.append(str(result.name))
        graph.append(
            self._edit.node(op, inputs, ROOT, str(result.name), attributes, outputs=[result])
        )
        return result

    def _unused_name(self) -> str:
        return self._edit.names.tensors.unused(f"{self._name}.body")


def _is_of_type(value: ir.Value, other: ir.Value) -> bool:
    """Whether two values have the same element type and rank, as far as these are known."""
    if value.shape is None or other.shape is None:
        return False
    return value.dtype == other.dtype and len(value.shape) == len(other.shape)


def _resize_outputs(node: ir.Node, more: int) -> None:
    """Add or remove the last output of a node; a ``Scan`` may have axis and direction of each."""
    node.resize_outputs(len(node.outputs) + more)
    for name in ("scan_output_axes", "scan_output_directions"):
        if name in node.attributes:
            listed = node.attributes[name].as_ints()
            node.attributes[name] = ir.AttrInt64s(name, [*listed, 0] if more > 0 else listed[:-1])


def _depth(index: GraphIndex, graph: ir.Graph | None) -> int:
    """The number of nodes that hold a graph, one inside the other."""
    depth = 0
    while graph is not None:
        holders = index.holders(graph)
        if not holders:
            break
        outer = holders[0].graph
        graph = outer if isinstance(outer, ir.Graph) else None
        depth += 1
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
    """Remove outputs of the graph, and the nodes that only they needed.

    ``made``: The names of the tensors that may be removed.
    """
    removed, ours = set(names), {*made, *names}
    graph = model.graph
    places = [place for place, value in enumerate(graph.outputs) if value.name in removed]
    for place in reversed(places):
        graph.outputs.pop(place)  # ``del`` would leave the value marked as an output
    for node in reversed(list(graph)):
        if node.op_type not in CONTROL_FLOW and not _is_needed(node, ours):
            graph.remove(node, safe=True)
    for node in list(graph.all_nodes()):  # a node before those in its bodies
        if node.op_type in CONTROL_FLOW:
            _shrink(node, ours)


def _is_needed(node: ir.Node, ours: set[str]) -> bool:
    """Whether an output of a node is consumed, returned, or not among ``ours``."""
    return any(
        value.name not in ours or value.uses() or value.is_graph_output() for value in node.outputs
    )


def _shrink(node: ir.Node, ours: set[str]) -> None:
    """Remove the last outputs of a node and of its bodies that are among ``ours`` and unused."""
    while True:
        last = node.outputs[-1]
        if last.name not in ours or last.uses() or last.is_graph_output():
            return
        for body in subgraphs(node):
            producer = body.outputs.pop().producer()
            if producer is None or producer.op_type in CONTROL_FLOW:
                continue
            if not _is_needed(producer, ours):
                body.remove(producer, safe=True)
        _resize_outputs(node, -1)
