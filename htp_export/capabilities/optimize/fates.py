"""Evidence for the fates of modules after a pass: their signatures."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir

from htp_export.format.fates import Fate
from htp_export.format.hierarchy import Hierarchy
from htp_export.format.signatures import Signature
from htp_export.model.fates import FateEvidence, Outcome
from htp_export.model.regions import GraphIndex


class SignatureEvidence(FateEvidence[ir.Value]):
    """The boundaries of modules in a changed graph, compared with their signatures.

    The fates in ``hierarchy`` are those before the change; ``signatures`` have the present names of tensors. ``lost``
    has, for each module that lost a tensor of its signature, the owners on the other side of that tensor; ``excused``
    the tensors at the boundary of a module that were unknown before the change already.
    """

    def __init__(
        self,
        index: GraphIndex,
        hierarchy: Hierarchy,
        signatures: Mapping[str, Sequence[Signature]],
        lost: Mapping[str, Iterable[str]] | None = None,
        excused: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        super().__init__(index.boundaries_by_values)
        self._hierarchy, self._lost, self._excused = hierarchy, lost or {}, excused or {}
        self._given = {path: {name for call in calls for name in call.given} for path, calls in signatures.items()}
        self._known: dict[str, set[str | None]] = {
            path: {name for call in calls for name in call.taken | call.given} for path, calls in signatures.items()
        }
        graph = index.model.graph
        self._known.setdefault("", set()).update(value.name for value in (*graph.inputs, *graph.outputs))

    def strange(self, path: str) -> set[str]:
        """The tensors at a module's boundary that its signature does not name; none for a module without one."""
        if path not in self._known or self.is_closed(path):
            return set()
        return {str(value.name) for value, _, _ in self.unknown([path])}

    def counterpart(self, tensor: ir.Value) -> str | None:
        return tensor.name

    def known(self, path: str) -> Collection[str | None]:
        return self._known.get(path, ())

    def ran(self, path: str) -> bool:
        return path in self._known

    def settled(self, path: str) -> Outcome | None:
        """The fate of a module that had no nodes before."""
        info = self._hierarchy[path]
        return None if info.fate.does_work else Outcome(info.fate)

    def without_work(self, path: str) -> Fate | None:
        """``identity`` for a module without nodes that lost no tensor and has outputs, else ``constant``."""
        if self.partners(path) is not None:
            return None
        return Fate.IDENTITY if self._given.get(path) else Fate.CONSTANT

    def partners(self, path: str) -> list[str] | None:
        """The modules beyond tensors that are gone, and those that a fused module was fused with before."""
        info = self._hierarchy[path]
        is_open = info.fate.is_merged or path in self._lost or self.strange(path) - {*self._excused.get(path, ())}
        beyond = (partner for partner in self._lost.get(path, ()) if partner in self._hierarchy)
        return [*info.fused_with, *beyond] if is_open else None

    def around(self, group: Sequence[str]) -> Iterator[list[str]]:
        """The owners of the producers, or else the consumers, of the boundary tensors of modules."""
        names = set[str | None]().union(*map(self.known, group))
        yield [owner for node in self.boundaries.beside(lambda value: value.name in names) for owner in node.owners]
