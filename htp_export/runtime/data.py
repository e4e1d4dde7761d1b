"""Data of a user: the inputs of runs in every form in which they are given, checked against the inputs of a model.

One run is a mapping from input name to array, or an ``.npz`` file. Data are one run, several of
these, a folder of ``.npz`` files, or ``"package.module:factory"``, a function that returns data.
Only a text that the user gives names code: what a file holds is read as plain arrays, and nothing
of it is run.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import onnx_ir as ir

from htp_export.errors import FileError, InputError, ModelSourceError
from htp_export.files.npz_file import NpzArrays
from htp_export.process.argument_types import MOST_SEED, check_whole
from htp_export.process.progress import counted
from htp_export.process.user_code import call_factory, iterated, names_factory, user_code
from htp_export.runtime.arrays import Array
from htp_export.runtime.inputs import Feed, Inputs

Run: TypeAlias = Mapping[str, Any] | str | os.PathLike[str]
"""One run: input name → array, or an ``.npz`` file, which is read when it is its turn."""
Data: TypeAlias = Run | Iterable[Run]
"""One run, or several; a folder of ``.npz`` files; or ``"package.module:factory"``, which returns data."""

_RANDOM_RUNS = 4  # ranges and medians hardly change with more random data
_FORMS = "arrays by input name, several of these, an .npz file, a folder of them, or 'package.module:factory'"


@dataclass(frozen=True)
class Samples:
    """The inputs of several runs, each checked when it is its turn; each iteration starts from the first one.

    ``given`` is None for random values; these have the sizes ``dims`` and ``shapes``. Given ones
    must have ``dims``.
    """

    given: Iterable[Run] | None
    inputs: Inputs
    dims: Mapping[str, int] | None = None
    shapes: Mapping[str, Sequence[int]] | None = None
    seed: int = 0

    @classmethod
    def of(
        cls,
        data: Data | None,
        model: ir.Model,
        *,
        dims: Mapping[str, int] | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
        seed: int = 0,
        passes: int = 1,
    ) -> Samples:
        """The runs that a user's data stand for; random ones for None.

        ``passes`` is how often they are read: an iterator, which can be read once, is kept in
        memory for a second time. If it is read again all the same, an InputError says so. So does
        one if they are no data; its subclasses name the file or the factory at fault.
        """
        check_whole("seed", seed, 0, MOST_SEED - _RANDOM_RUNS)
        return cls(_runs_of(data, shapes, seed, passes), Inputs.of(model), dims, shapes, seed)

    @property
    def random(self) -> bool:
        """Whether the values are random, so that they say nothing about accuracy."""
        return self.given is None

    def __iter__(self) -> Iterator[Mapping[str, Array]]:
        number, given = -1, self.given
        if given is None:
            for number in counted(range(_RANDOM_RUNS), "random runs"):
                yield self.inputs.random(self.dims, self.shapes, self.seed + number).arrays
            return
        listed = counted(given, "runs") if isinstance(given, Sequence) else iterated(given, "data")
        for number, run in enumerate(listed):
            yield self._feed(run, f"data, run {number}").arrays
        if number < 0:
            raise InputError(
                "data have no runs; give a mapping from input names to arrays for each"
            )

    def only(self, what: str) -> Feed:
        """The inputs of the one run that there is; an `InputError` has ``what`` takes no more than one."""
        if self.given is None:
            return self.inputs.random(self.dims, self.shapes, self.seed)
        return self._feed(_one(self.given, what), "data")

    def _feed(self, run: Run, name: str) -> Feed:
        if isinstance(run, str | os.PathLike):
            name = os.fspath(run)
        try:
            return self.inputs.feed(arrays_of(run), self.dims)
        except FileError:
            raise
        except InputError as error:
            raise InputError(f"{name}: {error}") from error


def single_run(data: Data | None, what: str) -> Any:
    """The one run that data are, unchecked: of a file, its arrays; None for None. ``what`` is what takes only one.

    Raises:
        InputError: If there are several runs, or none. See `Samples.of` for more.
    """
    given = _runs_of(data)
    return None if given is None else arrays_of(_one(given, what))


def check_runs(data: Data | None) -> None:
    """Refuse files of data that cannot be read (`FileError`); no values are read, and no factory is called."""
    for each in data if isinstance(data, list | tuple) else [data]:
        if isinstance(each, str | os.PathLike) and not names_factory(each):
            _files(each)


def _runs_of(
    data: Data | None, shapes: object = None, seed: int = 0, passes: int = 1
) -> Iterable[Run] | None:
    """The runs of data, of which none is read yet; None for None."""
    if data is None:
        return None
    if shapes:
        raise InputError(
            "shapes are those of random inputs, and data have their own; give one of them"
        )
    runs = _runs(data, seed)
    if not _is_iterator(runs):
        return runs
    return list(iterated(runs, "data")) if passes > 1 else _ReadOnce(runs)


def repeatable(data: Data | None) -> Data | None:
    """Data that can be read any number of times: the runs of an iterator, which is read now; other data as they are."""
    if isinstance(data, Iterable) and not isinstance(data, str) and _is_iterator(data):
        return list(iterated(data, "data"))
    return data


def _is_iterator(runs: Iterable[Any]) -> bool:
    """Whether runs can be read once: each iteration goes on where the one before ended."""
    with user_code("data"):
        return iter(runs) is runs


class _ReadOnce(Iterable[Run]):
    """An iterator over runs, of which a second iteration would find none."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs: Iterable[Run] | None = runs

    def __iter__(self) -> Iterator[Run]:
        runs, self._runs = self._runs, None
        if runs is None:
            raise InputError(
                "data are an iterator, which can be read once, and are needed again; give a list of runs"
            )
        return iter(runs)


def _runs(data: Any, seed: int) -> Iterable[Run]:
    if isinstance(data, Mapping):
        return [data]
    if isinstance(data, str) and names_factory(data):
        returned = call_factory(data, seed)
        if not _is_data(returned):
            raise ModelSourceError(
                data, f"returns {type(returned).__name__}, and data are {_FORMS}"
            )
        return (
            _files(returned) if isinstance(returned, str | os.PathLike) else _runs(returned, seed)
        )
    if isinstance(data, str | os.PathLike):
        return _files(data)
    if not _is_data(data):
        raise InputError(f"data are {_FORMS}, not {type(data).__name__}")
    if not isinstance(data, list | tuple):
        return data  # type: ignore[no-any-return] # it is read run by run
    parts = [_runs(each, seed) if isinstance(each, str | os.PathLike) else [each] for each in data]
    chained = itertools.chain.from_iterable(parts)
    return list(chained) if all(isinstance(part, list) for part in parts) else chained


def _is_data(given: object) -> bool:
    """Whether something may be data: a tensor can be iterated, too, but tells no names."""
    return isinstance(given, Iterable | os.PathLike) and not hasattr(given, "shape")


def _files(path: str | os.PathLike[str]) -> list[Run]:
    folder = Path(path)
    files = sorted(folder.glob("*.npz")) if folder.is_dir() else [folder]
    if not files:
        raise FileError(folder, "is a folder without .npz files; write them with numpy.savez")
    if folder.suffix != ".npz" and not folder.exists():
        raise FileError(folder, f"there is no such file or folder; data are {_FORMS}")
    for file in files:
        NpzArrays(file)
    return list(files)


def arrays_of(run: Any) -> Any:
    """The arrays of a run, unchecked: of a file, those in it."""
    return NpzArrays(run) if isinstance(run, str | os.PathLike) else run


def _one(runs: Iterable[Run], what: str) -> Run:
    found = list(itertools.islice(iterated(runs, "data"), 2))
    if len(found) != 1:
        several = f"{what} takes one run, and data have several"
        raise InputError(
            f"{several if found else 'data have no runs'}; give one mapping of input name → array"
        )
    return found[0]
