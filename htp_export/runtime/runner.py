"""Runs of models: values of any tensor, comparable times, and results of a user's metric."""

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
from htp_export.extras import required
from htp_export.files.data_files import check_data
from htp_export.files.filesystem import temporary_folder
from htp_export.process.user_code import user_code
from htp_export.runtime.arrays import Array, nan_in, to_ort
from htp_export.runtime.sessions import (
    OptionChanges,
    RunnableModel,
    Session,
    as_written,
)
from htp_export.runtime.settings import DEFAULTS, RunSettings

# smaller weights stay in the model: shape inference reads them, and sharing saves no memory
_SMALL_BYTES = 1024
_NO_FILE = "weights"


class Runner:
    """Runs a model without optimisation, and returns the values of any of its tensors.

    ONNX Runtime uses the weights in memory without a copy, or maps their files. The user's
    ``SessionOptions`` would keep references to weights: with them, weights in memory are copied
    into the model. ``use_up``: the model may be changed.
    """

    def __init__(
        self, model: ir.Model, name: str, settings: RunSettings, *, use_up: bool = False
    ) -> None:
        self._settings = settings
        self._outputs = frozenset(value.name for value in model.graph.outputs)
        if settings.session_options is not None:
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
        """Load the model once for several runs that return the same tensors of the main graph."""
        names = list(dict.fromkeys(names))
        assert isinstance(self._model.source, bytes)
        added = _more_outputs(name for name in names if name not in self._outputs)
        source = self._model.source + added
        with _weights_folder(self._model) as folder:
            model = replace(self._model, source=source, folder=folder)
            session = Session(model, self._settings, as_written())

            def run(feed: Mapping[str, Array]) -> dict[str, Array]:
                inputs = {name: feed[name] for name in session.inputs if name in feed}
                results = session.run(inputs, names)
                for name, array in results.items():
                    if not isinstance(array, np.ndarray):
                        problem = f"{name!r} is not a tensor"
                        raise OnnxRuntimeError(self._model.name, "run", problem)
                return results

            yield run


def _sharing_weights(model: ir.Model, name: str) -> RunnableModel:
    """Move the large weights in memory out of a model, which is changed, so that a session shares their memory.

    In the model, they become external tensors of a file that is not read. ONNX Runtime itself maps
    weights in files.
    """
    tensors: list[ir.TensorProtocol | None] = []
    for graph in model.graphs():
        tensors += [value.const_value for value in graph.initializers.values()]
    external = [tensor for tensor in tensors if isinstance(tensor, ir.ExternalTensor)]
    check_data(external)
    folder = os.fspath(external[0].base_dir) if external else ""
    location = os.fspath(external[0].location) if external else _NO_FILE
    weights: dict[str, Any] = {}
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.nbytes <= _SMALL_BYTES or not _can_share(tensor):
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


def _can_share(tensor: ir.TensorProtocol) -> bool:
    """Return whether numpy and ONNX Runtime have the same memory layout for a tensor."""
    return tensor.dtype != ir.DataType.STRING and tensor.dtype.bitwidth >= 8


@contextlib.contextmanager
def _weights_folder(model: RunnableModel) -> Iterator[Path]:
    """Provide the folder of the weights in files; without such files, a folder with the file of `_sharing_weights`.

    ONNX Runtime checks that this file exists.
    """
    if model.folder is not None:
        yield model.folder
        return
    with temporary_folder() as folder:
        (folder / _NO_FILE).touch()
        yield folder


def _more_outputs(names: Iterable[str]) -> bytes:
    """Return bytes that add outputs to a serialized model: protobuf merges concatenated messages."""
    outputs = [onnx.ValueInfoProto(name=name) for name in names]
    if not outputs:
        return b""
    model = onnx.ModelProto(graph=onnx.GraphProto(output=outputs))
    return bytes(model.SerializeToString())


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
    runnable: RunnableModel, feeds: Iterable[Mapping[str, Array]], settings: RunSettings
) -> list[dict[str, Array]]:
    """Return the outputs of a model for each of the inputs, as in an application.

    All optimisations are enabled except those of layouts: many models run in this process, which a
    crash of one of them would end.
    """
    onnxruntime = required("onnxruntime")

    level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    session = Session(runnable, settings, OptionChanges({"graph_optimization_level": level}))
    return [session.run(feed) for feed in feeds]


def metric_value(metric: Metric, outputs: Outputs) -> float:
    """Return the result of a metric on outputs; an InputError for NaN, with the first output that contains NaN."""
    number = number_from(metric, outputs)
    if math.isnan(number):
        raise InputError(f"the metric returned {number}: {_first_nan(outputs)}")
    return number


def number_from(metric: Callable[[Any], float], argument: Any) -> float:
    """Call a user's metric; an InputError if it does not return a number."""
    with user_code("the metric"):
        result = metric(argument)
    try:
        return float(result)
    except (TypeError, ValueError) as error:
        raise InputError(f"the metric returned {result!r}, which is not a number") from error


def _first_nan(outputs: Outputs) -> str:
    for index, run in enumerate(outputs):
        for name in nan_in(run):
            return f"output {name!r} of run {index} has NaN"
    return "the outputs contain no NaN"


def measured_metric(
    metric: Metric, model: ir.Model, name: str, feeds: Iterable[Mapping[str, Array]]
) -> float:
    """Return the result of a metric for a model, which runs on the CPU; ``name`` is its name in errors."""
    with temporary_folder() as folder:
        runnable = RunnableModel.of(model, name, folder)
        return metric_value(metric, outputs_of(runnable, feeds, DEFAULTS))


TIMED_RUNS = 20  # single slow runs do not move their median
_WARMUP = 2  # runs: the first one allocates memory, the second one fills caches


def median_times(
    sessions: Sequence[Session], feeds: Sequence[Mapping[str, Array]], runs: int
) -> list[float]:
    """Return the median time in ms of a run of each session, after warm-up runs.

    The sessions run in turn, so that other load of the machine slows down all of them.
    """
    values = [session.values(feed) for session, feed in zip(sessions, feeds, strict=True)]
    times: list[list[float]] = [[] for _ in sessions]
    for _ in range(_WARMUP + runs):
        for session, inputs, session_times in zip(sessions, values, times, strict=True):
            start = time.perf_counter()
            session.run_values(inputs)
            session_times.append((time.perf_counter() - start) * 1000)
    return [statistics.median(session_times[_WARMUP:]) for session_times in times]
