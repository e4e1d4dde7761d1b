"""Comparison of the tensors of module calls with those of a run of a file."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from htp_export.capabilities.verify.file_run import FileRun
from htp_export.capabilities.verify.pairing import Pair, PairedCall
from htp_export.capabilities.verify.precisions import half_precisions
from htp_export.capabilities.verify.results import TensorResult
from htp_export.runtime.arrays import Array, StoredArray
from htp_export.runtime.comparing import Difference, Tolerance, difference

__all__ = ["CheckedCall", "Tolerances", "check_calls", "excesses"]

Tolerances = Callable[[str], Tolerance | None]
"""Module path → tolerance; None for the entry of ``TOLERANCES`` for the dtype."""

_Key = tuple[StoredArray, ir.Value, Tolerance | None, str]


@dataclass(frozen=True)
class CheckedCall:
    """A call with the differences of its tensors.

    Attributes:
        paired: The call.
        outputs: Its outputs: the tensor of the file, and the difference from the expected values.
        inputs: The same for its inputs.
        failed: Why its part of the file cannot be run; ``""`` if it can.
    """

    paired: PairedCall
    outputs: tuple[tuple[ir.Value, TensorResult], ...]
    inputs: tuple[tuple[ir.Value, TensorResult], ...]
    failed: str = ""

    @property
    def path(self) -> str:
        """The module."""
        return self.paired.call.path

    @property
    def wrong(self) -> bool:
        """Whether an output differs, or its part of the file cannot be run."""
        return bool(self.failed) or any(not result.difference.agrees for _, result in self.outputs)


def check_calls(run: FileRun, calls: Sequence[PairedCall], tolerances: Tolerances) -> list[CheckedCall]:
    """Run a file, and compare the tensors of calls.

    Args:
        run: The file.
        calls: The calls, with the tensors of the file that belong to them.
        tolerances: The tolerance of each module.

    Raises:
        InputError: If ONNX Runtime cannot run the file.
    """
    wanted: defaultdict[ir.Value, dict[_Key, None]] = defaultdict(dict)
    for paired in calls:
        for pair in (*paired.outputs, *paired.inputs):
            for value in pair.candidates:
                wanted[value][_key(pair, value, tolerances(paired.call.path))] = None
    sizes = {str(value.name): max(key[0].nbytes for key in keys) for value, keys in wanted.items()}
    by_name = {str(value.name): value for value in wanted}
    differences: dict[_Key, Difference] = {}
    halves = half_precisions(run.tagged)

    def compare(name: str, array: Array) -> None:
        for key in wanted[by_name[name]]:
            computed_in = filter(None, (key[3], halves.get(name)))
            differences[key] = difference(key[0].array, array, key[2], computed_in)

    run.fetch(sizes, compare)

    def best(pair: Pair, tolerance: Tolerance | None) -> tuple[ir.Value, TensorResult]:
        options = ((value, differences[_key(pair, value, tolerance)]) for value in pair.candidates)
        value, nearest = min(options, key=lambda option: _rank(option[1]))
        return value, TensorResult(pair.name, str(value.name), nearest)

    checked = []
    for paired in calls:
        tolerance = tolerances(paired.call.path)
        if paired.reason:
            paired = _each_once(paired, tolerance, differences)
        outputs = tuple(best(pair, tolerance) for pair in paired.outputs)
        checked.append(CheckedCall(paired, outputs, tuple(best(pair, tolerance) for pair in paired.inputs)))
    return checked


def _key(pair: Pair, value: ir.Value, tolerance: Tolerance | None) -> _Key:
    return pair.expected, value, tolerance, pair.computed_in


def _each_once(paired: PairedCall, tolerance: Tolerance | None, differences: Mapping[_Key, Difference]) -> PairedCall:
    """For a call whose tensors the file does not name, match each tensor with one output, the nearest pairs first.

    The file may have fewer tensors than PyTorch returned, because nothing reads the others. A tensor whose shape or
    dtype differs, which may only be known after the run, is no match.
    """
    options = [
        (_rank(differences[_key(pair, value, tolerance)]), pair.name, value)
        for pair in paired.outputs
        for value in pair.candidates
        if differences[_key(pair, value, tolerance)].comparable
    ]
    chosen: dict[str, ir.Value] = {}
    for _, name, value in sorted(options, key=lambda option: option[0]):
        if name not in chosen and value not in chosen.values():
            chosen[name] = value
    outputs = tuple(replace(pair, candidates=(chosen[pair.name],)) for pair in paired.outputs if pair.name in chosen)
    return replace(paired, outputs=outputs, missing=paired.missing + len(paired.outputs) - len(outputs))


def _rank(result: Difference) -> tuple[bool, float]:
    return bool(result.problem), math.inf if math.isnan(result.max_abs) else result.max_abs


def excesses(calls: Iterable[CheckedCall]) -> dict[ir.Value, float]:
    """Return compared tensor → the smallest of its differences, in units of the tolerance."""
    largest: dict[ir.Value, float] = {}
    for call in calls:
        for value, result in (*call.outputs, *call.inputs):
            largest[value] = min(largest.get(value, math.inf), result.difference.excess)
    return largest
