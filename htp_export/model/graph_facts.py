"""Facts about a graph that patterns need: shapes, small constants, and which values are constant."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from htp_export.errors import FileError
from htp_export.format import tags
from htp_export.model.tagged import TaggedModel
from htp_export.shapes.known import constant_tensor
from htp_export.shapes.operator_kinds import is_standard
from htp_export.shapes.symbolic import Symbolic, written_shape

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]

_MOST_ELEMENTS = 1024
"""Elements of a constant that is read, at most: axes, scales and masks of patterns have fewer."""

Shape: TypeAlias = tuple[int | str | None, ...]


class GraphFacts:
    """The facts about a tagged model that patterns need; each answer takes constant time.

    Large tensors are not read.

    Args:
        tagged: The model.
        inferred: Types and shapes of its tensors; None for those in the model, completed.

    Attributes:
        nodes: Every node, also in subgraphs and functions.
        by_op: ONNX operator → the nodes that compute it, in order.

    Examples:
        >>> import onnx_ir as ir
        >>> from htp_export.model.tagged import load
        >>> relu = ir.node("Relu", [ir.val("x", ir.DataType.FLOAT, [2, 3])])
        >>> facts = GraphFacts(load(ir.Model(ir.Graph(relu.inputs, relu.outputs, nodes=[relu]), ir_version=10)))
        >>> facts.shape(relu.inputs[0]), facts.nodes_of("Relu") == [relu]
        ((2, 3), True)
    """

    def __init__(self, tagged: TaggedModel, inferred: Symbolic | None = None) -> None:
        self.tagged = tagged
        self._inferred = inferred
        self.nodes: Sequence[ir.Node] = tagged.nodes
        by_op: defaultdict[str, list[ir.Node]] = defaultdict(list)
        for node in self.nodes:
            if is_standard(node):
                by_op[node.op_type].append(node)
        self.by_op: Mapping[str, Sequence[ir.Node]] = dict(by_op)

    def nodes_of(self, *ops: str) -> list[ir.Node]:
        """The nodes that compute one of some operators, operator by operator."""
        return [node for op in ops for node in self.by_op.get(op, ())]

    def shape(self, value: ir.Value | None) -> Shape | None:
        """The dimensions of a value, each a number, a name or None; None if the rank is unknown."""
        tensor = None if value is None else value.const_value
        if tensor is not None:
            return tuple(int(size) for size in tensor.shape.numpy())
        written = value.shape if value is not None and self._inferred is None else None
        if written is None:
            shape = (self._inferred or self.tagged.inferred).shape(value)
            if shape is None:
                return None
            written = written_shape(shape)
        return tuple(size if isinstance(size, int) else size.value for size in written.dims)

    def rank(self, value: ir.Value | None) -> int | None:
        """The number of dimensions of a value; None if unknown."""
        shape = self.shape(value)
        return None if shape is None else len(shape)

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        """The element type of a value; None if unknown."""
        written = None if value is None else value.dtype
        if written is not None:
            return written
        return (self._inferred or self.tagged.inferred).dtype(value)

    def array(self, value: ir.Value | None) -> Array | None:
        """The elements of a small constant, also of a ``Constant`` node; None for any other value."""
        tensor = None if value is None else self._tensor(value)
        if tensor is None or tensor.size > _MOST_ELEMENTS or tensor.dtype == ir.DataType.STRING:
            return None
        try:
            return np.asarray(tensor.numpy())
        except (OSError, FileError):  # the file of its external data is not there
            return None

    def scalar(self, value: ir.Value | None) -> float | None:
        """The number of a constant with one element; None for any other value."""
        array = self.array(value)
        if array is None or array.size != 1 or array.dtype.kind not in "fiu":
            return None
        return float(array.reshape(()))

    def is_constant(self, value: ir.Value | None) -> bool:
        """Whether a value is the same in every run: a weight, or computed from constants."""
        if value is None:
            return False
        if value.is_graph_input() and value.graph is self.tagged.model.graph:
            return False  # an initializer that is an input, too: a run may replace it
        return (
            self.tagged.index.initializer(value) is not None or value in self.tagged.index.constant
        )

    def with_constant(self, node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
        """The variable input of a node with two inputs, then the constant one; None otherwise."""
        if len(node.inputs) != 2:
            return None
        first, second = node.inputs
        if first is None or second is None:
            return None
        if self.is_constant(second):
            return None if self.is_constant(first) else (first, second)
        return (second, first) if self.is_constant(first) else None

    def module_of(self, nodes: Sequence[ir.Node]) -> str:
        """The innermost module around all owners of some nodes; the root if they have none."""
        owners = self.tagged.index.owners
        return tags.common_ancestor(
            dict.fromkeys(owner for node in nodes for owner in owners[node])
        )

    def _tensor(self, value: ir.Value) -> ir.TensorProtocol | None:
        source = self.tagged.index.initializer(value)
        if source is not None:
            is_input = source.is_graph_input() and source.graph is self.tagged.model.graph
            return None if is_input else source.const_value
        return constant_tensor(value)
