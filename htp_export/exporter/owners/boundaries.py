"""The tensors that enter and leave each module: as PyTorch ran it, and as the exported graph has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from htp_export.exporter.capture.calls import NO_CALL
from htp_export.exporter.capture.record import Key, Record
from htp_export.exporter.owners.flow import Flow, varying
from htp_export.format.call_tree import NodeCalls
from htp_export.model.boundaries import Boundaries


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


def exported_boundaries(record: Record, works: Sequence[NodeCalls]) -> Boundaries[Key]:
    """What crosses the boundaries of modules in the exported graph, where its nodes do the work of these."""
    live = varying(record.nodes, record.graph_inputs)
    nodes = [(node.inputs, node.outputs) for node in record.nodes]
    return Boundaries(nodes, works, live.__contains__, record.graph_outputs)
