"""Several files in one page: a table with a row for each module, and the graphs of two files side by side."""

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

import htp_export
from htp_export.capabilities.view.inventory import take_inventory
from htp_export.capabilities.view.page.packing import packed
from htp_export.capabilities.view.side_by_side import hashes_of
from htp_export.command.main import main
from htp_export.editing.flattening import read_flat
from htp_export.errors import FileError, InputError
from tests import handmade
from tests.chromium import Page, needs_chromium
from tests.nets import Holding


class Block(Holding, fc=torch.nn.Linear(8, 8), act=torch.nn.ReLU()):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.fc(x))


class Net(torch.nn.Module):
    """Two blocks, of which the second has an activation of its own; with or without a head."""

    def __init__(self, act: torch.nn.Module, head: bool) -> None:
        super().__init__()
        self.layer = torch.nn.ModuleList([Block(), Block()])
        self.layer[1].act = act
        self.head = torch.nn.Linear(8, 3) if head else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layer:
            x = layer(x)
        return x if self.head is None else self.head(x)


TIMES = [
    {"modules": {"": {"total_ms": 10.0}, "layer.0": {"total_ms": 4.0}, "layer.1": {"total_ms": 5}}},
    {
        "modules": {
            "": {"total_ms": 9.0},
            "layer.0": {"total_ms": 4.0},
            "layer.1": {"total_ms": 2.5},
        }
    },
]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three files: the second has another activation, and the third no head."""
    folder = tmp_path_factory.mktemp("files")
    nets = {
        "relu.onnx": Net(torch.nn.ReLU(), True),
        "tanh.onnx": Net(torch.nn.Tanh(), True),
        "headless.onnx": Net(torch.nn.ReLU(), False),
    }
    for name, net in nets.items():
        htp_export.export(net.eval(), (torch.randn(2, 8),), folder / name, verbose=False)
    return [folder / name for name in nets]


@pytest.fixture(scope="module")
def written(files: list[Path]) -> Path:
    target = files[0].with_name("together.html")
    first, second, third = files
    beside = [(second, [TIMES[1]]), third]
    htp_export.view(first, target, results=[TIMES[0]], beside=beside)
    return target


def start(page: Page, file: Path) -> None:
    page.open(file)
    page.wait("document.documentElement.dataset.ready")


def heads(page: Page) -> list[tuple[str, str]]:
    """Number and file of each column."""
    spans = page.run(
        "[...document.querySelectorAll('#groups > div')].slice(1).flatMap((it) => "
        "Array(Number(it.style.gridColumn.match(/span (\\d+)/)[1])).fill(it.textContent))"
    )
    names = page.run(
        "[...document.querySelectorAll('#head > div')].slice(1).map((it) => it.textContent)"
    )
    return list(zip(spans, names, strict=True))


def cells(page: Page, path: str) -> dict[tuple[str, str], str]:
    """Number and file → what stands in the row of a module."""
    page.run("flat = document.getElementById('flat'), flat.checked || flat.click()")
    texts = page.run(
        "[...document.querySelectorAll('#rows .row')]"
        f".filter((it) => it.querySelector('.name').title === {json.dumps(path)})"
        ".flatMap((it) => [...it.querySelectorAll('.number')].map((cell) => cell.textContent))"
    )
    return dict(zip(heads(page), texts, strict=True))


def row(path: str) -> str:
    return f"htp.together.rows.find((row) => row.path === {json.dumps(path)})"


def choose(page: Page, path: str, file: int) -> None:
    page.run(f"void htp.together.choose({row(path)}, htp.together.files[{file}])")


def drawn(page: Page, side: str) -> dict[str, str]:
    """Label of each card of a graph → how it compares with the other file."""
    return dict(
        page.run(
            "(() => { const words = ['same', 'changed', 'only'];"
            "const word = ({ classList }) => words.find((each) => classList.contains(each));"
            f"return [...document.querySelectorAll('#{side} .card')]"
            ".map((card) => [card.querySelector('.label').textContent, word(card) ?? '']); })()"
        )
    )


@pytest.mark.long
@needs_chromium
def test_a_row_has_the_numbers_of_every_file_and_nothing_where_a_file_has_no_module(page, written):
    start(page, written)
    first = cells(page, "layer.1")
    times = {file: first["time ms", file] for file in ("relu.onnx", "tanh.onnx", "headless.onnx")}
    assert times == {"relu.onnx": "5.00", "tanh.onnx": "2.50", "headless.onnx": ""}
    assert first["graph is", "tanh.onnx"] == "changed"
    assert first["graph is", "headless.onnx"] == "same"
    head = cells(page, "head")
    assert head["parameters", "relu.onnx"] == head["parameters", "tanh.onnx"] == "27"
    assert {text for (_, file), text in head.items() if file == "headless.onnx"} == {""}
    assert page.asked == []


@needs_chromium
def test_a_difference_is_coloured_by_its_size_and_its_sign(page, written):
    start(page, written)
    cells(page, "")
    colours = page.run(
        "Object.fromEntries([...document.querySelectorAll('#rows .row')].map((it) => "
        "[it.querySelector('.name').title, [...it.querySelectorAll('.number')][3].style.background]))"
    )
    assert colours["layer.0"] == ""  # 4 ms in both
    assert "--less" in colours["layer.1"]  # 2.5 ms in place of 5
    percent = {path: int(text.split("%")[0].split()[-1]) for path, text in colours.items() if text}
    assert percent == {"": 10, "layer.1": 26}  # 6 % and 40 % of the part of the larger number
    page.run("base = document.getElementById('base'), base.value = 1, base.onchange()")
    background = page.run(
        "[...document.querySelectorAll('#rows .row')].find((it) => it.querySelector('.name').title === 'layer.1')"
        ".querySelectorAll('.number')[2].style.background"
    )
    assert "--more" in background


@needs_chromium
def test_a_click_shows_two_graphs_with_what_is_equal_folded(page, written):
    start(page, written)
    cells(page, "")
    page.run(
        "[...document.querySelectorAll('#rows .row')].find((it) => it.querySelector('.name').title === '')"
        ".querySelectorAll('.number')[3].click()"
    )
    # Alone the second activation differs; what reads it and is read by it has another neighbour.
    left, right = drawn(page, "left"), drawn(page, "right")
    assert {path: left[path] for path in ("layer.0", "layer.1", "head", "act")} == {
        "layer.0": "same", "layer.1": "changed", "head": "same", "act": "changed",
    }  # fmt: skip
    assert set(left) - set(right) == {"node_relu_1"}
    assert set(right) - set(left) == {"node_tanh"}
    assert (left["node_relu_1"], right["node_tanh"]) == ("only", "only")
    assert "fc" in left  # closed, since it is equal
    counts = page.run("document.getElementById('pair-counts').textContent")
    assert counts.endswith("1 only left, 1 only right")
    choose(page, "head", 2)
    assert page.run("document.getElementById('right-name').textContent") == (
        "headless.onnx has no such module"
    )
    page.press("Escape")
    assert page.run("document.getElementById('pair').hidden")


@needs_chromium
def test_equal_nodes_are_one_card_until_it_is_clicked_and_do_not_make_a_cycle(page, tmp_path):
    class Chain(torch.nn.Module):
        def __init__(self, last: Any) -> None:
            super().__init__()
            self.last = last

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            side = torch.sigmoid(torch.exp(x))
            return torch.relu(self.last(torch.neg(torch.abs(torch.sin(side)))) + side)

    for name, last in (("a", torch.cos), ("b", torch.tanh)):
        htp_export.export(
            Chain(last).eval(), (torch.randn(3),), tmp_path / f"{name}.onnx", verbose=False
        )
    htp_export.view(tmp_path / "a.onnx", tmp_path / "t.html", beside=[tmp_path / "b.onnx"])
    start(page, tmp_path / "t.html")
    choose(page, "", 1)
    left = drawn(page, "left")
    assert (left["5 equal nodes"], left["node_relu"]) == ("same", "same")
    assert page.run("document.querySelectorAll('#sides .back').length") == 0
    page.run("document.querySelector('#left .card.group').click()")
    for side, last in (("left", "node_cos"), ("right", "node_tanh")):
        assert set(drawn(page, side)) >= {"node_exp", "node_sin", last}
    page.run("document.querySelectorAll('#left .card.node')[0].click()")
    assert "equal in both files" in page.run("document.getElementById('pair-said').textContent")
    assert page.run("document.querySelectorAll('#sides .selected').length") == 2


@needs_chromium
def test_names_of_files_and_modules_are_text(page, tmp_path):
    hostile = "<img src=x onerror=document.title='ran'>"
    x = handmade.value("x")
    for number, name in enumerate(("a", "b")):
        node = handmade.tagged_node(("Relu", "Neg")[number], [x], hostile, f"</script>{hostile}")
        modules = [
            handmade.ModuleInfo("", hostile),
            handmade.ModuleInfo(hostile, f"</script>{hostile}"),
        ]
        model = handmade.model([x], [node], [], modules)
        ir.save(model, tmp_path / f"{name}.onnx")
        x = handmade.value("x")
    numbers = {"title": hostile, "unit": hostile, "values": {f"node_</script>{hostile}": 1}}
    htp_export.view(
        tmp_path / "a.onnx", tmp_path / "t.html", results=[numbers], beside=[tmp_path / "b.onnx"]
    )
    assert "<img" not in (tmp_path / "t.html").read_text(encoding="utf-8")
    start(page, tmp_path / "t.html")
    choose(page, hostile, 1)
    page.run("document.getElementById('about').open = true")
    assert page.run("document.title") != "ran"
    assert page.run("document.querySelectorAll('img').length") == 0
    assert hostile in page.run("document.body.innerText")
    assert page.asked == []


@needs_chromium
def test_the_table_is_searched_sorted_and_walked_through(page, written):
    start(page, written)
    names = "[...document.querySelectorAll('#rows .row .name')].map((it) => it.title)"
    page.run("document.getElementById('changed').click()")
    assert page.run(names) == ["", "layer.1", "layer.1.act", "head"]
    page.run("document.getElementById('changed').click()")
    page.run(
        "search = document.getElementById('search'), search.value = 'linear', search.oninput()"
    )
    assert page.run(names) == ["", "layer.0", "layer.0.fc", "layer.1", "layer.1.fc", "head"]
    page.run(
        "search.value = '', search.oninput(), document.querySelectorAll('#head > div')[4].click()"
    )
    assert page.run(names)[:2] == ["", "layer.0"]  # 4 ms, before 2.5 ms in the second file
    page.run("document.querySelectorAll('#head > div')[4].click()")
    assert page.run(names)[:2] == ["", "layer.1"]
    page.run("document.getElementById('table').focus()")
    page.press("Home", "ArrowDown", "Enter")
    assert page.run("document.getElementById('pair-name').textContent") == "layer.1"


# --- numbers of other engines


def of_engine(files: list[Path], numbers: Any) -> dict[str, float]:
    """The numbers by module that a page shows for the first file."""
    data = page_data(htp_export.view(files[0], results=[numbers], explorer=False).html)
    measure = next(each for each in data["measures"] if each["key"].startswith("engine:"))
    paths = [module["path"] for module in data["modules"]]
    values = zip(paths, measure["total"], strict=True)
    return {path: value for path, value in values if value is not None}


def page_data(html: str) -> Any:
    return json.loads(
        html.split('<script type="application/json" id="data">')[1].split("</script>")[0]
    )


def test_the_number_of_a_node_or_a_tensor_counts_in_all_modules_above_it(files):
    inventory = take_inventory(read_flat(files[0]))
    of_fc = next(node for node in inventory.nodes if node.module == "layer.0.fc")
    of_act = next(node for node in inventory.nodes if node.module == "layer.0.act")
    numbers = {of_fc.name: 2.0, of_act.outputs[0].name: 0.5, "layer.1": 4.0}
    assert of_engine(files, numbers) == {
        "": 2.5, "layer.0": 2.5, "layer.0.fc": 2.0, "layer.0.act": 0.5, "layer.1": 4.0,
    }  # fmt: skip


def test_openvinos_counters_are_the_mean_of_its_requests(files):
    inventory = take_inventory(read_flat(files[0]))
    name = next(node.name for node in inventory.nodes if node.module == "head")

    def request(ms: float | str) -> dict[str, Any]:
        entry = {"name": name, "status": "EXECUTED", "node_type": "MatMul", "exec_type": "gemm"}
        return {"nodes": [{**entry, "real_time": ms, "cpu_time": ms}], "total_real_time": ms}

    detailed = {"report_type": "detailed", "detailed_performance": [request(1.0), request(2.0)]}
    assert of_engine(files, detailed) == {"": 1.5, "head": 1.5}
    # The tool in Python writes texts.
    detailed = {"report_type": "detailed", "detailed_performance": [request("1.000")]}
    assert of_engine(files, detailed) == {"": 1.0, "head": 1.0}
    average = {"report_type": "average", "avg_performance": request(3.0)}
    assert of_engine(files, average) == {"": 3.0, "head": 3.0}


def test_names_that_the_model_does_not_have_are_counted_in_a_note(files, tmp_path):
    (tmp_path / "npu.json").write_text('{"layer.0": 1, "fused_7": 2, "fused_8": 3}')
    html = htp_export.view(files[0], results=[tmp_path / "npu.json"], explorer=False).html
    assert "npu: 2 of 3 names are not in relu.onnx (5): fused_7, fused_8." in html


@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ({"fused_7": 1.0}, "none of its 1 names is a module, node or tensor of relu.onnx"),
        ({"values": {"layer.0": float("nan")}}, "'layer.0' is nan, and not a finite number"),
        ({"values": {"layer.0": True}}, "'layer.0' is True, and not a finite number"),
        ({"title": 1, "values": {"layer.0": 1}}, "title and unit are texts"),
        ({"values": {}}, "there are no values"),
        ({"report_type": "average"}, "has no list of nodes"),
        ({"report_type": "detailed", "detailed_performance": []}, "has no counters"),
        ({"report_type": "average", "avg_performance": {"nodes": [1]}}, "no name or no real_time"),
        ({}, "has no numbers by module"),
    ],
)
def test_numbers_that_cannot_be_read_are_an_error(files, numbers, problem):
    with pytest.raises(InputError, match=problem):
        htp_export.view(files[0], results=[numbers], explorer=False)


def test_a_file_of_numbers_that_cannot_be_read_is_named(files, tmp_path):
    (tmp_path / "npu.json").write_text('{"values": {}}')
    with pytest.raises(FileError, match=r"npu\.json: there are no values"):
        htp_export.view(files[0], results=[tmp_path / "npu.json"], explorer=False)


# --- the command, and what is refused


def counts(file: Path) -> tuple[int, int]:
    """The modules and nodes of a file, as `info` counts them."""
    found = htp_export.info(file)
    return found.modules, found.nodes


def test_the_command_takes_several_files_and_the_results_of_each(files, tmp_path, capsys):
    (tmp_path / "tanh.json").write_text(json.dumps(TIMES[1]))
    target = tmp_path / "page.html"
    first, *others = map(str, files)
    for name in ("tanh", "tanh.onnx", others[0]):
        typed = ["view", first, "--with", *others, "-o", str(target)]
        assert main([*typed, "--result", f"{name}={tmp_path / 'tanh.json'}"]) == 0
        modules, nodes = (sum(each) for each in zip(*map(counts, files), strict=True))
        assert f"{modules} modules, {nodes} nodes in 3 files" in capsys.readouterr().out
        content = packed_content(target)
        assert content["files"][1]["values"][0] != []
        assert content["files"][2]["values"][0] == []


def packed_content(file: Path) -> Any:
    text = file.read_text(encoding="utf-8").split('id="content">')[1].split("</script>")[0]
    return json.loads(gzip.decompress(base64.b64decode(text)))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ["--with", "SECOND", "--result", "cos=times.json"],
            "no file of this page is called 'cos'",
        ),
        (["--with", "SECOND", "--netron"], "--with is for the page of an ONNX file"),
        (["--with", "SECOND", "--weights"], "it is for the page of a single file"),
        (["--with", "missing.onnx"], "missing.onnx"),
    ],
)
def test_what_does_not_fit_several_files_is_refused(files, tmp_path, capsys, arguments, problem):
    typed = [str(files[1]) if word == "SECOND" else word for word in arguments]
    target = [] if "--netron" in typed else ["-o", str(tmp_path / "page.html")]
    assert main(["view", str(files[0]), *typed, *target]) == 2
    assert problem in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_pytorch_model_is_not_put_beside_files(files):
    with pytest.raises(InputError, match="export the PyTorch model first"):
        htp_export.view(Net(torch.nn.ReLU(), True).eval(), torch.randn(2, 8), beside=[files[0]])


def test_equal_data_are_compressed_to_equal_text():
    assert packed({"a": [1]}) == packed({"a": [1]})


def test_the_hash_of_a_node_depends_on_its_inputs_and_not_on_names(files):
    (_, first), (_, second) = (hashes_of(read_flat(file)) for file in files[:2])
    nodes = [read_flat(file).nodes for file in files[:2]]
    changed = [
        (node.op_type, other.op_type)
        for node, other, one, two in zip(*nodes, first, second, strict=True)
        if one != two
    ]
    assert changed == [("Relu", "Tanh"), ("Add", "Add")]


@pytest.mark.slow
def test_a_moved_module_has_one_row(tmp_path):
    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Net(torch.nn.ReLU(), True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    args = (torch.randn(2, 8),)
    htp_export.export(Net(torch.nn.ReLU(), True).eval(), args, tmp_path / "a.onnx", verbose=False)
    htp_export.export(Wrapped().eval(), args, tmp_path / "b.onnx", verbose=False)
    htp_export.view(tmp_path / "a.onnx", tmp_path / "t.html", beside=[tmp_path / "b.onnx"])
    content = packed_content(tmp_path / "t.html")
    rows = [path for path, _ in content["rows"]]
    moved = content["files"][1]["moved"]
    assert moved[str(rows.index("layer.0"))] == "body.layer.0"
