"""ONNX Runtime's operators (domain ``com.microsoft``), which have no schemas in ONNX.

Source: ONNX Runtime's ``docs/ContribOperators.md``. The output of an operator that is not listed
keeps the shape in the file. An operator that extends one of ONNX shares its rule: ``FusedConv`` is
registered with ``Conv``.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from htp_export.shapes.known import Dims, Known, Operation, shape_of
from htp_export.shapes.operators import Rule, TypeRule, shape_rule, type_rule
from htp_export.shapes.operators.elementwise import broadcast, like_first
from htp_export.shapes.sizes import divide

_DOMAIN = "com.microsoft"

_LIKE_FIRST = """
BiasGelu BiasSoftmax BiasDropout BiasAdd DequantizeLinear FastGelu Gelu GroupNorm LayerNormalization QLinearLeakyRelu
QLinearSigmoid QLinearSoftmax QuantizeLinear QuickGelu RotaryEmbedding SkipGroupNorm SkipLayerNormalization
SkipSimplifiedLayerNormalization SimplifiedLayerNormalization
""".split()  # noqa: SIM905 - as a list of strings it would fill the screen
_PRODUCTS = (
    "FusedMatMul",
    "FusedGemm",
    "GemmFastGelu",
    "DynamicQuantizeMatMul",
    "MatMulIntegerToFloat",
)
_OTHERS = (
    *(
        "QGemm",
        "MatMulNBits",
        "MatMulBnb4",
        "Attention",
        "QAttention",
        "MultiHeadAttention",
        "GroupQueryAttention",
    ),
    *("EmbedLayerNormalization", "QLinearAdd", "QLinearMul", "FusedConv"),
)


shape_rule(*_LIKE_FIRST, domain=_DOMAIN)(like_first)
# ONNX Runtime registers this operator in ONNX's domain.
shape_rule("SimplifiedLayerNormalization")(like_first)


def _product(right: int) -> Rule:
    """The rule of a matrix product whose second factor is the input with index ``right``."""

    def rule(node: Operation, known: Known) -> Sequence[Dims | None]:
        a = list(shape_of(node, known, 0))
        b = list(shape_of(node, known, right))
        if node.attributes.get_int("transBatchA", 0):  # the rows precede the batch
            a = [*a[1:-1], a[0], a[-1]]
        if node.attributes.get_int("transBatchB", 0):
            b = [*b[1:-1], b[0], b[-1]]
        if node.attributes.get_int("transA", 0):
            a[-2:] = reversed(a[-2:])
        if node.attributes.get_int("transB", 0):
            b[-2:] = reversed(b[-2:])
        if len(b) == 1:
            return [a[:-1]]
        batch = broadcast([tuple(a[:-2]), tuple(b[:-2])])
        rows = a[-2:-1]  # none if the first factor is a vector
        return [[*batch, *rows, b[-1]]]

    return rule


shape_rule(*_PRODUCTS, domain=_DOMAIN)(_product(1))
shape_rule("QGemm", domain=_DOMAIN)(_product(3))


@shape_rule("MatMulNBits", "MatMulBnb4", domain=_DOMAIN)
def _packed_product(node: Operation, known: Known) -> Sequence[Dims | None]:
    columns = node.attributes["N"].as_int()
    return [[*shape_of(node, known)[:-1], columns]]


@shape_rule("GatherBlockQuantized", domain=_DOMAIN)
def _packed_rows(node: Operation, known: Known) -> Sequence[Dims | None]:
    data = list(shape_of(node, known, 0))
    indices = shape_of(node, known, 1)
    if known.dtype(node.inputs[0]) == ir.DataType.UINT8:  # a byte holds several values
        data[-1] *= 8 // node.attributes.get_int("bits", 4)
    axis = node.attributes.get_int("gather_axis", 0) % len(data)
    return [[*data[:axis], *indices, *data[axis + 1 :]]]


@shape_rule("Attention", "QAttention", domain=_DOMAIN)
def _attention(node: Operation, known: Known) -> Sequence[Dims | None]:
    data = shape_of(node, known)
    weights = shape_of(node, known, 1)
    sizes: Sequence[int] = node.attributes.get_ints("qkv_hidden_sizes") or ()
    return [[*data[:2], sizes[2] if len(sizes) == 3 else divide(weights[1], 3)]]


@shape_rule("MultiHeadAttention", domain=_DOMAIN)
def _multi_head(node: Operation, known: Known) -> Sequence[Dims | None]:
    query = shape_of(node, known)
    if len(query) == 5:  # packed: batch, length, heads, 3, head size
        return [[*query[:2], query[2] * query[4]]]
    values = known.shape(node.inputs[2]) if len(node.inputs) > 2 else None
    if values is None:
        return [query]
    width = values[2] if len(values) == 3 else values[1] * values[3]
    return [[*query[:2], width]]


@shape_rule("GroupQueryAttention", domain=_DOMAIN)
def _grouped_query(node: Operation, known: Known) -> Sequence[Dims | None]:
    batch, length, width = shape_of(node, known)
    if node.inputs[1] is None:  # query, key and value are packed into one input
        heads = node.attributes.get_int("num_heads", 0)
        shared = node.attributes.get_int("kv_num_heads", 0)
        width = divide(width, heads + 2 * shared) * heads
    output = [batch, length, width]
    has_past = len(node.inputs) > 6 and node.inputs[3] is not None
    past = known.shape(node.inputs[3]) if has_past else None
    if past is None:
        return [output]
    total = known.contents(node.inputs[6])
    if total is None or total.size != 1:
        return [output]
    # Past and present may share a buffer: the present has the length that is in use.
    present = [*past[:2], total.item(), past[3]]
    return [output, present, present]


@shape_rule("EmbedLayerNormalization", domain=_DOMAIN)
def _embedding(node: Operation, known: Known) -> Sequence[Dims | None]:
    ids = shape_of(node, known)
    words = shape_of(node, known, 2)
    return [[*ids, words[-1]]]


@shape_rule("QLinearAdd", "QLinearMul", domain=_DOMAIN)
def _quantized_elementwise(node: Operation, known: Known) -> Sequence[Dims | None]:
    return [broadcast([shape_of(node, known), shape_of(node, known, 3)])]


def _type_of(place: int) -> TypeRule:
    return lambda node, known: known.dtype(node.inputs[place])


type_rule("SimplifiedLayerNormalization")(_type_of(0))
type_rule(*_LIKE_FIRST, *_PRODUCTS, *_OTHERS, domain=_DOMAIN)(_type_of(0))
type_rule("DequantizeLinear", domain=_DOMAIN)(_type_of(1))
type_rule(
    "MatMulIntegerToFloat", "EmbedLayerNormalization", "GatherBlockQuantized", domain=_DOMAIN
)(_type_of(2))
type_rule("QAttention", domain=_DOMAIN)(_type_of(3))


@type_rule("QuantizeLinear", domain=_DOMAIN)
def _type_of_zero_point(node: Operation, known: Known) -> ir.DataType | None:
    if len(node.inputs) > 2:
        return known.dtype(node.inputs[2])
    return ir.DataType.UINT8
