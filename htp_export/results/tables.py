"""Results by module as tables: as text, for notebooks, and for pandas where that is there."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from htp_export.errors import InputError
from htp_export.results.columns import MODULE, Column, names_of, record
from htp_export.results.result import Result, Table

__all__ = ["ModuleTable", "data_frame", "html_table", "html_tree"]

_MOST_IN_TREE = 4000  # modules of a tree in a notebook: more make it slow to scroll
_OPEN_LEVELS = 2
_MOST_LINES = 400  # of a table in a notebook, which shows each as a row
_NUMBER = re.compile(r"(?:[-+\d.,e]+|nan|-?inf)?")
_STYLE = "font-family:monospace;white-space:pre"
_SCROLLED = "max-height:480px;overflow:auto"
_TREE = f"font-family:monospace;line-height:1.6;text-align:left;{_SCROLLED}"


class ModuleTable(Result):
    """A result with numbers by module.

    Attributes:
        columns: All that is known of a module, in the order of JSON, CSV and data frames.
        details: Attributes of a row that JSON has beside its columns.
        in_notebook: Draws a result as HTML as its command draws it. What draws stands above what is drawn: the face of
            the package puts it here.
    """

    columns: ClassVar[Sequence[Column[Any]]] = ()
    details: ClassVar[tuple[str, ...]] = ()
    in_notebook: ClassVar[Callable[[Any], str | None] | None] = None

    @property
    def by_module(self) -> Mapping[str, Any]:
        """Module path → its row."""
        rows: Mapping[str, Any] = vars(self)["modules"]
        return rows

    @property
    def drawn(self) -> Sequence[Column[Any]]:
        """The columns of the table as text, after the module's path."""
        return self.columns

    @property
    def listed(self) -> Sequence[Any]:
        """The modules that have a line in the table as text."""
        return list(self.by_module.values())

    def module_data(self, row: Any) -> dict[str, Any]:
        """What JSON has of a module."""
        return {**record(self.columns, row), **{name: getattr(row, name) for name in self.details}}

    def data(self) -> dict[str, Any]:
        """What `to_dict` has: the modules by their columns."""
        return {**super().data(), "modules": {path: self.module_data(row) for path, row in self.by_module.items()}}

    def to_pandas(self) -> Any:
        """The modules as a ``pandas.DataFrame``: a row for each, and each of `columns` in which one has a value.

        Raises:
            InputError: If pandas is not installed.
        """
        records = {path: record(self.columns, row) for path, row in self.by_module.items()}
        known = {name for row in records.values() for name, value in row.items() if value is not None}
        names = [name for name in names_of(self.columns) if name in known]
        return data_frame(list(records.values()), names, list(records), "module")

    def table(self) -> Table:
        """The modules that are listed, in the columns that are drawn."""
        return [MODULE, *self.drawn], self.listed

    def _repr_html_(self) -> str:
        """The table of the command line, for notebooks; the table as text where there is none."""
        draw = type(self).in_notebook
        drawn = draw(self) if draw is not None else None
        return f'<div style="{_STYLE}">{html.escape(str(self))}</div>' if drawn is None else drawn


def data_frame(records: Sequence[Mapping[str, Any]], columns: Sequence[str], index: Sequence[Any], name: str) -> Any:
    """Rows as a ``pandas.DataFrame``; ``name`` says what the index is: ``"module"``.

    Raises:
        InputError: If pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise InputError("to_pandas needs pandas; install it with: pip install pandas") from error
    return pandas.DataFrame(records, index=pandas.Index(index, name=name), columns=list(columns))


def html_table(header: Sequence[str], lines: Iterable[Sequence[str]], notes: Iterable[str] = ()) -> str:
    """A table as HTML, of which the first few hundred lines are drawn, with notes below it; cells are text.

    Examples:
        >>> "&lt;b&gt;" in html_table(["module"], [["<b>"]])
        True
    """
    listed = list(lines)
    right = [all(_NUMBER.fullmatch(cell) for cell in column) for column in zip(*listed, strict=True)]
    right = right or [False] * len(header)

    def row(kind: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(_cell(kind, cell, at) for cell, at in zip(cells, right, strict=True))}</tr>"

    cells = "".join(row("td", line) for line in listed[:_MOST_LINES])
    table = f"<table><thead>{row('th', header)}</thead><tbody>{cells}</tbody></table>"
    return f'<div style="{_SCROLLED}">{table}</div>{_below(len(listed) - _MOST_LINES, " lines", notes)}'


def html_tree(lines: Iterable[tuple[int, str, str, str]], notes: Iterable[str] = ()) -> str:
    """A tree as HTML that folds without a script, with notes below it; whatever a name looks like, it is text.

    Lines are the level from 0, the name, its whole path, and what is said of it; each after the one that holds it.

    Examples:
        >>> drawn = html_tree([(0, "net", "net", ""), (1, "fc", "net.fc", "Linear")])
        >>> drawn.count("<details"), drawn.count("<div"), "Linear" in drawn
        (1, 2, True)
    """
    listed = list(lines)
    parts: list[str] = []
    open_levels: list[int] = []
    for k, (level, name, path, remark) in enumerate(listed[:_MOST_IN_TREE]):
        while open_levels and open_levels[-1] >= level:
            open_levels.pop()
            parts.append("</details>")
        text = f'{html.escape(name)} <span style="opacity:.6">{html.escape(remark)}</span>'
        style = f"margin-left:{1.2 if level else 0}em"
        if k + 1 < len(listed) and listed[k + 1][0] > level:
            opened = " open" if level < _OPEN_LEVELS else ""
            summary = f'<summary title="{html.escape(path)}" style="cursor:pointer">{text}</summary>'
            parts.append(f'<details{opened} style="{style}">{summary}')
            open_levels.append(level)
        else:  # as far in as the names of those that fold
            parts.append(f'<div title="{html.escape(path)}" style="{style};padding-left:1em">{text}</div>')
    parts += ["</details>"] * len(open_levels)
    return f'<div style="{_TREE}">{"".join(parts)}</div>{_below(len(listed) - _MOST_IN_TREE, "", notes)}'


def _below(more: int, what: str, notes: Iterable[str]) -> str:
    """Sentences below a drawing, the first of which says how many more lines there are."""
    left_out = [f"and {more} more{what}"] if more > 0 else []
    return "".join(f"<p>{html.escape(note)}</p>" for note in (*left_out, *notes))


def _cell(kind: str, text: str, right: bool) -> str:
    return f'<{kind} style="text-align:{"right" if right else "left"};{_STYLE}">{html.escape(text)}</{kind}>'
