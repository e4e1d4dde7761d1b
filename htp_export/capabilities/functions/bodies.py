"""Groups of nodes moved out of a graph into functions, which equal ones share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass, field

import onnx_ir as ir

from htp_export.capabilities.functions.formals import Formals
from htp_export.capabilities.functions.levels import Group, Item
from htp_export.editing.function_records import DOMAIN, Instance
from htp_export.format import tags
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.reasons import Reason
from htp_export.model.content_hash import body_hash, constant_hash
from htp_export.model.neighbours import replace_inputs
from htp_export.model.regions import subgraphs
from htp_export.model.tensor_names import UsedNames

__all__ = ["Bodies", "Occurrence", "copy_value", "differing_constants"]

"""How the owner of a call is known: the function holds the nodes of that module."""


@dataclass(frozen=True, eq=False)
class Occurrence:
    """One instance that became a call.

    Attributes:
        instance: The module call.
        function: The function.
        body: The nodes of this instance, in the order of the function's; the function's own for the first instance.
    """

    instance: Instance
    function: ir.Function
    body: ir.Graph

    def pairs(self) -> Iterator[tuple[ir.Node, ir.Node]]:
        """Each node of the function, in subgraphs too, with that of this instance."""
        return zip(self.function.graph.all_nodes(), self.body.all_nodes(), strict=True)


@dataclass
class Bodies:
    """Makes functions of groups, in one model.

    Attributes:
        model: The model; its graphs are changed.
        hierarchy: Its modules.
        formals: Orders and names the inputs of functions.
        occurrences: Call → what it calls, innermost first, also in bodies that were thrown away for an equal one.
    """

    model: ir.Model
    hierarchy: Hierarchy
    formals: Formals
    occurrences: dict[ir.Node, Occurrence] = field(default_factory=dict)
    _known: dict[Hashable, ir.Function] = field(default_factory=dict)
    _names: UsedNames = field(init=False)

    def __post_init__(self) -> None:
        self._names = UsedNames(name for domain, name, _ in self.model.functions if domain == DOMAIN)

    def build(self, graph: ir.Graph, items: Iterable[Item]) -> None:
        """Make functions of the groups of a graph; its nodes are then in the order of ``items``."""
        nodes = [self._node_of(item, graph) for item in items]
        graph.remove(nodes)
        graph.extend(nodes)

    def _node_of(self, item: Item, graph: ir.Graph) -> ir.Node:
        return self._call_of(item, graph) if isinstance(item, Group) else item

    def _call_of(self, group: Group, graph: ir.Graph) -> ir.Node:
        """Move a group into a function, and put a call of it at the end of the graph."""
        instance, nodes = group.instance, [self._node_of(item, graph) for item in group.items]
        every = [held for node in nodes for held in _with_held(node)]
        inside, graphs = set(every), {body for node in every for body in subgraphs(node)}
        read = dict.fromkeys(value for node in every for value in node.inputs if value is not None)
        entering = self.formals.order(value for value in read if _enters(value, inside, graphs))
        leaving = [value for node in nodes for value in node.outputs if _leaves(value, inside)]
        results = [copy_value(value) for value in leaving]
        for value, result in zip(leaving, results, strict=True):
            _replace_outside(value, result, inside, graph)
        formals = self._inputs_for(entering, leaving, every, instance)
        for node in nodes:
            if node in self.occurrences:
                node.name = _relative_name(self.occurrences[node].instance, instance.path)
        graph.remove(nodes)
        body = ir.Graph(formals, leaving, nodes=nodes, opset_imports=self._opsets(every))
        function = self._shared(body, instance)
        call = ir.node(
            function.name,
            entering,
            domain=DOMAIN,
            outputs=results,
            name=_relative_name(instance, ""),
            metadata_props=self._tags(instance),
        )
        graph.append(call)
        self.occurrences[call] = Occurrence(instance, function, body)
        self.formals.called(call, instance, formals)
        return call

    def _inputs_for(
        self, entering: list[ir.Value], leaving: list[ir.Value], nodes: list[ir.Node], instance: Instance
    ) -> list[ir.Value]:
        """Inputs of a function, read by its nodes in place of the values outside; the outputs get names as well."""
        outputs = set(leaving)
        kept = [value for node in nodes for value in node.outputs if value not in outputs]
        given = [value for node in nodes for body in subgraphs(node) for value in _own_values(body)]
        used = UsedNames(value.name or "" for value in (*kept, *given))
        for value in leaving:
            value.name = used.unused("output")
        names = self.formals.name(entering, nodes, instance, used)
        formals = {
            # Weights have their types in the graph. A function around a deep module would write them all again.
            value: ir.Value(name=name) if self.formals.is_weight(value) else copy_value(value, name)
            for value, name in zip(entering, names, strict=True)
        }
        for node in nodes:
            replace_inputs(node, formals)
        return list(formals.values())

    def _shared(self, body: ir.Graph, instance: Instance) -> ir.Function:
        """The function with this body, or one that has an equal one already."""
        info = self.hierarchy[instance.path]
        key = (info.class_name, body_hash(body))
        if key not in self._known:
            name = self._names.unused(info.simple_class or "Module")
            function = ir.Function(DOMAIN, name, graph=body, attributes=[])
            _make_names_unique(body)
            self.model.functions[function.identifier()] = function
            self._known[key] = function
        return self._known[key]

    def _opsets(self, nodes: Iterable[ir.Node]) -> dict[str, int]:
        known = {**self.model.opset_imports, DOMAIN: 1}
        return {domain: known.get(domain, 1) for domain in ("", *sorted({node.domain for node in nodes} - {""}))}

    def _tags(self, instance: Instance) -> dict[str, str]:
        call = str(instance.call) if self.hierarchy[instance.path].calls > 1 else ""
        return tags.node_tags((instance.path,), Reason.FUNCTION, self.hierarchy.called, call)


def differing_constants(occurrences: Iterable[Occurrence], hierarchy: Hierarchy) -> dict[ir.Node, set[Instance]]:
    """``Constant`` nodes that have another value in other functions which are equal but for such values.

    Returns:
        Node in the body of an instance → the instances that it must not be in, so that they share a function.
    """
    alike: defaultdict[Hashable, list[Occurrence]] = defaultdict(list)
    keys: dict[ir.Function, Hashable] = {}
    for one in occurrences:
        if one.function not in keys:
            keys[one.function] = body_hash(one.function.graph, constants=False)
        alike[hierarchy[one.instance.path].class_name, keys[one.function]].append(one)
    found: dict[ir.Node, set[Instance]] = {}
    for group in alike.values():
        functions = list(dict.fromkeys(one.function for one in group))
        if len(functions) == 1 or all(map(_is_constant, functions[0].graph)):
            continue
        values = [[constant_hash(node) if _is_constant(node) else None for node in each.graph] for each in functions]
        differ = [len(set(column)) > 1 for column in zip(*values, strict=True)]
        for one in group:
            for node, other in zip(one.body, differ, strict=True):
                if other:
                    found.setdefault(node, set()).add(one.instance)
    return found


def _is_constant(node: ir.Node) -> bool:
    return node.op_identifier()[:2] == ("", "Constant")


def copy_value(value: ir.Value, name: str | None = None) -> ir.Value:
    """A value of the same type, under the same name or another, that no node makes."""
    copied = ir.Value(
        name=value.name if name is None else name,
        type=value.type,
        shape=None if value.shape is None else value.shape.copy(),
        doc_string=value.doc_string,
    )
    if name is None:
        copied.metadata_props.update(value.metadata_props)
        copied.meta.update(value.meta)
    return copied


def _with_held(node: ir.Node) -> Iterator[ir.Node]:
    """A node, and what its subgraphs hold."""
    yield node
    for body in subgraphs(node):
        yield from body.all_nodes()


def _own_values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()


def _enters(value: ir.Value, inside: Collection[ir.Node], graphs: Collection[ir.Graph]) -> bool:
    producer = value.producer()
    return producer not in inside if producer is not None else value.graph not in graphs


def _leaves(value: ir.Value, inside: Collection[ir.Node]) -> bool:
    return value.is_graph_output() or any(use.node not in inside for use in value.uses())


def _replace_outside(value: ir.Value, result: ir.Value, inside: Collection[ir.Node], graph: ir.Graph) -> None:
    for use in list(value.uses()):
        if use.node not in inside:
            use.node.replace_input_with(use.idx, result)
    for position, output in enumerate(graph.outputs):
        if output is value:
            graph.outputs[position] = result


def _relative_name(instance: Instance, above: str) -> str:
    """The name of a call: the path from the module around it, with the number of later calls."""
    path = instance.path
    if above and path != above and tags.is_under(path, above):
        path = path[len(above) + 1 :]
    return f"{path}#{instance.call}" if instance.call else path


def _make_names_unique(graph: ir.Graph) -> None:
    """Give every node of a body, in subgraphs too, a name of its own: by these its originals are found again."""
    used = UsedNames()
    for node in graph.all_nodes():
        node.name = used.unused(node.name or node.op_type)
