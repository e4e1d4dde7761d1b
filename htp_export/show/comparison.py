"""What ``verify`` and ``compare`` found, drawn for a terminal or a pipe."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from htp_export.run.results import DIFFERS, INHERITS, NOT_COMPARED, Comparison, ModuleResult, short_number

__all__ = ["render"]

_STYLES = {"agrees": "green", DIFFERS: "bold red", INHERITS: "yellow"}
_MOST_ROWS = 20


def render(comparison: Comparison, *, everything: bool = False) -> RenderableType:
    """The modules that are wrong or could not be compared, and the summary; names are drawn as they are.

    Args:
        comparison: What to draw.
        everything: Draw every module.

    Example:
        >>> from rich.console import Console
        >>> act = ModuleResult("act", "torch.nn.ReLU", "fused", "fused", reason="with 'fc'")
        >>> Console(width=80).print(render(Comparison({"act": act}), everything=True))
        module   class   status   max abs   mean abs   max rel   cosine
        act      ReLU    fused                                            with 'fc'
        no module has a tensor that could be compared
        not compared: 1 fused
    """
    modules = list(comparison.modules.values())
    shown = modules if everything else [each for each in modules if each.status in (DIFFERS, INHERITS, NOT_COMPARED)]
    if not everything:
        shown.sort(key=lambda each: (each.path not in comparison.wrong, each.status == NOT_COMPARED))
        shown = shown[:_MOST_ROWS]
    summary = Text(comparison.summary, style="green" if comparison.ok else "bold red")
    lines = [Text(line) for line in comparison.notes()]
    return Group(*([_table(shown)] if shown else []), summary, *lines)


def _table(modules: list[ModuleResult]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("module", overflow="fold")
    table.add_column("class", overflow="fold", style="cyan")
    table.add_column("status", no_wrap=True)
    for name in ("max abs", "mean abs", "max rel", "cosine"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold", style="dim")
    for each in modules:
        numbers = ["" if n is None else short_number(n) for n in (each.max_abs, each.mean_abs, each.max_rel)]
        cosine = "" if each.cosine is None else f"{each.cosine:.6f}"
        status = Text(each.status, style=_STYLES.get(each.status, "dim"))
        simple = each.class_name.rpartition(".")[2]
        said = Text(each.reason or each.problem)
        table.add_row(Text(each.path or "(root)"), Text(simple), status, *numbers, cosine, said)
    return table
