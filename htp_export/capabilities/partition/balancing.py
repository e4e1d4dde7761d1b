"""What each part of a chain weighs, and where to cut it, so that its heaviest part is light and little is carried."""

from __future__ import annotations

import itertools
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
"""What is taken of results by module, whichever they have."""


class _ByModule(Protocol):
    @property
    def modules(self) -> Mapping[str, Any]: ...


Balance: TypeAlias = str | Mapping[str, float] | _ByModule
"""Everything that stages can be balanced by."""


def weigh(chain: Chain, balance: Balance) -> list[float]:
    """The weight of every unit of a chain; see `partition` for what it may be balanced by.

    Where only some modules have a number, that of the nearest one above is spread over the nodes
    that it is left for.
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
    """Numbers by module from a JSON file, a plain object or that of ``htp-export profile --json``; or a `FileError`."""
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
    entries = balance if isinstance(balance, Mapping) else getattr(balance, "modules", None)
    if not isinstance(entries, Mapping):
        raise InputError(
            f"stages are balanced by numbers for modules, not by {type(balance).__name__}"
        )
    found: dict[str, float] = {}
    for path, entry in entries.items():
        if path not in tagged:
            raise InputError(
                f"the numbers to balance by name module {path!r}, which is not in the model"
            )
        number = _number_of(entry)
        if not _is_number(number) or not math.isfinite(number) or number < 0:
            raise InputError(
                f"the number to balance by is no weight: module {path!r} has {number!r}"
            )
        found[path] = float(number)
    if not any(found.values()):
        raise InputError("the numbers to balance by are all zero")
    return found


def _number_of(entry: Any) -> Any:
    """What is said of a module: a number, or one of the fields of a row of a result, also as JSON has it."""
    fields = (
        entry if isinstance(entry, dict) else {name: getattr(entry, name, None) for name in _FIELDS}
    )
    return next((fields[name] for name in _FIELDS if fields.get(name) is not None), entry)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _spread(chain: Chain, numbers: Mapping[str, float]) -> list[float]:
    """Give every module's number, less what the modules below it have, to its nodes in equal shares."""
    told = {path: number for path, number in numbers.items() if path in chain.spans}
    left = dict(told)
    for path, number in told.items():
        above = nearest_above(path, told)
        if above is not None:
            left[above] -= number
    units: dict[str, list[int]] = {path: [] for path in told}
    for node, place in chain.places.items():
        nearest = next((up for up in ancestors(chain.owner(node)) if up in told), None)
        if nearest is not None:
            units[nearest].append(place)
    weights = [0.0] * chain.units
    for path, found in units.items():
        low, high = chain.spans[path]
        places = found or range(low, high + 1)
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
    """Choose cuts of a chain into ``count`` consecutive parts, at some of the ``places``: ``k`` lies before link ``k``.

    First the smallest possible weight of the heaviest part is found. Then, of all choices of cuts
    whose heaviest part is heavier than that by no more than ``slack``, the one is taken with the
    least sum of the squared weights of all parts, in units of equal parts, and of the charges of
    its cuts. Both are dynamic programs over the places: linear partitioning, as in Skiena, *The
    Algorithm Design Manual*, section 10.7.
    """
    if count == 1:
        return []
    before = np.concatenate(([0.0], np.cumsum(np.asarray(weights, dtype=np.float64))))
    # weight of the chain up to each place, and to its end
    ends = np.array([0.0, *before[list(places)], before[-1]])
    lightest = _smallest_heaviest(ends, count)
    limit = lightest * (1 + slack) + 1e-9 * ends[-1]
    chosen = _cheapest(ends, [0.0, *charges, 0.0], count, limit)
    return [places[number - 1] for number in chosen]


def _smallest_heaviest(ends: npt.NDArray[np.float64], count: int) -> float:
    heaviest = ends.copy()  # of the chain up to each place, in as many parts as there were rounds
    for parts in range(2, count + 1):
        shorter = heaviest
        heaviest = np.full_like(ends, math.inf)
        for end in range(parts, len(ends)):
            heaviest[end] = np.maximum(
                shorter[parts - 1 : end], ends[end] - ends[parts - 1 : end]
            ).min()
    return float(heaviest[-1])


def _cheapest(
    ends: npt.NDArray[np.float64], charges: Sequence[float], count: int, limit: float
) -> list[int]:
    """The numbers of the places where the parts begin, but for the first one."""
    equal = max(float(ends[-1]) / count, 1e-300)
    last = len(ends) - 1
    cost = np.full(len(ends), math.inf)
    cost[0] = 0.0
    chosen: list[list[int]] = []
    for parts in range(1, count + 1):
        shorter, cost = cost, np.full(len(ends), math.inf)
        came_from = [0] * len(ends)
        for end in range(parts, last + 1 - (count - parts)):
            start = max(bisect_left(ends, ends[end] - limit), parts - 1)
            costs = shorter[start:end] + ((ends[end] - ends[start:end]) / equal) ** 2
            if costs.size:
                # what weighs nothing stays with what is before it
                best = costs.size - 1 - int(np.argmin(costs[::-1]))
                came_from[end], cost[end] = start + best, float(costs[best]) + charges[end]
        chosen.append(came_from)
    cuts = list(
        itertools.accumulate(
            reversed(chosen[1:]), lambda end, came_from: came_from[end], initial=last
        )
    )
    return cuts[:0:-1]
