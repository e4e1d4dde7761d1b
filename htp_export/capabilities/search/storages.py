"""Optuna, which is an extra, and the storages of its studies."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from htp_export.errors import FileError, InputError, first_line

if TYPE_CHECKING:
    import optuna

__all__ = ["need_optuna", "open_storage", "open_study", "quiet_optuna"]


def need_optuna() -> Any:
    """Import Optuna, which is an extra.

    Raises:
        InputError: If it is not installed.
    """
    try:
        import optuna
    except ImportError as error:
        raise InputError('search needs Optuna; install it with: pip install "htp-export[compress]"') from error
    return optuna


def open_storage(storage: str | os.PathLike[str] | Any | None) -> Any:
    """The storage of a study.

    Args:
        storage: A database URL (``sqlite:///study.db``, ``postgresql://...``), ``grpc://host:port`` of a proxy
            (``optuna.storages.run_grpc_proxy_server``), the path of a journal file, an Optuna storage, or None for one
            in memory.

    Raises:
        InputError: If it cannot be opened.
    """
    optuna = need_optuna()
    if storage is None:
        return optuna.storages.InMemoryStorage()
    if not isinstance(storage, str | os.PathLike):
        return storage
    named = os.fspath(storage)
    if "://" in named:
        try:
            with quiet_optuna(optuna):
                return _at_address(optuna, named)
        except Exception as error:  # of SQLAlchemy, its drivers and gRPC
            raise InputError(f"storage {named!r} cannot be opened: {_said(error)}") from error
    if not Path(named).absolute().parent.is_dir():
        raise FileError(named, f"its folder does not exist: {Path(named).absolute().parent}")
    if not _may_be_journal(Path(named)):
        raise FileError(named, "is no journal of Optuna; name another file")
    backend = optuna.storages.journal.JournalFileBackend(named)
    try:
        return optuna.storages.JournalStorage(backend)
    except Exception as error:
        raise FileError(named, f"is no journal of Optuna: {first_line(error)}") from error


def _may_be_journal(file: Path) -> bool:
    """Whether a file is one that Optuna writes, or is not there: Optuna reads any text, and appends to it."""
    try:
        with file.open("rb") as stream:
            first = stream.readline()
    except OSError:  # it is not there, or Optuna says why it cannot be read
        return True
    return not first or b'"op_code"' in first


def _said(error: Exception) -> str:
    """What an error says, in one line; errors of gRPC have it apart."""
    details = getattr(error, "details", None)
    return str(details()) if callable(details) else first_line(error)


def _at_address(optuna: Any, named: str) -> Any:
    if not named.startswith("grpc://"):
        return optuna.storages.RDBStorage(named)
    host, _, port = named.removeprefix("grpc://").partition(":")
    return optuna.storages.GrpcStorageProxy(host=host, port=int(port or 13000))


def open_study(storage: Any, name: str, directions: Sequence[str]) -> optuna.Study:
    """A study in a storage; a new one if it has none of this name.

    Args:
        storage: As for `open_storage`.
        name: The name of the study.
        directions: ``minimize`` or ``maximize`` for each objective.

    Raises:
        InputError: If Optuna is not installed, or the storage cannot be opened or reached.
    """
    opened, library = open_storage(storage), need_optuna()
    with quiet_optuna(library):
        try:
            study: optuna.Study = library.create_study(
                storage=opened, study_name=name, directions=list(directions), load_if_exists=True
            )
        except Exception as error:  # a proxy is reached when it is first asked
            named = storage if isinstance(storage, str | os.PathLike) else type(storage).__name__
            raise InputError(f"storage {str(named)!r} cannot be opened: {_said(error)}") from error
        return study


@contextlib.contextmanager
def quiet_optuna(optuna: Any) -> Iterator[None]:
    """Without Optuna's log of every trial, also of failed ones, and without warnings that a part of it may change."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(max(before, optuna.logging.ERROR))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(before)
