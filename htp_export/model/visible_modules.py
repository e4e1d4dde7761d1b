"""Which modules of a model a table shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.selectors import select_below
from htp_export.model.tagged import TaggedModel


def visible(tagged: TaggedModel, depth: int | None = None, select: str | Sequence[str] | None = None) -> list[str]:
    """The modules that a table shows.

    Args:
        tagged: The model.
        depth: Leave out modules more than so many levels below the root, whose depth is 0; all where it is None.
            Containers that never run (``nn.ModuleList``) are no level: they are as deep as what they hold.
        select: Only the modules that this selector names, and those above them, which say where they are. With a depth,
            those so many levels below the outermost modules that it names.

    Raises:
        SelectorError: If the selector cannot be read or matches nothing.
        UntaggedModelError: If the model has no tags, and some modules are selected.
        InputError: If ``depth`` is negative.
    """
    if depth is not None and depth < 0:
        raise InputError(f"depth counts levels from 0, not {depth}")
    if select is None:
        return [path for path, level in _levels(tagged, {""}).items() if depth is None or level <= depth]
    shown = set(tagged.select(select))
    if depth is not None:
        levels = _levels(tagged, shown)
        shown = {path for path in select_below(select, tagged.hierarchy.classes) if levels.get(path, 0) <= depth}
    shown |= tags.all_above(shown)
    return [path for path in tagged.paths if path in shown]


def _levels(tagged: TaggedModel, tops: set[str]) -> Mapping[str, int]:
    """Module path → levels below the outermost of some modules; modules that are below none are left out."""
    levels: dict[str, int] = {}
    for path in tagged.paths:  # a module stands after those above it
        parent = tagged.hierarchy.parent(path)
        if parent in levels:
            levels[path] = levels[parent] + (parent in tagged.hierarchy.called or not parent)
        elif path in tops:
            levels[path] = 0
    return levels
