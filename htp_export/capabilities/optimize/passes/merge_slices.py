"""Consecutive slices, slices that cover a tensor, and slices that are concatenated again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import onnx_ir as ir

from htp_export.capabilities.optimize.registry import absorbed, integers, register
from htp_export.editing.editing import is_boundary, remove_unused, replace, replace_with
from htp_export.model.neighbours import producer_of
from htp_export.shapes.known import normalized
from htp_export.shapes.operator_kinds import is_standard
from htp_export.shapes.operators.indexing import slice_bounds
from htp_export.shapes.symbolic import Symbolic

_MOST_INDICES = 1 << 14
"""Of a ``Gather`` in place of slices: a constant of 128 KiB at most, which costs less than the copies that it saves."""


@register("merge_slices", level="exact")
class MergeSlices(ir.passes.InPlacePass):
    """Makes one node of slices: of two in a row, of all parts of a tensor, and of parts that are put together again.

    Two slices in a row that cut other dimensions are one. Slices of one tensor that are joined
    along the same dimension (``torch.roll``) are one ``Gather``. Slices that leave nothing of a
    tensor out are one ``Split``, but for those that modules give: they stay results of nodes of
    their own.
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


def _bounds(node: ir.Node | None, known: Symbolic) -> dict[int, tuple[int, int, int]] | None:
    """Start, end and step for each dimension that a ``Slice`` cuts, if they are constant inputs of it."""
    is_slice = node is not None and is_standard(node, "Slice") and len(node.inputs) > 2
    return slice_bounds(node, known) if node is not None and is_slice else None


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
        sizes = [
            size for each in shapes if each is not None and isinstance(size := each[axis], int)
        ]
        return (
            Part(source, axis, sum(sizes[:-1]), sum(sizes), 1)
            if len(sizes) == len(shapes)
            else None
        )
    bounds = _bounds(node, known)
    if bounds is None or len(bounds) != 1:
        return None
    ((axis, (start, end, step)),) = bounds.items()
    if not isinstance(size := shape[axis], int):
        return None
    # Python clamps the others as ONNX
    return Part(source, axis, *slice(max(start, -size), end, step).indices(size))


def covers(parts: Sequence[Part], known: Symbolic) -> bool:
    """Whether parts, in this order, are all of one dimension of one tensor, without gaps and none of them empty."""
    source, axis = parts[0][:2]
    edges, shape = [0, *(part.end for part in parts)], known.shape(source)
    alike = all(part.source is source and (part.axis, part.step) == (axis, 1) for part in parts)
    apart = [part.start for part in parts] == edges[:-1] and all(
        part.start < part.end for part in parts
    )
    return alike and apart and shape is not None and edges[-1] == shape[axis]


def _merge_in_a_row(node: ir.Node, known: Symbolic) -> bool:
    """Make one ``Slice`` of two in a row, if all that read the first one's result are slices of other dimensions."""
    outer = _bounds(node, known)
    between = node.inputs[0] if outer is not None else None
    first = producer_of(between, "Slice")
    inner = _bounds(first, known)
    if outer is None or between is None or first is None or inner is None:
        return False
    cuts = [_bounds(use.node, known) for use in between.uses()]
    if is_boundary(between) or between.is_graph_output():
        return False
    if not all(cut is not None and cut.keys().isdisjoint(inner) for cut in cuts):
        return False
    bounds = inner | outer
    starts, ends, steps = zip(*bounds.values(), strict=True)
    columns = {"starts": starts, "ends": ends, "axes": [*bounds], "steps": steps}
    replace(
        node,
        [
            ir.node(
                "Slice",
                [first.inputs[0], *(integers(node, n, what) for what, n in columns.items())],
            )
        ],
    )
    return True


def _gather(node: ir.Node, known: Symbolic) -> bool:
    """Make one ``Gather`` of a ``Concat`` of slices of one tensor."""
    if not is_standard(node, "Concat") or len(node.inputs) < 2:
        return False
    rank = known.rank(node.outputs[0])
    axis = None if rank is None else normalized(node.attributes["axis"].as_int(), rank)
    parts = [part_of(value if absorbed(value, "Slice") else None, known) for value in node.inputs]
    (source, *others), found = (
        {part and part.source for part in parts},
        [part for part in parts if part is not None],
    )
    if others or any(part.axis != axis for part in found):
        return False
    indices = [index for part in found for index in range(*part[2:])]
    if not 0 < len(indices) <= _MOST_INDICES:
        return False
    replace(node, [ir.node("Gather", [source, integers(node, indices, "indices")], {"axis": axis})])
    return True


def _split(graph: ir.Graph, node: ir.Node, known: Symbolic) -> bool:
    """Make one ``Split`` of consecutive slices that cover a tensor, the first of which is a node."""
    first = part_of(node.outputs[0], known) if is_standard(node, "Slice") else None
    if first is None or first.start != 0:
        return False
    readers = dict.fromkeys(use.node for use in first.source.uses() if use.node.graph is graph)
    slices = [
        each for each in readers if is_standard(each, "Slice") and not is_boundary(each.outputs[0])
    ]
    found = [
        (part, each) for each in slices if (part := part_of(each.outputs[0], known)) is not None
    ]
    alike = [(part, each) for part, each in found if (part.axis, part.step) == (first.axis, 1)]
    parts = sorted(alike, key=lambda each: each[0][2:4])
    if len(parts) < 2 or not covers([part for part, _ in parts], known):
        return False
    put_split(
        graph, first.source, first.axis, [(part.end - part.start, each) for part, each in parts]
    )
    return True


def put_split(
    graph: ir.Graph, source: ir.Value, axis: int, parts: Sequence[tuple[int, ir.Node]]
) -> None:
    """Replace nodes by one ``Split`` of a tensor: the size of each part, and the node whose output it takes over."""
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
