"""Shapes of a model's tensors in numbers, for inputs of given shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from htp_export.runtime.inputs import Inputs
from htp_export.shapes.symbolic import Symbolic

__all__ = ["infer_bound"]


def infer_bound(model: ir.Model, shapes: Mapping[str, Sequence[int]]) -> Symbolic:
    """Return what is known of the tensors of a model if its inputs have given shapes; no weights are read.

    Examples:
        >>> relu = ir.node("Relu", [ir.val("x", ir.DataType.FLOAT, ["batch", 4])], outputs=[ir.val("y")])
        >>> graph = ir.Graph(relu.inputs, relu.outputs, nodes=[relu], opset_imports={"": 20}, name="g")
        >>> known = infer_bound(ir.Model(graph, ir_version=10), {"x": (2, 4)})
        >>> known.shape(relu.outputs[0]), known.bytes_of(relu.outputs[0])
        ((2, 4), 32)
    """
    sizes = Inputs.of(model).bind(shapes=shapes).sizes
    numbers = {name: tuple(map(int, shape)) for name, shape in shapes.items()}
    return Symbolic(model.graph, functions=model.functions, sizes=sizes, shapes=numbers)
