"""Repeated work of torch in an export by TorchScript, done once or faster with the same result.

Each wrapper here changes how long torch takes, and nothing else. They are applied while an export
is captured, unless `running.hurries` is False, and not at all where torch has moved: then torch does
this work itself. ``tests/exporter/test_faster_torchscript.py`` compares graphs with and without them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from htp_export.exporter.capture.running import script_capture
from htp_export.exporter.capture.torchscript_internals import may_have_blocks


def listed(size: str, at: str) -> Callable[[Any], Any]:
    """Create the wrapper of a method that returns an iterator of the values of a node.

    The iterator of the bindings ends with an exception of C++, at ten times the cost of the values
    themselves. The exporter asks for it two or three times for each node. ``size`` and ``at`` are
    methods that return the number of the values, and one of them.
    """

    def wrap(original: Any) -> Any:
        count = getattr(torch._C.Node, size)
        value = getattr(torch._C.Node, at)

        @functools.wraps(original)
        def values(self: Any) -> Iterator[Any]:
            if script_capture.get() is None:
                return original(self)  # type: ignore[no-any-return]
            return iter([value(self, place) for place in range(count(self))])

        return values

    return wrap


def blocks(original: Any) -> Any:
    """Return no blocks of a node whose kind has none: see `listed`."""

    @functools.wraps(original)
    def wrapper(self: Any) -> Iterator[Any]:
        if script_capture.get() is None or may_have_blocks(self.kind()):
            return original(self)  # type: ignore[no-any-return]
        return iter(())

    return wrapper


class SignaturesOnce:
    """``inspect`` for the translations of operators, which ask for the signature of a function in each call."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self._found: dict[Any, inspect.Signature] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def signature(self, function: Any, **options: Any) -> Any:
        """The signature of a function; functions of the exporter do not change while it runs."""
        if options or script_capture.get() is None:
            return self._original.signature(function, **options)
        if function not in self._found:
            self._found[function] = self._original.signature(function)
        return self._found[function]


def name_lookup(original: Any) -> Any:
    """Create the function that finds the variable of a traced tensor: not for tensors that we ask about.

    The tracer asks for the name of a value without one, each time; values keep the names that torch
    gives them, so there must be none in our frames (see `traced_number`).
    """
    if [*inspect.signature(original).parameters] != ["frames_up"]:
        raise TypeError("it does not count frames")

    @functools.wraps(original)
    def create(frames_up: int = 1) -> Callable[[Any], str]:
        find = original(frames_up + 1)  # it counts the frame of the function below, too

        def name_of(tensor: Any) -> str:
            capture = script_capture.get()
            if capture is not None and capture.trace.asks:
                return ""
            return find(tensor)  # type: ignore[no-any-return]

        return name_of

    return create
