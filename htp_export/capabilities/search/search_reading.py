"""The result of a search, read back from what its command wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from htp_export.capabilities.search.search_results import OBJECTIVES, ORIGINS, Search, Trial
from htp_export.errors import InputError, described

__all__ = ["search_from"]


def search_from(data: object) -> Search | None:
    """A search from plain data, as ``Search.to_dict`` and ``front.json`` have it; None if it is another result.

    Args:
        data: The data; anybody may have written it. The tags of the model are not read.

    Raises:
        InputError: If it looks like a search, and is none.

    Examples:
        >>> trial = Trial(0, {"fc": "int8"}, {"error": 0.01, "size": 100.0}, "front", {})
        >>> found = search_from(Search(("error", "size"), (trial,), 0, {"fc": ("int8",)}).to_dict())
        >>> found.trials[0].plan, search_from({"modules": {}})
        ({'fc': 'int8'}, None)
    """
    if not isinstance(data, Mapping) or not {"objectives", "trials", "pareto"} <= data.keys():
        return None
    try:
        objectives = tuple(data["objectives"])
        if not objectives or not set(objectives) <= set(OBJECTIVES):
            raise ValueError(f"objectives are {', '.join(OBJECTIVES)}")
        trials = tuple(_trial(entry, objectives) for entry in data["trials"])
        modules = {str(path): tuple(map(str, choices)) for path, choices in data["modules"].items()}
        notes = tuple(map(str, data.get("notes", ())))
        return Search(objectives, trials, int(data.get("failed", 0)), modules, notes=notes)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(f"this is no result of a search: {described(error)}") from error


def _trial(entry: Mapping[str, Any], objectives: tuple[str, ...]) -> Trial:
    values = {name: float(entry["values"][name]) for name in objectives}
    number, origin = entry["number"], entry["origin"]
    if origin not in ORIGINS or not (number is None or isinstance(number, int)):
        raise ValueError(f"a trial has a number, and comes from {', '.join(ORIGINS)}")
    plan = {str(selector): _precision(precision) for selector, precision in entry["plan"].items()}
    removed = {str(selector): str(value) for selector, value in entry.get("prune", {}).items()}
    return Trial(number, plan, values, origin, dict(entry.get("measured", {})), removed)


def _precision(precision: object) -> str | dict[str, Any]:
    """A name, or a mapping with one."""
    if isinstance(precision, Mapping) and isinstance(precision.get("precision"), str):
        return dict(precision)
    if not isinstance(precision, str):
        raise TypeError("a plan gives each selector a precision")
    return precision
