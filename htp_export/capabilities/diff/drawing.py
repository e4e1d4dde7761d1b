"""Differences between two files, drawn for a terminal or a pipe."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Group, RenderableType
from rich.text import Text

from htp_export.capabilities.diff.differing import DIFFERENCE_COLUMNS, ModelDifference, ModuleDifference, byte_lines
from htp_export.drawing.command_words import tag_note
from htp_export.drawing.folding import gathered
from htp_export.drawing.module_table import flat_table
from htp_export.format import tags
from htp_export.results.columns import MODULE

_SHARED = "shared: bytes of weights that other modules read too; in the modules above them they count once"


def render(difference: ModelDifference, *, depth: int | None = None, only_changed: bool = False) -> RenderableType:
    """A table with a line for each module, alike ones once, and a sum.

    Modules that were moved, added or removed together with one above them have no line, nor those more than ``depth``
    names below the root; with ``only_changed``, nor those that are the same.
    """
    parts: list[RenderableType] = []
    differing = {module.path for module in difference.topmost()}
    shown = [m for m in difference.modules.values() if m.path in differing or (m.status == "same" and not only_changed)]
    shown = [module for module in shown if depth is None or sum(1 for _ in tags.ancestors(module.path)) <= depth + 1]
    if shown and not (only_changed and difference.same):
        lines = [replace(alike[0], path=name) for name, alike in gathered(shown, lambda module: module.path, _alike)]
        parts += [flat_table([MODULE, *DIFFERENCE_COLUMNS], lines, gap=2), Text()]
    parts.append(Text(difference.summary))
    if any("shared" in line for module in shown for line in byte_lines(module)):
        parts.append(Text(_SHARED, style="dim"))
    if not difference.by_module:
        parts.append(Text("one of the files has no module tags: only the whole is compared", style="yellow"))
    return Group(*parts, *tag_note(*difference.tags))


def _alike(module: ModuleDifference) -> object:
    """What makes the lines of two modules the same; one that was moved stands alone."""
    sizes = (*module.nodes, *module.parameters, *byte_lines(module))
    operators = tuple(module.operators.items())
    return (module.simple_class, module.status, sizes, operators, module.moved_from and module.path)
