"""What a file knows about its tags stands under every table that is by module, and in its JSON."""

import json
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.reporting.tag_facts import TagFacts, tag_lines

LINE = "every node has a module: 2 captured at export"


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()
    path: Path = tmp_path_factory.mktemp("tagged") / "net.onnx"
    htp_export.export(net, (torch.randn(2, 4),), path, dynamo=False, verbose=False)
    return path


@pytest.fixture(scope="module")
def bare(file) -> Path:
    """The same file after a tool that keeps the metadata of models, and not that of nodes."""
    model = onnx.load(str(file))
    for node in model.graph.node:
        node.ClearField("metadata_props")
    path: Path = file.parent / "bare.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    "command",
    [
        ["tree"],
        ["cost"],
        ["profile", "--runs", "2"],
        ["forensics"],
        ["fingerprint"],
        ["optimize", "-o", "out.onnx"],
    ],
    ids=" ".join,
)
def test_the_line_stands_under_the_table_and_the_facts_in_json(
    command, file, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    name, *options = command
    assert main([name, str(file), *options]) == 0
    assert LINE in capsys.readouterr().out.splitlines()
    assert main([name, str(file), *options, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)["tags"]
    assert facts == {"source": "htp", "reasons": {"scope": 2}, "untagged": 0, "lost": False}


@pytest.mark.parametrize("command", ["diff", "compare"])
def test_of_two_files_each_says_it_and_both_once_where_they_know_the_same(
    command, file, tmp_path, capsys
):
    other = tmp_path / "other.onnx"
    model = onnx.load(str(file))
    fused = next(entry for entry in model.graph.node[0].metadata_props if entry.key == "htp.reason")
    fused.value = "fused"
    onnx.save(model, other)
    assert main([command, str(file), str(other)]) == 0
    names = {"diff": ("before", "after"), "compare": ("right", "compared")}[command]
    lines = capsys.readouterr().out.splitlines()
    assert f"{names[0]}: {LINE}" in lines
    assert lines[-1].startswith(f"{names[1]}: every node has a module: ")
    assert main([command, str(file), str(file), "--json"]) == 0
    assert [facts["reasons"] for facts in json.loads(capsys.readouterr().out)["tags"]] == [
        {"scope": 2}
    ] * 2
    assert main([command, str(file), str(file)]) == 0
    assert f"both: {LINE}" in capsys.readouterr().out


def test_an_untagged_file_has_a_table_and_says_how_to_tag_it(bare, tmp_path, capsys):
    assert main(["cost", str(bare)]) == 0
    assert "htp-export carry BEFORE AFTER" in " ".join(capsys.readouterr().out.split())
    plain = tmp_path / "plain.onnx"
    model = onnx.load(str(bare))
    model.ClearField("metadata_props")
    for node in model.graph.node:
        node.name = ""
    onnx.save(model, plain)
    assert main(["cost", str(plain)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    advice = "Export it with htp-export export, or tag it with htp-export carry MODEL FILE -o OUT."
    assert f"This file has no module tags. {advice}" in said


def test_nodes_of_no_module_are_counted():
    assert str(TagFacts("htp", {"scope": 1200, "fused": 1}, 3)) == (
        "3 nodes have no module; the others: 1,200 captured at export, 1 fused from several modules"
    )
    assert tag_lines(None) == ()
