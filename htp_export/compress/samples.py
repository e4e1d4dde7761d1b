"""Data that a model runs on: one set of inputs or several, from memory or from files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.files.npz_file import read_npz
from htp_export.runtime.inputs import Feed, Inputs

__all__ = ["data_or_random", "feeds_of"]


def feeds_of(model: ir.Model, data: Any) -> list[Feed]:
    """The inputs of each run.

    Args:
        model: The model.
        data: Input name → array; an ``.npz`` file of these; an array, for a model with one input; or an iterable of any
            of these, one for each run.

    Raises:
        InputError: If there is none, or one does not fit the model.
        FileError: If a file cannot be read.

    Examples:
        >>> import numpy as np
        >>> x = ir.val("x", ir.DataType.FLOAT, ["batch", 2])
        >>> model = ir.Model(ir.Graph([x], [], nodes=[]), ir_version=10)
        >>> [feed.arrays["x"].shape for feed in feeds_of(model, [np.ones((1, 2), np.float32), {"x": [[1, 2], [3, 4]]}])]
        [(1, 2), (2, 2)]
    """
    inputs = Inputs.of(model)
    single = isinstance(data, Mapping | str | os.PathLike) or hasattr(data, "shape")
    items: Iterable[Any] = [data] if single else data
    try:
        feeds = [_feed(inputs, item) for item in items]
    except TypeError as error:
        raise InputError(f"data is inputs, or an iterable of inputs, not {type(data).__name__}") from error
    if not feeds:
        raise InputError("data is empty")
    return feeds


def _feed(inputs: Inputs, item: Any) -> Feed:
    if isinstance(item, str | os.PathLike):
        item = read_npz(Path(item))
    if isinstance(item, Mapping):
        return inputs.feed(item)
    names = [declared.name for declared in inputs]
    if len(names) != 1:
        raise InputError(f"the model has {len(names)} inputs; give a mapping of name → array")
    return inputs.feed({names[0]: item})


def data_or_random(
    model: ir.Model, data: Any, dims: Mapping[str, int] | None = None, seed: int = 0
) -> tuple[Any, tuple[str, ...]]:
    """The data; without any, random inputs, and notes that say so.

    Raises:
        InputError: If no random inputs can be made, or sizes are given for data that has its own.
    """
    if data is not None:
        if dims:
            raise InputError("dims are sizes of random inputs; the data has its own")
        return data, ()
    feed = Inputs.of(model).random(dims, seed=seed)
    return dict(feed.arrays), (
        "the inputs are random: errors on real data may be others, and an accuracy means nothing",
        *feed.notes,
    )
