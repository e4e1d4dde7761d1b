"""What crosses the borders of modules' regions, in a sketch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from htp_export import tags
from htp_export.provenance.sketch import NOTHING, Sketch

__all__ = ["Borders"]


class Borders:
    """The regions of a sketch's main graph.

    Args:
        sketch: The model.
        owners: The owners of each of its nodes.

    Attributes:
        below: Module path → the nodes with an owner at or below it, in order.
    """

    def __init__(self, sketch: Sketch, owners: Sequence[tuple[str, ...]]) -> None:
        self.sketch, self.owners = sketch, owners
        self.outputs = frozenset(sketch.outputs)
        self.below: dict[str, list[int]] = {}
        above: dict[tuple[str, ...], list[str]] = {}
        for index, node in enumerate(sketch.nodes):
            if node.scope:
                continue
            paths = owners[index]
            if paths not in above:
                above[paths] = list(dict.fromkeys(up for path in paths for up in tags.ancestors(path)))
            for path in above[paths]:
                self.below.setdefault(path, []).append(index)

    def region(self, paths: Iterable[str]) -> set[int]:
        """The nodes with an owner at or below one of ``paths``."""
        return {index for path in paths for index in self.below.get(path, ())}

    def crossings(self, paths: Sequence[str]) -> Iterator[tuple[int, int, bool]]:
        """``(value, node on the other side or NOTHING, whether it leaves)``; constant values cross nothing."""
        sketch, region = self.sketch, self.region(paths)
        maker, readers, live = sketch.maker, sketch.readers, sketch.live
        inside_of: dict[tuple[str, ...], set[int]] = {}  # owners → the region, with those of owners that are elsewhere
        for index in sorted(region):
            node, owners = sketch.nodes[index], self.owners[index]
            if owners not in inside_of:
                others = self._elsewhere(owners, paths)
                inside_of[owners] = region | self.region(others) if others else region
            inside = inside_of[owners]
            for value in node.outputs:
                if value == NOTHING or not live[value]:
                    continue
                if value in self.outputs:
                    yield value, NOTHING, True
                for reader in readers[value]:
                    if reader not in inside and not sketch.nodes[reader].scope:
                        yield value, reader, True
            for value in node.reads:
                if value != NOTHING and live[value] and maker[value] not in region:
                    yield value, maker[value], False

    def _elsewhere(self, owners: tuple[str, ...], paths: Sequence[str]) -> list[str]:
        """The owners that are neither at nor above nor below one of ``paths``."""
        if len(owners) == 1:
            return []
        own, above = set(paths), {up for path in paths for up in tags.ancestors(path)}
        return [owner for owner in owners if owner not in above and own.isdisjoint(tags.ancestors(owner))]
