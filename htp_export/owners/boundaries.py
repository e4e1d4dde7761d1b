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
        self.maker: dict[Key, int] = {}
        self.readers: dict[Key, list[int]] = {}
        self.by_path: dict[str, list[int]] = {}
        above: dict[tuple[str, ...], list[str]] = {}
        for index, node in enumerate(record.nodes):
            self.maker.update(dict.fromkeys(node.outputs, index))
            for key in node.inputs:
                self.readers.setdefault(key, []).append(index)
            paths = owners[index].paths
            if paths not in above:
                above[paths] = list(dict.fromkeys(up for path in paths for up in tags.ancestors(path)))
            for path in above[paths]:
                self.by_path.setdefault(path, []).append(index)

    def region(self, paths: Iterable[str]) -> set[int]:
        """Indices of the nodes that have an owner at or below one of ``paths``."""
        return {index for path in paths for index in self.by_path.get(path, ())}

    def crossings(self, paths: Sequence[str]) -> Iterable[tuple[Key, int, bool]]:
        """``(tensor, node on the other side or -1, whether it leaves)`` for what crosses the region's border."""
        region = self.region(paths)
        for index in sorted(region):
            node, owners, inside = self.nodes[index], self.owners[index].paths, region
            if len(owners) > 1:  # a single owner is why the node is in the region
                others = [
                    owner
                    for owner in owners
                    if not any(tags.is_under(owner, path) or tags.is_under(path, owner) for path in paths)
                ]
                inside = region | self.region(others) if others else region
            for key in node.outputs:
                if key not in self.live:
                    continue
                if key in self.graph_outputs:
                    yield key, -1, True
                for reader in self.readers.get(key, ()):
                    if reader not in inside:
                        yield key, reader, True
            for key in node.inputs:
                source = self.maker.get(key, -1)
                if key in self.live and source not in region:
                    yield key, source, False
