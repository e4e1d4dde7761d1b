"""Graphs of torch's operators from ``torch.export``, with tags; they need no ONNX translation.

They are objects of onnx_ir: operators are nodes such as ``aten::linear``; tensors among the
arguments are inputs, in the order of the operator's schema; other arguments are attributes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import TorchTensor, from_torch_dtype

from htp_export.errors import CaptureError
from htp_export.exporter.capture import patches, running, torch_internals
from htp_export.exporter.capture.bodies import bodies_of
from htp_export.exporter.capture.dynamo import DynamoCapture
from htp_export.exporter.capture.dynamo_patches import prepare
from htp_export.exporter.capture.modules import ModuleNames
from htp_export.exporter.capture_session import Captured, write_tags
from htp_export.format import tags
from htp_export.process.restoring import (
    Changes,
    hold_collection,
    restored,
    set_variable,
    turn_attention_fast_path_off,
)
from htp_export.shapes.operator_kinds import VIEW

_IR_VERSION = 10  # that of torch's own files
_CONTROL_FLOW = 23  # ONNX's opset for ``If``, which a graph has for ``torch.cond``
# torch's own key, from which viewers read the lines of nodes
_STACK_TRACE = "pkg.torch.onnx.stack_trace"

_IDENTITIES = {
    (tags.ATEN, name) for name in ("alias", "clone", "detach", "lift_fresh", "lift_fresh_copy")
}
"""Operators of torch that return their input; dropout becomes one of them in evaluation mode."""

_Values: TypeAlias = dict[Any, Any]


def graph_of_program(program: Any) -> tuple[ir.Model, dict[str, Any]]:
    """The graph of a functional program, and FX node name → its value, or list of values.

    The initializers share the memory of the program's parameters and buffers.
    """
    body = _Body(program.graph_module, {})
    inputs = list[ir.Value]()
    initializers = list[ir.Value]()
    stored = {**program.constants, **program.state_dict}
    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    for node in program.graph.nodes:
        traced = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(traced, torch.Tensor | torch.SymInt):
            continue
        # a parameter, a buffer or a constant; None for an input of the user
        tensor = stored.get(targets.get(node.name))
        if tensor is None:
            value = _value(str(node.name), traced)
            inputs.append(value)
        else:
            value = _value(str(targets[node.name]), traced)
            initializers.append(value)
        body.values[node] = value
        if isinstance(tensor, torch.Tensor) and value.dtype is not None:
            value.const_value = TorchTensor(tensor.detach(), name=value.name)
    outputs = []
    for output, spec in zip(body.translate(), program.graph_signature.output_specs, strict=False):
        # without updated buffers, which are further outputs
        if spec.kind.name == "USER_OUTPUT" and output is not None:
            outputs.append(output)
    opsets = {tags.ATEN: 1}
    for domain in body.domains:
        opsets[domain] = 1 if domain else _CONTROL_FLOW
    graph = ir.Graph(
        inputs, outputs, nodes=body.nodes, initializers=initializers, opset_imports=opsets
    )
    return ir.Model(graph, ir_version=_IR_VERSION, producer_name="torch"), body.named


def drop_identities(
    graph: ir.Graph, replaced: Callable[[ir.Value, ir.Value], object] = lambda _old, _new: None
) -> list[ir.Node]:
    """Remove nodes that return their input, as the optimiser does; one from input to output stays.

    ``replaced`` is called with each value, and the value that replaces it. Returns the removed
    nodes.
    """
    removed = []
    for node in list(graph.all_nodes()):
        if (node.domain, node.op_type) not in _IDENTITIES or node.inputs[0] is None:
            continue
        source = node.inputs[0]
        result = node.outputs[0]
        around = node.graph
        if around is None or (result.is_graph_output() and source.producer() is None):
            continue
        replaced(result, source)
        result.replace_all_uses_with(source, replace_graph_outputs=True)
        around.remove(node)
        removed.append(node)
    return removed


class _Body:
    """The graph of a program, or of a branch in it, whose names begin with ``prefix``.

    ``values``: FX node → value.
    """

    def __init__(self, module: Any, values: _Values, prefix: str = "") -> None:
        self._module = module
        self._prefix = prefix
        self.values = values
        self.nodes: list[ir.Node] = []
        self.named: dict[str, Any] = {}
        self.domains: dict[str, None] = {}

    def translate(self) -> list[ir.Value | None]:
        """Translate the nodes, and return the outputs of the graph."""
        checks = _checks(self._module.graph)
        returned = list[Any]()
        for node in self._module.graph.nodes:
            if node.op == "call_function" and node not in checks:
                self._translate(node)
            elif node.op == "output":
                returned = torch_internals.outputs_of(node)
        self.named = {node.name: value for node, value in self.values.items()} | self.named
        return [self._value(leaf) for leaf in returned]

    def _translate(self, node: Any) -> None:
        source = node.args[0] if node.args else None
        if node.target is operator.getitem and isinstance(self.values.get(source), list):
            self.values[node] = self.values[source][node.args[1]]
        elif torch_internals.is_choice(node.target):
            self._choose(node)
        else:
            self._compute(node)

    def _choose(self, node: Any) -> None:
        """Translate ``torch.cond`` into ONNX's ``If``; its branches read outer values, too."""
        condition, *_, operands = node.args
        branches = []
        for name, body in zip(
            ("then_branch", "else_branch"), bodies_of(self._module)[node], strict=True
        ):
            formals = [formal for formal in body.graph.nodes if formal.op == "placeholder"]
            values = {
                formal: self._value(operand)
                for formal, operand in zip(formals, operands, strict=False)
            }
            inner = _Body(body, values, f"{self._prefix}{node.name}.{name}.")
            returned = [value for value in inner.translate() if value is not None]
            graph = ir.Graph([], returned, nodes=inner.nodes, name=name)
            branches.append(ir.AttrGraph(name, graph))
            self.domains |= inner.domains
        self._add(node, "", "If", [self._value(condition)], branches)

    def _compute(self, node: Any) -> None:
        domain, op_type, overload = torch_internals.operator_name(node.target)
        inputs, attributes = self._arguments(node)
        translated = self._add(node, domain, op_type, inputs, attributes, overload)
        if torch_internals.is_view(node) and _same_type(
            node.args[0].meta.get("val"), node.meta.get("val")
        ):
            translated.meta[VIEW] = True

    def _add(
        self,
        node: Any,
        domain: str,
        op_type: str,
        inputs: list[ir.Value | None],
        attributes: list[ir.Attr],
        overload: str = "",
    ) -> ir.Node:
        result = node.meta.get("val")  # as computed while tracing, without memory
        if isinstance(result, list | tuple):
            names = _names_of_parts(node)
            outputs = [
                _value(self._prefix + names.get(place, f"{node.name}.{place}"), part)
                for place, part in enumerate(result)
            ]
            self.values[node] = outputs
        else:
            outputs = [_value(self._prefix + node.name, result)]
            self.values[node] = outputs[0]
        translated = ir.Node(
            domain,
            op_type,
            inputs,
            attributes,
            overload=overload,
            outputs=outputs,
            name=self._prefix + node.name,
        )
        translated.meta["node"] = node
        if node.meta.get("stack_trace"):
            translated.metadata_props[_STACK_TRACE] = node.meta["stack_trace"]
        self.nodes.append(translated)
        self.domains[domain] = None
        return translated

    def _arguments(self, node: Any) -> tuple[list[ir.Value | None], list[ir.Attr]]:
        """The inputs and the attributes of an operator."""
        inputs: list[ir.Value | None] = []
        attributes: list[ir.Attr] = []
        for name, argument, takes_tensors in torch_internals.arguments_of(node):
            items = argument if isinstance(argument, list | tuple) else [argument]
            are_nodes = [isinstance(item, torch.fx.Node) for item in items]
            # an omitted tensor keeps the positions of the next ones
            if any(are_nodes) or (argument is None and takes_tensors):
                for item, is_node in zip(items, are_nodes, strict=True):
                    value = self._value(item) if is_node else None
                    inputs.append(value)
            if argument is None or all(are_nodes):
                continue
            if any(are_nodes):
                attributes.append(ir.AttrString(name, str(list(argument))))
            else:
                attributes.append(_attribute(name, argument))
        while inputs and inputs[-1] is None:
            inputs.pop()
        return inputs, attributes

    def _value(self, node: Any) -> ir.Value | None:
        value = self.values.get(node)
        if isinstance(value, ir.Value):
            return value
        return None


def _checks(graph: Any) -> set[Any]:
    """Nodes that check facts about sizes, and nodes whose results only these checks read."""
    found: set[Any] = set()
    for node in reversed(graph.nodes):
        is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
        for_checks = bool(node.users) and set(node.users) <= found and not is_tensor
        if node.op == "call_function" and (torch_internals.is_assertion(node) or for_checks):
            found.add(node)
    return found


def _names_of_parts(node: Any) -> dict[int, str]:
    """Position of each of several results → the name of the node that selects it."""
    taken = (user for user in node.users if user.target is operator.getitem)
    return {user.args[1]: user.name for user in reversed(list(taken))}


def _value(name: str, traced: Any) -> ir.Value:
    """A value with the type and shape of a result as traced."""
    if isinstance(traced, torch.Tensor):
        return ir.Value(
            name=name,
            type=_type(traced.dtype),
            shape=ir.Shape([_size(size) for size in traced.shape]),
        )
    kinds = {
        **dict.fromkeys((torch.SymInt, int), ir.DataType.INT64),
        **dict.fromkeys((torch.SymBool, bool), ir.DataType.BOOL),
        **dict.fromkeys((torch.SymFloat, float), ir.DataType.DOUBLE),
    }
    kind = kinds.get(type(traced))
    if kind is None:
        return ir.Value(name=name)
    return ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape([]))


def _type(dtype: Any) -> ir.TensorType | None:
    try:
        return ir.TensorType(from_torch_dtype(dtype))
    except TypeError:  # ONNX has no such type: complex32, the quantized ones
        return None


def _size(size: Any) -> int | str:
    """A size, or the expression of one that is unknown before the model runs."""
    return size if isinstance(size, int) else str(size)


def _same_type(before: Any, result: Any) -> bool:
    """Whether a result has the type of the input: only then, ``to`` and others return a view."""
    results = result if isinstance(result, list | tuple) else [result]
    dtype = getattr(before, "dtype", None)
    return all(getattr(part, "dtype", None) == dtype for part in results)


def _attribute(name: str, argument: Any) -> ir.Attr:
    """An argument that is not a tensor; as text, if ONNX has no attributes of its type."""
    try:
        return ir.convenience.convert_attribute(name, argument)
    except TypeError:
        return ir.AttrString(name, str(argument))


@dataclass(frozen=True)
class LoweredGraph:
    """An FX graph of any kind, in torch's operators."""

    # the graph, without tags; ``meta["node"]`` of each node is its FX node
    model: ir.Model
    # the name of each of the user's inputs; None for one that is not a tensor
    inputs: tuple[str | None, ...]
    outputs: tuple[str | None, ...]  # the same for the outputs


def lowered_graph(
    module: torch.fx.GraphModule,
    inputs: tuple[Any, ...],
    named: Mapping[str, Any] | None = None,
) -> LoweredGraph:
    """Translate an FX graph without breaks into torch's operators."""
    with torch.no_grad():
        program = torch.export.export(
            module, inputs, dict(named or {}), strict=False
        ).run_decompositions({})
    model, values = graph_of_program(program)
    signature = program.graph_signature

    def names(specs: Any, kind: str) -> tuple[str | None, ...]:
        user_values = [values.get(spec.arg.name) for spec in specs if spec.kind.name == kind]
        return tuple(
            str(value.name) if isinstance(value, ir.Value) else None for value in user_values
        )

    return LoweredGraph(
        model,
        names(signature.input_specs, "USER_INPUT"),
        names(signature.output_specs, "USER_OUTPUT"),
    )


def exported_graph(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> ir.Model:
    """Export a model with ``torch.export``, and tag the graph of its program (`graph_of_program`).

    If torch's own tracer fails, Dynamo traces the model (``strict=True``): it supports NumPy, and
    ``print``. The graph is functional and not decomposed.
    """
    try:
        return _attempt(model, args, kwargs, strict=False)
    except CaptureError:
        raise
    except Exception as error:
        try:
            return _attempt(model, args, kwargs, strict=True)
        except Exception:
            raise error from error.__cause__


def _attempt(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    strict: bool,
) -> ir.Model:
    names = ModuleNames(model)
    capture = DynamoCapture.of(names)

    def make(changes: Changes) -> None:
        running.wait_alone(changes)
        for places in (patches.DYNAMO_ENTRY, patches.MODULE_CALLS, patches.DYNAMO):
            places.hold(changes)
        turn_attention_fast_path_off(changes)
        hold_collection(changes, kept=True)
        capture.changes = changes.inner()
        set_variable(changes, running.dynamo_capture, capture)

    with restored(make):
        with torch.no_grad():
            program = torch.export.export(model, args, dict(kwargs), strict=strict)
            functional = prepare(lambda exported: exported.run_decompositions({}))(program)
        capture.step("recording the calls in branches", capture.calls.mark_bodies, functional)
        graph, values = graph_of_program(functional)
        capture.step("recording the values of an FX graph", capture.translated_nodes, values)
        capture.step("reading the graph as it was translated", capture.translated, graph)
        capture.step(
            "dropping nodes that compute nothing", drop_identities, graph.graph, capture.replaced
        )
        captured = Captured(capture, names.hierarchy, names.parameters)
        capture.step("tagging the nodes of the graph", write_tags, captured, graph)
        capture.give_up()
        return graph
