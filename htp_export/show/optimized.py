"""What optimising did, drawn for a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from htp_export.format import tags
from htp_export.passes.results import Change, Optimized, OptimizedModels
from htp_export.show.folding import gathered
from htp_export.show.numbers import bytes_text
from htp_export.show.tag_note import tag_note

__all__ = ["render_optimized", "render_optimized_models"]

_MOST_MODULES = 3


def render_optimized(result: Optimized, *, attribution: bool = False, depth: int | None = None) -> RenderableType:
    """A table with a line for each pass: the nodes that it removed and added, and where most of them were.

    Args:
        result: What to draw.
        attribution: Give every module of a pass a line of its own.
        depth: With ``attribution``, how deep; what is deeper is added to the module above. None for each by itself.

    Examples:
        >>> from rich.console import Console
        >>> import onnx_ir as ir
        >>> from htp_export.passes.results import PassReport
        >>> relu = ir.node("Relu", [ir.val("x")], metadata_props={"htp.module": "fc", "htp.reason": "fused"})
        >>> model = ir.Model(ir.Graph(relu.inputs, relu.outputs, nodes=[relu]), ir_version=10)
        >>> report = PassReport("fold_constants", "exact", change=Change(3, 2, 1, 2048))
        >>> found = Optimized(5, 3, {"fold_constants": {"fc": Change(3, 2, 1, 2048)}}, (report,), model=model)
        >>> Console(width=80).print(render_optimized(found))  # doctest: +NORMALIZE_WHITESPACE
        pass             removed   changed   added   saved   modules
        fold_constants         3         2       1   2 KiB   fc: 2
        5 nodes before, 3 after
        every node has a module: 1 fused from several modules
    """
    table = _table("pass", "removed", "changed", "added", "saved")
    table.add_column("modules", overflow="fold", style="cyan")
    modules = result.attribution if depth is None else result.at_depth(depth)
    for report in result.passes:
        found = modules.get(report.name, {})
        if report.change == Change() and not report.rolled_back:
            continue
        where = Text(f"undone: {report.rolled_back}", style="yellow") if report.rolled_back else _top(found)
        table.add_row(report.name, *_numbers(report.change), Text("") if attribution else where)
        if attribution:
            for name, group in gathered(sorted(found, key=tags.path_order), str, found.__getitem__):
                table.add_row("", *_numbers(found[group[0]]), Text(name or "(root)"))
    lines: list[RenderableType] = [table, Text(_summary(result))]
    if result.fused:
        paths = ", ".join(list(result.fused)[:_MOST_MODULES]) + (", …" if len(result.fused) > _MOST_MODULES else "")
        lines.append(Text(f"{len(result.fused)} modules are fused with their neighbours now: {paths}", style="yellow"))
    return Group(*lines, *tag_note(result.tags))


def render_optimized_models(results: OptimizedModels) -> RenderableType:
    """A table with a line for each pass and a column for each model: by how many nodes, and bytes, it has fewer.

    Args:
        results: What to draw.

    Examples:
        >>> from rich.console import Console
        >>> import onnx_ir as ir
        >>> from htp_export.passes.results import PassReport
        >>> model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 20}), ir_version=10)
        >>> one = Optimized(5, 3, {}, (PassReport("fold_constants", "exact", change=Change(3, 0, 1)),), model=model)
        >>> drawn = render_optimized_models(OptimizedModels({"bert": one, "vit": one}))
        >>> Console(width=80).print(drawn)  # doctest: +NORMALIZE_WHITESPACE
        nodes fewer by   bert   vit   all   saved
        fold_constants      2     2     4     0 B
        nodes before        5     5    10
        nodes after         3     3     6
    """
    table = _table("nodes fewer by", *results.models, "all", "saved")
    attribution = results.attribution
    for name, total in results.total.items():
        if total != Change():
            each = (str(attribution[name].get(model, Change()).saved) for model in results.models)
            table.add_row(name, *each, str(total.saved), bytes_text(total.saved_bytes))
    found = results.models.values()
    for name, counts in (
        ("nodes before", [result.nodes_before for result in found]),
        ("nodes after", [result.nodes_after for result in found]),
    ):
        table.add_row(name, *map(str, counts), str(sum(counts)), style="bold")
    return table


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in numbers:
        table.add_column(Text(name), justify="right", no_wrap=True)
    return table


def _numbers(change: Change) -> tuple[str, ...]:
    return str(change.removed), str(change.changed), str(change.added), bytes_text(change.saved_bytes)


def _top(found: Mapping[str, Change]) -> Text:
    """The modules in which there are most nodes fewer."""
    order = sorted(found, key=lambda path: (-found[path].saved, tags.path_order(path)))
    groups = gathered(order, str, found.__getitem__)
    named = [f"{name or '(root)'}: {found[paths[0]].saved}" for name, paths in groups[:_MOST_MODULES]]
    more = sum(len(paths) for _, paths in groups[_MOST_MODULES:])
    return Text(", ".join([*named, f"{more} more"] if more else named))


def _summary(result: Optimized) -> str:
    text = f"{result.nodes_before} nodes before, {result.nodes_after} after"
    return text if result.max_abs is None else f"{text}; outputs differ by {result.max_abs:.3g} at most"
