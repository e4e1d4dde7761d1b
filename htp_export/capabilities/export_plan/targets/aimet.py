"""AIMET: an encodings file, version 1.0.0, for ``aimet_onnx.quantsim.load_encodings_to_sim``.

``activation_encodings`` and ``param_encodings`` are lists. An entry has ``name``, ``dtype``, ``bw`` and ``enc_type``;
integers have ``is_sym``, ``scale`` and ``offset`` with a number for each channel.
"""

from __future__ import annotations

from typing import Any

from htp_export.capabilities.export_plan.activations import encodings_of
from htp_export.capabilities.export_plan.planned import Encoding, PlannedModel, TargetFile

__all__ = ["plan_file"]

VERSION = "1.0.0"


def plan_file(planned: PlannedModel) -> TargetFile:
    """The encodings as JSON."""
    from htp_export.capabilities.quantize.precisions import Method

    activations, weights = encodings_of(planned, "aimet")
    content: dict[str, object] = {
        "version": VERSION,
        "activation_encodings": [_entry(name, encoding) for name, encoding in activations.items()],
        "param_encodings": [_entry(name, encoding) for name, encoding in weights.items()],
        "excluded_layers": [],
    }
    notes = ["aimet_onnx.quantsim.load_encodings_to_sim(sim, FILE, strict=False)"]
    if not planned.ranges and planned.of(Method.STATIC):
        notes.append("without data, activations of integers are left out: sim.compute_encodings calibrates them")
    if planned.of(Method.WEIGHTS):
        notes.append("weights have a scale for each channel, and no blocks")
    return TargetFile(content, (*notes, *planned.subgraph_notes()))


def _entry(name: str, encoding: Encoding | int) -> dict[str, Any]:
    if isinstance(encoding, int):
        return {"name": name, "dtype": "FLOAT", "bw": encoding, "enc_type": "PER_TENSOR"}
    return {
        "name": name,
        "dtype": "INT",
        "bw": encoding.bits,
        "enc_type": "PER_CHANNEL" if len(encoding.scales) > 1 else "PER_TENSOR",
        "is_sym": encoding.symmetric,
        "scale": list(encoding.scales),
        "offset": list(encoding.offsets),
    }
