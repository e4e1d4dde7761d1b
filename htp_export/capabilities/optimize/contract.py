"""What every pass ensures; what it requires is stated by the pass: see ``NodePass``."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.capabilities.optimize.merging import Snapshot
from htp_export.errors import HtpExportError

__all__ = ["check_ensured"]


def check_ensured(before: Snapshot, after: Snapshot) -> None:
    """Check a graph after a pass: inputs and outputs of the model keep their names, and every tensor has a producer.

    The level of a pass, which it ensures too, is checked by ``optimize(verify=True)``.

    Raises:
        HtpExportError: The pass broke the rule; the message names the tensor.
    """
    for what, names, names_after in (
        ("inputs", before.input_names, after.input_names),
        ("outputs", before.output_names, after.output_names),
    ):
        if names != names_after:
            raise HtpExportError(f"the {what} of the model were {list(names)}, and are {list(names_after)}")
    for node, seen in after.nodes.items():
        for value in seen.inputs:
            if value is not None and not _is_available(value, after):
                raise HtpExportError(f"{node.op_type} {node.name!r} reads {value.name!r}, which has no producer")
    for results in after.results.values():
        for value in results:
            if not _is_available(value, after):
                raise HtpExportError(f"the output {value.name!r} has no producer")


def _is_available(value: ir.Value, after: Snapshot) -> bool:
    """Whether a tensor is computed by a node of the model, an input of a graph, or an initializer."""
    return value in after.makers or value.is_graph_input() or value.is_initializer()
