"""The check of what is written: onnx's checker and its shape inference, before a file takes its place.

Large weights become inputs of the graph that is checked: 1,200 nodes take 10 ms. Faults that the model already had of
which this one was made (`made_from`) are no fault of the work; that model is looked at only where the check fails.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import onnx_ir as ir

from htp_export.errors import ResultError
from htp_export.files.protobuf_bytes import Marks, graph_protos
from htp_export.files.stored import slots, stand_in
from htp_export.format import tags

_log = logging.getLogger(__name__)

_Sources = Callable[[], Iterable[ir.Model]]

_sources: ContextVar[_Sources | None] = ContextVar("htp_export_sources", default=None)

_NODE = re.compile(r"\(op_type:([^,)]+)(?:, node name: (.*?))?\): (.*)")  # of shape inference
_CONTEXT = re.compile(r"[Nn]ame: (.*?) OpType: (\S+)")  # of the checker
_KIND = re.compile(r"^(\[\w+Error\] ?|Inference error\(s\): ?)+")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_NODE_NAME = re.compile(r", node name: [^)]*")  # of an inner node, which may have got one
_OPAQUE = "htp_export.opaque"
_LONGEST = 500  # characters of onnx's message


@dataclass(frozen=True)
class Fault:
    """What onnx says against a model; equal where it is said of another node, too: ``kind`` has no names.

    ``node`` and ``modules`` are the name of the node at fault and its owners, as far as they are known.
    """

    kind: str
    op_type: str
    problem: str = field(compare=False)
    node: str = field(default="", compare=False)
    modules: tuple[str, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        if not self.op_type:
            return self.problem
        owners = f" of {', '.join(map(repr, self.modules))}" if self.modules else ""
        return f"{self.op_type} {self.node!r}{owners}: {self.problem}"


@contextlib.contextmanager
def made_from(sources: Callable[[], Iterable[ir.Model]]) -> Iterator[None]:
    """Say of which models those are made that are written meanwhile; they are opened only where a check fails."""
    token = _sources.set(sources)
    try:
        yield
    finally:
        _sources.reset(token)


def check_written(proto: onnx.ModelProto, marks: Marks, target: Path) -> None:
    """Refuse a model that is not valid, or has a dimension of 0 that no tensor had before.

    It is written all the same if the models that it was made of had the same faults. Where nobody has said what it was
    made of (`made_from`), its faults are logged. ``proto`` is what `hollow_proto` makes, and is used up.
    """
    found, empty = _examined(_without_weights(proto, marks))
    if not found and not empty:
        return
    known, empty_before = dict[Fault, None](), dict[tuple[int | str, ...], Fault]()
    sources = _sources.get()
    for source in () if sources is None else sources():
        its_faults, its_empty = _examined(_without_weights(*hollow_proto(source.clone())[:2]))
        known.update(dict.fromkeys(its_faults))
        empty_before.update(its_empty)
    new = [fault for fault in found if fault not in known]
    if sources is None:
        if new:  # a model that somebody else made in memory
            _log.warning("%s: the model is not valid, and is written as it is: %s", target, new[0])
        return
    new += [fault for shape, fault in empty.items() if shape not in empty_before]
    if new:
        raise ResultError(target, str(new[0]), new[0].node, new[0].modules, before=next(map(str, known), ""))


def faults_of(model: ir.Model) -> list[Fault]:
    """What onnx's checker and its shape inference say against a model; its weights are not read.

    Examples:
        >>> x = ir.val("x", ir.DataType.FLOAT, [2, 3])
        >>> y = ir.val("y", ir.DataType.FLOAT, [3, 2])
        >>> turned = ir.node("Transpose", [x], attributes={"perm": [7, 0]}, outputs=[y], name="turn")
        >>> graph = ir.Graph([x], turned.outputs, nodes=[turned], opset_imports={"": 20}, name="g")
        >>> [(fault.op_type, fault.node) for fault in faults_of(ir.Model(graph, ir_version=10))]
        [('Transpose', 'turn')]
    """
    return _examined(_without_weights(*hollow_proto(model.clone())[:2]))[0]


def hollow_proto(copy: ir.Model) -> tuple[onnx.ModelProto, Marks, list[ir.TensorProtocol]]:
    """Return a model as a message with marks instead of its large weights, and these; the copy has the marks, too."""
    marks, marked = Marks(), list[ir.TensorProtocol]()
    for slot in list(slots(copy)):
        hollow = stand_in(slot.tensor, marks)
        if hollow is not None:
            marked.append(slot.tensor)
            slot.put(hollow)
    return ir.to_proto(copy), marks, marked


# --- a message without weights -----------------------------------------------------------------------------


def _without_weights(proto: onnx.ModelProto, marks: Marks) -> onnx.ModelProto:
    """Turn the weights that are not in a message into inputs.

    What the checker asks for and runtimes do not is changed as well: versions that it knows, shapes of inputs and
    outputs, and operators that ONNX Runtime has in ONNX's own domain.
    """
    proto.ir_version = min(proto.ir_version, onnx.IR_VERSION)
    _drop_shapeless(proto)
    inputs = {value.name for value in proto.graph.input}

    def is_absent(tensor: onnx.TensorProto) -> bool:
        return tensor.data_location == onnx.TensorProto.EXTERNAL or (
            tensor.HasField("raw_data") and marks.number(tensor.raw_data) is not None
        )

    def add(name: str, tensor: onnx.TensorProto) -> None:
        if name not in inputs:
            inputs.add(name)
            added = proto.graph.input.add(name=name).type.tensor_type
            added.elem_type = tensor.data_type
            added.shape.SetInParent()
            for size in tensor.dims:
                added.shape.dim.add(dim_value=size)

    for graph in graph_protos(proto.graph):
        for node in filter(_is_of_onnxruntime, graph.node):
            _hide(node, proto.opset_import)
        kept = [tensor for tensor in graph.initializer if not is_absent(tensor)]
        if len(kept) < len(graph.initializer):
            for tensor in graph.initializer:
                if is_absent(tensor):
                    add(tensor.name, tensor)
            del graph.initializer[:]
            graph.initializer.extend(kept)
        absent = {index: value for index, node in enumerate(graph.node) if (value := _absent(node, is_absent))}
        for index in reversed(absent):
            if graph.node[index].op_type == "Constant":
                add(graph.node[index].output[0], absent[index])
                del graph.node[index]
            else:
                _hide(graph.node[index], proto.opset_import)
    for function in proto.functions:
        for node in function.node:
            if _absent(node, is_absent) or _is_of_onnxruntime(node):
                _hide(node, function.opset_import)
    return proto


def _drop_shapeless(proto: onnx.ModelProto) -> None:
    graph = proto.graph
    outputs = [value for value in graph.output if _has_shape(value)]
    del graph.output[:]
    graph.output.extend(outputs)
    shapeless = [value.name for value in graph.input if not _has_shape(value)]
    if shapeless:
        inputs = [value for value in graph.input if _has_shape(value)]
        del graph.input[:]
        graph.input.extend(inputs)
        graph.node.insert(0, onnx.NodeProto(op_type="Input", output=shapeless))
        _hide(graph.node[0], proto.opset_import)


def _has_shape(value: onnx.ValueInfoProto) -> bool:
    kind = value.type.WhichOneof("value")
    return kind is not None and (kind != "tensor_type" or value.type.tensor_type.HasField("shape"))


def _absent(node: onnx.NodeProto, is_absent: Callable[[onnx.TensorProto], bool]) -> onnx.TensorProto | None:
    held = (attribute.t for attribute in node.attribute if attribute.type == onnx.AttributeProto.TENSOR)
    return next((tensor for tensor in held if is_absent(tensor)), None)


def _is_of_onnxruntime(node: onnx.NodeProto) -> bool:
    """Whether a node's operator is in the domain of ONNX, and only ONNX Runtime has it.

    ``SimplifiedLayerNormalization`` is one: ONNX Runtime registers its kernel there, and nowhere else.
    """
    is_unknown = node.domain in ("", "ai.onnx") and not onnx.defs.has(node.op_type)
    return is_unknown and node.op_type in _operators_of_onnxruntime()


@functools.cache
def _operators_of_onnxruntime() -> frozenset[str]:
    from onnxruntime.capi import onnxruntime_pybind11_state

    schemas = onnxruntime_pybind11_state.get_all_operator_schema()
    return frozenset(schema.name for schema in schemas if not schema.domain)


def _hide(node: onnx.NodeProto, imports: Iterable[onnx.OperatorSetIdProto]) -> None:
    node.domain = _OPAQUE
    del node.attribute[:]
    if all(each.domain != _OPAQUE for each in imports):
        imports.add(domain=_OPAQUE, version=1)  # type: ignore[attr-defined]


# --- what onnx says ----------------------------------------------------------------------------------------


def _examined(proto: onnx.ModelProto) -> tuple[list[Fault], dict[tuple[int | str, ...], Fault]]:
    """The faults of a model, and the shapes in it without elements, each with a tensor that has it."""
    data = proto.SerializeToString()
    found: list[Fault] = []
    try:
        onnx.checker.check_model(data)
    except Exception as error:  # onnx's errors share no base but this
        node = _CONTEXT.search(str(error))
        problem = _CONTEXT.sub("", str(error).partition("==> Context:")[0])
        fault = _fault(problem, *((node[2], node[1]) if node else ()))
        found.append(_located(proto, fault))
    known = _without_unknown(proto)
    try:
        inferred = onnx.shape_inference.infer_shapes(known, check_type=True, strict_mode=True, data_prop=True)
    except Exception as error:
        named = _NODE.findall(str(error))
        faults = [_fault(problem, op_type, node or "") for op_type, node, problem in named] or [_fault(str(error))]
        return [*found, *(_located(known, fault) for fault in faults)], {}
    return found, _empty(inferred, known)


def _without_unknown(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A model without nodes of other domains: onnx excuses all faults of a graph that has one.

    What they make becomes inputs of the types that the model says. Where it does not say one, they all stay.
    """
    known = {"", "ai.onnx", "ai.onnx.ml", *(function.domain for function in proto.functions)}
    places = [place for place, node in enumerate(proto.graph.node) if node.domain not in known]
    said = {value.name: value for value in proto.graph.value_info if _has_shape(value)}
    names = [name for place in places for name in proto.graph.node[place].output if name]
    if not places or any(name not in said for name in names):
        return proto
    part = onnx.ModelProto()
    part.CopyFrom(proto)
    for place in reversed(places):
        del part.graph.node[place]
    part.graph.input.extend(said[name] for name in names)
    return part


def _fault(problem: str, op_type: str = "", node: str = "") -> Fault:
    text = _KIND.sub("", " ".join(problem.split()))[:_LONGEST]
    return Fault(_QUOTED.sub("''", _NODE_NAME.sub("", text)), op_type, text, node)


def _located(proto: onnx.ModelProto, fault: Fault) -> Fault:
    """A fault with the modules of the node that it names."""
    nodes = list(itertools.chain.from_iterable(graph.node for graph in graph_protos(proto.graph)))
    nodes += [node for function in proto.functions for node in function.node]
    node = next((node for node in nodes if fault.node and node.name == fault.node), None)
    if node is None:
        return fault
    owners = tags.owners_of({entry.key: entry.value for entry in node.metadata_props})
    return Fault(fault.kind, fault.op_type or node.op_type, fault.problem, node.name, tuple(owners))


def _empty(inferred: onnx.ModelProto, proto: onnx.ModelProto) -> dict[tuple[int | str, ...], Fault]:
    """The shapes of the main graph without elements, but for vectors of integers: they may be a part of a shape."""
    types = {value.name: value.type.tensor_type for value in (*inferred.graph.value_info, *inferred.graph.output)}
    shapes = {
        name: kind.shape.dim
        for name, kind in types.items()
        if len(kind.shape.dim) != 1 or kind.elem_type not in (onnx.TensorProto.INT64, onnx.TensorProto.INT32)
    }
    found: dict[tuple[int | str, ...], Fault] = {}
    for node, name in ((maker, name) for maker in proto.graph.node for name in maker.output):
        dims = shapes.get(name, ())
        if any(dim.HasField("dim_value") and dim.dim_value == 0 for dim in dims):
            shape = tuple(dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in dims)
            if shape not in found:
                text = f"{name!r} has the shape [{', '.join(map(str, shape))}], without elements"
                found[shape] = _located(proto, _fault(text, node.op_type, node.name))
    return found
