"""Adapters that run other tools and restore the module tags of their results.

Examples:
    >>> from htp_export.tools import onnxslim
    >>> onnxslim.__module__
    'htp_export.capabilities.carry.adapters.optimizers'
"""

from __future__ import annotations

from typing import Any

from htp_export.capabilities.carry import adapters


def __getattr__(name: str) -> Any:
    return getattr(adapters, name)


def __dir__() -> list[str]:
    return dir(adapters)
