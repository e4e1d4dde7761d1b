"""Kinds of operators, by their effect on the values and shapes of their inputs.

A set that several files need is defined here once. A set for a single purpose is defined where it
is used, from these.
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
"""Operators whose outputs differ in every run, even without inputs or with constant ones."""

SIZES_ONLY = frozenset(("Shape", "Size"))
"""Operators that read the shape of a tensor and none of its elements."""

_TYPE_ONLY = {"CastLike": 1}
"""Operator → index of an input that it reads for its element type alone."""

VIEW = "htp.view"
"""Key in ``meta`` of a torch operator's node whose outputs share memory with its first input."""

CONTROL_FLOW = frozenset(("If", "Loop", "Scan"))
"""Operators that run subgraphs."""

RESHAPING = frozenset(("Reshape", "Flatten", "Squeeze", "Unsqueeze"))
"""Operators that return the same elements in the same order, in another shape."""

LAYOUT = RESHAPING | {"Transpose", "Expand"}
"""Layout operators: the same elements in another shape or order, or repeated."""

COMMUTATIVE = frozenset(("Add", "Mul", "And", "Or", "Xor", "Equal", "Max", "Min", "Sum"))
"""Operators whose inputs can be swapped."""

NEUTRAL = {"Mul": 1, "Div": 1, "Pow": 1, "Add": 0, "Sub": 0, "And": True, "Or": False}
"""Operator → second argument for which it returns the first (except -0: adding 0 returns 0)."""

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
"""Operators that change the device or precision of a tensor and keep each element at its index."""

_MOVING = LAYOUT | IN_PLACE | SIZES_ONLY
_MOVING |= {"ReorderInput", "ReorderOutput", "Dropout", "DynamicQuantizeLinear", "Constant"}
"""Operators that return their input in another place, layout, shape or precision."""

_SELECTING = frozenset(("Slice", "Split", "Concat", "Gather", "Pad", "Tile"))
"""Operators that return a subset of the elements of their input, or repeat some."""


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
"""Operators whose output size is a value of an input, so that a tiny file can ask for any size."""


def base_op(op: str) -> str:
    """The operator without its domain: ``Conv`` for ``com.microsoft.nchwc::Conv``."""
    return op.rpartition("::")[2]


def is_standard(node: ir.Node | None, *op_types: str) -> bool:
    """Whether a node exists and is a standard ONNX operator, one of ``op_types`` if there are any.

    Examples:
        >>> relu, theirs = ir.node("Relu", [ir.val("x")]), ir.node("Relu", [ir.val("x")], domain="com.microsoft")
        >>> is_standard(relu), is_standard(relu, "Relu", "Tanh"), is_standard(relu, "Tanh"), is_standard(theirs)
        (True, True, False, False)
    """
    return node is not None and node.domain == "" and (not op_types or node.op_type in op_types)


_QUANTIZING = ("", "com.microsoft")
"""Domains of linear quantization. Before opset 21, only ONNX Runtime's has 16-bit integers."""


def quantizes(node: ir.Node | None) -> bool:
    """Whether a node exists and is ``QuantizeLinear``, of ONNX or ONNX Runtime.

    Examples:
        >>> quantizes(ir.node("QuantizeLinear", [ir.val("x"), ir.val("scale")], domain="com.microsoft"))
        True
    """
    return node is not None and node.op_type == "QuantizeLinear" and node.domain in _QUANTIZING


def dequantizes(node: ir.Node | None) -> bool:
    """Whether a node exists and is ``DequantizeLinear``, of ONNX or ONNX Runtime."""
    return node is not None and node.op_type == "DequantizeLinear" and node.domain in _QUANTIZING


def without_copies(value: ir.Value) -> ir.Value:
    """The original of a value that ``Identity`` nodes copy; the value itself if there are none.

    Examples:
        >>> x = ir.val("x")
        >>> copied = ir.node("Identity", ir.node("Identity", [x]).outputs)
        >>> without_copies(copied.outputs[0]) is x is without_copies(x)
        True
    """
    while True:
        producer = value.producer()
        if producer is None or not is_standard(producer, "Identity"):
            return value
        source = producer.inputs[0]
        if source is None:
            return value
        value = source


def subgraphs(node: ir.Node) -> tuple[ir.Graph, ...]:
    """The graphs in a node's attributes: branches and loop bodies."""
    attributes = node.attributes.data  # not their mapping: each walk asks each node
    if not attributes:
        return ()
    graphs: list[ir.Graph] = []
    for attribute in attributes.values():
        kind = attribute.type
        if kind == ir.AttributeType.GRAPH and not attribute.is_ref():
            graphs.append(attribute.as_graph())
        elif kind == ir.AttributeType.GRAPHS and not attribute.is_ref():
            graphs.extend(attribute.as_graphs())
    return tuple(graphs)


def with_subgraphs(node: ir.Node) -> Iterator[ir.Node]:
    """A node, and the nodes of its subgraphs."""
    yield node
    for body in subgraphs(node):
        yield from nodes_in(body)


def nodes_in(graph: ir.Graph | ir.Function) -> Iterator[ir.Node]:
    """Every node of a graph; a node comes before the nodes in its subgraphs.

    As ``Graph.all_nodes`` of onnx_ir, in two thirds of the time.
    """
    for node in graph:
        yield node
        for body in subgraphs(node):
            yield from nodes_in(body)


def graphs_in(graph: ir.Graph) -> list[ir.Graph]:
    """A graph and its subgraphs, outer ones first; as ``Model.graphs`` of onnx_ir, but faster."""
    found = {graph: None}
    for node in graph:
        for body in subgraphs(node):
            found.update(dict.fromkeys(graphs_in(body)))
    return list(found)


def reads_of(node: ir.Node) -> Iterator[ir.Value]:
    """Every value that a node uses, or that its subgraphs use or return."""
    for inner in with_subgraphs(node):
        yield from (value for value in inner.inputs if value is not None)
        for body in subgraphs(inner):
            yield from body.outputs


def values_read(op: str, inputs: Sequence[_Input]) -> Sequence[_Input]:
    """The inputs of which an operator uses the elements or shape, not only the type."""
    index = _TYPE_ONLY.get(op)
    if index is None:
        return inputs
    return (*inputs[:index], *inputs[index + 1 :])


def operator_of(node: ir.Node) -> str:
    """The operator of a node, with its domain unless it is ONNX's: ``com.microsoft::Gelu``."""
    if node.domain:
        return f"{node.domain}::{node.op_type}"
    return node.op_type


def moves(op: str, views: bool = False) -> bool:
    """Whether an operator only moves elements; with ``views``, it may also omit or repeat some.

    Examples:
        >>> moves("Reshape"), moves("com.microsoft.nchwc::ReorderInput"), moves("Slice"), moves("Slice", views=True)
        (True, True, False, True)
    """
    base = base_op(op)
    return base in _MOVING or (views and base in _SELECTING)


# --- operators that contain other operators, by their names ------------------------------------

_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z0-9]+|[A-Z]+|.")

# Words in the names of ONNX's quantized operators, besides the name of the quantized operator.
_QUANTIZED = frozenset(("Q", "Linear", "Integer"))

# Operators that combine several, which their names do not show.
_COMPOSED = {"Gemm": ("MatMul", "Add")}


@functools.cache
def _standard() -> frozenset[str]:
    """The names of the operators in ONNX's own domains."""
    return frozenset(
        schema.name for schema in onnx.defs.get_all_schemas() if schema.domain in ("", "ai.onnx.ml")
    )


@functools.cache
def _parts(op: str) -> tuple[str, ...]:
    """The operators in the name of an operator, and the words between them.

    The longest ONNX name is taken: ``FusedMatMul`` contains MatMul and not Mul. ONNX's operators
    contain no other (``MaxPool``, ``ConvTranspose``), except quantized ones, such as
    ``ConvInteger``.
    """
    standard = _standard()
    name = base_op(op)
    parts = _split_name(name, standard)
    known = [part for part in parts if part in standard]
    if name in standard:
        others = [part for part in parts if part not in standard]
        is_quantized = len(known) == 1 and all(part in _QUANTIZED for part in others)
        if is_quantized and len(parts) > 1:
            return (name, *known)
        return (name,)
    inner: list[str] = []
    for part in parts:
        inner.extend(_parts(part) if part in standard else (part,))
    return tuple(inner)


def _split_name(name: str, standard: frozenset[str]) -> list[str]:
    """Split a name into the longest standard operator names, shorter than itself, and words."""
    words = _WORD.findall(name)
    parts = list[str]()
    start = 0
    while start < len(words):
        end = len(words) if start else len(words) - 1
        while end > start + 1 and "".join(words[start:end]) not in standard:
            end -= 1
        end = max(end, start + 1)
        parts.append("".join(words[start:end]))
        start = end
    return parts


def resembles(op: str, counterpart: str) -> bool:
    """Whether one operator may do the work of another: equal, or one contains the other.

    Examples:
        >>> resembles("com.microsoft::FusedMatMul", "MatMul"), resembles("com.microsoft::FusedMatMul", "Mul")
        (True, False)
        >>> resembles("Gemm", "Add"), resembles("MaxPool", "Max"), resembles("Expand", "Exp")
        (True, False, False)
    """
    return includes(op, counterpart) or base_op(op) in _parts(counterpart)


def includes(op: str, part: str) -> bool:
    """Whether one operator does the work of another: equal, or the other is in its name.

    Examples:
        >>> includes("com.microsoft::FusedConv", "Conv"), includes("Conv", "com.microsoft::FusedConv")
        (True, False)
        >>> includes("Gemm", "MatMul"), includes("ConvInteger", "Conv")
        (True, True)
    """
    name, other = base_op(op), base_op(part)
    return name == other or other in (*_parts(op), *_COMPOSED.get(name, ()))
