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
    """Return the full names of execution providers: ``cuda`` is short for ``CUDAExecutionProvider``."""
    import onnxruntime

    by_lower_case: dict[str, str] = {
        provider.lower(): provider for provider in onnxruntime.get_all_providers()
    }
    providers: list[str] = []
    for name in dict.fromkeys(split_names(typed) or ["cpu"]):
        key = name.lower()
        # an unknown name is refused when a session is created
        full_name = by_lower_case.get(key) or by_lower_case.get(f"{key}executionprovider", name)
        providers.append(full_name)
    return providers


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
"""For commands whose seed is only for random inputs."""


@dataclass(frozen=True)
class DataOptions:
    """The inputs of a model: the options of every command that runs one."""

    data: DataOption = None
    dims: DimsOption = None
    shapes: ShapesOption = None

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments ``data``, ``dims`` and ``shapes`` for a function."""
        return runs_on(self.data, self.dims, self.shapes)

    def arrays(self, file: Path, what: str, seed: int = 0) -> Mapping[str, Any] | None:
        """Return the inputs of one run of a file; None without options. ``what`` is the command, for messages."""
        from htp_export.model.tagged import load
        from htp_export.runtime.samples import Samples
        from htp_export.runtime.settings import RunSettings

        keywords = self.keywords
        if not any(keywords.values()):
            return None
        settings = RunSettings(**keywords, seed=seed)
        return Samples.of(settings, load(file).model).only(what).arrays


def runs_on(
    data: Sequence[str] | None, dims: list[str] | None, shapes: Path | None
) -> dict[str, Any]:
    """Return the arguments of `DataOptions.keywords`."""
    sizes = read_shapes(shapes)
    if shapes is not None and not sizes:
        raise FileError(shapes, "contains no shapes")
    for name, shape in sizes.items():
        if not _is_shape(shape):
            raise FileError(
                str(shapes), f"the shape of {name!r} is not a list of whole numbers: {shape!r}"
            )
    return {"data": typed_data(data), "dims": parse_dims(dims or []), "shapes": sizes}


def _is_shape(shape: Any) -> bool:
    if not isinstance(shape, list):
        return False
    return all(isinstance(size, int) and size >= 0 for size in shape)


def typed_data(words: Sequence[str] | None) -> str | list[str] | None:
    """Return ``--data`` as an argument; a single value alone, so that the runs of a factory are read one by one."""
    if not words:
        return None
    return words[0] if len(words) == 1 else list(words)


def parse_dims(settings: list[str]) -> dict[str, int]:
    """Parse sizes of open dimensions; an InputError if one is not ``name=size``.

    Examples:
        >>> parse_dims(["batch=1,sequence=16"])
        {'batch': 1, 'sequence': 16}
    """
    sizes: dict[str, int] = {}
    for setting in ",".join(settings).split(",") if settings else ():
        setting = setting.strip()
        name, equals, number = (part.strip() for part in setting.partition("="))
        if not (equals and name and number.isdecimal()):
            raise InputError(f"--dims {setting}: write name=size, such as batch=1")
        size = number_in(number)
        if size is None:
            raise InputError(f"--dims {setting}: a size is a number of 64 bits")
        if name in sizes:
            raise InputError(f"--dims {setting}: {name} is given twice")
        sizes[name] = size
    return sizes


def read_shapes(path: Path | None) -> dict[str, Any]:
    """Read shapes of inputs from a JSON file; empty without a file."""
    if path is None:
        return {}
    if path.suffix == ".npz":
        raise FileError(
            path, 'contains values: --shapes is for a JSON file of shapes, {"input_ids": [2, 16]}'
        )
    shapes = read_json(path)
    if not isinstance(shapes, dict):
        raise FileError(path, 'is not a JSON object such as {"input_ids": [2, 16]}')
    return shapes
