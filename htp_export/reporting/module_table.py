"""Terminal tables: a line for each module of a tree, equal siblings as one; or for each row."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from htp_export.reporting.columns import Column, sorted_by
from htp_export.reporting.command_words import in_commands
from htp_export.reporting.folding import folded
from htp_export.reporting.row_table import FlatTable
from htp_export.reporting.tables import Drawn, ModuleTable, drawn_parents

if TYPE_CHECKING:  # rich is needed only to draw; the columns also to show help
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.text import Text

_GAP = 3  # characters between columns
_SHORTEST_NAME = 24  # characters of a readable module name: columns are dropped before it is cut
_SHORTEST_WORDS = 20  # characters below which a column of words is not cut
_MOST_GUIDES = 100  # levels with guide lines, which are wide; deeper ones show their number instead


class ModuleOf(Drawn, Protocol):
    """A module that has a line in a table."""

    @property
    def path(self) -> str: ...


M = TypeVar("M", bound=ModuleOf)
R = TypeVar("R")


@dataclass(frozen=True)
class TreeTable(Generic[M]):
    """A table that can be printed with ``rich``. Names are drawn literally, never as markup.

    Siblings with equal ``key`` are drawn once, as the row that ``merged`` returns for theirs; None
    draws every module. A ``flat`` table is a list in the order of its rows, with whole paths,
    instead of a tree.
    """

    rows: Sequence[M]
    columns: Sequence[Column[M]]
    key: Callable[[M], Hashable] | None = None
    merged: Callable[[Sequence[M]], M] = lambda rows: rows[0]
    flat: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        lines = self._lines()
        layout = self._layout([row for _, row in lines], [name.cell_len for name, _ in lines])
        fitted = layout.fit(options.max_width)
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        table.add_column("module", no_wrap=True, overflow="ellipsis", max_width=fitted.name_width)
        for k in fitted.shown:
            column = self.columns[k]
            side: Literal["right", "left"] = "right" if column.right else "left"
            table.add_column(column.heading, justify=side, no_wrap=True, max_width=fitted.widths[k])
        for number, (name, row) in enumerate(lines):
            texts = [
                Text(layout.cells[k][number], style=self.columns[k].style_of(row))
                for k in fitted.shown
            ]
            table.add_row(name, *texts)
        yield table
        dropped = [column.title for k, column in enumerate(self.columns) if k not in fitted.shown]
        if dropped:
            yield Text(f"too narrow for: {', '.join(dropped)}", style="dim")

    def _layout(self, rows: Sequence[M], name_widths: Sequence[int]) -> _Layout:
        """The cells of some rows, and the widths that they need."""
        cells = []
        widths = []
        for column in self.columns:
            texts = [column.cell(row) for row in rows]
            cells.append(texts)
            widths.append(max(map(len, (column.heading, *texts))))
        return _Layout(self.columns, cells, widths, max(name_widths, default=0))

    def _lines(self) -> list[tuple[Text, M]]:
        from rich.text import Text

        if self.flat:
            return [(Text(row.path or "(root)"), row) for row in self.rows]
        return list(self._tree_lines())

    def _tree_lines(self) -> Iterator[tuple[Text, M]]:
        """Every line, with guide lines before its name, except at the top.

        A line represents a run of equal siblings, or the runs at the same place in equal
        modules that are drawn once. Lines wait in a list, not in recursive calls: modules may be
        nested deeper than Python's recursion limit.
        """
        from rich.text import Text

        rows = {row.path: row for row in self.rows}
        key = self.key
        above = drawn_parents(rows)
        if key is None:
            below = folded(above, lambda path: path)
        else:
            below = folded(above, lambda path: key(rows[path]))

        def name(path: str) -> str:
            return path.removeprefix(f"{above[path] or ''}.") or "(root)"

        top = [path for run in below[None] for path in run]
        waiting = [_TreeLine("", "", 0, ([path],)) for path in reversed(top)]
        while waiting:
            line = waiting.pop()
            first = line.runs[0]
            paths = [path for run in line.runs for path in run]
            text = name(first[0])
            if len(first) > 1:
                text = f"{text} … {name(first[-1])} × {len(first)}"  # noqa: RUF001 - "times"
            merged = self.merged([rows[path] for path in paths])
            yield Text.assemble((line.guide, "dim"), text), merged
            # The n-th runs below equal modules are equal, too.
            children = zip(*(below[path] for path in paths), strict=True)
            waiting += line.children(list(children))


@dataclass(frozen=True)
class _TreeLine:
    """A line that waits to be drawn.

    ``guide`` precedes its name, and ``child_guide`` its children's names; ``runs`` are the runs of
    equal siblings in this line.
    """

    guide: str
    child_guide: str
    depth: int
    runs: Sequence[list[str]]

    def children(self, runs_below: Sequence[Sequence[list[str]]]) -> Iterator[_TreeLine]:
        """The lines of its children, the last child first."""
        start = self.child_guide
        if self.depth > _MOST_GUIDES:
            start = f"… {self.depth} levels "
        for number, runs in enumerate(reversed(runs_below)):
            corner, following = ("├── ", "│   ") if number else ("└── ", "    ")
            yield _TreeLine(start + corner, start + following, self.depth + 1, runs)


@dataclass(frozen=True)
class _Layout:
    """The cells of each column, their widths, and the width of the longest name."""

    columns: Sequence[Column[Any]]
    cells: Sequence[Sequence[str]]
    widths: Sequence[int]
    longest_name: int

    def fit(self, total: int) -> _Fitted:
        """Drop columns, then cut words and names, until the table fits. Numbers are never cut."""
        widths = list(self.widths)
        shown = list(range(len(self.columns)))
        name_width = min(self.longest_name, _SHORTEST_NAME)
        while shown and name_width + sum(widths[k] + _GAP for k in shown) > total:
            shown.remove(min(shown, key=lambda k: (self.columns[k].keep, -k)))
        left = total - _GAP - sum(widths[k] + _GAP for k in shown)
        for k in reversed(shown):
            if not self.columns[k].right and self.longest_name > left:
                cut = max(min(self.longest_name - left, widths[k] - _SHORTEST_WORDS), 0)
                widths[k] -= cut
                left += cut
        return _Fitted(shown, widths, max(left, 1))


@dataclass(frozen=True)
class _Fitted:
    """The columns that fit into a terminal, the widths of all columns, and the width of names."""

    shown: Sequence[int]
    widths: Sequence[int]
    name_width: int


def render_modules(
    result: ModuleTable,
    rows: Sequence[Any] | None = None,
    *,
    fold: bool = True,
    sort: str | None = None,
) -> RenderableType:
    """Draw a tree of modules, all listed ones or ``rows``, and the lines about the whole model.

    Siblings with the same cells share a line, unless ``fold`` is False. With ``sort``, a column, it
    is a list, the largest first.

    Raises:
        InputError: There is no such column.
    """
    listed = sorted_by(result.listed if rows is None else rows, result.columns, sort)
    key = equal_cells(result.drawn) if fold else None
    table = TreeTable(listed, result.drawn, key, flat=sort is not None)
    return with_lines(table, (result.summary, *result.lines))


def flat_table(columns: Sequence[Column[R]], rows: Iterable[R], gap: int = _GAP) -> FlatTable:
    """A table with one line for each row; words are wrapped, numbers are not."""
    return FlatTable(columns, list(rows), gap)


def equal_cells(columns: Sequence[Column[M]]) -> Callable[[M], Hashable]:
    """A key under which rows with the same cells in some columns are equal."""
    return lambda row: tuple(column.cell(row) for column in columns)


def merged_row(rows: Sequence[R], means: Iterable[str] = (), most: Iterable[str] = ()) -> R:
    """One row for equal ones: the mean of some numbers, and the largest of others, if known."""

    def known(name: str) -> list[float]:
        numbers = (getattr(row, name) for row in rows)
        return [number for number in numbers if number is not None]

    merged: dict[str, float | None] = {}
    for name in means:
        numbers = known(name)
        merged[name] = math.fsum(numbers) / len(numbers) if numbers else None
    for name in most:
        numbers = known(name)
        # NaN is an error of its own: it must not get lost in a maximum.
        has_nan = any(math.isnan(number) for number in numbers)
        merged[name] = math.nan if has_nan else max(numbers, default=None)
    first: Any = rows[0]
    row: R = replace(first, **merged)
    return row


def with_lines(
    table: RenderableType, lines: Iterable[str], *more: RenderableType
) -> RenderableType:
    """A table, an empty line, and lines about the whole, with commands in place of Python."""
    from rich.console import Group
    from rich.text import Text

    return Group(table, Text(), *(Text(in_commands(line)) for line in lines), *more)
