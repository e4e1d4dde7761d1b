"""Differences between two files, drawn for a terminal or a pipe, and as a page with both trees."""

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

_SHARED = (
    "shared: bytes of weights that other modules read too; "
    "in the modules above them they count once"
)


def render(
    difference: ModelDifference, *, depth: int | None = None, only_changed: bool = False
) -> RenderableType:
    """A table with one line a module, and a sum; modules with equal differences share a line.

    Modules that were moved, added or removed together with one above them have no line, nor modules
    more than ``depth`` names below the root; with ``only_changed``, nor unchanged modules.
    """
    parts: list[RenderableType] = []
    differing = {module.path for module in difference.topmost()}
    shown: list[ModuleDifference] = []
    for module in difference.modules.values():
        is_unchanged = module.status == "same" and not only_changed
        if (module.path in differing or is_unchanged) and _is_within(module.path, depth):
            shown.append(module)
    if shown and not (only_changed and difference.same):
        groups = gathered(shown, lambda module: module.path, _line_key)
        lines = [replace(modules[0], path=name) for name, modules in groups]
        parts += [flat_table([MODULE, *DIFFERENCE_COLUMNS], lines, gap=2), Text()]
    parts.append(Text(difference.summary))
    if any("shared" in line for module in shown for line in byte_lines(module)):
        parts.append(Text(_SHARED, style="dim"))
    if not difference.by_module:
        note = "one of the files has no module tags: only the whole is compared"
        parts.append(Text(note, style="yellow"))
    return Group(*parts, *tag_note(*difference.tags))


def _is_within(path: str, depth: int | None) -> bool:
    """Whether a path has at most so many names; None for any number."""
    return depth is None or sum(1 for _ in tags.ancestors(path)) <= depth + 1


def _line_key(module: ModuleDifference) -> object:
    """The key of modules that share a line; a moved module has a line of its own."""
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
    """The page of two models with these names.

    ``rows`` are `ModuleDifference`, each after the rows of its ancestors. ``columns`` are the
    fields that the table shows; the page shows all fields of the selected module.
    """
    from htp_export.capabilities.view.page.document import document, tags_data

    drawn = [_row_data(row) for row in rows]
    data = {
        "before": before,
        "after": after,
        "columns": list(columns),
        "notes": list(notes),
        "files": [{"name": name, **tags_data(facts)} for name, facts in files],
        "repeats": _repeats(drawn),
        "rows": drawn,
    }
    return document(
        f"{before} → {after}",
        data,
        template="diff.html",
        style=("page.css", "diff.css"),
        scripts=("sizes.js", "reasons.js", "diff.js"),
    )


def _row_data(row: Any) -> dict[str, Any]:
    """The fields of a `ModuleDifference` that the page shows, as data."""
    names = ("path", "status", "before", "after")
    return {name: plain(getattr(row, name)) for name in names}


def difference_page(difference: ModelDifference, before: str, after: str) -> str:
    """The page of the differences between two files with these names, and of their tags."""
    files = list(zip((before, after), difference.tags, strict=True))
    notes = [f"{name}: {in_both(facts.advice)}" for name, facts in files if facts.advice]
    if not difference.by_module:
        notes.append("One of the files has no module tags: only the whole is compared.")
    columns = ("nodes", "parameters", "weight_bytes")
    return comparison_page(difference.modules.values(), before, after, columns, notes, files)


def _repeats(rows: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Positions of equal siblings with equal changes; the wiring of tensors does not count."""
    by_path = {row["path"]: row for row in rows}
    parents = {path: tags.nearest_above(path, by_path) for path in by_path}

    def without_path(side: dict[str, Any] | None) -> dict[str, Any] | None:
        return side and {name: side[name] for name in side if name != "path"}

    def key(path: str) -> Hashable:
        row = by_path[path]
        sides = [without_path(row["before"]), without_path(row["after"])]
        return json.dumps([row["status"], sides], sort_keys=True)

    return repeats(parents, key)
