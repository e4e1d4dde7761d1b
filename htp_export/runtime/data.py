"""Data of a user: the inputs of runs in all accepted forms, before they are checked for a model.

One run is a mapping from input name to array, or an ``.npz`` file. Data are one run, several runs,
a folder of ``.npz`` files, or ``"package.module:factory"``, a function that returns data. Only an
argument of the user can refer to code: files contain plain arrays, and no code in them is run.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from htp_export.errors import FileError, InputError, ModelSourceError
from htp_export.files.npz_file import NpzArrays
from htp_export.process.argument_types import is_torch_module
from htp_export.process.user_code import call_factory, iterated, names_factory, user_code

Run: TypeAlias = Mapping[str, Any] | str | os.PathLike[str]
"""One run: input name → array, or an ``.npz`` file, which is read when the run starts."""
Data: TypeAlias = Run | Iterable[Run]
"""One run, or several; a folder of ``.npz`` files; or ``"package.module:factory"``, which returns data."""

_FORMS = "arrays by input name, several of these, an .npz file, a folder of them, or 'package.module:factory'"


def single_run(data: Data | None, what: str) -> Any:
    """Return the only run in data, unchecked: for a file, its arrays; None for None.

    ``what`` is the name of the function or option that accepts only one run, for messages.

    Raises:
        InputError: If there are several runs, or none. See `Samples.of` for further errors.
    """
    given = runs_of(data)
    return None if given is None else arrays_of(only_run(given, what))


def check_runs(data: Data | None) -> None:
    """Refuse data files that cannot be read (`FileError`), without reading values or calling a factory."""
    for item in data if isinstance(data, list | tuple) else [data]:
        if isinstance(item, str | os.PathLike) and not names_factory(item):
            _files(item)


def runs_of(data: Data | None, seed: int = 0, passes: int = 1) -> Iterable[Run] | None:
    """Return the runs of data without reading them; None for None.

    ``seed`` is passed to a factory. ``passes`` is the number of iterations: if there are several,
    the runs of an iterator are kept in memory.
    """
    if data is None:
        return None
    runs = _runs(data, seed)
    if not _is_iterator(runs):
        return runs
    if passes > 1:
        return list(iterated(runs, "data"))
    return _ReadOnce(runs)


def repeatable(data: Data | None) -> Data | None:
    """Return data that can be read several times: an iterator is read into a list, other data is returned unchanged."""
    if isinstance(data, Iterable) and not isinstance(data, str) and _is_iterator(data):
        return list(iterated(data, "data"))
    return data


def _is_iterator(runs: Iterable[Any]) -> bool:
    """Return whether runs can be read only once, because a second iteration continues the first one."""
    with user_code("data"):
        return iter(runs) is runs


class _ReadOnce(Iterable[Run]):
    """An iterator over runs; a second iteration, which would be empty, is an InputError."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self._runs: Iterable[Run] | None = runs

    def __iter__(self) -> Iterator[Run]:
        runs, self._runs = self._runs, None
        if runs is None:
            raise InputError(
                "data is an iterator, which can be read only once, but it is needed again; give a list of runs"
            )
        return iter(runs)


def _runs(data: Any, seed: int) -> Iterable[Run]:
    if isinstance(data, Mapping):
        return [data]
    if isinstance(data, str) and names_factory(data):
        returned = call_factory(data, seed)
        _refuse_model(data, returned)
        if not _is_data(returned):
            raise ModelSourceError(
                data, f"returns {type(returned).__name__}, but data must be {_FORMS}"
            )
        if isinstance(returned, str | os.PathLike):
            return _files(returned)
        return _runs(returned, seed)
    if isinstance(data, str | os.PathLike):
        return _files(data)
    if not _is_data(data):
        raise InputError(f"data must be {_FORMS}, not {type(data).__name__}")
    if not isinstance(data, list | tuple):
        return data  # type: ignore[no-any-return] # its runs are read one by one
    parts = [_runs(item, seed) if isinstance(item, str | os.PathLike) else [item] for item in data]
    chained = itertools.chain.from_iterable(parts)
    return list(chained) if all(isinstance(part, list) for part in parts) else chained


def _refuse_model(entry: str, returned: object) -> None:
    """Refuse what a factory for ``--entry`` returns: a model and example inputs, or a model."""
    is_pair = isinstance(returned, tuple | list) and len(returned) == 2
    first = returned[0] if is_pair else returned  # type: ignore[index] # it is a tuple or a list
    if is_torch_module(first):
        what = "(model, example inputs)" if is_pair else "a model"
        raise ModelSourceError(
            entry,
            f"returns {what}, as a factory for --entry does; data need one that returns the inputs of runs: "
            "a mapping of input name → array for each run",
        )


def _is_data(value: object) -> bool:
    """Return whether a value may be data; a tensor is iterable, too, but has no input names."""
    return isinstance(value, Iterable | os.PathLike) and not hasattr(value, "shape")


def _files(path: str | os.PathLike[str]) -> list[Run]:
    folder = Path(path)
    files = sorted(folder.glob("*.npz")) if folder.is_dir() else [folder]
    if not files:
        raise FileError(folder, "is a folder without .npz files; write them with numpy.savez")
    if folder.suffix != ".npz" and not folder.exists():
        raise FileError(folder, f"there is no such file or folder; data must be {_FORMS}")
    for file in files:
        NpzArrays(file)
    return list(files)


def arrays_of(run: Any) -> Any:
    """Return the arrays of a run, unchecked: for a file, the arrays in it."""
    return NpzArrays(run) if isinstance(run, str | os.PathLike) else run


def only_run(runs: Iterable[Run], what: str) -> Run:
    """Return the only run; an `InputError` if there are several, or none. ``what`` accepts only one run."""
    first_two = list(itertools.islice(iterated(runs, "data"), 2))
    if len(first_two) == 1:
        return first_two[0]
    problem = f"{what} takes one run, but data have several" if first_two else "data have no runs"
    raise InputError(f"{problem}; give one mapping of input name → array")
