"""Nodes that compute the same in every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from htp_export.capabilities.optimize.constant_work import (
    GROWTH,
    ConstantNodes,
    computed,
    find_constant_nodes,
    room_left,
)
from htp_export.capabilities.optimize.declining import decline
from htp_export.capabilities.optimize.registry import register
from htp_export.editing.editing import add_initializer, bytes_of, is_constant, release, remove_unused, stand_in
from htp_export.format.recipes import CONSTANT, Recipe
from htp_export.model.recipes import follow, lift_constants
from htp_export.shapes.operator_kinds import RESHAPING, is_standard, subgraphs
from htp_export.shapes.symbolic import Symbolic

_SMALL = 1 << 14
"""Elements; transposed and reshaped larger constants become views."""

_VIEWS = RESHAPING | {"Transpose"}


@register("fold_constants", level="exact")
class FoldConstants(ir.passes.InPlacePass):
    """Computes what depends on no input, with the kernels of ONNX Runtime: the results are what they were.

    Any operator, with branches and loops, in subgraphs too; but nothing random, and no unpacking of quantized weights.
    All that is stored in place of nodes may take 1 MiB, or a sixteenth of the model's weights, more than the constants
    that go with the nodes. Weights are not copied: a transposed or reshaped weight is a view, laid out when the file is
    written.
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
    """Fold transpositions and reshapes of large weights to views."""
    known: Symbolic | None = None
    modified = False
    for node in graph:
        weight = node.inputs[0] if is_standard(node, *_VIEWS) else None
        tensor = weight.const_value if weight is not None and is_constant(weight) else None
        if weight is None or tensor is None or tensor.size <= _SMALL or tensor.dtype == ir.DataType.STRING:
            continue
        known = known or Symbolic(graph, model.opset_imports)
        shape = known.shape(node.outputs[0])
        sizes = [size for size in shape or () if isinstance(size, int)]
        growth = 0 if all(use.node is node for use in weight.uses()) else bytes_of(tensor)
        if node.outputs[0].is_graph_output() or shape is None or len(sizes) < len(shape) or growth > room_left(model):
            continue
        perm = node.attributes.get_ints("perm") or list(reversed(range(len(sizes))))
        view = _view(tensor, sizes, perm if node.op_type == "Transpose" else None)
        recipes: dict[ir.Value, Recipe] = {}
        follow(graph, [node], recipes)
        modified |= _store(graph, node.outputs[0], view, growth, recipes)
    if modified:
        remove_unused(model)
    return modified


def _view(tensor: ir.TensorProtocol, sizes: Sequence[int], perm: Sequence[int] | None) -> ir.LazyTensor:
    def laid_out() -> ir.TensorProtocol:
        array = tensor.numpy()
        return ir.tensor(array.reshape(sizes) if perm is None else array.transpose(perm))

    return ir.LazyTensor(laid_out, tensor.dtype, ir.Shape(sizes))


def _fold(model: ir.Model, graph: ir.Graph) -> bool:
    """Fold the groups of constant nodes of a graph, within the limit of growth."""
    left_out: set[ir.Node] = set()
    folded = False
    while works := find_constant_nodes(graph, room_left(model), left_out, model.opset_imports):
        looked_at, nodes = len(left_out), len(graph)
        for work, results, fault in computed(model, works):
            if fault is not None:
                left_out.add(fault)
            else:
                folded |= _keep(model, graph, work, results, left_out)
        remove_unused(model)
        if len(left_out) == looked_at and len(graph) == nodes:
            break
    return folded


def _keep(
    model: ir.Model,
    graph: ir.Graph,
    work: ConstantNodes,
    results: Mapping[ir.Value, ir.TensorProtocol],
    left_out: set[ir.Node],
) -> bool:
    """Replace values by their results; values that are too large, or no tensors, keep their nodes."""
    room, folded, recipes = room_left(model), False, dict[ir.Value, Recipe]()
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
    return folded


def _store(
    graph: ir.Graph, value: ir.Value, tensor: ir.TensorProtocol, growth: int, recipes: Mapping[ir.Value, Recipe]
) -> bool:
    recipe = recipes.get(value) or ["computed", "constant folding"]
    stored = add_initializer(graph, tensor, str(value.name), recipe if tensor.dtype.is_floating_point() else CONSTANT)
    if growth:
        stored.meta[GROWTH] = growth
    return stand_in(value, stored)
