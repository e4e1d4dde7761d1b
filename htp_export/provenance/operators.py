"""What kinds of operators there are, as far as telling whose work a node does depends on it."""

from __future__ import annotations

from htp_export.provenance.sketch import base_op

__all__ = ["COMMUTATIVE", "IN_PLACE", "RANDOM", "moves"]

COMMUTATIVE = frozenset(("Add", "Mul", "And", "Or", "Xor", "Equal", "Max", "Min", "Sum"))

RANDOM = frozenset(
    ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
)

# They change where or how exactly a tensor is kept, and leave every number in its place.
IN_PLACE = frozenset(
    ("Identity", "Cast", "CastLike", "MemcpyToHost", "MemcpyFromHost", "QuantizeLinear", "DequantizeLinear")
)

# They give back the numbers that they are given, in another place, layout, shape or precision.
_MOVING = frozenset(
    (
        *("Identity", "Cast", "CastLike", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand"),
        *("MemcpyToHost", "MemcpyFromHost", "ReorderInput", "ReorderOutput", "Dropout"),
        *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"),
        *("Constant", "Shape", "Size"),
    )
)

_VIEWING = frozenset(("Slice", "Split", "Concat", "Gather", "Pad", "Tile"))


def moves(op: str, views: bool = False) -> bool:
    """Whether an operator only moves numbers; with ``views``, also whether it leaves some out or repeats some.

    Example:
        >>> moves("Reshape"), moves("com.microsoft.nchwc::ReorderInput"), moves("Slice"), moves("Slice", views=True)
        (True, True, False, True)
    """
    base = base_op(op)
    return base in _MOVING or (views and base in _VIEWING)
