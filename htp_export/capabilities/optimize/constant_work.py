"""Nodes that depend on no input of the model, in connected groups, and their results.

ONNX Runtime computes one group after another, so that the large weights of one group only are in memory. A few bytes of
a file can ask for any number of values: a node is computed once its result is known to be small enough, or once nothing
is left from which its size could become known.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx
import onnx_ir as ir

from htp_export.capabilities.optimize.declining import decline
from htp_export.editing.editing import Array, bytes_of, is_constant
from htp_export.model.groups import connected
from htp_export.model.regions import subgraphs
from htp_export.runtime.sessions import RunnableModel, Session, as_written
from htp_export.shapes.operator_kinds import RANDOM
from htp_export.shapes.sizes import product
from htp_export.shapes.symbolic import Symbolic

__all__ = ["GROWTH", "LEAST_ROOM", "SHARE", "ConstantNodes", "computed", "find_constant_nodes", "room_left"]

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


def _reads(node: ir.Node) -> Iterator[ir.Value]:
    """The inputs of a node, and the values that its subgraphs capture."""
    yield from (value for value in node.inputs if value is not None)
    bodies = dict.fromkeys(subgraphs(node))
    for body in list(bodies):
        bodies.update(dict.fromkeys(deeper for inner in body.all_nodes() for deeper in subgraphs(inner)))
    for body in bodies:
        for value in (*body.outputs, *(value for inner in body for value in inner.inputs)):
            if value is not None and value.graph not in bodies:
                yield value


def _held_back(node: ir.Node) -> bool:
    """Whether a node is not folded although all its inputs are constant."""
    nodes = (node, *(inner for body in subgraphs(node) for inner in body.all_nodes()))
    if any(candidate.op_type in _UNPACKING for candidate in nodes):
        decline("unfolded_constants", [node], "it unpacks quantized weights")
        return True
    return any(candidate.op_type in RANDOM or candidate.op_type.endswith("Dropout") for candidate in nodes)


@dataclass(frozen=True)
class ConstantNodes:
    """Connected nodes that compute the same in every run.

    Attributes:
        nodes: The nodes, in order.
        results: Their outputs that other nodes read.
        constants: The constants that they read.
    """

    nodes: tuple[ir.Node, ...]
    results: tuple[ir.Value, ...]
    constants: tuple[ir.Value, ...]

    @cached_property
    def freed(self) -> int:
        """Bytes of constants without other consumers."""
        inside = {
            *self.nodes,
            *(inner for node in self.nodes for body in subgraphs(node) for inner in body.all_nodes()),
        }
        alone = (value for value in self.constants if all(use.node in inside for use in value.uses()))
        return sum(bytes_of(value.const_value) for value in alone if not value.is_graph_output())


def find_constant_nodes(
    graph: ir.Graph, room: int, left_out: Collection[ir.Node] = (), opsets: Mapping[str, int] | None = None
) -> list[ConstantNodes]:
    """The nodes of one graph that can be folded.

    Args:
        graph: The graph, in topological order; values that it captures may be constants, too.
        room: Bytes that a result may have in addition to those of the constants from which it is computed.
        left_out: Nodes that are not folded.
        opsets: Domain → version, for graphs that do not say it.
    """
    known: Symbolic | None = None
    sources: dict[ir.Value, frozenset[ir.Value]] = {}
    constant_nodes = []
    for node in graph:
        read = list(_reads(node))
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
            alone = (
                value for value in taken if all(use.node is node or use.node in constant_nodes for use in value.uses())
            )
            grown = sum(filter(None, sizes)) - sum(bytes_of(value.const_value) for value in alone)
            decline("unfolded_constants", [node], f"the result is large: {grown:,} bytes more")
    return [work for nodes in connected(constant_nodes, reads=_reads) if (work := _work(nodes)).results]


def _is_sequence(value: ir.Value) -> bool:
    """Whether a value is a sequence or an optional value, which cannot be stored as an initializer."""
    if value.type is not None:
        return not isinstance(value.type, ir.TensorType)
    node = value.producer()
    if node is None or not onnx.defs.has(node.op_type, node.domain):
        return False
    formals = onnx.defs.get_schema(node.op_type, node.domain).outputs
    return not any(kind.startswith("tensor") for kind in formals[min(value.index() or 0, len(formals) - 1)].types)


def _work(nodes: Sequence[ir.Node]) -> ConstantNodes:
    produced = {value for node in nodes for value in node.outputs}
    inside = {*nodes, *(inner for node in nodes for body in subgraphs(node) for inner in body.all_nodes())}
    results = [
        value
        for node in nodes
        for value in node.outputs
        if not value.is_graph_output()
        and (value.type is None or isinstance(value.type, ir.TensorType))
        and any(use.node not in inside for use in value.uses())
    ]
    constants = dict.fromkeys(value for node in nodes for value in _reads(node) if value not in produced)
    return ConstantNodes(tuple(nodes), tuple(results), tuple(constants))


def _size(value: ir.Value, known: Symbolic) -> int | None:
    """Bytes of a tensor; None if they are not known, for example if a size depends on floating-point numbers."""
    shape, dtype = known.shape(value), known.dtype(value)
    elements = product(shape) if shape is not None else None
    if not isinstance(elements, int) or dtype == ir.DataType.STRING:
        return None
    return int(elements * (dtype.itemsize if dtype is not None else 8))


def _together(works: Sequence[ConstantNodes]) -> list[list[ConstantNodes]]:
    """Groups that are computed in one run: those without large weights; each other one by itself."""
    alone = [[work] for work in works if any(bytes_of(value.const_value) > _LARGE for value in work.constants)]
    small = [work for work in works if all(bytes_of(value.const_value) <= _LARGE for value in work.constants)]
    return [small, *alone] if small else alone


def computed(
    model: ir.Model, works: Sequence[ConstantNodes]
) -> Iterator[tuple[ConstantNodes, dict[ir.Value, ir.TensorProtocol], ir.Node | None]]:
    """Each group with its results, and its first node that ONNX Runtime cannot run, if there is one."""
    for batch in _together(works):
        try:
            arrays = _run(model, [n for w in batch for n in w.nodes], [v for w in batch for v in w.results])
        except Exception:  # ONNX Runtime's errors share no base but this
            arrays = None
        for work in batch:
            if arrays is not None:
                yield work, {value: _tensor(arrays[value]) for value in work.results if value in arrays}, None
            else:
                yield work, *_as_far_as_it_goes(model, work)


def _as_far_as_it_goes(
    model: ir.Model, work: ConstantNodes
) -> tuple[dict[ir.Value, ir.TensorProtocol], ir.Node | None]:
    """The results of one group, or else the first node that does not run."""
    try:
        arrays = _run(model, work.nodes, work.results)
    except Exception:
        loop = next((node for node in work.nodes if subgraphs(node)), None)
        if loop is not None:  # it may not end, and that is not tried again
            return {}, loop
        low, high = 0, len(work.nodes) - 1
        while low < high:
            middle = (low + high) // 2
            try:
                _run(model, work.nodes[: middle + 1], [value for value in work.nodes[middle].outputs if value.name][:1])
                low = middle + 1
            except Exception:
                high = middle
        return {}, work.nodes[low]
    return {value: _tensor(array) for value, array in arrays.items()}, None


def _tensor(array: Array) -> ir.TensorProtocol:
    if array.dtype.kind in "OSU":
        return ir.StringTensor([str(text).encode() for text in array.reshape(-1)], shape=ir.Shape(array.shape))
    return ir.tensor(array)


def _run(model: ir.Model, nodes: Sequence[ir.Node], wanted: Sequence[ir.Value]) -> dict[ir.Value, Array]:
    """Run nodes without inputs in ONNX Runtime without its own optimisations; tensors only."""
    produced = {value for node in nodes for value in node.outputs}
    graph = onnx.GraphProto(name="constants")
    feeds: dict[str, Array] = {}
    for value in dict.fromkeys(value for node in nodes for value in _reads(node) if value not in produced):
        tensor = value.const_value
        assert tensor is not None
        array = tensor.numpy()
        if tensor.nbytes > _LARGE and array.dtype.isbuiltin == 1 and array.dtype.kind in "biuf":
            feeds[str(value.name)] = array
            kind = onnx.helper.make_tensor_value_info(str(value.name), int(tensor.dtype), array.shape)
            graph.input.append(kind)
        else:
            stored = graph.initializer.add()
            stored.CopyFrom(ir.to_proto(_in_memory(tensor, array)))
            stored.name = str(value.name)
    graph.node.extend(ir.to_proto(node) for node in nodes)
    graph.output.extend(onnx.ValueInfoProto(name=str(value.name)) for value in wanted)
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    proto = onnx.helper.make_model(graph, opset_imports=imports, ir_version=model.ir_version)
    session = Session(RunnableModel(proto.SerializeToString(), "constants"), changes=as_written(threads=1))
    longest = _LONGEST if any(map(subgraphs, nodes)) else None  # nothing else bounds a loop
    results = session.run(feeds, [str(value.name) for value in wanted], longest=longest)
    arrays = ((value, results[str(value.name)]) for value in wanted)
    return {value: array for value, array in arrays if isinstance(array, np.ndarray)}


def _in_memory(tensor: ir.TensorProtocol, array: Array) -> ir.TensorProtocol:
    """A tensor that does not refer to a file."""
    return tensor if isinstance(tensor, ir.StringTensor) else ir.Tensor(array, dtype=tensor.dtype)
