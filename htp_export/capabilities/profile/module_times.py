"""Times of modules that run alone, one after another, with their inputs on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from htp_export.capabilities.profile.kernels import Kernel, Timed, owned
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.model.cut_models import cut_model
from htp_export.model.cutting import Cut, Cutter
from htp_export.model.tagged import TaggedModel
from htp_export.process.progress import counted
from htp_export.runtime.arrays import PORTION_BYTES, Array
from htp_export.runtime.inputs import Feed, Inputs
from htp_export.runtime.sessions import RunnableModel, Session, SessionSettings

__all__ = ["ModuleTimes", "device_of", "times_of_modules"]

_DEVICES = {
    "CUDAExecutionProvider": "cuda",
    "TensorrtExecutionProvider": "cuda",
    "NvTensorRTRTXExecutionProvider": "cuda",
    "ROCMExecutionProvider": "cuda",  # ONNX Runtime calls AMD's devices so, too
    "MIGraphXExecutionProvider": "cuda",
    "DmlExecutionProvider": "dml",
}


def device_of(providers: Sequence[str]) -> str:
    """Return ONNX Runtime's name of the device on which the first execution provider keeps tensors."""
    return _DEVICES.get(providers[0], "cpu") if providers else "cpu"


@dataclass(frozen=True)
class ModuleTimes:
    """Times of modules that ran alone.

    Attributes:
        kernels: An entry for each module with nodes of its own: its time without the modules below it.
        alone: Module path → time of all its calls alone, in ms.
        reasons: Module path → why it did not run alone. Its time counts in the module above.
    """

    kernels: tuple[Kernel, ...]
    alone: Mapping[str, float]
    reasons: Mapping[str, str]


def times_of_modules(
    tagged: TaggedModel,
    feed: Feed,
    settings: SessionSettings,
    device: str,
    runs: int,
    warmup: int,
    temporary: Path,
) -> ModuleTimes:
    """Run each module with nodes of its own alone, on the tensors that it gets in a run of the model.

    A module's own time is what its run took, without the own times of the modules below it, and at least 0.

    Args:
        tagged: The model, without functions.
        feed: The inputs of the model.
        settings: Execution providers and options.
        device: ONNX Runtime's name of the device on which inputs and outputs lie.
        runs: Number of measured runs of each call.
        warmup: Number of runs before those.
        temporary: A folder for models that are too large for memory.

    Raises:
        OnnxRuntimeError: If ONNX Runtime cannot run the model.
    """
    from htp_export.capabilities.verify.file_run import FileRun

    cuts, reasons = _cuts(tagged)
    wanted = dict.fromkeys(
        str(value.name) for parts in cuts.values() for part in parts for value in part.inputs.values()
    )
    arrays: dict[str, Array] = {}
    source = FileRun(tagged, "the model", feed.arrays, SessionSettings(), PORTION_BYTES)
    source.fetch(dict.fromkeys(wanted, 0), arrays.__setitem__)
    alone: dict[str, float] = {}
    for path, parts in counted(list(cuts.items()), "modules"):
        try:
            alone[path] = sum(_time(tagged, part, arrays, settings, device, runs, warmup, temporary) for part in parts)
        except InputError as error:
            reasons[path] = str(error)
    own: dict[str, float] = {}
    for path in sorted(alone, key=lambda each: -sum(1 for _ in tags.ancestors(each))):  # the deepest first
        below = sum(ms for other, ms in own.items() if other != path and tags.is_under(other, path))
        own[path] = max(0.0, alone[path] - below)
    provider = settings.providers[0] if isinstance(settings.providers[0], str) else str(settings.providers[0][0])
    kernels = []
    for path in tagged.paths:
        if path in own:
            timed = Timed(path or "(root)", "module", provider, own[path], len(cuts[path]))
            kernels.append(owned(timed, [tagged.calls.work((path,))], tagged.calls))
    return ModuleTimes(tuple(kernels), {path: alone[path] for path in tagged.paths if path in alone}, reasons)


def _cuts(tagged: TaggedModel) -> tuple[dict[str, list[Cut]], dict[str, str]]:
    """The calls of each module with nodes of its own, and why others cannot run alone: path → reason."""
    cutter = Cutter(tagged)
    owning = {owner for node in tagged.nodes for owner in tagged.owners_of(node)}
    cuts: dict[str, list[Cut]] = {}
    reasons: dict[str, str] = {}
    for path in tagged.paths:
        if path not in owning:
            continue
        try:
            parts = [cutter.cut(path, call) for call in range(max(tagged[path].calls, 1))]
            for value in (value for part in parts for value in part.inputs.values()):
                if value.name not in tagged.values:
                    raise InputError(f"it needs {value.name!r}, which is inside a branch, a loop or a function")
        except InputError as error:
            reasons[path] = str(error)
        else:
            cuts[path] = [part for part in parts if part.nodes]
    return cuts, reasons


def _time(
    tagged: TaggedModel,
    part: Cut,
    arrays: Mapping[str, Array],
    settings: SessionSettings,
    device: str,
    runs: int,
    warmup: int,
    temporary: Path,
) -> float:
    """The median time of a call of a module, in ms."""
    model = cut_model(tagged, part)
    feed = Inputs.of(model).feed({name: arrays[str(value.name)] for name, value in part.inputs.items()})
    session = Session(_runnable(model, part.path, temporary), settings)
    run = session.bound(feed.arrays, feed.types, device)
    times = []
    for _ in range(warmup + runs):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times[warmup:])


def _runnable(model: ir.Model, path: str, temporary: Path) -> RunnableModel:
    return RunnableModel.of(model, f"module {path!r} alone", temporary)
