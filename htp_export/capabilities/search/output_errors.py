"""The error of the outputs of a model against the original: SQNR, cosine, KL divergence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from htp_export.reporting.result import PlainData
from htp_export.runtime.arrays import Array, arrays_in

_PROBABILITY_SLACK = 1e-3
"""The deviation of a sum of probabilities from 1, for which a row in fp16 is accepted."""


@dataclass(frozen=True)
class Deviation(PlainData):
    """The error of the outputs of a model, over all samples.

    Attributes:
        error: Power of the error divided by the power of the expected values, the mean over the
            outputs; 0 for equal outputs. Errors of single quantized modules add up, as far as they
            are independent.
        sqnr_db: The same in decibels, ``-10 * log10(error)``: larger is better, infinite for equal
            outputs.
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
    """Accumulates errors of outputs, sample by sample; integers count only without floats.

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
        references, outputs = arrays_in(expected), arrays_in(actual)
        floats = {name: array for name, array in references.items() if _is_float(array)}
        for name, array in (floats or references).items():
            self._sums.setdefault(name, _OutputSums()).add(array, outputs[name])

    def result(self) -> Deviation:
        """The error over all samples."""
        sums = list(self._sums.values())
        if not sums:
            return Deviation(0.0, math.inf, 1.0)
        error = math.fsum(output.relative for output in sums) / len(sums)
        cosine = min(output.cosine for output in sums)
        divergences = [output.divergence / output.rows for output in sums if output.rows]
        return Deviation(error, _decibels(error), cosine, max(divergences, default=None))


def _decibels(error: float) -> float:
    """The signal-to-noise ratio of a relative error."""
    if error == 0:
        return math.inf
    return -10 * math.log10(error) if math.isfinite(error) else -math.inf


class _OutputSums:
    """The sums of squares and products of one output, over all samples."""

    def __init__(self) -> None:
        self._signal = self._noise = self._other = self._dot = 0.0
        self.divergence, self.rows = 0.0, 0

    def add(self, expected: Array, actual: Array) -> None:
        if not _is_float(expected):
            self._noise += float(np.count_nonzero(expected != actual))
            self._signal += expected.size
            return
        reference, output = expected.astype(np.float64), actual.astype(np.float64)
        # Elements that are not finite, as -inf in masks, must be the same in both.
        finite = np.isfinite(reference)
        both_nan = np.isnan(reference) & np.isnan(output)
        same = ~finite & ((reference == output) | both_nan)
        if not (finite | same).all() or not np.isfinite(output[finite]).all():
            self._noise = math.inf
            return
        one, other = reference[finite], output[finite]
        self._noise += float(np.square(one - other).sum())
        self._signal += float(np.square(one).sum())
        self._other += float(np.square(other).sum())
        self._dot += float((one * other).sum())
        if reference.ndim and reference.shape[-1] > 1 and finite.all():
            self.divergence += float(_divergence(reference, output).sum())
            self.rows += math.prod(reference.shape[:-1])

    @property
    def relative(self) -> float:
        """The power of the error divided by that of the expected values."""
        if self._noise == 0:
            return 0.0
        return self._noise / self._signal if self._signal else math.inf

    @property
    def cosine(self) -> float:
        """The cosine between the outputs of both models; -1 if an output is not finite."""
        if not math.isfinite(self._noise):
            return -1.0
        lengths = math.sqrt(self._signal * self._other)
        if not lengths:
            return 1.0 if self._noise == 0 else 0.0
        return min(1.0, self._dot / lengths)


def _is_float(array: Array) -> bool:
    return array.dtype.kind == "f" or str(array.dtype) == "bfloat16"


def _divergence(expected: Array, actual: Array) -> Array:
    """The KL divergence of each row of the last dimension."""
    reference, output = _log_probabilities(expected), _log_probabilities(actual)
    divergence = (np.exp(reference) * (reference - output)).sum(axis=-1)
    return np.asarray(divergence.clip(min=0.0))


def _log_probabilities(rows: Array) -> Array:
    """The logarithms of rows of probabilities; other rows go through a softmax."""
    sums = rows.sum(axis=-1)
    if (rows >= 0).all() and np.abs(sums - 1).max(initial=0.0) < _PROBABILITY_SLACK:
        return np.asarray(np.log(rows.clip(min=np.finfo(np.float64).tiny)))
    shifted = rows - rows.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))
