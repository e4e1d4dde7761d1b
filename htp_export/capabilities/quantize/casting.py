"""Operators in another float type: their tensors and weights are cast, with Casts where they meet others.

A tensor that an operator outside reads too stays what it was for that operator. A Cast is placed once for all that
read it, and none between operators that are cast to the same type.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from htp_export.capabilities.quantize.precisions import Precision
from htp_export.editing.editing import take_place
from htp_export.editing.submodels import constant_of
from htp_export.model.tensor_names import Names
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import SIZES_ONLY, subgraphs

__all__ = ["Ports", "cast_nodes", "ports_of"]

_TYPES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}


@dataclass(frozen=True)
class Ports:
    """What an operator can read and make in another float type.

    Attributes:
        inputs: Places of inputs.
        outputs: Places of outputs.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def ports_of(
    node: ir.Node, opset: int, precision: Precision, types: Mapping[ir.Value, ir.DataType | None]
) -> Ports | None:
    """The inputs and outputs of a node that can have another float type; None if that changes nothing of it.

    The ONNX definition of the operator in the model's opset decides: some inputs are floats of 32 bits always (the
    scales of ``Resize``), some operators know a type only from a later opset on (``Conv`` in bfloat16).

    Args:
        node: The node.
        opset: The version of the standard operators.
        precision: A precision of the method ``cast``.
        types: The element type of each tensor.
    """
    if subgraphs(node) or (node.op_type in SIZES_ONLY and not node.domain):
        return None
    known = _type_names(node.op_type, opset) if not node.domain else _other_type_names(node.domain, node.op_type)
    if known is None:
        return None
    wanted = f"tensor({precision.activation})"

    def places(values: Sequence[ir.Value | None], formals: Sequence[str]) -> tuple[int, ...]:
        return tuple(
            place
            for place, value in enumerate(values)
            if value is not None
            and types.get(value) == ir.DataType.FLOAT
            and formals
            and wanted in known.allowed.get(formals[min(place, len(formals) - 1)], ())
        )

    found = Ports(places(node.inputs, known.inputs), places(node.outputs, known.outputs))
    has_float_output = any(types.get(value) == ir.DataType.FLOAT for value in node.outputs)
    return None if not (found.outputs if has_float_output else found.inputs) else found


@dataclass(frozen=True)
class _TypeNames:
    """The formal types of an operator: of its inputs and outputs, and the types that a variable allows."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    allowed: Mapping[str, frozenset[str]]


@functools.cache
def _type_names(op_type: str, opset: int) -> _TypeNames | None:
    try:
        schema = onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    return _TypeNames(
        tuple(formal.type_str for formal in schema.inputs),
        tuple(formal.type_str for formal in schema.outputs),
        {constraint.type_param_str: frozenset(constraint.allowed_type_strs) for constraint in schema.type_constraints},
    )


@functools.cache
def _other_type_names(domain: str, op_type: str) -> _TypeNames | None:
    """The same of an operator of ONNX Runtime's own, of its newest version."""
    from onnxruntime.capi import onnxruntime_pybind11_state

    schemas = [
        schema
        for schema in onnxruntime_pybind11_state.get_all_operator_schema()
        if (schema.domain, schema.name) == (domain, op_type)
    ]
    if not schemas:
        return None
    schema = max(schemas, key=lambda schema: schema.since_version)
    return _TypeNames(
        tuple(formal.typeStr for formal in schema.inputs),
        tuple(formal.typeStr for formal in schema.outputs),
        {constraint.type_param_str: frozenset(constraint.allowed_type_strs) for constraint in schema.type_constraints},
    )


def cast_nodes(
    whole: ir.Model,
    chosen: Mapping[ir.Node, Ports],
    precision: Precision,
    names: Names,
    within: Container[ir.Node] = (),
) -> list[ir.Value]:
    """Let nodes compute in another float type.

    Args:
        whole: The model; it is changed.
        chosen: The nodes of the model, in order, with what they can read and make in the type.
        precision: A precision of the method ``cast``.
        names: The names of the model.
        within: The nodes for which the plan says this type, those that have no such ports included: of these, the ones
            that read the size of a tensor alone need no tensor of the old type.

    Returns:
        Weights that may have no readers any more.
    """
    return _Casting(whole, chosen, precision, names, within).run()


class _Casting:
    def __init__(
        self,
        whole: ir.Model,
        chosen: Mapping[ir.Node, Ports],
        precision: Precision,
        names: Names,
        within: Container[ir.Node],
    ) -> None:
        self._whole, self._chosen, self._names, self._within = whole, chosen, names, within
        self._suffix = precision.activation
        self._type = _TYPES[precision.activation]
        self._made = {node.outputs[place] for node, ports in chosen.items() for place in ports.outputs}
        self._cast: dict[tuple[ir.Value, ir.Graph | None], ir.Value] = {}
        self._weights: dict[ir.Value, ir.Value] = {}

    def run(self) -> list[ir.Value]:
        for node, ports in self._chosen.items():
            for place in ports.inputs:
                value = node.inputs[place]
                assert value is not None
                if value not in self._made:
                    node.replace_input_with(place, self._narrow(value, node))
        for node, ports in self._chosen.items():
            _convert_attributes(node, self._type)
            for place in ports.outputs:
                self._give_back(node.outputs[place])
        return list(self._weights)

    def _narrow(self, value: ir.Value, reader: ir.Node) -> ir.Value:
        """The value in the type, for the first reader of it in a graph and for those that follow."""
        tensor = constant_of(value)
        if tensor is not None:
            if value not in self._weights:
                self._weights[value] = self._narrow_weight(value, tensor)
            return self._weights[value]
        graph = reader.graph
        assert isinstance(graph, ir.Graph)
        if (value, graph) not in self._cast:
            maker = value.producer()
            made = self._cast_node(value, self._type, f"{value.name}_{self._suffix}")
            if maker is not None and maker.graph is graph:
                graph.insert_after(maker, made)
            else:
                graph.insert_before(next(iter(graph)), made)
            self._cast[value, graph] = made.outputs[0]
        return self._cast[value, graph]

    def _narrow_weight(self, value: ir.Value, tensor: ir.TensorProtocol) -> ir.Value:
        """A weight in the type: under its own name if nothing reads it as it was any more."""
        narrow = _narrow_tensor(tensor, self._type)
        alone = value.is_initializer() and not value.is_graph_output()
        if alone and all(self._reads_narrow(use.node, use.idx) for use in value.uses()):
            value.const_value, value.type = narrow, ir.TensorType(self._type)
            return value
        new = ir.Value(name=self._names.tensors.unused(f"{value.name}_{self._suffix}"), type=ir.TensorType(self._type))
        new.shape, new.const_value = ir.Shape(narrow.shape.numpy()), narrow
        new.metadata_props.update(value.metadata_props)
        self._whole.graph.register_initializer(new)
        return new

    def _reads_narrow(self, node: ir.Node, place: int) -> bool:
        ports = self._chosen.get(node)
        return ports is not None and place in ports.inputs

    def _give_back(self, value: ir.Value) -> None:
        """Let a value have the type; those who read it as it was read a Cast, which has its name."""
        others = [
            use
            for use in value.uses()
            if not self._reads_narrow(use.node, use.idx)
            and not (use.node.op_type in SIZES_ONLY and not use.node.domain and use.node in self._within)
        ]
        if others or value.is_graph_output():
            maker = value.producer()
            assert maker is not None
            assert isinstance(maker.graph, ir.Graph)
            back = self._cast_node(value, ir.DataType.FLOAT, "")
            maker.graph.insert_after(maker, back)
            result = back.outputs[0]
            result.metadata_props.update(value.metadata_props)
            take_place(value, result, others, self._names.tensors.unused(f"{value.name}_{self._suffix}"))
        value.type = ir.TensorType(self._type)

    def _cast_node(self, value: ir.Value, to: ir.DataType, name: str) -> ir.Node:
        node = ir.node("Cast", [value], {"to": int(to)})
        node.name = self._names.nodes.unused(f"{value.name}_to_{to.name.lower()}")
        result = node.outputs[0]
        result.type, result.shape = ir.TensorType(to), value.shape
        result.name = self._names.tensors.unused(name) if name else None
        return node


def _convert_attributes(node: ir.Node, to: ir.DataType) -> None:
    """Let a node that says the type of its output, or holds it, say the other one."""
    for name in ("to", "dtype"):
        if name in node.attributes and node.attributes[name].as_int() == ir.DataType.FLOAT:
            node.attributes[name] = ir.AttrInt64(name, int(to))
    if node.op_type == "ConstantOfShape":
        value = node.attributes.get("value")
        _hold(node, value.as_tensor().numpy() if value is not None else np.zeros(1, np.float32), to)
    if node.op_type == "Constant":
        name = next(name for name in ("value", "value_float", "value_floats") if name in node.attributes)
        held = node.attributes.pop(name).value
        _hold(node, held.numpy() if name == "value" else np.asarray(held, np.float32), to)


def _hold(node: ir.Node, array: Array, to: ir.DataType) -> None:
    node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(narrowed(array, to), dtype=to))


def _narrow_tensor(tensor: ir.TensorProtocol, to: ir.DataType) -> ir.TensorProtocol:
    """A tensor in a narrower type; it is read when it is written, one at a time."""
    return ir.LazyTensor(
        lambda: ir.Tensor(narrowed(tensor.numpy(), to), dtype=to), to, ir.Shape(tensor.shape.numpy()), name=tensor.name
    )


def narrowed(array: Array, to: ir.DataType) -> Array:
    """Numbers in a narrower float type.

    Finite numbers stay finite: masks are filled with the largest float, which would become infinite, and infinity minus
    infinity is no number. Numbers other than 0 stay so: they may be what keeps a divisor from 0.

    Examples:
        >>> narrowed(np.array([-3.4e38, 1e-12, 0.0, np.inf], np.float32), ir.DataType.FLOAT16)
        array([-6.55e+04,  5.96e-08,  0.00e+00,       inf], dtype=float16)
    """
    import ml_dtypes

    kind = to.numpy()
    limits = ml_dtypes.finfo(kind)  # type: ignore[no-untyped-call]
    largest, smallest = np.float32(limits.max), np.float32(limits.smallest_subnormal)
    finite = np.isfinite(array)
    bounded = np.where(finite, np.clip(array, -largest, largest), array)
    kept = np.where((bounded != 0) & (np.abs(bounded) < smallest), np.copysign(smallest, bounded), bounded)
    return np.asarray(kept).astype(kind)
