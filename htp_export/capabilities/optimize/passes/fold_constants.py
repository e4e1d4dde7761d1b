"""Constant folding: nodes that compute the same in every run."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from htp_export.capabilities.optimize.registry import decline, register
from htp_export.editing.editing import (
    Array,
    add_initializer,
    bytes_of,
    is_constant,
    release,
    remove_unused,
    replace_with,
)
from htp_export.format.recipes import Recipe
from htp_export.model.neighbours import connected
from htp_export.model.recipes import follow, lift_constants, of_values
from htp_export.runtime.sessions import RunnableModel, Session, as_written
from htp_export.shapes.operator_kinds import (
    GROWING,
    RANDOM,
    RESHAPING,
    graphs_in,
    is_standard,
    reads_of,
    subgraphs,
    with_subgraphs,
)
from htp_export.shapes.sizes import product
from htp_export.shapes.symbolic import Symbolic

_SMALL = 1 << 14
"""Elements (64 KB as float32); larger constants become views, which are not copied in memory."""

_VIEWS = RESHAPING | {"Transpose"}


@register("fold_constants", level="exact")
class FoldConstants(ir.passes.InPlacePass):
    """Folds nodes that depend on no input, with the kernels of ONNX Runtime: results are equal.

    Any operator is folded, with branches and loops, in subgraphs too, except for random operators
    and the dequantization of weights. Initializers that replace nodes may take 1 MiB, or a
    sixteenth of the model's weights, more than the constants that are removed with the nodes.
    Weights are not copied: a transposed or reshaped weight is a view, which is computed when the
    file is written.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = lift_constants(model)
        if modified:
            remove_unused(model)
        done: set[ir.Graph] = set()
        while graph := next((graph for graph in graphs_in(model.graph) if graph not in done), None):
            done.add(graph)
            modified |= _fold_views(model, graph)
            modified |= _fold(model, graph)
        return ir.passes.PassResult(model, modified)


def _fold_views(model: ir.Model, graph: ir.Graph) -> bool:
    """Replace transposed and reshaped large weights by views."""
    known: Symbolic | None = None
    modified = False
    for node in graph:
        tensor = _large_weight_of(node)
        if tensor is None or node.outputs[0].is_graph_output():
            continue
        known = known or Symbolic(graph, model.opset_imports)
        shape = known.shape(node.outputs[0])
        sizes = [size for size in shape or () if isinstance(size, int)]
        if shape is None or len(sizes) < len(shape):
            continue
        growth = 0 if _is_only_consumer(node) else bytes_of(tensor)
        if growth and growth > room_left(model):
            continue
        view = _view(node, tensor, sizes)
        recipes: dict[ir.Value, Recipe] = {}
        follow(graph, [node], recipes)
        modified |= _store(graph, node.outputs[0], view, growth, recipes[node.outputs[0]])
    if modified:
        remove_unused(model)
    return modified


def _large_weight_of(node: ir.Node) -> ir.TensorProtocol | None:
    """The large weight that a node transposes or reshapes; None for other nodes."""
    if not is_standard(node, *_VIEWS):
        return None
    weight = node.inputs[0]
    if weight is None or not is_constant(weight):
        return None
    tensor = weight.const_value
    if tensor is None or tensor.size <= _SMALL or tensor.dtype == ir.DataType.STRING:
        return None
    return tensor


def _is_only_consumer(node: ir.Node) -> bool:
    """Whether no other node consumes the first input of a node."""
    weight = node.inputs[0]
    return weight is None or all(use.node is node for use in weight.uses())


def _view(node: ir.Node, tensor: ir.TensorProtocol, sizes: Sequence[int]) -> ir.LazyTensor:
    """The result of a transpose or reshape of a weight, computed when it is needed."""
    perm: Sequence[int] | None = None
    if node.op_type == "Transpose":
        perm = node.attributes.get_ints("perm") or list(reversed(range(len(sizes))))

    def laid_out() -> ir.TensorProtocol:
        array = tensor.numpy()
        return ir.tensor(array.reshape(sizes) if perm is None else array.transpose(perm))

    return ir.LazyTensor(laid_out, tensor.dtype, ir.Shape(sizes))


def _fold(model: ir.Model, graph: ir.Graph) -> bool:
    """Fold the groups of constant nodes of a graph, within the limit of growth."""
    left_out: set[ir.Node] = set()
    folded = False
    while True:
        room = room_left(model)
        groups = find_constant_nodes(graph, room, left_out, model.opset_imports)
        if not groups:
            return folded
        left_out_before, nodes_before = len(left_out), len(graph)
        for group, results, fault in computed(model, groups):
            if fault is not None:
                left_out.add(fault)
                continue
            stored, room = _keep(graph, group, results, left_out, room)
            folded |= stored
        remove_unused(model)
        if len(left_out) == left_out_before and len(graph) == nodes_before:
            return folded


def _keep(
    graph: ir.Graph,
    group: ConstantNodes,
    results: Mapping[ir.Value, ir.TensorProtocol],
    left_out: set[ir.Node],
    room: int,
) -> tuple[bool, int]:
    """Replace values by their results; values that are too large, or no tensors, keep their nodes.

    Returns:
        Whether a value was replaced, and the rest of ``room``, the bytes by which the constants may
        grow.
    """
    folded, recipes = False, dict[ir.Value, Recipe]()
    follow(graph, group.nodes, recipes)
    others = of_values("constant folding", *group.constants)
    freed = group.freed if len(results) == len(group.results) else 0
    if sum(map(bytes_of, results.values())) - freed > room:
        freed = 0
    for value in sorted(group.results, key=lambda value: bytes_of(results.get(value))):
        tensor, producer = results.get(value), value.producer()
        assert producer is not None
        growth = max(0, bytes_of(tensor) - freed)
        if tensor is None or growth > room:
            left_out.add(producer)
            decline("unfolded_constants", [producer], f"the result is large: {growth:,} bytes more")
            continue
        room, freed = room - growth, max(0, freed - bytes_of(tensor))
        if _store(graph, value, tensor, growth, recipes.get(value, others)):
            folded = True
            is_unused = not any(v.uses() or v.is_graph_output() for v in producer.outputs)
            if is_unused and subgraphs(producer):
                release(producer)
    return folded, room


def _store(
    graph: ir.Graph,
    value: ir.Value,
    tensor: ir.TensorProtocol,
    growth: int,
    recipe: Recipe,
) -> bool:
    stored = add_initializer(graph, tensor, str(value.name), recipe)
    if growth:
        stored.meta[GROWTH] = growth
    return replace_with(value, stored)


LEAST_ROOM = 1 << 20
"""Bytes by which the constants of any model may grow: 1 MiB is little for a file."""

SHARE = 16
"""A model with large weights may grow by one sixteenth of them: users do not notice 6 %."""

GROWTH = "htp_export.growth"
"""Key in an initializer's ``meta``: the bytes by which the model grew with it."""

_LARGE = 1 << 16
"""Bytes; ONNX Runtime receives larger constants as inputs, which it does not copy."""

_LONGEST = 5.0
"""Seconds that loops and branches may take: a file may contain a loop that does not end.

The size of the results bounds the time of other operators."""

_UNPACKING = frozenset(("DequantizeLinear",))
"""Operators that dequantize weights: without them, the model would no longer be quantized."""


def room_left(model: ir.Model) -> int:
    """Bytes by which the constants of a model may still grow."""
    weights, grown = 0, 0
    for graph in graphs_in(model.graph):
        for value in graph.initializers.values():
            weights += bytes_of(value.const_value)
            grown += value.meta.get(GROWTH, 0)
    return int(max(LEAST_ROOM, (weights - grown) // SHARE) - grown)


def _reads(node: ir.Node) -> Collection[ir.Value]:
    """The inputs of a node, and the values that its subgraphs capture."""
    bodies = {body for inner in with_subgraphs(node) for body in subgraphs(inner)}
    return dict.fromkeys(value for value in reads_of(node) if value.graph not in bodies)


def _held_back(node: ir.Node) -> bool:
    """Whether a node stays although all its inputs are constant."""
    operators = {inner.op_type for inner in with_subgraphs(node)}
    if operators & _UNPACKING:
        decline("unfolded_constants", [node], "it unpacks quantized weights")
        return True
    return any(operator in RANDOM or operator.endswith("Dropout") for operator in operators)


class ConstantNodes:
    """Connected nodes that compute the same in every run.

    ``results``: their outputs that other nodes use. ``constants``: the constants that they use.
    """

    def __init__(self, nodes: Sequence[ir.Node]) -> None:
        self.nodes = nodes
        self._inside = {inner for node in nodes for inner in with_subgraphs(node)}
        outputs = {value: None for node in nodes for value in node.outputs}
        self.results = [value for value in outputs if self._is_result(value)]
        constants: dict[ir.Value, None] = {}
        for node in nodes:
            constants.update((value, None) for value in _reads(node) if value not in outputs)
        self.constants = list(constants)

    def _is_result(self, value: ir.Value) -> bool:
        is_tensor = value.type is None or isinstance(value.type, ir.TensorType)
        if value.is_graph_output() or not is_tensor:
            return False
        return any(use.node not in self._inside for use in value.uses())

    @property
    def freed(self) -> int:
        """Bytes of constants without other consumers."""
        freed = 0
        for value in self.constants:
            is_used_elsewhere = any(use.node not in self._inside for use in value.uses())
            if not is_used_elsewhere and not value.is_graph_output():
                freed += bytes_of(value.const_value)
        return freed


def find_constant_nodes(
    graph: ir.Graph,
    room: int,
    left_out: Collection[ir.Node] = (),
    opsets: Mapping[str, int] | None = None,
) -> list[ConstantNodes]:
    """The nodes of one graph that can be folded, except for ``left_out``.

    The graph is in topological order; captured values may be constants, too. ``room``: the bytes
    that a result may have in addition to those of the constants that it is computed from. A few
    bytes of a file can ask for any number of elements, so that a node stays until its size is
    known.
    """
    known: Symbolic | None = None
    sources: dict[ir.Value, frozenset[ir.Value]] = {}
    constant_nodes: list[ir.Node] = []
    for node in graph:
        inputs = _reads(node)
        if not all(value in sources or is_constant(value) for value in inputs):
            continue
        if node in left_out or _held_back(node):
            continue
        known = known or Symbolic(graph, opsets)
        constants = frozenset[ir.Value]().union(*(sources.get(arg, (arg,)) for arg in inputs))
        most = room + sum(bytes_of(value.const_value) for value in constants)
        sizes = [_size(value, known) for value in node.outputs if value.name]
        if None in sizes and not _can_fold_unsized(node, known, most):
            continue
        if any(size is not None and size > most for size in sizes):
            growth = sum(filter(None, sizes)) - _bytes_only_for({node, *constant_nodes}, constants)
            decline("unfolded_constants", [node], f"the result is large: {growth:,} bytes more")
            continue
        sources.update(dict.fromkeys(node.outputs, constants))
        constant_nodes.append(node)
    groups = (ConstantNodes(nodes) for nodes in connected(constant_nodes, reads=_reads))
    return [group for group in groups if group.results]


def _can_fold_unsized(node: ir.Node, known: Symbolic, most: int) -> bool:
    """Whether a node with a result of unknown size can be folded now: no step of it enlarges."""
    if not all(is_constant(value) or _is_sequence(value) for value in _reads(node)):
        return False  # its size may be known in the next round, when the inputs are folded
    growing = _growing(node, known, most)
    if growing is None:
        return True
    why = f"the size of the result of {growing.op_type} is not known"
    decline("unfolded_constants", [node], why)
    return False


def _bytes_only_for(nodes: Collection[ir.Node], constants: Iterable[ir.Value]) -> int:
    """The bytes of constants that no other nodes use."""
    total = 0
    for value in constants:
        if all(use.node in nodes for use in value.uses()):
            total += bytes_of(value.const_value)
    return total


def _growing(node: ir.Node, known: Symbolic, most: int) -> ir.Node | None:
    """The first of a node and its inner nodes whose results may be larger than their inputs."""
    for inner in with_subgraphs(node):
        sizes = [_size(value, known) for value in inner.outputs if value.name]
        bounded = inner.domain == "" and inner.op_type not in GROWING
        if not bounded and not all(size is not None and size <= most for size in sizes):
            return inner
    return None


def _is_sequence(value: ir.Value) -> bool:
    """Whether a value is a sequence or an optional value, which cannot be an initializer."""
    if value.type is not None:
        return not isinstance(value.type, ir.TensorType)
    node = value.producer()
    if node is None or not onnx.defs.has(node.op_type, node.domain):
        return False
    formals = onnx.defs.get_schema(node.op_type, node.domain).outputs
    formal = formals[min(value.index() or 0, len(formals) - 1)]  # the last one may be variadic
    return not any(name.startswith("tensor") for name in formal.types)


def _size(value: ir.Value, known: Symbolic) -> int | None:
    """Bytes of a tensor.

    None if they are unknown, for example if a size is computed from floats.
    """
    shape, dtype = known.shape(value), known.dtype(value)
    elements = product(shape) if shape is not None else None
    if not isinstance(elements, int) or dtype == ir.DataType.STRING:
        return None
    return int(elements * (dtype.itemsize if dtype is not None else 8))


def computed(
    model: ir.Model, groups: Sequence[ConstantNodes]
) -> Iterator[tuple[ConstantNodes, Mapping[ir.Value, ir.TensorProtocol], ir.Node | None]]:
    """Each group with its results, and its first node that ONNX Runtime cannot run, if any.

    Groups without large weights are computed in one run, and each other one in a run of its own, so
    that memory holds the large weights of one group only.
    """
    large = {group: None for group in groups if _has_large_constants(group)}
    small = [group for group in groups if group not in large]
    if small:
        yield from _computed_together(model, small)
    for group in large:
        yield from _computed_together(model, [group])


def _computed_together(
    model: ir.Model, groups: Sequence[ConstantNodes]
) -> Iterator[tuple[ConstantNodes, Mapping[ir.Value, ir.TensorProtocol], ir.Node | None]]:
    """Compute groups in one run; if that fails, each in a run of its own."""
    nodes = [node for group in groups for node in group.nodes]
    wanted = [value for group in groups for value in group.results]
    tensors: Mapping[ir.Value, ir.TensorProtocol] | None = None
    # the errors of ONNX Runtime have no other common base
    with contextlib.suppress(Exception):
        tensors = _run(model, nodes, wanted)
    if tensors is not None:
        for group in groups:
            results = {value: tensors[value] for value in group.results if value in tensors}
            yield group, results, None
    elif len(groups) == 1:
        yield groups[0], {}, _first_fault(model, nodes)
    else:
        for group in groups:
            yield from _computed_together(model, [group])


def _has_large_constants(group: ConstantNodes) -> bool:
    return any(bytes_of(value.const_value) > _LARGE for value in group.constants)


def _first_fault(model: ir.Model, nodes: Sequence[ir.Node]) -> ir.Node:
    """The first of connected nodes that does not run, or a node with a subgraph.

    A subgraph may not end, so that it does not run again.
    """
    for node in nodes:
        if subgraphs(node):
            return node
    low, high = 0, len(nodes) - 1
    while low < high:
        middle = (low + high) // 2
        results = [value for value in nodes[middle].outputs if value.name]
        try:
            _run(model, nodes[: middle + 1], results[:1])
            low = middle + 1
        except Exception:
            high = middle
    return nodes[low]


def _tensor(array: Array) -> ir.TensorProtocol:
    if array.dtype.kind not in "OSU":
        return ir.tensor(array)
    texts = [str(text).encode() for text in array.reshape(-1)]
    return ir.StringTensor(texts, shape=ir.Shape(array.shape))


def _run(
    model: ir.Model, nodes: Sequence[ir.Node], wanted: Sequence[ir.Value]
) -> dict[ir.Value, ir.TensorProtocol]:
    """Run nodes without inputs in ONNX Runtime without its optimizations; tensors only."""
    graph = onnx.GraphProto(name="constants")
    feeds: dict[str, Array] = {}
    for value in ConstantNodes(nodes).constants:
        name, tensor = str(value.name), value.const_value
        assert tensor is not None
        array = tensor.numpy()
        can_be_fed = array.dtype.isbuiltin == 1 and array.dtype.kind in "biuf"
        if tensor.nbytes > _LARGE and can_be_fed:
            feeds[name] = array
            info = onnx.helper.make_tensor_value_info(name, int(tensor.dtype), array.shape)
            graph.input.append(info)
            continue
        if not isinstance(tensor, ir.StringTensor):
            tensor = ir.Tensor(array, dtype=tensor.dtype)
        graph.initializer.append(ir.to_proto(tensor))
        graph.initializer[-1].name = name
    graph.node.extend(ir.to_proto(node) for node in nodes)
    graph.output.extend(onnx.ValueInfoProto(name=str(value.name)) for value in wanted)
    opsets = model.opset_imports.items()
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets]
    proto = onnx.helper.make_model(graph, opset_imports=imports, ir_version=model.ir_version)
    runnable = RunnableModel(proto.SerializeToString(), "constants")
    session = Session(runnable, changes=as_written(threads=1))
    longest = _LONGEST if any(map(subgraphs, nodes)) else None  # nothing else bounds a loop
    results = session.run(feeds, [str(value.name) for value in wanted], longest=longest)
    tensors: dict[ir.Value, ir.TensorProtocol] = {}
    for value in wanted:
        result = results[str(value.name)]
        if isinstance(result, np.ndarray):
            tensors[value] = _tensor(result)
    return tensors
