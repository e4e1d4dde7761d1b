"""Which modules tables, trees and pages draw, and which lies right below which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from htp_export.format import tags


class Drawn(Protocol):
    """What is known of a module that may be drawn."""

    @property
    def calls(self) -> int: ...
    @property
    def nodes(self) -> object: ...


def drawn_parents(modules: Mapping[str, Drawn]) -> dict[str, str | None]:
    """The modules that are drawn, in order, each with the one that it is drawn below; None at the top.

    A container, which holds what runs and never ran itself, is left out: its name stands before those of its children.

    Examples:
        >>> from types import SimpleNamespace
        >>> modules = {path: SimpleNamespace(calls=path != "layer", nodes=9) for path in ("", "layer", "layer.0")}
        >>> drawn_parents(modules)
        {'': None, 'layer.0': ''}
    """
    holding = tags.all_above(modules)
    drawn = {
        path: module
        for path, module in modules.items()
        if not path or module.calls or not module.nodes or path not in holding
    }
    return {path: tags.nearest_above(path, drawn) for path in drawn}


def drawn_levels(parents: Mapping[str, str | None]) -> dict[str, int]:
    """The level of each module that is drawn, from 0 at the top; ``parents`` are those of `drawn_parents`."""
    levels: dict[str, int] = {}
    for path, parent in parents.items():
        levels[path] = 0 if parent is None else levels[parent] + 1
    return levels
