"""The kernels of ONNX Runtime's profiler, each with its owners."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import onnx_ir as ir

from htp_export.capabilities.profile.kernels import Kernel, Timed, owned
from htp_export.model.regions import subgraphs
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.traces import KernelKey, Trace

__all__ = ["trace_kernels"]


def trace_kernels(trace: Trace, tagged: TaggedModel, optimized: ir.Model | None) -> tuple[Kernel, ...]:
    """Return the kernels of a profile, in the order of their first launch.

    Args:
        trace: The profile.
        tagged: The model before optimisation, without functions.
        optimized: The graph that ran; None if it is unknown: then only kernels that kept their names have owners.
    """
    from htp_export.capabilities.carry.optimized import optimized_works

    graph = tagged.model if optimized is None else optimized
    works, nodes = optimized_works(tagged, graph), _nodes(trace.times, graph)
    kernels = []
    for key in trace.times:
        ms, launches = trace.typical(key), trace.launches[key] / trace.runs
        timed = Timed(key.label, key.op_type, key.provider, ms, launches)
        kernels.append(owned(timed, (works[node] for node in nodes[key] if node in works), tagged.calls))
    return tuple(kernels)


def _nodes(keys: Iterable[KernelKey], model: ir.Model) -> dict[KernelKey, list[ir.Node]]:
    """Return the nodes that may be the kernel's; more than one only if equal names are ambiguous."""
    groups: defaultdict[tuple[tuple[KernelKey, ...], str, str], list[KernelKey]] = defaultdict(list)
    nodes_of_kernel: dict[KernelKey, list[ir.Node]] = {}
    named: dict[ir.Graph, dict[tuple[str, str], list[ir.Node]]] = {}
    for key in keys:
        unnamed = key.label == f"{key.op_type}_{key.index}"
        groups[key.holders, "" if unnamed else key.label, key.op_type].append(key)
    # Outer graphs first: which subgraph a kernel lies in is known by the node that holds it.
    for (holders, label, op_type), members in sorted(groups.items(), key=lambda group: len(group[0][0])):
        graphs = [model.graph]
        if holders:
            holding = nodes_of_kernel.get(holders[-1], ())
            graphs = [body for node in holding for body in subgraphs(node)]
        for graph in graphs:
            if graph not in named:
                named[graph] = _by_name(graph)
        names = [label] if label else ["", *(member.label for member in members)]
        named_nodes = [node for graph in graphs for name in names for node in named[graph].get((name, op_type), ())]
        # A graph runs in the order in which it is written down.
        alike = len(named_nodes) == len(members)
        nodes_of_kernel.update({key: [named_nodes[k]] if alike else named_nodes for k, key in enumerate(members)})
    return nodes_of_kernel


def _by_name(graph: ir.Graph) -> dict[tuple[str, str], list[ir.Node]]:
    nodes_by_name: defaultdict[tuple[str, str], list[ir.Node]] = defaultdict(list)
    for node in graph:
        nodes_by_name[node.name or "", node.op_type].append(node)
    return nodes_by_name
