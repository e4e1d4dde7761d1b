"""The execution provider that ONNX Runtime assigns to each node of a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from htp_export.errors import OnnxRuntimeError
from htp_export.extras import required
from htp_export.runtime.sessions import (
    RECORDED,
    Assigned,
    OptionChanges,
    RunnableModel,
)
from htp_export.runtime.settings import HOST, RunSettings
from htp_export.runtime.traces import session_and_graph

_COPIES = frozenset(("MemcpyFromHost", "MemcpyToHost"))


@dataclass(frozen=True)
class Assignment:
    """The assignment of the nodes of a model to execution providers; ``assigned`` is ONNX Runtime's list.

    ``graph`` is the graph that is partitioned among the providers: after the optimisations for all
    providers, and before those of each; it has no values of weights. ``provider_of`` maps its
    nodes, including those of subgraphs, to their providers, if these are known. ``copied`` are the
    names of the tensors that are copied between memories; None if they are unknown.
    """

    providers: tuple[str, ...]
    assigned: tuple[Assigned, ...]
    graph: ir.Model
    provider_of: Mapping[ir.Node, str]
    copied: frozenset[str] | None


def assign(
    model: RunnableModel,
    settings: RunSettings,
    folder: Path,
    entries: Mapping[str, str] | None = None,
) -> Assignment:
    """Load a model with ONNX Runtime, and return the assignment of its nodes, whose names must be unique.

    ONNX Runtime writes files into ``folder``; ``entries`` are further configuration entries. An
    InputError if this version of ONNX Runtime does not report the assignment.
    """
    changes = OptionChanges(entries={**RECORDED, **(entries or {})})
    session, final = session_and_graph(model, settings, folder, changes)
    assigned = session.assignments()
    graph = _divided_graph(model, settings, folder, changes)
    _remove_copies(graph)
    provider_of = _matched(assigned, graph)
    copied = None if final is None else frozenset(_remove_copies(final))
    return Assignment(session.providers, tuple(assigned), graph, provider_of, copied)


def _divided_graph(
    model: RunnableModel, settings: RunSettings, folder: Path, changes: OptionChanges
) -> ir.Model:
    """Return the graph that ONNX Runtime partitions: that of a session without the later optimisations.

    ONNX Runtime cannot write the graph if a provider compiles its nodes. The earlier optimisations
    are independent of the provider: then the graph of a session on the CPU is returned.
    """
    onnxruntime = required("onnxruntime")

    levels = onnxruntime.GraphOptimizationLevel
    level = levels.ORT_ENABLE_ALL
    if settings.session_options is not None:
        level = settings.session_options.graph_optimization_level
    level = min(level, levels.ORT_ENABLE_BASIC, key=lambda level: int(level.value))
    changes = replace(changes, attributes={**changes.attributes, "graph_optimization_level": level})
    _, graph = session_and_graph(model, settings, folder, changes)
    if graph is None:
        on_cpu = replace(
            settings,
            providers=(HOST,),
            session_options=settings.session_options if settings.providers else None,
        )
        session, graph = session_and_graph(model, on_cpu, folder, changes)
        if graph is None:
            raise OnnxRuntimeError(session.model.name, "load", "it cannot write its graph")
    return graph


def _remove_copies(model: ir.Model) -> set[str]:
    """Remove the nodes that copy tensors between memories, and return the names of these tensors."""
    names: set[str] = set()
    for node in [node for node in model.graph.all_nodes() if node.op_type in _COPIES]:
        [source], [result] = node.inputs, node.outputs
        if source is None or node.graph is None:
            continue
        # ONNX Runtime generated the name of the other value
        name = result.name if node.op_type == "MemcpyToHost" else source.name
        names.add(name or "")
        result.replace_all_uses_with(source, replace_graph_outputs=True)
        node.graph.remove(node, safe=True)
        source.name = name
    return names


def _matched(assigned: list[Assigned], model: ir.Model) -> dict[ir.Node, str]:
    """Return node → its provider; a node that was inserted later runs where its first known input is computed."""
    providers_of_name: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for entry in reversed(assigned):
        providers_of_name[entry.name, entry.op_type].append(entry.provider)
    providers: dict[ir.Node, str] = {}
    for node in model.graph.all_nodes():
        remaining = providers_of_name.get((node.name or "", node.op_type))
        if remaining:
            # several nodes may have the same name: they are listed in order
            providers[node] = remaining.pop() if len(remaining) > 1 else remaining[0]
        elif node.op_type != "Constant":
            inherited = _provider_of_inputs(node, providers)
            if inherited is not None:
                providers[node] = inherited
    return providers


def _provider_of_inputs(node: ir.Node, providers: Mapping[ir.Node, str]) -> str | None:
    for value in node.inputs:
        producer = None if value is None else value.producer()
        if producer is not None and producer in providers:
            return providers[producer]
    return None
