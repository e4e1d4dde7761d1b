"""The result of `optimize`, drawn for a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from htp_export.capabilities.optimize.results import PASS_COLUMNS, Change, Optimized, PassReport
from htp_export.format import tags
from htp_export.reporting.columns import Column
from htp_export.reporting.command_words import tag_note
from htp_export.reporting.folding import gathered
from htp_export.reporting.module_table import flat_table

_MOST_MODULES = 3  # as many as fit a line; the table has all


@dataclass(frozen=True)
class _Line(PassReport):
    """A line of the table: a pass, and the modules; or one of its modules."""

    where: str = ""


def render_optimized(
    result: Optimized, *, attribution: bool = False, depth: int | None = None
) -> RenderableType:
    """A table with one line a pass: its changes, and the modules with most of them.

    With ``attribution``, every module of a pass has a line; modules deeper than ``depth`` are added
    to the module above.

    Examples:
        >>> from rich.console import Console
        >>> import onnx_ir as ir
        >>> from htp_export.capabilities.optimize.results import PassReport
        >>> relu = ir.node("Relu", [ir.val("x")], metadata_props={"htp.module": "fc", "htp.reason": "fused"})
        >>> model = ir.Model(ir.Graph(relu.inputs, relu.outputs, nodes=[relu]), ir_version=10)
        >>> report = PassReport("fold_constants", "exact", {"fc": Change(3, 2, 1, 2048)})
        >>> result = Optimized(5, 3, (report,), model=model)
        >>> Console(width=80).print(render_optimized(result))  # doctest: +NORMALIZE_WHITESPACE
        pass             removed   changed   added   saved   modules
        fold_constants         3         2       1   2.048 kB   fc: 2
        5 nodes before, 3 after
        every node has a module: 1 fused from several modules
    """
    modules = result.attribution if depth is None else result.at_depth(depth)
    rows: list[_Line] = []
    for report in result.passes:
        if report.change != Change() or report.rolled_back:
            rows += _rows_of(report, modules.get(report.name, {}), attribution)
    lines: list[RenderableType] = []
    if rows:
        columns: list[Column[Any]] = list(PASS_COLUMNS)
        if not any(row.rolled_back for row in rows):
            columns = [column for column in columns if column.name != "rolled_back"]
        columns.append(Column("where", "modules", style="cyan", right=False))
        lines.append(flat_table(columns, rows))
    lines.append(Text(result.summary))
    lines += [Text(note, style="yellow") for note in _notes(result)]
    return Group(*lines, *tag_note(result.tags))


def _rows_of(
    report: PassReport, changes: Mapping[str, Change], attribution: bool
) -> Iterator[_Line]:
    """The line of a pass, and with ``attribution``, a line for each module."""
    where = "" if attribution or report.rolled_back else _top(changes)
    yield _Line(**vars(report), where=where)
    if attribution:
        paths = sorted(changes, key=tags.path_order)
        for name, group in gathered(paths, str, changes.__getitem__):
            yield _Line("", report.level, {"": changes[group[0]]}, where=name or "(root)")


def _notes(result: Optimized) -> Iterator[str]:
    if result.fused:
        paths, count = list(result.fused), len(result.fused)
        listed = ", ".join(paths[:_MOST_MODULES]) + (", …" if count > _MOST_MODULES else "")
        yield f"{count} modules are fused with their neighbours now: {listed}"
    if result.left:
        (name, why), count = next(iter(result.left.items())), len(result.left)
        others = f" and {count - 1} others are" if count > 1 else " is"
        yield f"node {name!r}{others} left as before: {why}"


def _top(changes: Mapping[str, Change]) -> str:
    """The modules that lost the most nodes."""
    order = sorted(changes, key=lambda path: (-changes[path].saved, tags.path_order(path)))
    groups = gathered(order, str, changes.__getitem__)
    named = [
        f"{name or '(root)'}: {changes[paths[0]].saved}" for name, paths in groups[:_MOST_MODULES]
    ]
    more = sum(len(paths) for _, paths in groups[_MOST_MODULES:])
    return ", ".join([*named, f"{more} more"] if more else named)
