"""The check of what is written: onnx's checker and its shape inference, before a file takes its place.

Large weights become inputs of the graph that is checked: 1,200 nodes take 10 ms. Faults that the
model already had of which this one was made (`made_from`) are no fault of the work; that model is
looked at only where the check fails.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import onnx
import onnx.inliner
import onnx_ir as ir

from htp_export.errors import ResultError
from htp_export.files.lazy_tensor import replace_with, slots
from htp_export.files.protobuf_bytes import Marks, graph_protos, subgraph_protos
from htp_export.format import tags

_log = logging.getLogger(__name__)

_Sources = Callable[[], Iterable[ir.Model]]

_sources: ContextVar[_Sources | None] = ContextVar("htp_export_sources", default=None)

_NODE = re.compile(r"\(op_type:([^,)]+)(?:, node name: (.*?))?\): (.*)")  # of shape inference
_CONTEXT = re.compile(r"[Nn]ame: (.*?) OpType: (\S+)")  # of the checker
_KIND = re.compile(r"^(\[\w+Error\] ?|Inference error\(s\): ?)+")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_INLINED = re.compile(r"__\d+$")  # what onnx's inliner adds to a name
_NODE_NAME = re.compile(r", node name: [^)]*")  # of an inner node, which may have got one
_OPAQUE = "htp_export.opaque"
_LONGEST = 500  # characters of onnx's message
# elements of a vector whose values onnx follows: those of shapes have 64, in parts of a few
_MOST_PROPAGATED = 1_024


@dataclass(frozen=True)
class Fault:
    """What onnx says against a model; equal where it is said of another node, too: ``kind`` has no names.

    ``node`` and ``modules`` are the name of the node at fault and its owners, as far as they are
    known.
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
    """Refuse a model that is not valid, or has a tensor without elements that had some before, or was not there.

    It is written all the same if the models that it was made of had the same faults. Where nobody
    has said what it was made of (`made_from`), its faults are logged. ``proto`` is what
    `hollow_proto` makes, and is used up.
    """
    found = _examined(_without_weights(proto, marks))
    if not found.faults and not found.empty:
        return
    sources = _sources.get()
    made_of = [] if sources is None else sources()
    before = [_examined(_without_weights(*hollow_proto(source.clone())[:2])) for source in made_of]
    known = dict.fromkeys(fault for each in before for fault in each.faults)
    new = [fault for fault in found.faults if fault not in known]
    if sources is None:
        if new:  # a model that somebody else made in memory
            _log.warning("%s: the model is not valid, and is written as it is: %s", target, new[0])
        return
    new += [
        fault
        for name, fault in found.empty.items()
        if not any(each.may_have(name, found) for each in before)
    ]
    if new:
        raise ResultError(
            target, str(new[0]), new[0].node, new[0].modules, before=next(map(str, known), "")
        )


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
    return _examined(_without_weights(*hollow_proto(model.clone())[:2])).faults


def hollow_proto(copy: ir.Model) -> tuple[onnx.ModelProto, Marks, list[ir.TensorProtocol]]:
    """Return a model as a message with marks instead of its large weights, and these; the copy has the marks, too."""
    marks, marked = Marks(), list[ir.TensorProtocol]()
    for slot in list(slots(copy)):
        hollow = replace_with(slot.tensor, marks)
        if hollow is not None:
            marked.append(slot.tensor)
            slot.put(hollow)
    return ir.to_proto(copy), marks, marked


# --- a message without weights -----------------------------------------------------------------------------


def _without_weights(proto: onnx.ModelProto, marks: Marks) -> onnx.ModelProto:
    """Turn the weights that are not in a message into inputs.

    What the checker asks for and runtimes do not is changed as well: versions that it knows, shapes
    of inputs and outputs, and operators that ONNX Runtime has in ONNX's own domain.
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
        absent = {
            index: value
            for index, node in enumerate(graph.node)
            if (value := _absent(node, is_absent))
        }
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


def _absent(
    node: onnx.NodeProto, is_absent: Callable[[onnx.TensorProto], bool]
) -> onnx.TensorProto | None:
    held = (
        attribute.t for attribute in node.attribute if attribute.type == onnx.AttributeProto.TENSOR
    )
    return next((tensor for tensor in held if is_absent(tensor)), None)


def _is_of_onnxruntime(node: onnx.NodeProto) -> bool:
    """Whether a node's operator is in the domain of ONNX, and only ONNX Runtime has it.

    ``SimplifiedLayerNormalization`` is one: ONNX Runtime registers its kernel there, and nowhere
    else.
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


_Shape: TypeAlias = tuple[int | str, ...]


@dataclass(frozen=True)
class _Examination:
    """What onnx says of a model: its faults, tensors that become empty, and shapes in the main graph."""

    faults: list[Fault]
    empty: dict[str, Fault] = field(default_factory=dict)
    shapes: dict[str, _Shape] = field(default_factory=dict)

    def may_have(self, name: str, other: _Examination) -> bool:
        """Whether this model has an empty tensor as another model has, or a tensor of that name that may be so."""
        wanted, own = other.shapes[name], self.shapes.get(name)
        if wanted in self.shapes.values():
            return True
        if own is None or len(own) != len(wanted):
            return False
        return all(
            not isinstance(was, int) or was == now for was, now in zip(own, wanted, strict=True)
        )


def _examined(proto: onnx.ModelProto) -> _Examination:
    """Check a model with onnx's checker and its shape inference."""
    data = proto.SerializeToString()
    faults: list[Fault] = []
    try:
        onnx.checker.check_model(data)
    except Exception as error:  # onnx's errors share no base but this
        node = _CONTEXT.search(str(error))
        problem = _CONTEXT.sub("", str(error).partition("==> Context:")[0])
        fault = _fault(problem, *((node[2], node[1]) if node else ()))
        faults.append(_located(proto, fault))
    known = _without_unknown(proto)
    inferred = _inferred(known)
    if isinstance(inferred, list) and proto.functions:
        # What a body reads of an operator that onnx does not know has no type there: the flat graph
        # may tell it. functions that cannot be inlined, as onnx has several errors for it
        with contextlib.suppress(Exception):
            inferred = _inferred(_without_unknown(onnx.inliner.inline_local_functions(proto)))
    if isinstance(inferred, list):
        return _Examination([*faults, *(_located(proto, fault) for fault in inferred)])
    shapes = _shapes(inferred)
    return _Examination(faults, _empty(known, inferred, shapes), shapes)


def _inferred(proto: onnx.ModelProto) -> onnx.ModelProto | list[Fault]:
    """A model with all types and shapes, or the faults that its inference finds.

    The values of vectors are followed, because other shapes are computed with them. onnx allocates
    a hundred bytes for each element, also of vectors that the file only states the size of: of long
    ones, values are not followed.
    """
    plain = _inferred_once(proto, follow_values=False)
    if isinstance(plain, list):
        return plain
    found = _inferred_once(_without_long_vectors(plain), follow_values=True)
    if not isinstance(found, list):
        del found.graph.node[:]  # the types of nodes that were left out are those of its inputs
        found.graph.node.extend(plain.graph.node)
    return found


def _inferred_once(proto: onnx.ModelProto, *, follow_values: bool) -> onnx.ModelProto | list[Fault]:
    try:
        return onnx.shape_inference.infer_shapes(
            proto, check_type=True, strict_mode=True, data_prop=follow_values
        )
    except Exception as error:
        named = _NODE.findall(str(error))
        return [_fault(problem, op_type, node or "") for op_type, node, problem in named] or [
            _fault(str(error))
        ]


def _without_unknown(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A model without nodes of other domains: onnx excuses all faults of a graph that has one."""
    known = {"", "ai.onnx", "ai.onnx.ml", *(function.domain for function in proto.functions)}
    return _without(proto, lambda node: node.domain not in known)


def _without_long_vectors(proto: onnx.ModelProto) -> onnx.ModelProto:
    """A model without nodes of which onnx follows values, and that read or make a vector that is long, or may be so.

    The types of values in the bodies of functions are not known. Calls of functions with such nodes
    are left out.
    """
    small, other = set[str](), set[str]()
    for graph in graph_protos(proto.graph):
        for tensor in graph.initializer:
            (small if _is_short(tensor.dims) else other).add(tensor.name)
        for value in (*graph.input, *graph.value_info, *graph.output):
            sizes = [
                dim.dim_value if dim.HasField("dim_value") else None
                for dim in value.type.tensor_type.shape.dim
            ]
            (small if _has_shape(value) and _is_short(sizes) else other).add(value.name)
    small -= other  # graphs side by side may have the same names
    following = _operators_that_follow_values()

    def follows(node: onnx.NodeProto) -> bool:
        return node.domain in ("", "ai.onnx") and node.op_type in following

    calls = _functions_with(proto, follows)

    def may_grow(node: onnx.NodeProto) -> bool:
        if (node.domain, node.op_type, node.overload) in calls:
            return True
        return follows(node) and not small.issuperset(filter(None, (*node.input, *node.output)))

    return _without(proto, may_grow)


def _is_short(sizes: Iterable[int | None]) -> bool:
    """Whether a shape is that of a short vector, or of another tensor: onnx follows the values of vectors only."""
    listed = list(sizes)
    return len(listed) != 1 or (listed[0] is not None and listed[0] <= _MOST_PROPAGATED)


@functools.cache
def _operators_that_follow_values() -> frozenset[str]:
    """Operators with which onnx computes values of shapes, in any version of them."""
    schemas = onnx.defs.get_all_schemas_with_history()
    return frozenset(schema.name for schema in schemas if schema.has_data_propagation_function)


def _functions_with(
    proto: onnx.ModelProto, holds: Callable[[onnx.NodeProto], bool]
) -> set[tuple[str, str, str]]:
    """The functions of a model with such a node, in their body or in that of a function that they call."""
    bodies = {
        (function.domain, function.name, function.overload): [
            inner for node in function.node for inner in _nodes(node)
        ]
        for function in proto.functions
    }
    found = {key for key, nodes in bodies.items() if any(map(holds, nodes))}
    is_new = bool(found)
    while is_new:
        callers = set[tuple[str, str, str]]()
        for key, nodes in bodies.items():
            if any((node.domain, node.op_type, node.overload) in found for node in nodes):
                callers.add(key)
        is_new = not callers <= found
        found |= callers
    return found


def _without(proto: onnx.ModelProto, is_out: Callable[[onnx.NodeProto], bool]) -> onnx.ModelProto:
    """A model without some nodes of its main graph: those of a kind, or with such a node in a subgraph.

    What they make becomes inputs of the types that the model says. Where it says none, nodes that
    read them are left out as well, and so are nodes with such nodes in their subgraphs.
    """
    said = {
        value.name: value
        for value in (*proto.graph.value_info, *proto.graph.output)
        if _has_shape(value)
    }
    given, untyped = list[str](), set[str]()
    left_out: list[int] = []
    for place, node in enumerate(proto.graph.node):
        inners = list(_nodes(node))
        if not any(map(is_out, inners)) and untyped.isdisjoint(
            name for inner in inners for name in inner.input
        ):
            continue
        left_out.append(place)
        given += [name for name in node.output if name in said]
        untyped.update(name for name in node.output if name and name not in said)
    if not left_out:
        return proto
    part = onnx.ModelProto()
    part.CopyFrom(proto)
    for place in reversed(left_out):
        del part.graph.node[place]
    part.graph.input.extend(said[name] for name in given)
    return part


def _nodes(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """A node, and those of its subgraphs."""
    yield node
    for inner in subgraph_protos(node):
        for graph in graph_protos(inner):
            yield from graph.node


def _fault(problem: str, op_type: str = "", node: str = "") -> Fault:
    text = _KIND.sub("", " ".join(problem.split()))[:_LONGEST]
    return Fault(_QUOTED.sub("''", _NODE_NAME.sub("", text)), op_type, text, node)


def _located(proto: onnx.ModelProto, fault: Fault) -> Fault:
    """A fault with the modules of the node that it names; one of a function may have the name of an inlined copy."""
    nodes = list(itertools.chain.from_iterable(graph.node for graph in graph_protos(proto.graph)))
    nodes += [node for function in proto.functions for node in function.node]
    names = (fault.node, _INLINED.sub("", fault.node))
    node = next((node for name in names for node in nodes if name and node.name == name), None)
    if node is None:
        return fault
    owners = tags.owners_of({entry.key: entry.value for entry in node.metadata_props})
    return Fault(fault.kind, fault.op_type or node.op_type, fault.problem, node.name, tuple(owners))


def _shapes(inferred: onnx.ModelProto) -> dict[str, _Shape]:
    """The shapes of the main graph's tensors, as far as they are known; not of vectors of integers.

    These may be a part of a shape, and empty.
    """
    graph = inferred.graph
    found = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        kind = value.type.tensor_type
        is_vector = len(kind.shape.dim) == 1 and kind.elem_type in (
            onnx.TensorProto.INT64,
            onnx.TensorProto.INT32,
        )
        if kind.HasField("shape") and not is_vector and value.name not in found:
            sizes = kind.shape.dim
            found[value.name] = tuple(
                dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?"
                for dim in sizes
            )
    return found


def _empty(
    proto: onnx.ModelProto, inferred: onnx.ModelProto, shapes: Mapping[str, _Shape]
) -> dict[str, Fault]:
    """Tensors of the main graph without elements that a node makes of others, all of which have some."""
    found: dict[str, Fault] = {}
    for node in inferred.graph.node:
        if not node.input or any(0 in shapes.get(name, ()) for name in node.input):
            continue  # a constant, or what is computed of one
        for name in node.output:
            if 0 in shapes.get(name, ()):
                text = f"{name!r} has the shape [{', '.join(map(str, shapes[name]))}], without elements"
                found[name] = _located(proto, _fault(text, node.op_type, node.name))
    return found
