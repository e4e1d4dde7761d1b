"""Names of tensors and nodes: unused ones, and separate ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx_ir as ir

from htp_export.files.lazy_tensor import viewed
from htp_export.format import tags
from htp_export.model.recipes import recipe_of, recorded
from htp_export.model.regions import all_values
from htp_export.shapes.operator_kinds import nodes_in, subgraphs


class UsedNames:
    """A growing set of used names, which finds unused ones.

    The second tensor or node of a name has the suffix ``first``, a number.

    Examples:
        >>> used = UsedNames(["input"])
        >>> used.unused("input"), used.unused("input"), used.unused("mask")
        ('input_2', 'input_3', 'mask')
    """

    def __init__(self, names: Iterable[str] = (), first: int = 2) -> None:
        self._names, self._before = set(names), first - 1
        # name → its last suffix; all lower numbers are in use
        self._numbers: dict[str, int] = {}

    def unused(self, wanted: str) -> str:
        """Return the name, or it with the first number that makes it unused; record it as used."""
        name, number = wanted, self._numbers.get(wanted, self._before)
        while name in self._names:
            number += 1
            name = f"{wanted}_{number}"
        self._numbers[wanted] = number
        self._names.add(name)
        return name


class Names:
    """The used names of a model during changes: of its tensors and of its nodes."""

    def __init__(self, model: ir.Model) -> None:
        graphs = list(graphs_of(model))
        self.tensors = UsedNames(
            str(value.name) for graph in graphs for value in all_values(graph) if value.name
        )
        self.nodes = UsedNames(
            str(node.name) for graph in graphs for node in graph.all_nodes() if node.name
        )


def names_now(model: ir.Model) -> dict[ir.Value | ir.Node, str | None]:
    """The tensors and nodes of a model with their names, for `separate_names`.

    Subgraphs and functions are included.
    """
    found: dict[ir.Value | ir.Node, str | None] = {}
    for graph in graphs_of(model):
        _add_names(graph, found)
    return found


def _add_names(graph: ir.Graph, found: dict[ir.Value | ir.Node, str | None]) -> None:
    """Add the names of the tensors and nodes of a graph and its subgraphs."""
    for value in (*graph.inputs, *graph.initializers.values()):
        found[value] = value.name
    for node in graph:
        found[node] = node.name
        for value in node.outputs:
            found[value] = value.name
        for body in subgraphs(node):
            _add_names(body, found)


def separate_names(model: ir.Model, before: Mapping[ir.Value | ir.Node, str | None]) -> None:
    """Rename new or renamed tensors and nodes if another one has the same name.

    ``before``: The result of `names_now`. Inputs and outputs of the model keep their names.
    Subgraphs of one node may have equal names, as ONNX permits.

    Examples:
        >>> x, old, new = ir.val("x"), ir.val("x_scale"), ir.val("x_scale")
        >>> graph = ir.Graph([x], [old], nodes=[ir.node("Relu", [x], outputs=[old])], opset_imports={"": 20})
        >>> model = ir.Model(graph, ir_version=10)
        >>> before = names_now(model)
        >>> graph.append(ir.node("Neg", [x], outputs=[new]))
        >>> separate_names(model, before)
        >>> old.name, new.name
        ('x_scale', 'x_scale_2')
    """
    for graph in graphs_of(model):
        _Separation(graph, before).run()


class _Separation:
    """The tensors and nodes of a graph with its subgraphs, and the subset that keeps its names."""

    def __init__(self, graph: ir.Graph, before: Mapping[ir.Value | ir.Node, str | None]) -> None:
        self._graph, self._before = graph, before
        self._fixed = frozenset((*graph.inputs, *graph.outputs))
        self._nodes = list(nodes_in(graph))

    def run(self) -> None:
        """Rename tensors and nodes with the name of another one."""
        self._separate_tensors()
        self._separate_nodes()

    def _separate_tensors(self) -> None:
        kept: set[str | None] = set()
        are_all_kept = True
        for value in all_values(self._graph):
            if self._keeps(value):
                kept.add(value.name)
            else:
                are_all_kept = False
        if are_all_kept:
            return
        if shared := list(self._shared(self._graph, set(), kept)):
            names = UsedNames(value.name for value in all_values(self._graph) if value.name)
            for value in shared:
                rename(value, names.unused(str(value.name)))

    def _keeps(self, it: ir.Value | ir.Node) -> bool:
        return it in self._fixed or (it in self._before and self._before[it] == it.name)

    def _shared(
        self, graph: ir.Graph, visible: set[str | None], kept: set[str | None]
    ) -> Iterator[ir.Value]:
        """The values to rename: their names are kept by others, or used before in a visible graph."""
        own: set[str | None] = set()
        results = [value for node in graph for value in node.outputs if value.name]
        for value in dict.fromkeys((*graph.inputs, *graph.initializers.values(), *results)):
            is_used = any(value.name in names for names in (kept, own, visible))
            if is_used and not self._keeps(value):
                yield value
            own.add(value.name)
        new = own - visible
        visible |= new
        for node in graph:
            for body in subgraphs(node):
                yield from self._shared(body, visible, kept)
        visible -= new

    def _separate_nodes(self) -> None:
        kept: set[str | None] = set()
        others: list[ir.Node] = []
        for node in self._nodes:
            if self._keeps(node):
                kept.add(node.name)
            elif node.name:
                others.append(node)
        names: UsedNames | None = None
        for node in others:
            if node.name in kept:
                names = names or UsedNames(each.name for each in self._nodes if each.name)
                node.name = names.unused(str(node.name))
            kept.add(node.name)


def graphs_of(model: ir.Model) -> Iterator[ir.Graph]:
    """The main graph and the bodies of functions, each of which has its own names."""
    yield model.graph
    yield from (function.graph for function in model.functions.values())


def make_node_names_unique(graph: ir.Graph) -> bool:
    """Give every node a unique name, also in subgraphs; return whether a name changed."""
    used, changed = UsedNames(), False
    for node in graph.all_nodes():
        name = used.unused(node.name or node.op_type)
        changed, node.name = changed or name != node.name, name
    return changed


def rename(value: ir.Value, name: str) -> None:
    """Rename a value without renaming its tensor in other models.

    Copies of models share their weights, and onnx_ir renames the tensor together with the value,
    and with the tensor the ``TensorProto`` that it is a view of.

    Examples:
        >>> weight = ir.tensor([1.0], name="weight")
        >>> values = [ir.Value(name="weight", const_value=weight) for _ in range(2)]
        >>> rename(values[1], "layer.weight")
        >>> [(value.name, value.const_value.name) for value in values]
        [('weight', 'weight'), ('layer.weight', 'layer.weight')]
    """
    tensor = value.const_value
    if tensor is not None and value.name != name:
        unnamed = tags.RECIPE not in tensor.metadata_props and tensor.dtype.is_floating_point()
        value.const_value = recorded(tensor, recipe_of(value)) if unnamed else viewed(tensor)
    value.name = name
