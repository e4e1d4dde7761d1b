"""Command line options for plans and metrics: rules, plan files, presets, factories."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from htp_export.errors import InputError, RuleError, unknown_name
from htp_export.process.user_code import call_factory

PlanArgument: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        help="A plan, .yaml or .json; or a precision for the whole model: auto, u8s8, int4, ..."
    ),
]
_WITH_FIELDS = re.compile(r"(.+?)=([\w-]+(?::\w+=[^:=]+)+)")
"""A selector, and a value with fields: ``lm_head=int4:accuracy_level=0``."""
_PLANS = (".yaml", ".yml", ".json")


def rule_option(value: str, examples: str) -> Any:
    """The option ``--rule`` with values of one kind, such as ``PRECISION``."""
    return typer.Option(
        metavar=f"SELECTOR={value}",
        help=f"After the rules of the plan: {examples}; may be repeated.",
    )


RuleOption: TypeAlias = Annotated[list[str] | None, rule_option("PRECISION", "encoder.**=int8")]

MetricOption: TypeAlias = Annotated[
    str | None,
    "package.module:factory that returns a function: it gets the outputs of all runs, and returns a number, "
    "the larger the better.",
]


def read_rules(
    plan: str | Path | None,
    typed: list[str] | None,
    value: str = "VALUE",
    *,
    named: Iterable[str] = (),
) -> dict[str, Any]:
    """Read rules from a plan file, or a preset of ``named``, followed by rules of options."""
    rules: dict[str, Any] = {}
    if plan is not None:
        rules.update(_plan_rules(plan, value, named))
    for selector, typed_value in typed_pairs(typed or (), "--rule", f"SELECTOR={value}").items():
        rules.pop(selector, None)  # a repeated rule moves to the end, where it takes precedence
        rules[selector] = typed_value
    if not rules:
        precisions = f", a precision ({', '.join(named)})" if named else ""
        raise InputError(
            f"the rules are missing: give a plan (.yaml or .json){precisions}, or --rule SELECTOR={value}"
        )
    return rules


def _plan_rules(plan: str | Path, value: str, named: Iterable[str]) -> dict[str, Any]:
    """The rules of a plan file or a preset."""
    from htp_export.plans.rules import read_plan

    if str(plan).partition(":")[0] in named:
        return {".": str(plan)}
    if Path(plan).suffix.lower() not in _PLANS and not Path(plan).exists():
        unknown = f" {str(plan)!r}"
        if named:
            unknown = f" and no precision {unknown_name(str(plan), named)}"
        raise InputError(f"no file{unknown}; a rule is an option: --rule SELECTOR={value}")
    rules = read_plan(Path(plan))
    # A file with the settings of one precision holds for the whole model.
    is_precision = bool(named) and "precision" in rules
    return {".": rules} if is_precision else rules


def typed_pairs(texts: Iterable[str], option: str, form: str) -> dict[str, str]:
    """Parse ``NAME=VALUE`` pairs; a repeated name has its last value, at the last position.

    Examples:
        >>> typed_pairs(["lm_head=int4:accuracy_level=0"], "--rule", "SELECTOR=VALUE")
        {'lm_head': 'int4:accuracy_level=0'}
    """
    pairs: dict[str, str] = {}
    for text in texts:
        name, found, value = (part.strip() for part in _divided(text))
        if not (found and name and value):
            raise InputError(f"{option} {text}: write {form}")
        pairs.pop(name, None)
        pairs[name] = value
    return pairs


def _divided(text: str) -> tuple[str, str, str]:
    """Split a pair at the last ``=`` before its value.

    A selector may contain ``=``, and each field of a value has one.
    """
    with_fields = _WITH_FIELDS.fullmatch(text)
    if with_fields is None:
        return text.rpartition("=")
    return (with_fields[1], "=", with_fields[2])


@contextlib.contextmanager
def rules_as_typed(plan: object, typed: Sequence[str] | None) -> Iterator[None]:
    """In a ``with`` block: add the option or plan file to errors of rules."""
    try:
        yield
    except RuleError as error:
        place = str(plan)
        if Path(place).suffix.lower() in _PLANS:
            place = f"{plan}: rule {error.selector!r}"
        for text in typed or ():  # the last rule of a selector takes precedence
            if _divided(text)[0].strip() == error.selector:
                place = f"--rule {text}"
        raise InputError(f"{place}: {error.problem}") from error


def read_metric(entry: str | None) -> Any:
    """Call a metric factory; None without one."""
    if entry is None:
        return None
    metric = call_factory(entry)
    if not callable(metric):
        raise InputError(f"{entry} returned no function, but {type(metric).__name__}")
    return metric
