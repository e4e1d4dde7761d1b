"""Nodes that compute the same in every run."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

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
from htp_export.format.recipes import CONSTANT, Recipe
from htp_export.model.neighbours import connected
from htp_export.model.recipes import follow, lift_constants
from htp_export.runtime.sessions import RunnableModel, Session, as_written
from htp_export.shapes.operator_kinds import (
    GROWING,
    RANDOM,
    RESHAPING,
    is_standard,
    reads_of,
    subgraphs,
    with_subgraphs,
)
from htp_export.shapes.sizes import product
from htp_export.shapes.symbolic import Symbolic

_SMALL = 1 << 14
"""Elements; transposed and reshaped larger constants become views."""

_VIEWS = RESHAPING | {"Transpose"}


@register("fold_constants", level="exact")
class FoldConstants(ir.passes.InPlacePass):
    """Computes what depends on no input, with the kernels of ONNX Runtime: the results are what they were.

    Any operator, with branches and loops, in subgraphs too; but nothing random, and no unpacking of
    quantized weights. All that is stored in place of nodes may take 1 MiB, or a sixteenth of the
    model's weights, more than the constants that go with the nodes. Weights are not copied: a
    transposed or reshaped weight is a view, laid out when the file is written.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = lift_constants(model)
        if modified:
            remove_unused(model)
        done: set[ir.Graph] = set()
        while graph := next((graph for graph in model.graphs() if graph not in done), None):
            done.add(graph)
            modified |= _fold_views(model, graph)
            modified |= _fold(model, graph)
        return ir.passes.PassResult(model, modified)


def _fold_views(model: ir.Model, graph: ir.Graph) -> bool:
    known: Symbolic | None = None
    modified = False
    for node in graph:
        weight = node.inputs[0] if is_standard(node, *_VIEWS) else None
        tensor = weight.const_value if weight is not None and is_constant(weight) else None
        if (
            weight is None
            or tensor is None
            or tensor.size <= _SMALL
            or tensor.dtype == ir.DataType.STRING
        ):
            continue
        known = known or Symbolic(graph, model.opset_imports)
        shape = known.shape(node.outputs[0])
        sizes = [size for size in shape or () if isinstance(size, int)]
        growth = 0 if all(use.node is node for use in weight.uses()) else bytes_of(tensor)
        if node.outputs[0].is_graph_output() or shape is None or len(sizes) < len(shape):
            continue
        if growth and growth > room_left(model):
            continue
        perm = node.attributes.get_ints("perm") or list(reversed(range(len(sizes))))
        view = _view(tensor, sizes, perm if node.op_type == "Transpose" else None)
        recipes: dict[ir.Value, Recipe] = {}
        follow(graph, [node], recipes)
        modified |= _store(graph, node.outputs[0], view, growth, recipes)
    if modified:
        remove_unused(model)
    return modified


def _view(
    tensor: ir.TensorProtocol, sizes: Sequence[int], perm: Sequence[int] | None
) -> ir.LazyTensor:
    def laid_out() -> ir.TensorProtocol:
        array = tensor.numpy()
        return ir.tensor(array.reshape(sizes) if perm is None else array.transpose(perm))

    return ir.LazyTensor(laid_out, tensor.dtype, ir.Shape(sizes))


def _fold(model: ir.Model, graph: ir.Graph) -> bool:
    """Fold the groups of constant nodes of a graph, within the limit of growth."""
    left_out: set[ir.Node] = set()
    folded = False
    while works := find_constant_nodes(
        graph, room := room_left(model), left_out, model.opset_imports
    ):
        looked_at, nodes = len(left_out), len(graph)
        for work, results, fault in computed(model, works):
            if fault is not None:
                left_out.add(fault)
                continue
            stored, room = _keep(graph, work, results, left_out, room)
            folded |= stored
        remove_unused(model)
        if len(left_out) == looked_at and len(graph) == nodes:
            break
    return folded


def _keep(
    graph: ir.Graph,
    work: ConstantNodes,
    results: Mapping[ir.Value, ir.TensorProtocol],
    left_out: set[ir.Node],
    room: int,
) -> tuple[bool, int]:
    """Replace values by their results; values that are too large, or no tensors, keep their nodes.

    Returns:
        Whether a value was replaced, and what is left of ``room``, the bytes by which the constants
        may grow.
    """
    folded, recipes = False, dict[ir.Value, Recipe]()
    follow(graph, work.nodes, recipes)
    freed = work.freed if len(results) == len(work.results) else 0
    if sum(map(bytes_of, results.values())) - freed > room:
        freed = 0
    for value in sorted(work.results, key=lambda value: bytes_of(results.get(value))):
        tensor, maker = results.get(value), value.producer()
        assert maker is not None
        growth = max(0, bytes_of(tensor) - freed)
        if tensor is None or growth > room:
            left_out.add(maker)
            decline("unfolded_constants", [maker], f"the result is large: {growth:,} bytes more")
            continue
        room, freed = room - growth, max(0, freed - bytes_of(tensor))
        if _store(graph, value, tensor, growth, recipes):
            folded = True
            if subgraphs(maker) and not any(v.uses() or v.is_graph_output() for v in maker.outputs):
                release(maker)
    return folded, room


def _store(
    graph: ir.Graph,
    value: ir.Value,
    tensor: ir.TensorProtocol,
    growth: int,
    recipes: Mapping[ir.Value, Recipe],
) -> bool:
    recipe = recipes.get(value) or ["computed", "constant folding"]
    stored = add_initializer(
        graph, tensor, str(value.name), recipe if tensor.dtype.is_floating_point() else CONSTANT
    )
    if growth:
        stored.meta[GROWTH] = growth
    return replace_with(value, stored)


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
    bodies = {body for holder in with_subgraphs(node) for body in subgraphs(holder)}
    return dict.fromkeys(value for value in reads_of(node) if value.graph not in bodies)


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
        self.constants = list(
            dict.fromkeys(value for node in nodes for value in _reads(node) if value not in made)
        )

    @property
    def freed(self) -> int:
        """Bytes of constants without other consumers."""
        alone = (
            value
            for value in self.constants
            if all(use.node in self._inside for use in value.uses())
        )
        return sum(bytes_of(value.const_value) for value in alone if not value.is_graph_output())


def find_constant_nodes(
    graph: ir.Graph,
    room: int,
    left_out: Collection[ir.Node] = (),
    opsets: Mapping[str, int] | None = None,
) -> list[ConstantNodes]:
    """The nodes of one graph that can be folded, without those that are left out.

    The graph is in topological order; values that it captures may be constants, too. ``room`` is
    how many bytes a result may have in addition to those of the constants from which it is
    computed: a few bytes of a file can ask for any number of values, so that a node is left until
    its size is known, or cannot become known any more.
    """
    known: Symbolic | None = None
    sources: dict[ir.Value, frozenset[ir.Value]] = {}
    constant_nodes: list[ir.Node] = []
    for node in graph:
        read = _reads(node)
        if (
            not all(value in sources or is_constant(value) for value in read)
            or node in left_out
            or _held_back(node)
        ):
            continue
        known = known or Symbolic(graph, opsets)
        taken = frozenset[ir.Value]().union(*(sources.get(value, (value,)) for value in read))
        most = room + sum(bytes_of(value.const_value) for value in taken)
        sizes = [_size(value, known) for value in node.outputs if value.name]
        if None in sizes and not all(is_constant(value) or _is_sequence(value) for value in read):
            continue  # once the tensors that it reads have been computed, its size may be known
        if None in sizes and (growing := _growing(node, known, most)) is not None:
            decline(
                "unfolded_constants",
                [node],
                f"the size of what {growing.op_type} makes is not known",
            )
            continue
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


def _growing(node: ir.Node, known: Symbolic, most: int) -> ir.Node | None:
    """The first node, it or one in its subgraphs, whose results may be larger than what it reads, as numbers say."""
    for inner in with_subgraphs(node):
        sizes = [_size(value, known) for value in inner.outputs if value.name]
        bounded = inner.domain == "" and inner.op_type not in GROWING
        if not bounded and not all(size is not None and size <= most for size in sizes):
            return inner
    return None


def _is_sequence(value: ir.Value) -> bool:
    """Whether a value is a sequence or an optional value, which cannot be stored as an initializer."""
    if value.type is not None:
        return not isinstance(value.type, ir.TensorType)
    node = value.producer()
    if node is None or not onnx.defs.has(node.op_type, node.domain):
        return False
    formals = onnx.defs.get_schema(node.op_type, node.domain).outputs
    return not any(
        kind.startswith("tensor")
        for kind in formals[min(value.index() or 0, len(formals) - 1)].types
    )


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

    Groups without large weights are computed in one run, and each other one by itself, so that the
    large weights of one group only are in memory.
    """
    large = {
        work
        for work in works
        if any(bytes_of(value.const_value) > _LARGE for value in work.constants)
    }
    runs = [
        [work for work in works if work not in large],
        *([work] for work in works if work in large),
    ]
    while runs:
        together = runs.pop(0)
        nodes = [node for work in together for node in work.nodes]
        try:
            tensors = (
                _run(model, nodes, [value for work in together for value in work.results])
                if nodes
                else {}
            )
        except Exception:  # ONNX Runtime's errors share no base but this
            if len(together) > 1:
                runs[:0] = [[work] for work in together]
            else:
                yield together[0], {}, _first_fault(model, nodes)
            continue
        for work in together:
            yield work, {value: tensors[value] for value in work.results if value in tensors}, None


def _first_fault(model: ir.Model, nodes: Sequence[ir.Node]) -> ir.Node:
    """The first of connected nodes that does not run; one with a subgraph, which may not end, is not tried again."""
    if loop := next(filter(subgraphs, nodes), None):
        return loop
    low, high = 0, len(nodes) - 1
    while low < high:
        middle = (low + high) // 2
        try:
            _run(
                model,
                nodes[: middle + 1],
                [value for value in nodes[middle].outputs if value.name][:1],
            )
            low = middle + 1
        except Exception:
            high = middle
    return nodes[low]


def _tensor(array: Array) -> ir.TensorProtocol:
    if array.dtype.kind in "OSU":
        return ir.StringTensor(
            [str(text).encode() for text in array.reshape(-1)], shape=ir.Shape(array.shape)
        )
    return ir.tensor(array)


def _run(
    model: ir.Model, nodes: Sequence[ir.Node], wanted: Sequence[ir.Value]
) -> dict[ir.Value, ir.TensorProtocol]:
    """Run nodes without inputs in ONNX Runtime without its own optimisations; tensors only."""
    graph = onnx.GraphProto(name="constants")
    feeds: dict[str, Array] = {}
    for value in ConstantNodes(nodes).constants:
        name, tensor = str(value.name), value.const_value
        assert tensor is not None
        array = tensor.numpy()
        if tensor.nbytes > _LARGE and array.dtype.isbuiltin == 1 and array.dtype.kind in "biuf":
            feeds[name] = array
            graph.input.append(
                onnx.helper.make_tensor_value_info(name, int(tensor.dtype), array.shape)
            )
        else:
            in_memory = (
                tensor
                if isinstance(tensor, ir.StringTensor)
                else ir.Tensor(array, dtype=tensor.dtype)
            )
            graph.initializer.append(ir.to_proto(in_memory))
            graph.initializer[-1].name = name
    graph.node.extend(ir.to_proto(node) for node in nodes)
    graph.output.extend(onnx.ValueInfoProto(name=str(value.name)) for value in wanted)
    imports = [
        onnx.helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()
    ]
    proto = onnx.helper.make_model(graph, opset_imports=imports, ir_version=model.ir_version)
    session = Session(
        RunnableModel(proto.SerializeToString(), "constants"), changes=as_written(threads=1)
    )
    longest = _LONGEST if any(map(subgraphs, nodes)) else None  # nothing else bounds a loop
    results = session.run(feeds, [str(value.name) for value in wanted], longest=longest)
    arrays = ((value, results[str(value.name)]) for value in wanted)
    return {value: _tensor(array) for value, array in arrays if isinstance(array, np.ndarray)}
