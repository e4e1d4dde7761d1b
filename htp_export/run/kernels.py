"""The kernels of a profile, each with its owners."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.format.call_tree import CallTree, NodeCalls
from htp_export.model.regions import subgraphs
from htp_export.model.tagged import TaggedModel
from htp_export.provenance.optimized import optimized_works
from htp_export.runtime.traces import KernelKey, Trace

__all__ = ["Kernel", "attributed_kernels"]


@dataclass(frozen=True)
class Kernel:
    """A node of the graph that ONNX Runtime runs.

    Attributes:
        name: Its name; for a node without a name, its operator and index.
        op_type: Its operator, after fusion.
        provider: The execution provider that ran it.
        ms: Time of all its launches in one run, without the kernels of its subgraphs; see ``Trace.typical``.
        launches: Mean number of launches in one run.
        owners: The paths of the modules whose work it does, in the order of execution; empty if none is known.
        around: For each owner, the modules whose regions contain its share.
    """

    name: str
    op_type: str
    provider: str
    ms: float
    launches: float
    owners: tuple[str, ...]
    around: tuple[frozenset[str], ...] = ()


def attributed_kernels(trace: Trace, tagged: TaggedModel, optimized: ir.Model | None) -> tuple[Kernel, ...]:
    """Return the kernels of a profile, in the order of their first launch.

    Args:
        trace: The profile.
        tagged: The model before optimisation, without functions.
        optimized: The graph that ran; None if it is unknown: then only kernels that kept their names have owners.
    """
    graph = tagged.model if optimized is None else optimized
    works, nodes = optimized_works(tagged, graph), _nodes(trace.times, graph)
    owned = {key: _owned((works[node] for node in nodes[key] if node in works), tagged.calls) for key in trace.times}
    return tuple(
        Kernel(
            name=key.label,
            op_type=key.op_type,
            provider=key.provider,
            ms=trace.typical(key),
            launches=trace.launches[key] / trace.runs,
            owners=tuple(owned[key]),
            around=tuple(owned[key].values()),
        )
        for key in trace.times
    )


def _owned(works: Iterable[NodeCalls], calls: CallTree) -> dict[str, frozenset[str]]:
    """Return owner → the modules whose regions contain its share of the work."""
    modules_by_owner: dict[str, frozenset[str]] = {}
    for work in works:
        for owner, modules in calls.around_owners(work).items():
            modules_by_owner[owner] = modules_by_owner.get(owner, frozenset()) | modules
    return modules_by_owner


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
