"""Shapes of all tensors of a model, and small integer contents, in open dimensions or in numbers.

ONNX's own shape inference knows numbers and names. TorchScript exports compute sizes in the graph
(``Shape``, ``Gather``, ``Mul``, ``Concat``, …): this needs sums and products of names, and the
contents of small tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from htp_export.shapes.inference import Inference
from htp_export.shapes.known import Fact, Shape
from htp_export.shapes.sizes import is_unnamed, product


class Symbolic(Inference):
    """Types, shapes and small contents of the tensors of one graph and its subgraphs.

    They describe the graph at the time of the call. A tensor that a pass adds later is looked up
    when it is first needed. Anything that cannot be inferred is unknown, and raises no error.

    Args:
        graph: A graph of a model, in topological order.
        opsets: Domain → version, for a subgraph, which has no opset imports of its own.
        functions: The functions of the model.
        sizes: Open dimension → number that replaces it.
        shapes: Input name → shape that replaces the shape in the graph.

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
        """A value of the same name with the type and shape in the file, completed by inference."""
        is_typed = value.type is not None and value.dtype != ir.DataType.UNDEFINED
        kind = value.type if is_typed else self.type(value)
        shape = None
        if kind is None or isinstance(kind, ir.TensorType):
            shape = self.shape(value)
        written = None if shape is None else written_shape(shape)
        return ir.Value(name=value.name, type=kind, shape=written)

    def bytes_of(self, value: ir.Value) -> int | None:
        """The bytes of a tensor; None if its size is not a number, and for strings."""
        shape = self.shape(value)
        dtype = self.dtype(value)
        if shape is None or dtype in (None, ir.DataType.STRING, ir.DataType.UNDEFINED):
            return None
        elements = product(shape)
        if not isinstance(elements, int):
            return None
        return math.ceil(elements * dtype.itemsize)


def written_shape(shape: Shape) -> ir.Shape:
    """A shape as a file holds it: numbers, names, expressions of names, and None for unknown ones.

    Examples:
        >>> from htp_export.shapes.sizes import symbol, unnamed
        >>> print(written_shape((symbol("batch") * 2, 3, unnamed("x", 0))))
        [2*batch,3,None]
    """
    dims: list[int | str | None] = []
    for dim in shape:
        if isinstance(dim, int):
            dims.append(dim)
        else:
            dims.append(None if is_unnamed(dim) else str(dim))
    return ir.Shape(dims)
