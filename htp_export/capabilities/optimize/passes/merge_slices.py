"""Merging of consecutive slices, of slices that cover a tensor, and of concatenated slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import onnx_ir as ir

from htp_export.capabilities.optimize.registry import absorbed, integers, register, shapes_in
from htp_export.editing.editing import is_boundary, remove_unused, replace, replace_with
from htp_export.model.neighbours import producer_of
from htp_export.shapes.known import normalized
from htp_export.shapes.operator_kinds import is_standard
from htp_export.shapes.operators.indexing import slice_bounds
from htp_export.shapes.symbolic import Symbolic

_MOST_INDICES = 1 << 14
"""Indices of a ``Gather`` that replaces slices: 128 KiB, less than the copies that it saves."""


@register("merge_slices", level="exact")
class MergeSlices(ir.passes.InPlacePass):
    """Merges consecutive slices, all slices of a tensor, and slices that are concatenated again.

    Two consecutive slices of different axes become one. Slices of one tensor that are concatenated
    along the same axis (``torch.roll``) become one ``Gather``. Slices that cover a tensor become
    one ``Split``, except for outputs of modules, which stay results of their own nodes.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        if not any(is_standard(node, "Slice") for node in graph):
            return ir.passes.PassResult(model, modified=False)
        known = shapes_in(graph)
        modified = False
        for node in graph:
            modified |= _merge_in_a_row(node, known) or _gather(node, known)
        for node in graph:
            modified |= _split(graph, node, known)
        if modified:
            remove_unused(model)
        return ir.passes.PassResult(model, modified)


def _bounds(node: ir.Node | None, known: Symbolic) -> dict[int, tuple[int, int, int]] | None:
    """Start, end and step for each axis that a ``Slice`` cuts; None if they are computed."""
    is_slice = node is not None and is_standard(node, "Slice") and len(node.inputs) > 2
    return slice_bounds(node, known) if node is not None and is_slice else None


class Part(NamedTuple):
    """A part of one axis of a tensor, with bounds from the front."""

    source: ir.Value
    axis: int
    start: int
    end: int
    step: int


def part_of(value: ir.Value | None, known: Symbolic) -> Part | None:
    """The part of another tensor that a ``Slice`` or a ``Split`` returns.

    None if it cuts several axes, or an axis of unknown size.
    """
    node = producer_of(value, "Slice", "Split")
    source = node.inputs[0] if node is not None else None
    shape = known.shape(source)
    if node is None or source is None or shape is None:
        return None
    if node.op_type == "Split":
        axis = normalized(node.attributes.get_int("axis", 0), len(shape))
        return _part_of_split(source, axis, node, value, known)
    bounds = _bounds(node, known)
    if bounds is None or len(bounds) != 1:
        return None
    [(axis, (start, end, step))] = bounds.items()
    size = shape[axis]
    if not isinstance(size, int):
        return None
    # Python clamps the other bounds as ONNX does
    return Part(source, axis, *slice(max(start, -size), end, step).indices(size))


def _part_of_split(
    source: ir.Value, axis: int, node: ir.Node, value: ir.Value | None, known: Symbolic
) -> Part | None:
    """The part of an output of a ``Split``; None if sizes up to it are unknown."""
    start = end = 0
    for output in node.outputs:
        shape = known.shape(output)
        size = shape[axis] if shape is not None else None
        if not isinstance(size, int):
            return None
        start, end = end, end + size
        if output is value:
            break
    return Part(source, axis, start, end, 1)


def covers(parts: Sequence[Part], known: Symbolic) -> bool:
    """Whether parts are, in this order, all of one axis of one tensor; no part is empty."""
    source, axis = parts[0].source, parts[0].axis
    end = 0
    for part in parts:
        if part.source is not source or (part.axis, part.step) != (axis, 1):
            return False
        if part.start != end or part.end <= part.start:
            return False
        end = part.end
    shape = known.shape(source)
    return shape is not None and end == shape[axis]


def _merge_in_a_row(node: ir.Node, known: Symbolic) -> bool:
    """Merge two consecutive slices, if all consumers of the first are slices of other axes."""
    outer = _bounds(node, known)
    between = node.inputs[0] if outer is not None else None
    first = producer_of(between, "Slice")
    inner = _bounds(first, known)
    if outer is None or between is None or first is None or inner is None:
        return False
    if is_boundary(between) or between.is_graph_output():
        return False
    for use in between.uses():
        bounds = _bounds(use.node, known)
        if bounds is None or not bounds.keys().isdisjoint(inner):
            return False
    both = inner | outer
    starts, ends, steps = zip(*both.values(), strict=True)
    inputs = [
        first.inputs[0],
        integers(node, starts, "starts"),
        integers(node, ends, "ends"),
        integers(node, [*both], "axes"),
        integers(node, steps, "steps"),
    ]
    replace(node, [ir.node("Slice", inputs)])
    return True


def _gather(node: ir.Node, known: Symbolic) -> bool:
    """Replace a ``Concat`` of slices of one tensor by a ``Gather``."""
    if not is_standard(node, "Concat") or len(node.inputs) < 2:
        return False
    rank = known.rank(node.outputs[0])
    axis = None if rank is None else normalized(node.attributes["axis"].as_int(), rank)
    source: ir.Value | None = None
    indices: list[int] = []
    for value in node.inputs:
        part = part_of(value, known) if absorbed(value, "Slice") else None
        if part is None or part.axis != axis or part.source is not (source or part.source):
            return False
        source = part.source
        indices += range(part.start, part.end, part.step)
        if len(indices) > _MOST_INDICES:
            return False
    if not indices:
        return False
    replace(node, [ir.node("Gather", [source, integers(node, indices, "indices")], {"axis": axis})])
    return True


def _split(graph: ir.Graph, node: ir.Node, known: Symbolic) -> bool:
    """Replace consecutive slices that cover a tensor by a ``Split``.

    ``node`` is the first of them.
    """
    first = part_of(node.outputs[0], known) if is_standard(node, "Slice") else None
    if first is None or first.start != 0:
        return False
    found: list[tuple[Part, ir.Node]] = []
    consumers = dict.fromkeys(use.node for use in first.source.uses() if use.node.graph is graph)
    for consumer in consumers:
        if not is_standard(consumer, "Slice") or is_boundary(consumer.outputs[0]):
            continue
        part = part_of(consumer.outputs[0], known)
        if part is not None and (part.axis, part.step) == (first.axis, 1):
            found.append((part, consumer))
    found.sort(key=lambda pair: (pair[0].start, pair[0].end))
    if len(found) < 2 or not covers([part for part, _ in found], known):
        return False
    sizes = [(part.end - part.start, consumer) for part, consumer in found]
    put_split(graph, first.source, first.axis, sizes)
    return True


def put_split(
    graph: ir.Graph, source: ir.Value, axis: int, parts: Sequence[tuple[int, ir.Node]]
) -> None:
    """Replace nodes by one ``Split`` of a tensor.

    ``parts``: the size of each part, and the node whose output it replaces.
    """
    nodes = {node for _, node in parts}
    earliest = next(node for node in graph if node in nodes)
    outputs = [
        ir.Value(type=node.outputs[0].type, shape=node.outputs[0].shape) for _, node in parts
    ]
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
        if replace_with(old, new):
            graph.remove(node, safe=True)
            new.name = name
