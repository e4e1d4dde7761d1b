"""Nodes of a model as a model of their own, and the result of a tool put back in their place.

A tool that has only the nodes that it may change cannot change others: weights and tensors that
other nodes read stay as they were for them. The model around keeps its nodes, their order, and the
names of nodes and tensors.

Tools name results after inputs (``w`` → ``w_scale``), and do not check whether the name is unused.
So tensors and nodes of a part have temporary names (`PartNames`), which are replaced when it is put
back.
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
from htp_export.lineage.records import record_replacement
from htp_export.model.copies import Copied
from htp_export.model.hashes import same_numbers
from htp_export.model.module_facts import stored_tensor
from htp_export.model.neighbours import replace_inputs
from htp_export.model.recipes import recipe_of, recorded
from htp_export.model.tensor_names import Names, rename
from htp_export.shapes.operator_kinds import with_subgraphs, without_copies
from htp_export.shapes.symbolic import Symbolic

_MOST_BITS = 8  # of the elements of a quantized tensor; tools use at most int8 and float8
_TEMPORARY = re.compile(r"htp_export/\d+/")
"""The names in a part. Each ends with a slash, so that none is a prefix of another one."""


class PartNames:
    """The temporary names of tensors and nodes in a part, and their names in the whole model.

    Examples:
        >>> names = PartNames()
        >>> inside = names.add("fc.weight")
        >>> names.in_whole(f"{inside}_scale"), names.source(f"{inside}_scale") == inside, names.source("scale")
        ('fc.weight_scale', True, None)
    """

    def __init__(self) -> None:
        self._in_whole: dict[str, str | None] = {}

    def add(self, name: str | None) -> str:
        """Return a name in the part for a tensor or node; ``name``: its own name, or None."""
        inside = f"htp_export/{len(self._in_whole)}/"
        self._in_whole[inside] = name
        return inside

    def in_whole(self, name: str) -> str | None:
        """Replace temporary names in a name; None if it derives from a node without a name."""
        found = _TEMPORARY.findall(name)
        if any(self._in_whole.get(inside, inside) is None for inside in found):
            return None
        return self.in_text(name)

    def in_text(self, text: str) -> str:
        """Replace temporary names in a text, such as a message of a tool."""
        return _TEMPORARY.sub(
            lambda match: self._in_whole.get(match[0], match[0]) or "(without a name)", text
        )

    def source(self, name: str) -> str | None:
        """The temporary name from which a tool derived a name; None if there is none."""
        match = _TEMPORARY.match(name)
        return match[0] if match and match[0] in self._in_whole else None


@dataclass(frozen=True)
class Submodel:
    """Some nodes of a graph as a model; `put_back` consumes it.

    Attributes:
        model: The model; its tensors and nodes have names of ``names``.
        nodes: Name of a node → the node in the whole, in order.
        inputs: Name of an input → the value in the whole.
        outputs: Name of an output → the value in the whole.
        types: Name of an output → its type and shape, as far as they can be inferred.
        weights: Name of an initializer → the value in the whole.
        results: Name of an output of a node → the value in the whole.
        names: The temporary names.
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
        """The model for tools, with all its weights in memory."""
        for value in self.model.graph.initializers.values():
            tensor = value.const_value
            if isinstance(tensor, ir.ExternalTensor):
                value.const_value = ir.Tensor(tensor.numpy(), dtype=tensor.dtype, name=tensor.name)
        proto = ir.to_proto(self.model)
        # Tools do not update the value_info of weights.
        weights, infos = self.model.graph.initializers, proto.graph.value_info
        kept = [info for info in infos if info.name not in weights]
        del proto.graph.value_info[:]
        proto.graph.value_info.extend(kept)
        return proto


def constant_of(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of an initializer or ``Constant``, through ``Identity``; None for other values.

    TorchScript exports have an ``Identity`` between a weight and each further module that has an
    equal one.
    """
    value = None if value is None else without_copies(value)
    return None if value is None or value.is_graph_input() else stored_tensor(value)


def cut_out(model: ir.Model, nodes: Sequence[ir.Node], types: Symbolic) -> Submodel:
    """Copy nodes of one graph into a model that shares their weights; the graph is not changed.

    Args:
        model: The model.
        nodes: The nodes, in the order of the graph and without subgraphs.
        types: The types and shapes of the graph's tensors.
    """
    graph_inputs, weights, outputs = _boundary(nodes)
    formals = (*graph_inputs, *weights)
    opsets = dict(model.graph.opset_imports)
    graph = ir.GraphView(formals, outputs, nodes=nodes, opset_imports=opsets, name="part").clone()
    names = PartNames()
    inside: dict[ir.Value, str] = {}  # value of the whole → its name in the part
    for value, copy in zip(formals, graph.inputs, strict=True):
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

    def by_name(values: Iterable[ir.Value]) -> dict[str, ir.Value]:
        return {inside[value]: value for value in values}

    leaving = by_name(outputs)
    chosen = frozenset(nodes)
    return Submodel(
        model=ir.Model(graph, ir_version=max(model.ir_version, 10)),  # 10: metadata on nodes
        nodes=named,
        inputs=by_name(graph_inputs),
        outputs=leaving,
        types={name: types.described(value) for name, value in leaving.items()},
        weights=by_name(weights),
        results=by_name(value for value in inside if value.producer() in chosen),
        names=names,
    )


def _boundary(
    nodes: Sequence[ir.Node],
) -> tuple[list[ir.Value], list[ir.Value], list[ir.Value]]:
    """The inputs, the weights and the outputs of some nodes."""
    chosen = frozenset(nodes)
    inputs, weights = dict[ir.Value, None](), dict[ir.Value, None]()
    outputs = dict[ir.Value, None]()
    for node in nodes:
        for value in node.inputs:
            if value is not None and value.producer() not in chosen:
                (inputs if constant_of(value) is None else weights)[value] = None
        for value in node.outputs:
            if value.is_graph_output() or any(use.node not in chosen for use in value.uses()):
                outputs[value] = None
    return list(inputs), list(weights), list(outputs)


def _named_by_recipe(value: ir.Value) -> ir.TensorProtocol | None:
    """The tensor of a weight with its recipe: without one, its name would be its parameter."""
    tensor = constant_of(value)
    if tensor is None or tags.RECIPE in tensor.metadata_props:
        return tensor
    if not tensor.dtype.is_floating_point():
        return tensor
    return recorded(tensor, recipe_of(without_copies(value)))


def _describe(value: ir.Value, known: ir.Value) -> None:
    """Set the type and shape of a value to the known ones; a weight has those of its tensor."""
    tensor = value.const_value
    value.type = known.type if tensor is None else ir.TensorType(tensor.dtype)
    value.shape = known.shape if tensor is None else ir.Shape(tensor.shape.numpy())


def in_copy(part: Submodel, copied: Copied) -> Submodel:
    """The same part of a copy of the whole."""

    def copies(named: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        found: dict[str, ir.Value] = {}
        for name, value in named.items():
            copy = copied.value_of(value)
            assert copy is not None  # the part is one of the whole
            found[name] = copy
        return found

    return replace(
        part,
        nodes={name: copied.copy_of[node] for name, node in part.nodes.items()},
        inputs=copies(part.inputs),
        outputs=copies(part.outputs),
        weights=copies(part.weights),
        results=copies(part.results),
    )


def put_back(whole: ir.Model, part: Submodel, made: ir.Model, names: Names) -> list[ir.Node]:
    """Replace the nodes of a part by the result of a tool; return the new nodes.

    Each is inserted after the last node of the whole that it depends on, so that other nodes keep
    their order. A weight that another part's result has already, with the same name and numbers,
    is not added twice.

    Args:
        whole: The model; changed in place.
        part: The part; it is used up.
        made: The result of the tool; it is used up.
        names: The names in use.
    """
    graph = next(iter(part.nodes.values())).graph
    assert isinstance(graph, ir.Graph)
    old_nodes, new_nodes = list(part.nodes.values()), list(made.graph)
    # value of the result → value in the whole
    values: dict[ir.Value, ir.Value | None] = {
        value: part.inputs[str(value.name)] for value in made.graph.inputs
    }
    _move_weights(whole, part, made, names, values)
    made.graph.outputs.clear()
    made.graph.remove(new_nodes)
    # output of the result → the original output
    ends: dict[ir.Value, ir.Value] = {}
    for node in new_nodes:
        for value in node.outputs:
            if value.name in part.outputs:
                ends[value] = part.outputs[str(value.name)]
    freed = _freed_names(part)
    _record_results(part, new_nodes)
    for node in new_nodes:
        replace_inputs(node, values)
        for result in node.outputs:
            if result not in ends and result.name:
                name = part.names.in_whole(result.name) or result.name
                result.name = freed.get(result.name) or names.tensors.unused(name)
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
    for node in new_nodes:  # some algorithms of ONNX Runtime do not import its domain
        whole.graph.opset_imports.setdefault(node.domain, 1)
    return new_nodes


def _record_results(part: Submodel, new_nodes: Sequence[ir.Node]) -> None:
    """Record which results replace the original ones: those of the same name, or of the same node.

    A tool may give the result of a node another name, and its own to another precision of it.
    """
    for node in new_nodes:
        original = part.nodes.get(node.name or "")
        if original is not None and original.op_type == node.op_type:
            for old, new in zip(original.outputs, node.outputs, strict=False):
                record_replacement(old, new)
    for node in new_nodes:
        for value in node.outputs:
            replaced = part.results.get(value.name or "")
            if replaced is not None:
                record_replacement(replaced, value)


def _move_weights(
    whole: ir.Model,
    part: Submodel,
    made: ir.Model,
    names: Names,
    values: dict[ir.Value, ir.Value | None],
) -> None:
    """Move new weights of a tool's result into the whole; add unchanged ones → originals to ``values``."""
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


def _record(value: ir.Value, source: ir.Value | None) -> None:
    """Record that a tool computed a tensor from the weight whose name it extends, if any."""
    tensor = value.const_value
    if tensor is None or tags.RECIPE in tensor.metadata_props:
        return
    if tensor.dtype.is_floating_point() or tensor.dtype.bitwidth <= _MOST_BITS:
        of = [] if source is None else [recipe_of(source)]
        value.const_value = recorded(tensor, step("computed", *of, "quantized"))


def remove_unused(values: Iterable[ir.Value], among: Container[ir.Node] | None = None) -> None:
    """Remove values without consumers, and nodes that only they need; inputs of the model stay.

    ``among``: The nodes that may be removed; None for all.
    """
    waiting = list(dict.fromkeys(values))
    for value in waiting:
        if value.uses() or value.is_graph_output():
            continue
        node = value.producer()
        if node is None:
            _remove_initializer(value)
            continue
        if not isinstance(node.graph, ir.Graph) or (among is not None and node not in among):
            continue
        if any(other.uses() or other.is_graph_output() for other in node.outputs):
            continue
        node.graph.remove(node)
        for each in with_subgraphs(node):
            waiting += [read for read in each.inputs if read is not None]
            each.resize_inputs(0)


def _remove_initializer(value: ir.Value) -> None:
    """Remove an initializer from its graph; one that is also an input of the model stays."""
    if value.is_initializer() and not value.is_graph_input() and value.graph is not None:
        value.graph.initializers.pop(str(value.name))


def _freed_names(part: Submodel) -> dict[str, str]:
    """Name in a part → name in the whole, for tensors that are removed with its nodes."""
    chosen = frozenset(part.nodes.values())
    removed = dict(part.results)
    for name, value in part.weights.items():
        has_other_use = any(use.node not in chosen for use in value.uses())
        if not value.is_graph_output() and not has_other_use:
            removed[name] = value
    return {name: str(value.name) for name, value in removed.items()}


def _is_same(original: ir.Value, value: ir.Value) -> bool:
    """Whether a tool did not change a weight."""
    before, after = constant_of(original), value.const_value
    if before is None or after is None:
        return False
    return before.dtype == after.dtype and same_numbers(before, after)


def _place(graph: ir.Graph, old: Sequence[ir.Node], new: Sequence[ir.Node]) -> None:
    """Insert new nodes, in order, each after the last node that it depends on."""
    at = list(graph)
    anchors = _anchors({node: place for place, node in enumerate(at)}, new)
    last = dict(enumerate(at))  # place → the node after which the next one is inserted
    for node in new:
        if anchors[node] in last:
            graph.insert_after(last[anchors[node]], node)
        else:
            graph.insert_before(at[0], node)
        last[anchors[node]] = node


def _anchors(order: Mapping[ir.Node, int], new: Sequence[ir.Node]) -> dict[ir.Node, int]:
    """New node → the index of the node after which it is inserted, -1 for none.

    A node that reads only weights is inserted with the first consumer of its output.
    """
    anchors: dict[ir.Node, int] = {}
    on_weights: list[ir.Node] = []
    constant = set[ir.Value]()  # values that are computed from weights alone
    for node in new:
        read = [value for value in node.inputs if value is not None]
        if all(value in constant or constant_of(value) is not None for value in read):
            constant.update(node.outputs)
            on_weights.append(node)
        anchors[node] = -1
        for value in read:
            maker = None if value in constant else value.producer()
            if maker is not None:
                place = anchors[maker] if maker in anchors else order.get(maker, -1)
                anchors[node] = max(anchors[node], place)
    for node in reversed(on_weights):
        readers = (use.node for value in node.outputs for use in value.uses())
        places = (anchors[reader] for reader in readers if reader in anchors)
        anchors[node] = min(places, default=-1)
    return anchors


def _name_nodes(part: Submodel, new: Sequence[ir.Node], names: Names) -> None:
    """Restore the names of nodes; nodes derived from one without a name have none either."""
    for node in new:
        name = part.names.in_whole(node.name or "")
        if not name or node.name in part.nodes:
            node.name = name or None
        else:
            node.name = names.nodes.unused(name)
