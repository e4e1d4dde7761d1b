"""A PyTorch model in Dynamo's graphs, merged into one graph that connects them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from onnx_ir.tensor_adapters import TorchTensor

from htp_export.capabilities.inspect.inspected import GraphPart, Inspected, Stop
from htp_export.capabilities.inspect.runs import (
    ModuleRun,
    edit_by_scopes,
    owners_in,
    run_once,
    tree_of,
    without_identities,
)
from htp_export.editing.edit import Edit
from htp_export.exporter.broken_graphs import BrokenRun, GraphBreak, GraphRun, run_with_breaks
from htp_export.exporter.capture.model_state import unchanged
from htp_export.exporter.capture.modules import ModuleNames
from htp_export.exporter.capture.torch_internals import scopes_of
from htp_export.exporter.failures import reason_of
from htp_export.exporter.model_lines import is_of_model
from htp_export.exporter.torch_programs import LoweredGraph, lowered_graph
from htp_export.format import tags
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.format.parameters import ModuleParameters, parameters_of
from htp_export.lineage.tagging import Owned
from htp_export.model.tagged import TaggedModel
from htp_export.shapes.operator_kinds import subgraphs

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Piece:
    """One tagged graph that becomes a part of the whole; it is not modified."""

    model: ir.Model
    name: str  # prefix of the names of its nodes and tensors in the whole
    prefix: str = ""  # prefix of its module paths
    # name of an input → the piece before it that computes the tensor, and the tensor's name there
    inputs: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    # name of an input → full name and values of the parameter or buffer
    weights: Mapping[str, tuple[str, ir.TensorProtocol]] = field(default_factory=dict)


def merged(
    pieces: Sequence[Piece],
    hierarchy: Hierarchy,
    parameters: Mapping[str, ModuleParameters] | None = None,
) -> ir.Model:
    """Merge graphs into one; results of one that are inputs of another are connected.

    Nodes keep their owners, but not their calls, because each graph counts calls for itself. The
    graphs are in the order in which they run; ``hierarchy`` is the module tree of the whole, with
    the calls.
    """
    return _Whole(pieces, hierarchy).model(parameters)


class _Whole:
    def __init__(self, pieces: Sequence[Piece], hierarchy: Hierarchy) -> None:
        self._modules = dict(hierarchy)
        self._hierarchy = hierarchy
        self._owners: dict[ir.Node, Owned] = {}
        self._nodes: list[ir.Node] = []
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._initializers: dict[str, ir.Value] = {}
        self._opsets: dict[str, int] = {}
        # for each piece: name of a tensor in it → the tensor
        self._tensors: list[dict[str, ir.Value]] = []
        for piece in pieces:
            self._add(piece)

    def _add(self, piece: Piece) -> None:
        copy = piece.model.clone()
        graph = copy.graph
        self._opsets = {**graph.opset_imports, **self._opsets}
        nodes = list(graph)
        inputs = list(graph.inputs)
        outputs = list(graph.outputs)
        initializers = dict(graph.initializers)
        tensors: dict[str, ir.Value] = {}
        for node in nodes:
            tensors.update((str(value.name), value) for value in node.outputs if value.name)
        self._tensors.append(tensors)
        for node in graph.all_nodes():
            self._rename(node, piece)
        graph.outputs.clear()
        graph.inputs.clear()
        graph.initializers.clear()
        graph.remove(nodes)
        for value in inputs:
            self._connect(value, piece)
        for name, value in initializers.items():
            self._add_weight(tags.below(piece.prefix, name), value)
        self._nodes += nodes
        self._outputs += [value for value in outputs if value.producer() is not None]
        self._add_fates(copy, piece.prefix)

    def _connect(self, value: ir.Value, piece: Piece) -> None:
        """Replace an input of a piece by a weight or a result of an earlier piece, if it is one."""
        name = str(value.name)
        if name in piece.weights:
            full_name, value.const_value = piece.weights[name]
            self._add_weight(full_name, value)
            return
        source = piece.inputs.get(name)
        result = None if source is None else self._tensors[source[0]].get(source[1])
        if result is not None:
            value.replace_all_uses_with(result)
            return
        value.name = f"{piece.name}/{value.name}"
        self._inputs.append(value)

    def _add_weight(self, name: str, value: ir.Value) -> None:
        """Add a weight, or replace it by the equal one of an earlier piece."""
        existing = self._initializers.get(name)
        if existing is not None:
            value.replace_all_uses_with(existing)
            return
        value.name = name
        self._initializers[name] = value

    def _rename(self, node: ir.Node, piece: Piece) -> None:
        """Add the prefixes of a piece to the names of a node and its tensors, and to its owners."""
        node.name = f"{piece.name}/{node.name}"
        values = list(node.outputs)
        for body in subgraphs(node):
            values += body.inputs
        for value in values:
            if value.name:
                value.name = f"{piece.name}/{value.name}"
        owned = Owned.of(node.metadata_props)
        paths = tuple(tags.below(piece.prefix, path) for path in owned.paths)
        self._owners[node] = Owned(paths, owned.reason)

    def _add_fates(self, model: ir.Model, prefix: str) -> None:
        """Copy the fates of the modules of a part."""
        if not prefix or tags.MODULES not in model.metadata_props:
            return
        for path, info in Hierarchy.from_json(model.metadata_props[tags.MODULES]).items():
            full_path = tags.below(prefix, path)
            partners = tuple(tags.below(prefix, partner) for partner in info.fused_with)
            new_module = ModuleInfo(full_path, info.class_name, info.calls)
            module = self._modules.get(full_path, new_module)
            self._modules[full_path] = replace(module, fate=info.fate, fused_with=partners)

    def model(self, parameters: Mapping[str, ModuleParameters] | None) -> ir.Model:
        graph = ir.Graph(
            self._inputs,
            list(dict.fromkeys(self._outputs)),
            nodes=self._nodes,
            initializers=list(self._initializers.values()),
            opset_imports=self._opsets,
        )
        model = ir.Model(graph, ir_version=10, producer_name="torch")
        with Edit(TaggedModel(model, self._hierarchy)) as edit:
            for node, owned in self._owners.items():
                edit.set_owners(node, owned)
            edit.set_modules(Hierarchy(self._modules.values()))
            if parameters is not None:
                edit.set_parameters(parameters)
        graph.name = self._modules[""].simple_class
        return model


_MOST_NODES = 20_000  # further runs of graphs are omitted; a larger graph cannot be read


def graphs_with_breaks(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Inspected:
    """Merge all graphs into which Dynamo breaks a model; a RuntimeError without any.

    A graph that runs several times is repeated. The graphs are named ``graph_1``, ``graph_2`` and
    so on, the largest first.
    """
    names = ModuleNames(model)
    with unchanged(model, (args, kwargs)):
        broken = run_with_breaks(model, args, kwargs, names.by_id)
    run = run_once(model, args, kwargs)
    if run.error is not None:
        raise run.error
    return _Graphs(model, names, broken).inspected(run)


@dataclass(frozen=True)
class _Part:
    """One run of a graph, lowered and tagged."""

    run: GraphRun
    lowered: LoweredGraph
    model: ir.Model
    nodes: int


class _Graphs:
    def __init__(
        self,
        model: torch.nn.Module,
        names: ModuleNames,
        broken: BrokenRun,
    ) -> None:
        self._model = model
        self._tree = Hierarchy.from_module(model)
        self._names = names
        self._broken = broken
        tensors = (*model.named_parameters(), *model.named_buffers())
        self._weights = {
            id(tensor): (name, TorchTensor(tensor.detach(), name=name)) for name, tensor in tensors
        }
        self._lowered: dict[Hashable, LoweredGraph | None] = {}
        self._notes: list[str] = []
        self._identities: set[str] = set()  # modules known to return their input

    def inspected(self, run: ModuleRun) -> Inspected:
        parts = list(self._parts())
        if not any(part.nodes for part in parts):
            raise RuntimeError(
                "Dynamo makes no graph of this model: nothing that it can trace is computed in between"
            )
        owners = {owner for part in parts for owner in owners_in(part.model.graph)}
        tree = tree_of(self._model, run, owners, self._identities)
        pieces = list(self._pieces(parts))
        parameters = parameters_of(self._model)
        graph = merged(pieces, tree, parameters)
        distinct: dict[Hashable, Piece] = {}
        for part, piece in zip(parts, pieces, strict=True):
            graph_in_module = (id(part.run.graph), part.run.path)
            distinct.setdefault(graph_in_module, replace(piece, inputs={}))
        graphs = {
            piece.name: merged([piece], tree, parameters)
            for piece in sorted(distinct.values(), key=_rank)
        }
        # Dynamo breaks the graph of a module if the graph of an inner module breaks: the last stop
        # at a line names the innermost module.
        breaks: dict[Hashable, Stop] = {}
        for graph_break in self._broken.breaks:
            stop = _stop(graph_break)
            breaks[(stop.file, stop.line) if stop.file else stop] = stop
        note = f"Dynamo made {len(parts)} graphs of this model; what Python computes between them is in none."
        return Inspected(
            graph,
            "dynamo",
            breaks=tuple(breaks.values()),
            graphs=graphs,
            parts=_shares(parts, distinct),
            notes=(note, *self._notes),
        )

    def _parts(self) -> Iterator[_Part]:
        nodes = 0
        for place, run in enumerate(self._broken.runs):
            lowered = self._lower(run)
            if lowered is None:
                continue
            if nodes > _MOST_NODES:
                left = len(self._broken.runs) - place
                self._notes.append(
                    f"{left} further runs of graphs are left out: there are {nodes:,} nodes before."
                )
                return
            model = lowered.model.clone()
            path_of = functools.partial(self._path_of, run)
            edit_by_scopes(model, self._tree, path_of).finish()
            self._identities |= without_identities(model.graph)
            count = sum(1 for _ in model.graph.all_nodes())
            nodes += count
            if count:
                yield _Part(run, lowered, model, count)

    def _lower(self, run: GraphRun) -> LoweredGraph | None:
        """The graph in torch's operators; None, with a note, if that fails."""
        key = (id(run.graph), *(_kind(value) for value in run.inputs))
        if key not in self._lowered:
            try:
                self._lowered[key] = lowered_graph(run.graph, run.inputs)
            except Exception as error:  # any error of torch
                self._lowered[key] = None
                self._notes.append(
                    f"A graph in module {run.path or '(the root)'} is left out: {reason_of(error)}."
                )
        return self._lowered[key]

    def _path_of(self, run: GraphRun, node: ir.Node) -> str:
        """The module of a node: of its scopes, or the one whose ``forward`` was traced."""
        scopes = scopes_of(node.meta["node"]) if "node" in node.meta else []
        paths = [
            self._names.by_id[scope.module] for scope in scopes if scope.module in self._names.by_id
        ]
        path = paths[-1] if paths else run.traced_in
        # an equal module runs the same graph
        if run.path != run.traced_in and tags.is_under(path, run.traced_in):
            return tags.below(run.path, path[len(run.traced_in) :].removeprefix("."))
        return path

    def _pieces(self, parts: list[_Part]) -> Iterator[Piece]:
        by_size = sorted(range(len(parts)), key=lambda place: -parts[place].nodes)
        ranks = {place: rank for rank, place in enumerate(by_size, 1)}
        # id of a tensor → the piece that computed it, and its name there
        results: dict[int, tuple[int, str]] = {}
        for place, part in enumerate(parts):
            inputs: dict[str, tuple[int, str]] = {}
            weights: dict[str, tuple[str, ir.TensorProtocol]] = {}
            for name, value in zip(part.lowered.inputs, part.run.inputs, strict=False):
                if name and id(value) in results:
                    inputs[name] = results[id(value)]
                if name and id(value) in self._weights:
                    weights[name] = self._weights[id(value)]
            yield Piece(part.model, f"graph_{ranks[place]}", "", inputs, weights)
            for name, value in zip(part.lowered.outputs, part.run.outputs, strict=False):
                if name:
                    results.setdefault(id(value), (place, name))


def _shares(parts: Sequence[_Part], pieces: Mapping[Hashable, Piece]) -> tuple[GraphPart, ...]:
    """Nodes and runs of each graph, the one with the most nodes in all its runs first."""
    runs = Counter((id(part.run.graph), part.run.path) for part in parts)
    total = sum(part.nodes for part in parts)
    shares: dict[Hashable, GraphPart] = {}
    for part in parts:
        key = (id(part.run.graph), part.run.path)
        share = part.nodes * runs[key] / total
        found = GraphPart(pieces[key].name, part.run.path, part.nodes, runs[key], share)
        shares.setdefault(key, found)
    return tuple(sorted(shares.values(), key=lambda part: (-part.share, part.name)))


def _rank(piece: Piece) -> int:
    return int(piece.name.rpartition("_")[2])


def _kind(value: Any) -> Hashable:
    """The properties of an input that determine the graph: of a tensor, type and shape."""
    import torch

    if isinstance(value, torch.Tensor):
        return (value.dtype, tuple(value.shape))
    return repr(value)


def _stop(graph_break: GraphBreak) -> Stop:
    file = ""
    line = 0
    for frame_file, frame_line in reversed(graph_break.frames):
        if is_of_model(frame_file):
            file = frame_file
            line = frame_line
            break
    return Stop("dynamo", graph_break.reason, graph_break.module, file, line)
