"""The search of the page, which is the selector language of the commands, and selectors and commands to copy."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import htp_export
from htp_export.command.main import main
from htp_export.errors import SelectorError
from htp_export.format.hierarchy import ModuleInfo
from htp_export.format.selectors import select
from tests import handmade, screens
from tests.chromium import Page, needs_chromium
from tests.view.test_view_page import search, shown, start

pytestmark = needs_chromium

LAYERS = [f"{stack}.{k}" for stack in ("encoder.layer", "decoder.layer") for k in (0, 1, 2, 10)]
PARTS = {
    "": "bert.BertLayer",
    ".self": "bert.SelfAttention",
    ".self.query": "torch.nn.Linear",
    ".norm": "LayerNorm",
}
TREES = {
    "stacks": {
        "": "bert.Model",
        "encoder": "bert.Encoder",
        "decoder": "bert.Decoder",
        "pooler": "bert.Pooler",
    }
    | {layer + part: name for layer in LAYERS for part, name in PARTS.items()},
    "names": {
        "": "net.Net",
        "a": "net.A[0]",
        "a.b-c": "net.B",
        "a.[x]": "torch.nn.Linear",
        "a.é": "net.É",
        "A": "net.a",
    }
    | {
        "a.*": "net.Star",
        "a.b,c": "net.Comma",
        "a.😀": "net.Smile",
        "a.^": "net.Caret",
        "a.re": "net.^",
    },
    "root": {"": "torch.nn.Linear"},
}
SELECTORS = (
    r"""
.;**;*;encoder;encoder.*;encoder.**;encoder.layer.?;encoder.layer.??;*.layer.[0-1].self;**.query;**.self.**;a.?;a.[a-c]*
encoder.layer.[!0];encoder.layer.[!0-9]*;class:Linear;class:Bert*;class:bert.*;class:torch.nn.*;class:*Norm;class:[A-L]*
class:net.[!A];class:net.[^];class:?*[[]0];a.[[]x];a.[*];a.b[,]c;a.[]x[]*;a.[^];a.[!^]a;a.😀;a.[a-é];class:?;class:??;!.
encoder.layer.0,pooler;encoder.layer.*,!encoder.layer.0;!pooler;!class:Linear, !encoder.**;class:Linear,encoder,!**.2.**
re:.*\.(query|norm);re:encoder\.layer\.\d+;encoder, re:decoder.*;!re:.*layer.*;! pooler , **;re:a\.b,c;re:(?P<x>a)
a.é,a.b-c
nowhere.*;class:Nothing;re:nothing;!nowhere.*;**,!**;encoder.layer.*.self,class:Pooler;.,pooler;**.layer.1?.**;re:a\.(é|re)
encoder.layer.0-1;encoder.layer.1-19.**;**.0-8.*;encoder.layer.9-99,pooler;!encoder.layer.0-1.**
encoder, re:(decoder|pooler);re:encoder\.layer\.(1|2);[ed]*coder;*coder.l*.?.[!n]*;class:*[!n][!o]r*;a.[!]x]*;**.**.self
""".replace("\n", ";")
    .strip(";")
    .split(";")
)


def found_by_page(page: Page, selector: str, classes: dict[str, str]) -> list[str]:
    modules = [{"kind": "module", "path": path, "class": name} for path, name in classes.items()]
    return list(
        page.run(
            f"(() => {{ try {{ return [...htp.search({json.dumps(selector)}, {json.dumps(modules)}, [])?.hits ?? []]"
            ".map((module) => module.path); } catch (error) { return [error.name]; } })()"
        )
    )


@pytest.mark.parametrize("tree", TREES)
def test_a_selector_means_in_the_page_what_it_means_in_commands(page, encoder_page, tree):
    start(page, encoder_page)
    classes = TREES[tree]
    agreed = 0
    for selector in SELECTORS:
        try:
            expected = select(selector, classes)
        except SelectorError:
            continue  # the page looks for words, or finds nothing
        assert found_by_page(page, selector, classes) == expected, selector
        agreed += 1
    assert agreed >= {"stacks": 35, "names": 25, "root": 4}[tree]


def test_a_selector_that_names_nothing_or_cannot_be_read_finds_nothing(page, encoder_page):
    start(page, encoder_page)
    for selector in ("nowhere.*", "class:Nothing", "**,!**", "re:nothing"):
        assert found_by_page(page, selector, TREES["stacks"]) == []
    look(page, "re:(")
    assert shown(page) == []
    assert "It cannot be read: " in page.run("document.getElementById('nothing').innerText")


def look(page: Page, text: str) -> dict[str, Any]:
    """The modules and the operators of nodes that the page finds."""
    search(page, text)
    return dict(
        page.run(
            "({ modules: [...htp.table.state.query.hits].filter((it) => it.kind === 'module').map((it) => it.path),"
            "nodes: [...htp.table.state.query.hits].filter((it) => it.kind === 'node').map((it) => it.op) })"
        )
    )


def test_words_of_a_node_are_those_of_its_modules_too(page, encoder_page):
    start(page, encoder_page)
    layers = range(screens.LAYERS)
    assert look(page, "query op:MatMul") == {"modules": [], "nodes": ["MatMul"] * screens.LAYERS}
    assert look(page, "layers.3.** op:Mat*") == {"modules": [], "nodes": ["MatMul"] * 8}
    assert look(page, "class:SelfAttention op:softmax")["nodes"] == ["Softmax"] * screens.LAYERS
    assert look(page, "op:MatMul !layers.**") == {"modules": [], "nodes": ["MatMul"] * 2}
    found = {
        "modules": [f"layers.{k}.attention.query" for k in layers],
        "nodes": ["MatMul", "Add"] * screens.LAYERS,
    }
    assert look(page, "QUERY") == found  # the names of the nodes have it
    assert look(page, "layers.*, op:Gather") == {
        "modules": [f"layers.{k}" for k in layers],
        "nodes": ["Gather"],
    }
    assert look(page, "layers.2") == {"modules": ["layers.2"], "nodes": []}
    assert "layers.2.mlp" in look(page, "layers.2.")["modules"]  # no module has this name: words


def copied(page: Page, button: str) -> str:
    """What a button writes to the clipboard, which is not the user's here."""
    page.run(
        "window.copied = null, Object.defineProperty(navigator, 'clipboard', { configurable: true, "
        "value: { writeText: async (text) => { window.copied = text; } } }), 0"
    )
    page.run(f"{button}.click(), 0")
    page.wait("window.copied !== null")
    return str(page.run("window.copied"))


TOOLS = "document.querySelector('#detail .tools')"
COMMANDS = f"[...{TOOLS}.querySelectorAll('.command button')]"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ONNX file with a name that a shell would read otherwise."""
    folder = tmp_path_factory.mktemp("o'clock $(date)")
    file = folder / "my net.onnx"
    htp_export.load(screens.encoder()).save(file)
    htp_export.view(file, folder / "net.html", explorer=False)
    return file


def test_selectors_that_are_copied_name_what_is_selected(page, file):
    start(page, file.with_name("net.html"))
    classes = {path: module.class_name for path, module in htp_export.load(file).hierarchy.items()}
    for item, selector in {
        "htp.root": ".",
        "htp.byPath.get('layers.3')": "layers.3",
        "htp.byPath.get('layers.0').run.fold": "layers.*",
        "htp.byPath.get('layers.0').run.fold.children[0]": "layers.*.attention",
    }.items():
        page.run(f"htp.select({item})")
        assert copied(page, f"{TOOLS}.querySelector('button')") == selector
        modules = page.run("(htp.selected.members ?? [htp.selected]).map((module) => module.path)")
        assert select(selector, classes) == modules
    look(page, "QUERY !layers.2.**")
    found = copied(page, "document.querySelector('#hits button')")
    assert select(found, classes) == [f"layers.{k}.attention.query" for k in (0, 1, 3, 4, 5)]


@pytest.mark.long
def test_commands_that_are_copied_run(page, file, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    start(page, file.with_name("net.html"))
    words = set()
    for item in ("htp.byPath.get('layers.0.mlp')", "htp.byPath.get('layers.0').run.fold"):
        page.run(f"htp.select({item})")
        for k in range(page.run(f"{COMMANDS}.length")):
            command = shlex.split(copied(page, f"{COMMANDS}[{k}]"))
            assert command[0] == "htp-export"
            assert command[2] == str(file)
            assert main(command[1:]) == 0, command
            words.add(command[1])
    assert words == {"extract", "tree", "nodes", "functions", "quantize"}
    assert (tmp_path / "layers.0.mlp.onnx").is_file()
    capsys.readouterr()


def test_the_command_that_measures_is_offered_where_there_are_no_times(
    page, file, monkeypatch, capsys
):
    monkeypatch.chdir(file.parent)
    start(page, file.with_name("net.html"))
    offer = shlex.split(copied(page, "document.querySelector('#detail .offer button')"))
    assert offer == ["htp-export", "view", str(file), "--measure", "time,cost"]
    assert main([*offer[1:], "--no-explorer"]) == 0
    capsys.readouterr()
    start(page, file.with_suffix(".html"))
    heads = page.run(
        "[...document.querySelectorAll('#head > div')].map((cell) => cell.textContent)"
    )
    assert heads[2:4] == ["time ms, % ↓", "FLOPs"]
    assert page.run("htp.columns.map((column) => column.key)").count("peak_bytes") == 1
    assert page.run("document.querySelector('#detail .offer')") is None


NAMES = (
    "a b", "$(touch x)", "x'y", '"', "a,b", "[0]", "a*", "!a", "re:x",
    "-o", "a\nb", "a\x1b[2J", "é", "<b>", "a\\d", "😀",
)  # fmt: skip


def test_selectors_and_commands_of_any_names_are_one_word_of_a_shell(page, tmp_path, monkeypatch):
    modules = [
        ModuleInfo("", "net.Net", 1, "computed"),
        *(ModuleInfo(name, "net.N", 1, "computed") for name in NAMES),
    ]
    x = handmade.value("x")
    nodes = [handmade.tagged_node("Neg", [x], name, f"v{k}") for k, name in enumerate(NAMES)]
    monkeypatch.chdir(tmp_path)
    htp_export.load(handmade.model([x], nodes, [], modules)).save("-n.onnx")
    htp_export.view("-n.onnx", "n.html", explorer=False)
    start(page, tmp_path / "n.html")
    classes = {module.path: module.class_name for module in modules}
    for name in NAMES:
        page.run(f"htp.select(htp.byPath.get({json.dumps(name)}))")
        selector = copied(page, f"{TOOLS}.querySelector('button')")
        assert select(selector, classes) == [name]
        for k in range(page.run(f"{COMMANDS}.length")):
            line = copied(page, f"{COMMANDS}[{k}]")
            assert line.isprintable()
            named = {"extract": name, "quantize": f"{selector}=int8"}
            words = shlex.split(line)
            assert named.get(words[1], selector) in words
            assert words[2] == "./-n.onnx"
            assert not any(
                word.startswith("-") and word not in ("-o", "--select", "--rule") for word in words
            )
