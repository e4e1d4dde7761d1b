"""Whether outputs before and after a pass agree with its level, in ONNX Runtime with its own optimisations off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.optimize.registry import Level
from htp_export.errors import FileError, InputError
from htp_export.runtime.arrays import Array, nan_in
from htp_export.runtime.inputs import Inputs
from htp_export.runtime.sessions import RunnableModel, Session, as_written, temporary_folder

__all__ = ["TOLERANCE", "OutputCheck"]

TOLERANCE: Mapping[Level, float] = {"exact": 0.0, "tolerant": 1e-5, "fused": 1e-3}
"""Largest difference of an output, relative to its largest value if that is more than 1."""

_SIZES = (2, 8, 5, 3, 7)  # of open dimensions, in order


class OutputCheck:
    """Compares outputs of a model with what they were before each pass, and at first.

    Without ``inputs`` they are random: floats of a normal distribution, integers 0 and 1, and booleans half of them
    true. The largest difference so far is ``max_abs``; ``nan`` names outputs with NaN, of which no difference is known.

    Raises:
        InputError: If the model cannot be run on the inputs.
    """

    def __init__(self, model: ir.Model, inputs: Mapping[str, Any] | None = None) -> None:
        if inputs is None:
            inputs = Inputs.of(model).random(open_sizes=_SIZES, true=0.5).arrays
        self._inputs = {name: np.asarray(array) for name, array in inputs.items()}
        try:
            self._expected = self._latest = self._outputs(model)
        except FileError:
            raise
        except Exception as error:
            raise InputError(
                f"the model does not run in ONNX Runtime, so that nothing can be verified: {error}"
            ) from error
        self.nan = tuple(nan_in(self._expected))
        self.max_abs = 0.0

    def fault(self, model: ir.Model, level: Level) -> str:
        """Why the model after a pass does not agree with the level of the pass; empty if it does."""
        try:
            outputs = self._outputs(model)
        except Exception as error:
            return f"it does not run any more: {str(error).splitlines()[0][:200]}"
        for name, expected in self._latest.items():
            if name not in outputs or outputs[name].shape != expected.shape or outputs[name].dtype != expected.dtype:
                return f"output {name!r} has another shape or dtype"
            off, scale = _distance(expected, outputs[name])
            if not off <= TOLERANCE[level] * max(1.0, scale):
                return f"output {name!r} is off by {off:.3g}, more than {level} allows"
        self._latest = outputs
        self.max_abs = max((_distance(array, outputs[name])[0] for name, array in self._expected.items()), default=0.0)
        return ""

    def _outputs(self, model: ir.Model) -> dict[str, Array]:
        with temporary_folder() as folder:
            session = Session(RunnableModel.of(model, "the model", folder), changes=as_written(threads=1))
            return session.run(self._inputs)


def _distance(expected: Array, actual: Array) -> tuple[float, float]:
    """The largest difference, infinite where only one of two numbers is finite; and the largest finite number."""
    if expected.dtype.kind in "biuSUO":
        return (0.0 if np.array_equal(expected, actual) else float("inf")), 0.0
    a, b = expected.astype(np.float64), actual.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        off = np.where(same, 0.0, np.abs(a - b))
    off = np.where(np.isnan(off), np.inf, off)
    return float(off.max(initial=0.0)), float(np.abs(a[np.isfinite(a)]).max(initial=0.0))
