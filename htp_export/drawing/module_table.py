"""Tables for terminals: a line for each module of a tree, alike siblings as one; or a line for each row."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal, Protocol, TypeVar

from htp_export.drawing.folding import runs
from htp_export.results.columns import Column
from htp_export.results.drawn_levels import Drawn, drawn_parents

if TYPE_CHECKING:  # rich is imported to draw: the names of columns are needed to show help
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table
    from rich.text import Text

__all__ = ["ModuleOf", "TreeTable", "flat_table"]

_GAP = 3
_SHORTEST_NAME = 24
_SHORTEST_WORDS = 20
_MOST_GUIDES = 100  # what lies deeper has the number of levels in front of it


class ModuleOf(Drawn, Protocol):
    """What a module's line is drawn from."""

    @property
    def path(self) -> str: ...


M = TypeVar("M", bound=ModuleOf)
R = TypeVar("R")


@dataclass(frozen=True)
class _Branch(Generic[M]):
    """A module with what lies below it, siblings that are drawn once together.

    Attributes:
        row: The module.
        name: What it is called below the module above it.
        shape: The same number for modules that are alike, down to the last one below them.
        below: The modules right below it, in runs of alike ones.
    """

    row: M
    name: str
    shape: int
    below: Sequence[Sequence[_Branch[M]]]


@dataclass(frozen=True)
class TreeTable(Generic[M]):
    """A table that can be printed with ``rich``. Names are drawn as they are, whatever markup they look like.

    Attributes:
        rows: The modules, in the order of ``named_modules()``.
        columns: The columns.
        alike: Equal for siblings that are drawn once; None to draw every one.
        merged: Returns one row for alike siblings.
        flat: Whether to draw a list in place of a tree, in the order of ``rows``, with whole paths.
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
        widths = [max(map(len, (column.heading, *texts))) for column, texts in zip(self.columns, cells, strict=True)]
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
            table.add_column(self.columns[k].heading, justify=side, no_wrap=True, max_width=widths[k])
        for number, (name, _) in enumerate(lines):
            row = lines[number][1]
            table.add_row(name, *(Text(cells[k][number], style=self.columns[k].style_of(row)) for k in shown))
        yield table
        left_out = [column.title for k, column in enumerate(self.columns) if k not in shown]
        if left_out:
            yield Text(f"too narrow for: {', '.join(left_out)}", style="dim")

    def _lines(self) -> list[tuple[Text, M]]:
        from rich.text import Text

        if self.flat:
            return [(Text(row.path or "(root)"), row) for row in self.rows]
        return list(self._drawn([[[branch]] for branch in self._branches()]))

    def _branches(self) -> list[_Branch[M]]:
        """The rows as trees; there is one, unless the rows have no root."""
        rows = {row.path: row for row in self.rows}
        above = drawn_parents(rows)
        below: dict[str | None, list[str]] = {None: [], **{path: [] for path in above}}
        for path, parent in above.items():
            below[parent].append(path)
        grown: dict[str, _Branch[M]] = {}
        shapes: dict[Hashable, int] = {}
        for path in sorted(above, key=len, reverse=True):  # what lies below has a longer path
            parent, folded = above[path], self._folded([grown[child] for child in below[path]])
            alike = None if self.alike is None else self.alike(rows[path])
            shape = (alike, tuple((run[0].name, len(run), run[0].shape) for run in folded))
            name = path[len(parent) + 1 :] if parent else path
            grown[path] = _Branch(rows[path], name or "(root)", shapes.setdefault(shape, len(shapes)), folded)
        return [grown[path] for path in below[None]]

    def _folded(self, branches: Sequence[_Branch[M]]) -> Sequence[Sequence[_Branch[M]]]:
        """Siblings in runs of those that are alike and have consecutive numbers."""
        if self.alike is None:
            return [[branch] for branch in branches]
        return runs(branches, lambda branch: branch.name, lambda branch: branch.shape)

    def _drawn(self, top: Sequence[Sequence[Sequence[_Branch[M]]]]) -> Iterator[tuple[Text, M]]:
        """Every line with the guide lines in front of it; those at the top have none.

        A line is drawn from alike runs: one, or that of each of the modules above that are drawn once. Lines wait in a
        list, because modules may be nested deeper than Python's limit of recursion.
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


def _run_name(run: Sequence[_Branch[M]]) -> str:
    if len(run) == 1:
        return run[0].name
    return f"{run[0].name} … {run[-1].name} × {len(run)}"  # noqa: RUF001 - "times"


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
