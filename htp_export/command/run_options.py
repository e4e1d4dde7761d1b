"""Options of every command that runs a model: the settings of `RunSettings`, each declared once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from htp_export.command.options import Idle, seed_option
from htp_export.command.terminal import split_names
from htp_export.errors import FileError, InputError
from htp_export.extras import required
from htp_export.files.text_files import read_json
from htp_export.format.bounds import number_in
from htp_export.process.user_code import names_factory

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
ProviderOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--provider",
        "--providers",
        help="Execution providers in order, also by comma: cuda,cpu.",
        show_default="cpu",
    ),
]


@dataclass(frozen=True)
class InputOptions:
    """The inputs of a model: the options of every command that runs one, or follows a run by shapes."""

    data: DataOption = None
    dims: DimsOption = None
    shapes: ShapesOption = None

    @property
    def keywords(self) -> dict[str, Any]:
        """The options as arguments of a function."""
        shapes = _checked_shapes(self.shapes)
        return {
            "data": typed_data(self.data),
            "dims": parse_dims(self.dims or []),
            "shapes": shapes,
        }

    def arrays(self, file: Path, what: str, seed: int = 0) -> Mapping[str, Any] | None:
        """Return the inputs of one run of a file; None without options. ``what`` is the command, for messages."""
        from htp_export.model.tagged import load
        from htp_export.runtime.samples import Samples
        from htp_export.runtime.settings import RunSettings

        settings = RunSettings(**self.keywords)
        if not settings.has_inputs:
            return None
        settings = replace(settings, seed=seed)
        return Samples.of(settings, load(file).model).only(what).arrays


@dataclass(frozen=True)
class RunOptions(InputOptions):
    """The options of commands that run a model on random inputs, too."""

    seed: Annotated[int, seed_option("Of random inputs.")] = 0

    @property
    def keywords(self) -> dict[str, Any]:
        """The options as arguments of a function."""
        return {**super().keywords, "seed": self.seed}


DATA_HAS_VALUES = Idle(
    ("seed",),
    lambda given: given["data"] and not any(map(names_factory, given["data"])),
    "the inputs are those of --data",
)
"""For commands whose seed is only for random inputs."""


def read_providers(typed: list[str] | None) -> list[str]:
    """Return the full names of execution providers: ``cuda`` is short for ``CUDAExecutionProvider``."""
    onnxruntime = required("onnxruntime", "running a model")

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


def _checked_shapes(path: Path | None) -> dict[str, Any]:
    """Read ``--shapes``; a FileError for a file without shapes, or with others than lists of sizes."""
    sizes = read_shapes(path)
    if path is not None and not sizes:
        raise FileError(path, "contains no shapes")
    for name, shape in sizes.items():
        if not _is_shape(shape):
            raise FileError(
                str(path), f"the shape of {name!r} is not a list of whole numbers: {shape!r}"
            )
    return sizes


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
