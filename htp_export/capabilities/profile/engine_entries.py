"""The entries of another engine's profile, with the original nodes that their names tell, and the modules of these.

An engine says what it made of a graph in names: of nodes, of tensors, of what it joined. A reader of an engine's files
turns these into original nodes; what the names leave open is the same for all engines, and follows `carry`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from htp_export.capabilities.profile.kernels import Kernel, Timed, owned
from htp_export.format.call_tree import NodeCalls
from htp_export.model.regions import subgraphs
from htp_export.model.tagged import TaggedModel

__all__ = ["Entry", "entry_kernels"]


@dataclass(frozen=True)
class Entry:
    """An entry of an engine's profile.

    Attributes:
        timed: Its name and time.
        nodes: The original nodes whose work it does; empty if its name tells none: the engine inserted it, or it lost
            the names.
        inputs: The tensors of the engine's graph that it reads, by name; empty if they are unknown.
        outputs: Those that it produces.
    """

    timed: Timed
    nodes: tuple[ir.Node, ...]
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


def entry_kernels(entries: Sequence[Entry], tagged: TaggedModel) -> tuple[Kernel, ...]:
    """Return entries with their owners, in the same order.

    An entry with original nodes has their owners; for a node with subgraphs, also those of the nodes inside, unless
    these have entries of their own. An entry without belongs to the modules of its consumers, otherwise to those of its
    producers, as an inserted node does.

    Args:
        entries: The entries, in the order of execution.
        tagged: The original model, without functions.
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
    ahead = [[other for name in entry.outputs for other in readers[name]] for entry in entries]
    behind = [[other for name in entry.inputs for other in makers[name]] for entry in entries]
    _spread(works, ahead, reversed(range(len(entries))))
    _spread(works, behind, range(len(entries)))
    return tuple(
        owned(entry.timed, dict.fromkeys(found), tagged.calls) for entry, found in zip(entries, works, strict=True)
    )


def _works(entry: Entry, named: set[ir.Node], tagged: TaggedModel) -> list[NodeCalls]:
    nodes = dict.fromkeys(entry.nodes)
    for node in entry.nodes:
        inside = list(_inside(node))
        if named.isdisjoint(inside):
            nodes.update(dict.fromkeys(inside))
    ordered = sorted(nodes, key=lambda node: tagged.index.place.get(node, 0))
    return [work for work in map(tagged.work_of, ordered) if work.owners]


def _inside(node: ir.Node) -> Iterator[ir.Node]:
    for body in subgraphs(node):
        yield from body.all_nodes()


def _spread(works: list[list[NodeCalls]], near: Sequence[Sequence[int]], order: Iterable[int]) -> None:
    """Give each entry without owners those of its neighbours."""
    for index in order:
        if not works[index]:
            works[index] = [work for other in dict.fromkeys(near[index]) for work in works[other]]
