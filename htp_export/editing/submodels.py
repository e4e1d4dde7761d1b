"""Nodes of a model as a model of their own, and what a tool made of them put back in their place.

A tool that is given only the nodes that it may change cannot change others: a weight or a tensor
that other nodes read too stays as it was for them. The model around keeps its nodes, their order,
their names and their tensors.

Tools name what they make after what they read (``w`` → ``w_scale``), and do not look whether the
name is free. So tensors and nodes of a part have names of ours (`PartNames`), which are replaced
when it is put back.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx
import onnx_ir as ir

from htp_export.editing.editing import replace_uses
from htp_export.format import tags
from htp_export.format.recipes import step
from htp_export.model.hashes import same_numbers
from htp_export.model.module_facts import stored_tensor
from htp_export.model.neighbours import replace_inputs
from htp_export.model.recipes import recipe_of, recorded
from htp_export.model.regions import all_values, twins_of
from htp_export.model.tensor_names import Names, rename
from htp_export.shapes.operator_kinds import with_subgraphs, without_copies
from htp_export.shapes.symbolic import Symbolic

_MOST_BITS = 8  # of the elements of a quantized tensor
_OURS = re.compile(r"htp_export/\d+/")
"""The names of a part. Each ends with a mark, so that none is the beginning of another one."""


class PartNames:
    """The names of tensors and nodes inside a part, and those that they have in the whole.

    Examples:
        >>> names = PartNames()
        >>> inside = names.add("fc.weight")
        >>> names.in_whole(f"{inside}_scale"), names.source(f"{inside}_scale") == inside, names.source("scale")
        ('fc.weight_scale', True, None)
    """

    def __init__(self) -> None:
        self._in_whole: dict[str, str | None] = {}

    def add(self, name: str | None) -> str:
        """A name inside the part for a tensor or node of the whole; None is that of a node without one."""
        inside = f"htp_export/{len(self._in_whole)}/"
        self._in_whole[inside] = name
        return inside

    def in_whole(self, name: str) -> str | None:
        """A name with those of the whole in it; None if it is made of that of a node without one."""
        found = _OURS.findall(name)
        if any(self._in_whole.get(inside, inside) is None for inside in found):
            return None
        return self.in_text(name)

    def in_text(self, text: str) -> str:
        """The same of a text, such as a message of a tool."""
        return _OURS.sub(
            lambda match: self._in_whole.get(match[0], match[0]) or "(without a name)", text
        )

    def source(self, name: str) -> str | None:
        """The name inside the part from which a tool made a name; None if it made it of nothing."""
        match = _OURS.match(name)
        return match[0] if match and match[0] in self._in_whole else None


@dataclass(frozen=True)
class Submodel:
    """Some nodes of a graph as a model; tools use it up.

    Attributes:
        model: The model; its tensors and nodes have the names that ``names`` gave them.
        nodes: Name of a node → the node in the whole, in order.
        inputs: Name of an input → the value in the whole; so are outputs and weights.
        outputs: What leaves.
        types: Name of an output → its type and shape, as far as they can be inferred.
        weights: The initializers.
        results: Name of an output of a node → the value in the whole.
        names: The names inside, and in the whole.
    """

    model: ir.Model
    nodes: Mapping[str, ir.Node]
    inputs: Mapping[str, ir.Value]
    outputs: Mapping[str, ir.Value]
    types: Mapping[str, ir.Value]
    weights: Mapping[str, ir.Value]
    results: Mapping[str, ir.Value]
    names: PartNames = field(repr=False)

    def proto(self) -> onnx.ModelProto:
        """The model with all its weights in memory, as tools read it."""
        for value in self.model.graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)
        proto = ir.to_proto(self.model)
        known = [
            said
            for said in proto.graph.value_info
            if said.name not in self.model.graph.initializers
        ]
        del proto.graph.value_info[:]
        proto.graph.value_info.extend(known)  # of weights, tools do not update it
        return proto


def constant_of(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initializer or of a ``Constant`` node, through ``Identity``; None for all other values.

    TorchScript exports have an ``Identity`` between a weight and each further module that has an
    equal one.
    """
    value = None if value is None else without_copies(value)
    return None if value is None or value.is_graph_input() else stored_tensor(value)


def cut_out(model: ir.Model, nodes: Sequence[ir.Node], types: Symbolic) -> Submodel:
    """Nodes of one graph of a model, in its order and without subgraphs, as a model that shares their weights.

    The graph is not changed; ``types`` knows the types and shapes of its tensors.
    """
    chosen = frozenset(nodes)
    graph_inputs = dict[ir.Value, None]()
    weights = dict[ir.Value, None]()
    outputs = dict[ir.Value, None]()
    for node in nodes:
        for value in node.inputs:
            if value is not None and value.producer() not in chosen:
                (graph_inputs if constant_of(value) is None else weights)[value] = None
        for value in node.outputs:
            if value.is_graph_output() or any(use.node not in chosen for use in value.uses()):
                outputs[value] = None
    given = (*graph_inputs, *weights)
    opsets = dict(model.graph.opset_imports)
    graph = ir.GraphView(given, [*outputs], nodes=nodes, opset_imports=opsets, name="part").clone()
    names, inside = PartNames(), dict[ir.Value, str]()
    for value, copy in zip(given, graph.inputs, strict=True):
        copy.const_value = _named_by_recipe(value)
        inside[value] = names.add(value.name)
        rename(copy, inside[value])
        _describe(copy, types.described(value))
    named = dict[str, ir.Node]()
    for node, twin in zip(nodes, graph, strict=True):
        twin.name = names.add(node.name or None)
        named[twin.name] = node
        for value, copy in zip(node.outputs, twin.outputs, strict=True):
            if value.name:  # an output without a name is not computed
                inside[value] = copy.name = names.add(value.name)
            _describe(copy, types.described(value))
    initializers = graph.inputs[len(graph_inputs) :]
    graph.inputs[len(graph_inputs) :] = []  # del would leave them marked as inputs
    for copy in initializers:
        graph.initializers.add(copy)
    part = ir.Model(graph, ir_version=max(model.ir_version, 10))

    def by_name(values: Iterable[ir.Value]) -> dict[str, ir.Value]:
        return {inside[value]: value for value in values}

    leaving = by_name(outputs)
    described = {name: types.described(value) for name, value in leaving.items()}
    results = by_name(value for value in inside if value.producer() in chosen)
    return Submodel(
        part, named, by_name(graph_inputs), leaving, described, by_name(weights), results, names
    )


def _named_by_recipe(value: ir.Value) -> ir.TensorProtocol | None:
    """The tensor of a weight with its recipe: without one, its name says of which parameter it is, and that changes."""
    tensor = constant_of(value)
    if (
        tensor is None
        or tags.RECIPE in tensor.metadata_props
        or not tensor.dtype.is_floating_point()
    ):
        return tensor
    return recorded(tensor, recipe_of(without_copies(value)))


def _describe(value: ir.Value, known: ir.Value) -> None:
    """Give a value the type and shape that are known; those of a weight are its tensor's."""
    tensor = value.const_value
    value.type = known.type if tensor is None else ir.TensorType(tensor.dtype)
    value.shape = known.shape if tensor is None else ir.Shape(tensor.shape.numpy())


def in_copy(part: Submodel, whole: ir.Model, copy: ir.Model) -> Submodel:
    """The same part of a copy of the whole."""
    values = {str(value.name): value for value in all_values(copy.graph)}
    twin = twins_of(whole, copy)

    def twins(named: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        return {name: values[str(value.name)] for name, value in named.items()}

    return replace(
        part,
        nodes={name: twin[node] for name, node in part.nodes.items()},
        inputs=twins(part.inputs),
        outputs=twins(part.outputs),
        weights=twins(part.weights),
        results=twins(part.results),
    )


def put_back(whole: ir.Model, part: Submodel, made: ir.Model, names: Names) -> list[ir.Node]:
    """Replace the nodes of a part by what a tool made of it, which is used up; the new nodes.

    Each stands after the last one in the whole that it depends on, so that the others keep their
    order. What was made of a weight for another part already, with the same name and the same
    numbers, is not there twice.
    """
    graph = next(iter(part.nodes.values())).graph
    assert isinstance(graph, ir.Graph)
    new_nodes = list(made.graph)
    values: dict[ir.Value, ir.Value | None] = {
        value: part.inputs[str(value.name)] for value in made.graph.inputs
    }
    for name, value in list(made.graph.initializers.items()):
        wanted = part.names.in_whole(name) or name
        original = part.weights.get(name) or whole.graph.initializers.get(wanted)
        made.graph.initializers.pop(name)
        if original is not None and _is_same(original, value):
            values[value] = original
        else:
            _record(value, part.weights.get(part.names.source(name) or ""))
            rename(value, names.tensors.unused(wanted))
            whole.graph.register_initializer(value)
    made.graph.outputs.clear()
    made.graph.remove(new_nodes)
    ends = {
        value: part.outputs[str(value.name)]
        for node in new_nodes
        for value in node.outputs
        if value.name in part.outputs
    }
    freed = _freed_names(part)
    for node in new_nodes:
        replace_inputs(node, values)
        for result in node.outputs:
            if result not in ends and result.name:
                name = part.names.in_whole(result.name) or result.name
                result.name = freed.get(result.name) or names.tensors.unused(name)
    old_nodes = list(part.nodes.values())
    _place(graph, old_nodes, new_nodes)
    for value, original in ends.items():
        known = original if original.type is not None else part.types[str(value.name)]
        value.type, value.shape = known.type, known.shape
        value.metadata_props.update(original.metadata_props)
        replace_uses(original, value)
    graph.remove(old_nodes, safe=True)
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
        if (
            node is not None
            and isinstance(node.graph, ir.Graph)
            and (among is None or node in among)
        ):
            if any(other.uses() or other.is_graph_output() for other in node.outputs):
                continue
            node.graph.remove(node)
            for each in with_subgraphs(node):
                waiting += [read for read in each.inputs if read is not None]
                each.resize_inputs(0)
        elif value.is_initializer() and not value.is_graph_input() and value.graph is not None:
            value.graph.initializers.pop(str(value.name))


def _freed_names(part: Submodel) -> dict[str, str]:
    """Name in a part → name in the whole, of tensors that are gone with its nodes: their results, and their weights."""
    chosen = frozenset(part.nodes.values())
    gone = {
        name: value
        for name, value in part.weights.items()
        if not value.is_graph_output() and all(use.node in chosen for use in value.uses())
    }
    return {name: str(value.name) for name, value in (*part.results.items(), *gone.items())}


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
        makers = [
            maker
            for value in read
            if value not in still and (maker := value.producer()) is not None
        ]
        anchors[node] = max(
            (anchors[maker] if maker in anchors else order.get(maker, -1) for maker in makers),
            default=-1,
        )
    for node in reversed(idle):
        readers = (use.node for value in node.outputs for use in value.uses())
        anchors[node] = min(
            (anchors[reader] for reader in readers if reader in anchors), default=-1
        )
    return anchors


def _name_nodes(part: Submodel, new: Sequence[ir.Node], names: Names) -> None:
    """Give nodes the names that they had; what was named after a node that had none has none either."""
    for node in new:
        name = part.names.in_whole(node.name or "")
        if not name or node.name in part.nodes:
            node.name = name or None
        else:
            node.name = names.nodes.unused(name)
