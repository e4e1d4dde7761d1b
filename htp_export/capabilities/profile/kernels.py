"""What an engine runs and times, and the modules whose work it is.

Each engine turns its own names into original nodes; what they leave open follows `carry`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from htp_export.format.call_tree import CallTree, NodeCalls
from htp_export.model.tagged import TaggedModel
from htp_export.shapes.operator_kinds import subgraphs


@dataclass(frozen=True)
class Kernel:
    """An entry of an engine's profile, a kernel, a layer or a node of its own graph, and the modules whose work it is.

    Attributes:
        name: Its name in the engine; in ONNX Runtime, for a node without a name, its operator and index.
        op_type: The engine's word for what it does: in ONNX Runtime its operator, after fusion.
        provider: The execution provider or device that ran it.
        ms: Its time in one run, without the kernels of its subgraphs; see ``Trace.typical`` for ONNX Runtime.
        launches: Mean number of launches in one run.
        owners: The paths of the modules whose work it does, in the order of execution; empty if none is known.
        around: For each owner, the modules whose regions contain its share.
    """

    name: str
    op_type: str
    provider: str
    ms: float
    launches: float
    owners: tuple[str, ...] = ()
    around: tuple[frozenset[str], ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Entry:
    """An entry of an engine's profile, before its owners are known.

    Attributes:
        kernel: Its name and time.
        nodes: The original nodes whose work it does; empty if its name tells none: the engine inserted it, or it lost
            the names.
        inputs: The tensors of the engine's graph that it reads, by name; empty if they are unknown.
        outputs: Those that it produces.
    """

    kernel: Kernel
    nodes: Sequence[ir.Node]
    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()


def owned(kernel: Kernel, works: Iterable[NodeCalls], calls: CallTree) -> Kernel:
    """A kernel with its owners: those of the nodes whose work it does, in the order of execution, each once."""
    around = modules_around_owners(works, calls)
    return replace(kernel, owners=tuple(around), around=tuple(around.values()))


def modules_around_owners(works: Iterable[NodeCalls], calls: CallTree) -> dict[str, frozenset[str]]:
    """Owner → the modules whose regions contain its share of the work, in the order of execution."""
    modules_by_owner: dict[str, frozenset[str]] = {}
    for work in works:
        for owner, modules in calls.around_owners(work).items():
            modules_by_owner[owner] = modules_by_owner.get(owner, frozenset()) | modules
    return modules_by_owner


def entry_kernels(entries: Sequence[Entry], tagged: TaggedModel) -> tuple[Kernel, ...]:
    """The kernels of entries, which stand in the order of execution, with their owners.

    An entry with original nodes has their owners; for a node with subgraphs, also those of the nodes inside, unless
    these have entries of their own. An entry without belongs to the modules of its consumers, otherwise to those of its
    producers, as an inserted node does.
    """
    named = {node for entry in entries for node in entry.nodes}
    works = [_works(entry, named, tagged) for entry in entries]
    makers: defaultdict[str, list[int]] = defaultdict(list)
    readers: defaultdict[str, list[int]] = defaultdict(list)
    for index, entry in enumerate(entries):
        for name in entry.outputs:
            makers[name].append(index)
        for name in entry.inputs:
            readers[name].append(index)
    ahead = [[reader for name in entry.outputs for reader in readers[name]] for entry in entries]
    behind = [[maker for name in entry.inputs for maker in makers[name]] for entry in entries]
    _spread(works, ahead, reversed(range(len(entries))))
    _spread(works, behind, range(len(entries)))
    return tuple(
        owned(entry.kernel, dict.fromkeys(work), tagged.calls) for entry, work in zip(entries, works, strict=True)
    )


def _works(entry: Entry, named: set[ir.Node], tagged: TaggedModel) -> list[NodeCalls]:
    nodes = dict.fromkeys(entry.nodes)
    for node in entry.nodes:
        inside = [inner for body in subgraphs(node) for inner in body.all_nodes()]
        if named.isdisjoint(inside):
            nodes.update(dict.fromkeys(inside))
    ordered = sorted(nodes, key=lambda node: tagged.index.place.get(node, 0))
    return [work for work in map(tagged.work_of, ordered) if work.owners]


def _spread(works: list[list[NodeCalls]], near: Sequence[Sequence[int]], order: Iterable[int]) -> None:
    """Give each entry without owners those of its neighbours."""
    for index in order:
        if not works[index]:
            works[index] = [work for neighbour in dict.fromkeys(near[index]) for work in works[neighbour]]
