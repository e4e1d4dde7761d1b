"""Operators that make one element of those along axes."""

from __future__ import annotations

from collections.abc import Sequence

from htp_export.shapes.known import Contents, Dims, Known, Operation, axes_of, normalized, objects
from htp_export.shapes.registry import content_rule, shape_rule
from htp_export.shapes.sizes import product

_REDUCTIONS = """
ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare
""".split()  # noqa: SIM905 - as a list of strings it would fill the screen


@shape_rule(*_REDUCTIONS)
def _reduce(node: Operation, known: Known) -> Sequence[Dims | None] | None:
    shape, axes = known.shape(node.inputs[0]), axes_of(node, known)
    if shape is None or (axes is None and len(node.inputs) > 1 and node.inputs[1] is not None):
        return None
    if not axes:
        if node.attributes.get_int("noop_with_empty_axes", 0):
            return [shape]
        axes = list(range(len(shape)))
    keep, gone = node.attributes.get_int("keepdims", 1), {normalized(axis, len(shape)) for axis in axes}
    return [[1 if place in gone else dim for place, dim in enumerate(shape) if keep or place not in gone]]


@content_rule("ReduceProd")
def _product_contents(node: Operation, known: Known) -> Contents | None:
    contents = known.contents(node.inputs[0])
    axes = axes_of(node, known)
    if contents is None or contents.ndim != 1 or (axes is not None and [normalized(axis, 1) for axis in axes] != [0]):
        return None
    return objects(product(contents), [1] if node.attributes.get_int("keepdims", 1) else [])
