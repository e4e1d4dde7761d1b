"""Latency by module, drawn for a terminal or a pipe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Literal

from rich.console import RenderableType

from htp_export.capabilities.profile.latency_results import ModuleLatency, Profile
from htp_export.format import tags
from htp_export.reporting.columns import Column, chosen
from htp_export.reporting.module_table import TreeTable, merged_row, with_lines

_COLUMNS = ("class_name", "total_ms", "self_ms", "share", "kernels")
_MOSTLY: Column[ModuleLatency] = Column(
    "by_op", "mostly", lambda row: ", ".join(list(row.by_op)[:2]), style="dim", right=False
)


def render_profile(
    profile: Profile,
    *,
    sort: Literal["tree", "total", "self"] = "tree",
    depth: int | None = None,
    fold: bool = True,
) -> RenderableType:
    """A table with a line for each module that takes time: total, self, share and kernels; then the whole in words.

    Modules more than ``depth`` levels below the root are left out; containers that never ran are no
    level. With ``fold``, alike siblings that follow each other are drawn once, with the mean of
    their times.
    """
    rows = _shown(profile, depth)
    if sort != "tree":
        rows.sort(key=lambda row: -float(getattr(row, f"{sort}_ms")))
    columns = [*chosen(profile.columns, (*_COLUMNS, *profile.drawn_memory)), _MOSTLY]
    table = TreeTable(rows, columns, _alike if fold else None, _merged, flat=sort != "tree")
    return with_lines(table, (profile.summary, *profile.lines))


def _shown(profile: Profile, depth: int | None) -> list[ModuleLatency]:
    every = {path: module for path, module in profile.modules.items() if module.kernels}
    ran = {path for path, module in every.items() if module.calls or not path or module.self_ms}

    def level(path: str) -> int:
        return sum(up in ran for up in tags.ancestors(path) if up != path)

    shown = [
        module
        for path, module in every.items()
        if path in ran and (depth is None or level(path) <= depth)
    ]
    # no container: it has a line
    return [module if module.calls else replace(module, calls=1) for module in shown]


def _alike(row: ModuleLatency) -> Hashable:
    return (row.class_name, row.calls, row.kernels)


def _merged(modules: Sequence[ModuleLatency]) -> ModuleLatency:
    by_op = Counter[str]()
    for module in modules:
        by_op.update(module.by_op)
    memories = [module.memory for module in modules if module.memory is not None]
    memory = merged_row(memories, means=vars(memories[0])) if memories else None
    row = merged_row(modules, means=("total_ms", "self_ms", "share"))
    return replace(row, by_op=dict(by_op.most_common()), memory=memory)


def drawn(result: Profile) -> RenderableType:
    """The result as a notebook shows it."""
    return render_profile(result)
