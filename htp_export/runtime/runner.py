"""Runs of models: any of their tensors, times that can be compared, and the number that a user's metric gives."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
import onnx_ir as ir

from htp_export.errors import InputError, OnnxRuntimeError
from htp_export.files.data_files import check_data
from htp_export.files.filesystem import temporary_folder
from htp_export.process.user_code import user_code
from htp_export.runtime.arrays import Array, nan_in, to_ort
from htp_export.runtime.sessions import (
    OptionChanges,
    RunnableModel,
    Session,
    SessionSettings,
    as_written,
)

# what is smaller stays in the model: shape inference reads it, and sharing saves nothing
_SMALL_BYTES = 1024
_NO_FILE = "weights"


class Runner:
    """Runs a model and returns any of its tensors.

    ONNX Runtime uses the weights in the user's memory, or maps their files. With ``SessionOptions``
    of the user, which would keep references to them, weights in memory are copied into the model.
    Optimisation is off. The model is not changed unless ``use_up``.
    """

    def __init__(
        self, model: ir.Model, name: str, settings: SessionSettings, *, use_up: bool = False
    ) -> None:
        self._settings = settings
        self._outputs = frozenset(value.name for value in model.graph.outputs)
        if settings.options is not None:
            files = contextlib.ExitStack()
            weakref.finalize(self, files.close)
            runnable = RunnableModel.of(model, name, files.enter_context(temporary_folder()))
            if isinstance(runnable.source, Path):
                runnable = replace(
                    runnable, source=runnable.source.read_bytes(), folder=runnable.source.parent
                )
            self._model = runnable
        else:
            self._model = _sharing_weights(model if use_up else model.clone(), name)

    def run(self, feed: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        """Return the values of tensors by name: outputs of the model, or of any node of its main graph."""
        with self.opened(names) as run:
            return run(feed)

    @contextlib.contextmanager
    def opened(
        self, names: Sequence[str]
    ) -> Iterator[Callable[[Mapping[str, Array]], dict[str, Array]]]:
        """Load the model once, for several runs that return the same tensors of the main graph."""
        names = list(dict.fromkeys(names))
        assert isinstance(self._model.source, bytes)
        source = self._model.source + _more_outputs(
            name for name in names if name not in self._outputs
        )
        with _weights_folder(self._model) as folder:
            session = Session(
                replace(self._model, source=source, folder=folder), self._settings, as_written()
            )

            def run(feed: Mapping[str, Array]) -> dict[str, Array]:
                results = session.run(
                    {name: feed[name] for name in session.inputs if name in feed}, names
                )
                no_tensor = next(
                    (name for name, array in results.items() if not isinstance(array, np.ndarray)),
                    None,
                )
                if no_tensor is not None:
                    raise OnnxRuntimeError(self._model.name, "run", f"{no_tensor!r} is no tensor")
                return results

            yield run


def _sharing_weights(model: ir.Model, name: str) -> RunnableModel:
    """Put the large weights of a model in memory beside it; the model, which is used up, says that they are in a file.

    Nothing is read of that file. Weights in files, ONNX Runtime maps itself.
    """
    tensors = (
        value.const_value for graph in model.graphs() for value in graph.initializers.values()
    )
    files = [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]
    check_data(files)
    folder = os.fspath(files[0].base_dir) if files else ""
    location = os.fspath(files[0].location) if files else _NO_FILE
    weights: dict[str, Any] = {}
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.nbytes <= _SMALL_BYTES:
            continue
        # numpy lays these out in another way
        if tensor.dtype == ir.DataType.STRING or tensor.dtype.bitwidth < 8:
            continue
        if isinstance(tensor, ir.ExternalTensor) and os.fspath(tensor.base_dir) == folder:
            continue
        weights[str(value.name)] = to_ort(tensor.numpy(), tensor.dtype)
        shape = ir.Shape(tensor.shape.numpy())
        value.const_value = ir.ExternalTensor(
            location, 0, tensor.nbytes, tensor.dtype, shape=shape, name=str(value.name)
        )
    source = ir.to_proto(model).SerializeToString()
    return RunnableModel(source, name, Path(folder) if folder else None, weights, model)


@contextlib.contextmanager
def _weights_folder(model: RunnableModel) -> Iterator[Path]:
    """The folder of the weights in files; without any, one with the file that those in memory are said to be in.

    ONNX Runtime looks whether it is there.
    """
    if model.folder is not None:
        yield model.folder
        return
    with temporary_folder() as folder:
        (folder / _NO_FILE).touch()
        yield folder


def _more_outputs(names: Iterable[str]) -> bytes:
    """A model that has nothing but outputs: protobuf merges messages whose bytes follow each other."""
    graph = onnx.GraphProto(output=[onnx.ValueInfoProto(name=name) for name in names])
    return onnx.ModelProto(graph=graph).SerializeToString() if graph.output else b""


def portions(sizes: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """Split names into groups, in order, whose total size is at most ``most``, or that have one member.

    Examples:
        >>> list(portions({"a": 4, "b": 4, "c": 9, "d": 1}, 8))
        [['a', 'b'], ['c'], ['d']]
    """
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > most:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    if group:
        yield group


Outputs: TypeAlias = Sequence[Mapping[str, Array]]
Metric: TypeAlias = Callable[[Outputs], float]
"""Called with the outputs of the model, name → array, for each of the inputs; larger is better."""


def outputs_of(
    runnable: RunnableModel, feeds: Iterable[Mapping[str, Array]], settings: SessionSettings
) -> list[dict[str, Array]]:
    """The outputs of a model for each of the inputs, as an application that runs the file gets them.

    All optimisations are on but those of layouts: many models run, and a crash of one would end
    all.
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
        listed = (
            f"output {name!r} of run {k} has NaN"
            for k, run in enumerate(outputs)
            for name in nan_in(run)
        )
        raise InputError(
            f"the metric returned {number}: {next(listed, 'the outputs that it was given have none')}"
        )
    return number


def measured_metric(
    metric: Metric, model: ir.Model, name: str, feeds: Iterable[Mapping[str, Array]]
) -> float:
    """Return the number that a metric gives to a model, which runs on the CPU; ``name`` is its name in errors."""
    with temporary_folder() as folder:
        return metric_value(
            metric, outputs_of(RunnableModel.of(model, name, folder), feeds, SessionSettings())
        )


TIMED_RUNS = 20  # a median that single slow ones do not move
_WARMUP = 2  # runs: the first allocates memory, the second fills caches


def median_times(
    sessions: Sequence[Session], feeds: Sequence[Mapping[str, Array]], runs: int
) -> list[float]:
    """The median time of a run of each session in ms, after some to warm up.

    The sessions run in turn, so that what else the machine does slows down all of them.
    """
    values = [session.values(feed) for session, feed in zip(sessions, feeds, strict=True)]
    times: list[list[float]] = [[] for _ in sessions]
    for _ in range(_WARMUP + runs):
        for session, given, taken in zip(sessions, values, times, strict=True):
            begun = time.perf_counter()
            session.run_values(given)
            taken.append((time.perf_counter() - begun) * 1000)
    return [statistics.median(taken[_WARMUP:]) for taken in times]
