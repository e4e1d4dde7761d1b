"""Operators in another float type: their tensors and weights are cast, with Casts where they meet others.

There is one Cast for each tensor that crosses a border, in each direction, and none between
operators of one type, also if these got it in several calls: what an earlier Cast widened is read
before that Cast.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_ir as ir

from htp_export.capabilities.quantize.method import Method, Precision
from htp_export.capabilities.quantize.work import Facts, Left, Work, is_packed
from htp_export.editing.editing import replace_uses
from htp_export.editing.submodels import constant_of, remove_unused
from htp_export.format import tags
from htp_export.format.recipes import step
from htp_export.format.tags import Reason
from htp_export.model.recipes import recipe_of, recorded
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import (
    SIZES_ONLY,
    dequantizes,
    is_standard,
    operator_of,
    quantizes,
    subgraphs,
)
from htp_export.weights.rebuilding import narrowed

_TYPES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}


_CAST_OPSET = 13  # the first with bfloat16: for a model that has no operators of ONNX

_HOLDING = ("Cast", "Constant", "ConstantOfShape")
"""Operators whose results are floats of any type, without reading some."""


@dataclass(frozen=True)
class _Ports:
    """The places of inputs and outputs of an operator that can have another float type."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


class Cast(Method):
    """Operators compute in a float type of 16 bits."""

    activations = tuple(_TYPES)
    weights = tuple(_TYPES)
    options = ("narrow_io",)
    order = 3
    in_subgraphs = True

    def check(self) -> None:
        if self.precision.activation != self.precision.weight:
            raise self.precision.fault("activations and weights have the same float type")
        self.precision.check(
            "narrow_io", self.precision.options.get("narrow_io", False), (False, True)
        )

    def takes(self, node: ir.Node, facts: Facts) -> bool:
        return self._ports(node, facts) is not None

    def bytes_of(
        self, node: ir.Node, place: int, tensor: ir.TensorProtocol, facts: Facts
    ) -> int | None:
        ports = self._ports(node, facts)
        return (
            2 * math.prod(tensor.shape.numpy())
            if ports is not None and place in ports.inputs
            else None
        )

    def apply(self, nodes: Sequence[ir.Node], work: Work) -> Iterator[Left]:
        cast_nodes(nodes, self.precision, work)
        for node in nodes:
            read = node.inputs[0] if operator_of(node) == "com.microsoft::MatMulNBits" else None
            if read is not None and read.dtype == _TYPES[self.precision.activation]:
                # in float16, it is another result without optimizations
                node.attributes.pop("accuracy_level", None)
        return iter(())

    def _ports(self, node: ir.Node, facts: Facts) -> _Ports | None:
        return _ports(node, self.precision.activation, facts)


METHOD = Cast


def cast_nodes(nodes: Iterable[ir.Node], precision: Precision, work: Work) -> None:
    """Let nodes, also those that a method made, compute in the type of the activations of a precision."""
    chosen: dict[ir.Node, _Ports] = {}
    for node in nodes:
        facts, known = work.facts, work.twins.get(node, node)
        if known is node:
            values = [value for value in (*node.inputs, *node.outputs) if value is not None]
            packed = frozenset(value for value in values if is_packed(value.type))
            facts = replace(facts, dtypes={value: value.dtype for value in values}, packed=packed)
        found = _ports(known, precision.activation, facts)
        if found is not None:
            chosen[node] = found
    remove_unused(_Casting(chosen, precision, work).run())


def _ports(node: ir.Node, activation: str, facts: Facts) -> _Ports | None:
    """The inputs and outputs of a node that can have the type; None if that changes nothing of it.

    The ONNX definition of the operator in the model's opset decides: some inputs are floats of 32
    bits always (the scales of ``Resize``), some operators know a type only from a later opset on
    (``Conv`` in bfloat16).
    """
    if not facts.packed.isdisjoint((*node.inputs, *node.outputs)):
        # sequences and optionals keep their element type, and what is put into or taken out of them
        # has it
        return None
    if (
        subgraphs(node)
        or (node.op_type in SIZES_ONLY and not node.domain)
        or _is_quantized(node, facts)
    ):
        return None
    if (
        is_standard(node, "ScatterElements", "ScatterND")
        and node.attributes.get_string("reduction", "none") != "none"
    ):
        return None  # ONNX Runtime has kernels for narrow floats, which refuse to sum when they run
    known = _type_names(node.domain, node.op_type, facts.opset)
    if known is None:
        return None
    wanted = f"tensor({activation})"

    def places(values: Sequence[ir.Value | None], formals: Sequence[str]) -> tuple[int, ...]:
        return tuple(
            place
            for place, value in enumerate(values)
            if value is not None
            and facts.dtypes.get(value) == ir.DataType.FLOAT
            and formals
            and wanted in known.allowed.get(formals[min(place, len(formals) - 1)], ())
        )

    found = _Ports(places(node.inputs, known.inputs), places(node.outputs, known.outputs))
    has_float_output = any(facts.dtypes.get(value) == ir.DataType.FLOAT for value in node.outputs)
    if not (found.outputs if has_float_output else found.inputs):
        return None
    if not found.inputs and not is_standard(node, *_HOLDING):
        # ONNX Runtime's CPU computes in fp32 what reads narrow floats, and does not what only makes
        # some
        return None
    return found if _stays_valid(node, found, _TYPES[activation], facts) else None


def _stays_valid(node: ir.Node, ports: _Ports, to: ir.DataType, facts: Facts) -> bool:
    """Whether onnx infers the types of a node in another type as they are expected, or fails on it as it does now.

    The type variables of an operator do not say everything: ``BitCast`` needs types of equal width,
    a window function has its type from an attribute of its own, ``MeanVarianceNormalization`` is a
    function with constants in fp32.
    """
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    domain, version = node.domain, facts.graph.opset_imports.get(node.domain, 1)
    is_known = node.op_type != "Constant" and onnx.defs.has(node.op_type, version, domain)
    if not is_known or any(facts.dtypes.get(value) is None for value in values):
        return True
    names = {value: f"v{number}" for number, value in enumerate(dict.fromkeys(values))}
    kinds = {value: facts.dtypes[value] for value in names}
    narrow = kinds | dict.fromkeys((node.outputs[place] for place in ports.outputs), to)
    narrow |= {value: to for place in ports.inputs if (value := node.inputs[place]) is not None}
    converted = ir.Node(domain, node.op_type, [], attributes=list(node.attributes.values()))
    _convert_attributes(converted, to)

    def fault(attributes: ir.Node, types: Mapping[ir.Value, ir.DataType | None]) -> str:
        proto = onnx.NodeProto(
            op_type=node.op_type, domain=domain, attribute=ir.to_proto(attributes).attribute
        )
        proto.input.extend("" if value is None else names[value] for value in node.inputs)
        proto.output.extend(names[value] for value in node.outputs)
        return _fault_of(
            proto.SerializeToString(), version, tuple((names[each], types[each]) for each in names)
        )

    found = fault(converted, narrow)
    return not found or found == fault(node, kinds)


@functools.lru_cache(maxsize=1024)
def _fault_of(node: bytes, version: int, dtypes: tuple[tuple[str, ir.DataType | None], ...]) -> str:
    """Why onnx does not infer these element types for a node, whose inputs and outputs have these names; "" if it does.

    A fault that the node has in fp32 is known: the file that is written may have it, too, and no
    other.
    """
    proto = onnx.NodeProto.FromString(node)
    made = frozenset(proto.output)
    described = {
        name: onnx.helper.make_tensor_value_info(name, int(dtype or 0), None)
        for name, dtype in dtypes
    }
    given = [value for name, value in described.items() if name not in made]
    graph = onnx.helper.make_graph([proto], "g", given, [described[name] for name in proto.output])
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid(proto.domain, version)]
    )
    try:
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except Exception as error:  # onnx's errors share no base but this
        return str(error)
    return ""


def _is_quantized(node: ir.Node, facts: Facts) -> bool:
    """Whether an operator computes with quantized activations: ONNX Runtime fuses it with scales in float32 alone.

    So do those that dequantize its constants: the scale of a bias of 32 bits can be too small for
    float16.
    """
    if quantizes(node) or _has_dequantized(node, facts):
        return True
    if not dequantizes(node):
        return False
    if constant_of(node.inputs[0]) is None:
        return True
    readers = [use.node for use in node.outputs[0].uses()]
    return bool(readers) and all(_has_dequantized(reader, facts) for reader in readers)


def _has_dequantized(node: ir.Node, facts: Facts) -> bool:
    """Whether a node has ranges measured ahead, also if they are of its two factors alone."""
    before = facts.dequantized(node)
    is_product = len(before) > 1 and any(constant_of(value) is None for value in before)
    return is_product or facts.is_static(node)


@dataclass(frozen=True)
class _TypeNames:
    """The formal types of an operator: of its inputs and outputs, and the types that a variable allows."""

    inputs: Sequence[str]
    outputs: Sequence[str]
    allowed: Mapping[str, Sequence[str]]


@functools.cache
def _type_names(domain: str, op_type: str, opset: int) -> _TypeNames | None:
    """Those of ONNX's definition; for an operator of ONNX Runtime's own, of its newest version."""
    if not domain:
        if not onnx.defs.has(op_type, opset):
            return None
        schema = onnx.defs.get_schema(op_type, opset)
        formals = [
            [formal.type_str for formal in listed] for listed in (schema.inputs, schema.outputs)
        ]
    else:
        from onnxruntime.capi import onnxruntime_pybind11_state

        listed = onnxruntime_pybind11_state.get_all_operator_schema()
        known = [schema for schema in listed if (schema.domain, schema.name) == (domain, op_type)]
        if not known:
            return None
        schema = max(known, key=lambda schema: schema.since_version)
        formals = [
            [formal.typeStr for formal in listed] for listed in (schema.inputs, schema.outputs)
        ]
    allowed = {
        constraint.type_param_str: constraint.allowed_type_strs
        for constraint in schema.type_constraints
    }
    return _TypeNames(formals[0], formals[1], allowed)


class _Casting:
    """Nodes of a model get another float type, in place; they come with what they can read and make in the type."""

    def __init__(self, chosen: Mapping[ir.Node, _Ports], precision: Precision, work: Work) -> None:
        self._chosen, self._precision, self._work, self._names = chosen, precision, work, work.names
        self._suffix, self._type = precision.activation, _TYPES[precision.activation]
        self._narrows_io = precision.options.get("narrow_io", False)
        self._made = {
            node.outputs[place] for node, ports in chosen.items() for place in ports.outputs
        }
        self._cast: dict[tuple[ir.Value, ir.Graph | None], ir.Value] = {}
        self._weights: dict[ir.Value, ir.Value] = {}
        self._widened: dict[ir.Value, ir.Value] = {}

    def run(self) -> list[ir.Value]:
        """Cast, and return the weights that may have no readers any more."""
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
        for node in self._chosen:
            source = node.inputs[0] if _casts_to(node, self._type) else None
            if (
                source is not None
                and source.dtype == self._type
                and not node.outputs[0].is_graph_output()
            ):
                node.outputs[0].replace_all_uses_with(source)
                self._widened[node.outputs[0]] = source
        for value, source in self._widened.items():
            if not value.uses() and not value.is_graph_output():
                self._drop(value, source)
        return list(self._weights)

    def _drop(self, value: ir.Value, source: ir.Value) -> None:
        """Remove a Cast that nothing reads; the tensor before it has the name again that it had without the Cast."""
        remove_unused([value])
        if str(source.name).startswith(f"{value.name}_") and not source.is_graph_output():
            source.name = value.name
            source.metadata_props.update(value.metadata_props)

    def _narrow(self, value: ir.Value, reader: ir.Node) -> ir.Value:
        """The value in the type, for the first reader of it in a graph and for those that follow."""
        tensor = constant_of(value)
        if tensor is not None:
            if value not in self._weights:
                self._weights[value] = self._narrow_weight(value, tensor)
            return self._weights[value]
        if (source := _before_widening(value)) is not None:
            self._widened[value], value = source, source
            if source.dtype == self._type:
                return source
        if (
            self._narrows_io
            and value.is_graph_input()
            and self._all_read_narrow(value, *SIZES_ONLY)
        ):
            value.type = ir.TensorType(self._type)
            return value
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
        """A weight in the type, read when it is written: under its own name if nothing reads it as it was any more."""
        to, shape = self._type, ir.Shape(tensor.shape.numpy())
        lazy = ir.LazyTensor(
            lambda: ir.Tensor(narrowed(tensor.numpy(), to), dtype=to), to, shape, name=tensor.name
        )
        narrow = recorded(lazy, step("narrow", recipe_of(value), to.name.lower()))
        if value.is_initializer() and not value.is_graph_output() and self._all_read_narrow(value):
            value.const_value, value.type = narrow, ir.TensorType(to)
            return value
        name = self._names.tensors.unused(f"{value.name}_{self._suffix}")
        new = ir.Value(name=name, type=ir.TensorType(to), shape=shape, const_value=narrow)
        new.metadata_props.update(value.metadata_props)
        self._work.model.graph.register_initializer(new)
        return new

    def _reads_narrow(self, node: ir.Node, place: int) -> bool:
        ports = self._chosen.get(node)
        return ports is not None and place in ports.inputs

    def _all_read_narrow(self, value: ir.Value, *others: str) -> bool:
        """Whether nothing else reads a value, other than operators of these types."""
        return all(
            self._reads_narrow(use.node, use.idx)
            or (bool(others) and is_standard(use.node, *others))
            for use in value.uses()
        )

    def _is_planned(self, node: ir.Node) -> bool:
        return self._work.planned.get(node) == self._precision

    def _give_back(self, value: ir.Value) -> None:
        """Let a value have the type; those who read it as it was read a Cast, which has its name.

        Those that read the size of a tensor alone, and have the same precision in the plan, need
        none of the old type.
        """
        others = [use for use in value.uses() if not self._reads_narrow(use.node, use.idx)]
        for use in others:
            if _narrows(use.node) and _casts_to(use.node, self._type):
                self._widened[use.node.outputs[0]] = value
                use.node.outputs[0].replace_all_uses_with(value)
        others = [use for use in others if not _narrows(use.node)]
        others = [
            use
            for use in others
            if not (is_standard(use.node, *SIZES_ONLY) and self._is_planned(use.node))
        ]
        stays = value.is_graph_output() and not (self._narrows_io and not others)
        if others or stays:
            maker = value.producer()
            assert maker is not None
            assert isinstance(maker.graph, ir.Graph)
            back = self._cast_node(value, ir.DataType.FLOAT, "")
            maker.graph.insert_after(maker, back)
            result = back.outputs[0]
            result.metadata_props.update(value.metadata_props)
            replace_uses(
                value, result, others, self._names.tensors.unused(f"{value.name}_{self._suffix}")
            )
        value.type = ir.TensorType(self._type)

    def _cast_node(self, value: ir.Value, to: ir.DataType, name: str) -> ir.Node:
        node = ir.node("Cast", [value], {"to": int(to)})
        self._work.model.graph.opset_imports.setdefault("", _CAST_OPSET)
        node.name = self._names.nodes.unused(f"{value.name}_to_{to.name.lower()}")
        result = node.outputs[0]
        result.type, result.shape = ir.TensorType(to), value.shape
        result.name = self._names.tensors.unused(name) if name else None
        return node


def _before_widening(value: ir.Value) -> ir.Value | None:
    """The tensor of 16 bits that a Cast widens to a value; None if that was no Cast which `quantize` inserted."""
    cast = value.producer()
    source = cast.inputs[0] if cast is not None and _is_inserted_cast(cast) else None
    return source if source is not None and source.dtype in _TYPES.values() else None


def _casts_to(node: ir.Node, dtype: ir.DataType) -> bool:
    return is_standard(node, "Cast") and node.attributes["to"].as_int() == dtype


def _narrows(node: ir.Node) -> bool:
    """Whether a node is a Cast to 16 bits, which `quantize` inserted: it may read a tensor of 16 bits as well."""
    is_bound = any(value.is_graph_output() for value in node.outputs)
    return (
        _is_inserted_cast(node)
        and not is_bound
        and node.attributes["to"].as_int() in _TYPES.values()
    )


def _is_inserted_cast(node: ir.Node) -> bool:
    """Whether a node is such a Cast; new ones get their tags at the end."""
    is_ours = (
        tags.MODULE not in node.metadata_props
        or node.metadata_props.get(tags.REASON) == Reason.INSERTED
    )
    return is_ours and is_standard(node, "Cast")


def _convert_attributes(node: ir.Node, to: ir.DataType) -> None:
    """Let a node that says the type of its output, or holds it, say the other one."""
    for name in ("to", "dtype"):
        if name in node.attributes and node.attributes[name].as_int() == ir.DataType.FLOAT:
            node.attributes[name] = ir.AttrInt64(name, int(to))
    if node.op_type == "ConstantOfShape":
        value = node.attributes.get("value")
        _hold(node, value.as_tensor().numpy() if value is not None else np.zeros(1, np.float32), to)
    if node.op_type == "Constant":
        name = next(
            name for name in ("value", "value_float", "value_floats") if name in node.attributes
        )
        held = node.attributes.pop(name).value
        _hold(node, held.numpy() if name == "value" else np.asarray(held, np.float32), to)


def _hold(node: ir.Node, array: Array, to: ir.DataType) -> None:
    node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(narrowed(array, to), dtype=to))
