"""What became of each module when a tool has worked on the model: fates, signatures and contamination, anew.

A tensor at a module's border is known where it was one before (an exact module's border, or its signature) and is
still there. A module with one that is gone is fused with those on the other side of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from htp_export.format.call_tree import CallTree, Work
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.format.signatures import Signature
from htp_export.model.boundaries import OUTSIDE, Crossings, fused_with
from htp_export.provenance.alignment import Alignment
from htp_export.provenance.sketch import NOTHING, Sketch

__all__ = ["FatesAfter"]

Signatures = Mapping[str, Sequence[Signature]]


class FatesAfter:
    """Finds what became of the modules.

    Args:
        alignment: What the tensors after the tool meant before.
        hierarchy: The modules, with their fates before.
        signatures: What they took and gave, by the names of tensors before.
        works: Whose work each node does after.
        calls: The calls of the modules.

    Attributes:
        hierarchy: The modules, with their fates now.
        contamination: ``(module, tensor, leaves)`` for border tensors of computed modules that are not known.
    """

    def __init__(
        self,
        alignment: Alignment,
        hierarchy: Hierarchy,
        signatures: Signatures,
        works: Sequence[Work],
        calls: CallTree,
    ) -> None:
        self._alignment, self._signatures, self._old = alignment, signatures, hierarchy
        self._number = alignment.numbers.number
        before = [calls.work(node.owners, node.call) for node in alignment.before.nodes]
        self._before, self._after = _crossings(alignment.before, before), _crossings(alignment.after, works)
        self._there = {
            number: value
            for value, number in reversed(list(enumerate(alignment.meaning)))
            if number != NOTHING and alignment.exact[value]
        }
        self._known = cache(self._find_known)
        self._closed: dict[str, bool] = {}
        self.contamination: list[tuple[str, str, bool]] = []
        found = {path: self._fate(info) for path, info in hierarchy.items()}
        self.hierarchy = hierarchy.with_results(
            fates={path: fate for path, (fate, _) in found.items()},
            fused_with={path: merged for path, (fate, merged) in found.items() if fate == "fused"},
        )

    def signatures(self) -> dict[str, list[Signature]]:
        """The signatures, by the names of tensors after; None for those that are gone."""
        return {
            path: [
                Signature(
                    {key: self._name(name) for key, name in call.inputs.items()}, tuple(map(self._name, call.outputs))
                )
                for call in calls
            ]
            for path, calls in self._signatures.items()
        }

    def _name(self, name: str | None) -> str | None:
        value = self._there.get(self._numbered(name), NOTHING)
        return None if value == NOTHING else self._alignment.after.values[value].name

    def _numbered(self, name: str | None) -> int:
        value = NOTHING if name is None else self._alignment.before.find(name)
        return NOTHING if value == NOTHING else self._number[value]

    # --- what a module takes and gives ---

    def _find_known(self, path: str) -> tuple[frozenset[int], frozenset[int]]:
        """The numbers of the tensors that may enter or leave a module, and of those that it has to make."""
        info = self._old.get(path)
        given = {self._numbered(name) for call in self._signatures.get(path, ()) for name in call.inputs.values()}
        made = {self._numbered(name) for call in self._signatures.get(path, ()) for name in call.outputs}
        leaving = set[int]()
        if info is not None and (info.fate == "computed" or path not in self._signatures):
            for value, _, leaves in self._before.of([path]):
                (leaving if leaves else given).add(self._number[value])
        if not path:
            leaving.update(self._number[value] for value in self._alignment.before.outputs)
        known = (given | made | leaving) - {NOTHING}
        return frozenset(known), frozenset(leaving - given - {NOTHING})

    def _meaning(self, value: int) -> int:
        return self._alignment.meaning[value] if self._alignment.exact[value] else NOTHING

    def _unknown(self, group: Sequence[str]) -> list[tuple[int, int, bool]]:
        known = frozenset[int]().union(*(self._known(path)[0] for path in group))
        return [crossing for crossing in self._after.of(group) if self._meaning(crossing[0]) not in known]

    # --- what became of it ---

    def _fate(self, info: ModuleInfo) -> tuple[str, tuple[str, ...]]:
        path = info.path
        if info.fate not in ("computed", "fused") or path not in self._before.below:
            return info.fate, info.fused_with
        if path not in self._after.below:
            return self._gone(info)
        unknown = self._unknown([path])
        if info.fate == "computed" and not unknown and self._makes_all(path):
            return "computed", ()
        lost = [number for number in self._known(path)[0] if number not in self._there]
        if not lost and info.fate == "computed":
            names = self._alignment.after.values
            found = dict.fromkeys((path, names[value].name, leaves) for value, _, leaves in unknown)
            self.contamination.extend(found)
            return "computed", ()
        return "fused", fused_with(path, [*info.fused_with, *self._beyond(path, set(lost))], self)

    def _makes_all(self, path: str) -> bool:
        region = self._after.below[path]
        made = {
            self._meaning(value)
            for node in region
            for value in self._alignment.after.nodes[node].outputs
            if value != NOTHING
        }
        return all(number in made for number in self._known(path)[1])

    def _gone(self, info: ModuleInfo) -> tuple[str, tuple[str, ...]]:
        """A module without a node: its work was none, or was folded away, or went into its neighbours' unseen."""
        nodes, before = self._before.below[info.path], self._alignment.before
        made = [value for node in nodes for value in before.nodes[node].outputs if value != NOTHING]
        if not any(before.live[value] for value in made):
            return "constant", ()
        _, makes = self._known(info.path)
        entering = {self._number[value] for value, _, leaves in self._before.of([info.path]) if not leaves}
        if makes <= entering or not makes:
            return "identity", ()
        return "fused", fused_with(info.path, info.fused_with, self)

    def _beyond(self, path: str, numbers: set[int]) -> dict[str, None]:
        """The owners of the nodes before on the other side of some of a module's border tensors, in order."""
        nodes = self._alignment.before.nodes
        found = sorted(
            other for value, other, _ in self._before.of([path]) if self._number[value] in numbers and other != OUTSIDE
        )
        return dict.fromkeys(owner for other in found for owner in nodes[other].owners)

    def has_nodes(self, path: str) -> bool:
        """Whether a node has an owner at or below a module."""
        return path in self._after.below

    def is_closed(self, path: str) -> bool:
        """Whether a module ran, has nodes, and every tensor at its border is known."""
        if path not in self._closed:
            ran = path in self._old and self._old[path].calls > 0 and self.has_nodes(path)
            self._closed[path] = ran and not self._unknown([path])
        return self._closed[path]

    def behind_unknown(self, group: Sequence[str]) -> Iterator[str]:
        """The owners on the other side of what crosses the common border of modules, and is not known."""
        for _, other, _ in self._unknown(group):
            yield from self._after.owners[other] if other != OUTSIDE else ("",)

    def around(self, group: Sequence[str]) -> Iterator[list[str]]:
        """The owners of the nodes before on the other side of what modules took and gave."""
        yield [owner for path in group for owner in self._beyond(path, set(self._known(path)[0]))]


def _crossings(sketch: Sketch, works: Sequence[Work]) -> Crossings[int]:
    """What crosses the borders of modules in a sketch's main graph."""
    passed: list[tuple[list[int], list[int]]] = [
        ([], []) if node.scope else ([v for v in node.reads if v != NOTHING], [v for v in node.outputs if v != NOTHING])
        for node in sketch.nodes
    ]
    live = {value for value, is_live in enumerate(sketch.live) if is_live}
    return Crossings(passed, works, live, frozenset(sketch.outputs))
