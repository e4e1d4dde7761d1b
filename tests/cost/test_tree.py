"""The module tree of a file: its rows, and how they are drawn."""

import io
from typing import Any

import pytest
from rich.console import Console

import htp_export
from htp_export.capabilities.cost.drawing import render
from htp_export.capabilities.cost.result import ModuleRow, ModuleTree, tree_rows
from htp_export.errors import InputError, SelectorError
from htp_export.model.module_facts import visible
from htp_export.model.tagged import load
from htp_export.results.columns import csv_text
from tests.handmade import encoder


def drawn(tree: ModuleTree, *, fold: bool = True) -> list[str]:
    """The lines that come out of a pipe."""
    stream = io.StringIO()
    Console(file=stream, width=100).print(render(tree, fold=fold))
    return [line.rstrip() for line in stream.getvalue().splitlines()]


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
    assert shown(select="layer.**", depth=0) == ["", "layer", "layer.0", "layer.1"]  # the container is no level
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
            "dropout": {**nothing, "class_name": "torch.nn.modules.dropout.Dropout", "fate": "identity"},
        },
        "tags": {"source": "htp", "reasons": {"scope": 6, "shared": 1}, "untagged": 0, "lost": False},
    }


def row(path: str, class_name: str = "net.Block", calls: int = 1, nodes: int = 2, fate: str = "computed") -> ModuleRow:
    return ModuleRow(path, class_name, calls, fate, nodes=nodes, self_nodes=nodes, parameters=1000)


def layers(count: int, nodes: int = 2) -> list[ModuleRow]:
    return [
        module
        for k in range(count)
        for module in (row(f"layer.{k}", nodes=nodes), row(f"layer.{k}.fc", "net.Fc", nodes=nodes))
    ]


def test_equal_layers_are_drawn_once_and_the_container_before_their_name():
    tree = ModuleTree((row("", "net.Net"), row("layer", "ModuleList", 0, fate="uncalled"), *layers(12), row("head")))
    assert drawn(tree) == [
        "module                        class   nodes   parameters   fate",
        "(root)                        Net         2        1,000",
        "├── layer.0 … layer.11 × 12   Block       2        1,000",  # noqa: RUF001 - "times"
        "│   └── fc                    Fc          2        1,000",
        "└── head                      Block       2        1,000",
    ]


def test_a_layer_that_differs_anywhere_below_is_not_folded():
    different = [row("layer.3"), row("layer.3.fc", "net.Fc", nodes=3)]
    tree = ModuleTree((row(""), row("layer", "ModuleList", 0), *layers(3), *different, row("layer.5")))
    names = [line.strip("│├└─ ").split("  ")[0] for line in drawn(tree) if "layer." in line]
    assert names == ["layer.0 … layer.2 × 3", "layer.3", "layer.5"]  # noqa: RUF001 - "times"


def test_a_module_that_never_ran_keeps_its_line_above_what_it_holds():
    tree = ModuleTree((row(""), row("unused", calls=0, nodes=0), row("unused.fc", calls=0, nodes=0)))
    assert [line.split("   Block")[0].rstrip() for line in drawn(tree)[2:]] == ["└── unused", "    └── fc"]


@pytest.mark.parametrize("result", [htp_export.cost(encoder()), tree_rows(load(encoder()))], ids=["cost", "tree"])
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
