"""Consecutive slices, slices that cover a tensor, and slices that are concatenated again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.capabilities.optimize.node_pass import absorbed, integers
from htp_export.capabilities.optimize.registry import register
from htp_export.editing.editing import is_boundary, remove_unused, replace, stand_in
from htp_export.shapes.known import normalized
from htp_export.shapes.operator_kinds import is_standard
from htp_export.shapes.symbolic import Symbolic

_MOST_INDICES = 1 << 14
"""Of a ``Gather`` in place of slices: a constant of 128 KiB at most, which costs less than the copies that it saves."""


@register("merge_slices", level="exact")
class MergeSlices(ir.passes.InPlacePass):
    """Makes one node of slices: of two in a row, of all parts of a tensor, and of parts that are put together again.

    Two slices in a row that cut other dimensions are one. Slices of one tensor that are joined along the same dimension
    (``torch.roll``) are one ``Gather``. Slices that leave nothing of a tensor out are one ``Split``, but for those that
    modules give: they stay results of nodes of their own.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        if not any(is_standard(node, "Slice") for node in graph):
            return ir.passes.PassResult(model, modified=False)
        known = Symbolic(graph)
        modified = False
        for node in graph:
            modified |= _merge_in_a_row(node, known) or _gather(node, known)
        for node in graph:
            modified |= _split(graph, node, known)
        if modified:
            remove_unused(model)
        return ir.passes.PassResult(model, modified)


@dataclass(frozen=True)
class Sliced:
    """The input of a ``Slice``, and start, end and step for each dimension that it cuts."""

    source: ir.Value
    bounds: dict[int, tuple[int, int, int]]


def sliced(node: ir.Node | None, known: Symbolic) -> Sliced | None:
    """The bounds of a ``Slice``, if they are constant."""
    if node is None or not is_standard(node, "Slice") or node.inputs[0] is None or len(node.inputs) < 3:
        return None
    rank = known.rank(node.inputs[0])
    numbers = [known.constant(value) if value is not None else None for value in node.inputs[1:]]
    starts, ends = numbers[:2]
    if rank is None or starts is None or ends is None:
        return None
    is_given = [value is not None for value in node.inputs[3:]]
    axes = numbers[2] if is_given[:1] == [True] else list(range(len(starts)))
    steps = numbers[3] if is_given[1:] == [True] else [1] * len(starts)
    if axes is None or steps is None:
        return None
    places = [normalized(axis, rank) for axis in axes]
    return Sliced(node.inputs[0], dict(zip(places, zip(starts, ends, steps, strict=True), strict=True)))


def _merge_in_a_row(node: ir.Node, known: Symbolic) -> bool:
    """Make one ``Slice`` of two in a row, if all that read the first one's result are slices of other dimensions."""
    outer = sliced(node, known)
    between = outer.source if outer is not None else None
    inner = sliced(between.producer(), known) if between is not None else None
    if outer is None or between is None or inner is None or is_boundary(between) or between.is_graph_output():
        return False
    for use in between.uses():
        cut = sliced(use.node, known)
        if cut is None or not cut.bounds.keys().isdisjoint(inner.bounds):
            return False
    bounds = inner.bounds | outer.bounds
    starts, ends, steps = zip(*bounds.values(), strict=True)
    columns = {"starts": starts, "ends": ends, "axes": [*bounds], "steps": steps}
    replace(node, [ir.node("Slice", [inner.source, *(integers(node, n, what) for what, n in columns.items())])])
    return True


def _gather(node: ir.Node, known: Symbolic) -> bool:
    """Make one ``Gather`` of a ``Concat`` of slices of one tensor."""
    if not is_standard(node, "Concat") or len(node.inputs) < 2:
        return False
    rank = known.rank(node.outputs[0])
    axis = None if rank is None else normalized(node.attributes["axis"].as_int(), rank)
    indices: list[int] = []
    sources: dict[ir.Value, None] = {}
    for value in node.inputs:
        cut = sliced(absorbed(value), known)
        shape = known.shape(cut.source) if cut is not None else None
        size = shape[axis] if shape is not None and axis is not None else None
        if cut is None or axis is None or list(cut.bounds) != [axis] or not isinstance(size, int):
            return False
        sources[cut.source] = None
        start, end, step = cut.bounds[axis]
        indices += range(size)[max(start, -size) : end : step]  # Python clamps the other bounds as ONNX does
    if len(sources) > 1 or not 0 < len(indices) <= _MOST_INDICES:
        return False
    replace(node, [ir.node("Gather", [*sources, integers(node, indices, "indices")], {"axis": axis})])
    return True


def _split(graph: ir.Graph, node: ir.Node, known: Symbolic) -> bool:
    """Make one ``Split`` of consecutive slices that cover a tensor, the first of which is a node."""
    first = _part(node, known)
    if first is None or first[2] != 0:
        return False
    source, axis, *_ = first
    readers = dict.fromkeys(use.node for use in source.uses() if use.node.graph is graph)
    cuts = [(*part, reader) for reader in readers if (part := _part(reader, known)) is not None]
    parts = sorted((cut[2:] for cut in cuts if cut[:2] == (source, axis)), key=lambda part: part[:2])
    shape = known.shape(source)
    edges = [0, *(last for _, last, _ in parts)]
    if len(parts) < 2 or shape is None or edges[-1] != shape[axis]:
        return False
    if [start for start, _, _ in parts] != edges[:-1] or any(start >= last for start, last, _ in parts):
        return False
    put_split(graph, source, axis, [(last - start, reader) for start, last, reader in parts])
    return True


def _part(node: ir.Node, known: Symbolic) -> tuple[ir.Value, int, int, int] | None:
    """The tensor and dimension of which a ``Slice`` can be a part in a ``Split``, and its start and end."""
    cut = sliced(node, known)
    if cut is None or len(cut.bounds) != 1 or is_boundary(node.outputs[0]):
        return None
    ((axis, (start, end, step)),), shape = cut.bounds.items(), known.shape(cut.source)
    size = shape[axis] if shape is not None else None
    return (cut.source, axis, *slice(start, end).indices(size)[:2]) if step == 1 and isinstance(size, int) else None


def put_split(graph: ir.Graph, source: ir.Value, axis: int, parts: Sequence[tuple[int, ir.Node]]) -> None:
    """Replace nodes by one ``Split`` of a tensor: the size of each part, and the node whose output it takes over."""
    nodes = {node for _, node in parts}
    earliest = next(node for node in graph if node in nodes)
    outputs = [ir.Value(type=node.outputs[0].type, shape=node.outputs[0].shape) for _, node in parts]
    sizes = [size for size, _ in parts]
    inputs, attributes = [source], {"axis": axis}
    if graph.opset_imports.get("", 1) >= 13:
        inputs.append(integers(earliest, sizes, "sizes"))
        split = ir.node("Split", inputs, attributes, outputs=outputs)
    else:
        split = ir.node("Split", inputs, {**attributes, "split": sizes}, outputs=outputs)
    split.name = f"{earliest.name}_Split"
    graph.insert_before(earliest, split)
    for (_, node), new in zip(parts, outputs, strict=True):
        old = node.outputs[0]
        name = old.name
        if stand_in(old, new):
            graph.remove(node, safe=True)
            new.name = name
