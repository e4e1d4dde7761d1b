"""A PyTorch model in Dynamo's graphs: one graph of all of them, connected where they give tensors to each other."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from onnx_ir.tensor_adapters import TorchTensor

from htp_export.capabilities.inspect.inspected import Inspected, Stop, is_of_model, reason_of
from htp_export.capabilities.inspect.runs import (
    ModuleRun,
    owners_in,
    run_once,
    tag_by_scope,
    tree_of,
    without_identities,
)
from htp_export.exporter.broken_graphs import BrokenRun, GraphBreak, GraphRun, run_with_breaks
from htp_export.exporter.capture.model_state import unchanged
from htp_export.exporter.capture.modules import ModuleNames
from htp_export.exporter.capture.torch_internals import scopes_of
from htp_export.exporter.torch_programs import LoweredGraph, lowered_graph
from htp_export.format import tags
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.format.model_metadata import write_model_metadata
from htp_export.format.parameters import ModuleParameters, parameters_of
from htp_export.lineage.owner_rule import Owned
from htp_export.shapes.operator_kinds import subgraphs

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Piece:
    """One of the graphs, with tags; it is not changed. Names of its nodes and tensors begin with ``name`` in the whole.

    Its module paths are below ``prefix``. ``inputs``: name of one of its inputs → the piece before
    it that computes the tensor, and the tensor's name there. ``weights``: name of one of its inputs
    → the full name of the parameter or buffer that it is, and its values.
    """

    model: ir.Model
    name: str
    prefix: str = ""
    inputs: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    weights: Mapping[str, tuple[str, ir.TensorProtocol]] = field(default_factory=dict)


def merged(
    pieces: Sequence[Piece],
    hierarchy: Hierarchy,
    parameters: Mapping[str, ModuleParameters] | None = None,
) -> ir.Model:
    """Put graphs side by side into one, and connect them where the result of one is an input of another.

    Nodes keep their owners. In which call of a module they ran is left out, as each graph counts
    calls for itself. The graphs come in the order in which they run; ``hierarchy`` is the module
    tree of the whole, with the calls.
    """
    return _Whole(pieces, hierarchy).model(parameters)


class _Whole:
    def __init__(self, pieces: Sequence[Piece], hierarchy: Hierarchy) -> None:
        self._known = dict(hierarchy)
        self._called = hierarchy.called
        self._nodes: list[ir.Node] = []
        self._inputs: list[ir.Value] = []
        self._outputs: list[ir.Value] = []
        self._initializers: dict[str, ir.Value] = {}
        self._opsets: dict[str, int] = {}
        # for each piece: name of a tensor in it → the tensor
        self._made: list[dict[str, ir.Value]] = []
        for piece in pieces:
            self._add(piece)

    def _add(self, piece: Piece) -> None:
        copy = piece.model.clone()
        graph = copy.graph
        self._opsets = {**graph.opset_imports, **self._opsets}
        nodes, inputs, outputs = list(graph), list(graph.inputs), list(graph.outputs)
        initializers = dict(graph.initializers)
        self._made.append(
            {str(value.name): value for node in nodes for value in node.outputs if value.name}
        )
        for node in graph.all_nodes():
            self._own(node, piece)
        graph.outputs.clear()
        graph.inputs.clear()
        graph.initializers.clear()
        graph.remove(nodes)
        for value in inputs:
            self._take(value, piece)
        for name, value in initializers.items():
            self._hold(tags.below(piece.prefix, name), value)
        self._nodes += nodes
        self._outputs += [value for value in outputs if value.producer() is not None]
        self._know(copy, piece.prefix)

    def _take(self, value: ir.Value, piece: Piece) -> None:
        """An input of a piece: what a piece before it computed, a weight, or an input of the whole."""
        if str(value.name) in piece.weights:
            full, value.const_value = piece.weights[str(value.name)]
            self._hold(full, value)
            return
        source = piece.inputs.get(str(value.name))
        made = None if source is None else self._made[source[0]].get(source[1])
        if made is not None:
            value.replace_all_uses_with(made)
            return
        value.name = f"{piece.name}/{value.name}"
        self._inputs.append(value)

    def _hold(self, name: str, value: ir.Value) -> None:
        """A weight; pieces that read the same one share it."""
        held = self._initializers.get(name)
        if held is not None:
            value.replace_all_uses_with(held)
            return
        value.name = name
        self._initializers[name] = value

    def _own(self, node: ir.Node, piece: Piece) -> None:
        node.name = f"{piece.name}/{node.name}"
        for value in (*node.outputs, *(value for body in subgraphs(node) for value in body.inputs)):
            if value.name:
                value.name = f"{piece.name}/{value.name}"
        owned = Owned.of(node.metadata_props)
        paths = tuple(tags.below(piece.prefix, path) for path in owned.paths)
        Owned(paths, owned.reason).write(node.metadata_props, self._called)

    def _know(self, model: ir.Model, prefix: str) -> None:
        """What became of the modules of a part."""
        if not prefix or tags.MODULES not in model.metadata_props:
            return
        for path, info in Hierarchy.from_json(model.metadata_props[tags.MODULES]).items():
            full = tags.below(prefix, path)
            partners = tuple(tags.below(prefix, partner) for partner in info.fused_with)
            before = self._known.get(full, ModuleInfo(full, info.class_name, info.calls))
            self._known[full] = replace(before, fate=info.fate, fused_with=partners)

    def model(self, parameters: Mapping[str, ModuleParameters] | None) -> ir.Model:
        graph = ir.Graph(
            self._inputs,
            list(dict.fromkeys(self._outputs)),
            nodes=self._nodes,
            initializers=list(self._initializers.values()),
            opset_imports=self._opsets,
        )
        model = ir.Model(graph, ir_version=10, producer_name="torch")
        write_model_metadata(
            model.metadata_props, Hierarchy(self._known.values()), parameters=parameters
        )
        graph.name = self._known[""].simple_class
        return model


_MOST_NODES = 20_000  # further runs of graphs are left out


def graphs_with_breaks(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Inspected:
    """Make one graph of all graphs into which Dynamo breaks a model; a RuntimeError if there is none.

    A graph that runs several times is in it several times. The graphs are named ``graph_1``,
    ``graph_2`` and so on, the largest first.
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
    def __init__(self, model: torch.nn.Module, names: ModuleNames, broken: BrokenRun) -> None:
        self._model, self._names, self._broken = model, names, broken
        tensors = (*model.named_parameters(), *model.named_buffers())
        self._weights = {
            id(tensor): (name, TorchTensor(tensor.detach(), name=name)) for name, tensor in tensors
        }
        self._lowered: dict[Hashable, LoweredGraph | str] = {}
        self._notes: list[str] = []
        self._identities: set[str] = set()  # modules that gave back their input, as far as is known

    def inspected(self, run: ModuleRun) -> Inspected:
        parts = list(self._parts())
        if not any(part.nodes for part in parts):
            raise RuntimeError(
                "Dynamo makes no graph of this model: nothing that it can trace is computed in between"
            )
        owners = {owner for part in parts for owner in owners_in(part.model.graph)}
        tree = tree_of(self._model, run, owners, self._identities)
        pieces, parameters = list(self._pieces(parts)), parameters_of(self._model)
        graph = merged(pieces, tree, parameters)
        alone: dict[Hashable, Piece] = {}
        for part, piece in zip(parts, pieces, strict=True):
            alone.setdefault((id(part.run.graph), part.run.path), replace(piece, inputs={}))
        graphs = {
            piece.name: merged([piece], tree, parameters)
            for piece in sorted(alone.values(), key=_rank)
        }
        stops = map(_stop, self._broken.breaks)
        # Dynamo breaks the graph of a module where that of a module inside breaks: the last one
        # names the innermost.
        breaks = tuple(
            {(stop.file, stop.line) if stop.file else stop: stop for stop in stops}.values()
        )
        note = f"Dynamo made {len(parts)} graphs of this model; what Python computes between them is in none."
        return Inspected(graph, "dynamo", breaks=breaks, graphs=graphs, notes=(note, *self._notes))

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
            for node in model.graph.all_nodes():
                self._tag(node, run)
            self._identities |= without_identities(model.graph)
            count = sum(1 for _ in model.graph.all_nodes())
            nodes += count
            if count:
                yield _Part(run, lowered, model, count)

    def _lower(self, run: GraphRun) -> LoweredGraph | None:
        """The graph in torch's operators; None if that fails, which is noted."""
        key = (id(run.graph), *(_kind(each) for each in run.inputs))
        if key not in self._lowered:
            try:
                self._lowered[key] = lowered_graph(run.graph, run.inputs)
            except Exception as error:  # whatever torch raises
                self._lowered[key] = reason_of(error)
                self._notes.append(
                    f"A graph in module {run.path or '(the root)'} is left out: {reason_of(error)}."
                )
        lowered = self._lowered[key]
        return lowered if isinstance(lowered, LoweredGraph) else None

    def _tag(self, node: ir.Node, run: GraphRun) -> None:
        """Write the module of a node: that of its scopes, or the one whose ``forward`` the graph is of."""
        scopes = scopes_of(node.meta["node"]) if "node" in node.meta else []
        paths = [
            self._names.by_id[scope.module] for scope in scopes if scope.module in self._names.by_id
        ]
        path = paths[-1] if paths else run.traced_in
        # an equal module runs the same graph
        if run.path != run.traced_in and tags.is_under(path, run.traced_in):
            path = tags.below(run.path, path[len(run.traced_in) :].removeprefix("."))
        tag_by_scope(node, path)

    def _pieces(self, parts: list[_Part]) -> Iterator[Piece]:
        ranks = {
            place: rank
            for rank, place in enumerate(
                sorted(range(len(parts)), key=lambda k: -parts[k].nodes), 1
            )
        }
        # id of a tensor → the piece that made it, and its name there
        made: dict[int, tuple[int, str]] = {}
        for place, part in enumerate(parts):
            given = [
                (name, id(value))
                for name, value in zip(part.lowered.inputs, part.run.inputs, strict=False)
                if name
            ]
            inputs = {name: made[number] for name, number in given if number in made}
            weights = {
                name: self._weights[number] for name, number in given if number in self._weights
            }
            yield Piece(part.model, f"graph_{ranks[place]}", "", inputs, weights)
            for name, value in zip(part.lowered.outputs, part.run.outputs, strict=False):
                if name:
                    made.setdefault(id(value), (place, name))


def _rank(piece: Piece) -> int:
    return int(piece.name.rpartition("_")[2])


def _kind(value: Any) -> Hashable:
    """What decides the graph of an input: for a tensor, its type and shape."""
    import torch

    return (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else repr(value)


def _stop(found: GraphBreak) -> Stop:
    place = next((each for each in reversed(found.frames) if is_of_model(each[0])), ("", 0))
    return Stop("dynamo", found.reason, found.module, *place)
