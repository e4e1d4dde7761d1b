"""The number that a user gives to the outputs of a model, such as its accuracy, and the runs that it is computed of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.files.filesystem import temporary_folder
from htp_export.process.user_code import user_code
from htp_export.runtime.arrays import Array, nan_in
from htp_export.runtime.sessions import OptionChanges, RunnableModel, Session, SessionSettings

Outputs: TypeAlias = Sequence[Mapping[str, Array]]
Metric: TypeAlias = Callable[[Outputs], float]
"""Called with the outputs of the model, name → array, for each of the inputs; larger is better."""


def outputs_of(
    runnable: RunnableModel, feeds: Iterable[Mapping[str, Array]], settings: SessionSettings
) -> list[dict[str, Array]]:
    """The outputs of a model for each of the inputs, as an application that runs the file gets them.

    All optimisations are on but those of layouts: many models run, and a crash of one would end all.
    """
    import onnxruntime

    level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    session = Session(runnable, settings, OptionChanges({"graph_optimization_level": level}))
    return [session.run(feed) for feed in feeds]


def metric_value(metric: Metric, outputs: Outputs) -> float:
    """Return the number that a metric gives to outputs; an InputError says which output has NaN."""
    with user_code("the metric"):
        found = metric(outputs)
    try:
        number = float(found)
    except (TypeError, ValueError) as error:
        raise InputError(f"the metric returned {found!r}, which is no number") from error
    if math.isnan(number):
        listed = (f"output {name!r} of run {k} has NaN" for k, run in enumerate(outputs) for name in nan_in(run))
        raise InputError(f"the metric returned {number}: {next(listed, 'the outputs that it was given have none')}")
    return number


def measured_metric(metric: Metric, model: ir.Model, name: str, feeds: Iterable[Mapping[str, Array]]) -> float:
    """Return the number that a metric gives to a model, which runs on the CPU; ``name`` is its name in errors."""
    with temporary_folder() as folder:
        return metric_value(metric, outputs_of(RunnableModel.of(model, name, folder), feeds, SessionSettings()))
