"""Libraries kept quiet for a while: what they print, warn of and log."""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import warnings
from collections.abc import Iterator

_ONE_AT_A_TIME = threading.RLock()


@contextlib.contextmanager
def quiet(*loggers: str) -> Iterator[None]:
    """Suppress what libraries print and warn of, and what reaches some loggers (``""`` is the root logger).

    One thread at a time, as all of it is the whole process's. The loggers keep their levels and have a handler
    meanwhile, so that a library that calls ``logging.basicConfig`` when it is imported configures nothing.

    Examples:
        >>> import logging
        >>> with quiet(""):
        ...     print("not shown")
        ...     logging.error("not shown")
    """
    with _ONE_AT_A_TIME, contextlib.ExitStack() as until, warnings.catch_warnings():
        for name in loggers:
            until.enter_context(_without_handlers(logging.getLogger(name)))
        until.enter_context(contextlib.redirect_stdout(io.StringIO()))
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _without_handlers(logger: logging.Logger) -> Iterator[None]:
    handlers, level, propagate = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:], logger.propagate = [logging.NullHandler()], False
    try:
        yield
    finally:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)
