"""What became of each module: computed, identity, fused, constant, dead or uncalled."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from htp_export.exporter.capture.record import Key, Record
from htp_export.exporter.owners.boundaries import Boundary, crossings_of, true_boundaries
from htp_export.exporter.owners.flow import Flow, needed
from htp_export.format.call_tree import Work
from htp_export.model.boundaries import OUTSIDE, fused_with


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one module.

    Attributes:
        name: One of `htp_export.format.hierarchy.FATES`.
        fused_with: For ``fused``, the modules with which it can be cut out as a whole.
    """

    name: str
    fused_with: tuple[str, ...] = ()


class Fates:
    """Finds the fate of every module that ran.

    Attributes:
        contamination: ``(module, tensor, leaves)`` for border tensors of computed modules that PyTorch does not know.
    """

    def __init__(self, record: Record, works: Sequence[Work], flow: Flow) -> None:
        self.record = record
        self.true = true_boundaries(record, flow)
        self.crossings = crossings_of(record, works)
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
        moved = self._moved(path)
        if moved:
            return Fate("fused", fused_with(path, moved, self))
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
            return Fate("fused", fused_with(path, lost, self))
        if path in self.crossings.below and not boundary.outputs and self._returns_what_is_gone(path):
            return Fate("constant")
        if path in self.crossings.below:
            self.contamination.extend((path, key, leaves) for key, _, leaves in self._unknown([path]))
            return Fate("computed")
        if not boundary.outputs:
            return Fate("constant")
        given = {final[key] for key in boundary.inputs}
        if all(final[key] in given for key in boundary.outputs):
            return Fate("identity")
        return Fate("fused", fused_with(path, (), self))  # its neighbours make and read the tensor that it made

    def _moved(self, path: str) -> dict[str, None]:
        """Owners of the work of a module that is no longer its own, in order of execution."""
        log = self.record.log
        calls = {now for call, given in self.record.moved.items() if log.calls[call].path == path for now in given}
        return dict.fromkeys(owner for call in sorted(calls) for owner in log.owners(call) if owner != path)

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

    def _unknown(self, group: Sequence[str]) -> Iterator[tuple[Key, int, bool]]:
        """What crosses the common border of modules, and is not known to PyTorch."""
        known = self._known(group)
        return (crossing for crossing in self.crossings.of(group) if crossing[0] not in known)

    def has_nodes(self, path: str) -> bool:
        """Whether a node has an owner at or below a module."""
        return path in self.crossings.below

    def is_closed(self, path: str) -> bool:
        """Whether a module ran, has nodes, and all that crosses its border is known to PyTorch."""
        ran = self.record.log.count(path) > 0 and self.has_nodes(path)
        return ran and next(self._unknown([path]), None) is None

    def behind_unknown(self, group: Sequence[str]) -> Iterator[str]:
        """The owners on the other side of what crosses the common border of modules, and is not known to PyTorch."""
        for _, other, _ in self._unknown(group):
            yield from self.crossings.owners[other] if other != OUTSIDE else ("",)

    def around(self, group: Sequence[str]) -> Iterator[list[str]]:
        """The owners of the operations that made what modules took, then of those that read what they gave."""
        borders = [self.true[path] for path in group if path in self.true]
        yield [path for border in borders for path in self._beyond(border, list(border.inputs))]
        yield [path for border in borders for path in self._beyond(border, list(border.outputs))]
