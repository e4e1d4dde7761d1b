"""Statistics of the values of weights: mean, standard deviation, range and zeros."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from htp_export.errors import InputError

_AT_ONCE = 1 << 20  # elements that are converted to float64 at a time
_NOT_NUMBERS = (ir.DataType.STRING, ir.DataType.COMPLEX64, ir.DataType.COMPLEX128, ir.DataType.UNDEFINED)


@dataclass(frozen=True)
class WeightStatistics:
    """The values of one tensor.

    Mean, standard deviation (of the whole population) and range are those of its finite values; 0 where it has none.
    ``zeros`` and ``not_finite`` (NaN and infinite) are counts.
    """

    elements: int
    mean: float
    std: float
    least: float
    most: float
    zeros: int
    not_finite: int


def weight_statistics(model: ir.Model) -> dict[str, WeightStatistics]:
    """Name of each initializer that holds numbers → what its values are like, of quantized ones as they are stored.

    Reads every weight, one at a time.

    Raises:
        InputError: If the values of a weight cannot be read.
    """
    statistics = {}
    for graph in model.graphs():
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if tensor is None or tensor.dtype in _NOT_NUMBERS or name in statistics:
                continue
            try:
                statistics[name] = _statistics(tensor)
            except (OSError, ValueError) as error:  # a data file that is missing, or too short
                raise InputError(f"the values of the weight {name!r} cannot be read: {error}") from error
    return statistics


def _statistics(tensor: ir.TensorProtocol) -> WeightStatistics:
    count, mean, squares = 0, 0.0, 0.0
    least, most, zeros, not_finite = math.inf, -math.inf, 0, 0
    values = tensor.numpy().reshape(-1)
    for start in range(0, values.size, _AT_ONCE):
        part = values[start : start + _AT_ONCE].astype(np.float64)
        finite = part[np.isfinite(part)]
        not_finite += part.size - finite.size
        if not finite.size:
            continue
        # Chan, Golub and LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979.
        part_mean = float(finite.mean())
        away = part_mean - mean
        total = count + finite.size
        squares += float(((finite - part_mean) ** 2).sum()) + away * away * count * finite.size / total
        mean += away * finite.size / total
        count = total
        least, most = min(least, float(finite.min())), max(most, float(finite.max()))
        zeros += int(finite.size - np.count_nonzero(finite))
    if not count:
        least = most = 0.0
    std = math.sqrt(squares / count) if count else 0.0
    return WeightStatistics(tensor.size, mean, std, least, most, zeros, not_finite)
