"""What each part of a model weighs: bytes of parameters, or numbers that were measured or counted by module."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from htp_export.capabilities.partition.chain import Chain
from htp_export.capabilities.partition.constants import weight_bytes
from htp_export.errors import FileError, InputError
from htp_export.files.json_file import read_json
from htp_export.model.tagged import TaggedModel

__all__ = ["Balance", "read_weights", "weigh"]

_FIELDS = ("total_ms", "flops")
"""What is taken of results by module, whichever they have."""


class _ByModule(Protocol):
    """What ``htp_export.profile`` and ``htp_export.cost`` give."""

    @property
    def modules(self) -> Mapping[str, Any]: ...


Balance: TypeAlias = str | Mapping[str, float] | _ByModule
"""Everything that stages can be balanced by."""


def weigh(tagged: TaggedModel, chain: Chain, balance: Balance) -> list[float]:
    """The weight of every unit of a chain.

    Args:
        tagged: The model.
        chain: Its chain.
        balance: ``"parameters"``, bytes of weights, each where it is read first; ``"flops"``; or module path → the
            number of the module with all below it; or a result with these. Where only some modules are told, the
            number of the nearest one above is spread over the nodes that it is left for.

    Raises:
        InputError: If it is something else, names modules that are not there, or has a negative number; or if the
            model has open sizes, whose FLOPs nobody knows.
    """
    from htp_export.capabilities.cost.costing import cost

    if balance == "parameters":
        return _bytes_of_parameters(chain)
    if balance == "flops":
        balance = counted = cost(tagged)
        if counted.assumed:
            raise InputError(
                "the FLOPs of a model with open dimensions depend on their sizes; balance its stages by 'parameters', "
                "or by the result of cost() for the sizes that you have"
            )
    if isinstance(balance, str):
        raise InputError(f"stages are balanced by 'parameters', 'flops' or numbers for modules, not {balance!r}")
    return _spread(tagged, chain, _numbers(tagged, balance))


def read_weights(path: str | os.PathLike[str]) -> dict[str, float]:
    """Numbers by module from a JSON file: a plain object, or what ``htp-export profile --json`` writes.

    Raises:
        FileError: If it cannot be read, or is neither.
    """
    path = Path(path)
    data = read_json(path)
    listed = data.get("modules", data) if isinstance(data, dict) else None
    if not isinstance(listed, dict):
        raise FileError(path, "holds no JSON object of module path → number")
    found = {}
    for module, entry in listed.items():
        number = next((entry[field] for field in _FIELDS if field in entry), None) if isinstance(entry, dict) else entry
        if not isinstance(number, int | float) or isinstance(number, bool):
            raise FileError(path, f"module {module!r} has no number, and none as {' or '.join(_FIELDS)}")
        found[module] = float(number)
    return found


def _bytes_of_parameters(chain: Chain) -> list[float]:
    weights = [0.0] * len(chain.units)
    for value, place in chain.weight_places.items():
        weights[place] += weight_bytes([value])
    return weights


def _numbers(tagged: TaggedModel, balance: Mapping[str, float] | _ByModule) -> dict[str, float]:
    """Module path → number, checked."""
    entries = balance if isinstance(balance, Mapping) else getattr(balance, "modules", None)
    if not isinstance(entries, Mapping):
        raise InputError(f"stages are balanced by numbers for modules, not by {type(balance).__name__}")
    found: dict[str, float] = {}
    for path, entry in entries.items():
        if path not in tagged:
            raise InputError(f"the numbers to balance by name module {path!r}, which is not in the model")
        number = next((getattr(entry, field) for field in _FIELDS if hasattr(entry, field)), entry)
        if not isinstance(number, int | float) or not math.isfinite(number) or number < 0:
            raise InputError(f"the number to balance by is no weight: module {path!r} has {number!r}")
        found[path] = float(number)
    if not any(found.values()):
        raise InputError("the numbers to balance by are all zero")
    return found


def _spread(tagged: TaggedModel, chain: Chain, numbers: Mapping[str, float]) -> list[float]:
    """Give every module's number, less what the modules below it have, to its nodes in equal shares."""
    told = {path: number for path, number in numbers.items() if path in chain.spans}
    left = dict(told)
    for path, number in told.items():
        above = next((up for up in chain.lineage(path) if up in told and up != path), None)
        if above is not None:
            left[above] -= number
    units: dict[str, list[int]] = {path: [] for path in told}
    for node, place in chain.places.items():
        owner = next(iter(tagged.owners_of(node)), "")
        nearest = next((up for up in chain.lineage(owner) if up in told), None)
        if nearest is not None:
            units[nearest].append(place)
    weights = [0.0] * len(chain.units)
    for path, found in units.items():
        low, high = chain.spans[path]
        places = found or range(low, high + 1)
        for place in places:
            weights[place] += max(left[path], 0.0) / len(places)
    return weights
