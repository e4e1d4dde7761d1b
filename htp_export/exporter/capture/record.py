"""What a capture hands on: operations as PyTorch ran them, and what became of their tensors.

Both exporters fill the same record. Operations are those of the exporter's own first graph (ONNX nodes before any
optimisation under dynamo, traced ATen operations under TorchScript), where each belongs to exactly one call.
Tensors are named by any hashable key; `Record.final` says under which key the exported graph still has each.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from htp_export.exporter.capture.calls import NO_CALL, CallLog, CallTensors
from htp_export.format.reasons import Reason

Key = Hashable


@dataclass(slots=True)
class Operation:
    """One operation as PyTorch ran it."""

    call: int  # index of the call that ran it, ``NO_CALL`` where nothing says
    inputs: tuple[Key, ...]  # keys of the tensors it reads
    outputs: tuple[Key, ...]  # keys of the tensors it makes
    shape_only: bool = False  # whether its result depends on shapes alone (``Shape``, ``aten::size``)
    # Whether it computes a size of sizes, which torch does once for all calls that compute the same
    symbolic: bool = False


@dataclass(slots=True)
class Node:
    """One node of the exported graph, or of a body inside it."""

    inputs: tuple[Key, ...]  # keys of the tensors it reads, those that its bodies return included
    outputs: tuple[Key, ...]  # keys of the tensors it makes
    hint: int = NO_CALL  # index of the call that other evidence names, or ``NO_CALL``
    evidence: Reason = Reason.SCOPE  # which evidence that is: ``scope``, ``parameters`` or ``flow``
    shape_only: bool = False  # as in `Operation`


@dataclass
class Record:
    """Everything that one export told about its modules."""

    log: CallLog  # the calls
    operations: list[Operation] = field(default_factory=list)  # what PyTorch ran, in order
    # Calls that did something which the captured graph does not have, because nothing needed it
    dead: set[int] = field(default_factory=set)
    # Call → other calls to which work of it was given, because the tensor that it made is not in the captured graph: a
    # view of a tensor that was changed afterwards
    moved: dict[int, set[int]] = field(default_factory=dict)
    # Call → the tensors that enter and leave it; a key is None if the tensor was not captured
    call_tensors: dict[int, CallTensors] = field(default_factory=dict)
    inputs: set[Key] = field(default_factory=set)  # keys of the captured graph's inputs whose values the user gives
    outputs: list[Key] = field(default_factory=list)  # keys of the tensors that the captured graph returns
    # For a captured tensor, its key in the exported graph; absent where no tensor of it is left
    final: dict[Key, Key] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)  # the exported graph's nodes, in order, bodies included
    # Keys of the exported graph's inputs whose values the user gives
    graph_inputs: set[Key] = field(default_factory=set)
    graph_outputs: set[Key] = field(default_factory=set)  # keys of the tensors that the exported graph returns
