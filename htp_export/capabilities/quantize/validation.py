"""A user's metric of the whole model while a tool quantizes a part of it: what accuracy control asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import onnx
import onnx_ir as ir

from htp_export.capabilities.quantize.calibration_data import Samples
from htp_export.capabilities.quantize.precisions import Precision
from htp_export.editing.submodels import Submodel, in_copy, put_back
from htp_export.errors import InputError
from htp_export.files.parsing import model_from_proto
from htp_export.model.tensor_names import Names
from htp_export.runtime.arrays import Array
from htp_export.runtime.metrics import Metric, measured_metric

__all__ = ["Validation", "check_metric"]

_SLACK = 1e-9


@dataclass(frozen=True)
class Validation:
    """A metric on validation data, and its value for the model as it was.

    Attributes:
        metric: The metric; larger is better.
        samples: The validation data; all runs are in memory.
        original: The model as it was.
        name: Its name in errors.
    """

    metric: Metric
    samples: Samples
    original: ir.Model
    name: str

    @cached_property
    def feeds(self) -> Sequence[Any]:
        """The inputs of each run."""
        return list[dict[str, Array]](map(dict, self.samples))

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

    def budget(self, model: ir.Model, precision: Precision) -> float:
        """What is left of the drop that a precision allows, after those that were applied before it.

        Raises:
            InputError: If nothing is left.
        """
        assert precision.max_drop is not None
        left = precision.max_drop - (self.before - self.of(model))
        if left < -_SLACK:
            raise InputError(f"{self._fall(self.of(model))} before {precision.name!r} with max_drop is applied")
        return max(left, 0.0)

    def check(self, model: ir.Model, max_drop: float) -> float:
        """The metric of the model with the whole plan.

        Raises:
            InputError: If it falls by more than the plan allows.
        """
        after = self.of(model)
        if not self.before - after <= max_drop + _SLACK:
            raise InputError(f"{self._fall(after)} with the whole plan, and max_drop is {max_drop:g}")
        return after

    def _fall(self, after: float) -> str:
        return f"the metric falls from {self.before:g} to {after:g}"


def check_metric(precisions: Sequence[Precision], metric: Metric | None, validation: object) -> None:
    """Refuse a metric without a rule that needs it, and the reverse.

    Raises:
        InputError: If one is missing.
    """
    controlled = [precision.name for precision in precisions if precision.max_drop is not None]
    if controlled and metric is None:
        raise InputError(f"precision {controlled[0]!r} has max_drop; give the metric that may fall by it")
    if not controlled and (metric is not None or validation is not None):
        raise InputError("a metric and validation data are for rules with max_drop, and the plan has none")
