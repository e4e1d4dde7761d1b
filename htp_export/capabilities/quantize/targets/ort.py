"""ONNX Runtime: arguments of the functions of ``onnxruntime.quantization``, to be called one after another.

``quantize_static`` and ``quantize_dynamic`` quantize the nodes of ``nodes_to_quantize`` alone; if the list is empty,
all of them. ``nodes_to_include`` of ``MatMulNBitsQuantizer`` adds to the operators that it quantizes and restricts
nothing, so that ``nodes_to_exclude`` has all other nodes, as ``node_block_list`` of ``convert_float_to_float16``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from htp_export.capabilities.quantize.methods.weights import Blocks
from htp_export.capabilities.quantize.planned import PlannedModel, TargetFile, names
from htp_export.errors import InputError

if TYPE_CHECKING:
    from htp_export.capabilities.quantize.precisions import Precision

__all__ = ["plan_file"]

_TYPES = {"int8": "QInt8", "uint8": "QUInt8", "int16": "QInt16", "uint16": "QUInt16"}
_CALIBRATIONS = {"minmax": "MinMax", "entropy": "Entropy", "percentile": "Percentile"}
_IN_BLOCKS = ("MatMul", "Gather")


def plan_file(planned: PlannedModel) -> TargetFile:
    """The calls as JSON: types and methods stand there by name, as in ``QuantType["QInt8"]``."""
    planned.check_methods("ort", "cast", "static", "dynamic", "weights", "keep")
    steps = [  # float16 first: quantizers give the nodes that they make other names
        *(_float16(planned, precision, nodes) for precision, nodes in planned.of("cast").items()),
        *(_static(precision, nodes) for precision, nodes in planned.of("static").items()),
        *(_dynamic(precision, nodes) for precision, nodes in planned.of("dynamic").items()),
        *(_blocks(planned, precision, nodes) for precision, nodes in planned.of("weights").items()),
    ]
    notes = ["call each function with its arguments, on the result of the one before; quantize_static takes data, too"]
    weighted = [use.node.op_type for nodes in planned.of("weights").values() for use in planned.weighted(nodes)]
    left_out = [kind for kind in weighted if kind not in _IN_BLOCKS]
    if left_out:
        kinds = ", ".join(sorted(set(left_out)))
        notes.append(f"{len(left_out)} nodes keep their weights: ONNX Runtime has no blocks in {kinds}")
    return TargetFile({"steps": steps}, (*notes, *planned.subgraph_notes()))


def _step(function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"function": function, "arguments": dict(arguments)}


def _static(precision: Precision, nodes: list[ir.Node]) -> dict[str, Any]:
    arguments = {
        "activation_type": _TYPES[precision.activation],
        "weight_type": _TYPES[precision.weight],
        "per_channel": precision.per_channel,
        "reduce_range": precision.reduce_range,
        "calibrate_method": _CALIBRATIONS[precision.calibration],
        "nodes_to_quantize": names(nodes),
        "extra_options": {"ActivationSymmetric": precision.symmetric},
    }
    if "16" in precision.activation:  # ONNX's own operators have 16 bits from opset 21 on
        arguments["extra_options"] = {"ActivationSymmetric": precision.symmetric, "UseQDQContribOps": True}
    return _step("onnxruntime.quantization.quantize_static", arguments)


def _dynamic(precision: Precision, nodes: list[ir.Node]) -> dict[str, Any]:
    arguments = {
        "weight_type": _TYPES[precision.weight],
        "per_channel": precision.per_channel,
        "reduce_range": precision.reduce_range,
        "nodes_to_quantize": names(nodes),
    }
    return _step("onnxruntime.quantization.quantize_dynamic", arguments)


def _blocks(planned: PlannedModel, precision: Precision, nodes: list[ir.Node]) -> dict[str, Any]:
    if precision.algorithm != "default":
        raise InputError(f"rules for ort have the algorithm 'default', not {precision.algorithm!r} ({precision})")
    if precision.format != "default":
        raise InputError(f"rules for ort have the format 'default', not {precision.format!r} ({precision})")
    arguments = {
        "bits": precision.bits,
        "block_size": precision.block_size,
        "is_symmetric": precision.symmetric,
        "accuracy_level": Blocks(precision).accuracy_level,
        "op_types_to_quantize": list(_IN_BLOCKS),
        "nodes_to_exclude": names(planned.others(nodes)),
    }
    return _step("onnxruntime.quantization.matmul_nbits_quantizer.MatMulNBitsQuantizer", arguments)


def _float16(planned: PlannedModel, precision: Precision, nodes: list[ir.Node]) -> dict[str, Any]:
    if precision.activation != "float16":
        raise InputError(f"onnxruntime converts to float16 alone, and not to {precision}")
    arguments = {"keep_io_types": True, "node_block_list": names(planned.others(nodes))}
    return _step("onnxruntime.transformers.float16.convert_float_to_float16", arguments)
