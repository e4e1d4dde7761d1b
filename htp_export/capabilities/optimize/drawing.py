"""What optimising did, drawn for a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Mapping
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

_MOST_MODULES = 3  # what fits a line; the table has all


@dataclass(frozen=True)
class _Line(PassReport):
    """A line of the table: a pass, and the modules; or one of its modules."""

    where: str = ""


def render_optimized(
    result: Optimized, *, attribution: bool = False, depth: int | None = None
) -> RenderableType:
    """A table with a line for each pass: the nodes that it removed and added, and where most of them were.

    With ``attribution``, every module of a pass has a line of its own; what lies deeper than
    ``depth`` is added to the module above.

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
        by_path = modules.get(report.name, {})
        if report.change == Change() and not report.rolled_back:
            continue
        rows.append(
            _Line(**vars(report), where="" if attribution or report.rolled_back else _top(by_path))
        )
        if attribution:
            for name, group in gathered(
                sorted(by_path, key=tags.path_order), str, by_path.__getitem__
            ):
                rows.append(
                    _Line("", report.level, {"": by_path[group[0]]}, where=name or "(root)")
                )
    undone = any(row.rolled_back for row in rows)
    columns: list[Column[Any]] = [
        column for column in PASS_COLUMNS if undone or column.name != "rolled_back"
    ]
    table = flat_table([*columns, Column("where", "modules", style="cyan", right=False)], rows)
    lines: list[RenderableType] = [*([table] if rows else []), Text(result.summary)]
    if result.fused:
        paths = ", ".join(list(result.fused)[:_MOST_MODULES]) + (
            ", …" if len(result.fused) > _MOST_MODULES else ""
        )
        lines.append(
            Text(
                f"{len(result.fused)} modules are fused with their neighbours now: {paths}",
                style="yellow",
            )
        )
    if result.left:
        (name, why), count = next(iter(result.left.items())), len(result.left)
        others = f" and {count - 1} others are" if count > 1 else " is"
        lines.append(Text(f"node {name!r}{others} left as before: {why}", style="yellow"))
    return Group(*lines, *tag_note(result.tags))


def _top(changes: Mapping[str, Change]) -> str:
    """The modules in which there are most nodes fewer."""
    order = sorted(changes, key=lambda path: (-changes[path].saved, tags.path_order(path)))
    groups = gathered(order, str, changes.__getitem__)
    named = [
        f"{name or '(root)'}: {changes[paths[0]].saved}" for name, paths in groups[:_MOST_MODULES]
    ]
    more = sum(len(paths) for _, paths in groups[_MOST_MODULES:])
    return ", ".join([*named, f"{more} more"] if more else named)
