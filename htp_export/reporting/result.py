"""Base of results: fields and a summary are declared; JSON, text and a short ``repr`` follow.

A notebook shows a result as its command draws it, or as a table or a tree that can be folded.
"""

from __future__ import annotations

import copy
import dataclasses
import html
import importlib
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike, fspath
from typing import Any, ClassVar, TypeVar

from htp_export.errors import InputError, UnknownModuleError
from htp_export.reporting.columns import (
    Column,
    cells_of,
    data_frame,
    names_of,
    record,
    text_table,
)
from htp_export.reporting.tag_facts import TagFacts, tag_lines

V = TypeVar("V")

_MOST_SHOWN = 400  # characters of a ``repr``, so that a prompt is not flooded

Table = tuple[Sequence[Column[Any]], Iterable[Any]]
"""The columns and rows of a table."""


class Modules(dict[str, V]):
    """Module path → value of a result.

    An unknown path raises an error that names the nearest one, and ``repr`` is short.

    Examples:
        >>> Modules({"layer.0": 1})["layer.9"]
        Traceback (most recent call last):
        ...
        htp_export.errors.UnknownModuleError: no module 'layer.9' in this result; nearest: 'layer.0'
        >>> Modules({"layer.0": "x" * 500, "layer.1": "y"})
        <2 modules: 'layer.0', 'layer.1'>
    """

    def __missing__(self, path: str) -> V:
        raise UnknownModuleError(path, self, "result")

    def __repr__(self) -> str:
        first_paths = [repr(path) for path, _ in zip(self, range(3), strict=False)]
        if len(self) == len(first_paths):
            text = super().__repr__()
            if len(text) <= _MOST_SHOWN:
                return text
        else:
            first_paths.append("…")
        return f"<{len(self)} modules: {', '.join(first_paths)}>"


def _deep_copy(value: Any, memo: dict[int, Any]) -> Any:
    """Copy a field of a result. `copy.deepcopy` would follow a graph node by node, with recursion."""
    import onnx_ir as ir

    if isinstance(value, ir.Model):
        return memo.setdefault(id(value), value.clone())
    return copy.deepcopy(value, memo)


class PlainData:
    """A dataclass as plain data: its fields, except with ``repr=False``.

    Attributes:
        derived: Properties that are included, besides the fields.
        optional: Names that are omitted if their value is None or empty.
    """

    derived: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()

    def data(self) -> dict[str, Any]:
        """Name → value of the entries of `to_dict`."""
        return {name: getattr(self, name) for name in (*_shown(self), *self.derived)}

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON, without models."""
        entries = {name: plain(value) for name, value in self.data().items()}
        return {
            name: value
            for name, value in entries.items()
            if name not in self.optional or value not in _NOTHING
        }


class Result(PlainData):
    """The base of the dataclasses that public functions return.

    Text consists of the `table`, the summary, and `lines`, in this order.

    Examples:
        >>> @dataclasses.dataclass(frozen=True)
        ... class Counted(Result):
        ...     nodes: int
        ...     worst: float
        ...     @property
        ...     def summary(self) -> str:
        ...         return f"{self.nodes} nodes"
        >>> result = Counted(3, math.nan)
        >>> print(result, result.to_dict(), repr(result))
        3 nodes {'nodes': 3, 'worst': 'nan'} Counted: 3 nodes
    """

    def __init_subclass__(cls, **settings: Any) -> None:
        """Keep the short ``repr``: ``dataclass`` generates one if the class itself has none."""
        super().__init_subclass__(**settings)
        cls.__repr__ = cls.__repr__  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        """Replace ``modules`` with a mapping whose errors name the nearest path."""
        modules = vars(self).get("modules")
        if isinstance(modules, Mapping):
            object.__setattr__(self, "modules", Modules(modules))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy with copies of all fields; a model is cloned, which shares its weights."""
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        for field in dataclasses.fields(self):  # type: ignore[arg-type] # subclasses are dataclasses
            value = getattr(self, field.name)
            object.__setattr__(copied, field.name, _deep_copy(value, memo))
        return copied

    @property
    def summary(self) -> str:
        """The result in one line."""
        raise NotImplementedError

    def table(self) -> Table | None:
        """The table above the summary, if there is one."""
        return None

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with the rows and columns of the table.

        Raises:
            InputError: If the result has no table, or if pandas is not installed.
        """
        table = self.table()
        if table is None:
            raise InputError(f"{type(self).__name__} has no table for to_pandas: see to_dict")
        columns, rows = table
        records = [record(columns, row) for row in rows]
        return data_frame(records, names_of(columns), range(len(records)), "row")

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines below the summary: notes, and the facts about tags."""
        return (*getattr(self, "notes", ()), *self.tag_lines())

    def tag_lines(self) -> tuple[str, ...]:
        """The facts about the model's tags, one line each."""
        facts: TagFacts | Sequence[TagFacts] | None = getattr(self, "tags", None)
        if facts is None or isinstance(facts, TagFacts):
            return tag_lines(facts)
        return tag_lines(*facts)

    def __str__(self) -> str:
        table = self.table()
        rows = text_table(*table) if table else []
        return "\n".join((*rows, self.summary, *self.lines))

    def __repr__(self) -> str:
        text = f"{type(self).__name__}: {self.summary}"
        if len(text) <= _MOST_SHOWN:
            return text
        return f"{text[:_MOST_SHOWN]} …"

    def _repr_html_(self) -> str:
        """The drawing of the command line, for notebooks; else the table; else the text."""
        drawn = drawn_html(self)
        if drawn is not None:
            return drawn
        table = self.table()
        if table is None:
            return html_text(str(self))
        columns, rows = table
        headings = [column.heading for column in columns]
        cells = (cells_of(columns, row) for row in rows)
        return html_table(headings, cells, (self.summary, *self.lines))


_NOTHING: tuple[Any, ...] = (None, [], {}, "")


def _shown(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value) if field.repr]


def plain(value: Any) -> Any:
    """A value as JSON data: dataclasses, paths and sets as plain data; NaN and infinity as words.

    Examples:
        >>> from pathlib import Path
        >>> plain({"file": Path("a"), "sizes": (1, math.inf), "names": frozenset({"b"})})
        {'file': 'a', 'sizes': [1, 'inf'], 'names': ['b']}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(value)
    if dataclasses.is_dataclass(value):
        return {name: plain(getattr(value, name)) for name in _shown(value)}
    return fspath(value) if isinstance(value, PathLike) else value


_MOST_IN_TREE = 4000  # modules of a tree in a notebook: more make scrolling slow
_OPEN_LEVELS = 2  # levels of a tree in a notebook: the model and its parts
_MOST_LINES = 400  # lines of a table in a notebook: more make scrolling slow
_NUMBER = re.compile(r"(?:[-+\d.,e]+|nan|-?inf)?")
_STYLE = "font-family:monospace;white-space:pre"
_SCROLLED = "max-height:480px;overflow:auto"
_TREE = f"font-family:monospace;line-height:1.6;text-align:left;{_SCROLLED}"
_WIDTH = 160  # characters: a notebook scrolls wide tables sideways
_PAGE = f'<pre style="{_SCROLLED};white-space:pre;line-height:1.35;font-family:Menlo,Consolas,monospace">{{code}}</pre>'


def drawn_html(result: object) -> str | None:
    """A result as HTML, drawn by ``drawn`` in ``drawing.py`` of its capability; None without it.

    Examples:
        >>> from htp_export.costs.result import ModuleRow, ModuleTree
        >>> drawn = drawn_html(ModuleTree((ModuleRow("", "net.<b>", 1, "computed", nodes=1200),)))
        >>> "1,200" in drawn, "<b>" in drawn
        (True, False)
    """
    parts = type(result).__module__.split(".")
    room = ".".join(parts[: 3 if "capabilities" in parts else 2])
    try:
        drawing = importlib.import_module(f"{room}.drawing")
    except ModuleNotFoundError:
        return None
    table = drawing.drawn(result) if hasattr(drawing, "drawn") else None
    if table is None:
        return None
    from rich.console import Console

    console = Console(
        width=_WIDTH, record=True, file=io.StringIO(), highlight=False, force_jupyter=False
    )
    console.print(table)
    text = console.export_html(code_format=_PAGE, inline_styles=True)
    return "\n".join(line.rstrip() for line in text.splitlines())


def html_text(text: str) -> str:
    """Text as HTML; after the first few hundred lines, the number of further ones.

    Examples:
        >>> "&lt;b&gt;" in html_text("<b>")
        True
    """
    lines = text.splitlines()
    drawn = html.escape("\n".join(lines[:_MOST_LINES]))
    return f'<div style="{_STYLE};{_SCROLLED}">{drawn}</div>{_below(len(lines) - _MOST_LINES, " lines", ())}'


def html_table(
    header: Sequence[str], lines: Iterable[Sequence[str]], notes: Iterable[str] = ()
) -> str:
    """A table as HTML, with notes below it; cells are text, never markup.

    After the first few hundred lines follows the number of further ones.

    Examples:
        >>> "&lt;b&gt;" in html_table(["module"], [["<b>"]])
        True
    """
    listed = list(lines)
    right = [False] * len(header)
    if listed:
        right = [_is_numeric(column) for column in zip(*listed, strict=True)]
    head = _html_row("th", header, right)
    body = "".join(_html_row("td", line, right) for line in listed[:_MOST_LINES])
    table = f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"
    return f'<div style="{_SCROLLED}">{table}</div>{_below(len(listed) - _MOST_LINES, " lines", notes)}'


def _is_numeric(cells: Iterable[str]) -> bool:
    """Whether all cells of a column are numbers, or empty."""
    return all(_NUMBER.fullmatch(cell) for cell in cells)


def _html_row(kind: str, texts: Sequence[str], right: Sequence[bool]) -> str:
    """A row of a table; ``kind`` is ``th`` or ``td``, ``right`` the alignment of each column."""
    cells = [_cell(kind, text, is_right) for text, is_right in zip(texts, right, strict=True)]
    return f"<tr>{''.join(cells)}</tr>"


def html_tree(lines: Iterable[tuple[int, str, str, str]], notes: Iterable[str] = ()) -> str:
    """A tree as HTML that folds without a script, with notes below it; names are never markup.

    A line is its level from 0, its name, its whole path, and a remark. A parent precedes its
    children.

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
            title = html.escape(path)
            summary = f'<summary title="{title}" style="cursor:pointer">{text}</summary>'
            parts.append(f'<details{opened} style="{style}">{summary}')
            open_levels.append(level)
        else:  # aligned with the names of lines that fold
            title = html.escape(path)
            parts.append(f'<div title="{title}" style="{style};padding-left:1em">{text}</div>')
    parts += ["</details>"] * len(open_levels)
    below = _below(len(listed) - _MOST_IN_TREE, "", notes)
    return f'<div style="{_TREE}">{"".join(parts)}</div>{below}'


def _below(more: int, what: str, notes: Iterable[str]) -> str:
    left_out = [f"and {more} more{what}"] if more > 0 else []
    return "".join(f"<p>{html.escape(note)}</p>" for note in (*left_out, *notes))


def _cell(kind: str, text: str, right: bool) -> str:
    side = "right" if right else "left"
    return f'<{kind} style="text-align:{side};{_STYLE}">{html.escape(text)}</{kind}>'
