"""Two models side by side as a page: their module trees, aligned by path, with what changed coloured."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

from htp_export.capabilities.diff.differing import ModelDifference
from htp_export.drawing.command_words import in_both
from htp_export.drawing.folding import repeats
from htp_export.format import tags
from htp_export.model.tagged import ModelSource, load
from htp_export.results.result import plain
from htp_export.results.tag_facts import TagFacts


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


def difference_page(difference: ModelDifference, before: ModelSource, after: ModelSource) -> str:
    """The page of what differs between two files, with what each knows about its tags."""
    names = [Path(source).name if isinstance(source, str | os.PathLike) else "model" for source in (before, after)]
    opened = [load(source) for source in (before, after)]
    files = [(name, tagged.tag_facts) for name, tagged in zip(names, opened, strict=True)]
    notes = [f"{name}: {in_both(facts.advice)}" for name, facts in files if facts.advice]
    if not difference.by_module:
        notes.append("One of the files has no module tags: only the whole is compared.")
    columns = ("nodes", "parameters", "weight_bytes")
    return comparison_page(difference.modules.values(), names[0], names[1], columns, notes, files)


def _repeats(rows: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Positions of siblings that are alike and changed alike; which tensors are wired how does not count."""
    by_path = {row["path"]: row for row in rows}
    place = {path: position for position, path in enumerate(by_path)}
    parents = {path: tags.nearest_above(path, by_path) for path in by_path}

    def alike(path: str) -> Hashable:
        row = by_path[path]
        sides = [
            side and {name: side[name] for name in side if name != "path"} for side in (row["before"], row["after"])
        ]
        return json.dumps([row["status"], sides], sort_keys=True)

    return [[place[path] for path in run] for run in repeats(parents, alike)]
