"""Results by module as tables: for notebooks, and for pandas where that is there."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from htp_export.errors import InputError

__all__ = ["ModuleTable", "html_table"]

_MOST = 400  # lines of a table in a notebook
_STYLE = "text-align:left;font-family:monospace;white-space:pre"


class ModuleTable:
    """A result with numbers by module; what it takes is ``to_dict()["modules"]``, module path → plain data."""

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data."""
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """The modules as a ``pandas.DataFrame``: a row for each, a column for each number or word.

        Raises:
            InputError: If pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise InputError("to_pandas needs pandas; install it with: pip install pandas") from error
        rows = self._rows()
        return pandas.DataFrame(list(rows.values()), index=pandas.Index(list(rows), name="module"))

    def _rows(self) -> dict[str, dict[str, Any]]:
        """The modules, with what has no parts."""
        modules = self.to_dict()["modules"]
        return {
            path: {
                name: value for name, value in module.items() if value is None or isinstance(value, str | int | float)
            }
            for path, module in modules.items()
        }

    def _repr_html_(self) -> str:
        """A table, for notebooks."""
        rows = self._rows()
        names = list(dict.fromkeys(name for row in rows.values() for name in row))
        lines = [[path or "(root)", *(_text(row.get(name)) for name in names)] for path, row in rows.items()]
        return html_table(["module", *names], lines)


def html_table(header: Sequence[str], lines: Iterable[Sequence[str]], notes: Iterable[str] = ()) -> str:
    """A table as HTML; whatever a cell looks like, it is text.

    Args:
        header: The heads of the columns.
        lines: The cells, line by line; the first few hundred lines are drawn.
        notes: Sentences that stand below.

    Example:
        >>> "&lt;b&gt;" in html_table(["module"], [["<b>"]])
        True
    """
    listed = list(lines)
    cells = "".join(f"<tr>{''.join(_cell('td', cell) for cell in line)}</tr>" for line in listed[:_MOST])
    more = [f"and {len(listed) - _MOST} more lines"] if len(listed) > _MOST else []
    below = "".join(f"<p>{html.escape(note)}</p>" for note in (*more, *notes))
    head = "".join(_cell("th", name) for name in header)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table>{below}"


def _cell(kind: str, text: str) -> str:
    return f'<{kind} style="{_STYLE}">{html.escape(text)}</{kind}>'


def _text(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
