"""Shapes of all tensors of a model, and contents of small integer ones: in terms of its open dimensions, or in numbers.

ONNX's own shape inference knows numbers and names; what TorchScript exports compute of sizes
(``Shape``, ``Gather``, ``Mul``, ``Concat``, …) needs sums and products of names, and what small
tensors hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from htp_export.shapes.inference import Inference
from htp_export.shapes.known import Fact, Shape
from htp_export.shapes.sizes import is_unnamed, product


class Symbolic(Inference):
    """What is known of the tensors of one graph, and of the subgraphs in it.

    It is made of the graph as it is. A tensor that a pass adds is looked at when it is first asked
    for. What cannot be inferred is not known; no error is raised for it.

    Args:
        graph: A graph of a model, in topological order.
        opsets: Domain → version, where the graph does not say it, as a subgraph.
        functions: The functions of the model.
        sizes: Name of an open dimension → size, for those that are to be numbers.
        shapes: Input name → shape, for inputs that are to have another one than the graph says.

    Examples:
        >>> import onnx_ir as ir
        >>> x = ir.val("x", ir.DataType.FLOAT, ["batch", 3])
        >>> size = ir.node("Shape", [x])
        >>> graph = ir.Graph([x], size.outputs, nodes=[size], opset_imports={"": 17})
        >>> [str(dim) for dim in Symbolic(graph).contents(size.outputs[0])]
        ['batch', '3']
        >>> Symbolic(graph, sizes={"batch": 2}).constant(size.outputs[0])
        [2, 3]
    """

    def __init__(
        self,
        graph: ir.Graph,
        opsets: Mapping[str, int] | None = None,
        functions: Mapping[ir.OperatorIdentifier, ir.Function] | None = None,
        *,
        sizes: Mapping[str, int] | None = None,
        shapes: Mapping[str, Shape] | None = None,
    ) -> None:
        super().__init__(graph.opset_imports or opsets or {}, functions, sizes)
        for value in graph.inputs:
            shape = (shapes or {}).get(str(value.name))
            if shape is not None:
                self.state(value, Fact(value.type, shape))
        self.walk(graph)

    def described(self, value: ir.Value) -> ir.Value:
        """A value of the same name with the type and shape that are known: what the file says, completed."""
        kind = (
            value.type
            if value.type is not None and value.dtype != ir.DataType.UNDEFINED
            else self.type(value)
        )
        shape = self.shape(value) if kind is None or isinstance(kind, ir.TensorType) else None
        return ir.Value(
            name=value.name, type=kind, shape=None if shape is None else written_shape(shape)
        )

    def bytes_of(self, value: ir.Value) -> int | None:
        """The size of a tensor; None where it is not known as a number, and for texts."""
        shape, dtype = self.shape(value), self.dtype(value)
        elements = None if shape is None else product(shape)
        if not isinstance(elements, int) or dtype in (
            None,
            ir.DataType.STRING,
            ir.DataType.UNDEFINED,
        ):
            return None
        return math.ceil(elements * dtype.itemsize)


def written_shape(shape: Shape) -> ir.Shape:
    """A shape as a file has it: numbers, names, expressions of names, and nothing for what is not known.

    Examples:
        >>> from htp_export.shapes.sizes import symbol, unnamed
        >>> print(written_shape((symbol("batch") * 2, 3, unnamed("x", 0))))
        [2*batch,3,None]
    """
    return ir.Shape(
        [dim if isinstance(dim, int) else None if is_unnamed(dim) else str(dim) for dim in shape]
    )
