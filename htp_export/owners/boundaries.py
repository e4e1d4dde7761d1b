"""The tensors that enter and leave each module: as PyTorch ran it, and as the exported graph has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from htp_export import tags
from htp_export.capture.calls import NO_CALL
from htp_export.capture.record import Key, Record
from htp_export.owners.assign import Ownership
from htp_export.owners.flow import Flow, varying


@dataclass
class Boundary:
    """The tensors that enter and leave one module, in order of first use and of production.

    Attributes:
        inputs: Tensors made outside the module's calls and read inside → calls outside that made them.
        outputs: Tensors made inside and read outside → calls outside that read them.
    """

    inputs: dict[Key, set[int]] = field(default_factory=dict)
    outputs: dict[Key, set[int]] = field(default_factory=dict)


def true_boundaries(record: Record, flow: Flow) -> dict[str, Boundary]:
    """For each module that ran, the captured tensors that passed in and out of its calls.

    Only tensors whose values depend on the model's inputs, and that the result depends on.
    """
    log, found = record.log, {call.path: Boundary() for call in record.log.calls}
    live, maker = flow.live, dict.fromkeys(record.inputs, NO_CALL)

    def passes(key: Key, reader: int) -> None:
        source = maker.get(key)
        if source is None or source == reader or key not in live:
            return
        inside, outside = log.chain(reader), log.chain(source)
        for call in inside:
            if call not in outside:
                found[log.calls[call].path].inputs.setdefault(key, set()).add(source)
        for call in outside:
            if call not in inside:
                found[log.calls[call].path].outputs.setdefault(key, set()).add(reader)

    for operation, is_wanted in zip(record.operations, flow.wanted, strict=True):
        if is_wanted:
            for key in operation.inputs:
                passes(key, operation.call)
            maker.update(dict.fromkeys(operation.outputs, operation.call))
    for key in record.outputs:
        passes(key, NO_CALL)
    return found


class Regions:
    """Which nodes of the exported graph belong to which module, and what crosses between them."""

    def __init__(self, record: Record, owners: Sequence[Ownership]) -> None:
        self.nodes, self.owners = record.nodes, owners
        self.live = varying(record.nodes, record.graph_inputs)
        self.graph_outputs = record.graph_outputs
        self.by_path: dict[str, list[int]] = {}
        self._maker: dict[Key, int] = {}
        self._readers: dict[Key, list[int]] = {}
        self._above: list[dict[str, None]] = []  # for each node, its owners and all that is above them
        above: dict[tuple[str, ...], dict[str, None]] = {}
        for index, node in enumerate(record.nodes):
            self._maker.update(dict.fromkeys(node.outputs, index))
            for key in node.inputs:
                self._readers.setdefault(key, []).append(index)
            paths = owners[index].paths
            if paths not in above:
                above[paths] = dict.fromkeys(up for path in paths for up in tags.ancestors(path))
            self._above.append(above[paths])
            for path in above[paths]:
                self.by_path.setdefault(path, []).append(index)
        self._edges = [self._edges_of(index) for index in range(len(record.nodes))]

    def _edges_of(self, index: int) -> list[tuple[Key, int, bool]]:
        """``(tensor, node on the other side or -1, whether it leaves)`` for what passes between a node and others.

        Without what passes between nodes of the same owners: that crosses no border.
        """
        node, here = self.nodes[index], self._above[index]
        found: list[tuple[Key, int, bool]] = []
        for key in node.outputs:
            if key in self.live:
                if key in self.graph_outputs:
                    found.append((key, -1, True))
                readers = self._readers.get(key, ())
                found += [(key, reader, True) for reader in readers if self._above[reader] is not here]
        for key in node.inputs:
            if key in self.live:
                source = self._maker.get(key, -1)
                if source < 0 or self._above[source] is not here:
                    found.append((key, source, False))
        return found

    def crossings(self, paths: Sequence[str]) -> Iterable[tuple[Key, int, bool]]:
        """``(tensor, node on the other side or -1, whether it leaves)`` for what crosses the border of a region.

        The region is that of all nodes with an owner at or below one of ``paths``. What several modules own may be
        read by each of them.
        """
        region = {index for path in paths for index in self.by_path.get(path, ())}
        for index in sorted(region):
            outwards = [edge for edge in self._edges[index] if edge[1] not in region]
            others = self._others(index, paths) if outwards else []
            for key, other, leaves in outwards:
                shared = leaves and other >= 0 and not self._above[other].keys().isdisjoint(others)
                if not shared:
                    yield key, other, leaves

    def _others(self, index: int, paths: Sequence[str]) -> list[str]:
        """The owners of a node that have nothing to do with ``paths``; a single owner is why it is in the region."""
        owners = self.owners[index].paths
        if len(owners) == 1:
            return []
        return [
            owner
            for owner in owners
            if not any(tags.is_under(owner, path) or tags.is_under(path, owner) for path in paths)
        ]
