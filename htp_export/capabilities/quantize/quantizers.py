"""ONNX Runtime's quantizers: imported when they are needed, and kept from printing and from configuring logging."""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from htp_export.process.quiet import quiet

__all__ = ["quantizers", "quietly"]

_QUANTIZATION = "onnxruntime.quantization"


def quantizers(module: str = "") -> Any:
    """Import ``onnxruntime.quantization``, or a module of it.

    Some of its modules call ``logging.basicConfig`` on import, which would configure the logging of the program.
    """
    with quietly():
        return importlib.import_module(f"{_QUANTIZATION}.{module}" if module else _QUANTIZATION)


def quietly() -> contextlib.AbstractContextManager[None]:
    """Suppress what ONNX Runtime's quantizers say.

    It is advice that the caller cannot follow, such as to preprocess the model. They log to the root logger itself.
    """
    return quiet("")
