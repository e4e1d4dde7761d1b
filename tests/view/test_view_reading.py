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


def test_statistics_of_weights_are_shown_where_they_were_read(page, encoder_page):
    start(page, encoder_page)
    page.run("htp.select(htp.byPath.get('embeddings.words'))")
    assert "float32[400, 32]" in detail(page)
    assert "std 0.0199" in detail(page)
    assert "0 % zeros" in detail(page)


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
