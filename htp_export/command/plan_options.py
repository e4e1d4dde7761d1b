"""Plans and data as they are typed: rules, files of rules, names of presets, files of inputs, factories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeAlias

import typer

from htp_export.command.sources import call_factory
from htp_export.errors import InputError

__all__ = [
    "DataOption",
    "EntryOption",
    "MetricOption",
    "PlanArgument",
    "RuleOption",
    "read_data",
    "read_metric",
    "read_rules",
]

PlanArgument: TypeAlias = Annotated[
    str | None, typer.Argument(help="A plan, .yaml or .json, or a preset: int8, w4, fp16.")
]
RuleOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(metavar="SELECTOR=PRECISION", help="A rule after those of the plan; may be repeated."),
]
DataOption: TypeAlias = Annotated[list[Path] | None, "Inputs of a run as .npz; may be repeated."]
EntryOption: TypeAlias = Annotated[
    str | None, "package.module:factory that returns the runs: dicts of input name and array."
]

MetricOption: TypeAlias = Annotated[
    str | None,
    "package.module:factory that returns a function: it gets the outputs of all runs, and returns a number, "
    "the larger the better.",
]


def read_rules(
    plan: str | Path | None, typed: list[str] | None, presets: Mapping[str, Mapping[str, str]] = MappingProxyType({})
) -> dict[str, Any]:
    """The rules of a file or a preset, and then those that are typed, ``SELECTOR=VALUE``.

    Raises:
        BadParameter: If there is no rule.
        FileError: If the file cannot be read.
        InputError: If a rule cannot be read.
    """
    from htp_export.plans.rules import read_plan, rules_of

    rules: dict[str, Any] = {}
    if plan is not None:
        rules.update(presets[str(plan)] if str(plan) in presets else read_plan(plan))
    for selector, value in rules_of(typed or ()).items():
        rules.pop(selector, None)  # it holds at its new place
        rules[selector] = value
    if not rules:
        named = f"a plan, a preset ({', '.join(presets)})" if presets else "a plan"
        raise typer.BadParameter(f"give {named}, or --rule SELECTOR={'PRECISION' if presets else 'VALUE'}")
    return rules


def read_data(data: list[Path] | None, entry: str | None, seed: int = 0) -> Any:
    """The runs of files, or those that a factory returns; None without either.

    Raises:
        InputError: If both are given, or the factory fails.
    """
    if data and entry:
        raise InputError("data come from --data or from --entry, not from both")
    if entry is not None:
        return call_factory(entry, seed)
    return _NpzRuns(tuple(data)) if data else None


def read_metric(entry: str | None) -> Any:
    """The metric that a factory returns; None without one.

    Raises:
        InputError: If the factory fails, or returns no function.
    """
    if entry is None:
        return None
    metric = call_factory(entry)
    if not callable(metric):
        raise InputError(f"{entry} returned no function, but {type(metric).__name__}")
    return metric


class _NpzRuns:
    """Runs in files, each read when it is its turn."""

    def __init__(self, files: tuple[Path, ...]) -> None:
        self._files = files

    def __iter__(self) -> Iterator[Any]:
        from htp_export.files.npz_file import read_npz

        return (read_npz(file) for file in self._files)
