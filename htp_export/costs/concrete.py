"""A model with numbers for the sizes that it leaves open, so that what depends on sizes can be computed."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from htp_export.model.tagged import TaggedModel
from htp_export.runtime.inputs import Inputs

__all__ = ["with_sizes"]

_LENGTH = 8  # of texts
_SIDE = 64  # of images
_TIME = {2: 8000, 3: 128}  # of sound: samples of a signal, frames of a spectrum


def with_sizes(tagged: TaggedModel) -> TaggedModel:
    """The model where all inputs have sizes, else a copy with some that fit its kind of inputs: batches of one.

    Args:
        tagged: The model. It is not changed, and its weights are neither copied nor read.

    Examples:
        >>> import onnx_ir as ir
        >>> from htp_export.model.tagged import load
        >>> relu = ir.node("Relu", [ir.val("x", ir.DataType.INT64, ["batch", "length"])], outputs=[ir.val("y")])
        >>> graph = ir.Graph(relu.inputs, relu.outputs, nodes=[relu], opset_imports={"": 20}, name="g")
        >>> with_sizes(load(ir.Model(graph, ir_version=10))).model.graph.outputs[0].shape
        Shape([1, 8])
    """
    shapes = Inputs.of(tagged.model).bind().shapes
    if all(shape is None or None not in shape for shape in shapes.values()):
        return tagged
    copy = tagged.model.clone()
    for value in copy.graph.inputs:
        shape = shapes.get(str(value.name))
        if shape is not None:
            value.shape = _sizes(value, shape)
    for node in copy.graph.all_nodes():
        for value in node.outputs:
            value.shape = None
    ShapeInferencePass(check_type=False, strict_mode=False, data_prop=True)(copy)
    return TaggedModel(copy, tagged.hierarchy, tagged.source)


def _sizes(value: ir.Value, shape: Sequence[int | None]) -> ir.Shape:
    floating = value.dtype is not None and value.dtype.is_floating_point()
    open_size = _LENGTH
    if floating:
        open_size = _SIDE if len(shape) >= 4 else _TIME.get(len(shape), _LENGTH)
    return ir.Shape([size if size is not None else 1 if place == 0 else open_size for place, size in enumerate(shape)])
