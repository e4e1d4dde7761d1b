"""The two boundaries of a module in an export: of its calls in PyTorch, and of its nodes in the exported graph.

They answer different questions. At the boundary of the *calls* are the tensors that PyTorch passed in and out of them,
also from one call of a module to another call of it. At the boundary of the *nodes* (`htp_export.model.boundaries`) are
the tensors between the region of the module and the rest of the graph: what passes from call to call is inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from htp_export.exporter.capture.calls import NO_CALL
from htp_export.exporter.capture.record import Key, Record
from htp_export.exporter.owners.flow import Flow, varying
from htp_export.format.call_tree import NodeCalls
from htp_export.model.boundaries import Boundaries


@dataclass
class CallBoundary:
    """The captured tensors that passed in and out of the calls of one module, in order of first use and of production.

    Attributes:
        inputs: Tensors that were computed outside of a call and read inside → calls that computed them.
        outputs: Tensors that were computed inside of a call and read outside → calls that read them.
    """

    inputs: dict[Key, set[int]] = field(default_factory=dict)
    outputs: dict[Key, set[int]] = field(default_factory=dict)


def boundaries_of_calls(record: Record, flow: Flow) -> dict[str, CallBoundary]:
    """Return the boundary of the calls of each module that ran.

    Only tensors whose values depend on the model's inputs count, and only operations on which the result depends.
    """
    log, boundaries = record.log, {call.path: CallBoundary() for call in record.log.calls}
    producer = dict.fromkeys(record.inputs, NO_CALL)

    def passes(key: Key, reader: int) -> None:
        source = producer.get(key)
        if source is None or source == reader or key not in flow.live:
            return
        reading, producing = log.chain(reader), log.chain(source)
        for call in reading:
            if call not in producing:
                boundaries[log.calls[call].path].inputs.setdefault(key, set()).add(source)
        for call in producing:
            if call not in reading:
                boundaries[log.calls[call].path].outputs.setdefault(key, set()).add(reader)

    for operation, is_wanted in zip(record.operations, flow.wanted, strict=True):
        if is_wanted:
            for key in operation.inputs:
                passes(key, operation.call)
            producer.update(dict.fromkeys(operation.outputs, operation.call))
    for key in record.outputs:
        passes(key, NO_CALL)
    return boundaries


def boundaries_of_nodes(record: Record, works: Sequence[NodeCalls]) -> Boundaries[Key]:
    """Return the boundaries of the modules' regions in the exported graph, whose nodes do the given works."""
    live = varying(record.nodes, record.graph_inputs)
    nodes = [(node.inputs, node.outputs) for node in record.nodes]
    return Boundaries(nodes, works, live.__contains__, record.graph_outputs)
