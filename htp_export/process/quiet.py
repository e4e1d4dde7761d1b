"""Suppress the output, warnings and log messages of libraries temporarily."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence

from htp_export.process.forking import Mutex
from htp_export.process.restoring import Changes, enter, restored, set_attribute

_ONE_AT_A_TIME = Mutex()


@contextlib.contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """Suppress printed output, warnings, and the messages of some loggers (``""`` is the root logger).

    Only one thread at a time, because these are global. The loggers keep their levels, and have a
    handler meanwhile, so that ``logging.basicConfig``, which some libraries call when they are
    imported, has no effect.

    Examples:
        >>> import logging
        >>> with quiet(""):
        ...     print("not shown")
        ...     logging.error("not shown")
    """
    with _ONE_AT_A_TIME.lock, restored(functools.partial(_make_quiet, loggers)):
        yield


def _make_quiet(loggers: Sequence[str], changes: Changes) -> None:
    for name in loggers:
        _take_handlers(changes, logging.getLogger(name))
    set_attribute(changes, sys, "stdout", io.StringIO())
    enter(changes, warnings.catch_warnings())
    warnings.simplefilter("ignore")


def _take_handlers(changes: Changes, logger: logging.Logger) -> None:
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate

    def put_back() -> None:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)

    changes.will_undo(put_back)
    logger.handlers[:], logger.propagate = [logging.NullHandler()], False
