"""What public functions return: fields and a summary are declared; JSON, text and a short name follow from them.

In notebooks, results look as their command draws them, or are tables and trees of text, which fold.
"""

from __future__ import annotations

import dataclasses
import html
import importlib
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike, fspath
from typing import Any, ClassVar, TypeVar

from htp_export.errors import UnknownModuleError
from htp_export.reporting.columns import Column, text_table
from htp_export.reporting.tag_facts import TagFacts, tag_lines

V = TypeVar("V")

_MOST_SHOWN = 400  # characters of what a prompt shows

Table = tuple[Sequence[Column[Any]], Iterable[Any]]
"""The columns of a table, and its rows."""


class Modules(dict[str, V]):
    """Module path → what a result has of it: an unknown path is an error that names the nearest, and ``repr`` is short.

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
        listed = [repr(path) for path, _ in zip(self, range(3), strict=False)]
        if len(self) == len(listed) and len(text := super().__repr__()) <= _MOST_SHOWN:
            return text
        return f"<{len(self)} modules: {', '.join([*listed, *['…'] * (len(self) > len(listed))])}>"


class PlainData:
    """A dataclass as plain data: its fields, without those that are hidden with ``repr=False``.

    Attributes:
        derived: Properties that stand beside the fields.
        optional: Names that are left out where there is nothing to say: None, or empty.
    """

    derived: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()

    def data(self) -> dict[str, Any]:
        """What `to_dict` has: name → value."""
        return {name: getattr(self, name) for name in (*_shown(self), *self.derived)}

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data, for JSON; without models."""
        entries = {name: plain(value) for name, value in self.data().items()}
        return {
            name: value
            for name, value in entries.items()
            if name not in self.optional or value not in _NOTHING
        }


class Result(PlainData):
    """The base of the dataclasses that public functions return.

    Lines of text stand in this order: the `table`, the summary, and `lines`.

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
        """Keep the short ``repr``: ``dataclass`` writes one of its own where the class has none itself."""
        super().__init_subclass__(**settings)
        cls.__repr__ = cls.__repr__  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        """Let what is by module answer as a loaded model does."""
        modules = vars(self).get("modules")
        if isinstance(modules, Mapping):
            object.__setattr__(self, "modules", Modules(modules))

    @property
    def summary(self) -> str:
        """What a person needs, in one line."""
        raise NotImplementedError

    def table(self) -> Table | None:
        """The table above the summary, if there is one."""
        return None

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines below the summary: notes, and what is known about tags."""
        return (*getattr(self, "notes", ()), *self.tag_lines())

    def tag_lines(self) -> tuple[str, ...]:
        """What is known about tags, in words, a line each."""
        facts: TagFacts | Sequence[TagFacts] | None = getattr(self, "tags", None)
        return tag_lines(*([facts] if facts is None or isinstance(facts, TagFacts) else facts))

    def __str__(self) -> str:
        table = self.table()
        return "\n".join((*(text_table(*table) if table else ()), self.summary, *self.lines))

    def __repr__(self) -> str:
        text = f"{type(self).__name__}: {self.summary}"
        return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} …"

    def _repr_html_(self) -> str:
        """The table of the command line, for notebooks; text where there is none."""
        table = self.table()
        if (drawn := drawn_html(self)) is not None:
            return drawn
        if table is None:
            return html_text(str(self))
        columns, rows = table
        lines = ([column.cell(row) for column in columns] for row in rows)
        return html_table(
            [column.heading for column in columns], lines, (self.summary, *self.lines)
        )


_NOTHING: tuple[Any, ...] = (None, [], {}, "")


def _shown(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value) if field.repr]


def plain(value: Any) -> Any:
    """A value as JSON has it: dataclasses and paths as plain data, and words for NaN and infinity.

    Examples:
        >>> from pathlib import Path
        >>> plain({"file": Path("a"), "sizes": (1, math.inf), "names": frozenset({"b"})})
        {'file': 'a', 'sizes': [1, 'inf'], 'names': ['b']}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {key: plain(held) for key, held in value.items()}
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, list | tuple):
        return [plain(held) for held in value]
    if isinstance(value, set | frozenset):
        return sorted(value)
    if dataclasses.is_dataclass(value):
        return {name: plain(getattr(value, name)) for name in _shown(value)}
    return fspath(value) if isinstance(value, PathLike) else value


_MOST_IN_TREE = 4000  # modules of a tree in a notebook: more make it slow to scroll
_OPEN_LEVELS = 2  # of a tree in a notebook: the model and its parts
_MOST_LINES = 400  # of a table in a notebook, which shows each as a row
_NUMBER = re.compile(r"(?:[-+\d.,e]+|nan|-?inf)?")
_STYLE = "font-family:monospace;white-space:pre"
_SCROLLED = "max-height:480px;overflow:auto"
_TREE = f"font-family:monospace;line-height:1.6;text-align:left;{_SCROLLED}"
_WIDTH = 160  # characters
_PAGE = f'<pre style="{_SCROLLED};white-space:pre;line-height:1.35;font-family:Menlo,Consolas,monospace">{{code}}</pre>'


def drawn_html(result: object) -> str | None:
    """A result as HTML: what ``drawn`` in ``drawing.py`` of its capability makes of it, colours included, or None.

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
    """Text as HTML, of which the first few hundred lines are drawn.

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
    """A table as HTML, of which the first few hundred lines are drawn, with notes below it; cells are text.

    Examples:
        >>> "&lt;b&gt;" in html_table(["module"], [["<b>"]])
        True
    """
    listed = list(lines)
    right = [
        all(_NUMBER.fullmatch(cell) for cell in column) for column in zip(*listed, strict=True)
    ]
    right = right or [False] * len(header)

    def row(kind: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(_cell(kind, cell, at) for cell, at in zip(cells, right, strict=True))}</tr>"

    cells = "".join(row("td", line) for line in listed[:_MOST_LINES])
    table = f"<table><thead>{row('th', header)}</thead><tbody>{cells}</tbody></table>"
    return f'<div style="{_SCROLLED}">{table}</div>{_below(len(listed) - _MOST_LINES, " lines", notes)}'


def html_tree(lines: Iterable[tuple[int, str, str, str]], notes: Iterable[str] = ()) -> str:
    """A tree as HTML that folds without a script, with notes below it; whatever a name looks like, it is text.

    Lines are the level from 0, the name, its whole path, and what is said of it; each after the one
    that holds it.

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
            summary = (
                f'<summary title="{html.escape(path)}" style="cursor:pointer">{text}</summary>'
            )
            parts.append(f'<details{opened} style="{style}">{summary}')
            open_levels.append(level)
        else:  # as far in as the names of those that fold
            parts.append(
                f'<div title="{html.escape(path)}" style="{style};padding-left:1em">{text}</div>'
            )
    parts += ["</details>"] * len(open_levels)
    return f'<div style="{_TREE}">{"".join(parts)}</div>{_below(len(listed) - _MOST_IN_TREE, "", notes)}'


def _below(more: int, what: str, notes: Iterable[str]) -> str:
    left_out = [f"and {more} more{what}"] if more > 0 else []
    return "".join(f"<p>{html.escape(note)}</p>" for note in (*left_out, *notes))


def _cell(kind: str, text: str, right: bool) -> str:
    return f'<{kind} style="text-align:{"right" if right else "left"};{_STYLE}">{html.escape(text)}</{kind}>'
