"""Arguments and options of several commands, and the check that each option has an effect.

An option is refused if it is repeated, empty, or without effect together with other options. A
command declares the last case in ``IDLE``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from htp_export.command.outputs import Writes
from htp_export.command.terminal import print_json, print_text, show
from htp_export.errors import InputError
from htp_export.files.targets import Kind
from htp_export.process.argument_types import MOST_RUNS, MOST_SEED
from htp_export.reporting.columns import MODULE, csv_text, sorted_by

if TYPE_CHECKING:
    from rich.console import RenderableType

    from htp_export.model.tagged import TaggedModel
    from htp_export.reporting.tables import ModuleTable


@dataclass(frozen=True)
class Idle:
    """Options that have no effect under a condition on the values of all parameters.

    ``options``: the names of their parameters; ``why`` is the reason for messages.
    """

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
    """Refuse empty options and arguments, repeated options, and options without effect.

    Args:
        parameters: The parameters of the command.
        typed: The parameter of each argument and option on the command line.
        given: The value of each parameter.
        idle: The conditions under which options of the command have no effect.
    """
    options = {
        parameter.name: parameter
        for parameter in parameters
        if parameter.param_type_name == "option"
    }
    counts = Counter(parameter.name for parameter in typed)
    for name, count in counts.items():
        _check_typed(name, count, options.get(name), given)
    rules = [rule for rule in _ALWAYS if not options.keys().isdisjoint(rule.options)]
    for rule in (*rules, *idle):
        used = [name for name in rule.options if name in counts and _has_value(given[name])]
        if used and rule.when(given):
            name = used[0]
            shown = _shown(options[name], given) if name in options else name.upper()
            raise InputError(f"{shown} has no effect: {rule.why}; leave it out")


def _check_typed(name: str, count: int, option: Any, given: Mapping[str, Any]) -> None:
    """Refuse an empty argument or option, and a repeated option; ``option`` is None for an argument."""
    values = given[name] if isinstance(given[name], list | tuple) else [given[name]]
    if any(isinstance(value, str) and not value.strip(" ,") for value in values):
        if option is None:
            raise InputError(f"{name.upper()} is empty: give a value")
        raise InputError(f"{_shown(option, given)} is empty: give a value, or leave it out")
    if option is None or count == 1 or option.multiple:
        return
    is_switch = option.is_flag and not option.secondary_opts
    if not is_switch:
        raise InputError(
            f"{_shown(option, given)} is given {count} times, but takes one value: give it once"
        )


def _has_value(value: Any) -> bool:
    return value not in (None, [], ())


def _shown(option: Any, given: Mapping[str, Any]) -> str:
    """Return the name of an option; for a pair of switches, that of the one that was typed."""
    names = option.opts
    if option.secondary_opts and given[option.name] is False:
        names = option.secondary_opts
    return next((str(name) for name in names if name.startswith("--")), str(names[0]))


FileArgument: TypeAlias = Annotated[Path, "The ONNX file."]
_OUTPUT = typer.Option("--output", "-o", help="The ONNX file to write.")
OutputOption: TypeAlias = Annotated[Path, _OUTPUT, Writes(Kind.MODEL, in_place=True)]
NewOutputOption: TypeAlias = Annotated[Path, _OUTPUT, Writes(Kind.MODEL)]
ShareOption: TypeAlias = Annotated[
    bool,
    "Write no weights: refer to the data file of the model that is read. It must stay, in the folder of OUTPUT.",
]
ModuleArgument: TypeAlias = Annotated[str, "Path of the module: encoder.layer.0; . is the root."]
JsonOption: TypeAlias = Annotated[bool, "Write the result as JSON."]
SelectOption: TypeAlias = Annotated[
    list[str] | None,
    "Only these modules: encoder.layer.*, class:Linear, re:..., !excluded. May be repeated.",
]
DepthOption: TypeAlias = Annotated[int | None, typer.Option(min=0, help="Levels below the root.")]
MapOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--embed-map", help="Write a map too: then carry brings tags back when this file is gone."
    ),
]


def count_option(what: str, least: int = 1) -> Any:
    """Declare an option for a number of runs, with this help."""
    return typer.Option(min=least, max=MOST_RUNS, help=what)


def seed_option(what: str) -> Any:
    """Declare the option ``--seed``, for a number that all random generators accept, with this help."""
    return typer.Option(min=0, max=MOST_SEED - MOST_RUNS, help=what)


@dataclass(frozen=True)
class TableOptions:
    """The options of a command that prints a table of modules: their selection, and the form of the table."""

    depth: DepthOption = None
    select: SelectOption = None
    sort: Annotated[str | None, "A column: a list, the largest first."] = None
    as_json: JsonOption = False
    as_csv: Annotated[bool, "Write CSV."] = False
    fold: Annotated[
        bool, typer.Option("--fold/--no-fold", help="Draw alike siblings as one line.")
    ] = True

    def report(
        self, data: dict[str, Any], csv: Callable[[], str], draw: Callable[[], RenderableType]
    ) -> None:
        """Print a result in the requested form."""
        if self.as_json:
            print_json(data)
        elif self.as_csv:
            print_text(csv())
        else:
            show(draw())

    def report_modules(self, result: ModuleTable, tagged: TaggedModel, **facts: Any) -> None:
        """Print a table of the selected modules; JSON contains all modules, after ``facts``."""
        from htp_export.model.module_facts import visible
        from htp_export.reporting.module_table import render_modules

        rows = result.by_module
        listed = {row.path for row in result.listed}
        selected = visible(tagged, self.depth, self.select or None)
        shown = [rows[path] for path in selected if path in rows]
        drawn = [row for row in shown if row.path in listed]

        def csv() -> str:
            in_order = sorted_by(shown, result.columns, self.sort)
            return csv_text([MODULE, *result.columns], in_order)

        def draw() -> RenderableType:
            return render_modules(result, drawn, fold=self.fold, sort=self.sort)

        self.report({**facts, **result.to_dict()}, csv, draw)
