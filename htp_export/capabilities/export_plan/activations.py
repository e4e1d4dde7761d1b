"""Encodings by tensor, from the plan and from the values that activations take in the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.export_plan.planned import Encoding, PlannedModel, is_float, weight_encodings

if TYPE_CHECKING:
    from htp_export.capabilities.quantize.calibration_data import Samples
    from htp_export.capabilities.quantize.precisions import Precision

__all__ = ["encodings_of", "measured_ranges"]


def encodings_of(planned: PlannedModel, tool: str) -> tuple[dict[str, Encoding | int], dict[str, Encoding]]:
    """The encodings of activations and of weights, for a tool that takes both.

    Raises:
        InputError: If the plan has a precision that such a tool does not know.
    """
    from htp_export.capabilities.quantize.precisions import Method

    planned.check_methods(tool, (Method.STATIC, Method.WEIGHTS, Method.CAST, Method.KEEP))
    return _activation_encodings(planned), weight_encodings(planned, (Method.STATIC, Method.WEIGHTS))


def _activation_encodings(planned: PlannedModel) -> dict[str, Encoding | int]:
    """Name of each tensor of floats that the plan is about → its encoding, or its bits where it stays a float.

    A tensor has the precision of the node that makes it; an input of the model has that of the nodes that read it, if
    they all have the same. Integers without a known range are left out.
    """
    from htp_export.capabilities.quantize.precisions import Method

    found: dict[str, Encoding | int] = {}
    for value, precision in _planned_tensors(planned):
        name, bits = str(value.name), precision.activation_bits
        if precision.method != Method.STATIC:
            found[name] = bits
        elif name in planned.ranges:
            low, high = planned.ranges[name]
            found[name] = Encoding.of_range(low, high, bits, precision.symmetric)
    return found


def _planned_tensors(planned: PlannedModel) -> Iterator[tuple[ir.Value, Precision]]:
    for value in planned.tagged.model.graph.inputs:
        reading = {planned.precisions.get(use.node) for use in value.uses()}
        precision = reading.pop() if len(reading) == 1 else None
        if precision is not None and is_float(value):
            yield value, precision
    for node in planned.nodes:
        precision = planned.precisions.get(node)
        if precision is None:
            continue
        for value, is_known in zip(node.outputs, planned.float_outputs[node], strict=True):
            if value.name and is_known:
                yield value, precision


def measured_ranges(planned: PlannedModel, samples: Samples) -> dict[str, tuple[float, float]]:
    """Name of each tensor whose activations the plan quantizes → its smallest and its largest value.

    Args:
        planned: The plan.
        samples: The inputs of the runs.

    Raises:
        InputError: If they do not fit the model.
        OnnxRuntimeError: If ONNX Runtime cannot run the model.
    """
    from htp_export.capabilities.quantize.calibration_data import activations
    from htp_export.capabilities.quantize.precisions import Method

    wanted = [str(value.name) for value, precision in _planned_tensors(planned) if precision.method == Method.STATIC]
    ranges: dict[str, tuple[float, float]] = {}
    with activations(planned.tagged.model, "the model", samples, wanted) as runs:
        for values in runs:
            for name, array in values.items():
                if array.size:
                    low, high = ranges.get(name, (np.inf, -np.inf))
                    ranges[name] = (min(low, float(array.min())), max(high, float(array.max())))
    return ranges
