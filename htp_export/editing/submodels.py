"""Nodes of a model as a model of their own, and what a tool made of them put back in their place.

A tool that is given only the nodes that it may change cannot change others: a weight or a tensor that other nodes read
too stays as it was for them. The model around keeps its nodes, their order, their names and their tensors.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx
import onnx_ir as ir

from htp_export.editing.editing import take_place
from htp_export.format import tags
from htp_export.format.recipes import step
from htp_export.model.hashes import same_numbers
from htp_export.model.module_facts import stored_tensor
from htp_export.model.neighbours import replace_inputs
from htp_export.model.recipes import known_beginning, recipe_of, recorded
from htp_export.model.regions import all_values, twins_of
from htp_export.model.tensor_names import Names, UsedNames, rename
from htp_export.shapes.operator_kinds import with_subgraphs, without_copies
from htp_export.shapes.symbolic import Symbolic

_MOST_BITS = 8  # of the elements of a quantized tensor
_UNNAMED = "htp_export/"


@dataclass(frozen=True)
class Submodel:
    """Some nodes of a graph as a model; tools use it up.

    Attributes:
        model: The model; its tensors have the names that they have in the whole, its nodes have unique ones.
        nodes: The nodes in the whole, in order.
        inputs: Name of an input → the value in the whole; so are outputs and weights.
        outputs: What leaves.
        types: Name of an output → its type and shape, as far as they can be inferred.
        weights: The initializers.
        names: Name of a node in the model → its name in the whole, for the nodes that got another one.
    """

    model: ir.Model
    nodes: Sequence[ir.Node]
    inputs: Mapping[str, ir.Value]
    outputs: Mapping[str, ir.Value]
    types: Mapping[str, ir.Value]
    weights: Mapping[str, ir.Value]
    names: dict[str, str | None]

    def proto(self) -> onnx.ModelProto:
        """The model with all its weights in memory, as tools read it."""
        for value in self.model.graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)
        proto = ir.to_proto(self.model)
        known = [said for said in proto.graph.value_info if said.name not in self.model.graph.initializers]
        del proto.graph.value_info[:]
        proto.graph.value_info.extend(known)  # of weights, tools do not update it
        return proto


def constant_of(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initializer or of a ``Constant`` node, through ``Identity``; None for all other values.

    TorchScript exports have an ``Identity`` between a weight and each further module that has an equal one.
    """
    value = None if value is None else without_copies(value)
    return None if value is None or value.is_graph_input() else stored_tensor(value)


def cut_out(model: ir.Model, nodes: Sequence[ir.Node], types: Symbolic) -> Submodel:
    """Nodes of one graph of a model, in its order and without subgraphs, as a model that shares their weights.

    The graph is not changed; ``types`` knows the types and shapes of its tensors.
    """
    chosen = frozenset(nodes)
    graph_inputs: dict[str, ir.Value] = {}
    weights: dict[str, ir.Value] = {}
    outputs: dict[str, ir.Value] = {}
    for node in nodes:
        for value in node.inputs:
            if value is not None and value.producer() not in chosen:
                (graph_inputs if constant_of(value) is None else weights)[str(value.name)] = value
        for value in node.outputs:
            if value.is_graph_output() or any(use.node not in chosen for use in value.uses()):
                outputs[str(value.name)] = value
    given = (*graph_inputs.values(), *weights.values())
    opsets = dict(model.graph.opset_imports)
    graph = ir.GraphView(given, [*outputs.values()], nodes=nodes, opset_imports=opsets, name="part").clone()
    names, unique = dict[str, str | None](), UsedNames()
    for value, copy in zip(given, graph.inputs, strict=True):
        copy.const_value = constant_of(value)
        _describe(copy, types.described(value))
    for place, (node, twin) in enumerate(zip(nodes, graph, strict=True)):
        twin.name = unique.unused(node.name or f"{_UNNAMED}{place}")
        if twin.name != node.name:
            names[twin.name] = node.name
        for value, copy in zip(node.outputs, twin.outputs, strict=True):
            _describe(copy, types.described(value))
    initializers = graph.inputs[len(graph_inputs) :]
    graph.inputs[len(graph_inputs) :] = []  # del would leave them marked as inputs
    for copy in initializers:
        graph.initializers.add(copy)
    part = ir.Model(graph, ir_version=max(model.ir_version, 10))
    described = {name: types.described(value) for name, value in outputs.items()}
    return Submodel(part, tuple(nodes), graph_inputs, outputs, described, weights, names)


def _describe(value: ir.Value, known: ir.Value) -> None:
    """Give a value the type and shape that are known; those of a weight are its tensor's."""
    tensor = value.const_value
    value.type = known.type if tensor is None else ir.TensorType(tensor.dtype)
    value.shape = known.shape if tensor is None else ir.Shape(tensor.shape.numpy())


def in_copy(part: Submodel, whole: ir.Model, copy: ir.Model) -> Submodel:
    """The same part of a copy of the whole."""
    values = {str(value.name): value for value in all_values(copy.graph)}
    twin = twins_of(whole, copy)
    return replace(
        part,
        nodes=[twin[node] for node in part.nodes],
        inputs={name: values[str(value.name)] for name, value in part.inputs.items()},
        outputs={name: values[str(value.name)] for name, value in part.outputs.items()},
        weights={name: values[str(value.name)] for name, value in part.weights.items()},
    )


def put_back(whole: ir.Model, part: Submodel, made: ir.Model, names: Names) -> list[ir.Node]:
    """Replace the nodes of a part by what a tool made of it, which is used up; the new nodes.

    Each stands after the last one in the whole that it depends on, so that the others keep their order. What was made
    of a weight for another part already, with the same name and the same numbers, is not there twice.
    """
    graph = part.nodes[0].graph
    assert isinstance(graph, ir.Graph)
    new_nodes = list(made.graph)
    values: dict[ir.Value, ir.Value | None] = {value: part.inputs[str(value.name)] for value in made.graph.inputs}
    for name, value in list(made.graph.initializers.items()):
        original = part.weights.get(name) or whole.graph.initializers.get(name)
        made.graph.initializers.pop(name)
        if original is not None and _is_same(original, value):
            values[value] = original
        else:
            rename(value, names.tensors.unused(name))
            _record(value, part.weights.get(known_beginning(name, part.weights) or ""))
            whole.graph.register_initializer(value)
    made.graph.outputs.clear()
    made.graph.remove(new_nodes)
    ends = {
        value: part.outputs[str(value.name)]
        for node in new_nodes
        for value in node.outputs
        if value.name in part.outputs
    }
    free = _freed_names(part)
    for node in new_nodes:
        replace_inputs(node, values)
        for result in node.outputs:
            if result not in ends and result.name and result.name not in free:
                result.name = names.tensors.unused(result.name)
    _place(graph, part.nodes, new_nodes)
    for value, original in ends.items():
        known = original if original.type is not None else part.types[str(original.name)]
        value.type, value.shape = known.type, known.shape
        value.metadata_props.update(original.metadata_props)
        take_place(original, value)
    graph.remove(part.nodes, safe=True)
    _name_nodes(part, new_nodes, names)
    for domain, version in made.graph.opset_imports.items():
        whole.graph.opset_imports.setdefault(domain, version)
    for node in new_nodes:  # some algorithms of ONNX Runtime do not say that they use its operators
        whole.graph.opset_imports.setdefault(node.domain, 1)
    return new_nodes


def _record(value: ir.Value, source: ir.Value | None) -> None:
    """Note of what a tool made a tensor: of the weight whose name begins its name, if there is one."""
    tensor = value.const_value
    if tensor is None or tags.RECIPE in tensor.metadata_props:
        return
    if tensor.dtype.is_floating_point() or tensor.dtype.bitwidth <= _MOST_BITS:
        of = [] if source is None else [recipe_of(source)]
        value.const_value = recorded(tensor, step("computed", *of, "quantized"))


def remove_unused(values: Iterable[ir.Value], among: Container[ir.Node] | None = None) -> None:
    """Remove the values that nothing reads any more, and what was computed for them alone; inputs of the model stay.

    ``among`` are the nodes that may be removed; all without.
    """
    waiting = list(dict.fromkeys(values))
    for value in waiting:
        if value.uses() or value.is_graph_output():
            continue
        node = value.producer()
        if node is not None and isinstance(node.graph, ir.Graph) and (among is None or node in among):
            if any(other.uses() or other.is_graph_output() for other in node.outputs):
                continue
            node.graph.remove(node)
            for each in with_subgraphs(node):
                waiting += [read for read in each.inputs if read is not None]
                each.resize_inputs(0)
        elif value.is_initializer() and not value.is_graph_input() and value.graph is not None:
            value.graph.initializers.pop(str(value.name))


def _freed_names(part: Submodel) -> set[str]:
    """The names of tensors that are gone with the nodes of a part: of their results, and of what they alone read."""
    chosen = frozenset(part.nodes)
    results = {str(value.name) for node in part.nodes for value in node.outputs}
    return results | {
        name
        for name, value in part.weights.items()
        if not value.is_graph_output() and all(use.node in chosen for use in value.uses())
    }


def _is_same(original: ir.Value, value: ir.Value) -> bool:
    """Whether a tool left a weight as it was."""
    before, after = constant_of(original), value.const_value
    if before is None or after is None:
        return False
    return before.dtype == after.dtype and same_numbers(before, after)


def _place(graph: ir.Graph, old: Sequence[ir.Node], new: Sequence[ir.Node]) -> None:
    """Insert new nodes, in order, each after the last node that it depends on."""
    at = list(graph)
    anchors = _anchors({node: place for place, node in enumerate(at)}, new)
    last = dict(enumerate(at))  # place → what the next node that depends on it stands after
    for node in new:
        if anchors[node] in last:
            graph.insert_after(last[anchors[node]], node)
        else:
            graph.insert_before(at[0], node)
        last[anchors[node]] = node


def _anchors(order: Mapping[ir.Node, int], new: Sequence[ir.Node]) -> dict[ir.Node, int]:
    """New node → the place of the node after which it stands, -1 for none.

    A node that reads weights alone stands with the first node that reads its output.
    """
    anchors: dict[ir.Node, int] = {}
    idle: list[ir.Node] = []
    still = set[ir.Value]()  # what is computed from weights alone
    for node in new:
        read = [value for value in node.inputs if value is not None]
        if all(value in still or constant_of(value) is not None for value in read):
            still.update(node.outputs)
            idle.append(node)
        makers = [maker for value in read if value not in still and (maker := value.producer()) is not None]
        anchors[node] = max(
            (anchors[maker] if maker in anchors else order.get(maker, -1) for maker in makers), default=-1
        )
    for node in reversed(idle):
        readers = (use.node for value in node.outputs for use in value.uses())
        anchors[node] = min((anchors[reader] for reader in readers if reader in anchors), default=-1)
    return anchors


def _name_nodes(part: Submodel, new: Sequence[ir.Node], names: Names) -> None:
    """Give nodes the names that they had; what was named after a node that had none has none either."""
    had = {str(node.name): node.name for node in part.nodes if node.name} | part.names
    for node in new:
        name = node.name or ""
        if name in had:
            node.name = had[name]
        elif name.startswith(_UNNAMED):
            node.name = None
        elif name:
            node.name = names.nodes.unused(name)
