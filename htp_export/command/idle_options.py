"""Options that have no effect are refused: given twice, empty, or beside others with which nothing reads them.

A command says in ``IDLE`` when which of its options have none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from htp_export.errors import InputError


@dataclass(frozen=True)
class Idle:
    """Options, by the names of their parameters, that have no effect when the values of all parameters are such."""

    options: tuple[str, ...]
    when: Callable[[Mapping[str, Any]], object]
    why: str


JSON_HAS_ALL = "--json writes everything, in the order of the model"

_ALWAYS = (
    Idle(("as_csv",), lambda given: given["as_json"], "--json writes another form of the result"),
    Idle(("sort", "fold", "columns"), lambda given: given.get("as_json"), JSON_HAS_ALL),
)


def check_options(
    parameters: Iterable[Any], typed: Sequence[Any], given: Mapping[str, Any], idle: Sequence[Idle]
) -> None:
    """Refuse options without effect, of those that were typed, one entry each time, with the values that were given."""
    options = {parameter.name: parameter for parameter in parameters if parameter.param_type_name == "option"}
    times = Counter(parameter.name for parameter in typed)
    for name, count in times.items():
        option = options.get(name)
        values = given[name] if isinstance(given[name], list | tuple) else [given[name]]
        if any(isinstance(value, str) and not value.strip(" ,") for value in values):
            shown = f"{name.upper()} is empty: give a value"
            raise InputError(
                shown if option is None else f"{_shown(option, given)} is empty: give a value, or leave it out"
            )
        if option is None:
            continue
        switch = option.is_flag and not option.secondary_opts
        if count > 1 and not option.multiple and not switch:
            raise InputError(f"{_shown(option, given)} is given {count} times, and one value counts: give it once")
    for rule in (*(rule for rule in _ALWAYS if {*rule.options} & {*options}), *idle):
        found = next((name for name in rule.options if name in times and given[name] not in (None, [], ())), None)
        if found is not None and rule.when(given):
            shown = _shown(options[found], given) if found in options else found.upper()
            raise InputError(f"{shown} has no effect: {rule.why}; leave it out")


def _shown(option: Any, given: Mapping[str, Any]) -> str:
    """The option as it is typed; of a pair of switches the one that was."""
    names = option.secondary_opts if option.secondary_opts and given[option.name] is False else option.opts
    return next((str(name) for name in names if name.startswith("--")), str(names[0]))
