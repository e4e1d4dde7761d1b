"""Operators in a 16-bit float type, with Casts at their borders.

There is one Cast for each tensor that crosses a border, in each direction, and none between
operators of one type, also if they got it in several calls: a consumer of the result of an earlier
widening Cast reads the input of that Cast.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx
import onnx_ir as ir

from htp_export.capabilities.quantize.method import Method, Precision
from htp_export.capabilities.quantize.work import Facts, Left, Work, is_packed
from htp_export.editing.editing import replace_uses
from htp_export.editing.submodels import constant_of, remove_unused
from htp_export.extras import required
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

_CAST_OPSET = 13
"""The opset of Casts in a model without operators of ONNX: the first one with bfloat16."""

_SOURCES = ("Cast", "Constant", "ConstantOfShape")
"""Operators that produce floats of any type without float inputs, and need no kernel for it."""

_CACHED_NODES = 1024
"""Nodes whose inferred types are cached: repeated blocks have some dozens of equal nodes."""


@dataclass(frozen=True)
class _Ports:
    """The places of the inputs and outputs of a node that can have another float type."""

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
        if ports is None or place not in ports.inputs:
            return None
        return 2 * math.prod(tensor.shape.numpy())

    def apply(self, nodes: Sequence[ir.Node], work: Work) -> Iterator[Left]:
        cast_nodes(nodes, self.precision, work)
        for node in nodes:
            is_product = operator_of(node) == "com.microsoft::MatMulNBits"
            activation = node.inputs[0] if is_product else None
            if activation is not None and activation.dtype == _TYPES[self.precision.activation]:
                # With a level, results in float16 depend on ONNX Runtime's optimizations.
                node.attributes.pop("accuracy_level", None)
        return iter(())

    def _ports(self, node: ir.Node, facts: Facts) -> _Ports | None:
        return _ports(node, self.precision.activation, facts)


METHOD = Cast


def cast_nodes(nodes: Iterable[ir.Node], precision: Precision, work: Work) -> None:
    """Let nodes, also inserted ones, compute in the type of the activations of a precision."""
    chosen: dict[ir.Node, _Ports] = {}
    for node in nodes:
        original = work.original_of.get(node)
        if original is None:  # an inserted node: the facts of the original do not cover it
            ports = _ports(node, precision.activation, _facts_of_inserted(node, work.facts))
        else:
            ports = _ports(original, precision.activation, work.facts)
        if ports is not None:
            chosen[node] = ports
    remove_unused(_Casting(chosen, precision, work).run())


def _facts_of_inserted(node: ir.Node, facts: Facts) -> Facts:
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    packed = frozenset(value for value in values if is_packed(value.type))
    return replace(facts, dtypes={value: value.dtype for value in values}, packed=packed)


def _ports(node: ir.Node, activation: str, facts: Facts) -> _Ports | None:
    """The inputs and outputs of a node that can have a float type; None if it cannot compute in it.

    The ONNX definition of the operator in the model's opset decides: some inputs always are 32-bit
    floats (the scales of ``Resize``), some operators accept a type only from a later opset on
    (``Conv`` in bfloat16).
    """
    if not _may_be_narrow(node, facts):
        return None
    types = _type_names(node.domain, node.op_type, facts.opset)
    if types is None:
        return None
    allowing = {
        name for name, allowed in types.allowed.items() if f"tensor({activation})" in allowed
    }
    ports = _Ports(
        _float_places(node.inputs, types.inputs, allowing, facts),
        _float_places(node.outputs, types.outputs, allowing, facts),
    )
    has_float_output = any(facts.dtypes.get(value) == ir.DataType.FLOAT for value in node.outputs)
    if not (ports.outputs if has_float_output else ports.inputs):
        return None
    if not ports.inputs and not is_standard(node, *_SOURCES):
        # ONNX Runtime's CPU inserts Casts around an operator that reads narrow floats, and fails on
        # an operator that only produces them.
        return None
    return ports if _stays_valid(node, ports, _TYPES[activation], facts) else None


def _may_be_narrow(node: ir.Node, facts: Facts) -> bool:
    """Whether a node may compute in 16 bits, as far as its ONNX types are not concerned."""
    if not facts.packed.isdisjoint((*node.inputs, *node.outputs)):
        # Sequences and optionals keep their element type, and so do tensors put into them.
        return False
    if subgraphs(node) or _is_quantized(node, facts):
        return False
    if node.op_type in SIZES_ONLY and not node.domain:
        return False
    # ONNX Runtime has kernels of scatters for narrow floats, which refuse to sum when they run.
    is_scatter = is_standard(node, "ScatterElements", "ScatterND")
    return not is_scatter or node.attributes.get_string("reduction", "none") == "none"


def _float_places(
    values: Sequence[ir.Value | None],
    formals: Sequence[str],
    allowing: Container[str],
    facts: Facts,
) -> tuple[int, ...]:
    """The places of 32-bit floats whose formal type is one of the variables in ``allowing``."""
    places: list[int] = []
    for place, value in enumerate(values):
        if not formals or value is None or facts.dtypes.get(value) != ir.DataType.FLOAT:
            continue
        formal = formals[min(place, len(formals) - 1)]  # the last one may be variadic
        if formal in allowing:
            places.append(place)
    return tuple(places)


def _stays_valid(node: ir.Node, ports: _Ports, to: ir.DataType, facts: Facts) -> bool:
    """Whether onnx infers the expected types of a converted node, or fails on it as it does now.

    The type variables of an operator do not tell everything: ``BitCast`` needs types of equal
    width, a window function has its type from an attribute, ``MeanVarianceNormalization`` is a
    function with constants in fp32.
    """
    version = facts.graph.opset_imports.get(node.domain, 1)
    if node.op_type == "Constant" or not onnx.defs.has(node.op_type, version, node.domain):
        return True  # nothing to infer
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    before = {value: facts.dtypes.get(value) for value in values}
    if None in before.values():
        return True
    after = dict(before)
    for place in ports.outputs:
        after[node.outputs[place]] = to
    for place in ports.inputs:
        value = node.inputs[place]
        if value is not None:
            after[value] = to
    converted = ir.Node(node.domain, node.op_type, [], attributes=list(node.attributes.values()))
    _convert_attributes(converted, to)
    problem = _inference_error(node, converted, version, after)
    return not problem or problem == _inference_error(node, node, version, before)


def _inference_error(
    node: ir.Node,
    attributes: ir.Node,
    version: int,
    dtypes: Mapping[ir.Value, ir.DataType | None],
) -> str:
    """The error of onnx's type inference for a node with the attributes of another node, or ""."""
    # Names by position, so that equal nodes of repeated blocks have one entry in the cache.
    names = {value: f"v{number}" for number, value in enumerate(dtypes)}
    proto = onnx.NodeProto(
        op_type=node.op_type, domain=node.domain, attribute=ir.to_proto(attributes).attribute
    )
    proto.input.extend("" if value is None else names[value] for value in node.inputs)
    proto.output.extend(names[value] for value in node.outputs)
    named_dtypes = tuple((names[value], dtype) for value, dtype in dtypes.items())
    return _inferred(proto.SerializeToString(), version, named_dtypes)


@functools.lru_cache(maxsize=_CACHED_NODES)
def _inferred(node: bytes, version: int, dtypes: tuple[tuple[str, ir.DataType | None], ...]) -> str:
    """The error of onnx's type inference for a serialized node with these types."""
    proto = onnx.NodeProto.FromString(node)
    infos = {
        name: onnx.helper.make_tensor_value_info(name, int(dtype or 0), None)
        for name, dtype in dtypes
    }
    produced = frozenset(proto.output)
    outputs = [infos[name] for name in proto.output]
    inputs = [info for name, info in infos.items() if name not in produced]
    graph = onnx.helper.make_graph([proto], "g", inputs, outputs)
    opset = onnx.helper.make_opsetid(proto.domain, version)
    model = onnx.helper.make_model(graph, opset_imports=[opset])
    try:
        onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    except Exception as error:  # onnx's errors share no base but this
        return str(error)
    return ""


def _is_quantized(node: ir.Node, facts: Facts) -> bool:
    """Whether a node belongs to an operator with quantized activations, which stays in float32.

    ONNX Runtime fuses such an operator with scales in float32 alone. The nodes that dequantize its
    constants stay, too: the scale of a 32-bit bias can be too small for float16.
    """
    if quantizes(node) or _has_dequantized(node, facts):
        return True
    if not dequantizes(node):
        return False
    is_activation = constant_of(node.inputs[0]) is None
    if is_activation:
        return True
    consumers = [use.node for use in node.outputs[0].uses()]
    return bool(consumers) and all(_has_dequantized(consumer, facts) for consumer in consumers)


def _has_dequantized(node: ir.Node, facts: Facts) -> bool:
    """Whether a node has quantized activations: all of them, or both factors of a product."""
    sources = facts.dequantized(node)
    is_product = len(sources) > 1 and any(constant_of(value) is None for value in sources)
    return is_product or facts.is_static(node)


@dataclass(frozen=True)
class _TypeNames:
    """The formal types of inputs and outputs of an operator, and variable → allowed types."""

    inputs: Sequence[str]
    outputs: Sequence[str]
    allowed: Mapping[str, Sequence[str]]


@functools.cache
def _type_names(domain: str, op_type: str, opset: int) -> _TypeNames | None:
    """The formal types as ONNX defines them; for another domain, the newest of ONNX Runtime."""
    if not domain:
        if not onnx.defs.has(op_type, opset):
            return None
        schema = onnx.defs.get_schema(op_type, opset)
        inputs = [formal.type_str for formal in schema.inputs]
        outputs = [formal.type_str for formal in schema.outputs]
    else:
        bindings = required("onnxruntime.capi.onnxruntime_pybind11_state", f"operators of {domain}")
        schemas = bindings.get_all_operator_schema()
        known = [schema for schema in schemas if (schema.domain, schema.name) == (domain, op_type)]
        if not known:
            return None
        schema = max(known, key=lambda schema: schema.since_version)
        inputs = [formal.typeStr for formal in schema.inputs]
        outputs = [formal.typeStr for formal in schema.outputs]
    allowed = {
        constraint.type_param_str: constraint.allowed_type_strs
        for constraint in schema.type_constraints
    }
    return _TypeNames(inputs, outputs, allowed)


class _Casting:
    """Converts nodes of a model to another float type, in place.

    Attributes:
        _narrow_results: Outputs of the nodes that will have the type.
        _casts: Tensor and graph → the result of its narrowing Cast in that graph.
        _weights: Weight → its counterpart in the type.
        _widened: Result of an earlier widening Cast → the input of that Cast.
    """

    def __init__(self, chosen: Mapping[ir.Node, _Ports], precision: Precision, work: Work) -> None:
        self._chosen, self._precision, self._work, self._names = chosen, precision, work, work.names
        self._suffix, self._type = precision.activation, _TYPES[precision.activation]
        self._narrows_io = precision.options.get("narrow_io", False)
        self._narrow_results = {
            node.outputs[place] for node, ports in chosen.items() for place in ports.outputs
        }
        self._casts: dict[tuple[ir.Value, ir.Graph | None], ir.Value] = {}
        self._weights: dict[ir.Value, ir.Value] = {}
        self._widened: dict[ir.Value, ir.Value] = {}

    def run(self) -> list[ir.Value]:
        """Convert the nodes, and return the weights that may have no consumers any more."""
        for node, ports in self._chosen.items():
            for place in ports.inputs:
                value = node.inputs[place]
                assert value is not None
                if value not in self._narrow_results:
                    node.replace_input_with(place, self._narrow(value, node))
        for node, ports in self._chosen.items():
            _convert_attributes(node, self._type)
            for place in ports.outputs:
                self._convert_output(node.outputs[place])
        for node in self._chosen:
            self._bypass_cast(node)
        for value, source in self._widened.items():
            if not value.uses() and not value.is_graph_output():
                self._drop(value, source)
        return list(self._weights)

    def _bypass_cast(self, node: ir.Node) -> None:
        """Let the consumers of a Cast of the model read its input, which has the type now."""
        if not _casts_to(node, self._type):
            return
        source, result = node.inputs[0], node.outputs[0]
        if source is not None and source.dtype == self._type and not result.is_graph_output():
            result.replace_all_uses_with(source)
            self._widened[result] = source

    def _drop(self, value: ir.Value, source: ir.Value) -> None:
        """Remove an unused Cast, and give its name, which it took over, to its input."""
        remove_unused([value])
        if str(source.name).startswith(f"{value.name}_") and not source.is_graph_output():
            source.name = value.name
            source.metadata_props.update(value.metadata_props)

    def _narrow(self, value: ir.Value, reader: ir.Node) -> ir.Value:
        """The value in the type: a weight, the input of an earlier Cast, or a new Cast."""
        tensor = constant_of(value)
        if tensor is not None:
            if value not in self._weights:
                self._weights[value] = self._narrow_weight(value, tensor)
            return self._weights[value]
        source = _before_widening(value)
        if source is not None:
            self._widened[value] = source
            value = source
            if source.dtype == self._type:
                return source
        if self._can_narrow_input(value):
            value.type = ir.TensorType(self._type)
            return value
        graph = reader.graph
        assert isinstance(graph, ir.Graph)
        if (value, graph) not in self._casts:
            self._casts[value, graph] = self._insert_narrowing(value, graph)
        return self._casts[value, graph]

    def _can_narrow_input(self, value: ir.Value) -> bool:
        """Whether a value is an input of the model that may get the type (``narrow_io``)."""
        is_input = self._narrows_io and value.is_graph_input()
        return bool(is_input) and self._all_read_narrow(value, *SIZES_ONLY)

    def _insert_narrowing(self, value: ir.Value, graph: ir.Graph) -> ir.Value:
        producer = value.producer()
        cast = self._cast_node(value, self._type, f"{value.name}_{self._suffix}")
        if producer is not None and producer.graph is graph:
            graph.insert_after(producer, cast)
        else:  # an input, or a value of an outer graph
            graph.insert_before(next(iter(graph)), cast)
        return cast.outputs[0]

    def _narrow_weight(self, value: ir.Value, tensor: ir.TensorProtocol) -> ir.Value:
        """A weight in the type, converted when it is written; it replaces an unused original."""
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
        """Whether all consumers of a value read it in the type, or are operators in ``others``."""
        for use in value.uses():
            is_other = bool(others) and is_standard(use.node, *others)
            if not is_other and not self._reads_narrow(use.node, use.idx):
                return False
        return True

    def _convert_output(self, value: ir.Value) -> None:
        """Give a value the type; for consumers of fp32, insert a Cast, which takes over its name.

        Consumers that read only the size of a tensor, and have the same precision in the plan, do
        not need the old type.
        """
        others = [use for use in value.uses() if not self._reads_narrow(use.node, use.idx)]
        for use in others:
            if _narrows(use.node) and _casts_to(use.node, self._type):
                # a Cast of an earlier call: its consumers read this value from now on
                self._widened[use.node.outputs[0]] = value
                use.node.outputs[0].replace_all_uses_with(value)
        others = [use for use in others if not _narrows(use.node)]
        wide = [use for use in others if not self._reads_size(use.node)]
        keeps_type = value.is_graph_output() and (bool(wide) or not self._narrows_io)
        if wide or keeps_type:
            producer = value.producer()
            assert producer is not None
            assert isinstance(producer.graph, ir.Graph)
            cast = self._cast_node(value, ir.DataType.FLOAT, "")
            producer.graph.insert_after(producer, cast)
            result = cast.outputs[0]
            result.metadata_props.update(value.metadata_props)
            new_name = self._names.tensors.unused(f"{value.name}_{self._suffix}")
            replace_uses(value, result, wide, new_name)
        value.type = ir.TensorType(self._type)

    def _reads_size(self, node: ir.Node) -> bool:
        """Whether a node reads only the size of its input, and has the same precision."""
        is_planned = self._work.planned.get(node) == self._precision
        return is_planned and is_standard(node, *SIZES_ONLY)

    def _cast_node(self, value: ir.Value, to: ir.DataType, name: str) -> ir.Node:
        node = ir.node("Cast", [value], {"to": int(to)})
        self._work.model.graph.opset_imports.setdefault("", _CAST_OPSET)
        node.name = self._names.nodes.unused(f"{value.name}_to_{to.name.lower()}")
        result = node.outputs[0]
        result.type, result.shape = ir.TensorType(to), value.shape
        result.name = self._names.tensors.unused(name) if name else None
        return node


def _before_widening(value: ir.Value) -> ir.Value | None:
    """The 16-bit tensor that a Cast of `quantize` widened to a value; None without such a Cast."""
    cast = value.producer()
    if cast is None or not _is_inserted_cast(cast):
        return None
    source = cast.inputs[0]
    return source if source is not None and source.dtype in _TYPES.values() else None


def _casts_to(node: ir.Node, dtype: ir.DataType) -> bool:
    return is_standard(node, "Cast") and node.attributes["to"].as_int() == dtype


def _narrows(node: ir.Node) -> bool:
    """Whether a node is a narrowing Cast of `quantize`, which may also read a 16-bit tensor."""
    if any(value.is_graph_output() for value in node.outputs) or not _is_inserted_cast(node):
        return False
    return node.attributes["to"].as_int() in _TYPES.values()


def _is_inserted_cast(node: ir.Node) -> bool:
    """Whether `quantize` inserted a Cast: it is tagged as inserted, or new and without tags yet."""
    if not is_standard(node, "Cast"):
        return False
    is_new = tags.MODULE not in node.metadata_props
    return is_new or node.metadata_props.get(tags.REASON) == Reason.INSERTED


def _convert_attributes(node: ir.Node, to: ir.DataType) -> None:
    """Convert the attributes that name the element type of an output, or contain its value."""
    for name in ("to", "dtype"):
        if name in node.attributes and node.attributes[name].as_int() == ir.DataType.FLOAT:
            node.attributes[name] = ir.AttrInt64(name, int(to))
    if node.op_type == "ConstantOfShape":
        value = node.attributes.get("value")
        array = np.zeros(1, np.float32) if value is None else value.as_tensor().numpy()
        _set_value(node, array, to)
    elif node.op_type == "Constant":
        name = next(
            name for name in ("value", "value_float", "value_floats") if name in node.attributes
        )
        content = node.attributes.pop(name).value
        is_tensor = name == "value"
        _set_value(node, content.numpy() if is_tensor else np.asarray(content, np.float32), to)


def _set_value(node: ir.Node, array: Array, to: ir.DataType) -> None:
    node.attributes["value"] = ir.AttrTensor("value", ir.Tensor(narrowed(array, to), dtype=to))
