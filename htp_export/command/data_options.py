"""Inputs of runs as they are typed: data, shapes of random inputs, sizes of open dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from htp_export.command.idle_options import Idle
from htp_export.errors import FileError, InputError
from htp_export.files.text_files import read_json
from htp_export.process.factories import names_factory

DataOption: TypeAlias = Annotated[
    list[str] | None,
    "Inputs: an .npz file, a folder of these, or package.module:factory that returns mappings of input name and array. "
    "May be repeated.",
]
DimsOption: TypeAlias = Annotated[list[str] | None, "Open sizes of inputs, by comma: batch=1,sequence=16."]
ShapesOption: TypeAlias = Annotated[Path | None, 'Shapes of random inputs, a JSON file: {"input_ids": [2, 16]}.']

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
        return Samples.of(**given, model=load(file).model, seed=seed).only(what).arrays if any(given.values()) else None


def runs_on(data: Sequence[str] | None, dims: list[str] | None, shapes: Path | None) -> dict[str, Any]:
    """The arguments of `DataOptions.keywords`."""
    sizes = read_shapes(shapes)
    if shapes is not None and not sizes:
        raise FileError(shapes, "holds no shapes")
    for name, shape in sizes.items():
        if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise FileError(str(shapes), f"the shape of {name!r} is no list of whole numbers: {shape!r}")
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
        name, equals, size = setting.partition("=")
        if not (equals and name.strip() and size.strip().isdecimal()):
            raise InputError(f"--dims {setting}: write name=size, such as batch=1")
        if name.strip() in sizes:
            raise InputError(f"--dims {setting}: {name.strip()} is given twice")
        sizes[name.strip()] = int(size)
    return sizes


def read_shapes(path: Path | None) -> dict[str, Any]:
    """The inputs' shapes in a JSON file; empty without one."""
    if path is None:
        return {}
    if path.suffix == ".npz":
        raise FileError(path, 'holds values: --shapes is for a JSON file of shapes, {"input_ids": [2, 16]}')
    shapes = read_json(path)
    if not isinstance(shapes, dict):
        raise FileError(path, 'is no JSON object such as {"input_ids": [2, 16]}')
    return shapes
