"""Numbers for the sizes that a model leaves open, so that what depends on sizes can be recognised."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from htp_export.runtime.bound_shapes import infer_bound
from htp_export.runtime.inputs import Inputs
from htp_export.shapes.symbolic import Symbolic

__all__ = ["inferred_with_sizes"]

_LENGTH = 8  # of texts
_SIDE = 64  # of images
_TIME = {2: 8000, 3: 128}  # of sound: samples of a signal, frames of a spectrum


def inferred_with_sizes(model: ir.Model) -> Symbolic | None:
    """What is known of a model's tensors if its open sizes fit its kind of inputs: batches of one.

    Args:
        model: The model. It is not changed, and its weights are not read.

    Returns:
        Shapes in numbers; None where no size is open.

    Examples:
        >>> relu = ir.node("Relu", [ir.val("x", ir.DataType.INT64, ["batch", "length"])], outputs=[ir.val("y")])
        >>> graph = ir.Graph(relu.inputs, relu.outputs, nodes=[relu], opset_imports={"": 20}, name="g")
        >>> inferred_with_sizes(ir.Model(graph, ir_version=10)).shape(relu.outputs[0])
        (1, 8)
    """
    inputs = {each.name: each for each in Inputs.of(model)}
    bound = Inputs.of(model).bind().shapes
    if all(shape is None or None not in shape for shape in bound.values()):
        return None
    shapes = {name: _sizes(inputs[name].type, shape) for name, shape in bound.items() if shape is not None}
    return infer_bound(model, shapes)


def _sizes(dtype: ir.DataType | None, shape: Sequence[int | None]) -> tuple[int, ...]:
    open_size = _LENGTH
    if dtype is not None and dtype.is_floating_point():
        open_size = _SIDE if len(shape) >= 4 else _TIME.get(len(shape), _LENGTH)
    return tuple(size if size is not None else 1 if place == 0 else open_size for place, size in enumerate(shape))
