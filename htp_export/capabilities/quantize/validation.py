"""A user's metric of the whole model while a method quantizes a part of it: what accuracy control asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx
import onnx_ir as ir

from htp_export.capabilities.quantize.calibration_data import Samples
from htp_export.editing.submodels import Submodel, in_copy, put_back
from htp_export.errors import InputError
from htp_export.files.parsing import model_from_proto
from htp_export.model.tensor_names import Names
from htp_export.runtime.arrays import Array
from htp_export.runtime.metrics import Metric, measured_metric

__all__ = ["Validation"]

_SLACK = 1e-9


@dataclass(frozen=True)
class Validation:
    """A metric on validation data, of which all runs are in memory.

    Attributes:
        metric: The metric; larger is better.
        samples: The validation data.
        original: The model as it was.
        name: Its name in errors.
    """

    metric: Metric
    samples: Samples
    original: ir.Model
    name: str

    @cached_property
    def feeds(self) -> Sequence[dict[str, Array]]:
        """The inputs of each run."""
        return [dict(run) for run in self.samples]

    @cached_property
    def before(self) -> float:
        """The metric of the model as it was."""
        return self.of(self.original)

    def of(self, model: ir.Model) -> float:
        """The metric of a model."""
        return measured_metric(self.metric, model, self.name, self.feeds)

    def with_part(self, model: ir.Model, part: Submodel, made: onnx.ModelProto) -> float:
        """The metric of a model with what a tool made of a part of it; the model is not changed."""
        copy = model.clone()
        put_back(copy, in_copy(part, model, copy), model_from_proto(made), Names(copy))
        return self.of(copy)

    def budget(self, model: ir.Model, max_drop: float, name: str) -> float:
        """What is left of the drop that a precision of a name allows, after those that were applied before it.

        Raises:
            InputError: If nothing is left.
        """
        left = max_drop - (self.before - self.of(model))
        if left < -_SLACK:
            raise InputError(f"{self._fall(self.of(model))} before {name!r} with max_drop is applied")
        return max(left, 0.0)

    def check(self, model: ir.Model, max_drop: float | None) -> float:
        """The metric of the model with the whole plan; ``max_drop`` is the most by which it may fall.

        Raises:
            InputError: If it falls by more than the plan allows.
        """
        after = self.of(model)
        if max_drop is not None and not self.before - after <= max_drop + _SLACK:
            raise InputError(f"{self._fall(after)} with the whole plan, and max_drop is {max_drop:g}")
        return after

    def _fall(self, after: float) -> str:
        return f"the metric falls from {self.before:g} to {after:g}"
