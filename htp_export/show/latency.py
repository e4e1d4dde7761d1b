"""Latency by module, drawn for a terminal or a pipe."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.text import Text

from htp_export.format import tags
from htp_export.run.latency import ModuleLatency, Profile
from htp_export.show.command_words import in_commands
from htp_export.show.module_table import Column, ModuleTable

__all__ = ["SORTS", "render_profile"]

SORTS = ("tree", "total", "self")
"""Orders of the lines: the module tree, or one list, the longest first."""


def render_profile(
    profile: Profile, *, sort: str = "tree", depth: int | None = None, fold: bool = True
) -> RenderableType:
    """A table with a line for each module that takes time: total, self, share and kernels; then the whole in words.

    Module names are drawn as they are, whatever markup they look like.

    Args:
        profile: What to draw.
        sort: One of ``SORTS``.
        depth: Leave out modules more than so many levels below the root; all where it is None. Containers that never
            ran are no level.
        fold: Draw siblings that are alike and follow each other once, with the mean of their times.

    Raises:
        ValueError: If ``sort`` is none of ``SORTS``.
    """
    if sort not in SORTS:
        raise ValueError(f"sort is one of {', '.join(SORTS)}, not {sort!r}")
    rows = [_Line(module) for module in _shown(profile, depth)]
    if sort != "tree":
        rows.sort(key=lambda row: -float(getattr(row.module, f"{sort}_ms")))
    alike = _alike if fold else None
    table = ModuleTable(rows, _COLUMNS, alike, _merged, flat=sort != "tree")
    return Group(table, Text(), *(Text(in_commands(line)) for line in profile.summary))


def _shown(profile: Profile, depth: int | None) -> list[ModuleLatency]:
    """The modules that take time, down to a depth."""
    every = {path: module for path, module in profile.modules.items() if module.kernels}
    ran = {path for path, module in every.items() if module.calls or not path or module.self_ms}

    def level(path: str) -> int:
        return sum(up in ran for up in tags.ancestors(path) if up != path)

    return [module for path, module in every.items() if path in ran and (depth is None or level(path) <= depth)]


@dataclass(frozen=True)
class _Line:
    """A module as a row of the table; ``calls`` says that it is no mere container, and ``nodes`` counts kernels."""

    module: ModuleLatency

    @property
    def path(self) -> str:
        return self.module.path

    @property
    def calls(self) -> int:
        return 1

    @property
    def nodes(self) -> int:
        return self.module.kernels


def _alike(row: _Line) -> Hashable:
    return (row.module.class_name, row.module.calls, row.module.kernels)


def _merged(rows: Sequence[_Line]) -> _Line:
    """One row for alike modules: the mean of their times."""
    modules = [row.module for row in rows]
    by_op = Counter[str]()
    for module in modules:
        by_op.update(module.by_op)

    def mean(times: Iterable[float]) -> float:
        return math.fsum(times) / len(modules)

    merged = replace(
        modules[0],
        total_ms=mean(module.total_ms for module in modules),
        self_ms=mean(module.self_ms for module in modules),
        share=mean(module.share for module in modules),
        by_op=dict(by_op.most_common()),
    )
    return _Line(merged)


_COLUMNS: tuple[Column[_Line], ...] = (
    Column("class", "class", lambda row: row.module.simple_class, style="cyan", right=False, keep=1),
    Column("total", "total ms", lambda row: row.module.total_ms, "{:.3f}".format, keep=5),
    Column("self", "self ms", lambda row: row.module.self_ms, "{:.3f}".format, keep=4),
    Column("share", "share", lambda row: row.module.share, "{:.1%}".format, keep=3),
    Column("kernels", "kernels", lambda row: row.module.kernels, keep=2),
    Column("mostly", "mostly", lambda row: ", ".join(list(row.module.by_op)[:2]), style="dim", right=False),
)
