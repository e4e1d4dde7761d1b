"""The graph of a page, by module: its table and overview, and trivial nodes that are merged."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import htp_export
from htp_export.format import tags
from htp_export.model.tagged import load
from tests.chromium import Page, needs_chromium
from tests.nets import Holding
from tests.view.test_view_page import start

pytestmark = needs_chromium

SIZES = [(1400, 850), pytest.param((390, 844), marks=pytest.mark.slow)]
COSTS = ("flops", "activation_bytes")


NUMBERS = """
[...document.querySelectorAll('#graph-canvas .card')].map((card) => {
  const numbers = [...card.querySelectorAll(':scope > .face .numbers span')];
  return [card.title, Object.fromEntries(numbers.map((it) => [it.dataset.key, it.textContent + '|' + it.title]))];
})
"""


class Heads(torch.nn.Module):
    """Attention with two heads: its reshapes and transposes compute nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (torch.nn.Linear(8, 8) for _ in range(3))
        self.out = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            layer(x).reshape(2, 6, 2, 4).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        scores = torch.softmax(q @ k.transpose(2, 3) * 0.5, dim=-1)
        return self.out((scores @ v).transpose(1, 2).reshape(2, 6, 8))


class Net(Holding, layer=torch.nn.ModuleList([Heads(), Heads()]), head=torch.nn.Linear(8, 3)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            x = x + layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, htp_export.results.Cost, Any]:
    folder = tmp_path_factory.mktemp("graph")
    torch.manual_seed(0)
    htp_export.export(Net().eval(), (torch.randn(2, 6, 8),), folder / "net.onnx", verbose=False)
    times = {
        "modules": {
            "": {"total_ms": 9.0},
            "layer.1": {"total_ms": 6.0},
            "layer.0": {"total_ms": 3.0},
        }
    }
    htp_export.view(folder / "net.onnx", folder / "net.html", results=[times], explorer=False)
    return folder / "net.html", htp_export.cost(folder / "net.onnx"), load(folder / "net.onnx")


def open_graph(
    page: Page, file: Path, size: tuple[int, int] = (1400, 850), table: bool = True
) -> None:
    page.size(*size)
    start(page, file)
    page.run("document.getElementById('tab-graph').click()")
    if table != page.run("document.getElementById('graph-list').checked"):
        page.run("document.getElementById('graph-list').click()")


def box(page: Page, element: str) -> list[float]:
    """The left, top, width and height of an element."""
    return list(
        page.run(
            f"(({{ x, y, width, height }}) => [x, y, width, height])({element}.getBoundingClientRect())"
        )
    )


def click(page: Page, element: str) -> None:
    """A click of the mouse in the middle of an element."""
    x, y, width, height = box(page, element)
    page.click(x + width / 2, y + height / 2)


def press_switch(page: Page, name: str) -> None:
    click(page, f"document.getElementById('{name}')")


def scroll(page: Page, element: str, top: str) -> None:
    page.run(
        f"(async () => {{ const it = document.getElementById('{element}'); it.scrollTop = {top};"
        "await new Promise((done) => requestAnimationFrame(() => setTimeout(done, 50))); })()"
    )


def order(page: Page) -> list[str]:
    """Paths of modules, names of nodes and of inputs and outputs, as they are drawn."""
    return list(page.run("htp.graph.state.order.map(({ item }) => item.path ?? item.name)"))


def cards(page: Page) -> dict[str, dict[str, str]]:
    """Everything that is drawn: path or name → key of a number → what is written, and its exact value."""
    found: dict[str, dict[str, str]] = {}
    height = page.run("document.getElementById('graph-canvas').offsetHeight")
    for top in range(0, height + 400, 400):
        scroll(page, "graph-drawing", str(top))
        found |= dict(page.run(NUMBERS))
    return found


def exact(numbers: dict[str, str], key: str) -> int:
    """The exact value of a number on a card, which leaves out zeros."""
    return int(numbers[key].split("|")[1].split(" ")[1].replace(",", "")) if key in numbers else 0


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES)
def test_numbers_on_modules_and_nodes_are_those_of_cost(page, net, size):
    file, costs, tagged = net
    open_graph(page, file, size)
    press_switch(page, "graph-unfold")
    found = cards(page)
    modules = [
        path for path, module in costs.modules.items() if path and module.nodes and module.calls
    ]
    assert len(modules) == 11
    for path in modules:
        numbers, module = found[path], costs.modules[path]
        assert {key: exact(numbers, key) for key in COSTS} == {
            key: getattr(module, key) for key in COSTS
        }
        assert exact(numbers, "parameters") == module.parameters
    for node in costs.nodes:
        assert {key: exact(found[node.name], key) for key in COSTS} == {
            key: getattr(node, key) for key in COSTS
        }
    weights = {node.name: exact(found[node.name], "parameters") for node in tagged.nodes}
    assert sum(weights.values()) == costs.modules[""].parameters
    of_query = [node.name for node in tagged["layer.0.query"].nodes if node.op_type == "MatMul"]
    assert found[of_query[0]]["flops"] == "1.54k FLOPs|FLOPs 1,536"  # 2 x 12 x 8 x 8


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES)
def test_trivial_nodes_are_merged_into_a_neighbour_of_their_module_and_shown_again(page, net, size):
    file, costs, tagged = net
    open_graph(page, file, size)
    press_switch(page, "graph-unfold")
    before = order(page)
    press_switch(page, "graph-merge")
    trivial = [node.name for node in costs.nodes if node.op_type in ("Reshape", "Transpose")]
    # three reshapes and transposes in, one each out, and one of the keys, in two layers
    assert len(trivial) == 16
    assert (
        page.run("document.getElementById('graph-merged').textContent") == f"{len(trivial)} merged"
    )
    assert sorted(set(before) - set(order(page))) == sorted(trivial)
    owner = {node.name: node.metadata_props["htp.module"] for node in tagged.nodes}
    groups = page.run(
        "[...htp.graph.state.groups.values()].map((group) => group.map((node) => node.name))"
    )
    assert all(len({owner[name] for name in group}) == 1 for group in groups)
    by_name = {node.name: node for node in costs.nodes}
    found = cards(page)
    for head, *others in groups:
        summed = {
            key: sum(getattr(by_name[name], key) for name in (head, *others)) for key in COSTS
        }
        assert {key: exact(found[head], key) for key in COSTS} == summed
    head, *others = groups[0]
    page.run(f"htp.select(htp.nodes.find((node) => node.name === {json.dumps(head)}))")
    button = "document.querySelector('#graph-canvas .card.selected .times')"
    assert page.run(f"{button}.textContent") == f"+{len(others)}"
    assert "Transpose" in page.run(f"{button}.title")
    click(page, button)
    assert set(order(page)) == set(before) - set(trivial) | set(others)
    assert page.run(f"{button}.textContent") == f"−{len(others)}"  # noqa: RUF001 - "minus"
    page.run("document.getElementById('graph-drawing').focus()")
    page.press("m")
    assert set(order(page)) == set(before) - set(trivial)
    # What is merged is found where it is drawn.
    page.run(f"htp.select(htp.nodes.find((node) => node.name === {json.dumps(others[0])}))")
    assert page.run("document.querySelector('#graph-canvas .card.selected').title") == head
    press_switch(page, "graph-merge")
    assert order(page) == before


def test_edges_of_each_module_are_those_of_what_it_holds(page, net):
    file, _, tagged = net
    open_graph(page, file)
    drawn = page.run(
        "Object.fromEntries([...htp.graph.state.found].map(([module, { next }]) => [module.path, [...next].flatMap("
        "([from, readers]) => [...readers].map((to) => [from.path ?? from.name, to.path ?? to.name]))]))"
    )
    names = {node: node.name for node in tagged.nodes}
    expected: dict[str, set[tuple[str, str]]] = {path: set() for path in drawn}
    shown = set(drawn)

    def chain_of(owner: str, name: str) -> list[str]:
        return [*(path for path in reversed(list(tags.ancestors(owner))) if path in shown), name]

    for node in tagged.nodes:
        ends = [(value.name, "") for value in node.inputs if value.is_graph_input()]
        ends += [
            (names[maker], maker.metadata_props["htp.module"])
            for value in node.inputs
            if (maker := value.producer())
        ]
        for name, owner in ends:
            one, other = (
                chain_of(owner, name),
                chain_of(node.metadata_props["htp.module"], node.name),
            )
            at = next(k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
            expected[one[at - 1]].add((one[at], other[at]))
        if any(value.is_graph_output() for value in node.outputs):
            expected[""].add(
                (chain_of(node.metadata_props["htp.module"], node.name)[1], node.outputs[0].name)
            )
    assert {path: {tuple(pair) for pair in pairs} for path, pairs in drawn.items()} == expected
    assert all(expected[path] for path in ("", "layer.0", "layer.1"))


@pytest.mark.parametrize("pane", ["graph-drawing", "graph-table"])
def test_the_keyboard_opens_modules_and_walks_through_them(page, net, pane):
    file, _, _ = net
    open_graph(page, file)
    press_switch(page, "graph-fold")
    page.run(f"document.getElementById('{pane}').focus()")
    page.press("Home", "ArrowDown")
    # past the input, which is not a part of the model
    assert page.run("htp.selected.path") == "layer.0"
    page.press("ArrowRight", "ArrowDown")
    assert page.run("htp.selected.above.path") == "layer.0"
    assert page.run("htp.graph.state.open.size") == 2
    said = page.run("document.getElementById('graph-said').textContent")
    assert said.startswith(page.run("htp.selected.path"))
    assert "FLOPs 1.54k" in said
    page.press("ArrowLeft")
    assert page.run("htp.selected.path") == "layer.0"
    page.press("ArrowLeft")
    assert page.run("htp.graph.state.open.size") == 1
    page.press("Enter")
    assert (
        page.run(
            "document.querySelector('#graph-rows .row.selected').getAttribute('aria-expanded')"
        )
        == "true"
    )
    page.press("End")
    assert page.run("htp.selected.path") == "head"
    active = page.run(
        "document.getElementById('graph-table').getAttribute('aria-activedescendant')"
    )
    assert page.run(f"document.getElementById('{active}').getAttribute('aria-selected')") == "true"


class Blocks(torch.nn.Module):
    """Alike blocks between two layers; with ``around``, sums of the model itself stand between the blocks."""

    def __init__(self, count: int, around: bool) -> None:
        super().__init__()
        self.around = around
        self.first = torch.nn.Linear(8, 8)
        self.h = torch.nn.ModuleList([Heads() for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.h:
            x = x + block(x) if self.around else block(x)
        return x


def labels(page: Page) -> list[str]:
    return list(page.run("htp.graph.state.order.map(({ item }) => item.label ?? item.op)"))


def paths_drawn(page: Page) -> int:
    return int(
        page.run("document.querySelectorAll('#graph-canvas .edges:not(.over) > path').length")
    )


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("blocks") / "blocks.html"
    times = {
        "modules": {"": {"total_ms": 16.0}, **{f"h.{k}": {"total_ms": k + 1.0} for k in range(4)}}
    }
    htp_export.view(
        Blocks(4, around=False).eval(), torch.randn(2, 6, 8), file, results=[times], explorer=False
    )
    return file


FOLD = "h.0 … h.3"


@pytest.mark.long
def test_the_graph_opens_with_alike_modules_drawn_once(page, blocks):
    open_graph(page, blocks)
    assert labels(page) == ["(root)", "in x", "first", FOLD, *labels(page)[4:]]
    assert len(labels(page)) == 5
    assert paths_drawn(page) == 3
    card = "document.querySelector('#graph-canvas .card.fold')"
    assert page.run(f"{card}.querySelector('.times').textContent") == "× 4"  # noqa: RUF001 - "times"
    numbers = f"[...{card}.querySelectorAll('.numbers span')].map((it) => it.textContent)"
    assert page.run(numbers)[:2] == ["2.50 ms 16 %", "288 par"]  # the mean of 1, 2, 3 and 4 ms
    assert page.run("document.querySelector('#graph-rows .row.fold .label').textContent") == FOLD
    click(page, f"{card}.querySelector('.label')")
    assert page.run("htp.selected.kind") == "fold"
    assert "4 modules that are alike" in page.run("document.getElementById('detail').innerText")


@pytest.mark.long
def test_alike_modules_with_others_between_them_are_drawn_each(page, tmp_path):
    htp_export.view(
        Blocks(2, around=True).eval(),
        torch.randn(2, 6, 8),
        tmp_path / "around.html",
        explorer=False,
    )
    open_graph(page, tmp_path / "around.html")
    assert [label for label in labels(page) if label.startswith("h.")] == ["h.0", "h.1"]
    assert page.run("document.querySelectorAll('#graph-canvas .back').length") == 0


class Cached(torch.nn.Module):
    """Blocks, each of which reads a tensor of a cache and returns a new one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.h = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(count)])

    def forward(self, x: torch.Tensor, past: list[torch.Tensor]) -> list[torch.Tensor]:
        present = []
        for block, before in zip(self.h, past, strict=True):
            present.append(block(x) * before)
            x = torch.relu(present[-1])
        return [x, *present]


class Around(Holding, body=Cached(10)):
    def forward(self, x: torch.Tensor, past: list[torch.Tensor]) -> list[torch.Tensor]:
        return self.body(x, past)


def cached(model: torch.nn.Module, count: int, folder: Path) -> Path:
    args = (torch.randn(2, 8), [torch.randn(2, 8) for _ in range(count)])
    names = [f"present.{k}.a_key_with_a_very_long_name" for k in range(count)]
    htp_export.export(
        model.eval(),
        args,
        folder / "net.onnx",
        verbose=False,
        input_names=["x", *(f"past.{k}.key" for k in range(count))],
        output_names=["y", *names],
    )
    htp_export.view(folder / "net.onnx", folder / "net.html", explorer=False)
    return folder / "net.html"


def test_the_inputs_and_outputs_of_a_cache_are_one_card_each(page, tmp_path):
    open_graph(page, cached(Around(), 10, tmp_path))
    drawn = labels(page)
    assert [label for label in drawn if label.startswith("in ")] == ["in x", "in past.0…9.key"]
    outputs = sorted(label for label in drawn if label.startswith("out "))
    assert outputs == ["out present.0…9.a_key_with_a_very_long_name", "out y"]
    scroll(page, "graph-drawing", "1e6")
    titles = page.run(
        "Object.fromEntries([...document.querySelectorAll('#graph-canvas .card.end')].map((card) => "
        "[card.title, card.querySelector('.label').textContent]))"
    )
    # The middle is cut, and the whole name is the title.
    assert titles["present.0…9.a_key_with_a_very_long_name"] == "out presen…a_very_long_name"
    types = page.run(
        "htp.graph.state.order.filter(({ item }) => item.kind === 'end').map(({ item }) => item.type)"
    )
    assert sorted(types) == [
        "10 × float32[2, 8]",  # noqa: RUF001 - "times"
        "10 × float32[2, 8]",  # noqa: RUF001 - "times"
        "float32[2, 8]",
        "float32[2, 8]",
    ]
    # What leaves a module goes down in one lane.
    lanes = page.run(
        "htp.graph.state.found.get(htp.byPath.get('body')).edges.trunks"
        ".filter(({ leaves }) => leaves).map(({ lane }) => lane)"
    )
    assert len(lanes) == 10
    assert len(set(lanes)) == 1


def test_few_inputs_are_drawn_each_whatever_their_names(page, tmp_path):
    open_graph(page, cached(Cached(3), 3, tmp_path))
    drawn = labels(page)
    assert [label for label in drawn if label.startswith("in ")] == [
        "in x", "in past.0.key", "in past.1.key", "in past.2.key",
    ]  # fmt: skip


def test_classes_have_different_colours_as_far_as_there_are_colours(page, net):
    start(page, net[0])
    found = page.run(
        "(() => { const torch = ['Conv2d', 'Sequential', 'Linear', 'ReLU', 'GELU', 'Dropout', 'LayerNorm',"
        "'BatchNorm2d', 'Embedding', 'Tanh'].map((name) => `torch.nn.${name}`);"
        "const names = [...torch, 'a.Mine', 'a.Other'];"
        "const colour = htp.colours.assigned(names, (name) => name.startsWith('torch.'));"
        "return names.map(colour); })()"
    )
    assert len(set(found)) == 12
    # Of more names than colours, neighbours differ.
    near = page.run(
        "(() => { const names = [...Array(40).keys()].map((k) => `a.Class${k}`);"
        "const next = (name) => [1, -1].map((by) => `Class${Number(name.slice(5)) + by}`);"
        "const colour = htp.colours.assigned(names, undefined, next); return names.map(colour); })()"
    )
    assert all(one != other for one, other in itertools.pairwise(near))


@pytest.mark.parametrize(
    ("word", "ends", "operators"),
    [
        ("x", ["x"], None),
        ("head.weight", [], ["Transpose", "MatMul", "Gemm"]),
        ("layer.0.query.bias", [], ["Add", "Gemm", "MatMul"]),
    ],
)
def test_the_search_of_the_graph_finds_inputs_and_parameters(page, net, word, ends, operators):
    open_graph(page, net[0])
    page.run(
        f"sought = document.getElementById('graph-search'), sought.value = {json.dumps(word)},"
        "sought.oninput(), sought.focus()"
    )
    page.press("Enter")
    if ends:
        assert page.run("htp.graph.state.marked.name") == ends[0]
        assert page.run("document.querySelector('#graph-canvas .card.found').title") == ends[0]
        return
    assert page.run("htp.selected.op") in operators
    read = page.run("htp.selected.inputs.map(([name]) => htp.data.recipes[name] ?? name)")
    assert any(name.split(",")[0] == word for name in read)
    assert page.run(
        "document.querySelector('#graph-canvas .card.selected').title === htp.selected.name"
    )
    assert page.run("document.getElementById('graph-found').textContent").startswith("1 of ")


def test_what_is_selected_keeps_its_place_while_the_zoom_changes(page, net):
    open_graph(page, net[0], table=False)
    press_switch(page, "graph-unfold")
    page.run("htp.select(htp.nodes.at(-1))")
    card = "document.querySelector('#graph-canvas .card.selected')"
    x, _, width, _ = box(page, card)
    click(page, "document.getElementById('graph-in')")
    page.run("new Promise((done) => setTimeout(done, 100))")
    left, top, wide, _ = box(page, card)
    assert wide == pytest.approx(1.25 * width, abs=2)
    assert left + wide / 2 == pytest.approx(x + width / 2, abs=120)  # unless it is at an edge
    view = box(page, "document.getElementById('graph-drawing')")
    assert view[1] <= top <= view[1] + view[3]
    page.run("document.getElementById('graph-drawing').focus()")
    page.press("0")
    whole = box(page, "document.getElementById('graph-canvas')")
    assert whole[2] <= view[2]
    assert whole[3] <= view[3]
    assert page.run("document.querySelectorAll('#graph-canvas .card.selected').length") == 1
    page.press("0")
    assert box(page, card)[2] == pytest.approx(width)


def test_a_drag_moves_the_graph_and_selects_nothing(page, net):
    open_graph(page, net[0], table=False)
    press_switch(page, "graph-unfold")
    page.run(
        "htp.select(htp.byPath.get('head')), document.getElementById('graph-drawing').scrollTop = 200"
    )
    left, top, width, height = box(page, "document.getElementById('graph-drawing')")
    before = page.run("document.getElementById('graph-drawing').scrollTop")
    x, y = left + width / 2, top + height / 2
    for kind, by in (("mousePressed", 0), ("mouseMoved", 60), ("mouseReleased", 60)):
        event = {"type": kind, "x": x, "y": y - by, "button": "left", "buttons": 1, "clickCount": 1}
        page._send("Input.dispatchMouseEvent", event)
    assert page.run("document.getElementById('graph-drawing').scrollTop") == before + 60
    assert page.run("htp.selected.path") == "head"


def test_a_picture_has_the_cards_and_lines_that_are_seen(page, net):
    open_graph(page, net[0], table=False)
    drawing = "document.getElementById('graph-drawing')"
    svg = page.run(f"htp.picture.svgOf({drawing})")
    seen = page.run(
        f"(() => {{ const area = {drawing}.getBoundingClientRect();"
        "const labels = [...document.querySelectorAll('#graph-canvas .card .label')];"
        "const isSeen = ({ top, bottom }) => top > area.top && bottom < area.bottom;"
        "return labels.filter((it) => isSeen(it.getBoundingClientRect())).map((it) => it.textContent); })()"
    )
    assert len(seen) > 3
    assert all(f">{label}</text>" in svg for label in seen)
    assert svg.count("<path") >= paths_drawn(page) > 0
    pixels = page.run(
        f"htp.picture.pngOf({drawing}).then(createImageBitmap).then(({{ width, height }}) => [width, height])"
    )
    assert pixels == page.run(f"[2 * {drawing}.clientWidth, 2 * {drawing}.clientHeight]")
