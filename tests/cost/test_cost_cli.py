"""``cost`` and ``tree`` in the terminal, and the rows of the module tree."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from rich.console import Console

import htp_export
from htp_export.command.main import main
from htp_export.costs.drawing import render
from htp_export.costs.result import ModuleRow, ModuleTree, tree_rows
from htp_export.errors import InputError, SelectorError
from htp_export.model.module_facts import visible
from htp_export.model.tagged import load
from htp_export.reporting.columns import csv_text
from tests.handmade import encoder

KNOWN = "every node has a module: 6 captured at export, 1 shared by several modules"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "model.onnx"
    load(encoder()).save(made)
    return made


@pytest.fixture
def open_file(tmp_path: Path) -> Path:
    """The same with a size that is left open."""
    made = encoder()
    made.graph.inputs[0].shape = ir.Shape(["batch", 4])
    for node in made.graph:
        if node.op_type != "Transpose":
            node.outputs[0].shape = None
    path = tmp_path / "open.onnx"
    load(made).save(path)
    return path


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_cost_draws_the_tree_and_says_the_peak_and_the_rest_in_words(file, capsys):
    assert main(["cost", str(file), "--columns", "nodes,parameters,flops,other_flops"]) == 0
    assert lines(capsys)[:7] == [
        "module        nodes   parameters   FLOPs   other",
        "(root)            7           32     128      32",
        "├── layer.0       4           16      64      16",
        "│   └── fc        2           16      64       0",
        "├── layer.1       3           16      64      16",
        "│   └── fc        1           16      64       0",
        "└── dropout       0            0       0       0",
    ]
    assert main(["cost", str(file), "--fused", "--depth", "1"]) == 0
    text = "\n".join(lines(capsys))
    assert "128 FLOPs (2 for each multiply-add of matrix products), 32 other operations" in text
    assert "bytes of activations at the peak, at 'node_" in text
    assert "saved" in text.splitlines()[0]
    assert "an estimate" in text


def test_cost_takes_open_sizes_as_numbers_shapes_or_values_and_else_says_that_they_are_1(
    open_file, tmp_path, capsys
):
    assert main(["cost", str(open_file)]) == 0
    assert "size 'batch' is 1" in lines(capsys)
    assert main(["cost", str(open_file), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["modules"][""]["flops"], data["dims"], data["assumed"]) == (
        64,
        {"batch": 1},
        ["size 'batch' is 1"],
    )
    (tmp_path / "shapes.json").write_text('{"x": [2, 4]}')
    np.savez(tmp_path / "values.npz", x=np.zeros((2, 4), np.float32))
    for given in (
        ["--dims", "batch=2"],
        ["--shapes", f"{tmp_path}/shapes.json"],
        ["--data", f"{tmp_path}/values.npz"],
    ):
        assert main(["cost", str(open_file), "--json", *given]) == 0
        data = json.loads(capsys.readouterr().out)
        assert (data["modules"][""]["flops"], data["dims"], data["assumed"]) == (
            128,
            {"batch": 2},
            [],
        )


def test_cost_as_csv_has_every_module_and_column_and_nodes_if_asked(file, capsys):
    assert main(["cost", str(file), "--csv"]) == 0
    rows = {row["module"]: row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    assert list(rows) == ["", "layer", "layer.0", "layer.0.fc", "layer.1", "layer.1.fc", "dropout"]
    assert (rows["layer.0"]["flops"], rows["layer.0"]["self_flops"]) == ("64", "0")
    assert main(["cost", str(file), "--csv", "--nodes"]) == 0
    nodes = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert (nodes[2]["name"], nodes[2]["flops"], nodes[2]["shapes"], nodes[0]["owners"]) == (
        "node_fc0", "64", "2x4", "layer.0 layer.1",
    )  # fmt: skip


def test_times_and_errors_of_other_commands_are_columns(file, tmp_path, capsys):
    times = {"": {"total_ms": 3.0, "self_ms": 0.5}, "layer.0": {"total_ms": 2.0, "self_ms": 1.0}}
    errors = {
        "": {"max_abs": "nan", "status": "inherits"},
        "layer.0": {"max_abs": 0.25, "status": "differs"},
    }
    (tmp_path / "profile.json").write_text(json.dumps({"modules": times}))
    (tmp_path / "verify.json").write_text(json.dumps({"modules": errors}))
    given = ["--profile", f"{tmp_path}/profile.json", "--verify", f"{tmp_path}/verify.json"]
    assert (
        main(["tree", str(file), "--depth", "1", "--columns", "time,own_time,error,status", *given])
        == 0
    )
    assert lines(capsys) == [
        "module        time ms   own time ms     error   status",
        "(root)          3.000         0.500       nan   inherits",
        "├── layer.0     2.000         1.000   2.5e-01   differs",
        "├── layer.1",
        "└── dropout",
        KNOWN,
    ]
    assert main(["tree", str(file), "--csv", "--sort", "error", "--columns", "error", *given]) == 0
    assert lines(capsys)[:3] == ["module,error", ",nan", "layer.0,0.25"]
    assert main(["tree", str(file), "--json", *given]) == 0
    data = json.loads(capsys.readouterr().out)["modules"]
    assert (data[""]["error"], data["layer.0"]["time_ms"], "error" in data["layer.1"]) == (
        "nan",
        2.0,
        False,
    )


def row(
    path: str, class_name: str = "net.Block", calls: int = 1, nodes: int = 2, **facts: Any
) -> ModuleRow:
    given = {"fate": "computed", "self_nodes": nodes, "parameters": 1000, **facts}
    return ModuleRow(path, class_name, calls, nodes=nodes, **given)


def drawn(tree: ModuleTree, width: int = 100, fold: bool = True) -> list[str]:
    stream = io.StringIO()
    Console(file=stream, width=width).print(render(tree, fold=fold))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


def test_alike_layers_are_one_line_with_their_mean_time_and_largest_error_unless_one_is_wrong():
    numbers = {"parameters": 1_000_000, "flops": 2_000_000}
    layers = [row(f"layer.{k}", time_ms=1.0 + k, error=0.1 * k, **numbers) for k in range(3)]
    found = drawn(ModuleTree((row(""), *layers)))
    assert found[2].startswith("└── layer.0 … layer.2 × 3   Block")  # noqa: RUF001 - "times"
    assert found[2].split()[-5:] == ["1,000,000", "2.000", "M", "2.000", "2.0e-01"]
    wrong = replace(layers[2], status="differs")
    assert len(drawn(ModuleTree((row(""), *layers[:2], wrong)))) == 4


def test_a_narrow_terminal_shows_what_matters_most_and_says_what_it_left_out():
    tree = ModuleTree(
        (row("", time_ms=1.0), row("a_module_with_a_name_that_is_far_too_long", time_ms=1.0))
    )
    assert max(map(len, drawn(tree, 40))) <= 40
    assert drawn(tree, 40)[0].split() == ["module", "time", "ms"]
    text = " ".join(drawn(tree, 40))
    assert "too narrow for:" in text
    assert "…" in text
    assert "too narrow" not in " ".join(drawn(tree, 120))


def test_colours_are_off_where_nobody_wants_them(file, monkeypatch):
    tree = tree_rows(load(file), measured={"": {"status": "differs"}})

    def text() -> str:
        stream = io.StringIO()
        Console(file=stream, force_terminal=True, width=100).print(render(tree))
        return stream.getvalue()

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[36m" in text()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[36m" not in text()


def test_tied_parameters_are_marked_and_counted_once(tmp_path, capsys):
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 4, bias=False), torch.nn.Tanh(), torch.nn.Linear(4, 4)
    ).eval()
    net[2].weight = net[0].weight
    htp_export.export(net, (torch.randn(1, 4),), tmp_path / "tied.onnx", verbose=False)
    assert main(["cost", str(tmp_path / "tied.onnx")]) == 0
    shown = lines(capsys)
    assert shown[0].split()[-1] == "tied"
    assert shown[1].split()[:4] == ["(root)", "Sequential", "3", "20"]
    assert "tied, and counted once in modules that hold several of these: 0.weight (0, 2)" in shown
    assert main(["cost", str(tmp_path / "tied.onnx"), "--sort", "parameters"]) == 0
    rows = {
        line.split()[0]: line.split("  ")[-1].strip() for line in lines(capsys)[:6] if line.strip()
    }
    assert (rows["0"], rows["2"]) == ("with 2", "counted in 0")


def test_the_tree_has_flops_where_sizes_are_known(file, open_file, capsys):
    assert main(["tree", str(file), "--depth", "0"]) == 0
    assert lines(capsys) == [
        "module   class   nodes   parameters   FLOPs   fate",
        "(root)   Net         7           32     128",
        KNOWN,
    ]
    assert main(["tree", str(open_file), "--depth", "0"]) == 0
    assert lines(capsys) == [
        "module   class   nodes   parameters   FLOPs   fate",
        "(root)   Net         7           32      64",
        KNOWN,
        "size 'batch' is 1",
    ]
    assert main(["tree", str(open_file), "--depth", "0", "--dims", "batch=2"]) == 0
    assert "128" in capsys.readouterr().out


# --- the module tree: its rows, and how they are drawn ---


def test_rows_count_nodes_and_parameters_per_module():
    tree = tree_rows(load(encoder()))
    counts = {row.path: (row.nodes, row.own_nodes, row.parameters) for row in tree.rows}
    assert counts == {
        "": (7, 1, 32),
        "layer": (6, 0, 32),
        "layer.0": (4, 2, 16),
        "layer.0.fc": (2, 2, 16),
        "layer.1": (3, 2, 16),
        "layer.1.fc": (1, 1, 16),
        "dropout": (0, 0, 0),
    }
    assert {row.path: row.fate for row in tree.rows}["dropout"] == "identity"


def test_depth_counts_modules_that_ran_and_not_their_containers():
    paths = [row.path for row in tree_rows(load(encoder()), depth=1).rows]
    assert paths == ["", "layer", "layer.0", "layer.1", "dropout"]
    assert [row.path for row in tree_rows(load(encoder()), depth=0).rows] == [""]
    with pytest.raises(InputError, match="depth"):
        tree_rows(load(encoder()), depth=-1)


def test_a_selection_shows_what_lies_above_it_too():
    paths = [row.path for row in tree_rows(load(encoder()), select="layer.1.fc").rows]
    assert paths == ["", "layer", "layer.1", "layer.1.fc"]
    with pytest.raises(SelectorError):
        tree_rows(load(encoder()), select="nowhere")


def test_depth_counts_from_what_is_selected():
    def shown(**options: Any) -> list[str]:
        return visible(load(encoder()), **options)

    assert shown(select="layer.1", depth=0) == ["", "layer", "layer.1"]
    assert shown(select="layer.1", depth=1) == ["", "layer", "layer.1", "layer.1.fc"]
    # the container is no level
    assert shown(select="layer.**", depth=0) == ["", "layer", "layer.0", "layer.1"]
    assert "layer.0" not in shown(select="layer.**,!layer.0", depth=3)
    assert shown(select=".", depth=1) == shown(depth=1)


def test_the_tree_prints_as_a_table_and_is_plain_data():
    tree = tree_rows(load(encoder()), select="dropout")
    assert str(tree).splitlines() == [
        "module   class    calls  fate      nodes  own nodes  parameters",
        "(root)   Net          1  computed      7          1          32",
        "dropout  Dropout      1  identity      0          0           0",
        "2 modules, 7 nodes, 32 parameters",
        "every node has a module: 6 captured at export, 1 shared by several modules",
    ]
    counts = {"calls": 1, "fate": "computed", "nodes": 7, "own_nodes": 1, "parameters": 32}
    nothing = {"calls": 1, "nodes": 0, "own_nodes": 0, "parameters": 0}
    assert tree.to_dict() == {
        "modules": {
            "": {**counts, "class_name": "net.Net"},
            "dropout": {
                **nothing,
                "class_name": "torch.nn.modules.dropout.Dropout",
                "fate": "identity",
            },
        },
        "tags": {
            "source": "htp",
            "reasons": {"scope": 6, "shared": 1},
            "untagged": 0,
            "lost": False,
        },
    }


def layers(count: int, nodes: int = 2) -> list[ModuleRow]:
    return [
        module
        for k in range(count)
        for module in (row(f"layer.{k}", nodes=nodes), row(f"layer.{k}.fc", "net.Fc", nodes=nodes))
    ]


def test_equal_layers_are_drawn_once_and_the_container_before_their_name():
    tree = ModuleTree(
        (
            row("", "net.Net"),
            row("layer", "ModuleList", 0, fate="uncalled"),
            *layers(12),
            row("head"),
        )
    )
    assert drawn(tree) == [
        "module                        class   nodes   parameters   fate",
        "(root)                        Net         2        1,000",
        "├── layer.0 … layer.11 × 12   Block       2        1,000",  # noqa: RUF001 - "times"
        "│   └── fc                    Fc          2        1,000",
        "└── head                      Block       2        1,000",
    ]


def test_a_layer_that_differs_anywhere_below_is_not_folded():
    different = [row("layer.3"), row("layer.3.fc", "net.Fc", nodes=3)]
    tree = ModuleTree(
        (row(""), row("layer", "ModuleList", 0), *layers(3), *different, row("layer.5"))
    )
    names = [line.strip("│├└─ ").split("  ")[0] for line in drawn(tree) if "layer." in line]
    assert names == ["layer.0 … layer.2 × 3", "layer.3", "layer.5"]  # noqa: RUF001 - "times"


def test_a_module_that_never_ran_keeps_its_line_above_what_it_holds():
    tree = ModuleTree(
        (row(""), row("unused", calls=0, nodes=0), row("unused.fc", calls=0, nodes=0))
    )
    assert [line.split("   Block")[0].rstrip() for line in drawn(tree)[2:]] == [
        "└── unused",
        "    └── fc",
    ]


@pytest.mark.parametrize(
    "result", [htp_export.cost(encoder()), tree_rows(load(encoder()))], ids=["cost", "tree"]
)
def test_json_csv_and_data_frames_have_the_same_columns(result):
    heads = csv_text(result.columns, result.listed).splitlines()[0].split(",")
    numbers = {
        name
        for row in result.to_dict()["modules"].values()
        for name, value in row.items()
        if isinstance(value, str | int | float)
    }
    assert numbers <= set(heads)
    assert set(result.to_pandas().columns) <= set(heads)
    assert {"class_name", "nodes", "parameters"} <= numbers
