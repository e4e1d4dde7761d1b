"""What an engine runs and times, and the modules whose work it is; and the kernels of ONNX Runtime's profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

import onnx_ir as ir

from htp_export.format.call_tree import CallTree, NodeCalls
from htp_export.model.regions import subgraphs
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.traces import KernelKey, Trace

__all__ = ["Kernel", "Timed", "modules_around_owners", "owned", "trace_kernels"]


@dataclass(frozen=True)
class Timed:
    """An entry of an engine's profile: a kernel, a layer, a node of its own graph.

    Attributes:
        name: Its name in the engine; in ONNX Runtime, for a node without a name, its operator and index.
        op_type: The engine's word for what it does: in ONNX Runtime its operator, after fusion.
        provider: The execution provider or device that ran it.
        ms: Its time in one run, without the kernels of its subgraphs; see ``Trace.typical`` for ONNX Runtime.
        launches: Mean number of launches in one run.
    """

    name: str
    op_type: str
    provider: str
    ms: float
    launches: float


@dataclass(frozen=True)
class Kernel(Timed):
    """An entry of an engine's profile, and the modules whose work it is.

    Attributes:
        owners: The paths of the modules whose work it does, in the order of execution; empty if none is known.
        around: For each owner, the modules whose regions contain its share.
    """

    owners: tuple[str, ...]
    around: tuple[frozenset[str], ...] = field(default=(), repr=False)


def owned(timed: Timed, works: Iterable[NodeCalls], calls: CallTree) -> Kernel:
    """Return an entry with its owners: those of the original nodes whose work it does, each once.

    Args:
        timed: The entry.
        works: Owners and calls of these nodes, in the order of execution; empty if none is known.
        calls: The calls of the model.
    """
    around = modules_around_owners(works, calls)
    known = {field.name: getattr(timed, field.name) for field in fields(Timed)}
    return Kernel(**known, owners=tuple(around), around=tuple(around.values()))


def modules_around_owners(works: Iterable[NodeCalls], calls: CallTree) -> dict[str, frozenset[str]]:
    """Return owner → the modules whose regions contain its share of the work, in the order of execution."""
    modules_by_owner: dict[str, frozenset[str]] = {}
    for work in works:
        for owner, modules in calls.around_owners(work).items():
            modules_by_owner[owner] = modules_by_owner.get(owner, frozenset()) | modules
    return modules_by_owner


def trace_kernels(trace: Trace, tagged: TaggedModel, optimized: ir.Model | None) -> tuple[Kernel, ...]:
    """Return the kernels of a profile, in the order of their first launch.

    Args:
        trace: The profile.
        tagged: The model before optimisation, without functions.
        optimized: The graph that ran; None if it is unknown: then only kernels that kept their names have owners.
    """
    from htp_export.capabilities.carry.ownership import optimized_works

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
