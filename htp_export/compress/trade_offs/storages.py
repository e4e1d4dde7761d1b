"""Optuna, which is an extra, and the storages of its studies."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from htp_export.errors import FileError, InputError
from htp_export.files.parsing import first_line

__all__ = ["need_optuna", "open_storage", "quiet_optuna"]


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
    try:
        if named.startswith("grpc://"):
            host, _, port = named.removeprefix("grpc://").partition(":")
            return optuna.storages.GrpcStorageProxy(host=host, port=int(port or 13000))
        if "://" in named:
            return optuna.storages.RDBStorage(named)
    except Exception as error:  # of SQLAlchemy, its drivers and gRPC
        raise InputError(f"storage {named!r} cannot be opened: {first_line(error)}") from error
    if not Path(named).absolute().parent.is_dir():
        raise FileError(named, f"its folder does not exist: {Path(named).absolute().parent}")
    backend = optuna.storages.journal.JournalFileBackend(named)
    try:
        return optuna.storages.JournalStorage(backend)
    except Exception as error:
        raise FileError(named, f"is no journal of Optuna: {first_line(error)}") from error


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
