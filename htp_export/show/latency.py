"""Latency by module, drawn for a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from htp_export import tags
from htp_export.run.latency import ModuleLatency, Profile

__all__ = ["SORTS", "render_profile"]

SORTS = ("tree", "total", "self")
"""Orders of the lines: the module tree, or one list, the longest first."""


def render_profile(profile: Profile, *, sort: str = "tree", depth: int | None = None) -> RenderableType:
    """A table with a line for each module that takes time: total, self, share and kernels; then the whole in words.

    Module names are drawn as they are, whatever markup they look like.

    Args:
        profile: What to draw.
        sort: One of ``SORTS``.
        depth: Leave out modules more than so many levels below the root; all where it is None. Containers that never
            ran are no level.

    Raises:
        ValueError: If ``sort`` is none of ``SORTS``.
    """
    if sort not in SORTS:
        raise ValueError(f"sort is one of {', '.join(SORTS)}, not {sort!r}")
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("module", overflow="fold")
    table.add_column("class", overflow="fold", style="cyan")
    for title in ("total ms", "self ms", "share", "kernels"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("mostly", overflow="fold", style="dim")
    lines = _tree(profile, depth)
    if sort != "tree":
        field = f"{sort}_ms"
        listed = sorted((module for _, module in lines), key=lambda module: -float(getattr(module, field)))
        lines = [(Text(module.path or "(root)"), module) for module in listed]
    for name, module in lines:
        table.add_row(
            name,
            Text(module.simple_class),
            f"{module.total_ms:.3f}",
            f"{module.self_ms:.3f}",
            f"{module.share:.1%}",
            str(module.kernels),
            Text(", ".join(list(module.by_op)[:2])),
        )
    return Group(table, Text(), *map(Text, profile.summary))


def _tree(profile: Profile, depth: int | None) -> list[tuple[Text, ModuleLatency]]:
    """The modules that take time, with the guide lines of a tree before their names."""
    # A container, which holds what runs and never ran itself, is no line: its name stands before those of its children.
    shown = {path: m for path, m in profile.modules.items() if m.kernels and (m.calls or not path or m.self_ms)}
    below: dict[str | None, list[str]] = {None: [], **{path: [] for path in shown}}
    for path in shown:
        below[next((up for up in tags.ancestors(path) if up != path and up in shown), None)].append(path)

    def lines(path: str, parent: str, guide: str, before: str, level: int) -> Iterator[tuple[Text, ModuleLatency]]:
        name = (path[len(parent) + 1 :] if parent else path) or "(root)"
        yield Text.assemble((guide, "dim"), name), shown[path]
        if depth is not None and level >= depth:
            return
        for child in below[path]:
            last = child == below[path][-1]
            branch, rest = ("└── ", "    ") if last else ("├── ", "│   ")
            yield from lines(child, path, before + branch, before + rest, level + 1)

    return [line for path in below[None] for line in lines(path, "", "", "", 0)]
