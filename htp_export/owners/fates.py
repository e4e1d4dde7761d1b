"""What became of each module: computed, identity, fused, constant, dead or uncalled."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from htp_export.capture.record import Key, Record
from htp_export.crossings import OUTSIDE
from htp_export.owners.assign import Ownership
from htp_export.owners.boundaries import Boundary, crossings_of, true_boundaries
from htp_export.owners.flow import Flow, needed


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one module.

    Attributes:
        name: One of `htp_export.hierarchy.FATES`.
        fused_with: For ``fused``, the modules with which it can be cut out as a whole.
    """

    name: str
    fused_with: tuple[str, ...] = ()


class Fates:
    """Finds the fate of every module that ran.

    Attributes:
        contamination: ``(module, tensor, leaves)`` for border tensors of computed modules that PyTorch does not know.
    """

    def __init__(self, record: Record, owners: Sequence[Ownership], flow: Flow) -> None:
        self.record = record
        self.true = true_boundaries(record, flow)
        self.crossings = crossings_of(record, [owner.paths for owner in owners])
        self.contamination: list[tuple[str, Key, bool]] = []
        self._useful = self._modules_that_count(flow.wanted)

    @functools.cached_property
    def _measured(self) -> frozenset[str]:
        """Modules whose work is read for its sizes alone."""
        wanted = needed(self.record.operations, self.record.outputs, values_only=True)
        return frozenset(path for path, is_read in self._modules_that_count(wanted).items() if not is_read)

    def _modules_that_count(self, wanted: list[bool]) -> dict[str, bool]:
        """Path → whether the result depends on something that the module computed; absent if it computed nothing."""
        log = self.record.log
        useful: dict[str, bool] = {}
        marks: dict[int, bool] = {}
        for operation, is_wanted in zip(self.record.operations, wanted, strict=True):
            marks[operation.call] = marks.get(operation.call, False) or is_wanted
        for call, is_wanted in (*dict.fromkeys(self.record.dead, False).items(), *marks.items()):
            for up in log.chain(call):
                path = log.calls[up].path
                useful[path] = useful.get(path, False) or is_wanted
        return useful

    def of(self, path: str) -> Fate:
        """The fate of one module."""
        if not self.record.log.count(path):
            return Fate("uncalled")
        if path not in self._useful and path in self.crossings.below:
            return Fate("computed")  # in a branch or loop body, where captured operations do not reach
        if path not in self._useful:
            return Fate("identity" if self.record.log.returned_inputs.get(path, True) else "constant")
        if not self._useful[path]:
            return Fate("dead")
        boundary, final = self.true[path], self.record.final
        lost = self._beyond(boundary, [key for key in (*boundary.inputs, *boundary.outputs) if key not in final])
        if (lost or path not in self.crossings.below) and path in self._measured:
            return Fate("dead")
        if lost:
            return Fate("fused", self._whole([path, *lost]))
        if path in self.crossings.below and not boundary.outputs and self._returns_what_is_gone(path):
            return Fate("constant")
        if path in self.crossings.below:
            known = self._known([path])
            self.contamination.extend(
                (path, key, leaves) for key, _, leaves in self.crossings.of([path]) if key not in known
            )
            return Fate("computed")
        if not boundary.outputs:
            return Fate("constant")
        given = {final[key] for key in boundary.inputs}
        if all(final[key] in given for key in boundary.outputs):
            return Fate("identity")
        return Fate("fused", self._whole([path]))  # its neighbours make and read the tensor that it made

    def _returns_what_is_gone(self, path: str) -> bool:
        """Whether a module returned tensors, and the file has none of them."""
        log, final = self.record.log, self.record.final
        passed = (self.record.passed.get(index) for index, call in enumerate(log.calls) if call.path == path)
        returned = [key for passing in passed if passing is not None for key in passing.returned]
        return bool(returned) and not any(key in final for key in returned)

    def _beyond(self, boundary: Boundary, keys: list[Key]) -> dict[str, None]:
        """Owners of the operations on the other side of tensors at a module's border, in order of execution."""
        calls = {call for key in keys for call in (*boundary.inputs.get(key, ()), *boundary.outputs.get(key, ()))}
        paths = (path for call in sorted(calls) for path in (self.record.log.owners(call) or ("",)))
        return dict.fromkeys(paths)

    def _known(self, group: Sequence[str]) -> set[Key]:
        final, sides = self.record.final, [self.true[path] for path in group if path in self.true]
        known = {final[key] for side in sides for key in (*side.inputs, *side.outputs) if key in final}
        return known | self.record.graph_outputs if "" in group else known

    def _next_to(self, group: list[str]) -> list[str]:
        """For modules without a single node (they cancelled out), one that is next to them and has nodes.

        Rather the one whose work they go on with: the tensor that they give back may be one inside it.
        """
        if any(path in self.crossings.below for path in group):
            return []
        boundaries = [self.true[path] for path in group if path in self.true]
        for sides in ([list(side.inputs) for side in boundaries], [list(side.outputs) for side in boundaries]):
            around = {up: None for side, keys in zip(boundaries, sides, strict=True) for up in self._beyond(side, keys)}
            there = sorted((up for up in around if up in self.crossings.below), key=lambda up: -len(up))
            if there:
                return there[:1]
        return []

    def _whole(self, group: list[str]) -> tuple[str, ...]:
        """The modules that must be taken along for every tensor at the border to be one that PyTorch knows."""
        first, group = group[0], list(dict.fromkeys(group))
        group.extend(self._next_to(group))
        while True:
            known, more = self._known(group), dict[str, None]()
            for key, other, _ in self.crossings.of(group):
                if key not in known:
                    more.update(dict.fromkeys(self.crossings.owners[other] if other != OUTSIDE else ("",)))
            fresh = [path for path in more if path not in group]
            if not fresh:
                return tuple(path for path in group if path != first)
            group.extend(fresh)
