"""Move groups of nodes out of a graph into functions, which equal groups share."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.capabilities.functions.placing import Group, Item
from htp_export.editing.edit import Edit
from htp_export.editing.function_records import DOMAIN, given_values
from htp_export.format import tags
from htp_export.format.call_tree import Instance
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.tags import Reason
from htp_export.model.hashes import body_hash, constant_hash
from htp_export.model.neighbours import replace_inputs
from htp_export.model.regions import GraphIndex
from htp_export.model.tagged import TaggedModel
from htp_export.model.tensor_names import UsedNames, make_node_names_unique
from htp_export.shapes.operator_kinds import is_standard, subgraphs, with_subgraphs

_LONGEST = 64
"""Characters of a name of several parts: every function around a deep module names its weights
anew, so that names of full paths would grow with the square of the depth."""

_LONGEST_PART = 128  # characters of the last two parts: one part alone may be longer than that


@dataclass(frozen=True, eq=False)
class Occurrence:
    """One instance that became a call of a function."""

    instance: Instance
    function: ir.Function
    # the nodes of this instance in the function's order; of the first instance, the function's own
    body: ir.Graph

    def pairs(self) -> Iterator[tuple[ir.Node, ir.Node]]:
        """Pairs of a node of the function, in subgraphs too, and of this instance."""
        return zip(self.function.graph.all_nodes(), self.body.all_nodes(), strict=True)


class Bodies:
    """Builds functions of groups of nodes, in one model, whose graphs are changed."""

    def __init__(self, work: TaggedModel, index: GraphIndex) -> None:
        self.edit = Edit(work)
        self.model, self.hierarchy = work.model, work.hierarchy
        # Call → its instance and function, innermost first, also in bodies that were dropped for
        # an equal one.
        self.occurrences: dict[ir.Node, Occurrence] = {}
        # These are computed when they are first used: here, as the graphs are changed later.
        self._signatures, self._constant = work.signatures, index.constant
        self._owners = index.owners
        self._known: dict[Hashable, ir.Function] = {}
        # Placeholder that a call has in place of a weight → the weight. It becomes an input of
        # the function around the call: replacing each of many inputs of a node takes time with
        # the square of their number.
        self._weights: dict[ir.Value, ir.Value] = {}
        self._names = UsedNames(
            name for domain, name, _ in self.model.functions if domain == DOMAIN
        )

    def build(self, graph: ir.Graph, items: Iterable[Item]) -> None:
        """Build functions of the groups of a graph.

        Its nodes are then in the order of ``items``.
        """
        nodes = self._nodes_of(items, graph)
        for node in nodes:
            replace_inputs(node, self._weights)
        graph.remove(nodes)
        graph.extend(nodes)

    def _nodes_of(self, items: Iterable[Item], graph: ir.Graph) -> list[ir.Node]:
        return [self._call_of(item, graph) if isinstance(item, Group) else item for item in items]

    def _call_of(self, group: Group, graph: ir.Graph) -> ir.Node:
        """Move a group into a function, and append a call of it to the graph."""
        instance, nodes = group.instance, self._nodes_of(group.items, graph)
        every = [inner for node in nodes for inner in with_subgraphs(node)]
        inside = set(every)
        entering = self._inputs_of(every)
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

        arguments: list[ir.Value] = []
        for value in entering:
            if value.is_initializer():
                placeholder = ir.Value()
                self._weights[placeholder] = value
                arguments.append(placeholder)
            else:
                arguments.append(value)
        name = _relative_name(instance, "")
        call = ir.node(function.name, arguments, domain=DOMAIN, outputs=results, name=name)
        self.edit.own(call, instance, Reason.FUNCTION)
        graph.append(call)
        self.occurrences[call] = Occurrence(instance, function, body)
        return call

    def _inputs_of(self, nodes: Sequence[ir.Node]) -> list[ir.Value]:
        """The values outside that nodes use.

        Tensors come first, then weights, as in torch.nn.functional.
        """
        inside = set(nodes)
        graphs = {body for node in nodes for body in subgraphs(node)}
        used: dict[ir.Value, None] = {}
        for node in nodes:
            for value in node.inputs:
                if value is not None:
                    used[self._weights.get(value, value)] = None
        entering = [value for value in used if _enters(value, inside, graphs)]
        return sorted(entering, key=self._is_weight)

    def _inputs_for(
        self,
        entering: list[ir.Value],
        leaving: list[ir.Value],
        nodes: list[ir.Node],
        instance: Instance,
    ) -> list[ir.Value]:
        """The inputs of a function, which replace the values outside in its nodes.

        The outputs get names, too.
        """
        used = UsedNames(_inner_names(nodes, without=set(leaving)))
        for value in leaving:
            value.name = used.unused("output")
        names = self._names_of(entering, nodes, instance, used)
        placeholders: list[ir.Value] = []
        for node in nodes:
            arguments = [value for value in node.inputs if value is not None]
            placeholders += [value for value in arguments if value in self._weights]
        formals = {self._weights[placeholder]: placeholder for placeholder in placeholders}
        for value, name in zip(entering, names, strict=True):
            # Weights have their types in the graph. A function around a deep module would write
            # them all again.
            if value not in formals:
                formals[value] = ir.Value() if self._is_weight(value) else copy_value(value, name)
            formals[value].name = name
        replaced = dict(formals)
        for placeholder in placeholders:
            formal = formals[self._weights[placeholder]]
            if formal is not placeholder:  # several calls use the weight
                replaced[placeholder] = formal
        for node in nodes:
            replace_inputs(node, replaced)
        return [formals[value] for value in entering]

    def _shared(self, body: ir.Graph, instance: Instance) -> ir.Function:
        """The function with this body, or an earlier one with an equal body."""
        info = self.hierarchy[instance.path]
        key = (info.class_name, body_hash(body))
        if key not in self._known:
            name = self._names.unused(info.simple_class or "Module")
            function = ir.Function(DOMAIN, name, graph=body, attributes=[])
            make_node_names_unique(body)  # `inline` finds the original nodes by these names
            self.model.functions[function.identifier()] = function
            self._known[key] = function
        return self._known[key]

    def _opsets(self, nodes: Iterable[ir.Node]) -> dict[str, int]:
        known = {**self.model.opset_imports, DOMAIN: 1}
        domains = sorted({node.domain for node in nodes} - {""})
        return {domain: known.get(domain, 1) for domain in ("", *domains)}

    # --- names of inputs ----------------------------------------------------------------------

    def _names_of(
        self,
        values: Sequence[ir.Value],
        nodes: Iterable[ir.Node],
        instance: Instance,
        used: UsedNames,
    ) -> list[str]:
        """A name for each input of a function: of the argument of ``forward``, or of the weight.

        A value without such a name in the file (exporters transpose weights and fold constants) is
        named after the module that uses it, and the model's own inputs keep their names. Of a long
        name, the last parts are used.
        """
        consumers: dict[ir.Value, tuple[ir.Node, int]] = {}
        for node in nodes:
            for position, value in enumerate(node.inputs):
                if value is not None:
                    consumers.setdefault(self._weights.get(value, value), (node, position))
        arguments = self._arguments(instance)
        names: list[str] = []
        for value in values:
            argument = arguments.get(value.name or "")
            wanted = argument or self._wanted(value, consumers[value], instance.path)
            names.append(used.unused(wanted))
        return names

    def _arguments(self, instance: Instance) -> dict[str, str]:
        """Tensor of the model → its argument in a module call; the first of several."""
        calls = self._signatures.get(instance.path, ())
        arguments: dict[str, str] = {}
        if instance.call < len(calls):
            for argument, tensor in calls[instance.call].inputs.items():
                if tensor is not None:
                    arguments.setdefault(tensor, argument)
        return arguments

    def _is_weight(self, value: ir.Value) -> bool:
        """Whether a value is an initializer, or computed from initializers and constants alone."""
        return value.is_initializer() or value in self._constant

    def _wanted(self, value: ir.Value, consumer: tuple[ir.Node, int], path: str) -> str:
        """The name that an input of a function of a module should have."""
        name = value.name or ""
        if not self._is_weight(value):
            return name if value.is_graph_input() and name else "input"
        if value.is_initializer() and name.startswith(path + "."):
            return _last_parts(name[len(path) + 1 :])
        node, position = consumer
        if node in self.occurrences:  # an inner call uses it: take the name of its argument
            inner = self.occurrences[node]
            return _relative(inner.instance.path, path, inner.body.inputs[position].name or "input")
        is_floating = value.dtype is not None and value.dtype.is_floating_point()
        kind = "weight" if is_floating and value.shape else "constant"
        inside = [owner for owner in self._owners.get(node, ()) if tags.is_under(owner, path)]
        return _relative(inside[0] if inside else path, path, kind)


def _relative(path: str, above: str, name: str) -> str:
    """The name of a parameter of a module, relative to a module above."""
    below = path
    if above:
        below = path[len(above) + 1 :] if tags.is_under(path, above) else ""
    return _last_parts(f"{below}.{name}" if below else name)


def _last_parts(name: str) -> str:
    """The name, or the name of the parameter in its own module, if the name is long."""
    if len(name) <= _LONGEST:
        return name
    return ".".join(name.rsplit(".", 2)[-2:])[-_LONGEST_PART:]


def _inner_names(nodes: Iterable[ir.Node], *, without: Collection[ir.Value]) -> Iterator[str]:
    """The names of the values that nodes and their subgraphs define."""
    for node in nodes:
        for value in node.outputs:
            if value not in without:
                yield value.name or ""
        for body in subgraphs(node):
            for value in given_values(body):
                yield value.name or ""


def differing_constants(
    occurrences: Iterable[Occurrence], hierarchy: Hierarchy
) -> dict[ir.Node, set[Instance]]:
    """``Constant`` nodes that differ between functions → the instances to remove them from.

    Functions that are equal except for the values of these nodes become one function without them.
    """
    alike: defaultdict[Hashable, list[Occurrence]] = defaultdict(list)
    keys: dict[ir.Function, Hashable] = {}
    for occurrence in occurrences:
        function = occurrence.function
        if function not in keys:
            keys[function] = body_hash(function.graph, constants=False)
        class_name = hierarchy[occurrence.instance.path].class_name
        alike[class_name, keys[function]].append(occurrence)
    found: dict[ir.Node, set[Instance]] = {}
    for group in alike.values():
        functions = list(dict.fromkeys(occurrence.function for occurrence in group))
        if len(functions) == 1 or all(is_standard(node, "Constant") for node in functions[0].graph):
            continue
        contents = [_constant_hashes(function) for function in functions]
        differ = [len(set(column)) > 1 for column in zip(*contents, strict=True)]
        for occurrence in group:
            for node in itertools.compress(occurrence.body, differ):
                found.setdefault(node, set()).add(occurrence.instance)
    return found


def _constant_hashes(function: ir.Function) -> list[Hashable]:
    """The hash of each node of a function that is a ``Constant``; None for others."""
    return [
        constant_hash(node) if is_standard(node, "Constant") else None for node in function.graph
    ]


def copy_value(value: ir.Value, name: str | None = None) -> ir.Value:
    """A value of the same type without a producer, under the same name or another."""
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
