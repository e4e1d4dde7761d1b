"""Ranges of the tensors of a part, which ONNX Runtime's calibrators measure on one run of the data after another.

A calibrator that collects several runs one by one merges smallest and largest values without NaN,
and histograms wrongly: it adds bins for larger values, compares them with the number of bins that
the first run had, and drops values that are smaller than those of the first run. So a first pass
over the data finds the bounds of each histogram, and a second one fills it: the order of the runs
makes no difference, and the result is that of all runs at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from htp_export.capabilities.quantize.ort_quantizers import OneRun, quantizers, quietly
from htp_export.errors import InputError
from htp_export.runtime.arrays import Array

MINMAX, ENTROPY, PERCENTILE = "minmax", "entropy", "percentile"
CALIBRATIONS = {MINMAX: "MinMax", ENTROPY: "Entropy", PERCENTILE: "Percentile"}
"""Names of plans → names of ONNX Runtime's methods."""

_LARGEST = 1e30
"""Ranges up to here are divided into steps. Masks are filled with numbers near the largest float, or infinity: in 256
steps between these and 0, all other values would be 0."""

_NOTHING = np.zeros((), np.float32)
"""The bounds of a tensor without elements, for a quantizer that asks for some."""

Runs: TypeAlias = Callable[[], AbstractContextManager[Iterator[Mapping[str, Array]]]]
"""Opens the runs of the data from the first one on."""


def calibration_method(name: str) -> Any:
    """ONNX Runtime's constant for a method that has this name in plans."""
    return quantizers().CalibrationMethod[CALIBRATIONS[name]]


def passes_over_data(name: str) -> int:
    """How often a method reads the data."""
    return 1 if name == MINMAX else 2


def is_divisible(bounds: Sequence[Any]) -> bool:
    """Whether the bounds of a range can be divided into steps; those of values that fill masks cannot."""
    return all(bool(np.all(np.abs(np.asarray(bound, np.float64)) < _LARGEST)) for bound in bounds)


@dataclass
class Bounds:
    """The smallest and the largest value of a tensor, and the smallest absolute one; none if it had no elements."""

    low: Array
    high: Array
    least: Array

    @classmethod
    def of(cls, array: Array) -> Bounds | None:
        """Those of an array; None without elements."""
        return cls(array.min(), array.max(), np.abs(array).min()) if array.size else None

    @classmethod
    def between(cls, low: Array, high: Array) -> Bounds | None:
        """Those that ONNX Runtime found; of no elements, it finds infinity and its negative."""
        return None if (low > high).all() else cls(low, high, np.minimum(np.abs(low), np.abs(high)))

    @property
    def has_nan(self) -> bool:
        """Whether there is NaN among the values."""
        return bool(np.isnan(self.low).any() or np.isnan(self.high).any())

    def merged(self, other: Bounds) -> Bounds:
        """Those of both; NaN if one has NaN."""
        return Bounds(
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
            np.minimum(self.least, other.least),
        )


@dataclass(frozen=True)
class Ranges:
    """The ranges of tensors.

    Attributes:
        bounds: Name of a tensor → the bounds of its range.
        empty: Names of tensors without elements in all runs.
    """

    bounds: Mapping[str, tuple[Array, Array]]
    empty: frozenset[str]

    def for_quantizer(self) -> Any:
        """What ONNX Runtime's quantizer takes, which changes it."""
        tool = quantizers("calibrate")
        return tool.TensorsData(tool.CalibrationMethod.MinMax, dict(self.bounds))


@dataclass(frozen=True)
class Calibration:
    """One measurement of the ranges in a file.

    Attributes:
        file: A model for ONNX Runtime's calibrators.
        op_types: The operators whose tensors are measured.
        method: The name in plans.
        symmetric: Whether zero is the middle of each range.
        external: Whether the weights are too large for the file with more outputs.
        names: Name of a tensor → its name in errors, in the order in which tensors are computed.
    """

    file: Path
    op_types: Sequence[str]
    method: str
    symmetric: bool
    external: bool
    names: Mapping[str, str]

    def ranges(self, runs: Runs) -> Ranges:
        """The ranges in all runs, of which one is in memory at a time; an `InputError` names a tensor with NaN."""
        calibrator = self._calibrator()
        if self.method == MINMAX:
            found = self._smallest_and_largest(calibrator, runs)
        else:
            collector = _BoundsCollector(self._check)
            self._collect(calibrator, collector, runs)
            found = collector.found
        known = {name: bounds for name, bounds in found.items() if bounds is not None}
        ranges = {name: self._range(each) for name, each in known.items()}
        if self.method != MINMAX:
            ranges |= self._by_histograms(calibrator, known, runs)
        empty = frozenset(found) - known.keys()
        return Ranges(ranges | dict.fromkeys(empty, (_NOTHING, _NOTHING)), empty)

    def _range(self, bounds: Bounds) -> tuple[Array, Array]:
        largest = np.maximum(np.abs(bounds.low), np.abs(bounds.high))
        return (-largest, largest) if self.symmetric else (bounds.low, bounds.high)

    def _check(self, run: int, found: Mapping[str, Bounds | None]) -> None:
        """Refuse NaN in one run."""
        wrong = [
            name
            for name in self.names
            if (bounds := found.get(name)) is not None and bounds.has_nan
        ]
        if wrong:
            name = self.names[wrong[0]]
            raise InputError(
                f"data, run {run}: the model computes NaN in {name!r}; its range is not known"
            )

    def _calibrator(self) -> Any:
        # Its percentiles are those of absolute values unless told otherwise, also for ranges that
        # are not symmetric.
        options = {"symmetric": True} if self.symmetric and self.method != MINMAX else {}
        with quietly():
            return quantizers("calibrate").create_calibrator(
                self.file,
                self.op_types,
                augmented_model_path=str(self.file.with_name("augmented.onnx")),
                calibrate_method=calibration_method(self.method),
                use_external_data_format=self.external,
                extra_options=options,
            )

    def _smallest_and_largest(self, calibrator: Any, runs: Runs) -> dict[str, Bounds | None]:
        """The bounds of tensors; the model has an output for each bound, so that no tensor leaves ONNX Runtime."""
        found: dict[str, Bounds | None] = {}
        with runs() as opened:
            for number, arrays in enumerate(opened):
                # it would merge them with those of the runs before
                calibrator.calibrate_tensors_range = None
                with quietly():
                    calibrator.collect_data(OneRun(arrays))
                    measured = calibrator.compute_data()
                new = {name: Bounds.between(*each.range_value) for name, each in measured.items()}
                self._check(number, new)
                _merge(found, new)
        return found

    def _collect(self, calibrator: Any, collector: Any, runs: Runs) -> None:
        calibrator.collector = collector
        with runs() as opened:
            for arrays in opened:
                with quietly():
                    calibrator.collect_data(OneRun(arrays))

    def _by_histograms(
        self, calibrator: Any, bounds: Mapping[str, Bounds], runs: Runs
    ) -> dict[str, tuple[Array, Array]]:
        """The ranges that ONNX Runtime chooses for tensors of which it can have a histogram."""
        histograms = self._histograms(calibrator, bounds)
        if not histograms.known:
            return {}
        self._collect(calibrator, histograms, runs)
        calibrator.collector = histograms.tool
        with quietly():
            chosen = calibrator.compute_data()
        return {name: each.range_value for name, each in chosen.items()}

    def _histograms(self, calibrator: Any, bounds: Mapping[str, Bounds]) -> _HistogramCollector:
        """Empty histograms of the whole ranges, as ONNX Runtime makes them of the data of all runs at once."""
        tool = quantizers("calibrate").HistogramCollector(
            method=calibrator.method,
            symmetric=calibrator.symmetric,
            num_bins=calibrator.num_bins,
            num_quantized_bins=calibrator.num_quantized_bins,
            percentile=calibrator.percentile,
            scenario=calibrator.scenario,
        )
        counts_absolute = calibrator.method == PERCENTILE and calibrator.symmetric
        for name, each in bounds.items():
            largest = np.maximum(np.abs(each.low), np.abs(each.high))
            begin, end = (each.least, largest) if counts_absolute else (-largest, largest)
            edges = _edges(begin, end, calibrator.num_bins) if is_divisible((begin, end)) else None
            if edges is not None:
                counts = np.zeros(calibrator.num_bins, np.int64)
                known = (counts, edges, each.low, each.high)
                tool.histogram_dict[name] = known if counts_absolute else (*known, largest)
        return _HistogramCollector(tool, frozenset(tool.histogram_dict))


def _edges(begin: Array, end: Array, bins: int) -> Array | None:
    """The edges of the bins of a histogram; None if so many bins have no width in this type."""
    # numbers of the type of the tensor, in which numpy computes the edges
    bounds: Any = (begin, end)
    try:
        return np.histogram(np.zeros(0, begin.dtype), bins, range=bounds)[1].astype(begin.dtype)
    except ValueError:
        return None


def _merge(found: dict[str, Bounds | None], new: Mapping[str, Bounds | None]) -> None:
    """Add the bounds of tensors in one run to those of the runs before."""
    for name, bounds in new.items():
        before = found.get(name)
        found[name] = (
            before.merged(bounds) if before is not None and bounds is not None else before or bounds
        )


@dataclass
class _BoundsCollector:
    """Takes the place of ONNX Runtime's collector of histograms, and finds the bounds of tensors."""

    check: Callable[[int, Mapping[str, Bounds | None]], None]
    found: dict[str, Bounds | None] = field(default_factory=dict)
    runs: int = 0

    def collect(self, tensors: Mapping[str, Sequence[Array]]) -> None:
        """Add one run: name of a tensor → its values, in a list of one array."""
        new = {name: Bounds.of(array) for name, [array] in tensors.items()}
        self.check(self.runs, new)
        _merge(self.found, new)
        self.runs += 1


@dataclass(frozen=True)
class _HistogramCollector:
    """ONNX Runtime's collector for the tensors that it has a histogram of; others keep their bounds."""

    tool: Any
    known: frozenset[str]

    def collect(self, tensors: Mapping[str, Sequence[Array]]) -> None:
        """Add one run: name of a tensor → its values, in a list of one array; zero would be one of no values."""
        counted = {
            name: arrays
            for name, arrays in tensors.items()
            if name in self.known and arrays[0].size
        }
        self.tool.collect(counted)
