"""Times of modules that run alone, one after another, with their inputs on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from htp_export.capabilities.profile.kernels import Kernel, owned
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.model.cut_models import cut_model
from htp_export.model.cutting import Cut, Cutter
from htp_export.model.tagged import TaggedModel
from htp_export.process.progress import counted
from htp_export.runtime.arrays import PORTION_BYTES, Array
from htp_export.runtime.inputs import Feed, Inputs
from htp_export.runtime.sessions import RunnableModel, Session, SessionSettings

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


def times_of_modules(
    tagged: TaggedModel,
    feed: Feed,
    settings: SessionSettings,
    providers: Sequence[str],
    runs: int,
    warmup: int,
    temporary: Path,
) -> tuple[tuple[Kernel, ...], dict[str, str]]:
    """Run each module with nodes of its own alone, on the tensors that it gets in a run of the model.

    A module's own time is what its run took, without the own times of the modules below it, and at least 0.

    The inputs and outputs of each lie on the device of the first of ``providers``, those in use for the whole model.

    Returns:
        A kernel for each module that ran, and module path → why it did not run alone: its time counts in the module
        above.

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
    device = device_of(providers)
    alone: dict[str, float] = {}
    for path, parts in counted(list(cuts.items()), "modules"):
        try:
            alone[path] = sum(_time(tagged, part, arrays, settings, device, runs, warmup, temporary) for part in parts)
        except InputError as error:
            reasons[path] = str(error)
    own: dict[str, float] = {}
    for path in sorted(alone, key=lambda module: -sum(1 for _ in tags.ancestors(module))):  # the deepest first
        below = sum(ms for other, ms in own.items() if other != path and tags.is_under(other, path))
        own[path] = max(0.0, alone[path] - below)
    kernels = []
    for path in tagged.paths:
        if path in own:
            kernel = Kernel(path or "(root)", "module", providers[0], own[path], len(cuts[path]))
            kernels.append(owned(kernel, [tagged.calls.work((path,))], tagged.calls))
    return tuple(kernels), reasons


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
    session = Session(RunnableModel.of(model, f"module {part.path!r} alone", temporary), settings)
    run = session.bound(feed.arrays, feed.types, device)
    times = []
    for _ in range(warmup + runs):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1000)
    return statistics.median(times[warmup:])
