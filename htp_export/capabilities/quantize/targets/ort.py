"""ONNX Runtime: arguments of the functions of ``onnxruntime.quantization``, to be called one after another.

``quantize_static`` and ``quantize_dynamic`` quantize the nodes of ``nodes_to_quantize`` alone; if the list is empty,
all of them. ``nodes_to_include`` of ``MatMulNBitsQuantizer`` adds to the operators that it quantizes and restricts
nothing, so that ``nodes_to_exclude`` has all other nodes, as ``node_block_list`` of ``convert_float_to_float16``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from htp_export.capabilities.quantize.methods.static import CALIBRATIONS, TYPES
from htp_export.capabilities.quantize.plan_exporting import (
    IN_BLOCKS,
    Expressed,
    PlannedModel,
    TargetFile,
    names,
    value_of,
)

if TYPE_CHECKING:
    from htp_export.capabilities.quantize.method import Precision

EXPRESSED: Expressed = {
    "cast": {"activation": ("float16",)},
    "static": {},
    "dynamic": {},
    "weights": {"activation": ("float32",), "algorithm": ("default",), "accuracy_level": (None, 0, 1, 2, 3, 4)},
}


def plan_file(planned: PlannedModel) -> TargetFile:
    """The calls as JSON: types and methods stand there by name, as in ``QuantType["QInt8"]``."""
    steps = [  # float16 first: quantizers give the nodes that they make other names
        *(_float16(planned, precision, nodes) for precision, nodes in planned.of("cast").items()),
        *(_static(precision, nodes) for precision, nodes in planned.of("static").items()),
        *(_dynamic(precision, nodes) for precision, nodes in planned.of("dynamic").items()),
        *(_blocks(planned, precision, nodes) for precision, nodes in planned.of("weights").items()),
    ]
    notes = ["call each function with its arguments, on the result of the one before; quantize_static takes data, too"]
    return TargetFile({"steps": steps}, (*notes, *planned.block_notes("ONNX Runtime"), *planned.subgraph_notes()))


def _step(function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"function": function, "arguments": dict(arguments)}


def _static(precision: Precision, nodes: list[ir.Node]) -> dict[str, Any]:
    arguments = {
        "activation_type": TYPES[precision.activation],
        "weight_type": TYPES[precision.weight],
        "per_channel": precision.per_channel,
        "reduce_range": precision.reduce_range,
        "calibrate_method": CALIBRATIONS[precision.calibration],
        "nodes_to_quantize": names(nodes),
        "extra_options": {"ActivationSymmetric": precision.symmetric},
    }
    if "16" in precision.activation:  # ONNX's own operators have 16 bits from opset 21 on
        arguments["extra_options"] = {"ActivationSymmetric": precision.symmetric, "UseQDQContribOps": True}
    return _step("onnxruntime.quantization.quantize_static", arguments)


def _dynamic(precision: Precision, nodes: list[ir.Node]) -> dict[str, Any]:
    arguments = {
        "weight_type": TYPES[precision.weight],
        "per_channel": precision.per_channel,
        "reduce_range": precision.reduce_range,
        "nodes_to_quantize": names(nodes),
    }
    return _step("onnxruntime.quantization.quantize_dynamic", arguments)


def _blocks(planned: PlannedModel, precision: Precision, nodes: list[ir.Node]) -> dict[str, Any]:
    arguments = {
        "bits": precision.bits,
        "block_size": precision.block_size,
        "is_symmetric": precision.symmetric,
        "accuracy_level": value_of(precision, "accuracy_level"),
        "op_types_to_quantize": list(IN_BLOCKS),
        "nodes_to_exclude": names(planned.others(nodes)),
    }
    return _step("onnxruntime.quantization.matmul_nbits_quantizer.MatMulNBitsQuantizer", arguments)


def _float16(planned: PlannedModel, precision: Precision, nodes: list[ir.Node]) -> dict[str, Any]:
    arguments = {"keep_io_types": True, "node_block_list": names(planned.others(nodes))}
    return _step("onnxruntime.transformers.float16.convert_float_to_float16", arguments)
