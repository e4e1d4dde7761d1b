"""Adapters that run other tools and restore the module tags of their results.

Each adapter takes a tagged model and the options of the tool, and returns a `Carried`, with the new
model as ``.model``. The library of a tool is imported when the tool runs. A function of this folder
takes the file of a model, a target and the options of a tool, and returns the result or writes it
to the target; `adapter` adds the rest.

The tools are the functions in ``__all__`` of the files of this folder: a new file is a new tool.

They are not thread-safe: the output of the whole process is redirected to discard the output of a
tool.
"""

from __future__ import annotations

import importlib
from typing import Any

from htp_export.discovery import exported_in

_HOMES = exported_in(__name__)

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import an adapter on first use: help needs the names of the tools, and no onnx."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
