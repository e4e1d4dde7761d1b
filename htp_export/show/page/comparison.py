"""Two models side by side as a page: their module trees, aligned by path, with what changed coloured."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, Protocol

from htp_export.analyze.differences import ModelDifference
from htp_export.show.page.document import document
from htp_export.tagged import ModelSource, TaggedModel, load

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
) -> str:
    """The page.

    Args:
        rows: The modules of both, a module after those above it.
        before: What the first model is called.
        after: What the second is called.
        columns: The fields that are columns; all are shown of the module that is selected.
        notes: Sentences at the top, such as what the files know about their tags.

    Example:
        >>> from types import SimpleNamespace
        >>> row = SimpleNamespace(path="", status="changed", before={"nodes": 9}, after={"nodes": 7})
        >>> "a.onnx → b.onnx" in comparison_page([row], "a.onnx", "b.onnx")
        True
    """
    data = {
        "before": before,
        "after": after,
        "columns": list(columns),
        "notes": list(notes),
        "rows": [
            {"path": row.path, "status": row.status, "before": _plain(row.before), "after": _plain(row.after)}
            for row in rows
        ],
    }
    return document(
        f"{before} → {after}",
        data,
        template="diff.html",
        style=("page.css", "diff.css"),
        scripts=("diff.js",),
    )


def difference_page(found: ModelDifference, before: ModelSource, after: ModelSource) -> str:
    """The page of what differs between two files, with what each knows about its tags.

    Args:
        found: What ``diff`` returned.
        before: The first file.
        after: The second.
    """
    names = [Path(each).name if isinstance(each, str | os.PathLike) else "model" for each in (before, after)]
    notes = [_tags_note(name, load(each)) for name, each in zip(names, (before, after), strict=True)]
    if not found.by_module:
        notes.append("One of the files has no module tags: only the whole is compared.")
    return comparison_page(found.modules.values(), names[0], names[1], notes=notes)


def _tags_note(name: str, tagged: TaggedModel) -> str:
    known = ", ".join(f"{reason} {count}" for reason, count in tagged.reasons.most_common())
    said = {"htp": f"owners known by {known}", "torch": "torch's own scopes, which are not exact", "none": "no tags"}
    lacking = f"; {len(tagged.untagged)} nodes of no module" if tagged.untagged and tagged.source != "none" else ""
    return f"{name}: {said[tagged.source]}{lacking}"


def _plain(side: object | None) -> dict[str, Any] | None:
    if side is None:
        return None
    fields = asdict(side) if is_dataclass(side) and not isinstance(side, type) else side
    if not isinstance(fields, Mapping):
        raise TypeError(f"a side of a comparison is a dataclass or a mapping, not {type(side).__name__}")
    return {str(name): _value(value) for name, value in fields.items()}


def _value(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _value(each) for name, each in value.items()}
    if value is None or isinstance(value, str | int | float):
        return value
    return ", ".join(map(str, value)) if isinstance(value, Sequence) else str(value)
