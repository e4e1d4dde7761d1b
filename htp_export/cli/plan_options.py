"""Plans as they are typed: rules, files of rules, names of presets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

__all__ = ["PlanOption", "RulesArgument", "read_rules"]

RulesArgument: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(help="SELECTOR=PRECISION, as encoder.layer.*=int8. Later rules win.", show_default=False),
]
PlanOption: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        help="A YAML or JSON file of rules, or int8, w4 or fp16; rules that are typed win.", show_default=False
    ),
]


def read_rules(typed: list[str] | None, plan: Path | None) -> dict[str, Any]:
    """The rules of a file or a preset, and then those that are typed.

    Raises:
        FileError: If the file cannot be read.
        InputError: If a rule cannot be read.
    """
    from htp_export.compress.plans import read_plan, rules_of
    from htp_export.compress.precisions import PRESETS

    rules: dict[str, Any] = {}
    if plan is not None:
        rules.update(PRESETS[str(plan)] if str(plan) in PRESETS else read_plan(plan))
    for selector, value in rules_of(typed or ()).items():
        rules.pop(selector, None)
        rules[selector] = value
    return rules
