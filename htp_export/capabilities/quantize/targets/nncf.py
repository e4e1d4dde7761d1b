"""NNCF: arguments of ``nncf.quantize`` and ``nncf.compress_weights``.

Both quantize all operators that they support, except for the nodes that an ``nncf.IgnoredScope``
names.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from htp_export.capabilities.quantize.method import Precision
from htp_export.capabilities.quantize.plan_exporting import (
    Expressed,
    PlannedModel,
    TargetFile,
    names,
)

EXPRESSED: Expressed = {
    "static": {"activation": ("int8", "uint8"), "weight": ("int8", "uint8")},
    "weights": {"activation": ("float32",), "algorithm": ("default",)},
}


def plan_file(planned: PlannedModel) -> TargetFile:
    """The arguments as JSON: ``ignored_scope`` has the arguments of ``nncf.IgnoredScope``."""
    static, weights = planned.of("static"), planned.of("weights")
    content: dict[str, object] = {}
    if static:
        chosen = [node for nodes in static.values() for node in nodes]
        symmetric = all(precision.symmetric for precision in static)
        content["quantize"] = {
            "preset": "performance" if symmetric else "mixed",
            "ignored_scope": _all_but(planned, chosen),
        }
    content["compress_weights"] = [
        {**_mode(precision), "ignored_scope": _all_but(planned, nodes)}
        for precision, nodes in sorted(weights.items(), key=lambda item: -item[0].bits)
    ]
    notes = [
        "nncf.quantize(model, dataset, preset=nncf.QuantizationPreset(p), ignored_scope=nncf.IgnoredScope(**s))"
    ]
    if weights:
        notes.append(
            "nncf.compress_weights(model, mode=nncf.CompressWeightsMode(m), ...), for each, in this order"
        )
    if any(precision.bits == 4 for precision in weights):
        notes.append(
            "NNCF does not add the opset import of com.microsoft for int4: onnx refuses its result"
        )
    if len(static) > 1:
        notes.append(
            "NNCF quantizes all static nodes alike: fields of single rules are not written"
        )
    return TargetFile(content, (*notes, *planned.subgraph_notes()))


def _mode(precision: Precision) -> dict[str, Any]:
    symmetry = "sym" if precision.symmetric else "asym"
    if precision.bits == 8:
        return {"mode": f"int8_{symmetry}"}  # accepts no further arguments
    group = {"group_size": precision.block_size, "ratio": 1.0, "all_layers": True}
    return {"mode": f"int4_{symmetry}", **group}


def _all_but(planned: PlannedModel, chosen: list[ir.Node]) -> dict[str, object]:
    """The scope of all nodes that are not chosen.

    It is not validated: NNCF has no nodes for constants, and renames nodes that it compressed in an
    earlier call.
    """
    ignored = names(
        node for node in planned.named_nodes_without(chosen) if node.op_type != "Constant"
    )
    return {"names": ignored, "validate": False}
