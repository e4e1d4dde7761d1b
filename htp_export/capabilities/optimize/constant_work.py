"""Nodes that depend on no input of the model, in connected groups, and their results.

ONNX Runtime computes one group after another, so that the large weights of one group only are in memory. A few bytes of
a file can ask for any number of values: a node is computed once its result is known to be small enough, or once nothing
is left from which its size could become known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from htp_export.capabilities.optimize.declining import decline
from htp_export.editing.editing import Array, bytes_of, is_constant
from htp_export.model.neighbours import connected
from htp_export.runtime.sessions import RunnableModel, Session, as_written
from htp_export.shapes.operator_kinds import RANDOM, subgraphs, with_subgraphs
from htp_export.shapes.sizes import product
from htp_export.shapes.symbolic import Symbolic

LEAST_ROOM = 1 << 20
"""Bytes by which the constants of any model may grow."""

SHARE = 16
"""A model with large weights may grow by this part of them: one sixteenth."""

GROWTH = "htp_export.growth"
"""Key in an initializer's ``meta``: by how many bytes it made the model grow."""

_LARGE = 1 << 16
"""Bytes; larger constants are given to ONNX Runtime as inputs, which does not copy them."""

_LONGEST = 5.0
"""Seconds that loops and branches may take; the time of other operators is bounded by the size of their results."""

_UNPACKING = frozenset(("DequantizeLinear",))
"""These unpack quantized weights; if they were folded, the model would no longer be quantized."""


def room_left(model: ir.Model) -> int:
    """Bytes by which the constants of a model may still grow."""
    weights, grown = 0, 0
    for graph in model.graphs():
        for value in graph.initializers.values():
            weights += bytes_of(value.const_value)
            grown += value.meta.get(GROWTH, 0)
    return int(max(LEAST_ROOM, (weights - grown) // SHARE) - grown)


def _reads(node: ir.Node) -> Collection[ir.Value]:
    """The inputs of a node, and the values that its subgraphs capture."""
    inside = list(with_subgraphs(node))
    bodies = dict.fromkeys(body for holder in inside for body in subgraphs(holder))
    read = (
        *(value for inner in inside for value in inner.inputs),
        *(value for body in bodies for value in body.outputs),
    )
    return dict.fromkeys(value for value in read if value is not None and value.graph not in bodies)


def _held_back(node: ir.Node) -> bool:
    """Whether a node is not folded although all its inputs are constant."""
    operators = {inner.op_type for inner in with_subgraphs(node)}
    if operators & _UNPACKING:
        decline("unfolded_constants", [node], "it unpacks quantized weights")
        return True
    return any(operator in RANDOM or operator.endswith("Dropout") for operator in operators)


class ConstantNodes:
    """Connected nodes that compute the same in every run; ``results`` are read elsewhere, ``constants`` here."""

    def __init__(self, nodes: Sequence[ir.Node]) -> None:
        self.nodes = nodes
        self._inside = {inner for node in nodes for inner in with_subgraphs(node)}
        made = {value: None for node in nodes for value in node.outputs}
        self.results = [
            value
            for value in made
            if not value.is_graph_output()
            and (value.type is None or isinstance(value.type, ir.TensorType))
            and any(use.node not in self._inside for use in value.uses())
        ]
        self.constants = list(dict.fromkeys(value for node in nodes for value in _reads(node) if value not in made))

    @property
    def freed(self) -> int:
        """Bytes of constants without other consumers."""
        alone = (value for value in self.constants if all(use.node in self._inside for use in value.uses()))
        return sum(bytes_of(value.const_value) for value in alone if not value.is_graph_output())


def find_constant_nodes(
    graph: ir.Graph, room: int, left_out: Collection[ir.Node] = (), opsets: Mapping[str, int] | None = None
) -> list[ConstantNodes]:
    """The nodes of one graph that can be folded, without those that are left out.

    The graph is in topological order; values that it captures may be constants, too. ``room`` is how many bytes a
    result may have in addition to those of the constants from which it is computed.
    """
    known: Symbolic | None = None
    sources: dict[ir.Value, frozenset[ir.Value]] = {}
    constant_nodes: list[ir.Node] = []
    for node in graph:
        read = _reads(node)
        if not all(value in sources or is_constant(value) for value in read) or node in left_out or _held_back(node):
            continue
        known = known or Symbolic(graph, opsets)
        taken = frozenset[ir.Value]().union(*(sources.get(value, (value,)) for value in read))
        most = room + sum(bytes_of(value.const_value) for value in taken)
        sizes = [_size(value, known) for value in node.outputs if value.name]
        if None in sizes and not all(is_constant(value) or _is_sequence(value) for value in read):
            continue  # once the tensors that it reads have been computed, its size may be known
        if all(size is None or size <= most for size in sizes):
            sources.update(dict.fromkeys(node.outputs, taken))
            constant_nodes.append(node)
        else:
            folded = {node, *constant_nodes}
            alone = (value for value in taken if all(use.node in folded for use in value.uses()))
            grown = sum(filter(None, sizes)) - sum(bytes_of(value.const_value) for value in alone)
            decline("unfolded_constants", [node], f"the result is large: {grown:,} bytes more")
    works = (ConstantNodes(nodes) for nodes in connected(constant_nodes, reads=_reads))
    return [work for work in works if work.results]


def _is_sequence(value: ir.Value) -> bool:
    """Whether a value is a sequence or an optional value, which cannot be stored as an initializer."""
    if value.type is not None:
        return not isinstance(value.type, ir.TensorType)
    node = value.producer()
    if node is None or not onnx.defs.has(node.op_type, node.domain):
        return False
    formals = onnx.defs.get_schema(node.op_type, node.domain).outputs
    return not any(kind.startswith("tensor") for kind in formals[min(value.index() or 0, len(formals) - 1)].types)


def _size(value: ir.Value, known: Symbolic) -> int | None:
    """Bytes of a tensor; None if they are not known, for example if a size depends on floating-point numbers."""
    shape, dtype = known.shape(value), known.dtype(value)
    elements = product(shape) if shape is not None else None
    if not isinstance(elements, int) or dtype == ir.DataType.STRING:
        return None
    return int(elements * (dtype.itemsize if dtype is not None else 8))


def computed(
    model: ir.Model, works: Sequence[ConstantNodes]
) -> Iterator[tuple[ConstantNodes, Mapping[ir.Value, ir.TensorProtocol], ir.Node | None]]:
    """Each group with its results, and its first node that ONNX Runtime cannot run, if there is one.

    Groups without large weights are computed in one run, and each other one by itself.
    """
    large = {work for work in works if any(bytes_of(value.const_value) > _LARGE for value in work.constants)}
    yield from _computed(model, [work for work in works if work not in large])
    for work in works:
        if work in large:
            yield from _computed(model, [work])


def _computed(
    model: ir.Model, works: Sequence[ConstantNodes]
) -> Iterator[tuple[ConstantNodes, Mapping[ir.Value, ir.TensorProtocol], ir.Node | None]]:
    nodes, wanted = [node for work in works for node in work.nodes], [value for work in works for value in work.results]
    try:
        tensors = _run(model, nodes, wanted) if works else {}
    except Exception:  # ONNX Runtime's errors share no base but this
        if len(works) == 1:
            yield works[0], {}, _first_fault(model, nodes)
        else:
            for work in works:
                yield from _computed(model, [work])
        return
    for work in works:
        yield work, {value: tensors[value] for value in work.results if value in tensors}, None


def _first_fault(model: ir.Model, nodes: Sequence[ir.Node]) -> ir.Node:
    """The first of connected nodes that does not run; one with a subgraph, which may not end, is not tried again."""
    if loop := next(filter(subgraphs, nodes), None):
        return loop
    low, high = 0, len(nodes) - 1
    while low < high:
        middle = (low + high) // 2
        try:
            _run(model, nodes[: middle + 1], [value for value in nodes[middle].outputs if value.name][:1])
            low = middle + 1
        except Exception:
            high = middle
    return nodes[low]


def _tensor(array: Array) -> ir.TensorProtocol:
    if array.dtype.kind in "OSU":
        return ir.StringTensor([str(text).encode() for text in array.reshape(-1)], shape=ir.Shape(array.shape))
    return ir.tensor(array)


def _run(model: ir.Model, nodes: Sequence[ir.Node], wanted: Sequence[ir.Value]) -> dict[ir.Value, ir.TensorProtocol]:
    """Run nodes without inputs in ONNX Runtime without its own optimisations; tensors only."""
    graph = onnx.GraphProto(name="constants")
    feeds: dict[str, Array] = {}
    for value in ConstantNodes(nodes).constants:
        name, tensor = str(value.name), value.const_value
        assert tensor is not None
        array = tensor.numpy()
        if tensor.nbytes > _LARGE and array.dtype.isbuiltin == 1 and array.dtype.kind in "biuf":
            feeds[name] = array
            graph.input.append(onnx.helper.make_tensor_value_info(name, int(tensor.dtype), array.shape))
        else:
            in_memory = tensor if isinstance(tensor, ir.StringTensor) else ir.Tensor(array, dtype=tensor.dtype)
            graph.initializer.append(ir.to_proto(in_memory))
            graph.initializer[-1].name = name
    graph.node.extend(ir.to_proto(node) for node in nodes)
    graph.output.extend(onnx.ValueInfoProto(name=str(value.name)) for value in wanted)
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    proto = onnx.helper.make_model(graph, opset_imports=imports, ir_version=model.ir_version)
    session = Session(RunnableModel(proto.SerializeToString(), "constants"), changes=as_written(threads=1))
    longest = _LONGEST if any(map(subgraphs, nodes)) else None  # nothing else bounds a loop
    results = session.run(feeds, [str(value.name) for value in wanted], longest=longest)
    arrays = ((value, results[str(value.name)]) for value in wanted)
    return {value: _tensor(array) for value, array in arrays if isinstance(array, np.ndarray)}
