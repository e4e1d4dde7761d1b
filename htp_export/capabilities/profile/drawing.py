"""Drawing of latency by module, for a terminal or a pipe."""

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
    """A table with a line for each module that takes time, and lines about the whole model.

    Modules more than ``depth`` levels below the root are omitted; containers that never ran do not
    count as levels. With ``fold``, consecutive equal siblings are drawn once, with the mean of their
    times.
    """
    rows = _shown(profile, depth)
    if sort != "tree":
        rows.sort(key=lambda row: -float(getattr(row, f"{sort}_ms")))
    columns = [*chosen(profile.columns, (*_COLUMNS, *profile.drawn_extras)), _MOSTLY]
    table = TreeTable(rows, columns, _alike if fold else None, _merged, flat=sort != "tree")
    return with_lines(table, (profile.summary, *profile.lines))


def _shown(profile: Profile, depth: int | None) -> list[ModuleLatency]:
    """The modules that took time, and are not containers, down to a depth."""
    timed = {path: module for path, module in profile.modules.items() if module.kernels}
    ran = {path for path, module in timed.items() if module.calls or not path or module.self_ms}

    def level(path: str) -> int:
        return sum(ancestor in ran for ancestor in tags.ancestors(path) if ancestor != path)

    shown = []
    for path, module in timed.items():
        if path in ran and (depth is None or level(path) <= depth):
            # With a call, it is not taken for a container, which would have no line.
            shown.append(module if module.calls else replace(module, calls=1))
    return shown


def _alike(row: ModuleLatency) -> Hashable:
    return (row.class_name, row.calls, row.kernels)


def _merged(modules: Sequence[ModuleLatency]) -> ModuleLatency:
    by_op = Counter[str]()
    for module in modules:
        by_op.update(module.by_op)
    memories = [module.memory for module in modules if module.memory is not None]
    memory = merged_row(memories, means=vars(memories[0])) if memories else None
    row = merged_row(modules, means=("total_ms", "self_ms", "share", "worst_ms"))
    return replace(row, by_op=dict(by_op.most_common()), memory=memory)


def drawn(result: Profile) -> RenderableType:
    """The drawing in a notebook."""
    return render_profile(result)
