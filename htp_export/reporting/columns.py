"""Columns of tables: one list for each result, for text, terminal, CSV, JSON and pandas."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Generic, TypeVar

from htp_export.errors import InputError
from htp_export.extras import required

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
"""SI prefixes of powers of 1000."""

R = TypeVar("R")


@dataclass(frozen=True)
class Column(Generic[R]):
    """A column of a table.

    Attributes:
        name: The key in JSON, the header in CSV and in data frames, and the name in options.
        title: The heading in drawn tables. Options accept it, too, with underscores for spaces.
        value: Returns the value for a row, as data; None for an empty cell. The default is the
            attribute ``name``.
        unit: ``B`` for bytes, ``ms``, ``FLOP``, ``%`` for a share of 1; empty for other numbers and
            for words.
        text: Formats a value, if its unit does not determine the format.
        style: The style of its cells, or a function that returns the style for a row.
        right: Whether it is right-aligned.
        keep: Priority in a narrow terminal: columns with smaller numbers are dropped first.

    Examples:
        >>> from types import SimpleNamespace
        >>> Column("peak_bytes", "peak", unit="B").cell(SimpleNamespace(peak_bytes=443_392))
        '443.4 kB'
    """

    name: str
    title: str
    value: Callable[[R], Any] | None = None
    unit: str = ""
    text: Callable[[Any], str] | None = None
    style: str | Callable[[R], str] = ""
    right: bool = True
    keep: int = 0

    @property
    def heading(self) -> str:
        """The title, with the unit if the cells do not show it."""
        return f"{self.title} ms" if self.unit == "ms" else self.title

    def data(self, row: R) -> Any:
        """The value for a row, as data."""
        if self.value is None:
            return attrgetter(self.name)(row)
        return self.value(row)

    def cell(self, row: R) -> str:
        """The value for a row, as text."""
        value = self.data(row)
        if value is None:
            return ""
        if self.text is None:
            return _drawn(value, self.unit)
        return self.text(value)

    def style_of(self, row: R) -> str:
        """The style of the cell of a row."""
        if isinstance(self.style, str):
            return self.style
        return self.style(row)


def _drawn(value: Any, unit: str) -> str:
    if unit in ("B", "FLOP"):
        return si(value, "B" if unit == "B" else "")
    if unit == "%":
        return percent(value)
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


MODULE: Column[Any] = Column(
    "module", "module", attrgetter("path"), text=lambda path: path or "(root)", right=False
)
"""The module of a row: the first column."""


CLASS_NAME: Column[Any] = Column(
    "class_name",
    "class",
    text=lambda name: name.rpartition(".")[2],
    style="cyan",
    right=False,
    keep=1,
)
"""The class of the row's module: with its Python module as data, without it in drawn tables."""


def names_of(columns: Iterable[Column[R]]) -> list[str]:
    """The names of columns."""
    return [column.name for column in columns]


def chosen(columns: Sequence[Column[R]], names: Iterable[str]) -> list[Column[R]]:
    """The columns with these names or titles, in this order (``own_time`` for "own time").

    Raises:
        InputError: There is no such column.

    Examples:
        >>> columns = [Column("class_name", "class"), Column("nodes", "nodes")]
        >>> names_of(chosen(columns, ["nodes", "class"]))
        ['nodes', 'class_name']
    """
    known = {column.title.replace(" ", "_"): column for column in columns}
    known.update({column.name: column for column in columns})
    for name in names:
        if name not in known:
            raise InputError(
                f"there is no column {name!r}; there are {', '.join(names_of(columns))}"
            )
    return [known[name] for name in names]


def sorted_by(rows: Iterable[R], columns: Sequence[Column[R]], name: str | None) -> list[R]:
    """Sort rows: numbers descending, NaN first; words alphabetically; empty cells last."""
    if name is None:
        return list(rows)
    [column] = chosen(columns, [name])

    def order(row: R) -> tuple[bool, float, str]:
        value = column.data(row)
        if isinstance(value, int | float):
            return (False, -math.inf if math.isnan(value) else -value, "")
        if value is None:
            return (True, 0.0, "")
        return (False, 0.0, str(value))

    return sorted(rows, key=order)


def record(columns: Iterable[Column[R]], row: R) -> dict[str, Any]:
    """A row as data: column name → value."""
    return {column.name: column.data(row) for column in columns}


def data_frame(
    records: Sequence[Mapping[str, Any]], columns: Sequence[str], index: Sequence[Any], name: str
) -> Any:
    """Rows as a ``pandas.DataFrame``; ``name`` is that of the index, such as ``"module"``.

    Raises:
        InputError: If pandas is not installed.
    """
    pandas = required("pandas", "to_pandas")
    return pandas.DataFrame(records, index=pandas.Index(index, name=name), columns=list(columns))


def text_table(columns: Sequence[Column[R]], rows: Iterable[R]) -> list[str]:
    """A table as lines of text, beginning with the headings.

    Examples:
        >>> from types import SimpleNamespace
        >>> rows = [SimpleNamespace(path="", nodes=1200), SimpleNamespace(path="fc", nodes=3)]
        >>> print(*text_table([MODULE, Column("nodes", "nodes")], rows), sep=chr(10))
        module  nodes
        (root)  1,200
        fc          3
    """
    cells = [[column.heading for column in columns]]
    cells.extend(cells_of(columns, row) for row in rows)
    widths = [max(map(len, texts)) for texts in zip(*cells, strict=True)]
    lines = []
    for texts in cells:
        aligned: list[str] = []
        for column, text, width in zip(columns, texts, widths, strict=True):
            pad = text.rjust if column.right else text.ljust
            aligned.append(pad(width))
        lines.append("  ".join(aligned).rstrip())
    return lines


def cells_of(columns: Iterable[Column[R]], row: R) -> list[str]:
    """The texts of a row's cells, one for each column."""
    return [column.cell(row) for column in columns]


def csv_text(columns: Sequence[Column[R]], rows: Iterable[R]) -> str:
    """A table as CSV: all rows, with whole paths and plain numbers."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(names_of(columns))
    for row in rows:
        values = (column.data(row) for column in columns)
        writer.writerow(["" if value is None else value for value in values])
    return stream.getvalue()


def si(number: float, unit: str = "") -> str:
    """A number with four digits and a prefix.

    Examples:
        >>> si(2_728_525_824), si(512), si(443_392, "B"), si(0)
        ('2.729 G', '512', '443.4 kB', '0')
    """
    size = float(number)
    power = 0
    # From here on, rounding would print 1000 of the smaller unit.
    while abs(size) >= 999.95 and power < len(_PREFIXES) - 1:
        size = size / 1000
        power = power + 1
    if not power:
        digits = f"{number:,.0f}"
    elif size < 9.9995:
        digits = f"{size:.3f}"
    elif size < 99.995:
        digits = f"{size:.2f}"
    else:
        digits = f"{size:.1f}"
    return f"{digits} {_PREFIXES[power]}{unit}".rstrip()


def many(count: int, what: str) -> str:
    """A count with a noun, in the plural if needed.

    Examples:
        >>> many(1, "node"), many(1200, "node")
        ('1 node', '1,200 nodes')
    """
    return f"{count:,} {what}{'s' * (count != 1)}"


def percent(share: float) -> str:
    """A share of 1 in percent: ``12.3%``."""
    return f"{share:.1%}"


def number_text(value: float, unit: str = "") -> str:
    """A number with its unit.

    Examples:
        >>> number_text(109482240), number_text(0.01234567, "ms"), number_text(3e-7), number_text(437598208, "B")
        ('109,482,240', '0.01235 ms', '3e-07', '437.6 MB')
    """
    if unit == "B":
        return si(value, "B")
    is_whole = math.isfinite(value) and float(value).is_integer()
    text = f"{int(value):,}" if is_whole else f"{value:.4g}"
    return f"{text} {unit}".rstrip()
