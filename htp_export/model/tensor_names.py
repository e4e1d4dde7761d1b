"""Names of tensors and nodes: unused ones, separate ones, and those of a node's module.

The last kind, ``/encoder/layer.0/query/MatMul_output_0``, depends only on tags and on the graph,
not on present names. Only inputs and outputs of the model and PyTorch's parameters keep their
names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.files.lazy_tensor import viewed
from htp_export.format import tags
from htp_export.format.bounds import number_in
from htp_export.format.model_metadata import read_contamination, write_model_metadata
from htp_export.format.signatures import renamed_signatures
from htp_export.model.neighbours import dependencies_first
from htp_export.model.recipes import recipe_of, recorded
from htp_export.model.regions import all_values
from htp_export.model.tagged import TaggedModel
from htp_export.shapes.operator_kinds import subgraphs


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
        graphs = list(_wholes(model))
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
    for graph in _wholes(model):
        found.update((value, value.name) for value in all_values(graph))
        found.update((node, node.name) for node in graph.all_nodes())
    return found


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
    for graph in _wholes(model):
        _Separation(graph, before).run()


class _Separation:
    """The tensors and nodes of a graph with its subgraphs, and the subset that keeps its names."""

    def __init__(self, graph: ir.Graph, before: Mapping[ir.Value | ir.Node, str | None]) -> None:
        self._graph, self._before = graph, before
        self._fixed = frozenset((*graph.inputs, *graph.outputs))
        self._nodes = list(graph.all_nodes())

    def run(self) -> None:
        """Rename tensors and nodes with the name of another one."""
        kept = {value.name for value in all_values(self._graph) if self._keeps(value)}
        if shared := list(self._shared(self._graph, set(), kept)):
            names = UsedNames(value.name for value in all_values(self._graph) if value.name)
            for value in shared:
                rename(value, names.unused(str(value.name)))
        self._separate_nodes()

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
        kept = {node.name for node in self._nodes if self._keeps(node)}
        names: UsedNames | None = None
        for node in self._nodes:
            if not node.name or self._keeps(node):
                continue
            if node.name in kept:
                names = names or UsedNames(each.name for each in self._nodes if each.name)
                node.name = names.unused(node.name)
            kept.add(node.name)


def _wholes(model: ir.Model) -> Iterator[ir.Graph]:
    """The main graph and the bodies of functions."""
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
    """Rename the nodes and tensors of a model, in place and in its metadata; then `refresh` it.

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
    _rename_in_metadata(tagged, tensors)
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
        for graph in _wholes(model):
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
    graphs = [graph for whole in _wholes(model) for graph in (whole, *whole.subgraphs())]
    stored = {graph: list(graph.initializers.values()) for graph in graphs}
    for graph in stored:
        for name in list(graph.initializers):  # clear() takes time by the square of their number
            del graph.initializers[name]
    for value, name in names.items():
        rename(value, name)
    for graph, initializers in stored.items():
        for value in initializers:
            graph.initializers.add(value)


def _rename_in_metadata(tagged: TaggedModel, renamed: Mapping[str, str]) -> None:
    """Rename tensors in signatures, contamination and quantization metadata.

    Tensors without a new name are not in the graph any more.
    """
    props = tagged.model.metadata_props
    signatures = renamed_signatures(tagged.signatures, renamed.get)
    contamination = sorted(
        (path, renamed[tensor], leaves)
        for path, tensor, leaves in read_contamination(props)
        if tensor in renamed
    )
    props.pop(tags.CONTAMINATION, None)
    write_model_metadata(
        props, tagged.hierarchy, signatures=signatures, contamination=contamination
    )
    for value in all_values(tagged.model.graph):
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
