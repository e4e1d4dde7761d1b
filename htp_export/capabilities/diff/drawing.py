"""Differences between two files, drawn for a terminal or a pipe; and a page of both module trees, aligned by path."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from htp_export.capabilities.diff.differing import (
    DIFFERENCE_COLUMNS,
    ModelDifference,
    ModuleDifference,
    byte_lines,
)
from htp_export.format import tags
from htp_export.reporting.columns import MODULE
from htp_export.reporting.command_words import in_both, tag_note
from htp_export.reporting.folding import gathered, repeats
from htp_export.reporting.module_table import flat_table
from htp_export.reporting.result import plain
from htp_export.reporting.tag_facts import TagFacts

_SHARED = "shared: bytes of weights that other modules read too; in the modules above them they count once"


def render(
    difference: ModelDifference, *, depth: int | None = None, only_changed: bool = False
) -> RenderableType:
    """A table with a line for each module, alike ones once, and a sum.

    Modules that were moved, added or removed together with one above them have no line, nor those
    more than ``depth`` names below the root; with ``only_changed``, nor those that are the same.
    """
    parts: list[RenderableType] = []
    differing = {module.path for module in difference.topmost()}
    shown = [
        m
        for m in difference.modules.values()
        if m.path in differing or (m.status == "same" and not only_changed)
    ]
    shown = [
        module
        for module in shown
        if depth is None or sum(1 for _ in tags.ancestors(module.path)) <= depth + 1
    ]
    if shown and not (only_changed and difference.same):
        lines = [
            replace(alike[0], path=name)
            for name, alike in gathered(shown, lambda module: module.path, _alike)
        ]
        parts += [flat_table([MODULE, *DIFFERENCE_COLUMNS], lines, gap=2), Text()]
    parts.append(Text(difference.summary))
    if any("shared" in line for module in shown for line in byte_lines(module)):
        parts.append(Text(_SHARED, style="dim"))
    if not difference.by_module:
        parts.append(
            Text("one of the files has no module tags: only the whole is compared", style="yellow")
        )
    return Group(*parts, *tag_note(*difference.tags))


def _alike(module: ModuleDifference) -> object:
    """What makes the lines of two modules the same; one that was moved stands alone."""
    sizes = (*module.nodes, *module.parameters, *byte_lines(module))
    operators = tuple(module.operators.items())
    return (module.simple_class, module.status, sizes, operators, module.moved_from and module.path)


def comparison_page(
    rows: Iterable[Any],
    before: str,
    after: str,
    columns: Sequence[str] = ("nodes", "parameters"),
    notes: Sequence[str] = (),
    files: Sequence[tuple[str, TagFacts]] = (),
) -> str:
    """The page of two models with these names; ``rows`` are `ModuleDifference`, each after those above it.

    ``columns`` are the fields that are columns: all are shown of the module that is selected.
    """
    from htp_export.capabilities.view.page.document import document, tags_data

    names = ("path", "status", "before", "after")
    drawn = [{name: plain(getattr(row, name)) for name in names} for row in rows]
    data = {
        "before": before,
        "after": after,
        "columns": list(columns),
        "notes": list(notes),
        "files": [{"name": name, **tags_data(facts)} for name, facts in files],
        "repeats": _repeats(drawn),
        "rows": drawn,
    }
    style, scripts = ("page.css", "diff.css"), ("sizes.js", "reasons.js", "diff.js")
    return document(f"{before} → {after}", data, template="diff.html", style=style, scripts=scripts)


def difference_page(difference: ModelDifference, before: str, after: str) -> str:
    """The page of what differs between two files with these names, with what each knows about its tags."""
    files = list(zip((before, after), difference.tags, strict=True))
    notes = [f"{name}: {in_both(facts.advice)}" for name, facts in files if facts.advice]
    if not difference.by_module:
        notes.append("One of the files has no module tags: only the whole is compared.")
    columns = ("nodes", "parameters", "weight_bytes")
    return comparison_page(difference.modules.values(), before, after, columns, notes, files)


def _repeats(rows: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Positions of siblings that are alike and changed alike; which tensors are wired how does not count."""
    by_path = {row["path"]: row for row in rows}
    place = {path: position for position, path in enumerate(by_path)}
    parents = {path: tags.nearest_above(path, by_path) for path in by_path}

    def alike(path: str) -> Hashable:
        row = by_path[path]
        sides = [
            side and {name: side[name] for name in side if name != "path"}
            for side in (row["before"], row["after"])
        ]
        return json.dumps([row["status"], sides], sort_keys=True)

    return [[place[path] for path in run] for run in repeats(parents, alike)]
