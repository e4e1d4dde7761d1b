"""Sizes of inputs as they are typed: example values, shapes, or numbers for open sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from htp_export.command.sources import read_shapes
from htp_export.errors import FileError, InputError
from htp_export.files.npz_file import read_npz

__all__ = ["Sizes", "parse_dims", "read_sizes"]


@dataclass(frozen=True)
class Sizes:
    """Values or shapes of inputs, by their names, or open sizes, by theirs."""

    inputs: Mapping[str, Any]
    dims: dict[str, int]
    shapes: dict[str, Any]

    @property
    def given(self) -> bool:
        """Whether there is any of them."""
        return bool(self.inputs or self.dims or self.shapes)

    def arrays(self, file: Path, seed: int = 0) -> Mapping[str, Any] | None:
        """What a file and another one like it are run on; None for random inputs of any size."""
        from htp_export.model.tagged import load
        from htp_export.runtime.inputs import Inputs

        if not self.given:
            return None
        wanted = Inputs.of(load(file).model)
        if self.inputs:
            return wanted.feed(self.inputs, self.dims).arrays
        return wanted.random(self.dims, self.shapes, seed).arrays


def read_sizes(inputs: Path | None, dims: list[str] | None) -> Sizes:
    """What ``--inputs``, a file of arrays as ``.npz`` or of shapes as JSON, and ``--dims`` say.

    Raises:
        FileError: If the file cannot be read.
        InputError: If a size cannot be read.
    """
    is_npz = inputs is not None and inputs.suffix == ".npz"
    arrays: Mapping[str, Any] = read_npz(inputs) if inputs is not None and is_npz else {}
    shapes = {} if is_npz else read_shapes(inputs)
    if inputs is not None and not arrays and not shapes:
        raise FileError(inputs, "holds no shapes")
    for name, shape in shapes.items():
        if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise FileError(str(inputs), f"the shape of {name!r} is no list of whole numbers: {shape!r}")
    return Sizes(arrays, parse_dims(dims or []), shapes)


def parse_dims(settings: list[str]) -> dict[str, int]:
    """Open sizes as typed.

    Raises:
        InputError: If one is not ``name=size``.

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
