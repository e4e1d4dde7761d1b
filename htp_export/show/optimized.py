"""What optimising did, drawn for a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from htp_export.passes.results import Change, Optimized
from htp_export.show.tag_note import tag_note

__all__ = ["render_optimized"]

_MOST_MODULES = 3


def render_optimized(result: Optimized, *, attribution: bool = False) -> RenderableType:
    """A table with a line for each pass: the nodes that it removed and added, and where most of them were.

    Args:
        result: What to draw.
        attribution: Give every module of a pass a line of its own.

    Example:
        >>> from rich.console import Console
        >>> import onnx_ir as ir
        >>> from htp_export.passes.results import PassReport
        >>> relu = ir.node("Relu", [ir.val("x")], metadata_props={"htp.module": "fc", "htp.reason": "fused"})
        >>> model = ir.Model(ir.Graph(relu.inputs, relu.outputs, nodes=[relu]), ir_version=10)
        >>> report = PassReport("fold_constants", "exact", change=Change(3, 1))
        >>> found = Optimized(5, 3, {"fold_constants": {"fc": Change(3, 1)}}, (report,), model=model)
        >>> Console(width=80).print(render_optimized(found))  # doctest: +NORMALIZE_WHITESPACE
        pass             removed   added   merged   modules
        fold_constants         3       1        0   fc 2
        5 nodes before, 3 after
        owners of nodes known by fused 1
    """
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("pass", no_wrap=True)
    for name in ("removed", "added", "merged"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("modules", overflow="fold", style="cyan")
    for report in result.passes:
        found = result.attribution.get(report.name, {})
        if report.change == Change() and not report.rolled_back:
            continue
        where = Text(f"undone: {report.rolled_back}", style="yellow") if report.rolled_back else _top(found)
        table.add_row(report.name, *_numbers(report.change), Text("") if attribution else where)
        if attribution:
            for path, change in sorted(found.items()):
                table.add_row("", *_numbers(change), Text(path or "(root)"))
    lines: list[RenderableType] = [table, Text(_summary(result))]
    if result.fused:
        paths = ", ".join(list(result.fused)[:_MOST_MODULES]) + (", …" if len(result.fused) > _MOST_MODULES else "")
        lines.append(Text(f"{len(result.fused)} modules are fused with their neighbours now: {paths}", style="yellow"))
    return Group(*lines, *tag_note(result.tags))


def _numbers(change: Change) -> tuple[str, str, str]:
    return str(change.removed), str(change.added), str(change.merged)


def _top(found: Mapping[str, Change]) -> Text:
    """The modules in which there are most nodes fewer."""
    order = sorted(found, key=lambda path: (-found[path].saved, path))
    named = [f"{path or '(root)'} {found[path].saved}" for path in order[:_MOST_MODULES]]
    return Text(", ".join([*named, f"{len(order) - _MOST_MODULES} more"] if len(order) > _MOST_MODULES else named))


def _summary(result: Optimized) -> str:
    text = f"{result.nodes_before} nodes before, {result.nodes_after} after"
    return text if result.max_abs is None else f"{text}; outputs differ by {result.max_abs:.3g} at most"
