"""Tensors that are equal because nothing but changes of shape lies between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir

# The result has the elements of the first input, in the same order.
_RESHAPES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"})


def equal_tensors(nodes: Iterable[ir.Node]) -> dict[ir.Value, tuple[ir.Value, ...]]:
    """Tensors of a graph that are equal whatever the inputs are, although different nodes make them.

    A tensor that is reshaped, and then gets a shape back that it had before, is the tensor that had this shape.

    Args:
        nodes: The nodes, producers before consumers.

    Returns:
        Each such tensor → the others, in the order in which they are made.

    Examples:
        >>> import onnx_ir as ir
        >>> x, shape = ir.val("x", ir.DataType.FLOAT, [2, 3]), ir.val("shape", ir.DataType.INT64, [1])
        >>> flat, back = (ir.val(name, ir.DataType.FLOAT, dims) for name, dims in (("flat", [6]), ("back", [2, 3])))
        >>> nodes = [ir.node("Reshape", [x, shape], outputs=[flat]), ir.node("Reshape", [flat, shape], outputs=[back])]
        >>> [(value.name, [other.name for other in others]) for value, others in equal_tensors(nodes).items()]
        [('x', ['back']), ('back', ['x'])]
    """
    source: dict[ir.Value, ir.Value] = {}
    groups: dict[tuple[ir.Value, tuple[str, ...]], list[ir.Value]] = {}
    for node in nodes:
        source_value = node.inputs[0] if node.op_type in _RESHAPES and node.inputs else None
        if source_value is None:
            continue
        first = source.setdefault(source_value, source_value)
        if first is source_value and (sizes := _sizes(source_value)) is not None:
            groups.setdefault((source_value, sizes), [source_value])
        result = node.outputs[0]
        source[result] = first
        if (sizes := _sizes(result)) is not None:
            groups.setdefault((first, sizes), []).append(result)
    return {
        value: tuple(member for member in group if member is not value)
        for group in groups.values()
        if len(group) > 1
        for value in group
    }


def _sizes(value: ir.Value) -> tuple[str, ...] | None:
    """The dimensions of a tensor; None where one is not known, not even as a symbol."""
    dims = None if value.shape is None else [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    return None if dims is None or None in dims else tuple(map(str, dims))
