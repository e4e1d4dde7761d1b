"""Arguments and options that several commands have, in the same words, and which options have no effect.

Options without effect are refused: given twice, empty, or beside others with which nothing reads
them. A command says in ``IDLE`` when which of its options have none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from htp_export.command.outputs import Writes
from htp_export.command.terminal import print_json, print_text, show, split_names
from htp_export.errors import FileError, InputError
from htp_export.files.targets import Kind
from htp_export.files.text_files import read_json
from htp_export.format.bounds import number_in
from htp_export.process.argument_types import MOST_RUNS, MOST_SEED
from htp_export.process.user_code import names_factory
from htp_export.reporting.columns import MODULE, csv_text, sorted_by

if TYPE_CHECKING:
    from rich.console import RenderableType

    from htp_export.model.tagged import TaggedModel
    from htp_export.reporting.tables import ModuleTable


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
    options = {
        parameter.name: parameter
        for parameter in parameters
        if parameter.param_type_name == "option"
    }
    times = Counter(parameter.name for parameter in typed)
    for name, count in times.items():
        option = options.get(name)
        values = given[name] if isinstance(given[name], list | tuple) else [given[name]]
        if any(isinstance(value, str) and not value.strip(" ,") for value in values):
            shown = f"{name.upper()} is empty: give a value"
            raise InputError(
                shown
                if option is None
                else f"{_shown(option, given)} is empty: give a value, or leave it out"
            )
        if option is None:
            continue
        switch = option.is_flag and not option.secondary_opts
        if count > 1 and not option.multiple and not switch:
            raise InputError(
                f"{_shown(option, given)} is given {count} times, and one value counts: give it once"
            )
    for rule in (*(rule for rule in _ALWAYS if {*rule.options} & {*options}), *idle):
        found = next(
            (name for name in rule.options if name in times and given[name] not in (None, [], ())),
            None,
        )
        if found is not None and rule.when(given):
            shown = _shown(options[found], given) if found in options else found.upper()
            raise InputError(f"{shown} has no effect: {rule.why}; leave it out")


def _shown(option: Any, given: Mapping[str, Any]) -> str:
    """The option as it is typed; of a pair of switches the one that was."""
    names = (
        option.secondary_opts
        if option.secondary_opts and given[option.name] is False
        else option.opts
    )
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
ProviderOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--provider",
        "--providers",
        help="Execution providers in order, also by comma: cuda,cpu.",
        show_default="cpu",
    ),
]
MapOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--embed-map", help="Write a map too: then carry brings tags back when this file is gone."
    ),
]


def read_providers(typed: list[str] | None) -> list[str]:
    """The full names of execution providers: ``cuda`` is short for ``CUDAExecutionProvider``."""
    import onnxruntime

    known: dict[str, str] = {
        provider.lower(): provider for provider in onnxruntime.get_all_providers()
    }
    named = {name: name.lower() for name in split_names(typed) or ["cpu"]}
    return [
        known.get(low) or known.get(f"{low}executionprovider", name) for name, low in named.items()
    ]


def count_option(what: str, least: int = 1) -> Any:
    """An option that is a number of runs."""
    return typer.Option(min=least, max=MOST_RUNS, help=what)


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
    fold: Annotated[
        bool, typer.Option("--fold/--no-fold", help="Draw alike siblings as one line.")
    ] = True

    def report(
        self, data: dict[str, Any], csv: Callable[[], str], draw: Callable[[], RenderableType]
    ) -> None:
        """Write a result in the form that was asked for."""
        if self.as_json:
            print_json(data)
        elif self.as_csv:
            print_text(csv())
        else:
            show(draw())

    def report_modules(self, result: ModuleTable, tagged: TaggedModel, **facts: Any) -> None:
        """Write a result of some modules of a model; JSON has all of them, and ``facts`` in front."""
        from htp_export.model.module_facts import visible
        from htp_export.reporting.module_table import render_modules

        rows, listed = result.by_module, {row.path for row in result.listed}
        shown = [
            rows[path] for path in visible(tagged, self.depth, self.select or None) if path in rows
        ]
        drawn = [row for row in shown if row.path in listed]
        self.report(
            {**facts, **result.to_dict()},
            lambda: csv_text(
                [MODULE, *result.columns], sorted_by(shown, result.columns, self.sort)
            ),
            lambda: render_modules(result, drawn, fold=self.fold, sort=self.sort),
        )


DataOption: TypeAlias = Annotated[
    list[str] | None,
    "Inputs: an .npz file, a folder of these, or package.module:factory that returns mappings of input name and array. "
    "May be repeated.",
]
DimsOption: TypeAlias = Annotated[
    list[str] | None, "Open sizes of inputs, by comma: batch=1,sequence=16."
]
ShapesOption: TypeAlias = Annotated[
    Path | None, 'Shapes of random inputs, a JSON file: {"input_ids": [2, 16]}.'
]

DATA_HAS_VALUES = Idle(
    ("seed",),
    lambda given: given["data"] and not any(map(names_factory, given["data"])),
    "the inputs are those of --data",
)
"""For commands whose seed is that of random inputs alone."""


@dataclass(frozen=True)
class DataOptions:
    """What a file is run on: the options of every command that runs one."""

    data: DataOption = None
    dims: DimsOption = None
    shapes: ShapesOption = None

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments ``data``, ``dims`` and ``shapes`` of a function."""
        return runs_on(self.data, self.dims, self.shapes)

    def arrays(self, file: Path, what: str, seed: int = 0) -> Mapping[str, Any] | None:
        """What a file and another one like it are run on; None if nothing is given."""
        from htp_export.model.tagged import load
        from htp_export.runtime.data import Samples

        given = self.keywords
        return (
            Samples.of(**given, model=load(file).model, seed=seed).only(what).arrays
            if any(given.values())
            else None
        )


def runs_on(
    data: Sequence[str] | None, dims: list[str] | None, shapes: Path | None
) -> dict[str, Any]:
    """The arguments of `DataOptions.keywords`."""
    sizes = read_shapes(shapes)
    if shapes is not None and not sizes:
        raise FileError(shapes, "holds no shapes")
    for name, shape in sizes.items():
        if not isinstance(shape, list) or not all(
            isinstance(size, int) and size >= 0 for size in shape
        ):
            raise FileError(
                str(shapes), f"the shape of {name!r} is no list of whole numbers: {shape!r}"
            )
    return {"data": typed_data(data), "dims": parse_dims(dims or []), "shapes": sizes}


def typed_data(words: Sequence[str] | None) -> str | list[str] | None:
    """Data as a function takes them: one word by itself, so that what a factory returns is read run by run."""
    return words[0] if words and len(words) == 1 else list(words or ()) or None


def parse_dims(settings: list[str]) -> dict[str, int]:
    """Open sizes as typed; an InputError if one is not ``name=size``.

    Examples:
        >>> parse_dims(["batch=1,sequence=16"])
        {'batch': 1, 'sequence': 16}
    """
    sizes = {}
    for setting in (part.strip() for text in settings for part in text.split(",")):
        name, equals, text = setting.partition("=")
        if not (equals and name.strip() and text.strip().isdecimal()):
            raise InputError(f"--dims {setting}: write name=size, such as batch=1")
        size = number_in(text.strip())
        if size is None:
            raise InputError(f"--dims {setting}: a size is a number of 64 bits")
        if name.strip() in sizes:
            raise InputError(f"--dims {setting}: {name.strip()} is given twice")
        sizes[name.strip()] = size
    return sizes


def read_shapes(path: Path | None) -> dict[str, Any]:
    """The inputs' shapes in a JSON file; empty without one."""
    if path is None:
        return {}
    if path.suffix == ".npz":
        raise FileError(
            path, 'holds values: --shapes is for a JSON file of shapes, {"input_ids": [2, 16]}'
        )
    shapes = read_json(path)
    if not isinstance(shapes, dict):
        raise FileError(path, 'is no JSON object such as {"input_ids": [2, 16]}')
    return shapes
