"""Recorded changes of a graph, and a debug switch that compares the records with the graph.

Code that replaces a tensor records the new one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import onnx_ir as ir

_REPLACED_BY = "htp_export.replaced_by"
"""Key in ``value.meta``: the value that replaces this one."""

_CHECKED: ContextVar[bool] = ContextVar("htp_export.checked_changes", default=False)


@dataclass(frozen=True, slots=True)
class Change:
    """One step of an edit.

    Attributes:
        kind: ``"node"``, ``"replaced"``, ``"module"`` or ``"removed"``.
        name: Name of the new node, the old tensor, or the module.
        by: For a node, its owner; for a tensor, the one in its place.

    Examples:
        >>> print(Change("replaced", "relu", "relu.steered"))
        replaced relu: relu.steered
    """

    kind: str
    name: str
    by: str = ""

    def __str__(self) -> str:
        """The change in one line."""
        return f"{self.kind} {self.name}: {self.by}" if self.by else f"{self.kind} {self.name}"


def record_replacement(old: ir.Value, new: ir.Value) -> None:
    """Record that a value replaces another one for all or some of its consumers."""
    old.meta[_REPLACED_BY] = new


def replacement_of(value: ir.Value) -> ir.Value | None:
    """The value that was recorded to replace another one; None without a record."""
    # Most values have no record: looking up a missing key of ``meta`` itself raises an error inside.
    found: ir.Value | None = value.meta.data.get(_REPLACED_BY)
    return found


def last_replacement_of(value: ir.Value) -> ir.Value:
    """The last value of a chain of replacements; the value itself without a record."""
    seen = {value}
    while (following := replacement_of(value)) is not None and following not in seen:
        seen.add(following)
        value = following
    return value


@contextlib.contextmanager
def checked_changes() -> Iterator[None]:
    """Compare recorded changes with the graph; a record that is not true is an error.

    For tests of passes and commands: it takes time.
    """
    token = _CHECKED.set(True)
    try:
        yield
    finally:
        _CHECKED.reset(token)


def changes_are_checked() -> bool:
    """Whether the caller runs in `checked_changes`."""
    return _CHECKED.get()
