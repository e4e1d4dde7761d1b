"""Tables with a line for each module: as a tree whose alike siblings are one line, or as a list.

What is drawn is told by columns; the modules come from any result that has rows for them.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from htp_export.format import tags
from htp_export.show.folding import runs

if TYPE_CHECKING:  # rich is imported to draw: the names of columns are needed to show help
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

__all__ = ["Column", "ModuleTable", "Row", "column_names", "csv_text", "pick", "si"]

_GAP = 3
_SHORTEST_NAME = 24
_MOST_GUIDES = 100  # what lies deeper has the number of levels in front of it


class Row(Protocol):
    """What a module's line is drawn from."""

    @property
    def path(self) -> str: ...
    @property
    def calls(self) -> int: ...
    @property
    def nodes(self) -> int: ...


R = TypeVar("R", bound=Row)


@dataclass(frozen=True)
class Column(Generic[R]):
    """A column of a table of modules.

    Attributes:
        name: What it is called on the command line and in CSV.
        title: What stands above it.
        value: What it holds for a module, as data; None for nothing.
        text: How that is drawn.
        style: The style of its cells.
        right: Whether it is justified to the right.
        keep: In a terminal that is too narrow, columns with smaller numbers go first.
    """

    name: str
    title: str
    value: Callable[[R], Any]
    text: Callable[[Any], str] = str
    style: str = ""
    right: bool = True
    keep: int = 0

    def cell(self, row: R) -> str:
        """What is drawn."""
        value = self.value(row)
        return "" if value is None else self.text(value)


@dataclass(frozen=True)
class _Branch(Generic[R]):
    """A module with what lies below it, siblings that are drawn once together.

    Attributes:
        row: The module.
        name: What it is called below the module above it.
        shape: The same number for modules that are alike, down to the last one below them.
        below: The modules right below it, in runs of alike ones.
    """

    row: R
    name: str
    shape: int
    below: Sequence[Sequence[_Branch[R]]]


@dataclass(frozen=True)
class ModuleTable(Generic[R]):
    """A table that can be printed with ``rich``. Names are drawn as they are, whatever markup they look like.

    Attributes:
        rows: The modules, in the order of ``named_modules()``.
        columns: What is said of each.
        alike: What makes siblings alike, so that they are drawn once; None to draw every one.
        merged: Makes one row of those of alike siblings.
        flat: Whether to draw a list in place of a tree, in the order of ``rows``, with whole paths.
    """

    rows: Sequence[R]
    columns: Sequence[Column[R]]
    alike: Callable[[R], Hashable] | None = None
    merged: Callable[[Sequence[R]], R] = lambda rows: rows[0]
    flat: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        lines = self._lines()
        cells = [[column.cell(row) for _, row in lines] for column in self.columns]
        widths = [max(map(len, (column.title, *texts))) for column, texts in zip(self.columns, cells, strict=True)]
        longest = max((name.cell_len for name, _ in lines), default=0)
        shown = list(range(len(self.columns)))
        room = min(longest, _SHORTEST_NAME)
        while shown and room + sum(widths[k] + _GAP for k in shown) > options.max_width:
            shown.remove(min(shown, key=lambda k: (self.columns[k].keep, -k)))
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        table.add_column("module", no_wrap=True, overflow="ellipsis")
        for k in shown:
            column = self.columns[k]
            table.add_column(
                column.title, justify="right" if column.right else "left", style=column.style, no_wrap=True
            )
        for number, (name, _) in enumerate(lines):
            table.add_row(name, *(Text(cells[k][number]) for k in shown))
        yield table
        left_out = [column.name for k, column in enumerate(self.columns) if k not in shown]
        if left_out:
            yield Text(f"too narrow for: {', '.join(left_out)}", style="dim")

    def _lines(self) -> list[tuple[Text, R]]:
        from rich.text import Text

        if self.flat:
            return [(Text(row.path or "(root)"), row) for row in self.rows]
        return list(self._drawn([[[branch]] for branch in self._branches()]))

    def _branches(self) -> list[_Branch[R]]:
        """The rows as trees; there is one, unless the rows have no root."""
        every = {row.path for row in self.rows}
        holding = tags.all_above(every)
        # A container, which holds what runs and never ran, is no line: its name stands before those of its children.
        rows = {row.path: row for row in self.rows if row.calls or not row.nodes or row.path not in holding}
        above = {path: next((up for up in tags.ancestors(path) if up != path and up in rows), None) for path in rows}
        below: dict[str | None, list[str]] = {None: [], **{path: [] for path in rows}}
        for path, parent in above.items():
            below[parent].append(path)
        grown: dict[str, _Branch[R]] = {}
        shapes: dict[Hashable, int] = {}
        for path in sorted(rows, key=len, reverse=True):  # what lies below has a longer path
            parent, folded = above[path], self._folded([grown[child] for child in below[path]])
            alike = None if self.alike is None else self.alike(rows[path])
            shape = (alike, tuple((run[0].name, len(run), run[0].shape) for run in folded))
            name = path[len(parent) + 1 :] if parent else path
            grown[path] = _Branch(rows[path], name or "(root)", shapes.setdefault(shape, len(shapes)), folded)
        return [grown[path] for path in below[None]]

    def _folded(self, branches: Sequence[_Branch[R]]) -> Sequence[Sequence[_Branch[R]]]:
        """Siblings in runs of those that are alike and have consecutive numbers."""
        if self.alike is None:
            return [[branch] for branch in branches]
        return runs(branches, lambda branch: branch.name, lambda branch: branch.shape)

    def _drawn(self, top: Sequence[Sequence[Sequence[_Branch[R]]]]) -> Iterator[tuple[Text, R]]:
        """Every line with the guide lines in front of it; those at the top have none.

        A line is drawn from alike runs: one, or that of each of the modules above that are drawn once. Lines wait in a
        list of our own, since modules may lie deeper than functions can call each other.
        """
        from rich.text import Text

        waiting = [("", "", 0, line) for line in reversed(top)]
        while waiting:
            guide, before, depth, line = waiting.pop()
            branches = [branch for run in line for branch in run]
            yield Text.assemble((guide, "dim"), _run_name(line[0])), self.merged([branch.row for branch in branches])
            below = list(zip(*(branch.below for branch in branches), strict=True))
            start = before if depth <= _MOST_GUIDES else f"… {depth} levels "
            for number, inside in enumerate(reversed(below)):
                corner, following = ("└── ", "    ") if not number else ("├── ", "│   ")
                waiting.append((start + corner, start + following, depth + 1, inside))


def _run_name(run: Sequence[_Branch[R]]) -> str:
    if len(run) == 1:
        return run[0].name
    return f"{run[0].name} … {run[-1].name} × {len(run)}"  # noqa: RUF001 - "times"


def pick(columns: Sequence[Column[R]], names: Sequence[str]) -> list[Column[R]]:
    """The columns of these names, in this order.

    Raises:
        KeyError: If there is no such column.
    """
    by_name = {column.name: column for column in columns}
    return [by_name[name] for name in names]


def column_names(columns: Sequence[Column[R]]) -> list[str]:
    """What the columns are called."""
    return [column.name for column in columns]


def csv_text(rows: Sequence[R], columns: Sequence[Column[R]]) -> str:
    """The table as CSV: whole paths, every module, plain numbers."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["module", *column_names(columns)])
    for row in rows:
        values = (column.value(row) for column in columns)
        writer.writerow([row.path, *("" if value is None else value for value in values)])
    return stream.getvalue()


def si(number: float, unit: str = "") -> str:
    """A number with four digits and a prefix.

    Examples:
        >>> si(2_728_525_824), si(512), si(443_392, "B"), si(0)
        ('2.729 G', '512', '443.4 kB', '0')
    """
    prefixes = ("", "k", "M", "G", "T", "P", "E")
    size, power = float(number), 0
    while abs(size) >= 999.95 and power < len(prefixes) - 1:  # what would be drawn as 1000
        size, power = size / 1000, power + 1
    digits = f"{number:,.0f}" if not power else f"{size:.{3 if size < 9.9995 else 2 if size < 99.995 else 1}f}"
    return f"{digits} {prefixes[power]}{unit}".rstrip()
