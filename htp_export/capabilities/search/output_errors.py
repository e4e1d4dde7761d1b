"""How far the outputs of a quantized model are from those of the original: SQNR, cosine, KL divergence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from htp_export.reporting.result import PlainData
from htp_export.runtime.arrays import Array, arrays_in

_PROBABILITY_SLACK = 1e-3  # sums of fp16 probabilities are not nearer to 1


@dataclass(frozen=True)
class Deviation(PlainData):
    """The error of the outputs of a model, over all samples.

    Attributes:
        error: Power of the error divided by the power of the expected values, the mean over the
            outputs: 0 where they are equal. Errors of modules that are quantized alone add up, as
            far as they are independent.
        sqnr_db: The same in decibels, ``-10 * log10(error)``: larger is better, infinite where they
            are equal.
        cosine: The smallest cosine of the angle between an output and its expected values.
        kl: The largest KL divergence of an output, in nats, from its expected values: the mean over
            rows of its last dimension. Rows that are no probabilities go through a softmax. None if
            no output has rows of two elements.
    """

    error: float
    sqnr_db: float
    cosine: float
    kl: float | None = None


class OutputErrors:
    """Sums of the errors of outputs, sample by sample; outputs of floats count, others only if there are none.

    Examples:
        >>> errors = OutputErrors()
        >>> errors.add({"y": np.float32([[3.0, 4.0]])}, {"y": np.float32([[3.0, 4.5]])})
        >>> round(errors.result().error, 4), round(errors.result().sqnr_db, 2)
        (0.01, 20.0)
    """

    def __init__(self) -> None:
        self._sums: dict[str, _OutputSums] = {}

    def add(self, expected: Mapping[str, Any], actual: Mapping[str, Any]) -> None:
        """Add the outputs of one sample: name → array, or a sequence of arrays."""
        wanted, found = arrays_in(expected), arrays_in(actual)
        floats = {name: array for name, array in wanted.items() if _is_float(array)}
        for name, array in (floats or wanted).items():
            self._sums.setdefault(name, _OutputSums()).add(array, found[name])

    def result(self) -> Deviation:
        """The error over all samples."""
        sums = list(self._sums.values())
        if not sums:
            return Deviation(0.0, math.inf, 1.0)
        error = math.fsum(each.relative for each in sums) / len(sums)
        divergences = [each.divergence / each.rows for each in sums if each.rows]
        decibels = (
            math.inf
            if error == 0
            else -10 * math.log10(error)
            if math.isfinite(error)
            else -math.inf
        )
        return Deviation(
            error, decibels, min(each.cosine for each in sums), max(divergences, default=None)
        )


class _OutputSums:
    """The sums of one output."""

    def __init__(self) -> None:
        self._signal = self._noise = self._other = self._dot = 0.0
        self.divergence, self.rows = 0.0, 0

    def add(self, expected: Array, actual: Array) -> None:
        if not _is_float(expected):
            self._noise += float(np.count_nonzero(expected != actual))
            self._signal += expected.size
            return
        wanted, found = expected.astype(np.float64), actual.astype(np.float64)
        fit = np.isfinite(wanted)  # masks may be -inf in both
        same = ~fit & ((wanted == found) | (np.isnan(wanted) & np.isnan(found)))
        if not (fit | same).all() or not np.isfinite(found[fit]).all():
            self._noise = math.inf
            return
        one, other = wanted[fit], found[fit]
        self._noise += float(np.square(one - other).sum())
        self._signal += float(np.square(one).sum())
        self._other += float(np.square(other).sum())
        self._dot += float((one * other).sum())
        if wanted.ndim and wanted.shape[-1] > 1 and fit.all():
            rows = wanted.shape[:-1]
            self.divergence += float(_divergence(wanted, found).sum())
            self.rows += math.prod(rows)

    @property
    def relative(self) -> float:
        if self._noise == 0:
            return 0.0
        return self._noise / self._signal if self._signal else math.inf

    @property
    def cosine(self) -> float:
        if not math.isfinite(self._noise):
            return -1.0
        lengths = math.sqrt(self._signal * self._other)
        return min(1.0, self._dot / lengths) if lengths else (1.0 if self._noise == 0 else 0.0)


def _is_float(array: Array) -> bool:
    return array.dtype.kind == "f" or str(array.dtype) == "bfloat16"


def _divergence(expected: Array, actual: Array) -> Array:
    """The KL divergence of each row of the last dimension."""
    wanted, found = _log_probabilities(expected), _log_probabilities(actual)
    return np.asarray((np.exp(wanted) * (wanted - found)).sum(axis=-1).clip(min=0.0))


def _log_probabilities(rows: Array) -> Array:
    sums = rows.sum(axis=-1)
    if (rows >= 0).all() and np.abs(sums - 1).max(initial=0.0) < _PROBABILITY_SLACK:
        return np.asarray(np.log(rows.clip(min=np.finfo(np.float64).tiny)))
    shifted = rows - rows.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
