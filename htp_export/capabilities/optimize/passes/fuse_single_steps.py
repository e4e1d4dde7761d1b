"""Softmax, log-softmax, GELU and normalizations that a model computes in single steps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.registry import NodePass, changed, decline, register
from htp_export.capabilities.optimize.single_steps import VISITED, Steps, held_by, steps_at
from htp_export.editing.editing import add_constant, replace

_SINCE: Mapping[str, int] = {
    "Softmax": 13,
    "LogSoftmax": 13,
    "LayerNormalization": 17,
    "Gelu": 20,
    "RMSNormalization": 23,
}
"""Operator → the first opset with it; of softmax, the first in which it has one axis."""

_PRECISE = (ir.DataType.FLOAT, ir.DataType.DOUBLE)
"""Types in which the steps and the operator agree; the steps round to the type one by one."""


@register("fuse_single_steps", level="tolerant")
class FuseSingleSteps(NodePass):
    """Fuses softmax, log-softmax, GELU, layer and RMS norm that are written in single steps.

    The operators are ONNX's own. Nodes that other nodes, outputs or modules need stay, and so does
    everything in float16, where the steps round to another result than the operator.
    """

    operators = VISITED

    def rewrite(self, node: ir.Node) -> bool:
        steps = steps_at(node, self.known)
        if steps is None:
            return False
        why = steps.why or self._precision(steps) or held_by(steps) or self._missing(steps)
        if why:
            return decline(steps.kind, steps.nodes, why)
        last = steps.nodes[-1]
        new = self._operator(steps)
        replace(last, [new])
        return changed(steps.kind, last)

    def _operator(self, steps: Steps) -> ir.Node:
        """The operator that computes the steps."""
        inputs = [steps.source]
        if "Normalization" in steps.operator:
            inputs.append(steps.scale if steps.scale is not None else self._ones(steps))
        if steps.bias is not None:
            inputs.append(steps.bias)
        return ir.node(steps.operator, inputs, dict(steps.attributes))

    def _ones(self, steps: Steps) -> ir.Value:
        """A weight for a normalization without one, which the operator requires."""
        shape, dtype = self.known.shape(steps.source), self.known.dtype(steps.source)
        assert shape is not None
        assert dtype is not None
        # `steps_at` declines open sizes
        sizes = [int(str(size)) for size in shape[int(steps.attributes["axis"]) :]]
        name = f"{steps.nodes[-1].outputs[0].name}_ones"
        return add_constant(self.graph, np.ones(sizes, dtype.numpy()), name)

    def _precision(self, steps: Steps) -> str:
        """Why the element type prevents the operator; empty if it does not."""
        dtype = self.known.dtype(steps.source)
        if dtype in _PRECISE:
            return ""
        if dtype is None:
            return "the element type is not known"
        return f"in {dtype.name}, each step rounds, so that the operator differs by more than 1e-5"

    def _missing(self, steps: Steps) -> str:
        """Why the opset does not have the operator; empty if it has."""
        opset, since = self.graph.opset_imports.get("", 1), _SINCE[steps.operator]
        if opset >= since:
            return ""
        if "Softmax" in steps.operator:
            rank = self.known.rank(steps.source) or 0
            if steps.attributes["axis"] == rank - 1:
                return ""
            return f"{steps.operator} of another axis than the last one needs opset {since}"
        return f"{steps.operator} needs opset {since}, and the model has {opset}"
