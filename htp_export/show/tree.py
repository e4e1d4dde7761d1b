"""The module tree, drawn for a terminal or a pipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from htp_export import tags
from htp_export.analyze.tree import ModuleRow, ModuleTree

__all__ = ["render"]


@dataclass(frozen=True)
class _Branch:
    """A module with what lies below it; after folding, several modules of the same shape.

    Attributes:
        row: The module, or the first of them.
        name: What stands at its line.
        below: The modules below.
    """

    row: ModuleRow
    name: str
    below: tuple[_Branch, ...]

    @property
    def shape(self) -> tuple[object, ...]:
        """What makes modules alike: everything that is drawn, but for the names."""
        row = self.row
        below = tuple((branch.name, branch.shape) for branch in self.below)
        return (row.class_name, row.calls, row.fate, row.nodes, row.parameters, below)


def render(tree: ModuleTree, *, fold: bool = True) -> RenderableType:
    """A table with a line for each module: class, nodes, parameters, and the fate of those that are not computed.

    Module names are drawn as they are, whatever markup they look like.

    Args:
        tree: What to draw.
        fold: Draw siblings that are alike and follow each other, ``layer.0`` to ``layer.11``, once.

    Example:
        >>> from rich.console import Console
        >>> net = ModuleRow("", "net.Net", 1, "computed", 2, 0, 8)
        >>> fc = ModuleRow("fc", "nn.Linear", 1, "computed", 2, 2, 8)
        >>> Console(width=60).print(render(ModuleTree((net, fc))))  # doctest: +NORMALIZE_WHITESPACE
        module   class    nodes   parameters   fate
        (root)   Net          2            8
        └── fc   Linear       2            8
    """
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    table.add_column("module", overflow="fold")
    table.add_column("class", overflow="fold", style="cyan")
    table.add_column("nodes", justify="right", no_wrap=True)
    table.add_column("parameters", justify="right", no_wrap=True)
    table.add_column("fate", style="yellow", no_wrap=True)
    for guide, branch in _lines(_branches(tree, fold)):
        row = branch.row
        name = Text.assemble((guide, "dim"), branch.name)
        fate = "" if row.fate == "computed" else row.fate
        table.add_row(name, Text(row.simple_class), str(row.nodes), f"{row.parameters:,}", Text(fate))
    if not tree.untagged:
        return table
    return Group(table, Text(f"{tree.untagged} nodes belong to no module", style="yellow"))


def _branches(tree: ModuleTree, fold: bool) -> tuple[_Branch, ...]:
    """The rows as trees; there is one, unless the rows have no root."""
    every = {row.path for row in tree.rows}
    holding = {up for path in every for up in tags.ancestors(path) if up != path}
    # A container, which holds what runs and never ran itself, is no line: its name stands before those of its children.
    rows = {row.path: row for row in tree.rows if row.calls or not row.nodes or row.path not in holding}
    below: dict[str | None, list[str]] = {None: [], **{path: [] for path in rows}}
    for path in rows:
        below[next((up for up in tags.ancestors(path) if up != path and up in rows), None)].append(path)

    def grow(path: str, parent: str) -> _Branch:
        name = path[len(parent) + 1 :] if parent else path
        grown = tuple(grow(child, path) for child in below[path])
        return _Branch(rows[path], name or "(root)", _folded(grown) if fold else grown)

    return tuple(grow(path, "") for path in below[None])


def _folded(branches: tuple[_Branch, ...]) -> tuple[_Branch, ...]:
    """Runs of siblings that are alike and have consecutive numbers, each as one branch."""
    runs: list[list[_Branch]] = []
    for branch in branches:
        last = runs[-1][-1] if runs else None
        if last is not None and _follows(last.name, branch.name) and last.shape == branch.shape:
            runs[-1].append(branch)
        else:
            runs.append([branch])
    return tuple(
        run[0] if len(run) == 1 else replace(run[0], name=f"{run[0].name} … {run[-1].name} × {len(run)}")  # noqa: RUF001 - "times"
        for run in runs
    )


def _follows(name: str, following: str) -> bool:
    """Whether two names are numbers, or end in parts that are, one after the other: ``layer.3`` and ``layer.4``."""
    stem, _, number = name.rpartition(".")
    other, _, successor = following.rpartition(".")
    return stem == other and number.isdecimal() and successor.isdecimal() and int(successor) == int(number) + 1


def _lines(branches: tuple[_Branch, ...], before: str | None = None) -> Iterator[tuple[str, _Branch]]:
    """Every branch with the guide lines in front of it; those at the top have none."""
    for position, branch in enumerate(branches):
        last = position == len(branches) - 1
        yield "" if before is None else before + ("└── " if last else "├── "), branch
        yield from _lines(branch.below, "" if before is None else before + ("    " if last else "│   "))
