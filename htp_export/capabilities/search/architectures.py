"""``search`` over architectures: candidates that a function builds, and the sum of their parts."""

from __future__ import annotations

import contextlib
import hashlib
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import onnx_ir as ir

from htp_export.capabilities.search.architecture_results import (
    ARCHITECTURE_OBJECTIVES,
    Architectures,
    Candidate,
    CandidatePart,
    FailedCandidate,
)
from htp_export.capabilities.search.architecture_space import ArchitectureSpace, ChosenValues
from htp_export.capabilities.search.candidate_parts import (
    REST,
    Part,
    nodes_of_parts,
    part_modules,
    parts_of,
)
from htp_export.capabilities.search.part_timing import PartTimer
from htp_export.capabilities.search.search_results import LARGER_IS_BETTER, SearchInterrupted
from htp_export.capabilities.search.studies import KeptRuns, SharedStudy, check_sampler
from htp_export.costs.costing import node_flops
from htp_export.editing.flattening import read_flat
from htp_export.errors import HtpExportError, InputError, described
from htp_export.extras import required
from htp_export.files.filesystem import temporary_folder
from htp_export.format.call_tree import Instance
from htp_export.model.tagged import TaggedModel, load
from htp_export.process.interrupts import stems_from_interrupt
from htp_export.process.progress import report_counts
from htp_export.process.user_code import user_code
from htp_export.runtime.arrays import Array, from_torch
from htp_export.runtime.carried_inputs import inputs_of_call
from htp_export.runtime.runner import number_from
from htp_export.runtime.settings import RunSettings

if TYPE_CHECKING:
    from torch import nn

Build: TypeAlias = Callable[[dict[str, Any]], Any]
"""Choices by name → an ``nn.Module``, or a module and example inputs."""

ModuleMetric: TypeAlias = Callable[[Any], float]
"""Called with the module of a candidate; larger is better."""

_PART = "part "
"""The prefix of the keys of measurements in a study."""


@dataclass(frozen=True)
class Built:
    """A candidate in PyTorch: a module in eval mode, and the arguments of one call."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class ArchitectureWork:
    """The work of one process: builds candidates, and measures the parts that are new.

    Args:
        build: The function that builds a candidate.
        space: The space.
        objectives: The objectives.
        metric: The user's metric; None without one.
        settings: Example inputs for modules without, providers, runs, and the seed for `build`.
        dynamo: As for ``export``.
        finished: The measurements of parts and candidates; None to keep them in memory.

    Attributes:
        read: The names that `build` read.
    """

    def __init__(
        self,
        build: Build,
        space: ArchitectureSpace,
        objectives: Sequence[str],
        metric: ModuleMetric | None,
        settings: RunSettings,
        *,
        dynamo: bool = True,
        finished: KeptRuns | None = None,
    ) -> None:
        self.read: set[str] = set()
        self._build, self._metric, self._objectives = build, metric, objectives
        self._space, self._settings, self._dynamo = space, settings, dynamo
        self._timer = PartTimer(settings)
        self._finished = finished or KeptRuns()

    def measured(self, texts: Mapping[str, str]) -> tuple[Sequence[float], Mapping[str, Any]]:
        """The values of the objectives for a candidate, and all that is known of it."""
        known = self._finished.get(_key_of_choice(texts))
        if known is None:
            known = self._measured(self._space.choice(texts))
            self._finished.add(_key_of_choice(texts), known)
        values = _values(known)
        for name in self._objectives:
            if not math.isfinite(values[name]):
                raise InputError(f"{name} is {values[name]}")
        return [values[name] for name in self._objectives], {"measured": known}

    def _measured(self, choice: ChosenValues) -> dict[str, Any]:
        built = self.built(choice)
        self.read |= choice.read
        with temporary_folder() as folder:
            parts = self._parts(built, folder)
        tensors: dict[int, Any] = {id(tensor): tensor for tensor in built.module.parameters()}
        elements = sum(tensor.numel() for tensor in tensors.values())
        tensors |= {id(tensor): tensor for tensor in built.module.buffers()}
        return {
            "latency_ms": sum(part["latency_ms"] for part in parts),
            "flops": sum(part["flops"] for part in parts),
            "parameters": elements,
            "bytes": sum(tensor.nbytes for tensor in tensors.values()),
            "metric": None if self._metric is None else _number(self._metric, built.module),
            "parts": parts,
        }

    def built(self, choice: Mapping[str, Any]) -> Built:
        """Build a candidate; an `InputError` if the result is no module with inputs."""
        import torch

        with torch.random.fork_rng(devices=[]), user_code("build"):
            torch.default_generator.manual_seed(self._settings.seed)
            returned = self._build(choice)  # type: ignore[arg-type] # `ChosenValues` is a dict
        module, inputs = returned, None
        if isinstance(returned, tuple) and len(returned) == 2:
            module, inputs = returned
        if not isinstance(module, torch.nn.Module):
            kind = type(module).__name__
            raise InputError(f"build returned {kind}; return an nn.Module, or (module, inputs)")
        if inputs is None:
            inputs = self._given_inputs()
        module.eval()
        if isinstance(inputs, Mapping):
            return Built(module, (), dict(inputs))
        return Built(module, tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {})

    def _given_inputs(self) -> dict[str, Any]:
        """The argument ``data`` as keyword arguments of the module."""
        import torch

        arrays: Any = self._settings.data
        if arrays is None:
            raise InputError("build returned no inputs: return (module, inputs), or give data")
        return {name: torch.as_tensor(array) for name, array in dict(arrays).items()}

    def _parts(self, built: Built, folder: Path) -> list[dict[str, Any]]:
        """The parts of a candidate with their measurements; new ones are measured now."""
        traced = self._traced(built, folder)
        modules = part_modules(traced)
        parts = parts_of(traced, modules)
        new: dict[str, Part] = {}  # of equal parts, the first
        for part in parts.values():
            if self._finished.get(_PART + part.key) is None:
                new.setdefault(part.key, part)
        if new:
            onnx = self._exported(built, folder) if self._dynamo else traced
            graphs = Graphs(traced, onnx, modules, parts)
            self._measure(built, graphs, list(new.values()))
        rows: list[dict[str, Any]] = []
        for part in parts.values():
            # The first part with a new key is measured for this candidate, and reused by the others.
            is_new = new.get(part.key) is part
            known = self._finished.get(_PART + part.key)
            assert known is not None  # it was measured above
            row = {"module": part.call.path, "call": part.call.call, "key": part.key}
            rows.append({**row, **known, "reused": not is_new})
        return rows

    def _traced(self, built: Built, folder: Path) -> TaggedModel:
        """The graph that is divided into parts: by ``torch.export``, or the ONNX model itself.

        The former takes a fraction of the time of an export, and suffices for a candidate whose
        parts are all known.
        """
        if not self._dynamo:
            return self._exported(built, folder)
        from htp_export.exporter.torch_programs import exported_graph

        with _unchanged(built):
            return load(exported_graph(built.module, built.args, built.kwargs))

    def _exported(self, built: Built, folder: Path) -> TaggedModel:
        """The ONNX model of a candidate; its weights may be in a file in a folder."""
        from htp_export.exporter.exporting import export

        file = None if self._dynamo else folder / "candidate.onnx"
        settings: dict[str, Any] = {"dynamo": self._dynamo, "verbose": False}
        with _unchanged(built):
            program = export(
                built.module, built.args, file, kwargs=built.kwargs or None, **settings
            )
        return read_flat(file or program)  # type: ignore[arg-type] # without a file, there is one

    def _measure(self, built: Built, graphs: Graphs, new: Sequence[Part]) -> None:
        """Measure parts in the ONNX model of a candidate, and keep the results."""
        flops = node_flops(graphs.traced)
        nodes = [graphs.onnx_nodes(part.call) for part in new]
        times = self._timer.parts(graphs.onnx, nodes, _feed(graphs.onnx, built))
        for part, ms in zip(new, times, strict=True):
            work = sum(flops.get(node, 0) for node in part.nodes)
            self._finished.add(_PART + part.key, {"latency_ms": ms, "flops": work})

    def whole_ms(self, choice: Mapping[str, Any]) -> float:
        """Build and export a candidate, and measure it as a whole, as a part is measured."""
        built = self.built(choice)
        with temporary_folder() as folder:
            onnx = self._exported(built, folder)
            return self._timer.models([onnx.model], _feed(onnx, built))[0]


class Graphs:
    """A candidate as the graph that is divided, and as its ONNX model.

    Attributes:
        traced: The graph that is divided.
        onnx: The ONNX model; the same object if it is divided itself.
    """

    def __init__(
        self,
        traced: TaggedModel,
        onnx: TaggedModel,
        modules: Sequence[str],
        parts: Mapping[Instance, Part],
    ) -> None:
        self.traced, self.onnx = traced, onnx
        self._nodes: dict[Instance, list[ir.Node]] = {}
        for call, nodes in nodes_of_parts(onnx, modules).items():
            # An exporter may compute for a call that has no nodes in the other graph.
            self._nodes.setdefault(call if call in parts else REST, []).extend(nodes)

    def onnx_nodes(self, call: Instance) -> list[ir.Node]:
        """The nodes of a part in the ONNX model."""
        return self._nodes.get(call, [])


def _feed(onnx: TaggedModel, built: Built) -> dict[str, Array]:
    """The example inputs of a candidate, by the input names of its ONNX model."""
    names = [str(value.name) for value in onnx.model.graph.inputs if not value.is_initializer()]
    tensors = inputs_of_call(names, built.args, built.kwargs)
    return {name: from_torch(tensor) for name, tensor in tensors.items()}


@contextlib.contextmanager
def _unchanged(built: Built) -> Iterator[None]:
    """Restore the module after a trace of it; an error of torch is the reason of this candidate."""
    from htp_export.exporter.capture.model_state import unchanged

    try:
        with unchanged(built.module, (built.args, built.kwargs), traced=True):
            yield
    except HtpExportError:
        raise
    except Exception as error:  # any error of torch on a model that it cannot trace
        raise InputError(f"the module cannot be exported: {described(error)}") from error


def _key_of_choice(texts: Mapping[str, str]) -> str:
    return f"candidate {sorted(texts.items())}"


def _values(known: Mapping[str, Any]) -> dict[str, float]:
    """Objective → value; NaN for a metric that is not there."""
    metric = known["metric"]
    return {
        "latency": known["latency_ms"],
        "size": float(known["bytes"]),
        "parameters": float(known["parameters"]),
        "flops": float(known["flops"]),
        "metric": math.nan if metric is None else float(metric),
    }


def _number(metric: ModuleMetric, module: nn.Module) -> float:
    """The metric of a module; an `InputError` if it is no finite number."""
    number = number_from(metric, module)
    if not math.isfinite(number):
        raise InputError(f"the metric returned {number}")
    return number


def search_architectures(
    build: Build,
    space: object,
    objectives: Sequence[str] | None,
    metric: ModuleMetric | None,
    settings: RunSettings,
    *,
    dynamo: bool,
    trials: int,
    sampler: str,
    storage: Any,
    study: str,
    grace: float,
) -> Architectures:
    """Search over architectures; the arguments are those of `search`, checked as far as it does."""
    wanted = _check_objectives(objectives, metric)
    read = ArchitectureSpace(space)
    check_sampler(sampler, read.texts)
    shared = SharedStudy(
        storage,
        study,
        ["maximize" if name in LARGER_IS_BETTER else "minimize" for name in wanted],
        grace=grace,
        facts={"build function": _facts(build, metric, settings, dynamo), "objectives": [*wanted]},
    )
    work = ArchitectureWork(
        build, read, wanted, metric, settings, dynamo=dynamo, finished=shared.runs
    )
    shared.choose_from(read.texts, sampler, settings.seed)
    most = min(trials, read.size)
    if sampler == "random" or most == read.size:
        # The sampler itself would choose some candidates twice.
        shared.enqueue(read.different(most, settings.seed))

    def result(*, stopped: bool = False) -> Architectures:
        notes = [] if stopped else shared.why_fewer(trials)
        unread = [] if not work.read else [name for name in read.choices if name not in work.read]
        for name in unread:
            notes.append(f"space: build read {name!r} for no candidate; is the name right?")
        return Architectures(
            wanted,
            _candidates(read, shared, wanted),
            _failures(read, shared),
            {name: tuple(choices) for name, choices in read.choices.items()},
            tuple(notes),
        )

    try:
        with report_counts("trials", most) as count:
            shared.work(work.measured, most, lambda done: count(min(done, most)))
    except BaseException as error:
        if not stems_from_interrupt(error):
            raise
        raise SearchInterrupted(result(stopped=True)) from error
    found = result()
    if not found.trials:
        raise InputError(f"no candidate could be measured: {found.failures[0].text}")
    return found


def _check_objectives(
    objectives: Sequence[str] | None, metric: ModuleMetric | None
) -> tuple[str, ...]:
    default = ("latency", "size") if metric is None else ("latency", "metric")
    wanted = (objectives,) if isinstance(objectives, str) else tuple(objectives or default)
    unknown = [name for name in wanted if name not in ARCHITECTURE_OBJECTIVES]
    if unknown or len(set(wanted)) < len(wanted):
        listed = ", ".join(ARCHITECTURE_OBJECTIVES)
        raise InputError(
            f"objectives of architectures are some of {listed}, not {', '.join(map(str, wanted))}"
        )
    if ("metric" in wanted) != (metric is not None):
        raise InputError(
            "the objective 'metric' and the function metric go together; give both, or neither"
        )
    return wanted


def _facts(build: Build, metric: ModuleMetric | None, settings: RunSettings, dynamo: bool) -> str:
    """A digest of all that measurements depend on: functions by name, settings, and the machine."""
    onnxruntime = required("onnxruntime")

    names = [_name_of(function) for function in (build, metric)]
    machine = [platform.machine(), platform.processor(), platform.node(), onnxruntime.__version__]
    described_settings = [settings.seed, settings.runs, [*map(str, settings.providers)], dynamo]
    arrays: Any = settings.data
    if arrays is not None:
        for name, array in dict(arrays).items():
            described_settings.append([name, str(array.dtype), [*array.shape]])
    facts = repr((names, machine, described_settings))
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


def _name_of(function: object) -> str | None:
    return getattr(function, "__qualname__", None)


def _candidates(
    space: ArchitectureSpace, shared: SharedStudy, objectives: Sequence[str]
) -> tuple[Candidate, ...]:
    """The measured candidates of all processes."""
    candidates: list[Candidate] = []
    for trial in shared.complete():
        known = dict(trial.user_attrs["measured"])
        values = _values(known)
        parts = tuple(CandidatePart(**part) for part in known.pop("parts"))
        candidates.append(
            Candidate(
                number=trial.number,
                choice=dict(space.choice({name: str(text) for name, text in trial.params.items()})),
                values={name: values[name] for name in objectives},
                parts=parts,
                **known,
            )
        )
    return tuple(candidates)


def _failures(space: ArchitectureSpace, shared: SharedStudy) -> tuple[FailedCandidate, ...]:
    """The candidates that could not be measured; of equal ones, the first."""
    failures: dict[str, FailedCandidate] = {}
    for texts, reason in shared.failures:
        choice = dict(space.choice({name: str(text) for name, text in texts.items()}))
        failures.setdefault(repr(choice), FailedCandidate(choice, reason))
    return tuple(failures.values())
