"""ONNX Runtime: calls of ``onnxruntime.quantization``, each on the result of the one before.

An empty ``nodes_to_quantize`` means all nodes. ``MatMulNBitsQuantizer`` ignores
``nodes_to_include``, so ``nodes_to_exclude`` lists all other nodes, as ``node_block_list`` of
``convert_float_to_float16`` does.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from htp_export.capabilities.quantize.calibrating import CALIBRATIONS
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
from htp_export.capabilities.quantize.static_part import TYPES

EXPRESSED: Expressed = {
    "cast": {"activation": ("float16",)},
    "static": {},
    "dynamic": {},
    "weights": {"activation": ("float32",), "algorithm": ("default",), "accuracy_level": LEVELS},
}

_FUNCTIONS = {
    # first: quantizers rename nodes
    "cast": "onnxruntime.transformers.float16.convert_float_to_float16",
    "static": "onnxruntime.quantization.quantize_static",
    "dynamic": "onnxruntime.quantization.quantize_dynamic",
    "weights": "onnxruntime.quantization.matmul_nbits_quantizer.MatMulNBitsQuantizer",
}


def plan_file(planned: PlannedModel) -> TargetFile:
    """The calls as JSON, with types and methods by name, as in ``QuantType["QInt8"]``."""
    steps = [
        {"function": function, "arguments": _arguments(planned, precision, nodes)}
        for method, function in _FUNCTIONS.items()
        for precision, nodes in planned.of(method).items()
    ]
    notes = [
        "call each function with its arguments, on the result of the one before; quantize_static takes data, too"
    ]
    return TargetFile(
        {"steps": steps}, (*notes, *planned.block_notes("ONNX Runtime"), *planned.subgraph_notes())
    )


def _arguments(planned: PlannedModel, precision: Precision, nodes: list[ir.Node]) -> dict[str, Any]:
    if precision.method == "cast":
        return {"keep_io_types": True, "node_block_list": names(planned.named_nodes_without(nodes))}
    if precision.method == "weights":
        excluded = names(planned.named_nodes_without(nodes))
        return {
            **block_fields(precision),
            "op_types_to_quantize": list(IN_BLOCKS),
            "nodes_to_exclude": excluded,
        }
    arguments = {
        "weight_type": TYPES[precision.weight],
        "per_channel": precision.per_channel,
        "reduce_range": precision.reduce_range,
        "nodes_to_quantize": names(nodes),
    }
    if precision.method == "dynamic":
        return arguments
    options = {"ActivationSymmetric": precision.symmetric}
    if "16" in precision.activation:  # ONNX's own operators have 16 bits from opset 21 on
        options["UseQDQContribOps"] = True
    calibration, activation = CALIBRATIONS[precision.calibration], TYPES[precision.activation]
    return {
        **arguments,
        "activation_type": activation,
        "calibrate_method": calibration,
        "extra_options": options,
    }
