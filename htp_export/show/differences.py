"""Differences between two files, drawn for a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from htp_export.differences.differing import ModelDifference, ModuleDifference
from htp_export.show.folding import gathered
from htp_export.show.tag_note import tag_note

__all__ = ["render"]

_STYLES = {"same": "dim", "changed": "yellow", "moved": "cyan", "added": "green", "removed": "red"}
_MOST_OPERATORS = 5
_SHARED = "shared: bytes of weights that other modules read too; in the modules above them they count once"


def render(found: ModelDifference, *, depth: int | None = None, only_changed: bool = False) -> RenderableType:
    """A table with a line for each module, alike ones once: what became of it, what it has; then a sum.

    Modules that were moved, added or removed together with one above them are no lines. Names are drawn as they are,
    whatever markup they look like.

    Args:
        found: What to draw.
        depth: Leave out modules more than so many names below the root; all where it is None.
        only_changed: Leave out modules that are the same.
    """
    parts: list[RenderableType] = []
    shown = found.topmost() if only_changed else _without_implied(found)
    shown = [module for module in shown if depth is None or _level(module.path) <= depth]
    if shown and not (only_changed and found.same):
        parts += [_modules(shown), Text()]
    counts = ", ".join(f"{count} {status}" for status, count in found.counts.items())
    parts.append(Text("no difference" if found.same else f"modules: {counts}"))
    if any("shared" in line for module in shown for line in _bytes(module)):
        parts.append(Text(_SHARED, style="dim"))
    if not found.by_module:
        parts.append(Text("one of the files has no module tags: only the whole is compared", style="yellow"))
    return Group(*parts, *tag_note(*found.tags))


def _without_implied(found: ModelDifference) -> list[ModuleDifference]:
    differing = {module.path for module in found.topmost()}
    return [module for module in found.modules.values() if module.status == "same" or module.path in differing]


def _modules(shown: list[ModuleDifference]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("module", overflow="fold")
    table.add_column("class", overflow="fold", style="cyan")
    table.add_column("status", overflow="fold")
    for title in ("nodes", "parameters", "bytes"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("operators", overflow="fold", style="dim")
    for name, alike in gathered(shown, lambda module: module.path, _alike):
        module = alike[0]
        status = module.status if module.moved_from is None else f"{module.status}, was {module.moved_from or '(root)'}"
        table.add_row(
            Text(name or "(root)"),
            Text(module.simple_class),
            Text(status, style=_STYLES[module.status]),
            _pair(*module.nodes),
            _pair(*module.parameters),
            Text("\n".join(_bytes(module))),
            Text(_operators(module)),
        )
    return table


def _alike(module: ModuleDifference) -> object:
    """What makes the lines of two modules the same; one that was moved stands alone."""
    sizes = (*module.nodes, *module.parameters, *_bytes(module))
    return (module.simple_class, module.status, sizes, _operators(module), module.moved_from and module.path)


def _bytes(module: ModuleDifference) -> Iterator[str]:
    """A line for each element type that changed, and for the one that most is of."""
    sizes, shared = module.weight_bytes, module.shared_bytes
    most = max(sizes, key=lambda dtype: max(sizes[dtype]), default="")
    for dtype, (before, after) in sizes.items():
        if before != after:
            first, second = (_with_shared(*side) for side in zip(sizes[dtype], shared[dtype], strict=True))
            yield f"{dtype} {first} → {second}"
        elif dtype == most:
            yield f"{dtype} {before:,}"


def _with_shared(total: int, shared: int) -> str:
    """Bytes that are the module's alone, and those that it shares with other modules."""
    parts = [f"{total - shared:,}"] if total > shared or not shared else []
    return " + ".join([*parts, f"{shared:,} shared"] if shared else parts)


def _operators(module: ModuleDifference) -> str:
    listed = [f"{count:+d} {op}" for op, count in module.operators.items()]
    more = len(listed) - _MOST_OPERATORS
    return ", ".join(listed[:_MOST_OPERATORS]) + (f", {more} more" if more > 0 else "")


def _pair(before: int, after: int) -> str:
    return f"{before:,}" if before == after else f"{before:,} → {after:,}"


def _level(path: str) -> int:
    return path.count(".") + 1 if path else 0
