"""Olive: the passes of a workflow, for ``olive run --config``.

Each precision is a pass with the names of its nodes. ``OnnxBlockWiseRtnQuantization`` quantizes only
nodes in ``nodes_to_include``, and of these, ``MatMul`` with a two-dimensional initializer and
``Gather``.
"""

from __future__ import annotations

import onnx_ir as ir

from htp_export.capabilities.quantize.method import Precision
from htp_export.capabilities.quantize.plan_exporting import (
    IN_BLOCKS,
    LEVELS,
    Expressed,
    PlannedModel,
    TargetFile,
    block_fields,
    names,
)

EXPRESSED: Expressed = {
    "cast": {"activation": ("float16",)},
    "dynamic": {},
    "weights": {
        "activation": ("float32",),
        "algorithm": ("default", "rtn"),
        "accuracy_level": LEVELS,
    },
}


def plan_file(planned: PlannedModel) -> TargetFile:
    """The workflow as JSON, without its ``input_model``."""
    steps = [
        _pass(planned, precision, nodes)
        for method in EXPRESSED
        for precision, nodes in planned.of(method).items()
    ]
    passes = {f"step{number}": step for number, step in enumerate(filter(None, steps), 1)}
    notes = ["olive run --config FILE -m MODEL.onnx -o FOLDER"]
    return TargetFile(
        {"passes": passes}, (*notes, *planned.block_notes("Olive"), *planned.subgraph_notes())
    )


def _pass(
    planned: PlannedModel, precision: Precision, nodes: list[ir.Node]
) -> dict[str, object] | None:
    """The pass for a precision; None without weights in blocks: an empty list means all nodes."""
    if precision.method == "cast":
        return {
            "type": "OnnxFloatToFloat16",
            "keep_io_types": True,
            "node_block_list": names(planned.named_nodes_without(nodes)),
        }
    if precision.method == "weights":
        included = names(
            use.node for use in planned.weighted(nodes) if use.node.op_type in IN_BLOCKS
        )
        if not included:
            return None
        return {
            "type": "OnnxBlockWiseRtnQuantization",
            **block_fields(precision),
            "nodes_to_include": included,
        }
    return {
        "type": "OnnxDynamicQuantization",
        "precision": precision.weight,
        "per_channel": precision.per_channel,
        "reduce_range": precision.reduce_range,
        "quant_preprocess": False,  # it would rename nodes
        "nodes_to_quantize": names(nodes),
    }
