"""A PyTorch model in Dynamo's graphs: one graph of all of them, connected where they give tensors to each other."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import onnx_ir as ir
from onnx_ir.tensor_adapters import TorchTensor

from htp_export.capabilities.inspect.inspected import Inspected, Stop, is_of_model, reason_of
from htp_export.capabilities.inspect.merging import Piece, merged
from htp_export.capabilities.inspect.runs import (
    ModuleRun,
    owners_in,
    run_once,
    tag_by_scope,
    tree_of,
    unchanged,
    without_identities,
)
from htp_export.exporter.broken_graphs import BrokenRun, GraphBreak, GraphRun, run_with_breaks
from htp_export.exporter.capture.modules import ModuleNames
from htp_export.exporter.capture.torch_internals import scopes_of
from htp_export.exporter.torch_programs import LoweredGraph, lowered_graph
from htp_export.format import tags
from htp_export.format.parameters import parameters_of

if TYPE_CHECKING:
    import torch

_MOST_NODES = 20_000  # further runs of graphs are left out


def graphs_with_breaks(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inspected:
    """Make one graph of all graphs into which Dynamo breaks a model; a RuntimeError if there is none.

    A graph that runs several times is in it several times. The graphs are named ``graph_1``, ``graph_2`` and so on, the
    largest first.
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
        self._weights = {id(tensor): (name, TorchTensor(tensor.detach(), name=name)) for name, tensor in tensors}
        self._lowered: dict[Hashable, LoweredGraph | str] = {}
        self._notes: list[str] = []
        self._identities: set[str] = set()  # modules that gave back their input, as far as is known

    def inspected(self, run: ModuleRun) -> Inspected:
        parts = list(self._parts())
        if not any(part.nodes for part in parts):
            raise RuntimeError("Dynamo makes no graph of this model: nothing that it can trace is computed in between")
        owners = {owner for part in parts for owner in owners_in(part.model.graph)}
        tree = tree_of(self._model, run, owners, self._identities)
        pieces, parameters = list(self._pieces(parts)), parameters_of(self._model)
        graph = merged(pieces, tree, parameters)
        alone: dict[Hashable, Piece] = {}
        for part, piece in zip(parts, pieces, strict=True):
            alone.setdefault((id(part.run.graph), part.run.path), replace(piece, inputs={}))
        graphs = {piece.name: merged([piece], tree, parameters) for piece in sorted(alone.values(), key=_rank)}
        stops = map(_stop, self._broken.breaks)
        # Dynamo breaks the graph of a module where that of a module inside breaks: the last one names the innermost.
        breaks = tuple({(stop.file, stop.line) if stop.file else stop: stop for stop in stops}.values())
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
                self._notes.append(f"{left} further runs of graphs are left out: there are {nodes:,} nodes before.")
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
                self._notes.append(f"A graph in module {run.path or '(the root)'} is left out: {reason_of(error)}.")
        lowered = self._lowered[key]
        return lowered if isinstance(lowered, LoweredGraph) else None

    def _tag(self, node: ir.Node, run: GraphRun) -> None:
        """Write the module of a node: that of its scopes, or the one whose ``forward`` the graph is of."""
        scopes = scopes_of(node.meta["node"]) if "node" in node.meta else []
        paths = [self._names.by_id[scope.module] for scope in scopes if scope.module in self._names.by_id]
        path = paths[-1] if paths else run.traced_in
        if run.path != run.traced_in and tags.is_under(path, run.traced_in):  # an equal module runs the same graph
            path = tags.below(run.path, path[len(run.traced_in) :].removeprefix("."))
        tag_by_scope(node, path)

    def _pieces(self, parts: list[_Part]) -> Iterator[Piece]:
        ranks = {place: rank for rank, place in enumerate(sorted(range(len(parts)), key=lambda k: -parts[k].nodes), 1)}
        made: dict[int, tuple[int, str]] = {}  # id of a tensor → the piece that made it, and its name there
        for place, part in enumerate(parts):
            given = [
                (name, id(value)) for name, value in zip(part.lowered.inputs, part.run.inputs, strict=False) if name
            ]
            inputs = {name: made[number] for name, number in given if number in made}
            weights = {name: self._weights[number] for name, number in given if number in self._weights}
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
