"""The page, as a browser shows it."""

import io
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

import htp_export
from htp_export.capabilities.diff.drawing import comparison_page
from htp_export.format.hierarchy import ModuleInfo
from htp_export.reporting.columns import si
from tests import handmade
from tests.chromium import Page, needs_chromium
from tests.nets import Holding

pytestmark = needs_chromium

HOSTILE = "<img src=x onerror=\"document.title='ran'\">"
CLOSING = "</script><script>document.title='ran'</script>"


class Block(Holding, fc=torch.nn.Linear(8, 8), act=torch.nn.ReLU(), drop=torch.nn.Dropout()):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.act(self.fc(x)))


class Net(Holding, layer=torch.nn.ModuleList([Block(), Block()]), head=torch.nn.Linear(8, 3)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            x = layer(x)
        return self.head(x)


TIMES = {
    "": (10.0, 0.0),
    "layer.0": (4.0, 1.0),
    "layer.0.fc": (2.5, 2.5),
    "layer.0.act": (0.5, 0.5),
    "layer.1": (5.0, 1.0),
    "layer.1.fc": (3.0, 3.0),
    "layer.1.act": (1.0, 1.0),
    "head": (1.0, 1.0),
}
PROFILE = {
    "modules": {path: {"total_ms": total, "self_ms": own} for path, (total, own) in TIMES.items()}
}


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("net") / "net.html"
    torch.manual_seed(0)
    errors = {
        "modules": {
            "layer.1": {"max_abs": float("nan"), "status": "differs"},
            "": {"max_abs": 1e-7},
        }
    }
    htp_export.view(Net().eval(), torch.randn(2, 8), file, results=[PROFILE, errors])
    return file


def shown(page: Page) -> list[str]:
    """What stands at the lines of the table."""
    names = "[...document.querySelectorAll('#rows .row .name')]"
    names += ".map((name) => name.innerText.replace(/\\s+/g, ' ').trim())"
    return [name.removeprefix("▶").strip() for name in page.run(names)]


def cells(page: Page, path: str) -> list[str]:
    page.run(f"htp.select(htp.byPath.get({json.dumps(path)}))")
    return list(
        page.run(
            "[...document.querySelectorAll('.row.selected .number')].map((cell) => cell.innerText)"
        )
    )


def search(page: Page, text: str) -> None:
    page.run(
        f"search = document.getElementById('search'), search.value = {json.dumps(text)}, "
        "search.dispatchEvent(new Event('input'))"
    )


def start(page: Page, file: Path) -> None:
    page.open(file)
    page.wait("document.documentElement.dataset.ready")


@pytest.mark.long
def test_the_page_opens_without_an_error_or_a_request(page, net):
    start(page, net)
    assert shown(page)[:3] == ["(root)", "layer.1", "fc"]
    assert page.run(
        "['repeats', 'choice'].map((name) => document.getElementById(name).offsetParent)"
    ) == [None, None]
    for tab in ("map", "graph", "modules"):
        page.run(f"document.getElementById('tab-{tab}').click()")
    assert page.asked == []


def test_columns_hold_what_the_results_say(page, net):
    start(page, net)
    heads = page.run(
        "[...document.querySelectorAll('#head > div')].map((cell) => cell.textContent)"
    )
    assert heads == [
        "module",
        "class",
        "time ms, % ↓",
        "max abs error",
        "FLOPs",
        "nodes",
        "parameters",
        "fate",
    ]
    assert cells(page, "layer.1") == ["5.00 50 %", "NaN", "256", "3", "72"]
    assert cells(page, "layer.0.fc") == ["2.50 25 %", "", "256", "1", "72"]
    detail = page.run("document.getElementById('detail').innerText")
    assert "torch.nn.modules.linear.Linear" in detail
    assert "float32[2, 8]" in detail
    assert "Gemm" in detail
    sizes = [
        0,
        1,
        999,
        1000,
        1440,
        9_999,
        10_000,
        99_990,
        99_999,
        999_949,
        999_960,
        437_598_208,
        2.5e12,
        3e21,
    ]
    # as in the terminal
    assert page.run(f"{sizes}.map(bytesText)") == [si(size, "B") for size in sizes]


def test_search_finds_modules_and_nodes_with_what_is_above_them_or_says_that_there_is_nothing(
    page, net
):
    start(page, net)
    search(page, "LAYER.1.fc")
    assert shown(page) == ["(root)", "layer.1", "fc"]
    search(page, "op:relu")
    found = ["(root)", "layer.1", "act", "Relu", "layer.0", "act", "Relu"]
    assert [name.split(" ")[0] for name in shown(page)] == found
    search(page, "fate:identity")
    assert shown(page) == ["(root)", "layer.1", "drop", "layer.0", "drop"]
    search(page, "<b>nowhere")
    assert shown(page) == []
    assert "Nothing matches “<b>nowhere”" in page.run(
        "document.getElementById('nothing').innerText"
    )
    page.run("document.getElementById('clear').click()")
    assert shown(page)[0] == "(root)"
    assert page.run("document.getElementById('nothing').offsetParent") is None


def test_the_keyboard_walks_through_the_tree(page, net):
    start(page, net)
    page.run("document.getElementById('fold').click(), document.getElementById('table').focus()")
    assert shown(page) == ["(root)", "layer.1", "layer.0", "head"]
    page.press("ArrowDown", "ArrowRight", "ArrowRight", "ArrowRight")
    assert [name.split(" ")[0] for name in shown(page)][:4] == ["(root)", "layer.1", "fc", "Gemm"]
    page.press("ArrowLeft", "ArrowLeft", "ArrowLeft")
    assert page.run("htp.selected.path") == "layer.1"
    assert shown(page) == ["(root)", "layer.1", "layer.0", "head"]
    page.press("/")
    assert page.run("document.activeElement.id") == "search"


def test_areas_of_the_map_are_as_large_as_what_they_measure(page, net):
    start(page, net)
    page.run("htp.tab('map')")
    assert page.run("document.getElementById('map-size').value") == "total_ms"
    page.run("document.getElementById('map-shape').value = 'flame', htp.map.draw()")
    widths = page.run(
        "Object.fromEntries(htp.map.boxes().map((box) => [box.module.path, box.width]))"
    )
    assert widths["layer.1"] / widths[""] == pytest.approx(0.5)
    assert widths["layer.0.fc"] / widths["layer.0"] == pytest.approx(2.5 / 4)
    page.run("document.getElementById('map-shape').value = 'tree', htp.map.draw()")
    areas = page.run(
        "Object.fromEntries(htp.map.boxes().map((box) => [box.module.path, box.width * box.height]))"
    )
    assert areas["layer.1"] / areas["layer.0"] == pytest.approx(5 / 4, rel=0.01)


def test_the_map_is_saved_as_an_image(page, net):
    start(page, net)
    page.run("htp.tab('map')")
    saved = page.run(
        "new Promise((done) => { htp.picture.save = (image, name) => createImageBitmap(image)"
        ".then(({ width, height }) => done([name, width, height]));"
        " document.getElementById('map-png').click(); })"
    )
    canvas = "document.querySelector('#map canvas')"
    assert saved == page.run(f"[`${{htp.data.name}}.png`, {canvas}.width, {canvas}.height]")


@pytest.mark.parametrize("shape", ["tree", "flame"])
def test_the_map_is_saved_as_a_drawing_that_looks_like_it(page, net, shape):
    start(page, net)
    page.run(
        f"htp.tab('map'), document.getElementById('map-shape').value = '{shape}', htp.map.draw()"
    )
    saved = page.run(
        "new Promise((done) => { htp.picture.save = (drawing, name) => drawing.text()"
        ".then((text) => done([name, text])); document.getElementById('map-svg').click(); })"
    )
    assert saved[0] == page.run("`${htp.data.name}.svg`")
    labels = page.run(
        "htp.map.boxes().filter((box) => box.width > 34 && box.height > 14).map((box) => box.module.label)"
    )
    names = re.findall(r'font-weight="600">([^<]*)</text>', saved[1])
    assert len(names) == len(labels) > 3
    pairs = list(zip(names, labels, strict=True))
    assert all(label.startswith(name.removesuffix("…")) for name, label in pairs)
    assert any(name == label for name, label in pairs)
    # Drawn over the canvas, the SVG differs from it in the edges of letters at most.
    off = page.run(
        "(async () => { const canvas = document.querySelector('#map canvas'); const image = new Image();"
        "image.src = URL.createObjectURL(new Blob([htp.map.svgOf()], { type: 'image/svg+xml' })); await image.decode();"
        "const [width, height] = [canvas.width, canvas.height];"
        "const pixels = (what) => { const paper = Object.assign(document.createElement('canvas'), { width, height });"
        "const pen = paper.getContext('2d'); pen.fillStyle = getComputedStyle(document.body).backgroundColor;"
        "pen.fillRect(0, 0, width, height); pen.drawImage(what, 0, 0, width, height);"
        "return pen.getImageData(0, 0, width, height).data; };"
        "const [a, b] = [pixels(canvas), pixels(image)]; let far = 0;"
        "const off = (k) => Math.abs(a[k] - b[k]);"
        "for (let k = 0; k < a.length; k += 4) far += off(k) + off(k + 1) + off(k + 2) > 96;"
        "return far / (a.length / 4); })()"
    )
    assert off < 0.005


class Tied(torch.nn.Module):
    """The output layer has the weight of the embedding, 400 elements, and a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)
        self.mix = torch.nn.Linear(8, 8, bias=False)
        self.head = torch.nn.Linear(8, 50)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.mix(self.embed(words)))


@pytest.mark.long
def test_a_tied_weight_has_its_area_once_and_is_marked(page, tmp_path):
    htp_export.view(
        Tied().eval(), (torch.arange(6).reshape(1, 6),), tmp_path / "tied.html", explorer=False
    )
    start(page, tmp_path / "tied.html")
    page.run("htp.tab('map')")
    page.run("document.getElementById('map-size').value = 'parameters'")
    page.run("document.getElementById('map-shape').value = 'flame', htp.map.draw()")
    widths = page.run(
        "Object.fromEntries(htp.map.boxes().map((box) => [box.module.path, box.width]))"
    )
    shares = {path: width / widths[""] for path, width in widths.items()}
    whole = 400 + 64 + 50
    assert shares == pytest.approx(
        {"": 1, "embed": 400 / whole, "mix": 64 / whole, "head": 50 / whole}
    )
    labels = page.run(
        "Object.fromEntries(htp.map.boxes().map(({ module }) => [module.path, htp.map.labelOf(module)]))"
    )
    assert labels == {"": "(root)", "embed": "embed · tied", "mix": "mix", "head": "head · tied"}
    said = page.run("[...htp.ties.entries()].map(([module, lines]) => [module.path, ...lines])")
    assert sorted(said) == [
        ["embed", "embed.weight is head.weight, too, and counts here"],
        ["head", "head.weight is embed.weight, and counts there"],
    ]


@pytest.mark.long
def test_model_explorer_unfolds_to_a_module_counts_as_the_page_and_what_is_chosen_in_one_is_chosen_in_the_other(
    page, net
):
    page.size(1000, 500)  # it takes as long as there are pixels
    start(page, net)
    page.run("document.getElementById('flat').click()")
    nodes, modules = page.run("[htp.root.nodes, htp.data.count]")
    # a container has no row
    assert page.run("htp.table.state.rows.length") == modules - 1
    assert f"{nodes} nodes · {modules} modules" in page.run(
        "document.getElementById('facts').innerText"
    )
    page.run("htp.explorer.show(htp.byPath.get('layer.1.fc')).then(() => 0)")
    page.wait("document.getElementById('explorer').dataset.ready")
    frame = "document.querySelector('#explorer iframe')"
    text = f"({frame}.contentDocument?.body?.innerText ?? '')"
    page.wait(f"{text}.includes('LAYER ATTRIBUTES') && {text}.includes('Aggregated stats')")
    said = page.run(text)
    assert "layer.1.fc" in said
    assert "torch.nn.modules.linear.Linear" in said
    assert re.search(r"Sum\s+256\s+-\s+3\b", said)  # of the errors there is no sum
    key = f"(key) => {frame}.contentDocument.body.dispatchEvent(new KeyboardEvent('keydown', {{ key, bubbles: true }}))"
    page.run(f"({key})('ArrowUp')")
    page.wait(f"htp.selected.path === 'layer.1' && {text}.includes('Block')")
    page.run(f"({key})('ArrowLeft'), ({key})('ArrowDown')")
    assert page.run("htp.selected.path") == "layer.0.fc"
    page.run(f"({key})('ArrowUp'), ({key})('ArrowRight')")
    assert page.run("decodeURIComponent(location.hash)") == "#tab=explorer&module=layer.1"
    page.run("htp.explorer.show(htp.nodes.find((node) => node.op === 'Relu')).then(() => 0)")
    message = "{ cmd: 'model-explorer-node-selected', nodeId: 'layer.1/act___group___' }"
    page.run(f"{frame}.contentWindow.parent.postMessage({message}, '*'), 0")
    page.run("new Promise((then) => setTimeout(then, 200))")
    assert page.run("htp.selected.op") == "Relu"  # it was not the frame that sent it
    event = f"new MessageEvent('message', {{ data: {message}, source: {frame}.contentWindow }})"
    page.run(f"window.dispatchEvent({event})")
    page.wait("htp.selected.path === 'layer.1.act'")
    page.run("htp.explorer.show(htp.root).then(() => 0)")
    page.wait(f"{text}.includes('op node count')")
    said = page.run(text).replace("\n", " ").replace("\t", " ")
    assert f"{nodes}, and 2 inputs and outputs" in said
    assert f"{modules}; those with nodes are layers" in said
    assert str(nodes + 2) in said
    assert page.asked == []


@pytest.mark.long
def test_names_of_a_file_are_text_whatever_they_look_like(page, tmp_path):
    x = handmade.value(HOSTILE + "x")
    weight = ir.Value(
        name=HOSTILE + "w", const_value=ir.tensor(np.ones((4, 4), np.float32), name=HOSTILE + "w")
    )
    nodes = [
        handmade.tagged_node("Neg", [x], HOSTILE, HOSTILE),
        handmade.tagged_node("MatMul", [x, weight], CLOSING, CLOSING),
    ]
    nodes[0].name, nodes[1].op_type = HOSTILE, CLOSING
    nodes[0].metadata_props["htp.reason"] = HOSTILE
    nodes[0].attributes["text"] = ir.AttrString("text", HOSTILE)
    modules = [
        ModuleInfo("", CLOSING, 1, "computed"),
        *(ModuleInfo(p, HOSTILE, 1, "computed") for p in (HOSTILE, CLOSING)),
    ]
    model = handmade.model([x], nodes, [weight], modules)
    model.graph.name = model.producer_name = CLOSING
    file = tmp_path / "hostile.html"
    htp_export.view(
        model,
        file,
        results=[{"modules": {HOSTILE: {HOSTILE: 1.0, "status": HOSTILE}}}],
        weights=True,
    )
    start(page, file)
    page.run("document.getElementById('unfold').click()")
    for item in ("htp.byPath.get(htp.modules[1].path)", "htp.nodes[0]", "htp.nodes[1]", "htp.root"):
        page.run(f"htp.select({item})")
    assert HOSTILE in "\n".join(shown(page))
    page.run(f"htp.select(htp.byPath.get({json.dumps(HOSTILE)}))")
    search(page, HOSTILE)
    page.run("htp.tab('map')")
    page.open(file, page.run("location.hash"))
    page.wait("document.documentElement.dataset.ready")
    assert page.run("htp.selected.path") == HOSTILE
    for tab in ("map", "graph", "explorer"):
        page.run(f"htp.tab('{tab}')")
    page.wait("document.getElementById('explorer').dataset.ready")
    frame = "document.querySelector('#explorer iframe').contentDocument"
    page.wait(f"{frame}.body.innerText.includes('GRAPH INFO')")
    assert page.run("document.title") == CLOSING
    assert page.run("document.querySelectorAll('img').length") == 0
    assert page.run(f"{frame}.querySelectorAll('img[onerror]').length") == 0
    assert page.asked == []


def test_scripts_that_get_into_the_page_do_not_run(page, net):
    start(page, net)
    page.run(
        "document.body.insertAdjacentHTML('beforeend', `<img src=\"data:,\" onerror=\"document.title = 'ran'\">`)"
    )
    page.run(
        "document.body.append(Object.assign(document.createElement('script'), { textContent: 'document.title = 1' }))"
    )
    page.run("new Promise((then) => setTimeout(then, 200))")
    assert page.run("document.title") == "Net"
    page.said.clear()  # that its policy refused them


def chain(length: int) -> ir.Model:
    """Many layers of five nodes each, in groups of ten."""
    value = handmade.value("x")
    first, nodes, paths = value, [], []
    weight = ir.Value(name="w", const_value=ir.tensor(np.ones((4, 4), np.float32), name="w"))
    for k in range(length):
        owner = f"group.{k // 50}.layer.{k // 5 % 10}"
        paths += [owner] if owner not in paths[-1:] else []
        inputs = [value, weight] if k % 5 == 0 else [value]
        nodes.append(
            handmade.tagged_node("MatMul" if k % 5 == 0 else "Neg", inputs, owner, f"v{k}")
        )
        value = nodes[-1].outputs[0]
    groups = dict.fromkeys(path.rpartition(".layer")[0] for path in paths)
    modules = [ModuleInfo(path, "net.Part", 1, "computed") for path in ("", *groups, *paths)]
    return handmade.model([first], nodes, [weight], modules)


@pytest.mark.long
def test_a_page_of_3000_nodes_draws_no_more_rows_than_can_be_seen(page, tmp_path):
    file = tmp_path / "large.html"
    htp_export.view(chain(3000), file, explorer=False)
    start(page, file)
    page.run("document.getElementById('repeats').click()")
    assert page.run("document.getElementsByTagName('*').length") < 2000
    page.run(
        "document.getElementById('unfold').click(), htp.table.state.rows.filter((row) => row.depth === 4).slice(0, 5)"
        ".forEach((row) => htp.table.toggle(row.item)), 0"
    )
    drawn: Any = page.run(
        "(async () => { const table = document.getElementById('table'); let drawn = 0;"
        "new MutationObserver((records) => records.forEach((record) => record.addedNodes.forEach((node) => {"
        "drawn += node.classList?.contains('row') ? 1 : 0; }))).observe(table, { childList: true, subtree: true });"
        "for (let k = 0; k < 50; k++) { table.scrollTop += 999; table.dispatchEvent(new Event('scroll'));"
        "await new Promise((done) => setTimeout(done)); } return drawn; })()"
    )
    assert 50 <= drawn < 50 * 100
    assert page.run("document.querySelectorAll('.row').length") < 100
    search(page, "v2999")
    assert shown(page) == ["(root)", "group", "59", "layer", "9", "Neg node_v2999"]


def test_two_trees_are_shown_side_by_side_with_what_changed(page, tmp_path):
    rows = [
        SimpleNamespace(
            path="",
            status="changed",
            before={"nodes": 9, "class_name": "a.Net"},
            after={"nodes": 7},
        ),
        SimpleNamespace(path="fc", status="same", before={"nodes": 2}, after={"nodes": 2}),
        SimpleNamespace(
            path="bn", status="removed", before={"nodes": 2, "operators": {"Mul": 2}}, after=None
        ),
        SimpleNamespace(
            path="q.in", status="added", before=None, after={"nodes": 1, "class_name": HOSTILE}
        ),
    ]
    file = tmp_path / "diff.html"
    file.write_text(
        comparison_page(rows, "a.onnx", CLOSING, notes=["10 nodes by scope"]), encoding="utf-8"
    )
    start(page, file)
    assert page.run("document.getElementById('detail').clientWidth") < 400 < page.run("innerWidth")
    assert shown(page) == ["(root)", "bn", "q.in"]
    page.run("document.getElementById('changed').click()")
    assert shown(page) == ["(root)", "fc", "bn", "q.in"]
    assert page.run("document.querySelector('.row .number').title") == "9 → 7"
    assert page.run("[...document.querySelectorAll('.row')].map((row) => row.classList[1])") == [
        "changed",
        "same",
        "removed",
        "added",
    ]
    page.run("[...document.querySelectorAll('.row')][3].click()")
    assert HOSTILE in page.run("document.getElementById('detail').innerText")
    assert page.run("document.getElementById('repeats').offsetParent") is None
    assert page.run("document.title") == f"a.onnx → {CLOSING}"
    assert page.asked == []


class Stack(
    Holding, layer=torch.nn.ModuleList([*(Block() for _ in range(4)), torch.nn.Linear(8, 3)])
):
    """Four equal blocks, and a last one that is larger."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            x = layer(x)
        return x


STACK_TIMES = {f"layer.{k}": float(k + 1) for k in range(4)} | {
    f"layer.{k}.fc": 0.5 * (k + 1) for k in range(4)
}
FOLDED = ["(root)", "layer.0 … layer.3 × 4", "fc", "act", "drop", "layer.4"]  # noqa: RUF001 - "times"

ADDED = "Add node_add_2"


@pytest.fixture(scope="module")
def stacked() -> htp_export.TaggedModel:
    torch.manual_seed(0)
    return htp_export.load(htp_export.export(Stack().eval(), (torch.randn(2, 8),), verbose=False))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, stacked: htp_export.TaggedModel) -> Path:
    file = tmp_path_factory.mktemp("stack") / "stack.html"
    profile = {"modules": {path: {"total_ms": time} for path, time in STACK_TIMES.items()}}
    errors = {"modules": {f"layer.{k}": {"max_abs": 10.0**k} for k in range(4)}}
    htp_export.view(stacked, file, results=[profile, errors], explorer=False)
    return file


def selected(page: Page) -> str:
    return (
        str(page.run("document.querySelector('.row.selected .name').innerText"))
        .strip("▶ \n")
        .split("\n")[0]
    )


def test_the_rows_are_those_of_the_tree_in_the_terminal(page, stack, stacked):
    from rich.console import Console

    from htp_export.costs.drawing import render
    from htp_export.costs.result import tree_rows

    start(page, stack)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(tree_rows(stacked)))
    # between the header and what is known of the tags
    drawn = console.export_text().splitlines()[1:-1]
    lines = [re.split(r"\s{2,}", line.lstrip("│├└─ "))[0] for line in drawn]
    assert shown(page) == lines


def test_a_module_inside_of_repeats_is_found_and_shown_on_its_own(page, stack):
    start(page, stack)
    search(page, "layer.2.fc")
    assert shown(page) == ["(root)", "layer.2", "fc"]
    search(page, "")
    assert shown(page) == FOLDED
    page.run("htp.select(htp.byPath.get('layer.2.fc'))")
    assert selected(page) == "fc"
    inside = ["fc", "act", "drop", ADDED]
    assert shown(page) == [
        *FOLDED[:2],
        "layer.0",
        "layer.1",
        "layer.2",
        *inside,
        "layer.3",
        "layer.4",
    ]


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
    htp_export.view(
        handmade.model([x], [reshape, last], [shape], modules),
        file,
        results=[measured],
        explorer=False,
    )
    return file


def detail(page: Page) -> str:
    return str(page.run("document.getElementById('detail').innerText"))


def at(page: Page) -> str:
    return str(page.run("decodeURIComponent(location.hash)"))


def go(page: Page, file: Path, fragment: str) -> None:
    page.open(file, fragment)
    page.wait("document.documentElement.dataset.ready")


def test_a_node_has_its_time_or_an_equal_part_its_attributes_and_the_values_of_small_constants(
    page, constants
):
    start(page, constants)
    page.run(
        "document.getElementById('unfold').click(), htp.select(htp.nodes[1]), htp.select(htp.nodes[0])"
    )
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


def test_a_link_to_a_search_of_the_graph_fills_its_field(page, encoder_page):
    go(page, encoder_page, "#tab=graph&search=op:Gelu")
    field = "document.getElementById('graph-search').value"
    assert page.run(field) == "op:Gelu"
    assert page.run("document.getElementById('graph-found').innerText").endswith("found")
    assert page.run("document.getElementById('search').value") == ""
    assert at(page) == "#tab=graph&search=op:Gelu"
    page.run("location.hash = '#search=op:Gelu'")
    page.wait("document.getElementById('search').value === 'op:Gelu'")
    assert page.run(field) == ""


def test_a_link_to_what_is_not_there_shows_the_whole(page, encoder_page):
    for fragment in ("#module=nowhere", "#tab=%E0%A4%A", "#node=%23999&tab=<b>"):
        go(page, encoder_page, fragment)
        assert page.run("htp.selected === htp.root")
        assert page.said == []  # of this address
