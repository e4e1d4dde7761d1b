"""What patterns ask of a graph: shapes, small constants, which are the same in every run."""

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
"""Constants of more elements are not read: they are weights, and no axes, scales or masks that a pattern looks at."""

Shape: TypeAlias = tuple[int | str | None, ...]


class GraphFacts:
    """A tagged model as patterns look at it; each answer costs the same however large the model is.

    Large tensors are not read.

    Args:
        tagged: The model.
        inferred: Types and shapes of its tensors; those that it says itself, completed, where it is
            None.

    Attributes:
        nodes: Every node, in subgraphs and functions too.
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
        """The dimensions of a value, each a number or a name or None; None where the rank is not known."""
        tensor = None if value is None else value.const_value
        if tensor is not None:
            return tuple(int(size) for size in tensor.shape.numpy())
        written = value.shape if value is not None and self._inferred is None else None
        if written is None:
            shape = (self._inferred or self.tagged.inferred).shape(value)
            written = None if shape is None else written_shape(shape)
        return (
            None
            if written is None
            else tuple(s if isinstance(s, int) else s.value for s in written.dims)
        )

    def rank(self, value: ir.Value | None) -> int | None:
        """How many dimensions a value has; None where that is not known."""
        shape = self.shape(value)
        return None if shape is None else len(shape)

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        """The element type of a value; None where it is not known."""
        written = None if value is None else value.dtype
        return (
            written
            if written is not None
            else (self._inferred or self.tagged.inferred).dtype(value)
        )

    def array(self, value: ir.Value | None) -> Array | None:
        """The elements of a small constant, be it an initializer or a ``Constant``; None for anything else."""
        tensor = None if value is None else self._tensor(value)
        if tensor is None or tensor.size > _MOST_ELEMENTS or tensor.dtype == ir.DataType.STRING:
            return None
        try:
            return np.asarray(tensor.numpy())
        except (OSError, FileError):  # the file of its external data is not there
            return None

    def scalar(self, value: ir.Value | None) -> float | None:
        """The number that a constant of one element holds; None for anything else."""
        array = self.array(value)
        return (
            float(array.reshape(()))
            if array is not None and array.size == 1 and array.dtype.kind in "fiu"
            else None
        )

    def is_constant(self, value: ir.Value | None) -> bool:
        """Whether a value is the same in every run: a weight, a constant, or computed from these."""
        if value is None:
            return False
        if value.is_graph_input() and value.graph is self.tagged.model.graph:
            return False  # whoever runs the model may give another one
        return (
            self.tagged.index.initializer(value) is not None or value in self.tagged.index.constant
        )

    def with_constant(self, node: ir.Node) -> tuple[ir.Value, ir.Value] | None:
        """What a node of two inputs reads: the one that varies, then the constant; None where it is otherwise."""
        if len(node.inputs) != 2:
            return None
        first, second = node.inputs
        if first is None or second is None:
            return None
        if self.is_constant(second):
            return None if self.is_constant(first) else (first, second)
        return (second, first) if self.is_constant(first) else None

    def module_of(self, nodes: Sequence[ir.Node]) -> str:
        """The deepest module above all owners of some nodes; the root where they have none."""
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
