"""Shapes of all tensors, and contents of small integer ones, in terms of the model's free dimensions.

ONNX's own shape inference knows numbers and names; what TorchScript exports compute of sizes (``Shape``, ``Gather``,
``Mul``, ``Concat``, …) needs sums and products of names, and what small tensors hold. This is one walk over a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir

from htp_export.passes.content_rules import CONTENT_RULES, constant_contents
from htp_export.passes.known import Contents, Shape
from htp_export.passes.shape_rules import SHAPE_RULES
from htp_export.passes.sizes import Dim, symbol
from htp_export.passes.type_rules import result_type

__all__ = ["Symbolic"]


class Symbolic:
    """What is known of the tensors of one graph.

    It is made of the graph as it is. A tensor that a pass adds is looked at when it is first asked for.

    Args:
        graph: The main graph of a model, in topological order.

    Examples:
        >>> import onnx_ir as ir
        >>> x = ir.val("x", ir.DataType.FLOAT, ["batch", 3])
        >>> size = ir.node("Shape", [x])
        >>> graph = ir.Graph([x], size.outputs, nodes=[size], opset_imports={"": 17})
        >>> [str(dim) for dim in Symbolic(graph).contents(size.outputs[0])]
        ['batch', '3']
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.opset = graph.opset_imports.get("", 1)
        self._shapes: dict[ir.Value, Shape | None] = {}
        self._contents: dict[ir.Value, Contents | None] = {}
        self._types: dict[ir.Value, ir.DataType | None] = {}
        for node in graph:
            self._visit(node)

    def shape(self, value: ir.Value | None) -> Shape | None:
        """The shape of a tensor, or None where not even its rank is known."""
        if value is None:
            return None
        if value not in self._shapes:
            self._shapes[value] = self._declared(value)
        return self._shapes[value]

    def rank(self, value: ir.Value | None) -> int | None:
        shape = self.shape(value)
        return None if shape is None else len(shape)

    def contents(self, value: ir.Value | None) -> Contents | None:
        """What a small tensor of integers or booleans holds, or None where it is not known."""
        if value is None:
            return None
        if value not in self._contents:
            self._contents[value] = constant_contents(value)
        return self._contents[value]

    def constant(self, value: ir.Value | None) -> list[int] | None:
        """The contents of a tensor of integers as a flat list, if they are the same in every run."""
        contents = self.contents(value)
        if contents is None:
            return None
        flat = contents.reshape(-1).tolist()
        return flat if all(isinstance(item, int) for item in flat) else None

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        """The element type of a tensor, also where the file does not say it; None where it is not known."""
        if value is None:
            return None
        if value.const_value is not None:
            return value.const_value.dtype
        return value.dtype or self._types.get(value)

    def _visit(self, node: ir.Node) -> None:
        if any(value.type is None for value in node.outputs):
            self._types.update(dict.fromkeys(node.outputs, result_type(node, self)))
        rule = SHAPE_RULES.get(node.op_type) if node.domain == "" else None
        shapes = _safely(rule, node, self)
        for place, output in enumerate(node.outputs):
            found = shapes[place] if shapes is not None and place < len(shapes) else None
            declared = self._declared(output)
            if found is None:
                self._shapes[output] = declared
            else:
                same_rank = declared is not None and len(declared) == len(found)
                self._shapes[output] = tuple(
                    dim if dim is not None else declared[k] if declared and same_rank else _unnamed(output, k)
                    for k, dim in enumerate(found)
                )
        content_rule = CONTENT_RULES.get(node.op_type) if node.domain == "" and len(node.outputs) == 1 else None
        contents = _safely(content_rule, node, self)
        if contents is not None:
            self._contents[node.outputs[0]] = contents

    def _declared(self, value: ir.Value) -> Shape | None:
        shape = value.const_value.shape if value.const_value is not None else value.shape
        if shape is None:
            return None
        return tuple(
            dim if isinstance(dim, int) else symbol(dim.value) if dim.value is not None else _unnamed(value, place)
            for place, dim in enumerate(shape)
        )


def _unnamed(value: ir.Value, place: int) -> Dim:
    return symbol(f"{value.name or id(value)}#{place}")


def _safely(rule: Callable[[ir.Node, Symbolic], Any] | None, node: ir.Node, known: Symbolic) -> Any:
    """What a rule says; nothing for a node that is not as its operator's definition has it."""
    if rule is None:
        return None
    try:
        return rule(node, known)
    except (ArithmeticError, IndexError, KeyError, TypeError, ValueError):  # broken nodes are left to the runtime
        return None
