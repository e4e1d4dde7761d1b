"""GELU and RMS norm in single steps, for opsets without these operators, in ONNX Runtime."""

from __future__ import annotations

import onnx_ir as ir

from htp_export.capabilities.optimize.passes.fuse_single_steps import FuseSingleSteps
from htp_export.capabilities.optimize.registry import register
from htp_export.capabilities.optimize.single_steps import Steps

_CONTRIB = "com.microsoft"


@register("fuse_single_steps_for_onnxruntime", level="fused")
class FuseSingleStepsForOnnxruntime(FuseSingleSteps):
    """Fuses GELU and RMS norm in single steps into ONNX Runtime's operators in older opsets."""

    def _operator(self, steps: Steps) -> ir.Node:
        if steps.operator == "Gelu":
            is_tanh = steps.attributes["approximate"] == "tanh"
            self.graph.opset_imports.setdefault(_CONTRIB, 1)
            operator = "FastGelu" if is_tanh else "Gelu"
            return ir.node(operator, [steps.source], domain=_CONTRIB)
        scale = steps.scale if steps.scale is not None else self._ones(steps)
        attributes = {**steps.attributes, "stash_type": 1}
        return ir.node("SimplifiedLayerNormalization", [steps.source, scale], attributes)

    def _missing(self, steps: Steps) -> str:
        missing = super()._missing(steps)
        if not missing:
            return "fuse_single_steps writes ONNX's own operator"
        return "" if steps.operator in ("Gelu", "RMSNormalization") else missing
