"""What the page's scripts read of a search: its picture, its front, and the plan of each point."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from htp_export.errors import InputError

if TYPE_CHECKING:
    from htp_export.capabilities.search.search_results import Search, Trial

__all__ = ["front_data"]


def front_data(search: Search) -> dict[str, Any]:
    """The data of one search.

    Args:
        search: The search. With one objective, or without finite values, it has no picture.

    Examples:
        >>> from htp_export.capabilities.search.search_results import Search, Trial
        >>> trial = Trial(3, {"fc": "int8"}, {"error": 0.01, "size": 100.0}, "front", {})
        >>> data = front_data(Search(("error", "size"), (trial,), 0, {"fc": ("int8",)}))
        >>> data["front"], data["trials"][0]["name"], data["trials"][0]["values"], data["trials"][0]["plan"]
        ([0], 'trial 3', ['1.00e-02', '100 B'], [('fc', 'int8')])
    """
    from htp_export.capabilities.search.front_files import front_svg, plan_file

    front = [next(place for place, other in enumerate(search.trials) if other is trial) for trial in search.pareto]
    files = {place: plan_file(number, search.trials[place]) for number, place in enumerate(front)}
    try:
        picture = front_svg(search)
    except InputError:
        picture = ""
    return {
        "summary": search.summary,
        "objectives": list(search.objectives),
        "svg": picture,
        "front": front,
        "trials": [_trial(trial, search, files.get(place, "")) for place, trial in enumerate(search.trials)],
    }


def _trial(trial: Trial, search: Search, file: str) -> dict[str, Any]:
    from htp_export.capabilities.search.search_results import trial_columns

    texts = {column.name: column.text or str for column in trial_columns(search.objectives)}
    return {
        "name": trial.name,
        "file": file,
        "values": [texts[name](trial.values[name]) for name in search.objectives],
        "origin": trial.origin,
        "precisions": trial.counted,
        "plan": [
            (selector or "(root)", ", ".join([chosen, *_fields(trial.plan.get(selector))]))
            for selector, chosen in trial.choices.items()
        ],
    }


def _fields(precision: object) -> list[str]:
    """The fields of a precision that differ, in words."""
    if not isinstance(precision, Mapping):
        return []
    return [f"{name} {value}" for name, value in precision.items() if name != "precision"]
