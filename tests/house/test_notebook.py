"""The notebook in docs/ runs from the first cell to the last."""

import io
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import htp_export
from htp_export.costs.drawing import render, render_cost
from htp_export.costs.result import tree_rows
from tests import screens

NOTEBOOK = Path(__file__).parents[2] / "docs" / "view.ipynb"


@pytest.mark.long
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
            assert hasattr(value, "_repr_html_"), f"{last} prints {len(repr(value))} characters"
            shown.append(value._repr_html_())
    assert len(shown) >= 3
    assert shown[1].startswith("<pre")  # the table of `profile`
    assert sum(drawn.startswith("<iframe") for drawn in shown) == 2


def printed(drawn: object) -> list[str]:
    console = Console(width=160, file=io.StringIO(), record=True, highlight=False)
    console.print(drawn)
    return [line.rstrip() for line in console.export_text().splitlines()]


@pytest.mark.parametrize("name", ["cost", "tree"])
def test_a_result_in_a_notebook_is_the_table_of_its_command(name):
    tagged = htp_export.load(screens.encoder())
    if name == "cost":
        result: Any = htp_export.cost(tagged)
        expected = printed(render_cost(result, list(result.modules.values())))
    else:
        result = tree_rows(tagged)
        expected = printed(render(result))
    drawn = result._repr_html_()
    lines = unescape(re.sub(r"<[^>]*>", "", drawn)).splitlines()
    assert [line.rstrip() for line in lines if line] == [line for line in expected if line]
    assert "layers.0 … layers.5 × 6" in "\n".join(lines)  # noqa: RUF001 - "times"


def test_names_in_a_notebook_are_text():
    model = screens.encoder()
    model.metadata_props["htp.modules"] = model.metadata_props["htp.modules"].replace(
        "encoder.Head", "net.<script>"
    )
    drawn = htp_export.cost(htp_export.load(model))._repr_html_()
    assert "&lt;script&gt;" in drawn
    assert "<script>" not in drawn
