"""Qualcomm's QNN and QAIRT converters: a file for ``--quantization_overrides``.

``activation_encodings`` and ``param_encodings`` are both there, tensor → a list of encodings, one for each channel.
Integers have ``bitwidth``, ``min`` and ``max`` (``scale`` and ``offset`` are computed from these, where they are not
given), floats have ``dtype`` and ``bitwidth``.
"""

from __future__ import annotations

from typing import Any

from htp_export.capabilities.export_plan.activations import encodings_of
from htp_export.capabilities.export_plan.planned import Encoding, PlannedModel, TargetFile

__all__ = ["plan_file"]

VERSION = "0.6.1"


def plan_file(planned: PlannedModel) -> TargetFile:
    """The encodings as JSON."""
    from htp_export.capabilities.quantize.precisions import Method

    activations, weights = encodings_of(planned, "qnn")
    content: dict[str, object] = {
        "version": VERSION,
        "activation_encodings": {
            name: [{"bitwidth": encoding, "dtype": "float"}] if isinstance(encoding, int) else _integers(encoding)
            for name, encoding in activations.items()
        },
        "param_encodings": {name: _integers(encoding) for name, encoding in weights.items()},
    }
    notes = ["qnn-onnx-converter --input_network MODEL --quantization_overrides FILE --float_fallback"]
    if not planned.ranges and planned.of(Method.STATIC):
        notes.append("without data, activations of integers are left out: the converter calibrates with --input_list")
    if planned.of(Method.WEIGHTS):
        notes.append("weights have a scale for each channel: this file has no blocks")
    return TargetFile(content, (*notes, *planned.subgraph_notes()))


def _integers(encoding: Encoding) -> list[dict[str, Any]]:
    return [
        {
            "bitwidth": encoding.bits,
            "dtype": "int",
            "is_symmetric": str(encoding.symmetric),
            "min": low,
            "max": high,
            "scale": scale,
            "offset": offset,
        }
        for (low, high), scale, offset in zip(encoding.ranges, encoding.scales, encoding.offsets, strict=True)
    ]
