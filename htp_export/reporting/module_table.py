"""Tables for terminals: a line for each module of a tree, alike siblings as one; or a line for each row."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from htp_export.reporting.columns import Column, sorted_by
from htp_export.reporting.command_words import in_commands
from htp_export.reporting.folding import folded
from htp_export.reporting.tables import Drawn, ModuleTable, drawn_parents

if TYPE_CHECKING:  # rich is imported to draw: the names of columns are needed to show help
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.table import Table
    from rich.text import Text

_GAP = 3  # characters between columns
_SHORTEST_NAME = 24  # characters below which columns are left out rather than names cut
_SHORTEST_WORDS = 20  # and words of a column cut no shorter
_MOST_GUIDES = 100  # what lies deeper has the number of levels in front of it


class ModuleOf(Drawn, Protocol):
    """What a module's line is drawn from."""

    @property
    def path(self) -> str: ...


M = TypeVar("M", bound=ModuleOf)
R = TypeVar("R")


@dataclass(frozen=True)
class TreeTable(Generic[M]):
    """A table that can be printed with ``rich``. Names are drawn as they are, whatever markup they look like.

    Siblings that are ``alike`` are drawn once, as the row that is ``merged`` of theirs; None draws
    every one. A table that is ``flat`` is a list in the order of its rows, with whole paths, in
    place of a tree.
    """

    rows: Sequence[M]
    columns: Sequence[Column[M]]
    alike: Callable[[M], Hashable] | None = None
    merged: Callable[[Sequence[M]], M] = lambda rows: rows[0]
    flat: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        lines = self._lines()
        cells = [[column.cell(row) for _, row in lines] for column in self.columns]
        widths = [
            max(map(len, (column.heading, *texts)))
            for column, texts in zip(self.columns, cells, strict=True)
        ]
        longest = max((name.cell_len for name, _ in lines), default=0)
        shown = list(range(len(self.columns)))
        room = min(longest, _SHORTEST_NAME)
        while shown and room + sum(widths[k] + _GAP for k in shown) > options.max_width:
            shown.remove(min(shown, key=lambda k: (self.columns[k].keep, -k)))
        left = options.max_width - _GAP - sum(widths[k] + _GAP for k in shown)
        for k in reversed(shown):  # numbers are never cut; words are, and then names
            if not self.columns[k].right and longest > left:
                cut = max(min(longest - left, widths[k] - _SHORTEST_WORDS), 0)
                widths[k], left = widths[k] - cut, left + cut
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        table.add_column("module", no_wrap=True, overflow="ellipsis", max_width=max(left, 1))
        for k in shown:
            side: Literal["right", "left"] = "right" if self.columns[k].right else "left"
            table.add_column(
                self.columns[k].heading, justify=side, no_wrap=True, max_width=widths[k]
            )
        for number, (name, _) in enumerate(lines):
            row = lines[number][1]
            table.add_row(
                name, *(Text(cells[k][number], style=self.columns[k].style_of(row)) for k in shown)
            )
        yield table
        left_out = [column.title for k, column in enumerate(self.columns) if k not in shown]
        if left_out:
            yield Text(f"too narrow for: {', '.join(left_out)}", style="dim")

    def _lines(self) -> list[tuple[Text, M]]:
        from rich.text import Text

        return (
            [(Text(row.path or "(root)"), row) for row in self.rows]
            if self.flat
            else list(self._tree_lines())
        )

    def _tree_lines(self) -> Iterator[tuple[Text, M]]:
        """Every line with the guide lines in front of it; those at the top have none.

        A line is drawn from alike runs: one, or that of each of the modules above that are drawn
        once. Lines wait in a list, because modules may be nested deeper than Python's limit of
        recursion.
        """
        from rich.text import Text

        rows, alike = {row.path: row for row in self.rows}, self.alike
        above = drawn_parents(rows)
        below = folded(
            above, (lambda path: path) if alike is None else lambda path: alike(rows[path])
        )

        def name(path: str) -> str:
            return path.removeprefix(f"{above[path] or ''}.") or "(root)"

        waiting = [
            ("", "", 0, ([path],)) for run in reversed(below[None]) for path in reversed(run)
        ]
        while waiting:
            guide, before, depth, line = waiting.pop()
            run, paths = line[0], [path for run in line for path in run]
            text = name(run[0])
            if len(run) > 1:
                text = f"{text} … {name(run[-1])} × {len(run)}"  # noqa: RUF001 - "times"
            yield Text.assemble((guide, "dim"), text), self.merged([rows[path] for path in paths])
            start = before if depth <= _MOST_GUIDES else f"… {depth} levels "
            for number, inside in enumerate(
                reversed(list(zip(*(below[path] for path in paths), strict=True)))
            ):
                corner, following = ("└── ", "    ") if not number else ("├── ", "│   ")
                waiting.append((start + corner, start + following, depth + 1, inside))


def render_modules(
    result: ModuleTable,
    rows: Sequence[Any] | None = None,
    *,
    fold: bool = True,
    sort: str | None = None,
) -> RenderableType:
    """A tree of modules, of all that are listed or of some, then what is known of the whole, in words.

    Siblings with the same cells are one line, unless ``fold`` is False. With ``sort``, a column, it
    is a list, the largest first; an InputError if there is no such column.
    """
    listed = sorted_by(result.listed if rows is None else rows, result.columns, sort)
    table = TreeTable(
        listed, result.drawn, equal_cells(result.drawn) if fold else None, flat=sort is not None
    )
    return with_lines(table, (result.summary, *result.lines))


def flat_table(columns: Sequence[Column[R]], rows: Iterable[R], gap: int = _GAP) -> Table:
    """A table with a line for each row, in which words are folded and numbers are not."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for column in columns:
        side: Literal["right", "left"] = "right" if column.right else "left"
        table.add_column(Text(column.heading), justify=side, no_wrap=column.right, overflow="fold")
    for row in rows:
        table.add_row(*(Text(column.cell(row), style=column.style_of(row)) for column in columns))
    return table


def equal_cells(columns: Sequence[Column[M]]) -> Callable[[M], Hashable]:
    """What rows have in common that show the same in some columns."""
    return lambda row: tuple(column.cell(row) for column in columns)


def merged_row(rows: Sequence[R], means: Iterable[str] = (), most: Iterable[str] = ()) -> R:
    """One row for alike ones, in which some numbers are the mean and some the largest of those that are known."""

    def known(name: str) -> list[float]:
        return [value for row in rows if (value := getattr(row, name)) is not None]

    def largest(values: list[float]) -> float | None:
        return next((value for value in values if math.isnan(value)), max(values, default=None))

    numbers = {
        name: math.fsum(values) / len(values) if (values := known(name)) else None for name in means
    }
    first: Any = rows[0]
    row: R = replace(first, **numbers, **{name: largest(known(name)) for name in most})
    return row


def with_lines(
    table: RenderableType, lines: Iterable[str], *more: RenderableType
) -> RenderableType:
    """A table, an empty line, and what is known of the whole, with commands in place of Python."""
    from rich.console import Group
    from rich.text import Text

    return Group(table, Text(), *(Text(in_commands(line)) for line in lines), *more)
