"""Names of nodes and tensors after the modules of their nodes.

Such a name, ``/encoder/layer.0/query/MatMul_output_0``, depends only on tags and on the graph, not
on present names. Only inputs and outputs of the model and PyTorch's parameters keep their names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from htp_export.editing.edit import Edit
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.bounds import number_in
from htp_export.model.neighbours import dependencies_first
from htp_export.model.regions import all_values
from htp_export.model.tagged import TaggedModel
from htp_export.model.tensor_names import UsedNames, graphs_of, rename
from htp_export.shapes.operator_kinds import subgraphs

_SEPARATORS = re.compile(r"[\s,:*'\"\x00-\x1f\x7f]")
"""Separators and wildcards of tools' command lines; ``/``, ``;`` and ``%`` are escaped before."""

_QUANTIZATION = "quant_parameter_tensor_names"
"""Key in the ``meta`` of an ``ir.Value``: the names of its scale and zero point, as in onnx_ir."""

STYLES = ("path",)
"""The styles of names."""


@dataclass(frozen=True)
class Renamed:
    """Old name → new name of renamed nodes and tensors, and their total numbers; without functions.

    Nodes without a name are left out. If several nodes have one name, the first one counts.
    """

    nodes: Mapping[str, str]
    tensors: Mapping[str, str]
    nodes_total: int
    tensors_total: int


def check_style(style: str) -> None:
    """Raise an `InputError` for an unknown style of names."""
    if style not in STYLES:
        raise InputError(
            f"there is no style of names {style!r}; there is {', '.join(map(repr, STYLES))}"
        )


def check_tags(tagged: TaggedModel) -> None:
    """Raise an `UntaggedModelError` for a model whose nodes have no exact tags."""
    if tagged.nodes:
        tagged.require_exact_tags()


def path_prefix(path: str, called: Collection[str]) -> str:
    """The prefix of the names of a module's nodes.

    Modules that did not run, such as ``nn.ModuleList``, are joined with their children.

    Examples:
        >>> path_prefix("layer.0.query", {"", "layer.0", "layer.0.query"}), path_prefix("", {""})
        ('/layer.0/query/', '/')
        >>> path_prefix("a/b.@0.c d", {"", "a/b", "a/b.@0", "a/b.@0.c d"})
        '/a%2Fb/%400/c%20d/'
    """
    space = _SEPARATORS.sub(_percent, tags.namespace(path, called))
    levels = (f"%40{level[1:]}" if level.startswith("@") else level for level in space.split("/"))
    return f"/{'/'.join(levels)}/" if path else "/"


def give_path_names(tagged: TaggedModel) -> Renamed:
    """Rename the nodes and tensors of a model, in place and in its metadata.

    The model has exact tags, and no functions that are modules.
    """
    graph, namer = tagged.model.graph, _Namer(tagged)
    node_names, tensor_names = namer.named()
    nodes: dict[str, str] = {}
    for node in graph.all_nodes():
        if node.name:
            nodes.setdefault(node.name, node_names[node])
    tensors: dict[str, str] = {}
    for value in all_values(graph):
        if value.name:
            tensors.setdefault(value.name, tensor_names[value])
    for node, name in node_names.items():
        node.name = name
    _rename_tensors(tagged.model, tensor_names)
    with Edit(tagged) as edit:
        edit.rename(tensors.get)  # tensors without a new name are not in the graph any more
    _rename_in_annotations(tagged.model.graph, tensors)
    return Renamed(
        {old: new for old, new in nodes.items() if old != new},
        {old: new for old, new in tensors.items() if old != new},
        sum(1 for _ in graph.all_nodes()),
        len(tensors),
    )


@dataclass
class _Namer:
    tagged: TaggedModel
    _nodes: dict[ir.Node, str] = field(default_factory=dict)
    _tensors: dict[ir.Value, str] = field(default_factory=dict)
    _prefixes: dict[str, str] = field(default_factory=dict)

    def named(self) -> tuple[Mapping[ir.Node, str], Mapping[ir.Value, str]]:
        """The names of all nodes and tensors; each function has a name space of its own."""
        model = self.tagged.model
        for graph in graphs_of(model):
            self._name_graph(graph)
        return self._nodes, self._tensors

    def _name_graph(self, graph: ir.Graph) -> None:
        fixed = {*graph.inputs, *graph.outputs, *filter(self._is_kept, all_values(graph))}
        self._tensors |= {value: value.name for value in fixed if value.name}
        used = UsedNames(filter(None, (value.name for value in fixed)), first=1)
        used_by_nodes = UsedNames(first=1)
        ordered = list(self._ordered(graph))
        for node in ordered:
            self._nodes[node] = used_by_nodes.unused(self._wanted(node))
        for node in ordered:
            name = self._nodes[node]
            for place, value in enumerate(node.outputs):
                self._name_tensor(value, f"{name}_output_{place}", used)
            for attribute, body in bodies_of(node):
                for place, value in enumerate(body.inputs):
                    self._name_tensor(value, f"{name}_{attribute}_input_{place}", used)
        for node in ordered:
            for place, read in enumerate(node.inputs):
                if read is not None and read.is_initializer():
                    self._name_tensor(read, f"{self._nodes[node]}_input_{place}", used)
        for value in all_values(graph):
            self._name_tensor(value, "/Initializer", used)  # those without a consumer

    def _is_kept(self, value: ir.Value) -> bool:
        """Whether a tensor has the name of a PyTorch parameter or buffer, maybe with a suffix."""
        name = value.name or ""
        # an initializer, or an Identity that replaces an equal one
        if name in (self.tagged.declared or ()):
            return True
        return value.is_initializer() and any(map(self._is_weight, _beginnings(name)))

    def _is_weight(self, name: str) -> bool:
        path, _, own = name.rpartition(".")
        is_of_module = path != "" and path in self.tagged.hierarchy and own.isidentifier()
        return is_of_module or name in (self.tagged.declared or ())

    def _name_tensor(self, value: ir.Value, wanted: str, used: UsedNames) -> None:
        # an output without a name is omitted
        if value.name and value not in self._tensors:
            self._tensors[value] = used.unused(wanted)

    def _ordered(self, graph: ir.Graph) -> Iterator[ir.Node]:
        for node in _canonical_order(graph):
            yield node
            for _, body in bodies_of(node):
                yield from self._ordered(body)

    def _wanted(self, node: ir.Node) -> str:
        path, call = self._place(node)
        if path not in self._prefixes:
            self._prefixes[path] = path_prefix(path, self.tagged.hierarchy.called)
        return f"{self._prefixes[path]}{call}{_SEPARATORS.sub(_percent, node.op_type).replace('/', '%2F')}"

    def _place(self, node: ir.Node) -> tuple[str, str]:
        """The innermost module around all owners of a node, and its call if there are several."""
        owners = tags.owners_of(node.metadata_props)
        call = number_in(node.metadata_props.get(tags.CALL, ""))
        if len(owners) != 1:
            return tags.common_ancestor(owners), ""
        return owners[0], "" if call is None else f"@{call}/"


_MOST_ENDS = 256  # prefixes that are tried, at most: a file may have a name of any length


def _beginnings(name: str) -> Iterator[str]:
    """A name, and its prefixes before each suffix of a tool: ``fc.weight_quantized``."""
    yield name
    ends = itertools.islice(re.finditer(r"[^\w.]|_", name), _MOST_ENDS)
    yield from (name[: match.start()] for match in ends)


def _percent(match: re.Match[str]) -> str:
    return "".join(f"%{byte:02X}" for byte in match.group().encode())


def _rename_tensors(model: ir.Model, names: Mapping[ir.Value, str]) -> None:
    """Rename tensors; initializers all at once, because one may get the old name of another."""
    graphs = [graph for whole in graphs_of(model) for graph in (whole, *whole.subgraphs())]
    stored = {graph: list(graph.initializers.values()) for graph in graphs}
    for graph in stored:
        for name in list(graph.initializers):  # clear() takes time by the square of their number
            del graph.initializers[name]
    for value, name in names.items():
        rename(value, name)
    for graph, initializers in stored.items():
        for value in initializers:
            graph.initializers.add(value)


def _rename_in_annotations(graph: ir.Graph, renamed: Mapping[str, str]) -> None:
    """Rename scales and zero points in the quantization metadata of tensors."""
    for value in all_values(graph):
        names = value.meta.get(_QUANTIZATION)
        if names is not None:
            value.meta[_QUANTIZATION] = {key: renamed.get(n, n) for key, n in names.items()}


# --- an order of nodes that depends on the graph alone, not on names or on the file's order ---


def _canonical_order(graph: ir.Graph) -> list[ir.Node]:
    """The nodes of a graph, producers before consumers; without nodes in subgraphs.

    A search from the outputs of the graph through inputs reaches every node; it follows the last of
    its producers. So the order does not depend on names, or on the order of independent nodes in
    the file. Nodes that no output needs are last, in the order of the file.
    """
    order: dict[ir.Node, None] = {}
    for value in graph.outputs:
        _add_after_producers(value.producer(), graph, order)
    for node in graph:
        _add_after_producers(node, graph, order)
    return list(order)


def bodies_of(node: ir.Node) -> Iterator[tuple[str, ir.Graph]]:
    """The subgraphs of a node, each with the name of its attribute, sorted by these names."""
    for name in sorted(node.attributes):
        attribute = node.attributes[name]
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.GRAPH:
            yield name, attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from (
                (f"{name}.{place}", body) for place, body in enumerate(attribute.as_graphs())
            )


def _add_after_producers(
    start: ir.Node | None, graph: ir.Graph, order: dict[ir.Node, None]
) -> None:
    """Add a node, after all nodes on which it depends."""
    if start is None or start.graph is not graph:
        return
    for node in dependencies_first(start, lambda node: _producers(node, graph), order):
        order[node] = None


def _producers(node: ir.Node, graph: ir.Graph) -> Sequence[ir.Node]:
    """The producers of a node's inputs in its graph, and then of its subgraphs' inputs."""
    read: Iterable[ir.Value | None] = node.inputs
    if subgraphs(node):
        read = (*node.inputs, *(value for _, body in bodies_of(node) for value in _read_in(body)))
    makers = (value.producer() for value in read if value is not None)
    return [maker for maker in makers if maker is not None and maker.graph is graph]


def _read_in(body: ir.Graph) -> Iterator[ir.Value]:
    """The inputs of a subgraph's nodes, in its canonical order, also its own and outer values."""
    for node in _canonical_order(body):
        yield from (value for value in node.inputs if value is not None)
        for _, inner in bodies_of(node):
            yield from _read_in(inner)
    yield from body.outputs
