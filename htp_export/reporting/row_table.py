"""Terminal tables with a row for each item, which fit the width of the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from htp_export.reporting.columns import Column
from htp_export.reporting.command_words import in_commands

if TYPE_CHECKING:  # rich is needed only to draw
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.text import Text

    from htp_export.reporting.result import Result

_GAP = 2  # characters between columns
_SHORTEST = 16  # characters of a word that is cut: its ends are still readable
_LONGEST_WORD = 24  # characters of a path or a name for which another column is left out
MOST_ROWS = 40  # rows in a terminal: more scroll away


@dataclass(frozen=True)
class RowTable:
    """A table with one line for each row, in the width of a terminal.

    In a terminal, columns with the smallest ``keep`` are left out, words are cut in their middle,
    and only the first rows are drawn; ``rest`` returns the line below them for the number of
    further rows. Files and pipes get every row and column as it is.
    """

    columns: Sequence[Column[Any]]
    rows: Sequence[Any]
    rest: Callable[[int], str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        rows = self.rows[:MOST_ROWS] if console.is_terminal else self.rows
        cells, widths = _cells(self.columns, rows)
        shown = list(range(len(self.columns)))
        if console.is_terminal:
            least = [
                width if column.right else min(width, _SHORTEST)
                for column, width in zip(self.columns, widths, strict=True)
            ]
            shown = _fitting(self.columns, least, options.max_width)
            widths = _shared(shown, widths, least, options.max_width)
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        for k in shown:
            column = self.columns[k]
            side: Literal["right", "left"] = "right" if column.right else "left"
            table.add_column(Text(column.heading), justify=side, no_wrap=True, min_width=widths[k])
        for number, row in enumerate(rows):
            drawn = []
            for k in shown:
                text = without_middle(cells[k][number], widths[k])
                drawn.append(Text(text, style=self.columns[k].style_of(row)))
            table.add_row(*drawn)
        yield table
        yield from _left_out(self.columns, shown)
        more = len(self.rows) - len(rows)
        if more:
            yield Text(self.rest(more), style="dim")


@dataclass(frozen=True)
class FlatTable:
    """A table with one line for each row, whose words are wrapped between spaces.

    In a terminal, columns with the smallest ``keep`` are left out until a path or a name fits into
    each, and longer ones are cut in their middle. ``gap``: characters between columns.
    """

    columns: Sequence[Column[Any]]
    rows: Sequence[Any]
    gap: int = _GAP

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table
        from rich.text import Text

        cells, widths = _cells(self.columns, self.rows)
        shown = list(range(len(self.columns)))
        if console.is_terminal:
            least = [self._least(k, cells[k], widths[k]) for k in shown]
            shown = _fitting(self.columns, least, options.max_width, self.gap)
            widths = _shared(shown, widths, least, options.max_width, self.gap)
        table = Table(box=None, pad_edge=False, padding=(0, self.gap, 0, 0), header_style="bold")
        for k in shown:
            column = self.columns[k]
            side: Literal["right", "left"] = "right" if column.right else "left"
            table.add_column(
                Text(column.heading), justify=side, no_wrap=column.right, width=widths[k]
            )
        for number, row in enumerate(self.rows):
            drawn = []
            for k in shown:
                text = _with_short_words(cells[k][number], widths[k])
                drawn.append(Text(text, style=self.columns[k].style_of(row)))
            table.add_row(*drawn)
        yield table
        yield from _left_out(self.columns, shown)

    def _least(self, place: int, texts: Sequence[str], width: int) -> int:
        """The smallest width of a column: numbers are neither wrapped nor cut, words of names are cut."""
        column = self.columns[place]
        if column.right:
            return width
        words = " ".join((column.heading, *texts)).split()
        longest = max(map(len, words), default=0)
        return min(width, max(len(column.heading), min(longest, _LONGEST_WORD)))


def _cells(
    columns: Sequence[Column[Any]], rows: Sequence[Any]
) -> tuple[list[list[str]], list[int]]:
    """The texts of each column, and its widths with its heading."""
    cells: list[list[str]] = []
    widths: list[int] = []
    for column in columns:
        texts = [column.cell(row) for row in rows]
        cells.append(texts)
        widths.append(max(map(len, (column.heading, *texts))))
    return cells, widths


def _left_out(columns: Sequence[Column[Any]], shown: Sequence[int]) -> Iterator[Text]:
    """A line that names the columns that are not shown, if there are some."""
    from rich.text import Text

    dropped = [column.title for k, column in enumerate(columns) if k not in shown]
    if dropped:
        yield Text(f"too narrow for: {', '.join(dropped)}", style="dim")


def _with_short_words(text: str, width: int) -> str:
    """A text whose words all fit into a width."""
    if all(len(word) <= width for word in text.split(" ")):
        return text
    return " ".join(without_middle(word, width) for word in text.split(" "))


def _fitting(
    columns: Sequence[Column[Any]], least: Sequence[int], total: int, gap: int = _GAP
) -> list[int]:
    """The columns that fit with their smallest widths; the first one always does."""
    shown = list(range(len(columns)))
    while len(shown) > 1 and sum(least[k] + gap for k in shown) > total:
        shown.remove(min(shown[1:], key=lambda k: (columns[k].keep, -k)))
    return shown


def _shared(
    shown: Sequence[int],
    widths: Sequence[int],
    least: Sequence[int],
    total: int,
    gap: int = _GAP,
) -> list[int]:
    """The widths of all columns: free space goes to the columns that need least of it first."""
    fitted = list(least)
    left = total - sum(least[k] + gap for k in shown)
    waiting = sorted(shown, key=lambda k: widths[k] - least[k])
    for number, k in enumerate(waiting):
        share = max(left, 0) // (len(waiting) - number)
        added = min(widths[k] - least[k], share)
        fitted[k] += added
        left -= added
    return fitted


@dataclass(frozen=True)
class DrawnResult:
    """A result as its command prints it: its text; in a terminal, a table in the width of it."""

    result: Result

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        table = self.result.table()
        if table is None or not console.is_terminal:
            yield Text(in_commands(str(self.result)))
            return
        columns, rows = table
        yield FlatTable(columns, list(rows))
        for line in (self.result.summary, *self.result.lines):
            yield Text(in_commands(line))


def without_middle(text: str, width: int) -> str:
    """A text cut to a width in its middle: both ends of a path and of a name tell what it is.

    Examples:
        >>> without_middle("encoder.layer.0.attention.self.query", 20)
        'encoder.l…self.query'
    """
    if len(text) <= width:
        return text
    begin = (width - 1) // 2
    end = width - 1 - begin
    return f"{text[:begin]}…{text[len(text) - end :]}"
