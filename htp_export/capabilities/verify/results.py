"""Results of a comparison by module: of a file with PyTorch, or of two files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from htp_export.format.fates import Fate
from htp_export.reporting.columns import CLASS_NAME, Column, chosen, many, record
from htp_export.reporting.result import PlainData
from htp_export.reporting.tables import ModuleTable
from htp_export.reporting.tag_facts import TagFacts, tag_lines
from htp_export.runtime.comparing import Difference

AGREES, NAN, INFINITE, DIFFERS, INHERITS, NOT_COMPARED = (
    "agrees",
    "nan",
    "infinite",
    "differs",
    "inherits",
    "not compared",
)
AGREEING = (AGREES, NAN, INFINITE)
COMPARED = (DIFFERS, INHERITS, NAN, INFINITE, AGREES)
"""The worst first."""


@dataclass(frozen=True)
class TensorResult(PlainData):
    """One input or output of a call of a module.

    Attributes:
        name: The argument of ``forward``, or the position among its results: ``"0"``.
        tensor: Its name in the ONNX file.
        difference: The difference from the expected values.
    """

    optional = ("problem", "note")

    name: str
    tensor: str
    difference: Difference

    def data(self) -> dict[str, Any]:
        """The contents of `to_dict`."""
        numbers = {name: getattr(self.difference, name) for name in (*_NUMBERS, *self.optional)}
        return {"name": self.name, "tensor": self.tensor, **numbers}


@dataclass(frozen=True)
class NotFinite(PlainData):
    """The first tensor, in the order of the run, with infinite elements, or with NaN.

    Attributes:
        module: The module that returns it, or computes it for another one; ``""`` for an input of
            the model, too.
        tensor: Its name in the compared file.
        kind: ``"infinite"`` or ``"nan"``.
        side: ``"compared"`` if the reference is finite at these elements, ``"reference"`` if the
            compared file is; ``"both"`` if they are the same on both sides.
        elements: The number of these elements.
        size: The number of elements of the tensor.
        source: The line of the model's code that computes it, with the code; ``""`` if unknown.
        in_float16_only: Whether the run did not overflow, because ONNX Runtime computed this tensor,
            which is in float16, in float32 on this processor.
    """

    module: str
    tensor: str
    kind: str
    side: str
    elements: int
    size: int
    source: str = ""
    in_float16_only: bool = False

    @property
    def text(self) -> str:
        """The fact as a line of text."""
        kind = "NaN" if self.kind == "nan" else "infinity"
        number = f"{self.elements:,} of {self.size:,} elements of {self.tensor!r}"
        sides = {
            "compared": f"and no {kind} in the reference",
            "reference": "in the reference only",
            "both": "on both sides",
        }
        place = f"; {self.source}" if self.source else ""
        hidden = " (in float16; computed in float32 on this processor)"
        side = sides[self.side] + (hidden if self.in_float16_only else "")
        return f"first {kind}: {_shown(self.module)}, {number}, {side}{place}"


@dataclass(frozen=True)
class CallResult(PlainData):
    """One call of a module.

    Attributes:
        number: Number of the call, from 0.
        status: As for the module.
        outputs: Its outputs, as far as the file has them.
        inputs: Its inputs, as far as the file has them.
        missing: Number of outputs that the file does not have.
    """

    number: int
    status: str
    outputs: tuple[TensorResult, ...]
    inputs: tuple[TensorResult, ...] = ()
    missing: int = 0

    def data(self) -> dict[str, Any]:
        """The contents of `to_dict`."""
        data = {
            "call": self.number,
            "status": self.status,
            "outputs": self.outputs,
            "inputs": self.inputs,
        }
        if self.missing:
            data["missing"] = self.missing
        return data


@dataclass(frozen=True)
class ModuleResult(PlainData):
    """One module.

    Attributes:
        path: The module.
        class_name: Its fully qualified class.
        fate: Its fate in the export.
        status: ``agrees``; ``nan``: it agrees, and has NaN at the same places on both sides;
            ``infinite``: it agrees, and has infinite elements, the same on both sides; ``differs``:
            it is wrong itself; ``inherits``: its inputs or a module below it are wrong; for a
            module without a tensor to compare its fate, or ``not compared``.
        calls: Its compared calls.
        reason: Why it was not compared, or a remark on how it was compared; usually ``""``.
        compared_at: For a module without a tensor of its own in one of two files, the nearest
            module around it that was compared in its place; None otherwise.
        mean_max_abs: Of several runs, the mean of ``max_abs``; the other numbers are of the worst
            run. None for one run.
        mean_cosine: Of several runs, the mean of ``cosine``.
    """

    path: str
    class_name: str
    fate: Fate
    status: str
    calls: tuple[CallResult, ...] = ()
    reason: str = ""
    compared_at: str | None = None
    mean_max_abs: float | None = None
    mean_cosine: float | None = None

    @property
    def compared(self) -> bool:
        """Whether it had a tensor to compare."""
        return self.status in COMPARED

    @property
    def differences(self) -> list[Difference]:
        """The differences of its outputs, call by call."""
        return [output.difference for call in self.calls for output in call.outputs]

    @property
    def max_abs(self) -> float | None:
        """The largest difference between elements of its outputs; None if none was compared."""
        return _largest(difference.max_abs for difference in self._numbers)

    @property
    def mean_abs(self) -> float | None:
        """The largest mean difference of an output."""
        return _largest(difference.mean_abs for difference in self._numbers)

    @property
    def max_rel(self) -> float | None:
        """The largest relative difference."""
        return _largest(difference.max_rel for difference in self._numbers)

    @property
    def mean_rel(self) -> float | None:
        """The largest mean relative difference of an output."""
        return _largest(difference.mean_rel for difference in self._numbers)

    @property
    def cosine(self) -> float | None:
        """The smallest cosine of an output."""
        largest = _largest(-difference.cosine for difference in self._numbers)
        return None if largest is None else -largest

    @property
    def _numbers(self) -> list[Difference]:
        """The differences of its outputs with elements to compare; all of them if there are none."""
        differences = self.differences
        return [difference for difference in differences if difference.has_numbers] or differences

    @property
    def problem(self) -> str:
        """The problem of the first output that differs."""
        return next(
            (difference.problem for difference in self.differences if difference.problem), ""
        )

    def data(self) -> dict[str, Any]:
        """The contents of `to_dict`: missing numbers are null, and missing texts are left out."""
        entries = record(COMPARISON_COLUMNS, self).items()
        data = {name: value for name, value in entries if value is not None or name in _NUMBERS}
        return {**data, "calls": self.calls}


_NUMBERS = ("max_abs", "mean_abs", "max_rel", "mean_rel", "cosine")


def _largest(values: Iterable[float]) -> float | None:
    """The largest number, NaN if there is one; None without numbers."""
    numbers = list(values)
    if any(map(math.isnan, numbers)):
        return math.nan
    return max(numbers, default=None)


def short_number(value: float) -> str:
    """A number in a few characters: ``3.1e-6``, ``0.41``, ``12``, ``nan``."""
    # Within these limits, four digits and a point are shorter than an exponent.
    if value and math.isfinite(value) and not 1e-3 <= abs(value) < 1e5:
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.2g}" if abs(value) < 10 else f"{value:.4g}"


_STATUS_STYLES = {
    AGREES: "green",
    DIFFERS: "bold red",
    INHERITS: "yellow",
    NAN: "yellow",
    INFINITE: "yellow",
}


def _status_style(module: ModuleResult) -> str:
    return _STATUS_STYLES.get(module.status, "dim")


COMPARISON_COLUMNS: tuple[Column[ModuleResult], ...] = (
    CLASS_NAME,
    Column("fate", "fate", right=False),
    Column("status", "status", style=_status_style, right=False),
    Column("max_abs", "max abs", text=short_number),
    Column("mean_abs", "mean abs", text=short_number),
    Column("max_rel", "max rel", text=short_number),
    Column("mean_rel", "mean rel", text=short_number),
    Column("cosine", "cosine", text="{:.6f}".format),
    Column("mean_max_abs", "mean of runs", text=short_number),
    Column("mean_cosine", "mean cosine", text="{:.6f}".format),
    Column("problem", "problem", lambda module: module.problem or None, right=False),
    Column("reason", "reason", lambda module: module.reason or None, right=False),
    Column("compared_at", "compared at", right=False),
)
"""The columns of a comparison."""

_DRAWN = ("class_name", "status", "max_abs", "mean_abs", "max_rel", "cosine")
_REMARK: Column[ModuleResult] = Column(
    "said", "", lambda module: module.reason or module.problem, style="dim", right=False
)


@dataclass(frozen=True)
class Comparison(ModuleTable):
    """The result of `compare`, by module.

    Attributes:
        modules: Module path → result, in the order of ``named_modules()``.
        wrong: The modules that are wrong themselves, in the order in which their calls ended:
            innermost first.
        isolated: Whether each module ran alone, on the inputs of the reference.
        tags: The tags of the compared files: source, reasons, untagged nodes.
        assumed: A line for each open dimension whose size was not given, with the size that was
            used.
        not_finite: The first tensor with infinite elements, and the first one with NaN; elements on
            one side only go before elements on both sides.
        source: The line of the model's code that computes the first wrong tensor, with the code, such
            as ``/path/net.py:9  return self.fc(x)``; ``""`` if it is unknown.
        runs: Number of compared runs; of several, a module has the numbers of its worst run.
    """

    columns = COMPARISON_COLUMNS
    derived = ("ok", "summary", "first_wrong")

    modules: Mapping[str, ModuleResult]
    wrong: tuple[str, ...] = ()
    isolated: bool = False
    tags: tuple[TagFacts, ...] = ()
    assumed: tuple[str, ...] = ()
    not_finite: tuple[NotFinite, ...] = ()
    source: str = ""
    runs: int = 1

    @property
    def ok(self) -> bool:
        """Whether at least one module was compared, and all compared modules agree."""
        return bool(self._compared) and all(module.status in AGREEING for module in self._compared)

    @property
    def _compared(self) -> list[ModuleResult]:
        return [module for module in self.modules.values() if module.compared]

    @property
    def first_wrong(self) -> str | None:
        """The innermost module that is wrong itself, the first that ran; None if there is none."""
        return self.wrong[0] if self.wrong else None

    @property
    def worst(self) -> str | None:
        """The module with the largest difference of elements; None if nothing was compared."""
        differences: dict[str, float] = {}
        for module in self._compared:
            # NaN of a module that agrees: none of its elements is finite
            agrees_in_nothing = module.status in AGREEING and math.isnan(module.max_abs or 0.0)
            if not agrees_in_nothing:
                differences[module.path] = module.max_abs or 0.0
        for path, value in differences.items():
            if math.isnan(value):
                return path
        return max(differences, key=differences.__getitem__, default=None)

    @property
    def score(self) -> str:
        """The number of compared modules that agree: ``312 of 312``."""
        compared = self._compared
        agreeing = sum(module.status in AGREEING for module in compared)
        return f"{agreeing} of {len(compared)}"

    @property
    def summary(self) -> str:
        """The result in one line.

        Examples:
            >>> from htp_export.runtime.comparing import difference
            >>> import numpy as np
            >>> fc = TensorResult("0", "y", difference(np.float32([1]), np.float32([2])))
            >>> call = CallResult(0, "differs", (fc,))
            >>> module = ModuleResult("fc", "torch.nn.Linear", "computed", "differs", (call,))
            >>> print(Comparison({"fc": module}, ("fc",)).summary)
            first wrong: fc: max 1; 0 modules after it inherit the error
        """
        if self.ok:
            return f"{self.score} modules agree{self.worst_in_brackets}{self._on_both_sides}"
        if not self._compared:
            return "no module has a tensor that could be compared"
        statuses = Counter(module.status for module in self.modules.values())
        inheriting = statuses[INHERITS]
        if self.first_wrong is None:
            count = statuses[DIFFERS] + inheriting
            return f"{many(count, 'module')} differ{'s' * (count == 1)}"
        module = _shown(self.first_wrong)
        reason = self.modules[self.first_wrong].reason
        if reason.startswith("merged with"):
            module += f" ({reason})"
        others = self._also_wrong
        if self.isolated:
            around = "them" if others else "it"
            rest = (
                f"{many(inheriting, 'module')} around {around} differ{'s' * (inheriting == 1)} too"
            )
        else:
            verb = f"inherit{'s' * (inheriting == 1)}"
            rest = f"{many(inheriting, 'module')} after it {verb} the error"
        return f"first wrong: {module}: {self._how_wrong(self.first_wrong)}{others}; {rest}"

    @property
    def _also_wrong(self) -> str:
        """The wrong modules after the first one, three by name, as a part of the summary."""
        if len(self.wrong) < 2:
            return ""
        others = f"; also wrong: {', '.join(map(_shown, self.wrong[1:4]))}"
        if len(self.wrong) > 4:
            others += f" and {len(self.wrong) - 4} more"
        return others

    @property
    def worst_in_brackets(self) -> str:
        """The largest difference and its module, in brackets."""
        worst = self.worst
        if worst is None:
            return ""
        value = self.modules[worst].max_abs
        return "" if value is None else f" (worst {short_number(value)}, {_shown(worst)})"

    @property
    def _on_both_sides(self) -> str:
        """The modules with NaN or infinity on both sides, as a part of the summary."""
        statuses = Counter(module.status for module in self.modules.values())
        parts = []
        for status, elements in ((NAN, "NaN"), (INFINITE, "infinity")):
            count = statuses[status]
            if count:
                verb = "has" if count == 1 else "have"
                parts.append(f"{count} {verb} {elements} at the same places on both sides")
        return f"; of these, {' and '.join(parts)}" if parts else ""

    def _how_wrong(self, path: str) -> str:
        """The largest difference of a module; or its problem, if that is no number."""
        module = self.modules[path]
        largest = module.max_abs
        if largest is None or math.isnan(largest) or not module.problem:
            return module.problem or module.reason
        return f"max {short_number(largest)}"

    def module_data(self, row: ModuleResult) -> dict[str, Any]:
        """A module as in JSON, with its calls."""
        return row.data()

    @property
    def drawn(self) -> Sequence[Column[ModuleResult]]:
        """The columns of the table as text."""
        means = ("mean_max_abs",) if self.runs > 1 else ()
        return [*chosen(self.columns, (*_DRAWN, *means)), _REMARK]

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes: the wrong line, the first infinity and NaN, what was not compared, precision, sizes."""
        fates = Counter(module.status for module in self.modules.values() if not module.compared)
        others = {NOT_COMPARED: "for other reasons"}
        counts = ", ".join(f"{count} {others.get(fate, fate)}" for fate, count in fates.items())
        not_compared = [f"not compared: {counts}"] if counts else []
        not_finite = (first.text for first in self.not_finite)
        computed_at = [f"computed at {self.source}"] if self.source else []
        runs = [f"the worst of {self.runs} runs, module by module"] if self.runs > 1 else []
        return (*computed_at, *not_finite, *not_compared, *runs, *self._precisions, *self.assumed)

    @property
    def _precisions(self) -> tuple[str, ...]:
        """Notes on the comparison of modules whose precision differs, with the number of modules."""
        counts: Counter[str] = Counter()
        for module in self.modules.values():
            counts.update({difference.note for difference in module.differences if difference.note})
        return tuple(f"{note}: {many(count, 'module')}" for note, count in sorted(counts.items()))

    def tag_lines(self) -> tuple[str, ...]:
        """Facts about the tags of the compared files, one line for each file."""
        return tag_lines(*self.tags, names=("right", "compared"))


def over_runs(results: Sequence[Comparison]) -> Comparison:
    """The comparison of several runs as one: each module as in its worst run, with means over all.

    The first wrong module is that of the first run in which one is wrong.
    """
    if len(results) == 1:
        return results[0]
    modules: dict[str, ModuleResult] = {}
    for path in results[0].modules:
        modules[path] = _over_runs([each.modules[path] for each in results])
    first_wrong = next((result for result in results if result.wrong), results[0])
    wrong = dict.fromkeys(first_wrong.wrong)
    for result in results:
        wrong.update(dict.fromkeys(result.wrong))
    not_finite = next((result.not_finite for result in results if result.not_finite), ())
    return replace(
        first_wrong,
        modules=modules,
        wrong=tuple(wrong),
        not_finite=not_finite,
        runs=len(results),
    )


def _over_runs(rows: Sequence[ModuleResult]) -> ModuleResult:
    """A module over several runs: its worst one, and the means of the runs in which it was compared."""
    compared = [row for row in rows if row.compared]
    if not compared:
        return rows[0]
    worst = min(compared, key=_badness)
    return replace(
        worst,
        mean_max_abs=_mean(row.max_abs for row in compared),
        mean_cosine=_mean(row.cosine for row in compared),
    )


def _badness(row: ModuleResult) -> tuple[int, float]:
    """The order of runs, the worst first: by status, then by the largest difference, NaN first."""
    largest = row.max_abs or 0.0
    return COMPARED.index(row.status), -math.inf if math.isnan(largest) else -largest


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return math.fsum(numbers) / len(numbers) if numbers else None


@dataclass(frozen=True)
class Verification(Comparison):
    """The result of `verify`, by module.

    Attributes:
        parameters: Number of initializers that are known parameters or buffers, by name or, for
            matrices, by value.
        misplaced: Parameters that nodes of other modules read: ``"fc.weight is read by 'node' of
            other"``.
        next_outputs: With ``outputs_from``, the tensors of the file to ask the engine for next;
            none if the first wrong module is known, or nothing differs.
        training: Nodes of wrong modules that compute as in training, such as active dropout, one
            line for each.
    """

    parameters: int = 0
    misplaced: tuple[str, ...] = ()
    next_outputs: tuple[str, ...] = ()
    training: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all compared modules agree, and the owners of the parameters are right."""
        return super().ok and not self.misplaced

    @property
    def summary(self) -> str:
        """The result in one line."""
        if self.training:
            more = f", and {len(self.training) - 1} more" if len(self.training) > 1 else ""
            return f"the file is in training mode: {self.training[0]}{more}; export model.eval()"
        if not self.misplaced:
            return super().summary
        wrong = f"owners of {len(self.misplaced)} of {self.parameters} parameters are wrong: {self.misplaced[0]}"
        # Without the parameters: their problems would make the summary of modules one of a failure.
        modules_only = Comparison(self.modules, self.wrong, self.isolated)
        return f"{modules_only.summary}; {wrong}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes of a comparison, further nodes in training mode, misplaced parameters, and tensors to ask for."""
        lines = [*super().notes, *self.training[1:], *self.misplaced]
        if self.next_outputs:
            lines.append(f"next, ask the engine for: {', '.join(self.next_outputs)}")
        return tuple(lines)


def _shown(path: str) -> str:
    """A module path in texts."""
    return path or "(root)"
