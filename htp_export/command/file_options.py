"""Arguments and options that several commands on a file have, in the same words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from htp_export.command.outputs import Writes
from htp_export.command.terminal import print_json, print_text, show, split_names
from htp_export.files.targets import Kind
from htp_export.process.bounds import MOST_RUNS, MOST_SEED
from htp_export.results.columns import MODULE, csv_text, sorted_by

if TYPE_CHECKING:
    from rich.console import RenderableType

    from htp_export.model.tagged import TaggedModel
    from htp_export.results.tables import ModuleTable

FileArgument: TypeAlias = Annotated[Path, "The ONNX file."]
_OUTPUT = typer.Option("--output", "-o", help="The ONNX file to write.")
OutputOption: TypeAlias = Annotated[Path, _OUTPUT, Writes(Kind.MODEL, in_place=True)]
NewOutputOption: TypeAlias = Annotated[Path, _OUTPUT, Writes(Kind.MODEL)]
ShareOption: TypeAlias = Annotated[
    bool, "Write no weights: refer to the data file of the model that is read. It must stay, in the folder of OUTPUT."
]
ModuleArgument: TypeAlias = Annotated[str, "Path of the module: encoder.layer.0; . is the root."]
JsonOption: TypeAlias = Annotated[bool, "Write the result as JSON."]
SelectOption: TypeAlias = Annotated[
    list[str] | None, "Only these modules: encoder.layer.*, class:Linear, re:..., !excluded. May be repeated."
]
DepthOption: TypeAlias = Annotated[int | None, typer.Option(min=0, help="Levels below the root.")]
ProviderOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--provider", "--providers", help="Execution providers in order, also by comma: cuda,cpu.", show_default="cpu"
    ),
]
MapOption: TypeAlias = Annotated[
    bool, typer.Option("--embed-map", help="Write a map too: then carry brings tags back when this file is gone.")
]


def read_providers(typed: list[str] | None) -> list[str]:
    """The full names of execution providers: ``cuda`` is short for ``CUDAExecutionProvider``."""
    import onnxruntime

    known: dict[str, str] = {provider.lower(): provider for provider in onnxruntime.get_all_providers()}
    named = {name: name.lower() for name in split_names(typed) or ["cpu"]}
    return [known.get(low) or known.get(f"{low}executionprovider", name) for name, low in named.items()]


def seed_option(what: str) -> Any:
    """The option ``--seed``, of a number that all random generators take."""
    return typer.Option(min=0, max=MOST_SEED - MOST_RUNS, help=what)


@dataclass(frozen=True)
class TableOptions:
    """Which modules a table shows, and how: the options of every command that prints one in all forms."""

    depth: DepthOption = None
    select: SelectOption = None
    sort: Annotated[str | None, "A column: a list, the largest first."] = None
    as_json: JsonOption = False
    as_csv: Annotated[bool, "Write CSV."] = False
    fold: Annotated[bool, typer.Option("--fold/--no-fold", help="Draw alike siblings as one line.")] = True

    def report(self, data: dict[str, Any], csv: Callable[[], str], draw: Callable[[], RenderableType]) -> None:
        """Write a result in the form that was asked for."""
        if self.as_json:
            print_json(data)
        elif self.as_csv:
            print_text(csv())
        else:
            show(draw())

    def report_modules(self, result: ModuleTable, tagged: TaggedModel, **facts: Any) -> None:
        """Write a result of some modules of a model; JSON has all of them, and ``facts`` in front."""
        from htp_export.drawing.module_table import render_modules
        from htp_export.model.module_facts import visible

        rows, listed = result.by_module, {row.path for row in result.listed}
        shown = [rows[path] for path in visible(tagged, self.depth, self.select or None) if path in rows]
        drawn = [row for row in shown if row.path in listed]
        self.report(
            {**facts, **result.to_dict()},
            lambda: csv_text([MODULE, *result.columns], sorted_by(shown, result.columns, self.sort)),
            lambda: render_modules(result, drawn, fold=self.fold, sort=self.sort),
        )
