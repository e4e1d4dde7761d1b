"""Kinds of operators: what each of them does to the values and shapes that it reads.

Sets that say the same thing stand here once. A set for one purpose only stands where it is used,
and is made of these.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from typing import TypeVar

import onnx
import onnx_ir as ir

_Input = TypeVar("_Input")

RANDOM = frozenset(
    (
        "Bernoulli",
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    )
)
"""Without inputs, or with constant ones, these still give other values in every run."""

SIZES_ONLY = frozenset(("Shape", "Size"))
"""They read the sizes of a tensor, and none of its values."""

_TYPE_ONLY = {"CastLike": 1}
"""They read an input for its type alone, at this place."""

VIEW = "htp.view"
"""Key in the ``meta`` of a node of torch's operators: its results have the memory of its first input."""

CONTROL_FLOW = frozenset(("If", "Loop", "Scan"))
"""They run subgraphs."""

RESHAPING = frozenset(("Reshape", "Flatten", "Squeeze", "Unsqueeze"))
"""They give back the same elements in the same order, in another shape."""

LAYOUT = RESHAPING | {"Transpose", "Expand"}
"""They give back the same elements in another shape or order, or repeated."""

COMMUTATIVE = frozenset(("Add", "Mul", "And", "Or", "Xor", "Equal", "Max", "Min", "Sum"))
"""Their inputs may change places."""

NEUTRAL = {"Mul": 1, "Div": 1, "Pow": 1, "Add": 0, "Sub": 0, "And": True, "Or": False}
"""Operator → the second argument with which it gives the first one back, but for -0, which becomes 0 if 0 is added."""

IN_PLACE = frozenset(
    (
        "Identity",
        "Cast",
        "CastLike",
        "MemcpyToHost",
        "MemcpyFromHost",
        "QuantizeLinear",
        "DequantizeLinear",
    )
)
"""They change where or how exactly a tensor is kept, and leave every number in its place."""

_MOVING = LAYOUT | IN_PLACE | SIZES_ONLY
_MOVING |= {"ReorderInput", "ReorderOutput", "Dropout", "DynamicQuantizeLinear", "Constant"}
"""They give back the numbers that they are given, in another place, layout, shape or precision."""

_SELECTING = frozenset(("Slice", "Split", "Concat", "Gather", "Pad", "Tile"))
"""They give back some of the numbers that they are given, or repeat some."""


GROWING = frozenset(
    [
        "AffineGrid",
        "BlackmanWindow",
        "CenterCropPad",
        "Col2Im",
        "ConstantOfShape",
        "DFT",
        "Expand",
        "EyeLike",
        "HammingWindow",
        "HannWindow",
        "MaxUnpool",
        "MelWeightMatrix",
        "OneHot",
        "Pad",
        "Range",
        "Resize",
        "Tile",
        "Upsample",
    ]
)
"""Their results are as large as numbers that they read say: a few bytes of a file can ask for any size."""


def base_op(op: str) -> str:
    """The operator without its domain: ``Conv`` for ``com.microsoft.nchwc::Conv``."""
    return op.rpartition("::")[2]


def is_standard(node: ir.Node | None, *op_types: str) -> bool:
    """Whether a node is there and computes an operator of ONNX itself, and one of ``op_types`` where any are named.

    Examples:
        >>> relu, theirs = ir.node("Relu", [ir.val("x")]), ir.node("Relu", [ir.val("x")], domain="com.microsoft")
        >>> is_standard(relu), is_standard(relu, "Relu", "Tanh"), is_standard(relu, "Tanh"), is_standard(theirs)
        (True, True, False, False)
    """
    return node is not None and node.domain == "" and (not op_types or node.op_type in op_types)


_QUANTIZING = ("", "com.microsoft")
"""The domains of linear quantization: before opset 21, ONNX Runtime has integers of 16 bits in its own alone."""


def quantizes(node: ir.Node | None) -> bool:
    """Whether a node is there and is ``QuantizeLinear``, of ONNX or of ONNX Runtime.

    Examples:
        >>> quantizes(ir.node("QuantizeLinear", [ir.val("x"), ir.val("scale")], domain="com.microsoft"))
        True
    """
    return node is not None and node.op_type == "QuantizeLinear" and node.domain in _QUANTIZING


def dequantizes(node: ir.Node | None) -> bool:
    """The same of ``DequantizeLinear``."""
    return node is not None and node.op_type == "DequantizeLinear" and node.domain in _QUANTIZING


def without_copies(value: ir.Value) -> ir.Value:
    """The tensor that ``Identity`` nodes before a value copy; the value itself where there are none.

    Examples:
        >>> x = ir.val("x")
        >>> copied = ir.node("Identity", ir.node("Identity", [x]).outputs)
        >>> without_copies(copied.outputs[0]) is x is without_copies(x)
        True
    """
    while is_standard(producer := value.producer(), "Identity") and producer.inputs[0] is not None:  # type: ignore[union-attr]
        value = producer.inputs[0]  # type: ignore[union-attr]
    return value


def subgraphs(node: ir.Node) -> tuple[ir.Graph, ...]:
    """The graphs in a node's attributes: branches and loop bodies."""
    if not node.attributes:
        return ()
    graphs: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            graphs.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs.extend(attribute.as_graphs())
    return tuple(graphs)


def with_subgraphs(node: ir.Node) -> Iterator[ir.Node]:
    """A node, and what its subgraphs hold."""
    yield node
    for body in subgraphs(node):
        yield from body.all_nodes()


def reads_of(node: ir.Node) -> Iterator[ir.Value]:
    """Every value that a node reads, in its subgraphs too, whose results it reads as well."""
    for each in with_subgraphs(node):
        yield from (value for value in each.inputs if value is not None)
        for body in subgraphs(each):
            yield from body.outputs


def values_read(op: str, inputs: Sequence[_Input]) -> Sequence[_Input]:
    """What a node of an operator reads, without what it reads for its type alone."""
    place = _TYPE_ONLY.get(op)
    return inputs if place is None else (*inputs[:place], *inputs[place + 1 :])


def operator_of(node: ir.Node) -> str:
    """A node's operator, with the domain where that is not ONNX's: ``com.microsoft::Gelu``."""
    return f"{node.domain}::{node.op_type}" if node.domain else node.op_type


def moves(op: str, views: bool = False) -> bool:
    """Whether an operator only moves numbers; with ``views``, also whether it leaves some out or repeats some.

    Examples:
        >>> moves("Reshape"), moves("com.microsoft.nchwc::ReorderInput"), moves("Slice"), moves("Slice", views=True)
        (True, True, False, True)
    """
    base = base_op(op)
    return base in _MOVING or (views and base in _SELECTING)


# --- operators that do the work of others, by their names ---------------------------------------------

_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z]+|.")

# What the names of ONNX's quantized operators have besides the name of the one that they quantize.
_QUANTIZED = frozenset(("Q", "Linear", "Integer"))

# Operators that compute others' work in one, and whose names do not say it.
_COMPOSED = {"Gemm": ("MatMul", "Add")}


@functools.cache
def _standard() -> frozenset[str]:
    return frozenset(
        schema.name for schema in onnx.defs.get_all_schemas() if schema.domain in ("", "ai.onnx.ml")
    )


@functools.cache
def _parts(op: str) -> tuple[str, ...]:
    """The operators that an operator's name is made of, and the words between them.

    The longest of ONNX's names counts: ``FusedMatMul`` is a MatMul and no Mul. ONNX's own operators
    have no other one in them (``MaxPool``, ``ConvTranspose``), unless all else says how it is
    quantized.
    """
    standard, name = _standard(), base_op(op)
    words = _WORD.findall(name)
    parts, at = list[str](), 0
    while at < len(words):
        ends = (end for end in range(len(words), at, -1) if end - at < len(words))
        end = next((end for end in ends if "".join(words[at:end]) in standard), at + 1)
        parts.append("".join(words[at:end]))
        at = end
    known = [part for part in parts if part in standard]
    if name in standard:
        quantized = len(known) == 1 and all(
            part in _QUANTIZED for part in parts if part not in known
        )
        return (name, *known) if quantized and len(parts) > 1 else (name,)
    return tuple(
        inner for part in parts for inner in (_parts(part) if part in standard else (part,))
    )


def resembles(op: str, counterpart: str) -> bool:
    """Whether one of two operators may do the work of the other: they are the same, or one is made of the other.

    Examples:
        >>> resembles("com.microsoft::FusedMatMul", "MatMul"), resembles("com.microsoft::FusedMatMul", "Mul")
        (True, False)
        >>> resembles("Gemm", "Add"), resembles("MaxPool", "Max"), resembles("Expand", "Exp")
        (True, False, False)
    """
    name, wanted = base_op(op), base_op(counterpart)
    return (
        name == wanted
        or wanted in (*_parts(op), *_COMPOSED.get(name, ()))
        or name in _parts(counterpart)
    )
