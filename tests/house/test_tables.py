"""The tables of attention.md, tool_tables.md, optimize.md and passes.md hold what is measured: numbers with -m slow."""

import itertools
from pathlib import Path

import onnx
import pytest
import torch

import htp_export
from htp_export.capabilities.optimize.registry import LEVELS
from tests.truth import nodes_of
from tools import attention_table, compare_models, tool_table

DOCS = Path(__file__).parents[2] / "docs"
EXPORTERS = {"TorchScript": "torchscript", "dynamo": "dynamo"}
ATTENTION = "| | operations | ratio | in attention | ratio | traffic saved by fusing | difference |"
NODES = "| | exported | exact | tolerant | best other | fused | ORT fusions |"


def table(page: str, header: str, title: str = "") -> dict[str, list[str]]:
    """The table of a page under a header, and a title before it: first cell → the others."""
    lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
    start = lines.index(header, lines.index(title) if title else 0)
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {first: rest for first, *rest in cells}


def number(cell: str) -> int:
    return int(cell.strip("*").split(",")[0])


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_the_tables_of_tools_have_a_row_for_each(exporter):
    rows = table("tool_tables.md", tool_table.header(tool_table.MODELS), tool_table.title(exporter))
    assert list(rows) == ["(exported)", *tool_table.ROWS]
    assert {len(row) for row in rows.values()} == {len(tool_table.MODELS)}
    assert {row.tool for row in tool_table.ROWS.values()} == set(htp_export.tools.__all__)


def test_the_table_of_levels_has_a_row_for_each():
    assert list(table("optimize.md", "| level | outputs | tolerance of `verify` |")) == [
        f"`{level}`" for level in LEVELS
    ]


def test_the_table_of_nodes_has_a_row_for_each_model_and_marks_what_is_fewer():
    rows = table("passes.md", NODES)
    models = (*compare_models.MODELS, *compare_models.FURTHER)
    assert list(rows) == [f"{model}, {exporter}" for model in models for exporter in EXPORTERS]
    for name, (exported, *levels) in rows.items():
        exact, tolerant, other, fused, fusions = map(number, levels)
        assert number(exported) >= exact >= tolerant >= fused, name
        assert (levels[1].startswith("**"), levels[3].startswith("**")) == (
            tolerant < other,
            fused < fusions,
        ), name


def test_the_table_of_attention_has_a_row_for_each_model_without_a_difference():
    rows = table("attention.md", ATTENTION)
    assert list(rows) == list(attention_table.MODELS)
    for name, (operations, ratio, in_attention, its_ratio, _, differences) in rows.items():
        counts = [tuple(map(int, cell.split(" → "))) for cell in (operations, in_attention)]
        assert [f"{counts[0][1] / counts[0][0]:.2f}", f"{counts[1][1] / counts[1][0]:.1f}"] == [
            ratio,
            its_ratio,
        ], name
        # what is not in attention is the same
        (one, steps), (calls, in_steps) = counts
        assert steps - one == in_steps - calls, name
        assert set(differences.split(", ")) == {"0"}, name


@pytest.mark.slow
def test_the_table_of_attention_has_the_numbers_that_are_measured():
    assert attention_table.row("ViT-B/16") == [
        "ViT-B/16",
        *table("attention.md", ATTENTION)["ViT-B/16"],
    ]


# The numbers of the newest releases of the tools: another release may make others, which are then to be written down.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model", "exporter"), [("bert", "dynamo"), ("vit", "torchscript")])
def test_the_tables_of_tools_have_the_numbers_that_are_measured(model, exporter, tmp_path):
    rows = table("tool_tables.md", tool_table.header(tool_table.MODELS), tool_table.title(exporter))
    at = list(tool_table.MODELS).index(model)
    assert list(tool_table.cells(model, exporter, tool_table.ROWS, tmp_path)) == [
        row[at] for row in rows.values()
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("model", ["BERT-base", "Whisper-tiny encoder", "ResNet-50"])
def test_the_table_of_nodes_has_the_numbers_that_are_measured(model, exporter, tmp_path):
    source = tmp_path / "model.onnx"
    torch.manual_seed(0)
    compare_models.export(model, EXPORTERS[exporter], "narrow", str(source))
    found = [len(nodes_of(onnx.load(str(source))))]
    for level in LEVELS:
        htp_export.optimize(source, tmp_path / "out.onnx", level=level)
        found.append(len(nodes_of(onnx.load(str(tmp_path / "out.onnx")))))
    exported, exact, tolerant, _, fused, _ = map(
        number, table("passes.md", NODES)[f"{model}, {exporter}"]
    )
    assert found == [exported, exact, tolerant, fused]
