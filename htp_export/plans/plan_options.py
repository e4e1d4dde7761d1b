"""Plans and metrics as they are typed: rules, files of rules, names of presets, factories."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from htp_export.errors import InputError, RuleError
from htp_export.process.user_code import call_factory

PlanArgument: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        help="A plan, .yaml or .json; or a precision for the whole model: auto, u8s8, int4, ..."
    ),
]
_WITH_FIELDS = re.compile(r"(.+?)=([\w-]+(?::\w+=[^:=]+)+)")
_PLANS = (".yaml", ".yml", ".json")


def rule_option(value: str, examples: str) -> Any:
    """The option ``--rule``, whose values are such."""
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
    """The rules of a file, or a value of ``named`` for the whole model, and then those that are typed."""
    from htp_export.plans.rules import read_plan

    rules: dict[str, Any] = {}
    if plan is not None:
        is_named = str(plan).partition(":")[0] in named
        if not (is_named or Path(plan).suffix.lower() in _PLANS or Path(plan).exists()):
            known = (
                f" and no precision {plan!r}; there are {', '.join(named)}"
                if named
                else f" {str(plan)!r}"
            )
            raise InputError(f"no file{known}; a rule is an option: --rule SELECTOR={value}")
        given: Any = str(plan) if is_named else read_plan(Path(plan))
        rules.update({".": given} if is_named or (named and "precision" in given) else given)
    for selector, given in typed_pairs(typed or (), "--rule", f"SELECTOR={value}").items():
        rules.pop(selector, None)  # it holds at its new place
        rules[selector] = given
    if not rules:
        precisions = f", a precision ({', '.join(named)})" if named else ""
        raise InputError(
            f"the rules are missing: give a plan (.yaml or .json){precisions}, or --rule SELECTOR={value}"
        )
    return rules


def typed_pairs(texts: Iterable[str], option: str, form: str) -> dict[str, str]:
    """Pairs as they are typed, ``NAME=VALUE``; of equal names, the last one holds, at its place.

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
    """A pair at its last ``=`` before a value, whose fields have one each; a selector may hold some, too."""
    with_fields = _WITH_FIELDS.fullmatch(text)
    return text.rpartition("=") if with_fields is None else (with_fields[1], "=", with_fields[2])


@contextlib.contextmanager
def rules_as_typed(plan: object, typed: Sequence[str] | None) -> Iterator[None]:
    """Raise errors of rules again with the option or the file in which the rule is, inside a ``with`` block."""
    try:
        yield
    except RuleError as error:
        rules = (
            text for text in reversed(typed or ()) if _divided(text)[0].strip() == error.selector
        )
        place = next((f"--rule {text}" for text in rules), None)
        if place is None:
            is_file = Path(str(plan)).suffix.lower() in _PLANS
            place = f"{plan}: rule {error.selector!r}" if is_file else str(plan)
        raise InputError(f"{place}: {error.problem}") from error


def read_metric(entry: str | None) -> Any:
    """The metric that a factory returns; None without one."""
    if entry is None:
        return None
    metric = call_factory(entry)
    if not callable(metric):
        raise InputError(f"{entry} returned no function, but {type(metric).__name__}")
    return metric
