"""The inputs on which static ranges are measured: what a user gives, one run at a time, or random values."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.files.npz_file import read_npz
from htp_export.process.bounds import MOST_SEED, check_whole
from htp_export.process.progress import counted
from htp_export.process.user_code import iterated, user_code
from htp_export.runtime.arrays import Array, nan_in
from htp_export.runtime.inputs import Inputs
from htp_export.runtime.runner import Runner
from htp_export.runtime.sessions import SessionSettings

__all__ = ["Data", "Samples", "activations", "check_data", "samples_of"]

Run: TypeAlias = Mapping[str, Any] | str | os.PathLike[str]
"""One run: input name → array, or an ``.npz`` file, which is read when it is its turn."""

Data: TypeAlias = Run | Iterable[Run]
"""One run, or several."""

_RANDOM_RUNS = 4


@dataclass(frozen=True)
class Samples:
    """The inputs of several runs; each iteration starts from the first one. ``given`` is None for random values."""

    given: Iterable[Run] | None
    inputs: Inputs
    dims: Mapping[str, int] | None = None
    seed: int = 0

    @property
    def random(self) -> bool:
        """Whether the values are random, so that they say nothing about accuracy."""
        return self.given is None

    def __iter__(self) -> Iterator[Mapping[str, Array]]:
        number, given = -1, self.given
        if given is None:
            for number in counted(range(_RANDOM_RUNS), "random runs"):
                yield self.inputs.random(self.dims, seed=self.seed + number).arrays
            return
        listed = counted(given, "runs") if isinstance(given, Sequence) else iterated(given, "data")
        for number, feed in enumerate(listed):
            arrays = read_npz(Path(feed)) if isinstance(feed, str | os.PathLike) else feed
            try:
                arrays = self.inputs.feed(arrays).arrays
            except InputError as error:
                raise InputError(f"data, run {number}: {error}") from error
            for name in nan_in(arrays):
                raise InputError(f"data, run {number}: input {name!r} has NaN, of which no range can be known")
            yield arrays
        if number < 0:
            raise InputError("data has no runs; give a mapping from input names to arrays for each")


def check_data(data: Data | None) -> None:
    """Refuse files of data that cannot be read (`FileError`); their values are checked when they are used."""
    named = [data] if isinstance(data, str | os.PathLike) else data if isinstance(data, list | tuple) else ()
    for each in named:
        if isinstance(each, str | os.PathLike):
            read_npz(each)


def samples_of(
    data: Data | None, model: ir.Model, dims: Mapping[str, int] | None = None, seed: int = 0, *, passes: int = 1
) -> Samples:
    """The runs that a user's data stands for; random ones for None.

    ``passes`` is how often they are read: an iterator, which can be read once, is kept in memory for a second time.
    """
    check_whole("seed", seed, 0, MOST_SEED - _RANDOM_RUNS)
    inputs = Inputs.of(model)
    if data is None:
        return Samples(None, inputs, dims, seed)
    if isinstance(data, str | os.PathLike):
        return Samples([read_npz(Path(data))], inputs)
    if isinstance(data, Mapping):
        return Samples([data], inputs)
    if not isinstance(data, Iterable):
        raise InputError(f"data are arrays by input name, several of these, or an .npz file, not {type(data).__name__}")
    with user_code("data"):
        once = iter(data) is data
    return Samples(list(iterated(data, "data")) if once and passes > 1 else data, inputs)


@contextmanager
def activations(
    model: ir.Model, name: str, samples: Samples, wanted: Sequence[str]
) -> Iterator[Iterator[dict[str, Array]]]:
    """Run a model on samples, one after another, and give the values of some of its inputs and tensors.

    They are those of the main graph. NaN in one of them is an `InputError`, which has the ``name`` of the model.
    """
    given = {str(value.name) for value in model.graph.inputs}
    known = [tensor for tensor in wanted if tensor in given]
    computed = [tensor for tensor in wanted if tensor not in given]

    def read() -> Iterator[dict[str, Array]]:
        for number, arrays in enumerate(samples):
            found = {tensor: arrays[tensor] for tensor in known} | (run(arrays) if computed else {})
            for tensor in nan_in(found):
                raise InputError(f"data, run {number}: {name} computes NaN in {tensor!r}; its range is not known")
            yield found

    if not computed:
        yield read()
        return
    with Runner(model, name, SessionSettings()).opened(computed) as run:
        yield read()
