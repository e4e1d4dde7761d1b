"""onnx_ir without sympy, until an expression of sizes is computed.

onnx_ir 1.1 imports sympy at its top, for expressions such as ``2*sequence + 1``. Importing sympy
takes longer than most commands that read a file, and few files have such expressions. Remove this
module when onnx_ir imports sympy where it is used.
"""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType
from typing import Any

_NAME = "sympy"


def import_onnx_ir() -> None:
    """Import onnx_ir so that it imports sympy when it uses it; nothing if either is imported already.

    Nothing, too, if other threads run: one of them could import sympy meanwhile.
    """
    if "onnx_ir" in sys.modules or _NAME in sys.modules or threading.active_count() > 1:
        return
    stand_in = _LazySympy(_NAME)
    sys.modules[_NAME] = stand_in
    try:
        importlib.import_module("onnx_ir")
    except Exception:
        # A version that needs more of sympy at its import: it is imported as usual later.
        for name in [name for name in sys.modules if name.partition(".")[0] == "onnx_ir"]:
            del sys.modules[name]
    finally:
        # Other packages import sympy itself.
        del sys.modules[_NAME]
        stand_in.is_ready = True


class _LazySympy(ModuleType):
    """The module that onnx_ir has in place of sympy."""

    is_ready = False

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of sympy; while onnx_ir is imported, a function that calls it later."""
        if not self.is_ready:
            return _Later(name)
        attribute = getattr(importlib.import_module(_NAME), name)
        setattr(self, name, attribute)  # the next access is as fast as one of sympy itself
        return attribute


class _Later:
    """A function of sympy that is not imported yet: onnx_ir has some of them in a table."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any) -> Any:
        return getattr(importlib.import_module(_NAME), self._name)(*args)
