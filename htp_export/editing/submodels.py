"""Nodes of a model as a model of their own, and what a tool made of them put back in their place.

A tool that is given only the nodes that it may change cannot change others: a weight or a tensor that other nodes read
too stays as it was for them. The model around keeps its nodes, their order, their names and their tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx
import onnx_ir as ir

from htp_export.editing.editing import take_place
from htp_export.model.regions import all_values, twins_of
from htp_export.model.tensor_names import Names, UsedNames, rename
from htp_export.shapes.symbolic import Symbolic

__all__ = ["Submodel", "constant_of", "cut_out", "in_copy", "put_back", "remove_unused"]

_UNNAMED = "htp_export/"


@dataclass(frozen=True)
class Submodel:
    """Some nodes of a graph as a model; tools use it up.

    Attributes:
        model: The model; its tensors have the names that they have in the whole, its nodes have unique ones.
        nodes: The nodes in the whole, in order.
        inputs: Name of an input → the value in the whole.
        outputs: Name of an output → the value in the whole.
        types: Name of an output → its type and shape, as far as they can be inferred.
        weights: Name of an initializer → the value in the whole.
        names: Name of a node in the model → its name in the whole, for the nodes that got another one.
    """

    model: ir.Model
    nodes: Sequence[ir.Node]
    inputs: Mapping[str, ir.Value]
    outputs: Mapping[str, ir.Value]
    types: Mapping[str, ir.Value]
    weights: Mapping[str, ir.Value]
    names: Mapping[str, str | None]

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
    while value is not None and not value.is_initializer():
        node = value.producer()
        if node is None or node.domain:
            return None
        if node.op_type == "Constant" and "value" in node.attributes:
            return node.attributes["value"].as_tensor()
        value = node.inputs[0] if node.op_type == "Identity" else None
    return None if value is None or value.is_graph_input() else value.const_value


def cut_out(model: ir.Model, nodes: Sequence[ir.Node], types: Symbolic) -> Submodel:
    """Nodes of one graph as a model. The model shares their weights; the graph is not changed.

    Args:
        model: The whole.
        nodes: Nodes of one of its graphs, in the order of that graph; without subgraphs.
        types: The types and shapes of the graph's tensors.
    """
    chosen = frozenset(nodes)
    graph_inputs: dict[str, ir.Value] = {}
    weights: dict[str, ir.Value] = {}
    outputs: dict[str, ir.Value] = {}
    for node in nodes:
        for value in node.inputs:
            if value is None or value.producer() in chosen:
                continue
            (graph_inputs if constant_of(value) is None else weights)[str(value.name)] = value
        for value in node.outputs:
            if value.is_graph_output() or any(use.node not in chosen for use in value.uses()):
                outputs[str(value.name)] = value
    copies = {
        value: ir.Value(name=name, type=known.type, shape=known.shape)
        for name, value in graph_inputs.items()
        for known in (types.described(value),)
    }
    initializers = []
    for name, value in weights.items():
        tensor = constant_of(value)
        assert tensor is not None
        copies[value] = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()))
        copies[value].const_value = tensor
        initializers.append(copies[value])
    names, made, unique = dict[str, str | None](), list[ir.Node](), UsedNames()
    for place, node in enumerate(nodes):
        name = unique.unused(node.name) if node.name else unique.unused(f"{_UNNAMED}{place}")
        if name != node.name:
            names[name] = node.name
        copy = ir.Node(
            node.domain,
            node.op_type,
            [None if value is None else copies[value] for value in node.inputs],
            list(node.attributes.values()),
            overload=node.overload,
            num_outputs=len(node.outputs),
            name=name,
            metadata_props=dict(node.metadata_props),
        )
        for old, new in zip(node.outputs, copy.outputs, strict=True):
            known = types.described(old)
            new.name, new.type, new.shape = old.name, known.type, known.shape
            copies[old] = new
        made.append(copy)
    graph = ir.Graph(
        [copies[value] for value in graph_inputs.values()],
        [copies[value] for value in outputs.values()],
        nodes=made,
        initializers=initializers,
        opset_imports=dict(model.graph.opset_imports),
        name="part",
    )
    part = ir.Model(graph, ir_version=max(model.ir_version, 10))
    described = {name: types.described(value) for name, value in outputs.items()}
    return Submodel(part, tuple(nodes), graph_inputs, outputs, described, weights, names)


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
    """Replace the nodes of a part by what a tool made of it.

    Each new node stands after the last one in the whole that it depends on, so that the others keep their order.

    Args:
        whole: The whole, in which the nodes are; it is changed.
        part: The part as it was cut out.
        made: What the tool made of it; it is used up.
        names: The names of the whole.

    Returns:
        The new nodes.
    """
    graph = part.nodes[0].graph
    assert isinstance(graph, ir.Graph)
    new_nodes = list(made.graph)
    values: dict[ir.Value, ir.Value] = {value: part.inputs[str(value.name)] for value in made.graph.inputs}
    for name, value in list(made.graph.initializers.items()):
        original = part.weights.get(name)
        made.graph.initializers.pop(name)
        if original is not None and _is_same(original, value):
            values[value] = original
            continue
        values[value] = value
        rename(value, names.tensors.unused(name))
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
        for place, read in enumerate(node.inputs):
            if read is not None and read in values:
                node.replace_input_with(place, values[read])
        for result in node.outputs:
            if result not in ends and result.name and result.name not in free:
                result.name = names.tensors.unused(result.name)
    _place(graph, part.nodes, new_nodes)
    for value, original in ends.items():
        value.type, value.shape = original.type, original.shape
        maker = value.producer()
        if value.type is None and maker is not None and maker.domain:  # of which ONNX's own inference cannot tell it
            known = part.types[str(original.name)]
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


def remove_unused(values: Iterable[ir.Value]) -> None:
    """Remove the values that nothing reads any more, and what was computed for them alone; inputs of the model stay."""
    waiting = list(dict.fromkeys(values))
    for value in waiting:
        if value.uses() or value.is_graph_output():
            continue
        node = value.producer()
        if node is not None and isinstance(node.graph, ir.Graph):
            if any(other.uses() or other.is_graph_output() for other in node.outputs):
                continue
            waiting += [read for read in node.inputs if read is not None]
            node.graph.remove(node, safe=True)
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
    if before is None or after is None or before.dtype != after.dtype or before.shape != after.shape:
        return False
    return before.tobytes() == after.tobytes()


def _place(graph: ir.Graph, old: Sequence[ir.Node], new: Sequence[ir.Node]) -> None:
    """Insert new nodes, in order, each after the last node that it depends on."""
    order = {node: place for place, node in enumerate(graph)}
    anchors = _anchors(order, new)
    at = list(graph)
    last: dict[int, ir.Node] = {}
    for node in new:
        anchor = anchors[node]
        if anchor in last:
            graph.insert_after(last[anchor], node)
        elif anchor < 0:
            graph.insert_before(at[0], node)
        else:
            graph.insert_after(at[anchor], node)
        last[anchor] = node


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
    had = {node.name for node in part.nodes}
    for node in new:
        name = node.name or ""
        original = part.names.get(name, name)
        if name in part.names or name in had:
            node.name = original
            continue
        if name.startswith(_UNNAMED):
            node.name = None
        elif name:
            node.name = names.nodes.unused(name)
