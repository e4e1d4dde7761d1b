"""Measure the ranges of tensors with ONNX Runtime's calibrators, one run of the data at a time.

A calibrator that collects several runs one by one ignores NaN, and merges histograms wrongly: it
adds bins for larger values, compares them with the number of bins of the first run, and drops
values that are smaller than those of the first run. So a first pass over the data measures the
bounds of each histogram, and a second one fills it: the result does not depend on the order of the
runs, and equals that of all runs at once.
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
"""Name in plans → name of ONNX Runtime's method."""

_LARGEST = 1e30
"""Larger values fill masks: with numbers near the largest float, 3.4e38, or infinity. A range with
such values has no useful steps: of 256, all other values would be in one."""

_NOTHING = np.zeros((), np.float32)
"""The bounds of a tensor without elements: the quantizer needs a range for each tensor."""

Runs: TypeAlias = Callable[[], AbstractContextManager[Iterator[Mapping[str, Array]]]]
"""Opens an iterator over all runs of the data; each call starts with the first run."""


def calibration_method(name: str) -> Any:
    """ONNX Runtime's constant for the name of a method in plans."""
    return quantizers().CalibrationMethod[CALIBRATIONS[name]]


def passes_over_data(name: str) -> int:
    """The number of passes of a method over the data."""
    return 1 if name == MINMAX else 2


def is_divisible(bounds: Sequence[Any]) -> bool:
    """Whether a range can be divided into steps: its bounds are smaller than values of masks."""
    sizes = (np.abs(np.asarray(bound, np.float64)) for bound in bounds)
    return all(bool(np.all(size < _LARGEST)) for size in sizes)


@dataclass
class Bounds:
    """The smallest, the largest, and the smallest absolute value of a tensor."""

    low: Array
    high: Array
    least: Array

    @classmethod
    def of(cls, array: Array) -> Bounds | None:
        """The bounds of an array; None without elements."""
        if not array.size:
            return None
        return cls(array.min(), array.max(), np.abs(array).min())

    @classmethod
    def between(cls, low: Array, high: Array) -> Bounds | None:
        """The bounds that ONNX Runtime measured; None without elements (infinity, -infinity)."""
        if (low > high).all():
            return None
        return cls(low, high, np.minimum(np.abs(low), np.abs(high)))

    @property
    def has_nan(self) -> bool:
        """Whether a value was NaN."""
        return bool(np.isnan(self.low).any() or np.isnan(self.high).any())

    def merged(self, other: Bounds) -> Bounds:
        """The common bounds of both; NaN if one has NaN."""
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
        """The ranges as an argument of ONNX Runtime's quantizer, which changes it."""
        tool = quantizers("calibrate")
        return tool.TensorsData(tool.CalibrationMethod.MinMax, dict(self.bounds))


@dataclass(frozen=True)
class Calibration:
    """The settings of one calibration.

    Attributes:
        file: The model for ONNX Runtime's calibrators.
        op_types: The operators whose tensors are measured.
        method: The name of the method in plans.
        symmetric: Whether zero is the middle of each range.
        external: Whether the weights need external data once outputs are added to the file.
        names: Name of a tensor → its name in errors, in the order of execution.
    """

    file: Path
    op_types: Sequence[str]
    method: str
    symmetric: bool
    external: bool
    names: Mapping[str, str]

    def ranges(self, runs: Runs) -> Ranges:
        """The ranges over all runs, of which one is in memory at a time.

        Raises:
            InputError: A tensor has NaN.
        """
        calibrator = self._calibrator()
        if self.method == MINMAX:
            measured = self._smallest_and_largest(calibrator, runs)
        else:
            collector = _BoundsCollector(self._check)
            self._collect(calibrator, collector, runs)
            measured = collector.measured
        known = {name: bounds for name, bounds in measured.items() if bounds is not None}
        ranges = {name: self._range(bounds) for name, bounds in known.items()}
        if self.method != MINMAX:
            ranges |= self._by_histograms(calibrator, known, runs)
        empty = frozenset(measured) - known.keys()
        return Ranges(ranges | dict.fromkeys(empty, (_NOTHING, _NOTHING)), empty)

    def _range(self, bounds: Bounds) -> tuple[Array, Array]:
        if not self.symmetric:
            return bounds.low, bounds.high
        largest = np.maximum(np.abs(bounds.low), np.abs(bounds.high))
        return -largest, largest

    def _check(self, run: int, measured: Mapping[str, Bounds | None]) -> None:
        """Raise an `InputError` for the first tensor with NaN in one run."""
        for name, name_in_model in self.names.items():
            bounds = measured.get(name)
            if bounds is not None and bounds.has_nan:
                raise InputError(
                    f"data, run {run}: the model computes NaN in {name_in_model!r}; its range is not known"
                )

    def _calibrator(self) -> Any:
        # Without this option, percentiles are of absolute values, also for ranges that are
        # not symmetric.
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
        """The bounds of tensors, which are outputs of the file: no tensor leaves ONNX Runtime."""
        measured: dict[str, Bounds | None] = {}
        with runs() as opened:
            for number, arrays in enumerate(opened):
                # Otherwise, the calibrator merges the runs, and ignores NaN.
                calibrator.calibrate_tensors_range = None
                with quietly():
                    calibrator.collect_data(OneRun(arrays))
                    computed = calibrator.compute_data()
                new = {name: Bounds.between(*data.range_value) for name, data in computed.items()}
                self._check(number, new)
                _merge(measured, new)
        return measured

    def _collect(self, calibrator: Any, collector: Any, runs: Runs) -> None:
        calibrator.collector = collector
        with runs() as opened:
            for arrays in opened:
                with quietly():
                    calibrator.collect_data(OneRun(arrays))

    def _by_histograms(
        self, calibrator: Any, bounds: Mapping[str, Bounds], runs: Runs
    ) -> dict[str, tuple[Array, Array]]:
        """The ranges that ONNX Runtime chooses for tensors with histograms."""
        histograms = self._histograms(calibrator, bounds)
        if not histograms.known:
            return {}
        self._collect(calibrator, histograms, runs)
        calibrator.collector = histograms.tool
        with quietly():
            chosen = calibrator.compute_data()
        return {name: data.range_value for name, data in chosen.items()}

    def _histograms(self, calibrator: Any, bounds: Mapping[str, Bounds]) -> _HistogramCollector:
        """Empty histograms over the whole ranges, with the bins of ONNX Runtime for all runs."""
        tool = quantizers("calibrate").HistogramCollector(
            method=calibrator.method,
            symmetric=calibrator.symmetric,
            num_bins=calibrator.num_bins,
            num_quantized_bins=calibrator.num_quantized_bins,
            percentile=calibrator.percentile,
            scenario=calibrator.scenario,
        )
        counts_absolute = calibrator.method == PERCENTILE and calibrator.symmetric
        for name, bound in bounds.items():
            largest = np.maximum(np.abs(bound.low), np.abs(bound.high))
            begin, end = (bound.least, largest) if counts_absolute else (-largest, largest)
            edges = _edges(begin, end, calibrator.num_bins) if is_divisible((begin, end)) else None
            if edges is not None:
                counts = np.zeros(calibrator.num_bins, np.int64)
                entry = (counts, edges, bound.low, bound.high)
                tool.histogram_dict[name] = entry if counts_absolute else (*entry, largest)
        return _HistogramCollector(tool, frozenset(tool.histogram_dict))


def _edges(begin: Array, end: Array, bins: int) -> Array | None:
    """The edges of the bins of a histogram; None if the bins have no width in the type."""
    # Scalars of the type of the tensor: numpy computes the edges in it.
    bounds: Any = (begin, end)
    try:
        return np.histogram(np.zeros(0, begin.dtype), bins, range=bounds)[1].astype(begin.dtype)
    except ValueError:
        return None


def _merge(measured: dict[str, Bounds | None], new: Mapping[str, Bounds | None]) -> None:
    """Add the bounds of tensors in one run to those of earlier runs, in place."""
    for name, bounds in new.items():
        before = measured.get(name)
        if before is None:
            measured[name] = bounds
        elif bounds is not None:
            measured[name] = before.merged(bounds)


@dataclass
class _BoundsCollector:
    """Replaces ONNX Runtime's collector of histograms, and measures the bounds of tensors."""

    check: Callable[[int, Mapping[str, Bounds | None]], None]
    measured: dict[str, Bounds | None] = field(default_factory=dict)
    runs: int = 0

    def collect(self, tensors: Mapping[str, Sequence[Array]]) -> None:
        """Add one run: name of a tensor → its values, in a list of one array."""
        new = {name: Bounds.of(array) for name, [array] in tensors.items()}
        self.check(self.runs, new)
        _merge(self.measured, new)
        self.runs += 1


@dataclass(frozen=True)
class _HistogramCollector:
    """ONNX Runtime's collector, for tensors with a histogram; others keep their bounds."""

    tool: Any
    known: frozenset[str]

    def collect(self, tensors: Mapping[str, Sequence[Array]]) -> None:
        """Add one run: name of a tensor → its values, in a list of one array."""
        # For an array without values, the tool would count a zero.
        filled = {name: arrays for name, arrays in tensors.items() if arrays[0].size}
        self.tool.collect({name: filled[name] for name in filled if name in self.known})
