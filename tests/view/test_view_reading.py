"""What can be read off the page, at any size, with a mouse, a keyboard or a screen reader, and sent on as a link."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import htp_export
from htp_export.format.hierarchy import ModuleInfo
from tests import handmade
from tests.chromium import Page, needs_chromium
from tests.exporting import quick
from tests.view.test_view_page import search, shown, start

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def constants(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A node with an attribute and a small constant, and numbers that say what one of two nodes takes."""
    x = handmade.value("x")
    shape = ir.Value(name="shape", const_value=ir.tensor(np.array([1, -1], np.int64), name="shape"))
    reshape = handmade.tagged_node("Reshape", [x, shape], "fc", "flat")
    reshape.attributes["allowzero"] = ir.AttrInt64("allowzero", 1)
    last = handmade.tagged_node("Neg", [reshape.outputs[0]], "fc", "last")
    modules = [ModuleInfo("", "net.Net", 1, "computed"), ModuleInfo("fc", "net.Fc", 1, "computed")]
    measured = {
        "modules": {"": {"total_ms": 3.0}, "fc": {"total_ms": 3.0, "self_ms": 3.0}},
        "kernels": [{"name": "node_flat", "ms": 2.0}],
    }
    file = tmp_path_factory.mktemp("constants") / "constants.html"
    htp_export.view(handmade.model([x], [reshape, last], [shape], modules), file, results=[measured], explorer=False)
    return file


def detail(page: Page) -> str:
    return str(page.run("document.getElementById('detail').innerText"))


def at(page: Page) -> str:
    return str(page.run("decodeURIComponent(location.hash)"))


def go(page: Page, file: Path, fragment: str) -> None:
    page.open(file, fragment)
    page.wait("document.documentElement.dataset.ready")


def test_a_node_has_its_time_or_an_equal_part_its_attributes_and_the_values_of_small_constants(page, constants):
    start(page, constants)
    page.run("document.getElementById('unfold').click(), htp.select(htp.nodes[1]), htp.select(htp.nodes[0])")
    cells = "[...document.querySelectorAll('.row.node')].map((row) => row.querySelector('.number').innerText)"
    assert page.run(cells) == ["2.00 67 %", "≈ 1.00 33 %"]
    said = detail(page)
    assert "2.00 ms" in said
    assert "allowzero" in said
    assert "int64[2]\n[1, -1]" in said
    assert "% zeros" not in said


def test_nodes_have_flops_and_are_sorted_by_them(page, encoder_page):
    start(page, encoder_page)
    page.run("htp.select(htp.nodes.find((node) => node.name === 'node_layers.0.scores'))")
    cells = "[...document.querySelectorAll('.row.selected .number')].map((cell) => cell.innerText)"
    assert page.run(cells) == ["0.283 0.8 %", "16.4k", "", ""]
    page.run("document.querySelectorAll('#head > div')[3].click()")
    own = [name for name in shown(page) if name.startswith(("MatMul node_layers.0.", "Add node_layers.0.m"))]
    assert own == ["MatMul node_layers.0.context", "MatMul node_layers.0.scores", "Add node_layers.0.masked"]


def test_statistics_of_weights_are_shown_where_they_were_read(page, encoder_page):
    start(page, encoder_page)
    page.run("htp.select(htp.byPath.get('embeddings.words'))")
    assert "float32[400, 32]" in detail(page)
    assert "std 0.0199" in detail(page)
    assert "0 % zeros" in detail(page)


def test_a_tied_weight_is_marked_once_and_says_with_what(page, encoder_page):
    start(page, encoder_page)
    page.run("document.getElementById('repeats').click(), document.getElementById('unfold').click()")
    page.run("document.getElementById('flat').click()")
    search(page, "head.**")
    tied = "[...document.querySelectorAll('.row')].filter((row) => row.innerText.includes('tied'))"
    assert page.run(f"{tied}.map((row) => row.querySelector('.name').innerText.trim())") == ["head.decoder"]
    page.run("htp.select(htp.byPath.get('head.decoder'))")
    assert "head.decoder.weight is weight of embeddings.words, and counts once" in detail(page)
    page.run("htp.select(htp.byPath.get('embeddings.words'))")
    assert "also read by head.decoder" in detail(page).replace("\n", " ")


def test_the_address_says_what_is_shown(page, encoder_page):
    start(page, encoder_page)
    page.run("htp.select(htp.byPath.get('layers.3'))")
    assert at(page) == "#module=layers.3"
    page.run("htp.tab('map'), htp.select(htp.nodes[0])")
    assert at(page) == "#tab=map&node=node_found"
    page.run("htp.tab('modules'), htp.select(htp.byPath.get('layers.0').run.fold)")
    assert at(page) == "#modules=layers.0"
    search(page, "op:Gelu")
    assert at(page) == "#modules=layers.0&search=op:Gelu"


@pytest.mark.parametrize("fragment", ["#module=layers.3", "#layers.3", "#tab=map&module=layers.3"])
def test_a_link_shows_a_layer(page, encoder_page, fragment):
    go(page, encoder_page, fragment)
    assert page.run("htp.selected.path") == "layers.3"
    assert "layers.3" in detail(page)
    if "map" not in fragment:
        assert page.run("document.querySelector('.row.selected .label').innerText") == "layers.3"
    assert page.run("document.getElementById('pane-map').hidden") == ("map" not in fragment)
    page.run("location.hash = '#node=node_found&search=Gather'")
    page.wait("htp.selected.op === 'Gather'")
    assert shown(page) == ["(root)", "embeddings", "words", "Gather node_found"]


def test_a_link_to_what_is_not_there_shows_the_whole(page, encoder_page):
    for fragment in ("#module=nowhere", "#tab=%E0%A4%A", "#node=%23999&tab=<b>"):
        go(page, encoder_page, fragment)
        assert page.run("htp.selected === htp.root")
        assert page.said == []  # of this address


def test_the_map_is_walked_by_keyboard_and_says_where(page, encoder_page):
    go(page, encoder_page, "#tab=map")
    page.run("document.querySelector('#map canvas').focus()")
    page.press("ArrowDown")
    assert page.run("htp.selected.path") == "layers.2"  # the one that takes longest
    page.press("ArrowRight")
    assert page.run("htp.selected.path") == "layers.4"
    assert page.run("document.getElementById('map-said').textContent").startswith(
        "layers.4, Layer, 2 of 8; time 6.27 ms"
    )
    page.press("Enter", "ArrowDown")
    assert page.run("htp.map.boxes()[0].module.path") == "layers.4"
    assert page.run("htp.selected.path") == "layers.4.attention"
    page.press("ArrowUp", "Escape")
    assert page.run("htp.selected.path") == "layers.4"
    assert page.run("htp.map.boxes()[0].module.path") == ""


def test_rows_and_columns_are_counted_for_screen_readers(page, encoder_page):
    start(page, encoder_page)
    table = "document.getElementById('table')"
    rows = page.run("htp.table.state.rows.length")
    assert page.run(f"{table}.getAttribute('aria-rowcount')") == str(rows + 1)
    assert page.run(f"{table}.getAttribute('aria-colcount')") == "7"
    indices = "[...document.querySelectorAll('#table [role=row]')].map((row) => row.getAttribute('aria-rowindex'))"
    assert list(map(int, page.run(indices))) == list(range(1, rows + 2))
    cells = "[...document.querySelectorAll('.row')][1].querySelectorAll('[role=gridcell]')"
    assert page.run(f"[...{cells}].map((cell) => cell.getAttribute('aria-colindex'))") == [str(k) for k in range(1, 8)]
    page.run("document.getElementById('fold').click()")
    assert page.run(f"{table}.getAttribute('aria-rowcount')") == str(len(shown(page)) + 1)


@pytest.mark.parametrize("width", quick([1440, 1024, 390], 390))
def test_the_facts_are_readable_in_full(page, tmp_path, width):
    inputs = [handmade.value(f"past_key_values.{k}.key_with_a_long_name") for k in range(30)]
    node = handmade.tagged_node("Sum", inputs, "", "total")
    model = handmade.model(inputs, [node], [], [ModuleInfo("", "net.Net", 1, "computed")])
    model.graph.name = "a_name_" * 20
    htp_export.view(model, tmp_path / "many.html", explorer=False)
    page.size(width, 800)
    start(page, tmp_path / "many.html")
    assert page.run("document.getElementById('ends').checkVisibility()") is False
    page.run("document.getElementById('about').open = true")
    for each in ("name", "facts", "ends"):
        box = f"document.getElementById('{each}')"
        assert page.run(
            f"{box}.scrollWidth <= {box}.clientWidth && getComputedStyle({box}).textOverflow !== 'ellipsis'"
        )
    assert page.run("document.documentElement.scrollWidth") <= width
    assert "and 26 more inputs and outputs" in page.run("document.getElementById('ends').innerText")
    page.run("document.querySelector('#ends details').open = true")
    assert "past_key_values.29.key_with_a_long_name" in page.run("document.getElementById('ends').innerText")
