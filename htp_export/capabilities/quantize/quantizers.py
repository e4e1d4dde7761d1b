"""ONNX Runtime's quantizers: imported when they are needed, and kept from printing and from configuring logging."""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import threading
import warnings
from collections.abc import Iterator
from typing import Any

__all__ = ["quantizers", "quietly"]

_QUANTIZATION = "onnxruntime.quantization"
_ONE_AT_A_TIME = threading.RLock()


def quantizers(module: str = "") -> Any:
    """Import ``onnxruntime.quantization``, or a module of it.

    Some of its modules call ``logging.basicConfig`` on import, which would configure the logging of the program.
    """
    with quietly():
        return importlib.import_module(f"{_QUANTIZATION}.{module}" if module else _QUANTIZATION)


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Suppress what ONNX Runtime's quantizers print, warn of and log; the root logger's handlers and level stay.

    They log to the root logger itself, without a logger of their own: advice that the caller cannot follow, such as to
    preprocess the model. One thread at a time, as both are the whole process's.
    """
    with _ONE_AT_A_TIME:
        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        try:
            root.handlers[:] = [logging.NullHandler()]
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            root.handlers[:] = handlers
            root.setLevel(level)
