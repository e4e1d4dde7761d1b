"""Which execution provider has which node of a model, as ONNX Runtime says it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from htp_export.errors import OnnxRuntimeError
from htp_export.runtime.sessions import (
    RECORDED,
    Assigned,
    OptionChanges,
    RunnableModel,
    SessionSettings,
)
from htp_export.runtime.traces import session_and_graph

HOST = "CPUExecutionProvider"

_COPIES = frozenset(("MemcpyFromHost", "MemcpyToHost"))


@dataclass(frozen=True)
class Assignment:
    """Where the nodes of a model run; ``assigned`` are they as ONNX Runtime lists them.

    ``graph`` was divided among the providers: after the optimisations that suit all of them, and
    before those of each; it has no values of weights. ``provider_of`` has its nodes, in subgraphs
    too, of which the provider is known. ``copied`` names the tensors that ONNX Runtime copies
    between memories; None if it does not say.
    """

    providers: tuple[str, ...]
    assigned: tuple[Assigned, ...]
    graph: ir.Model
    provider_of: Mapping[ir.Node, str]
    copied: frozenset[str] | None


def assign(
    model: RunnableModel,
    settings: SessionSettings,
    folder: Path,
    entries: Mapping[str, str] | None = None,
) -> Assignment:
    """Let ONNX Runtime load a model, whose nodes have names of their own, and return what it gave to each provider.

    ONNX Runtime writes into ``folder``; ``entries`` are further configuration entries. An
    InputError if this ONNX Runtime does not say which provider has a node.
    """
    changes = OptionChanges(entries={**RECORDED, **(entries or {})})
    session, final = session_and_graph(model, settings, folder, changes)
    assigned = session.assignments()
    graph = _divided_graph(model, settings, folder, changes)
    _remove_copies(graph)
    return Assignment(
        session.providers,
        tuple(assigned),
        graph,
        _matched(assigned, graph),
        None if final is None else frozenset(_remove_copies(final)),
    )


def _divided_graph(
    model: RunnableModel, settings: SessionSettings, folder: Path, changes: OptionChanges
) -> ir.Model:
    """The graph that ONNX Runtime divides: that of a session without the optimisations after it.

    A provider that compiles its nodes lets ONNX Runtime write no graph. What comes before does not
    depend on it.
    """
    import onnxruntime

    levels = onnxruntime.GraphOptimizationLevel
    wanted = (
        levels.ORT_ENABLE_ALL
        if settings.options is None
        else settings.options.graph_optimization_level
    )
    level = min(wanted, levels.ORT_ENABLE_BASIC, key=lambda level: int(level.value))
    changes = replace(changes, attributes={**changes.attributes, "graph_optimization_level": level})
    _, graph = session_and_graph(model, settings, folder, changes)
    if graph is None:
        alone = SessionSettings((HOST,), settings.options if settings.providers else None)
        session, graph = session_and_graph(model, alone, folder, changes)
        if graph is None:
            raise OnnxRuntimeError(
                session.model.name, "load", "it cannot write the graph that it runs"
            )
    return graph


def _remove_copies(model: ir.Model) -> set[str]:
    """Remove the nodes that copy tensors between memories; returns the names of these tensors."""
    names: set[str] = set()
    for node in [node for node in model.graph.all_nodes() if node.op_type in _COPIES]:
        [source], [result] = node.inputs, node.outputs
        if source is None or node.graph is None:
            continue
        # the other one has a made-up name
        kept = result.name if node.op_type == "MemcpyToHost" else source.name
        names.add(kept or "")
        result.replace_all_uses_with(source, replace_graph_outputs=True)
        node.graph.remove(node, safe=True)
        source.name = kept
    return names


def _matched(assigned: list[Assigned], model: ir.Model) -> dict[ir.Node, str]:
    """Node → its provider. Nodes that ONNX Runtime inserts afterwards run where their input is computed."""
    named: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for entry in reversed(assigned):
        named[entry.name, entry.op_type].append(entry.provider)
    providers: dict[ir.Node, str] = {}
    for node in model.graph.all_nodes():
        listed = named.get((node.name or "", node.op_type))
        if listed:
            providers[node] = listed.pop() if len(listed) > 1 else listed[0]
            continue
        makers = (value.producer() for value in node.inputs if value is not None)
        known = next(
            (providers[maker] for maker in makers if maker is not None and maker in providers), None
        )
        if known is not None and node.op_type != "Constant":
            providers[node] = known
    return providers
