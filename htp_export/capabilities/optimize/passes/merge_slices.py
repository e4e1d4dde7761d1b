"""Consecutive slices, slices that cover a tensor, and slices that are concatenated again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import onnx_ir as ir

from htp_export.capabilities.optimize.registry import absorbed, integers, register
from htp_export.editing.editing import is_boundary, remove_unused, replace, stand_in
from htp_export.model.neighbours import producer_of
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


class Part(NamedTuple):
    """A part of one dimension of a tensor, whose bounds are counted from the front."""

    source: ir.Value
    axis: int
    start: int
    end: int
    step: int


def part_of(value: ir.Value | None, known: Symbolic) -> Part | None:
    """The part of another tensor that a ``Slice`` or a ``Split`` gives, if it cuts one dimension of known size."""
    node = producer_of(value, "Slice", "Split")
    source = node.inputs[0] if node is not None else None
    shape = known.shape(source)
    if node is None or source is None or shape is None:
        return None
    if node.op_type == "Split":
        axis = normalized(node.attributes.get_int("axis", 0), len(shape))
        shapes = [known.shape(each) for each in node.outputs[: [*node.outputs].index(value) + 1]]  # type: ignore[arg-type]
        sizes = [size for each in shapes if each is not None and isinstance(size := each[axis], int)]
        return Part(source, axis, sum(sizes[:-1]), sum(sizes), 1) if len(sizes) == len(shapes) else None
    cut = sliced(node, known)
    if cut is None or len(cut.bounds) != 1:
        return None
    ((axis, bounds),) = cut.bounds.items()
    size = shape[axis]
    return Part(source, axis, *slice(*bounds).indices(size)) if isinstance(size, int) else None


def covers(parts: Sequence[Part], known: Symbolic) -> bool:
    """Whether parts, in this order, are all of one dimension of one tensor, without gaps and none of them empty."""
    source, axis = parts[0][:2]
    edges, shape = [0, *(part.end for part in parts)], known.shape(source)
    alike = all(part.source is source and (part.axis, part.step) == (axis, 1) for part in parts)
    apart = [part.start for part in parts] == edges[:-1] and all(part.start < part.end for part in parts)
    return alike and apart and shape is not None and edges[-1] == shape[axis]


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
    first = part_of(node.outputs[0], known) if is_standard(node, "Slice") else None
    if first is None or first.start != 0:
        return False
    readers = dict.fromkeys(use.node for use in first.source.uses() if use.node.graph is graph)
    slices = [each for each in readers if is_standard(each, "Slice") and not is_boundary(each.outputs[0])]
    found = [(part, each) for each in slices if (part := part_of(each.outputs[0], known)) is not None]
    alike = [(part, each) for part, each in found if (part.axis, part.step) == (first.axis, 1)]
    parts = sorted(alike, key=lambda each: each[0][2:4])
    if len(parts) < 2 or not covers([part for part, _ in parts], known):
        return False
    put_split(graph, first.source, first.axis, [(part.end - part.start, each) for part, each in parts])
    return True


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
