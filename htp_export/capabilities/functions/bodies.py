"""Groups of nodes moved out of a graph into functions, which equal ones share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.capabilities.functions.placing import Group, Item
from htp_export.editing.function_records import DOMAIN, given_values
from htp_export.format import tags
from htp_export.format.call_tree import Instance
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.tags import Reason
from htp_export.lineage.owner_rule import Owned
from htp_export.model.hashes import body_hash, constant_hash
from htp_export.model.neighbours import replace_inputs
from htp_export.model.regions import GraphIndex
from htp_export.model.tagged import TaggedModel
from htp_export.model.tensor_names import UsedNames, make_node_names_unique
from htp_export.shapes.operator_kinds import is_standard, subgraphs, with_subgraphs

_LONGEST = 64
"""Characters of a name of several parts: every function around a deep module names its weights anew."""

_LONGEST_PART = 128  # characters of what is left of a long name


@dataclass(frozen=True, eq=False)
class Occurrence:
    """One instance that became a call of a function."""

    instance: Instance
    function: ir.Function
    # the nodes of this instance in the function's order; of the first instance, the function's own
    body: ir.Graph

    def pairs(self) -> Iterator[tuple[ir.Node, ir.Node]]:
        """Each node of the function, in subgraphs too, with that of this instance."""
        return zip(self.function.graph.all_nodes(), self.body.all_nodes(), strict=True)


class Bodies:
    """Makes functions of groups, in one model, whose graphs are changed."""

    def __init__(self, work: TaggedModel, index: GraphIndex) -> None:
        self.model, self.hierarchy = work.model, work.hierarchy
        # Call → what it calls, innermost first, also in bodies that were thrown away for an equal
        # one.
        self.occurrences: dict[ir.Node, Occurrence] = {}
        # Now: what the index does not know yet, it would read from graphs that are changed.
        self._signatures, self._constant, self._owners = (
            work.signatures,
            index.constant,
            index.owners,
        )
        self._known: dict[Hashable, ir.Function] = {}
        # What a call reads in place of a weight → the weight. It becomes an input of the function
        # around the call: replacing each of many inputs of a node takes time with the square of
        # their number.
        self._weights: dict[ir.Value, ir.Value] = {}
        self._names = UsedNames(
            name for domain, name, _ in self.model.functions if domain == DOMAIN
        )

    def build(self, graph: ir.Graph, items: Iterable[Item]) -> None:
        """Make functions of the groups of a graph; its nodes are then in the order of ``items``."""
        nodes = self._nodes_of(items, graph)
        for node in nodes:
            replace_inputs(node, self._weights)
        graph.remove(nodes)
        graph.extend(nodes)

    def _nodes_of(self, items: Iterable[Item], graph: ir.Graph) -> list[ir.Node]:
        return [self._call_of(item, graph) if isinstance(item, Group) else item for item in items]

    def _call_of(self, group: Group, graph: ir.Graph) -> ir.Node:
        """Move a group into a function, and put a call of it at the end of the graph."""
        instance, nodes = group.instance, self._nodes_of(group.items, graph)
        every = [held for node in nodes for held in with_subgraphs(node)]
        inside, graphs = set(every), {body for node in every for body in subgraphs(node)}
        read = dict.fromkeys(
            self._weights.get(value, value)
            for node in every
            for value in node.inputs
            if value is not None
        )
        # Tensors first, then weights, as in torch.nn.functional; each kind as it came.
        entering = sorted(
            (value for value in read if _enters(value, inside, graphs)), key=self._is_weight
        )
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
        number = str(instance.call) if self.hierarchy[instance.path].calls > 1 else ""
        given = [ir.Value() if value.is_initializer() else value for value in entering]
        self._weights.update(
            (one, value) for one, value in zip(given, entering, strict=True) if one is not value
        )
        call = ir.node(
            function.name,
            given,
            domain=DOMAIN,
            outputs=results,
            name=_relative_name(instance, ""),
        )
        Owned((instance.path,), Reason.FUNCTION, number).write(
            call.metadata_props, self.hierarchy.called
        )
        graph.append(call)
        self.occurrences[call] = Occurrence(instance, function, body)
        return call

    def _inputs_for(
        self,
        entering: list[ir.Value],
        leaving: list[ir.Value],
        nodes: list[ir.Node],
        instance: Instance,
    ) -> list[ir.Value]:
        """Inputs of a function, read by its nodes in place of the values outside; the outputs get names as well."""
        outputs = set(leaving)
        kept = [value for node in nodes for value in node.outputs if value not in outputs]
        given = [
            value for node in nodes for body in subgraphs(node) for value in given_values(body)
        ]
        used = UsedNames(value.name or "" for value in (*kept, *given))
        for value in leaving:
            value.name = used.unused("output")
        names = self._names_of(entering, nodes, instance, used)
        stand_ins = [
            value
            for node in nodes
            for value in node.inputs
            if value is not None and value in self._weights
        ]
        formals = {self._weights[value]: value for value in stand_ins}
        for value, name in zip(entering, names, strict=True):
            # Weights have their types in the graph. A function around a deep module would write
            # them all again.
            if value not in formals:
                formals[value] = ir.Value() if self._is_weight(value) else copy_value(value, name)
            formals[value].name = name
        others = {
            value: formal
            for value in stand_ins
            if (formal := formals[self._weights[value]]) is not value
        }
        replaced = formals | others
        for node in nodes:
            replace_inputs(node, replaced)
        return [formals[value] for value in entering]

    def _shared(self, body: ir.Graph, instance: Instance) -> ir.Function:
        """The function with this body, or one that has an equal one already."""
        info = self.hierarchy[instance.path]
        key = (info.class_name, body_hash(body))
        if key not in self._known:
            name = self._names.unused(info.simple_class or "Module")
            function = ir.Function(DOMAIN, name, graph=body, attributes=[])
            make_node_names_unique(body)  # by these, originals are found again
            self.model.functions[function.identifier()] = function
            self._known[key] = function
        return self._known[key]

    def _opsets(self, nodes: Iterable[ir.Node]) -> dict[str, int]:
        known = {**self.model.opset_imports, DOMAIN: 1}
        return {
            domain: known.get(domain, 1)
            for domain in ("", *sorted({node.domain for node in nodes} - {""}))
        }

    # --- names of inputs ----------------------------------------------------------------------------------

    def _names_of(
        self,
        values: Sequence[ir.Value],
        nodes: Iterable[ir.Node],
        instance: Instance,
        used: UsedNames,
    ) -> list[str]:
        """A name for each input of a function: that of the argument of ``forward``, or of the weight in the module.

        What has no such name in the file (exporters transpose weights and fold constants) has the
        name of the module that reads it in front, and the model's own inputs keep theirs. Of a long
        name, the last parts are used.
        """
        readers: dict[ir.Value, tuple[ir.Node, int]] = {}
        for node in nodes:
            for position, value in enumerate(node.inputs):
                if value is not None:
                    readers.setdefault(self._weights.get(value, value), (node, position))
        arguments = self._arguments(instance)
        return [
            used.unused(
                arguments.get(value.name or "")
                or self._wanted(value, readers[value], instance.path)
            )
            for value in values
        ]

    def _arguments(self, instance: Instance) -> dict[str, str]:
        """Tensor of the model → the argument that it is of a module call."""
        calls = self._signatures.get(instance.path, ())
        given = calls[instance.call].inputs if instance.call < len(calls) else {}
        return {
            tensor: argument
            for argument, tensor in reversed(list(given.items()))
            if tensor is not None
        }

    def _is_weight(self, value: ir.Value) -> bool:
        """Whether a value is an initializer, or computed from initializers and constants alone."""
        return value.is_initializer() or value in self._constant

    def _wanted(self, value: ir.Value, reader: tuple[ir.Node, int], path: str) -> str:
        name = value.name or ""
        if not self._is_weight(value):
            return name if value.is_graph_input() and name else "input"
        if value.is_initializer() and name.startswith(path + "."):
            return _last_parts(name[len(path) + 1 :])
        node, position = reader
        if node in self.occurrences:  # it is handed on: its name is that which it has there
            inner = self.occurrences[node]
            return _relative(inner.instance.path, path, inner.body.inputs[position].name or "input")
        is_weight = (
            value.dtype is not None and value.dtype.is_floating_point() and bool(value.shape)
        )
        inside = [owner for owner in self._owners.get(node, ()) if tags.is_under(owner, path)]
        return _relative(inside[0] if inside else path, path, "weight" if is_weight else "constant")


def _relative(path: str, above: str, name: str) -> str:
    below = (
        path[len(above) + 1 :]
        if above and tags.is_under(path, above)
        else path
        if not above
        else ""
    )
    return _last_parts(f"{below}.{name}" if below else name)


def _last_parts(name: str) -> str:
    """The name, or the name of the parameter in its own module, if the name is long."""
    return name if len(name) <= _LONGEST else ".".join(name.rsplit(".", 2)[-2:])[-_LONGEST_PART:]


def differing_constants(
    occurrences: Iterable[Occurrence], hierarchy: Hierarchy
) -> dict[ir.Node, set[Instance]]:
    """``Constant`` nodes of bodies with another value in other functions which are equal but for such values.

    Each with the instances that it must not be in, so that they share a function.
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
        if len(functions) == 1 or all(is_standard(node, "Constant") for node in functions[0].graph):
            continue
        values = [
            [
                constant_hash(node) if is_standard(node, "Constant") else None
                for node in function.graph
            ]
            for function in functions
        ]
        differ = [len(set(column)) > 1 for column in zip(*values, strict=True)]
        for one in group:
            for node, other in zip(one.body, differ, strict=True):
                if other:
                    found.setdefault(node, set()).add(one.instance)
    return found


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


def _enters(value: ir.Value, inside: Collection[ir.Node], graphs: Collection[ir.Graph]) -> bool:
    producer = value.producer()
    return producer not in inside if producer is not None else value.graph not in graphs


def _leaves(value: ir.Value, inside: Collection[ir.Node]) -> bool:
    return value.is_graph_output() or any(use.node not in inside for use in value.uses())


def _replace_outside(
    value: ir.Value, result: ir.Value, inside: Collection[ir.Node], graph: ir.Graph
) -> None:
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
