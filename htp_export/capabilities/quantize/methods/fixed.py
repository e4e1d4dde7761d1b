"""Fixed point for the input, the weight and the bias of a product, each with a format of its own.

The file simulates it with operators of ONNX: ``Clip`` to the ends of the format, and
``QuantizeLinear`` and ``DequantizeLinear`` with a scale of a power of two, in the narrowest integer
that has the width. That integer may be wider than the format, and onnx's reference evaluator wraps
numbers that are far beyond it: hence the ``Clip``. Every number of a format of at most 16 bits is a
float, so the operators are exact, and the product is computed in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.quantize.calibration_records import OF_FORMAT, mark
from htp_export.capabilities.quantize.method import FIELDS, Made, Method
from htp_export.capabilities.quantize.weight_operators import (
    CONVOLUTIONS,
    FIRST_BLOCKS,
    RoundedParts,
    has_columns,
    store_by_rows,
)
from htp_export.capabilities.quantize.work import Facts, Work
from htp_export.editing.editing import add_initializer
from htp_export.editing.submodels import Submodel, constant_of, remove_unused
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.recipes import CONSTANT
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import is_standard
from htp_export.weights.fixed_point import FIXED_BITS, FixedFormat
from htp_export.weights.products import weight_axes, weight_place

_FLOAT = "float32"
_PARTS = {"data": "activation", "weight": "weight", "bias": "bias"}
"""Part of a module in plans → the field, or option, of `Precision` with its type."""

_DATA, _WEIGHT, _BIAS = range(3)
"""The parts of a product, in the order of the inputs of a ``Gemm`` or a convolution."""

_PRODUCT = {0: _DATA, 1: _WEIGHT, 2: _BIAS}
_RECURRENT = {0: _DATA, 1: _WEIGHT, 2: _WEIGHT, 3: _BIAS}
_PLACES: Mapping[str, Mapping[int, int]] = {
    **dict.fromkeys(("MatMul", "Gemm", *CONVOLUTIONS), _PRODUCT),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _RECURRENT),
    "Gather": {0: _WEIGHT},
}
"""Operator → place among its inputs → part. The indices of a table have no format."""

_BY_ROWS = frozenset(("MatMul", "Gemm"))
"""Operators that ONNX Runtime fuses with the other layout of their matrix."""


class Fixed(Method):
    """Products of numbers in fixed point."""

    activations = (_FLOAT, *FIXED_BITS)
    weights = (_FLOAT, *FIXED_BITS)
    options = ("bias",)
    parts = tuple(_PARTS)

    @classmethod
    def fields_in(cls, texts: Iterable[str]) -> dict[str, Any]:
        """Parse parts and formats: ``8.4`` of all parts, or ``weight=6.2`` of one."""
        fields: dict[str, Any] = {}
        for text in texts:
            part, equals, value = text.partition("=")
            fields |= {part: value} if equals else dict.fromkeys(_PARTS, text)
        return fields

    @classmethod
    def fields_from(cls, name: str, given: Mapping[str, Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for part, value in given.items():
            field = _PARTS.get(part, part)
            if field in _PARTS.values():
                fields[field] = _type_of(name, part, value)
            elif field in FIELDS:
                fields[field] = value
            else:
                raise InputError(
                    f"precision {name!r} has no part {part!r}; write data, weight or bias, as in "
                    "fixed:data=8.4:weight=6.2:bias=16.8"
                )
        return fields

    def check(self) -> None:
        self.precision.check("bias", self._bias, self.weights)
        kinds = (self.precision.activation, self.precision.weight, self._bias)
        if set(kinds) == {_FLOAT}:
            raise self.precision.fault(
                "data, weight and bias are all float32: nothing would change"
            )

    @property
    def first_opset(self) -> int:
        """The opset of integers of 4 and 16 bits, and of ``output_dtype``."""
        return FIRST_BLOCKS

    @property
    def _bias(self) -> str:
        return str(self.precision.options.get("bias", _FLOAT))

    @property
    def _formats(self) -> Mapping[int, FixedFormat]:
        """Place of a part → its format; parts in float32 have none."""
        kinds = (self.precision.activation, self.precision.weight, self._bias)
        return {place: FixedFormat.of(kind) for place, kind in enumerate(kinds) if kind != _FLOAT}

    def takes(self, node: ir.Node, facts: Facts) -> bool:
        """Whether it is a product with a stored weight, a table, or the sum with the bias of one."""
        if _is_product(node, facts):
            return not self._formats.keys().isdisjoint(_present_parts(node))
        return _BIAS in self._formats and _bias_place(node, facts) is not None

    def bytes_of(
        self, node: ir.Node, place: int, tensor: ir.TensorProtocol, facts: Facts
    ) -> int | None:
        known = self._formats.get(_part(node, place))
        if known is None or _part(node, place) == _DATA:
            return None
        return math.ceil(math.prod(tensor.shape.numpy()) * known.storage.bitwidth / 8)

    def shared_by(self, node: ir.Node, place: int) -> Hashable:
        part = _part(node, place)
        if part not in self._formats or part == _DATA:
            return None
        tensor = constant_of(node.inputs[place])
        is_turned = part == _WEIGHT and tensor is not None and has_columns(node, tensor)
        return self._formats[part].name, is_turned

    def rounded(self, weight: Array, reduced: int) -> Array | None:
        known = self._formats.get(_WEIGHT)
        if known is None:
            return weight
        return np.asarray(known.levels(weight).astype(np.float32) * np.float32(known.scale))

    def quantize(self, part: Submodel, work: Work) -> Made:
        writer = _Writer(part.model.graph, self._formats)
        for node in list(part.model.graph):
            writer.change(node)
        remove_unused(list(part.model.graph.initializers.values()))
        return Made(part.model)


METHOD = Fixed


def _type_of(name: str, part: str, value: Any) -> str:
    """The type with the format of a part."""
    if value == _FLOAT:
        return _FLOAT
    try:
        return FixedFormat.of(value).name
    except InputError as error:
        raise InputError(f"precision {name!r}, {part}: {error}") from error


def _is_product(node: ir.Node, facts: Facts) -> bool:
    """Whether a node multiplies floats by a stored weight, or looks up rows of one."""
    if not is_standard(node, *_PLACES) or not facts.has_floats(node):
        return False
    weight = constant_of(node.inputs[weight_place(node)])
    if weight is None or weight.dtype != ir.DataType.FLOAT:
        return False
    is_table = node.op_type == "Gather"
    return not is_table or (len(weight.shape) == 2 and not node.attributes.get_int("axis", 0))


def _present_parts(node: ir.Node) -> set[int]:
    """The parts of a product: its data, and the stored tensors that it reads."""
    parts: set[int] = set()
    for place, part in _PLACES[node.op_type].items():
        value = node.inputs[place] if place < len(node.inputs) else None
        if part == _DATA or constant_of(value) is not None:
            parts.add(part)
    return parts


def _bias_place(node: ir.Node, facts: Facts) -> int | None:
    """The place of the bias of an ``Add`` that completes a product; None for other nodes.

    The exporters write a Linear with an input of three dimensions as two nodes of one module.
    """
    if not is_standard(node, "Add") or not facts.has_floats(node):
        return None
    for place in range(2):
        bias, product = constant_of(node.inputs[place]), node.inputs[1 - place]
        producer = None if product is None else product.producer()
        if bias is None or producer is None or not _is_product(producer, facts):
            continue
        weight = constant_of(producer.inputs[_WEIGHT])
        axes = weight_axes(producer, _WEIGHT)
        assert weight is not None
        assert axes is not None
        is_bias = tuple(bias.shape.numpy()) == (weight.shape.numpy()[axes[1]],)
        owners = [tags.owners_of(each.metadata_props) for each in (node, producer)]
        if is_bias and owners[0] == owners[1] and producer.op_type == "MatMul":
            return place
    return None


def _part(node: ir.Node, place: int) -> int:
    """The part that an input of a taken node is; the constant of an ``Add`` is the bias."""
    if node.op_type != "Add":
        return _PLACES[node.op_type].get(place, -1)
    return _BIAS if constant_of(node.inputs[place]) is not None else -1


class _Writer:
    """Writes the parts of products in fixed point, each tensor once."""

    def __init__(self, graph: ir.Graph, formats: Mapping[int, FixedFormat]) -> None:
        self._graph, self._formats = graph, formats
        self._written: dict[tuple[ir.Value, FixedFormat], ir.Value] = {}

    def change(self, node: ir.Node) -> None:
        """Replace the inputs of a node."""
        for place, value in enumerate(node.inputs):
            part = _part(node, place)
            known = self._formats.get(part)
            if value is None or known is None:
                continue
            if part == _DATA:
                node.replace_input_with(place, self._computed(node, value, known))
            elif value.const_value is not None:
                store = partial(self._stored, node, known)
                if node.op_type in _BY_ROWS and part == _WEIGHT:
                    store_by_rows(self._graph, node, store)
                else:
                    node.replace_input_with(place, store(value))

    def _stored(self, reader: ir.Node, known: FixedFormat, value: ir.Value) -> ir.Value:
        """The dequantized form of a stored tensor."""
        key = value, known
        if key not in self._written:
            tensor = value.const_value
            assert tensor is not None
            scheme = ["fixed", known.width, known.fraction]
            parts = RoundedParts(self._graph, value, scheme)
            levels = parts.add("quantized", "levels", known.storage, tensor.shape.numpy())
            self._written[key] = self._dequantized(reader, value, levels, known)
        return self._written[key]

    def _computed(self, reader: ir.Node, value: ir.Value, known: FixedFormat) -> ir.Value:
        """A tensor rounded to the format, and converted back."""
        key = value, known
        if key not in self._written:
            source = self._clipped(reader, value, known)
            narrow = self._insert(
                reader,
                "QuantizeLinear",
                value,
                [source, self._scale(value, known)],
                known.storage,
                output_dtype=int(known.storage),
            )
            quantizer = narrow.producer()
            assert quantizer is not None
            mark([quantizer], OF_FORMAT)
            self._written[key] = self._dequantized(reader, value, narrow, known)
        return self._written[key]

    def _clipped(self, reader: ir.Node, value: ir.Value, known: FixedFormat) -> ir.Value:
        """A tensor that saturates at the ends of the format, which are numbers of it."""
        ends = [
            self._constant(f"{value.name}_{end}", level * known.scale)
            for end, level in (("lowest", known.lowest), ("highest", known.highest))
        ]
        return self._insert(reader, "Clip", value, [value, *ends], ir.DataType.FLOAT)

    def _dequantized(
        self, reader: ir.Node, value: ir.Value, levels: ir.Value, known: FixedFormat
    ) -> ir.Value:
        inputs = [levels, self._scale(value, known)]
        return self._insert(reader, "DequantizeLinear", value, inputs, ir.DataType.FLOAT)

    def _scale(self, value: ir.Value, known: FixedFormat) -> ir.Value:
        return self._constant(f"{value.name}_scale", known.scale)

    def _constant(self, name: str, number: float) -> ir.Value:
        """The initializer of a number; added if there is none."""
        existing = self._graph.initializers.get(name)
        tensor = ir.tensor(np.float32(number))
        return existing or add_initializer(self._graph, tensor, name, CONSTANT)

    def _insert(
        self,
        reader: ir.Node,
        op_type: str,
        of: ir.Value,
        inputs: Sequence[ir.Value],
        to: ir.DataType,
        **attributes: int,
    ) -> ir.Value:
        """Insert an operator before the first consumer of a tensor; return its result."""
        node = ir.node(op_type, inputs, attributes, name=f"{of.name}_{op_type}")
        [result] = node.outputs
        result.name, result.type, result.shape = f"{node.name}_output", ir.TensorType(to), of.shape
        self._graph.insert_before(reader, node)
        return result
