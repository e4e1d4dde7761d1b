"""Several graphs in one page, of which one is shown; and screens of the page, compared with those in docs/images."""

import re
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from htp_export.capabilities.view.viewing import ShownGraph, page_of, shown_graph
from htp_export.format.hierarchy import ModuleInfo
from tests import handmade, screens
from tests.chromium import Page, needs_chromium
from tests.exporting import quick
from tests.view.test_view import page_data_of

HOSTILE = "</script><img src=x onerror=\"document.title='ran'\">"
SIZES = [(1400, 850), pytest.param((390, 844), marks=pytest.mark.slow)]


def net(*operators: str) -> ShownGraph:
    """Modules ``a`` with the first operator, and ``b`` with the others."""
    value = first = handmade.value("x")
    nodes = []
    for k, operator in enumerate(operators):
        nodes.append(handmade.tagged_node(operator, [value], "b" if k else "a", f"v{k}"))
        value = nodes[-1].outputs[0]
    modules = [
        ModuleInfo(path, f"net.{path.upper() or 'Net'}", 1, "computed") for path in ("", "a", "b")
    ]
    return shown_graph(handmade.model([first], nodes, [], modules))


def graphs() -> list[ShownGraph]:
    large, small = net("Neg", "Abs", "Exp"), net("Tanh", "Log")
    return [
        ShownGraph(
            large.inventory, large.measures, "graph 1 of 2", "Dynamo's graph up to a break in b."
        ),
        ShownGraph(small.inventory, small.measures, HOSTILE, HOSTILE),
    ]


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("several") / "several.html"
    file.write_text(page_of(graphs())[0], encoding="utf-8")
    return file


def opened(page: Page) -> None:
    page.wait("document.documentElement.dataset.ready")


def operators(page: Page) -> list[str]:
    return list(page.run("htp.nodes.map((node) => node.op)"))


def choose(page: Page, number: int) -> None:
    page.run(
        f"window.before = true, choice = document.querySelector('#choice select'), choice.value = {number}, "
        "choice.dispatchEvent(new Event('change')), 0"
    )
    page.wait("!window.before && document.documentElement?.dataset.ready")


def test_a_page_of_several_graphs_holds_each_with_its_title_and_note():
    page, missing = page_of(graphs(), explorer=False)
    assert missing
    assert [node["op"] for node in page_data_of(page)["nodes"]] == ["Neg", "Abs", "Exp"]
    assert [node["op"] for node in page_data_of(page, "data-1")["nodes"]] == ["Tanh", "Log"]
    first, second = page_data_of(page, "graphs")
    assert first == {"title": "graph 1 of 2", "note": "Dynamo's graph up to a break in b."}
    assert second == {"title": HOSTILE, "note": HOSTILE}


@pytest.mark.long
@needs_chromium
@pytest.mark.parametrize("size", SIZES)
def test_the_graph_that_is_chosen_is_shown_in_every_part_of_the_page(page, several, size):
    page.size(*size)
    page.open(several, "#module=b")
    opened(page)
    assert operators(page) == ["Neg", "Abs", "Exp"]
    assert (
        page.run("document.getElementById('note').innerText")
        == "Dynamo's graph up to a break in b."
    )
    labels = "[...document.querySelectorAll('#choice option')].map((option) => option.textContent)"
    assert page.run(labels) == ["graph 1 of 2", HOSTILE]
    choose(page, 1)
    assert operators(page) == ["Tanh", "Log"]
    assert page.run("[htp.selected.path, htp.selected.nodes]") == ["b", 1]
    assert page.run("document.querySelector('#choice select').value") == "1"
    assert page.run("document.getElementById('note').innerText") == HOSTILE
    assert page.run("location.hash") == "#module=b&part=1"
    page.run("document.getElementById('tab-explorer').click()")
    page.wait("document.getElementById('explorer').dataset.ready")
    text = "document.querySelector('#explorer iframe').contentDocument.body.innerText"
    page.wait(f"{text}.includes('GRAPH INFO') || innerWidth < 700")
    page.run("document.getElementById('tab-graph').click()")
    drawn = "htp.graph.state.order.map(({ item }) => item.op ?? item.path ?? item.word)"
    assert page.run(drawn) == ["", "in", "a", "Tanh", "b", "Log", "out"]
    page.run("document.getElementById('tab-explorer').click()")
    choose(page, 0)
    assert operators(page) == ["Neg", "Abs", "Exp"]
    assert page.run("htp.selected.path") == "b"
    assert (
        page.run("document.getElementById('tab-explorer').getAttribute('aria-selected')") == "true"
    )
    assert page.run("document.title") == "Net"
    assert page.run("document.querySelectorAll('img').length") == 0
    assert page.asked == []


@needs_chromium
def test_a_link_shows_a_graph_and_one_that_does_not_exist_is_the_first(page, several):
    for fragment, shown in {
        "#part=1": "Tanh",
        "#part=7": "Neg",
        "#part=constructor": "Neg",
        "#b": "Neg",
    }.items():
        page.open(several, fragment)
        opened(page)
        assert operators(page)[0] == shown
    page.run("window.before = true, location.hash = '#part=1&module=a', 0")
    page.wait("!window.before && document.documentElement?.dataset.ready")
    assert [operators(page)[0], page.run("htp.selected.path")] == ["Tanh", "a"]


# --- screens of the page, compared with those in docs/images ---


TOLERATED = 0.027  # of a screen; another font makes up to 0.025, a missing part at least 0.028


def stored(page: Page, pane: str, width: int, theme: str):
    return page.pixels((screens.STORED / screens.file_name(pane, width, theme)).read_bytes())


# The dark ones differ in their colours alone, and those of 1024 stand between the others.
QUICK = [case for case in screens.SCREENS if "light" in case and 1024 not in case]


@pytest.mark.long
@needs_chromium
@pytest.mark.parametrize(("pane", "width", "theme"), quick(screens.SCREENS, *QUICK))
def test_the_page_looks_as_it_did(page, encoder_page, tmp_path, pane, width, theme):
    screens.take(page, encoder_page, pane, width, theme, tmp_path / "taken.png")
    assert page.said == []
    taken = page.pixels((tmp_path / "taken.png").read_bytes())
    assert screens.unlike(taken, stored(page, pane, width, theme)) < TOLERATED


def test_the_model_on_the_screens_is_valid():
    onnx.checker.check_model(ir.to_proto(screens.encoder()), full_check=True)


def test_stored_screens_are_small_and_shown_in_the_docs():
    text = (screens.STORED.parent / "view.md").read_text(encoding="utf-8")
    stored = {screens.file_name(*each) for each in screens.SCREENS}
    assert all((screens.STORED / name).stat().st_size < 40_000 for name in stored)
    shown = re.findall(r"images/(page-[\w.-]+)", text)
    assert shown
    assert {*shown} <= stored
