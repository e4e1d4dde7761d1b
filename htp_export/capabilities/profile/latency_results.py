"""Result of `profile`: latency by module, in any engine."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from htp_export.capabilities.profile.measured_memory import MeasuredMemory, ModuleMemory
from htp_export.capabilities.profile.measurements import Kernel, Measurement, mean_of
from htp_export.errors import InputError
from htp_export.format.selectors import select
from htp_export.model.module_facts import ModuleFacts, contents_of
from htp_export.model.tagged import TaggedModel
from htp_export.reporting.columns import CLASS_NAME, Column, chosen, names_of
from htp_export.reporting.tables import ModuleTable
from htp_export.reporting.tag_facts import TagFacts
from htp_export.runtime.traces import QUEUED

_MEMORY_COLUMNS: tuple[Column[ModuleLatency], ...] = (
    Column(
        "allocated_bytes", "allocated", lambda row: _of_memory(row, "allocated_bytes"), "B", keep=3
    ),
    Column(
        "self_allocated_bytes",
        "self allocated",
        lambda row: _of_memory(row, "self_allocated_bytes"),
        "B",
    ),
    Column(
        "estimated_bytes", "estimated", lambda row: _of_memory(row, "estimated_bytes"), "B", keep=3
    ),
    Column(
        "self_estimated_bytes",
        "self estimated",
        lambda row: _of_memory(row, "self_estimated_bytes"),
        "B",
    ),
    Column("estimate_ratio", "ratio", lambda row: _of_memory(row, "ratio"), keep=3),
)
"""Columns of a profile with measured memory only."""

PROFILE_COLUMNS: tuple[Column[ModuleLatency], ...] = (
    CLASS_NAME,
    Column("calls", "calls"),
    Column("fate", "fate", right=False),
    Column("total_ms", "total", unit="ms", keep=5),
    Column("self_ms", "self", unit="ms", keep=4),
    Column("worst_ms", "worst", unit="ms", keep=4),
    Column("share", "share", unit="%", keep=3),
    Column("fused_ms", "fused", unit="ms"),
    Column("kernels", "kernels", keep=2),
    Column("launches", "launches"),
    Column("nodes", "nodes"),
    Column("parameters", "parameters"),
    Column("weight_bytes", "weights", unit="B"),
    *_MEMORY_COLUMNS,
)
"""The columns of a profile."""

_TIMINGS = {
    "launches": "times are those of launches: this ONNX Runtime does not measure kernels on the device",
    "modules": "each module ran alone, with its inputs on the device: the overhead of a run is in each of its times",
}
OWN_ENGINE = "onnxruntime"
"""The built-in engine."""
_DRAWN_MEMORY = ("allocated_bytes", "estimated_bytes", "estimate_ratio")
_DRAWN = ("class_name", "total_ms", "self_ms", "share")
_LIMIT = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us|µs|%)")
_MILLISECONDS = {"s": 1e3, "ms": 1.0, "us": 1e-3, "µs": 1e-3}


def _of_memory(row: ModuleLatency, name: str) -> Any:
    return None if row.memory is None else getattr(row.memory, name)


@dataclass(frozen=True, kw_only=True)
class ModuleLatency(ModuleFacts):
    """The facts of a module, and its time in a typical run of the model; see ``Trace.typical``.

    Attributes:
        total_ms: Time of the module and its descendants: ``self_ms`` plus the totals of its
            children.
        self_ms: Time of the module's own nodes. A kernel with several owners is divided equally
            among them.
        share: ``total_ms`` divided by the time of all kernels, from 0 to 1.
        fused_ms: The part of ``total_ms`` in kernels shared with modules outside.
        kernels: Number of kernels of the module and its descendants, shared ones included.
        launches: Launches of these kernels in one run; more than ``kernels`` in a loop.
        by_op: Operator type of a kernel → its part of ``total_ms``, the longest first.
        memory: Allocations of ONNX Runtime for it, beside the estimate of ``cost``; None if they
            were not measured.
        worst_ms: The longest ``total_ms`` of several inputs; the other times are means. None for one.
    """

    total_ms: float
    self_ms: float
    share: float
    fused_ms: float
    kernels: int
    launches: float
    by_op: Mapping[str, float]
    memory: ModuleMemory | None = None
    worst_ms: float | None = None


@dataclass(frozen=True)
class Profile(ModuleTable):
    """Latency of a model, by module.

    Attributes:
        modules: Module path → its latency, for every module, in the order of ``named_modules()``.
        end_to_end_ms: Median time of a run without the profiler.
        profiled_ms: Median time of a run with the profiler.
        kernels_ms: Sum of all kernels: the total of the root plus ``unattributed_ms``. The rest of
            ``profiled_ms`` is ONNX Runtime's own work between kernels. If kernels run in parallel,
            the sum may be larger.
        unattributed_ms: Time of kernels without a known module.
        unattributed: These kernels.
        kernels: All kernels, in the order of their first run.
        runs: Number of measured runs.
        providers: The execution providers that were used.
        assumed: A line for each open dimension without a size in the call, with the size that was
            used; and for facts that the measured times do not show.
        tags: The tags of the model: source, reasons, untagged nodes.
        memory: Allocations of ONNX Runtime; None if they were not measured.
        engine: The engine that ran the model: ``onnxruntime``, or one of another package.
        timing: The kind of times: ``kernels``; ``launches``, if a device only queues kernels and
            their times are unknown; ``modules``, if each module ran alone; ``layers``, from an
            engine's files: they are means over all runs, and the other times their sums.
        recorded: Whether ONNX Runtime recorded the times elsewhere; ``end_to_end_ms`` is then the
            time in kernels, as no run without the profiler is known.
    """

    columns = PROFILE_COLUMNS
    measure = "total_ms"
    details = ("by_op",)
    derived = ("notes",)
    optional = ("memory",)

    modules: Mapping[str, ModuleLatency]
    end_to_end_ms: float
    profiled_ms: float
    kernels_ms: float
    unattributed_ms: float
    unattributed: tuple[Kernel, ...]
    kernels: tuple[Kernel, ...]
    runs: int
    providers: tuple[str, ...]
    assumed: tuple[str, ...] = ()
    tags: TagFacts | None = None
    memory: MeasuredMemory | None = None
    engine: str = OWN_ENGINE
    timing: str = "kernels"
    recorded: bool = False

    @classmethod
    def of(
        cls,
        tagged: TaggedModel,
        measured: Measurement,
        engine: str,
        notes: Sequence[str] = (),
        memory: MeasuredMemory | None = None,
    ) -> Profile:
        """Sum up an engine's measurement by module; ``notes`` are the assumptions."""
        unattributed = tuple(kernel for kernel in measured.kernels if not kernel.owners)
        return cls(
            modules=latency_by_module(measured.kernels, tagged, memory),
            end_to_end_ms=measured.end_to_end_ms,
            profiled_ms=measured.profiled_ms,
            kernels_ms=measured.kernels_ms,
            unattributed_ms=sum(kernel.ms for kernel in unattributed),
            unattributed=unattributed,
            kernels=tuple(measured.kernels),
            runs=measured.runs,
            providers=measured.providers,
            assumed=(*measured.notes, *notes),
            tags=tagged.tag_facts,
            memory=memory,
            engine=engine,
            timing=measured.timing,
        )

    @classmethod
    def over_inputs(
        cls,
        tagged: TaggedModel,
        measured: Sequence[Measurement],
        engine: str,
        notes: Sequence[str] = (),
        memory: MeasuredMemory | None = None,
    ) -> Profile:
        """Sum up the measurements of several inputs: means, and the longest time of each module."""
        if len(measured) == 1:
            return cls.of(tagged, measured[0], engine, notes, memory)
        whole = cls.of(
            tagged, mean_of(measured, "inputs, measured one after the other"), engine, notes, memory
        )
        worst: defaultdict[str, float] = defaultdict(float)
        for each in measured:
            for path, row in latency_by_module(each.kernels, tagged).items():
                worst[path] = max(worst[path], row.total_ms)
        rows = {path: replace(row, worst_ms=worst[path]) for path, row in whole.modules.items()}
        return replace(whole, modules=rows)

    def over(self, budgets: Mapping[str, str | float]) -> dict[str, float]:
        """Modules whose total exceeds their budget: module path → budget in ms.

        Args:
            budgets: Selector → the budget of each module that it names: a number of ms, or a text,
                ``"5ms"`` or ``"20%"`` of the time of all kernels. If several selectors name a
                module, the last one counts.

        Raises:
            InputError: If a budget is neither a time nor a share below 100 %.
            SelectorError: If a selector cannot be read or matches no module.
        """
        classes = {path: module.class_name for path, module in self.modules.items()}
        limits = budgets_by_module(budgets, classes, self.kernels_ms)
        return {
            path: limits[path]
            for path, row in self.modules.items()
            if row.total_ms > limits.get(path, math.inf)
        }

    def module_data(self, row: ModuleLatency) -> dict[str, Any]:
        """The entry of a module in JSON; memory and the worst time only if they were measured."""
        entries = super().module_data(row)
        unknown = set() if self.memory is not None else set(names_of(_MEMORY_COLUMNS))
        if row.worst_ms is None:
            unknown.add("worst_ms")
        return {name: value for name, value in entries.items() if name not in unknown}

    @property
    def drawn(self) -> Sequence[Column[ModuleLatency]]:
        """The columns of the table as text."""
        return chosen(self.columns, (*_DRAWN, *self.drawn_extras))

    @property
    def drawn_extras(self) -> Sequence[str]:
        """The names of the columns of several inputs, and of memory, as far as they were measured."""
        root = self.modules.get("")
        worst = ("worst_ms",) if root is not None and root.worst_ms is not None else ()
        return (*worst, *(_DRAWN_MEMORY if self.memory is not None else ()))

    @property
    def listed(self) -> Sequence[ModuleLatency]:
        """The modules that take time."""
        return [module for module in self.modules.values() if module.kernels]

    @property
    def summary(self) -> str:
        """The times of the model, in one line."""
        if self.timing == "layers":
            engine = ", ".join(self.providers)
            return f"{self.kernels_ms:.3f} ms a run in the layers of {engine}, mean of {self.runs} runs"
        if self.timing == "modules":
            whole = f"{self.end_to_end_ms:.3f} ms a run, median of {self.runs}"
            return f"{whole}; {self.kernels_ms:.3f} ms in modules alone"
        if self.recorded:
            return (
                f"{self.profiled_ms:.3f} ms a run under the profiler, median of {self.runs}; "
                f"{self.kernels_ms:.3f} ms of it in kernels"
            )
        return (
            f"{self.end_to_end_ms:.3f} ms a run, median of {self.runs}; "
            f"{self.profiled_ms:.3f} ms under the profiler, {self.kernels_ms:.3f} ms of it in kernels"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Kernels without a module, and assumptions, one line each."""
        lines = [_TIMINGS[self.timing]] if self.timing in _TIMINGS else []
        if self.timing == "kernels" and any(kernel.provider in QUEUED for kernel in self.kernels):
            lines.append("times are those of kernels on the device")
        if self.unattributed:
            longest = sorted(self.unattributed, key=lambda kernel: -kernel.ms)
            named = ", ".join(f"{kernel.op_type} {kernel.name!r}" for kernel in longest[:3])
            more = f" and {len(longest) - 3} more" if len(longest) > 3 else ""
            lines.append(f"{self.unattributed_ms:.3f} ms belongs to no module: {named}{more}")
        if self.memory is not None:
            lines.extend(self.memory.notes)
        return (*lines, *self.assumed)


def latency_by_module(
    kernels: Sequence[Kernel], tagged: TaggedModel, memory: MeasuredMemory | None = None
) -> dict[str, ModuleLatency]:
    """Sum up kernels by module; each owner of a kernel has an equal part of its time."""
    measured = memory.modules if memory is not None else {}
    model_ms = sum(kernel.ms for kernel in kernels)
    self_ms: defaultdict[str, float] = defaultdict(float)
    # The kernels in the region of each module, with the part of their work that is there.
    inside: defaultdict[str, list[tuple[Kernel, float]]] = defaultdict(list)
    for kernel in kernels:
        for owner in kernel.owners:
            self_ms[owner] += kernel.ms / len(kernel.owners)
        owners_inside: defaultdict[str, int] = defaultdict(int)
        for modules in kernel.around:
            for path in modules:
                owners_inside[path] += 1
        for path, count in owners_inside.items():
            inside[path].append((kernel, count / len(kernel.owners)))
    rows = {}
    for path, contents in contents_of(tagged).modules.items():
        by_op: defaultdict[str, float] = defaultdict(float)
        for kernel, part in inside[path]:
            by_op[kernel.op_type] += kernel.ms * part
        total = math.fsum(kernel.ms * part for kernel, part in inside[path])
        rows[path] = ModuleLatency(
            **vars(contents.facts),
            total_ms=total,
            self_ms=self_ms[path],
            share=total / model_ms if model_ms else 0.0,
            fused_ms=math.fsum(kernel.ms * part for kernel, part in inside[path] if part < 1),
            kernels=len(inside[path]),
            launches=sum(kernel.launches for kernel, _ in inside[path]),
            by_op=dict(sorted(by_op.items(), key=lambda item: -item[1])),
            memory=measured.get(path),
        )
    return rows


def budgets_by_module(
    budgets: Mapping[str, str | float], classes: Mapping[str, str], whole_ms: float = 0.0
) -> dict[str, float]:
    """Module path → its budget in ms, from the last selector that names it; see `Profile.over`."""
    limits: dict[str, float] = {}
    for selector, budget in budgets.items():
        limit = _limit_ms(selector, budget, whole_ms)
        limits.update(dict.fromkeys(select(selector, classes), limit))
    return limits


def _limit_ms(selector: str, budget: str | float, whole_ms: float) -> float:
    """A budget in ms; a share is one of ``whole_ms``."""
    match = _LIMIT.fullmatch(budget.strip() if isinstance(budget, str) else f"{budget:f}ms")
    if match is None or (match[2] == "%" and float(match[1]) >= 100):
        raise InputError(
            f"budget {budget!r} of {selector!r}: write a time or a share below 100 %, such as 5ms or 20%"
        )
    limit = float(match[1])
    if match[2] == "%":
        return limit / 100 * whole_ms
    return limit * _MILLISECONDS[match[2]]
