"""Fates after a change to a graph: which modules stay exact, and which are fused, with which others.

What the file says of modules' arguments and results (``htp.signatures``) is held against what crosses the borders of
their regions. A module whose border is not known any more is *fused* with the modules on the other side, and with
theirs, until every tensor at the common border is one that PyTorch knows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property

import onnx_ir as ir

from htp_export.format import tags
from htp_export.format.call_tree import CallTree, Work
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.signatures import Signature
from htp_export.model.boundaries import fused_with
from htp_export.model.dependence import input_dependent_values
from htp_export.model.regions import all_nodes

__all__ = ["Borders", "refate"]

_Paths = tuple[str, ...]
_NOBODY = Work()


class Borders:
    """What crosses from module to module in one graph.

    A tensor that depends on inputs of the model through sizes alone crosses nothing, as in the rest of the format.

    Args:
        model: The model, tagged.
        calls: The calls of its modules.
        signatures: What the modules took and gave, under the names that the tensors have now.
        nodes: Its nodes, in subgraphs too, where they are at hand.

    Attributes:
        known: Module path → tensors that it took or gave.
        given: Module path → tensors that it gave.
        regions: Paths of the modules that have nodes.
    """

    def __init__(
        self,
        model: ir.Model,
        calls: CallTree,
        signatures: Mapping[str, Sequence[Signature]],
        nodes: Sequence[ir.Node] | None = None,
    ) -> None:
        nodes = list(all_nodes(model)) if nodes is None else nodes
        works = {
            node: calls.work(tags.owners_of(node.metadata_props), tags.calls_said(node.metadata_props))
            for node in nodes
        }
        self.known: dict[str, set[str]] = {}
        for path, passed in signatures.items():
            named = (name for call in passed for name in (*call.inputs.values(), *call.outputs))
            self.known[path] = {name for name in named if name is not None}
        self.given: dict[str, set[str]] = {
            path: {name for call in passed for name in call.outputs if name is not None}
            for path, passed in signatures.items()
        }
        results = [value for value in model.graph.outputs if value.name]
        self.known.setdefault("", set()).update(str(value.name) for value in (*model.graph.inputs, *results))
        self._live = input_dependent_values(model, nodes)
        self._crossings: dict[tuple[Work, Work], tuple[_Paths, _Paths]] = {}
        self._edges = list(self._find_edges(works, results))
        self.regions = {path for work in set(works.values()) for path in work.modules}

    def _find_edges(
        self, works: Mapping[ir.Node, Work], results: Collection[ir.Value]
    ) -> Iterator[tuple[Work, Work, str]]:
        """``(work of the maker, work of a reader, tensor)``; inputs are made, and results read, by nobody."""
        found: dict[tuple[Work, Work, str], None] = {}
        for node, work in works.items():
            for value in node.inputs:
                if value is not None and value in self._live:
                    maker = value.producer()
                    found[works.get(maker, _NOBODY) if maker is not None else _NOBODY, work, str(value.name)] = None
        for value in results:
            maker = value.producer()
            if maker is not None and value in self._live:
                found[works.get(maker, _NOBODY), _NOBODY, str(value.name)] = None
        return iter(found)

    def _between(self, one: Work, other: Work) -> tuple[_Paths, _Paths]:
        """The modules that an edge leaves, and those that it enters."""
        if (one, other) not in self._crossings:
            leaving = (path for path in one.modules - other.modules if other.modules.isdisjoint(one.others((path,))))
            self._crossings[one, other] = tuple(leaving), tuple(other.modules - one.modules)
        return self._crossings[one, other]

    @cached_property
    def crossing(self) -> Mapping[str, Mapping[str, _Paths]]:
        """Module path → tensor at its border → owners on the other side."""
        found: defaultdict[str, dict[str, _Paths]] = defaultdict(dict)
        for one, other, name in self._edges:
            leaving, entering = self._between(one, other)
            for path in leaving:
                found[path].setdefault(name, other.owners or ("",))
            for path in entering:
                found[path].setdefault(name, one.owners or ("",))
        return found

    @cached_property
    def unknown(self) -> dict[str, set[str]]:
        """Module path → tensors at its border that PyTorch does not know; modules without a signature are left out."""
        return {
            path: strange
            for path, names in self.crossing.items()
            if path in self.known and (strange := {name for name in names if name not in self.known[path]})
        }

    def behind_unknown(self, group: Sequence[str]) -> Iterator[str]:
        """The owners on the other side of what crosses the common border of modules, and is not known."""
        known = set[str]().union(*(self.known.get(member, set()) for member in group))
        for one, other, name in self._edges:
            if name in known:
                continue
            inside, outside = (not work.modules.isdisjoint(group) for work in (one, other))
            if inside and not outside and other.modules.isdisjoint(one.others(group)):
                yield from other.owners or ("",)
            elif outside and not inside:
                yield from one.owners or ("",)

    def has_nodes(self, path: str) -> bool:
        """Whether a node has an owner at or below a module."""
        return path in self.regions

    def is_closed(self, path: str) -> bool:
        """Whether a module ran, has nodes, and every tensor at its border is known."""
        return path in self.known and path in self.regions and path not in self.unknown

    def around(self, group: Sequence[str]) -> Iterator[list[str]]:
        """The owners of the nodes that make, or else read, what modules took and gave."""
        names = set[str]().union(*(self.known.get(path, set()) for path in group))
        yield [owner for one, other, name in self._edges if name in names for owner in one.owners or other.owners]


def refate(
    borders: Borders, hierarchy: Hierarchy, lost: Mapping[str, Collection[str]], excused: Mapping[str, Collection[str]]
) -> Hierarchy:
    """The module tree with the fates that a changed graph gives.

    Args:
        borders: What crosses in the graph as it is.
        hierarchy: The tree as it was.
        lost: Path of a module with a tensor in its signature that is nowhere in the graph any more → modules that did
            the work on the other side of it.
        excused: Module path → tensors at its border that were not known before the change either.
    """
    fates: dict[str, str] = {}
    together: dict[str, tuple[str, ...]] = {}
    strange = {path: names - set(excused.get(path, ())) for path, names in borders.unknown.items()}
    for path, module in hierarchy.items():
        start = [other for other in lost.get(path, ()) if other in hierarchy]
        if module.fate == "fused":
            fates[path], together[path] = "fused", fused_with(path, (*module.fused_with, *start), borders)
        elif module.fate == "computed" and (path in lost or strange.get(path)):
            group = fused_with(path, start, borders)
            fates[path], together[path] = "fused", group or (hierarchy.parent(path) or "",)
        elif module.fate == "computed" and path not in borders.regions:
            fates[path] = "identity" if borders.given.get(path) else "constant"
    return hierarchy.with_results(fates=fates, fused_with=together)
