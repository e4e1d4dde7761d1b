"""Two models side by side as a page: their module trees, aligned by path, with what changed coloured."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Protocol

from htp_export.capabilities.diff.differing import ModelDifference, ModuleState
from htp_export.drawing.command_words import in_both
from htp_export.drawing.folding import repeats
from htp_export.format import tags
from htp_export.model.tagged import ModelSource, load
from htp_export.results.tag_facts import TagFacts

__all__ = ["DiffRow", "comparison_page", "difference_page"]


class DiffRow(Protocol):
    """One module of two trees.

    Attributes:
        path: The module.
        status: ``same``, ``changed``, ``moved``, ``added`` or ``removed``.
        before: What it came to before, a dataclass or a mapping: ``class_name``, ``nodes``, ``parameters``, and where
            known ``operators``, operator → nodes; None for a module that was added.
        after: The same afterwards; None for one that was removed.
    """

    @property
    def path(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def before(self) -> object | None: ...
    @property
    def after(self) -> object | None: ...


def comparison_page(
    rows: Iterable[DiffRow],
    before: str,
    after: str,
    columns: Sequence[str] = ("nodes", "parameters"),
    notes: Sequence[str] = (),
    files: Sequence[tuple[str, TagFacts]] = (),
) -> str:
    """The page.

    Args:
        rows: The modules of both, a module after those above it.
        before: What the first model is called.
        after: What the second is called.
        columns: The fields that are columns; all are shown of the module that is selected.
        notes: Sentences at the top.
        files: The name of each file, and what it knows about its tags.

    Examples:
        >>> from types import SimpleNamespace
        >>> row = SimpleNamespace(path="", status="changed", before={"nodes": 9}, after={"nodes": 7})
        >>> "a.onnx → b.onnx" in comparison_page([row], "a.onnx", "b.onnx")
        True
    """
    from htp_export.capabilities.view.page.document import document
    from htp_export.capabilities.view.page.payload import tags_data

    drawn = list(rows)
    data = {
        "before": before,
        "after": after,
        "columns": list(columns),
        "notes": list(notes),
        "files": [{"name": name, **tags_data(facts)} for name, facts in files],
        "repeats": _repeats(drawn),
        "rows": [
            {"path": row.path, "status": row.status, "before": _plain(row.before), "after": _plain(row.after)}
            for row in drawn
        ],
    }
    return document(
        f"{before} → {after}",
        data,
        template="diff.html",
        style=("page.css", "diff.css"),
        scripts=("sizes.js", "reasons.js", "diff.js"),
    )


def difference_page(difference: ModelDifference, before: ModelSource, after: ModelSource) -> str:
    """The page of what differs between two files, with what each knows about its tags."""
    names = [Path(source).name if isinstance(source, str | os.PathLike) else "model" for source in (before, after)]
    opened = [load(source) for source in (before, after)]
    files = [(name, tagged.tag_facts) for name, tagged in zip(names, opened, strict=True)]
    notes = [
        f"{name}: {in_both(advice)}"
        for name, tagged in zip(names, opened, strict=True)
        if (advice := tagged.tag_facts.advice)
    ]
    if not difference.by_module:
        notes.append("One of the files has no module tags: only the whole is compared.")
    columns = ("nodes", "parameters", "weight_bytes")
    return comparison_page(difference.modules.values(), names[0], names[1], columns, notes, files)


def _repeats(rows: Sequence[DiffRow]) -> list[list[int]]:
    """Positions of siblings that are alike and changed alike; which tensors are wired how does not count."""
    by_path = {row.path: row for row in rows}
    place = {path: position for position, path in enumerate(by_path)}
    parents = {path: tags.nearest_above(path, by_path) for path in by_path}

    def side(state: object | None) -> object:
        facts = _plain(state) or {}
        return json.dumps({name: facts[name] for name in facts if name != "path"}, sort_keys=True)

    def alike(path: str) -> Hashable:
        row = by_path[path]
        return (row.status, row.before is None, side(row.before), row.after is None, side(row.after))

    return [[place[path] for path in run] for run in repeats(parents, alike)]


def _plain(side: object | None) -> dict[str, Any] | None:
    if side is None:
        return None
    fields = side.to_dict() if isinstance(side, ModuleState) else side
    if is_dataclass(fields) and not isinstance(fields, type):
        fields = asdict(fields)
    if not isinstance(fields, Mapping):
        raise TypeError(f"a side of a comparison is a dataclass or a mapping, not {type(side).__name__}")
    return {str(name): _value(value) for name, value in fields.items()}


def _value(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _value(item) for name, item in value.items()}
    if value is None or isinstance(value, str | int | float):
        return value
    return ", ".join(map(str, value)) if isinstance(value, Sequence) else str(value)
