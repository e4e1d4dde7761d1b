"""The check of a model before it is written, with onnx's checker and its shape inference.

Large weights become inputs of the checked graph: 1,200 nodes take 10 ms. Errors that the source
models (`made_from`) already had are accepted; source models are examined only if the check fails.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import onnx
import onnx.inliner
import onnx_ir as ir

from htp_export.errors import ResultError
from htp_export.extras import is_installed, required
from htp_export.files.lazy_tensor import slots, with_mark
from htp_export.files.protobuf_bytes import Marks, graph_protos, subgraph_protos
from htp_export.format import tags

_log = logging.getLogger(__name__)

_Sources = Callable[[], Iterable[ir.Model]]

_sources: ContextVar[_Sources | None] = ContextVar("htp_export_sources", default=None)

_NODE = re.compile(
    r"\(op_type:([^,)]+)(?:, node name: (.*?))?\): (.*)"
)  # in shape inference errors
_CONTEXT = re.compile(r"[Nn]ame: (.*?) OpType: (\S+)")  # in errors of the checker
_KIND = re.compile(r"^(\[\w+Error\] ?|Inference error\(s\): ?)+")
_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_INLINED = re.compile(r"__\d+$")  # the suffix that onnx's inliner adds to a name
_NODE_NAME = re.compile(r", node name: [^)]*")  # the inliner may have renamed an inner node
_OPAQUE = "htp_export.opaque"
_LONGEST = 500  # characters of onnx's message, which can contain whole shapes and nested messages
# elements of a vector whose values onnx propagates: a shape has at most 64, and is computed in
# parts of a few
_MOST_PROPAGATED = 1_024


@dataclass(frozen=True)
class Fault:
    """An error that onnx reports for a model.

    Two faults are equal if they report the same problem, also for different nodes: ``kind`` is the
    message without names. ``node`` and ``modules`` are the name of the node at fault and its
    owners, if they are known.
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
    """Declare the source models of models that are written in a ``with`` block.

    ``sources`` is called only if a check fails.
    """
    token = _sources.set(sources)
    try:
        yield
    finally:
        _sources.reset(token)


def check_written(proto: onnx.ModelProto, marks: Marks, target: Path) -> None:
    """Refuse a model that is invalid, or in which a tensor has become empty.

    A fault that a source model has, too, is accepted. If the source models are unknown
    (`made_from`), faults are only logged. ``proto`` is the message from `hollow_proto`; it is
    changed.
    """
    result = _examined(_without_weights(proto, marks))
    if not result.faults and not result.empty:
        return
    sources = _sources.get()
    if sources is None:
        if result.faults:  # the user built the model in memory
            _log.warning(
                "%s: the model is not valid, and is written as it is: %s", target, result.faults[0]
            )
        return
    before = [_examined_model(source) for source in sources()]
    old_faults: dict[Fault, None] = {}
    for examination in before:
        old_faults.update(dict.fromkeys(examination.faults))
    new_faults = [fault for fault in result.faults if fault not in old_faults]
    for name, fault in result.empty.items():
        if not any(examination.may_have(name, result) for examination in before):
            new_faults.append(fault)
    if new_faults:
        first = new_faults[0]
        old_fault = next(map(str, old_faults), "")
        raise ResultError(target, str(first), first.node, first.modules, before=old_fault)


def faults_of(model: ir.Model) -> list[Fault]:
    """Return the errors that onnx's checker and its shape inference report; the weights are not read.

    Examples:
        >>> x = ir.val("x", ir.DataType.FLOAT, [2, 3])
        >>> y = ir.val("y", ir.DataType.FLOAT, [3, 2])
        >>> turned = ir.node("Transpose", [x], attributes={"perm": [7, 0]}, outputs=[y], name="turn")
        >>> graph = ir.Graph([x], turned.outputs, nodes=[turned], opset_imports={"": 20}, name="g")
        >>> [(fault.op_type, fault.node) for fault in faults_of(ir.Model(graph, ir_version=10))]
        [('Transpose', 'turn')]
    """
    return _examined_model(model).faults


def hollow_proto(copy: ir.Model) -> tuple[onnx.ModelProto, Marks, list[ir.TensorProtocol]]:
    """Return the message of a model with marks instead of its large weights, the marks, and these weights.

    The weights are replaced in ``copy``, too.
    """
    marks, marked = Marks(), list[ir.TensorProtocol]()
    for slot in list(slots(copy)):
        hollow = with_mark(slot.tensor, marks)
        if hollow is not None:
            marked.append(slot.tensor)
            slot.put(hollow)
    return ir.to_proto(copy), marks, marked


# --- a message without weights -----------------------------------------------------------------------------


def _without_weights(proto: onnx.ModelProto, marks: Marks) -> onnx.ModelProto:
    """Replace the weights that are not in a message by inputs of its graph.

    Requirements of the checker that runtimes do not have are met here: a known IR version, shapes
    of inputs and outputs, and no operators that only ONNX Runtime has in ONNX's domain.
    """
    proto.ir_version = min(proto.ir_version, onnx.IR_VERSION)
    _drop_shapeless(proto)
    absent = _AbsentWeights(proto, marks)
    for graph in graph_protos(proto.graph):
        for node in filter(_is_of_onnxruntime, graph.node):
            _hide(node, proto.opset_import)
        absent.replace_initializers(graph)
        absent.replace_constants(graph)
    for function in proto.functions:
        for node in function.node:
            if absent.attribute_of(node) is not None or _is_of_onnxruntime(node):
                _hide(node, function.opset_import)
    return proto


class _AbsentWeights:
    """The tensors of a message whose values are not in it: external ones, and those with a mark."""

    def __init__(self, proto: onnx.ModelProto, marks: Marks) -> None:
        self._proto, self._marks = proto, marks
        self._inputs = {value.name for value in proto.graph.input}

    def contains(self, tensor: onnx.TensorProto) -> bool:
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            return True
        return tensor.HasField("raw_data") and self._marks.number(tensor.raw_data) is not None

    def attribute_of(self, node: onnx.NodeProto) -> onnx.TensorProto | None:
        """Return the first absent tensor in the attributes of a node."""
        for attribute in node.attribute:
            if attribute.type == onnx.AttributeProto.TENSOR:
                tensor: onnx.TensorProto = attribute.t
                if self.contains(tensor):
                    return tensor
        return None

    def replace_initializers(self, graph: onnx.GraphProto) -> None:
        """Replace the absent initializers of a graph by inputs of the main graph."""
        kept: list[onnx.TensorProto] = []
        for tensor in graph.initializer:
            if self.contains(tensor):
                self._add_input(tensor.name, tensor)
            else:
                kept.append(tensor)
        if len(kept) < len(graph.initializer):
            del graph.initializer[:]
            graph.initializer.extend(kept)

    def replace_constants(self, graph: onnx.GraphProto) -> None:
        """Replace constant nodes with absent values by inputs; hide other nodes with absent tensors."""
        for index in reversed(range(len(graph.node))):
            node = graph.node[index]
            tensor = self.attribute_of(node)
            if tensor is None:
                continue
            if node.op_type == "Constant":
                self._add_input(node.output[0], tensor)
                del graph.node[index]
            else:
                _hide(node, self._proto.opset_import)

    def _add_input(self, name: str, tensor: onnx.TensorProto) -> None:
        if name in self._inputs:
            return
        self._inputs.add(name)
        added = self._proto.graph.input.add(name=name).type.tensor_type
        added.elem_type = tensor.data_type
        added.shape.SetInParent()
        for size in tensor.dims:
            added.shape.dim.add(dim_value=size)


def _drop_shapeless(proto: onnx.ModelProto) -> None:
    """Remove outputs without a shape, and produce inputs without a shape by an unknown operator."""
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


def _is_of_onnxruntime(node: onnx.NodeProto) -> bool:
    """Return whether an operator is in the domain of ONNX, but defined only by ONNX Runtime.

    An example is ``SimplifiedLayerNormalization``, which ONNX Runtime registers in no other domain.
    """
    is_unknown = node.domain in ("", "ai.onnx") and not onnx.defs.has(node.op_type)
    return is_unknown and node.op_type in _operators_of_onnxruntime()


@functools.cache
def _operators_of_onnxruntime() -> frozenset[str]:
    """The names of ONNX Runtime's operators in the domain of ONNX; empty if it is not installed."""
    if not is_installed("onnxruntime"):
        return frozenset()
    bindings = required("onnxruntime.capi.onnxruntime_pybind11_state")
    schemas = bindings.get_all_operator_schema()
    return frozenset(schema.name for schema in schemas if not schema.domain)


def _hide(node: onnx.NodeProto, imports: Iterable[onnx.OperatorSetIdProto]) -> None:
    """Move a node to an unknown domain, so that onnx does not check it."""
    node.domain = _OPAQUE
    del node.attribute[:]
    if all(entry.domain != _OPAQUE for entry in imports):
        imports.add(domain=_OPAQUE, version=1)  # type: ignore[attr-defined]


# --- errors of the checker and of shape inference ----------------------------------------------------------


_Shape: TypeAlias = tuple[int | str, ...]


@dataclass(frozen=True)
class _Examination:
    """The result of a check: faults, a fault for each tensor that becomes empty, and shapes in the main graph."""

    faults: list[Fault]
    empty: dict[str, Fault] = field(default_factory=dict)
    shapes: dict[str, _Shape] = field(default_factory=dict)

    def may_have(self, name: str, other: _Examination) -> bool:
        """Return whether this model may have the same empty tensor as another model.

        It does if any tensor has the same shape, and may if the tensor of that name has unknown
        dimensions.
        """
        empty_shape, own_shape = other.shapes[name], self.shapes.get(name)
        if empty_shape in self.shapes.values():
            return True
        if own_shape is None or len(own_shape) != len(empty_shape):
            return False
        for own_size, size in zip(own_shape, empty_shape, strict=True):
            if isinstance(own_size, int) and own_size != size:
                return False
        return True


def _examined_model(model: ir.Model) -> _Examination:
    """Check a model in memory, which is not changed."""
    proto, marks, _ = hollow_proto(model.clone())
    return _examined(_without_weights(proto, marks))


def _examined(proto: onnx.ModelProto) -> _Examination:
    """Check a message with onnx's checker and its shape inference."""
    data = proto.SerializeToString()
    faults: list[Fault] = []
    try:
        onnx.checker.check_model(data)
    except Exception as error:  # the errors of onnx have no other common base class
        node = _CONTEXT.search(str(error))
        problem = _CONTEXT.sub("", str(error).partition("==> Context:")[0])
        fault = _fault(problem, node[2], node[1]) if node else _fault(problem)
        faults.append(_located(proto, fault))
    known = _without_unknown(proto)
    inferred = _inferred(known)
    if isinstance(inferred, list) and proto.functions:
        # the outputs of operators that onnx does not know have no types in the body of a function,
        # but may have types in the flat graph; onnx raises various errors if it cannot inline
        with contextlib.suppress(Exception):
            inferred = _inferred(_without_unknown(onnx.inliner.inline_local_functions(proto)))
    if isinstance(inferred, list):
        return _Examination([*faults, *(_located(proto, fault) for fault in inferred)])
    shapes = _shapes(inferred)
    return _Examination(faults, _empty(known, inferred, shapes), shapes)


def _inferred(proto: onnx.ModelProto) -> onnx.ModelProto | list[Fault]:
    """Return a model with all types and shapes, or the faults that shape inference reports.

    The values of short vectors are propagated, because other shapes are computed from them. Not
    those of long vectors: onnx allocates a hundred bytes for each element, even if the file
    contains only the size of a vector.
    """
    plain = _inferred_once(proto, follow_values=False)
    if isinstance(plain, list):
        return plain
    inferred = _inferred_once(_without_long_vectors(plain), follow_values=True)
    if not isinstance(inferred, list):
        # the outputs of nodes that were left out are inputs of this model, with their types
        del inferred.graph.node[:]
        inferred.graph.node.extend(plain.graph.node)
    return inferred


def _inferred_once(proto: onnx.ModelProto, *, follow_values: bool) -> onnx.ModelProto | list[Fault]:
    try:
        return onnx.shape_inference.infer_shapes(
            proto, check_type=True, strict_mode=True, data_prop=follow_values
        )
    except Exception as error:
        named = _NODE.findall(str(error))
        if not named:
            return [_fault(str(error))]
        return [_fault(problem, op_type, node or "") for op_type, node, problem in named]


def _without_unknown(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model without nodes of other domains: onnx ignores all errors of a graph that has one."""
    known = {"", "ai.onnx", "ai.onnx.ml", *(function.domain for function in proto.functions)}
    return _without(proto, lambda node: node.domain not in known)


def _without_long_vectors(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model without the nodes for which onnx could propagate the values of a long vector.

    A vector of unknown length counts as long. In the bodies of functions, types are unknown: calls
    of functions with an operator that propagates values are left out.
    """
    short, long = set[str](), set[str]()
    for graph in graph_protos(proto.graph):
        for tensor in graph.initializer:
            (short if _is_short(tensor.dims) else long).add(tensor.name)
        for value in (*graph.input, *graph.value_info, *graph.output):
            is_short = _has_shape(value) and _is_short(_sizes(value))
            (short if is_short else long).add(value.name)
    short -= long  # two subgraphs may use the same name
    propagating = _propagating_operators()

    def propagates(node: onnx.NodeProto) -> bool:
        return node.domain in ("", "ai.onnx") and node.op_type in propagating

    calls = _functions_with(proto, propagates)

    def may_be_long(node: onnx.NodeProto) -> bool:
        if (node.domain, node.op_type, node.overload) in calls:
            return True
        return propagates(node) and not short.issuperset(filter(None, (*node.input, *node.output)))

    return _without(proto, may_be_long)


def _sizes(value: onnx.ValueInfoProto) -> list[int | None]:
    dims = value.type.tensor_type.shape.dim
    return [dim.dim_value if dim.HasField("dim_value") else None for dim in dims]


def _is_short(sizes: Iterable[int | None]) -> bool:
    """Return whether a shape is not that of a long vector: onnx propagates the values of vectors only."""
    listed = list(sizes)
    return len(listed) != 1 or (listed[0] is not None and listed[0] <= _MOST_PROPAGATED)


@functools.cache
def _propagating_operators() -> frozenset[str]:
    """Return the operators whose values onnx propagates, in any version of them."""
    schemas = onnx.defs.get_all_schemas_with_history()
    return frozenset(schema.name for schema in schemas if schema.has_data_propagation_function)


def _functions_with(
    proto: onnx.ModelProto, matches: Callable[[onnx.NodeProto], bool]
) -> set[tuple[str, str, str]]:
    """Return the functions with a matching node in their body, or in that of a function that they call."""
    bodies: dict[tuple[str, str, str], list[onnx.NodeProto]] = {}
    for function in proto.functions:
        body: list[onnx.NodeProto] = []
        for node in function.node:
            body += _nodes(node)
        bodies[function.domain, function.name, function.overload] = body
    matching = {key for key, nodes in bodies.items() if any(map(matches, nodes))}
    is_new = bool(matching)
    while is_new:
        callers = set[tuple[str, str, str]]()
        for key, nodes in bodies.items():
            if any((node.domain, node.op_type, node.overload) in matching for node in nodes):
                callers.add(key)
        is_new = not callers <= matching
        matching |= callers
    return matching


def _without(proto: onnx.ModelProto, matches: Callable[[onnx.NodeProto], bool]) -> onnx.ModelProto:
    """Return a model without the nodes of its main graph that match, or have a matching node in a subgraph.

    Their outputs become inputs, with the types in the model. Nodes that depend on an output without
    a type, also in subgraphs, are left out as well.
    """
    typed = {
        value.name: value
        for value in (*proto.graph.value_info, *proto.graph.output)
        if _has_shape(value)
    }
    new_inputs, untyped = list[str](), set[str]()
    left_out: list[int] = []
    for index, node in enumerate(proto.graph.node):
        nested = list(_nodes(node))
        if not any(map(matches, nested)) and not _reads_any(nested, untyped):
            continue
        left_out.append(index)
        new_inputs += [name for name in node.output if name in typed]
        untyped.update(name for name in node.output if name and name not in typed)
    if not left_out:
        return proto
    part = onnx.ModelProto()
    part.CopyFrom(proto)
    for index in reversed(left_out):
        del part.graph.node[index]
    part.graph.input.extend(typed[name] for name in new_inputs)
    return part


def _reads_any(nodes: Iterable[onnx.NodeProto], names: Collection[str]) -> bool:
    return any(name in names for node in nodes for name in node.input)


def _nodes(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    """Yield a node and the nodes of its subgraphs."""
    yield node
    for inner in subgraph_protos(node):
        for graph in graph_protos(inner):
            yield from graph.node


def _fault(problem: str, op_type: str = "", node: str = "") -> Fault:
    text = _KIND.sub("", " ".join(problem.split()))[:_LONGEST]
    return Fault(_QUOTED.sub("''", _NODE_NAME.sub("", text)), op_type, text, node)


def _located(proto: onnx.ModelProto, fault: Fault) -> Fault:
    """Return a fault with the modules that own its node, which may be an inlined copy of a function's node."""
    nodes: list[onnx.NodeProto] = []
    for graph in graph_protos(proto.graph):
        nodes += graph.node
    for function in proto.functions:
        nodes += function.node
    first_by_name: dict[str, onnx.NodeProto] = {}
    for candidate in nodes:
        first_by_name.setdefault(candidate.name, candidate)
    first_by_name.pop("", None)
    node = first_by_name.get(fault.node) or first_by_name.get(_INLINED.sub("", fault.node))
    if node is None:
        return fault
    owners = tags.owners_of({entry.key: entry.value for entry in node.metadata_props})
    return Fault(fault.kind, fault.op_type or node.op_type, fault.problem, node.name, tuple(owners))


def _shapes(inferred: onnx.ModelProto) -> dict[str, _Shape]:
    """Return the known shapes of tensors in the main graph, except of vectors of integers.

    Such a vector can be a part of a shape, which may be empty.
    """
    graph = inferred.graph
    shapes: dict[str, _Shape] = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor_type = value.type.tensor_type
        dims = tensor_type.shape.dim
        is_vector = len(dims) == 1 and tensor_type.elem_type in _INTEGERS
        if tensor_type.HasField("shape") and not is_vector and value.name not in shapes:
            shapes[value.name] = tuple(map(_size, dims))
    return shapes


_INTEGERS = (onnx.TensorProto.INT64, onnx.TensorProto.INT32)


def _size(dim: onnx.TensorShapeProto.Dimension) -> int | str:
    if dim.HasField("dim_value"):
        return dim.dim_value
    return dim.dim_param or "?"


def _empty(
    proto: onnx.ModelProto, inferred: onnx.ModelProto, shapes: Mapping[str, _Shape]
) -> dict[str, Fault]:
    """Return a fault for each empty tensor that a node computes from inputs that are all not empty."""
    faults: dict[str, Fault] = {}
    for node in inferred.graph.node:
        if not node.input or any(0 in shapes.get(name, ()) for name in node.input):
            continue  # an empty constant, or a value computed from one
        for name in node.output:
            if 0 in shapes.get(name, ()):
                text = f"{name!r} has the shape [{', '.join(map(str, shapes[name]))}], without elements"
                faults[name] = _located(proto, _fault(text, node.op_type, node.name))
    return faults
