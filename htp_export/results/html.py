"""Results in notebooks: as their command draws them, or as tables and trees of text, which fold."""

from __future__ import annotations

import html
import importlib
import io
import re
from collections.abc import Iterable, Sequence

_MOST_IN_TREE = 4000  # modules of a tree in a notebook: more make it slow to scroll
_OPEN_LEVELS = 2
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
        >>> from htp_export.capabilities.cost.result import ModuleRow, ModuleTree
        >>> drawn = drawn_html(ModuleTree((ModuleRow("", "net.<b>", 1, "computed", nodes=1200),)))
        >>> "1,200" in drawn, "<b>" in drawn
        (True, False)
    """
    capability = ".".join(type(result).__module__.split(".")[:3])
    try:
        drawing = importlib.import_module(f"{capability}.drawing")
    except ModuleNotFoundError:
        return None
    table = drawing.drawn(result) if hasattr(drawing, "drawn") else None
    if table is None:
        return None
    from rich.console import Console

    console = Console(width=_WIDTH, record=True, file=io.StringIO(), highlight=False, force_jupyter=False)
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
