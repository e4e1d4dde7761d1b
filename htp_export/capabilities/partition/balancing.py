"""Weights of the parts of a chain, and balanced cuts with few tensors between the parts."""

from __future__ import annotations

import math
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from htp_export.capabilities.partition.chain import Chain
from htp_export.errors import FileError, InputError
from htp_export.files.text_files import read_json
from htp_export.format.tags import ancestors, nearest_above
from htp_export.model.parts import constant_bytes, weight_bytes
from htp_export.model.tagged import TaggedModel

_FIELDS = ("total_ms", "flops")
"""Fields of results by module that can serve as weights, in order of preference."""


class _ByModule(Protocol):
    @property
    def modules(self) -> Mapping[str, Any]: ...


Balance: TypeAlias = str | Mapping[str, float] | _ByModule
"""The types by which stages can be balanced."""


def weigh(chain: Chain, balance: Balance) -> list[float]:
    """The weight of every unit of a chain; see `partition` for the types of ``balance``.

    Where only some modules have a number, the number of the nearest ancestor is spread over the
    remaining nodes.
    """
    from htp_export.costs.costing import cost

    if balance == "parameters":
        weights = [0.0] * chain.units
        for value, place in chain.weight_places.items():
            weights[place] += weight_bytes([value])
        for node, place in chain.places.items():
            weights[place] += constant_bytes(node)
        return weights
    if balance == "flops":
        balance = counted = cost(chain.tagged)
        if counted.assumed:
            raise InputError(
                "the FLOPs of a model with open dimensions depend on their sizes; balance its stages by 'parameters', "
                "or by the result of cost() for the sizes that you have"
            )
    if isinstance(balance, str):
        raise InputError(
            f"stages are balanced by 'parameters', 'flops' or numbers for modules, not {balance!r}"
        )
    return _spread(chain, _numbers(chain.tagged, balance))


def read_weights(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read numbers by module from a JSON file: a plain object, or ``htp-export profile --json``.

    Raises:
        FileError: The file has another content.
    """
    data = read_json(path)
    listed = data.get("modules", data) if isinstance(data, dict) else None
    if not isinstance(listed, dict):
        raise FileError(path, "holds no JSON object of module path → number")
    for module, entry in listed.items():
        if not _is_number(_number_of(entry)):
            raise FileError(
                path, f"module {module!r} has no number, and none as {' or '.join(_FIELDS)}"
            )
    return listed


def _numbers(tagged: TaggedModel, balance: Mapping[str, Any] | _ByModule) -> dict[str, float]:
    """Module path → validated number."""
    entries = balance if isinstance(balance, Mapping) else getattr(balance, "modules", None)
    if not isinstance(entries, Mapping):
        raise InputError(
            f"stages are balanced by numbers for modules, not by {type(balance).__name__}"
        )
    numbers: dict[str, float] = {}
    for path, entry in entries.items():
        if path not in tagged:
            raise InputError(f"balance names module {path!r}, which is not in the model")
        number = _number_of(entry)
        if not _is_number(number) or not math.isfinite(number) or number < 0:
            raise InputError(
                f"balance needs finite numbers from 0 up: module {path!r} has {number!r}"
            )
        numbers[path] = float(number)
    if not any(numbers.values()):
        raise InputError("the numbers to balance by are all zero")
    return numbers


def _number_of(entry: Any) -> Any:
    """The value for a module: a number, or one of ``_FIELDS`` of a row, as an object or JSON."""
    for name in _FIELDS:
        value = entry.get(name) if isinstance(entry, dict) else getattr(entry, name, None)
        if value is not None:
            return value
    return entry


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _spread(chain: Chain, numbers: Mapping[str, float]) -> list[float]:
    """Divide every module's number, minus its descendants' numbers, equally among its nodes."""
    numbered = {path: number for path, number in numbers.items() if path in chain.spans}
    left = dict(numbered)
    for path, number in numbered.items():
        above = nearest_above(path, numbered)
        if above is not None:
            left[above] -= number
    units: dict[str, list[int]] = {path: [] for path in numbered}
    for node, place in chain.places.items():
        for ancestor in ancestors(chain.owner(node)):
            if ancestor in numbered:
                units[ancestor].append(place)
                break
    weights = [0.0] * chain.units
    for path, own_units in units.items():
        low, high = chain.spans[path]
        places = own_units or range(low, high + 1)
        for place in places:
            weights[place] += max(left[path], 0.0) / len(places)
    return weights


def balanced_cuts(
    weights: Sequence[float],
    places: Sequence[int],
    charges: Sequence[float],
    count: int,
    slack: float,
) -> list[int]:
    """Choose cuts of a chain into ``count`` parts; a cut at place ``k`` is before link ``k``.

    First the smallest possible weight of the heaviest part is computed. Among all choices whose
    heaviest part is heavier by at most ``slack``, the result has the least sum of the squared
    weights of all parts, in units of equal parts, and of the charges of its cuts. Both steps are
    dynamic programs over the ``places``: linear partitioning, as in Skiena, *The Algorithm Design
    Manual*, section 10.7.
    """
    if count == 1:
        return []
    before = np.concatenate(([0.0], np.cumsum(np.asarray(weights, dtype=np.float64))))
    # Weight of the chain up to each place, and up to its end.
    ends = np.array([0.0, *before[list(places)], before[-1]])
    lightest = _smallest_heaviest(ends, count)
    limit = lightest * (1 + slack) + 1e-9 * ends[-1]
    chosen = _cheapest(ends, [0.0, *charges, 0.0], count, limit)
    return [places[number - 1] for number in chosen]


def _smallest_heaviest(ends: npt.NDArray[np.float64], count: int) -> float:
    """The smallest possible weight of the heaviest of ``count`` parts."""
    heaviest = ends.copy()  # of the chain up to each place, in as many parts as rounds so far
    for parts in range(2, count + 1):
        shorter = heaviest
        heaviest = np.full_like(ends, math.inf)
        for end in range(parts, len(ends)):
            last_parts = ends[end] - ends[parts - 1 : end]
            heaviest[end] = np.maximum(shorter[parts - 1 : end], last_parts).min()
    return float(heaviest[-1])


def _cheapest(
    ends: npt.NDArray[np.float64], charges: Sequence[float], count: int, limit: float
) -> list[int]:
    """The indices in ``ends`` at which the parts begin, without the first part."""
    equal = max(float(ends[-1]) / count, 1e-300)
    last = len(ends) - 1
    cost = np.full(len(ends), math.inf)
    cost[0] = 0.0
    chosen: list[list[int]] = []
    for parts in range(1, count + 1):
        shorter = cost
        cost = np.full(len(ends), math.inf)
        came_from = [0] * len(ends)
        for end in range(parts, last + 1 - (count - parts)):
            start = max(bisect_left(ends, ends[end] - limit), parts - 1)
            costs = shorter[start:end] + ((ends[end] - ends[start:end]) / equal) ** 2
            if costs.size:
                # Of equal costs, the last start: units without weight stay in the part before.
                best = costs.size - 1 - int(np.argmin(costs[::-1]))
                came_from[end] = start + best
                cost[end] = float(costs[best]) + charges[end]
        chosen.append(came_from)
    cuts = [last]
    for came_from in reversed(chosen[1:]):
        cuts.append(came_from[cuts[-1]])
    return cuts[:0:-1]
