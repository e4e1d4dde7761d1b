"""Graphs of torch's operators from ``torch.export``, with tags: for models that ONNX has no translation of.

They are in the classes that hold ONNX graphs: operators are nodes such as ``aten::linear``, tensors
among the arguments are inputs, in the order of the operator's schema, and all else is an attribute.
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
# torch's own key; what draws nodes reads their lines there
_STACK_TRACE = "pkg.torch.onnx.stack_trace"

_IDENTITIES = {
    (tags.ATEN, name) for name in ("alias", "clone", "detach", "lift_fresh", "lift_fresh_copy")
}
"""Operators of torch that give back their input; dropout is one of them when the model does not train."""

_Values: TypeAlias = dict[Any, Any]


def graph_of_program(program: Any) -> tuple[ir.Model, dict[str, Any]]:
    """The graph of a functional program, and the name of each FX node → its value, or its values if it has several.

    The initializers hold the parameters and buffers of the program, no copies.
    """
    body, inputs, initializers = _Body(program.graph_module, {}), list[ir.Value](), list[ir.Value]()
    held = {**program.constants, **program.state_dict}
    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    for node in program.graph.nodes:
        known = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(known, torch.Tensor | torch.SymInt):
            continue
        # a parameter, a buffer or a constant; None for what the user gives
        tensor = held.get(targets.get(node.name))
        value = body.values[node] = _value(
            str(node.name if tensor is None else targets[node.name]), known
        )
        (inputs if tensor is None else initializers).append(value)
        if isinstance(tensor, torch.Tensor) and value.dtype is not None:
            value.const_value = TorchTensor(tensor.detach(), name=value.name)
    returned = zip(body.translate(), program.graph_signature.output_specs, strict=False)
    graph = ir.Graph(
        inputs,  # what was changed of buffers is not among the outputs
        [
            value
            for value, spec in returned
            if spec.kind.name == "USER_OUTPUT" and value is not None
        ],
        nodes=body.nodes,
        initializers=initializers,
        opset_imports={
            tags.ATEN: 1,
            **{domain: 1 if domain else _CONTROL_FLOW for domain in body.domains},
        },
    )
    return ir.Model(graph, ir_version=_IR_VERSION, producer_name="torch"), body.named


def drop_identities(
    graph: ir.Graph, replaced: Callable[[ir.Value, ir.Value], object] = lambda _old, _new: None
) -> list[ir.Node]:
    """Remove nodes that give back their input, as the optimiser of an ONNX export does; one between ends stays.

    ``replaced`` is told of each value, and of the one that replaces it. Returns the nodes that were
    removed.
    """
    removed = []
    for node in list(graph.all_nodes()):
        if (node.domain, node.op_type) not in _IDENTITIES or node.inputs[0] is None:
            continue
        source, result = node.inputs[0], node.outputs[0]
        around = node.graph
        if around is None or (result.is_graph_output() and source.producer() is None):
            continue
        replaced(result, source)
        result.replace_all_uses_with(source, replace_graph_outputs=True)
        around.remove(node)
        removed.append(node)
    return removed


class _Body:
    """The graph of a program, or of a branch in it whose names begin with ``prefix``; ``values``: FX node → value."""

    def __init__(self, module: Any, values: _Values, prefix: str = "") -> None:
        self._module, self._prefix = module, prefix
        self.values = values
        self.nodes: list[ir.Node] = []
        self.named: dict[str, Any] = {}
        self.domains: dict[str, None] = {}

    def translate(self) -> list[ir.Value | None]:
        """Make the nodes, and return what the graph returns."""
        checks, returned = _checks(self._module.graph), list[Any]()
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
        """``torch.cond`` is ONNX's ``If``: its branches read values from outside, as there."""
        condition, *_, operands = node.args
        branches = []
        for name, body in zip(
            ("then_branch", "else_branch"), bodies_of(self._module)[node], strict=True
        ):
            formals = [each for each in body.graph.nodes if each.op == "placeholder"]
            given = {
                formal: self._value(operand)
                for formal, operand in zip(formals, operands, strict=False)
            }
            inner = _Body(body, given, f"{self._prefix}{node.name}.{name}.")
            returned = [value for value in inner.translate() if value is not None]
            branches.append(
                ir.AttrGraph(name, ir.Graph([], returned, nodes=inner.nodes, name=name))
            )
            self.domains |= inner.domains
        self._add(node, "", "If", [self._value(condition)], branches)

    def _compute(self, node: Any) -> None:
        domain, op_type, overload = torch_internals.operator_name(node.target)
        inputs, attributes = self._arguments(node)
        made = self._add(node, domain, op_type, inputs, attributes, overload)
        if torch_internals.is_view(node) and _same_type(
            node.args[0].meta.get("val"), node.meta.get("val")
        ):
            made.meta[VIEW] = True

    def _add(
        self,
        node: Any,
        domain: str,
        op_type: str,
        inputs: list[ir.Value | None],
        attributes: list[ir.Attr],
        overload: str = "",
    ) -> ir.Node:
        known = node.meta.get("val")
        several = isinstance(known, list | tuple)
        names = _names_of_parts(node) if several else {0: node.name}
        outputs = [
            _value(self._prefix + names.get(place, f"{node.name}.{place}"), each)
            for place, each in enumerate(known if several else [known])
        ]
        made = ir.Node(
            domain,
            op_type,
            inputs,
            attributes,
            overload=overload,
            outputs=outputs,
            name=self._prefix + node.name,
        )
        made.meta["node"] = node
        if node.meta.get("stack_trace"):
            made.metadata_props[_STACK_TRACE] = node.meta["stack_trace"]
        self.values[node] = outputs if several else outputs[0]
        self.nodes.append(made)
        self.domains[domain] = None
        return made

    def _arguments(self, node: Any) -> tuple[list[ir.Value | None], list[ir.Attr]]:
        """What an operator reads, and its attributes."""
        inputs: list[ir.Value | None] = []
        attributes: list[ir.Attr] = []
        for name, value, takes_tensors in torch_internals.arguments_of(node):
            items = value if isinstance(value, list | tuple) else [value]
            computed = [isinstance(each, torch.fx.Node) for each in items]
            # those after it keep their places
            if any(computed) or (value is None and takes_tensors):
                inputs += [
                    self._value(each) if isinstance(each, torch.fx.Node) else None for each in items
                ]
            if value is not None and not all(computed):
                listed = any(computed) or not items
                attributes.append(
                    ir.AttrString(name, str(list(value))) if listed else _attribute(name, value)
                )
        while inputs and inputs[-1] is None:
            inputs.pop()
        return inputs, attributes

    def _value(self, node: Any) -> ir.Value | None:
        value = self.values.get(node)
        return value if isinstance(value, ir.Value) else None


def _checks(graph: Any) -> set[Any]:
    """The nodes that check what is true of sizes, and those whose results nothing but these checks reads."""
    found: set[Any] = set()
    for node in reversed(graph.nodes):
        is_tensor = isinstance(node.meta.get("val"), torch.Tensor)
        for_checks = bool(node.users) and set(node.users) <= found and not is_tensor
        if node.op == "call_function" and (torch_internals.is_assertion(node) or for_checks):
            found.add(node)
    return found


def _names_of_parts(node: Any) -> dict[int, str]:
    """Place of each of several results → the name of the node that takes it out."""
    taken = (user for user in node.users if user.target is operator.getitem)
    return {user.args[1]: user.name for user in reversed(list(taken))}


def _value(name: str, known: Any) -> ir.Value:
    """A value with the type and shape of what torch computed with while it traced."""
    if isinstance(known, torch.Tensor):
        return ir.Value(
            name=name,
            type=_type(known.dtype),
            shape=ir.Shape([_size(size) for size in known.shape]),
        )
    kinds = {
        torch.SymInt: ir.DataType.INT64,
        int: ir.DataType.INT64,
        torch.SymBool: ir.DataType.BOOL,
    }
    kinds |= {torch.SymFloat: ir.DataType.DOUBLE, float: ir.DataType.DOUBLE, bool: ir.DataType.BOOL}
    kind = kinds.get(type(known))
    if kind is None:
        return ir.Value(name=name)
    return ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape([]))


def _type(dtype: Any) -> ir.TensorType | None:
    try:
        return ir.TensorType(from_torch_dtype(dtype))
    except TypeError:  # ONNX has no such type: complex32, the quantized ones
        return None


def _size(size: Any) -> int | str:
    """A size; the expression of one that is not known before the model runs."""
    return size if isinstance(size, int) else str(size)


def _same_type(before: Any, made: Any) -> bool:
    """Whether nothing was converted: operators such as ``to`` give a view only then."""
    results = made if isinstance(made, list | tuple) else [made]
    return all(getattr(before, "dtype", None) == getattr(each, "dtype", None) for each in results)


def _attribute(name: str, argument: Any) -> ir.Attr:
    """An argument that is no tensor; as text, if ONNX has no attributes of its type."""
    try:
        return ir.convenience.convert_attribute(name, argument)
    except TypeError:
        return ir.AttrString(name, str(argument))


@dataclass(frozen=True)
class LoweredGraph:
    """An FX graph of any kind, in torch's operators."""

    # The graph, without tags. ``meta["node"]`` of each node is the FX node that it was made of.
    model: ir.Model
    # for each tensor that it was given, its name; None for what is no tensor
    inputs: tuple[str | None, ...]
    outputs: tuple[str | None, ...]  # the same for what it returns


def lowered_graph(
    module: torch.fx.GraphModule, inputs: tuple[Any, ...], named: Mapping[str, Any] | None = None
) -> LoweredGraph:
    """Translate the functions that an FX graph without breaks calls into torch's operators."""
    with torch.no_grad():
        program = torch.export.export(
            module, inputs, dict(named or {}), strict=False
        ).run_decompositions({})
    model, values = graph_of_program(program)
    signature = program.graph_signature

    def name_of(spec: Any) -> str | None:
        value = (
            values.get(spec.arg.name) if spec.kind.name in ("USER_INPUT", "USER_OUTPUT") else None
        )
        return str(value.name) if isinstance(value, ir.Value) else None

    given = tuple(name_of(spec) for spec in signature.input_specs if spec.kind.name == "USER_INPUT")
    returned = tuple(
        name_of(spec) for spec in signature.output_specs if spec.kind.name == "USER_OUTPUT"
    )
    return LoweredGraph(model, given, returned)


def exported_graph(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> ir.Model:
    """Export a model with ``torch.export``, and tag the graph of its program (`graph_of_program`) as a file would be.

    If torch's own tracer fails, Dynamo traces the model (``strict=True``): it knows NumPy, and
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
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, strict: bool
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
            functional = prepare(lambda made: made.run_decompositions({}))(program)
        capture.step("noting the calls in branches", capture.calls.mark_bodies, functional)
        graph, values = graph_of_program(functional)
        capture.step("noting the values of an FX graph", capture.translated_nodes, values)
        capture.step("reading the graph as it was translated", capture.translated, graph)
        capture.step(
            "dropping nodes that compute nothing", drop_identities, graph.graph, capture.replaced
        )
        known = Captured(capture, names.hierarchy, names.parameters)
        capture.step("tagging the nodes of the graph", write_tags, known, graph)
        capture.give_up()
        return graph
