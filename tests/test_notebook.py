"""The notebook in docs/ runs from the first cell to the last."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parents[1] / "docs" / "view.ipynb"


def test_every_cell_of_the_notebook_runs_and_what_it_shows_can_be_drawn(tmp_path, monkeypatch):
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    shown = []
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        *lines, last = "".join(cell["source"]).rstrip().split("\n")
        assert cell["outputs"] == []  # they are large, and old ones mislead
        exec(compile("\n".join(lines), "notebook", "exec"), names)
        try:
            value = eval(compile(last, "notebook", "eval"), names)
        except SyntaxError:
            exec(compile(last, "notebook", "exec"), names)
        else:
            if hasattr(value, "_repr_html_"):
                shown.append(value._repr_html_())
    assert len(shown) >= 3
    assert sum(drawn.startswith("<iframe") for drawn in shown) == 2
