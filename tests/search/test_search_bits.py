"""Bits as a size: those of formats, which can be narrower than the types in the file."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import htp_export
from htp_export.command.main import main
from tests.nets import spread
from tests.quantized import tagged_graph

X = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    net = spread(nn.Sequential(nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 3)).eval())
    made = tmp_path_factory.mktemp("bits") / "net.onnx"
    htp_export.export(net, (torch.from_numpy(X),), made, verbose=False)
    return made


@pytest.mark.parametrize(
    ("precision", "bits"),
    [
        ("fp32", 650 * 32),
        # the bias has 16 bits, and the scales are scalars, which are no weights
        ("fixed:weight=6.2", 640 * 6 + 10 * 16),
        ("fixed:3.1", 650 * 3),
        # two blocks in each of ten rows, and the bias in fp32
        ("mxfp4", 640 * 4 + 20 * 8 + 10 * 32),
        ("mxfp6:format=e8m0", 640 * 6 + 20 * 8 + 10 * 32),
        ("mxint8", 640 * 8 + 20 * 8 + 10 * 32),
    ],
)
def test_cost_counts_the_bits_of_formats(precision, bits, file, tmp_path):
    made = tmp_path / "made.onnx"
    htp_export.quantize(file, {"0": precision, "2": "fixed:8.4"}, made)
    modules = htp_export.cost(made).modules
    assert modules["0"].weight_bits == bits
    assert modules["2"].weight_bits == 33 * 8
    assert modules[""].weight_bits == bits + 33 * 8


def test_cost_counts_the_bits_of_types_elsewhere(file):
    facts = htp_export.cost(file).modules[""]
    assert facts.weight_bits == facts.weight_bytes * 8 == 683 * 32


def moved(first: int, last: int) -> dict[str, int]:
    """Module → bits that it reads and writes, with inputs of two layers of such widths."""
    return {
        "0": 4 * 64 * first + 4 * 10 * 32,
        "1": 4 * 10 * 32 + 4 * 10 * last,
        "2": 4 * 10 * last + 4 * 3 * 32,
    }


@pytest.mark.parametrize(
    ("plan", "widths", "others"),
    [
        (None, (32, 32), {}),
        ({"0": "fixed:data=6.2", "2": "fixed:data=3.1"}, (6, 3), {}),
        # the parts that stay are in fp32
        ({"0": "fixed:data=float32:weight=4.2:bias=8.4"}, (32, 32), {}),
        # what int8 quantizes it also returns in 8 bits
        ({"0": "fixed:16.8", "2": "int8"}, (16, 8), {"2": 4 * 10 * 8 + 4 * 3 * 8}),
        ("u8s8", (8, 8), {"0": 8 * 4 * 74, "1": 8 * 4 * 20, "2": 8 * 4 * 13}),
        ("mxfp4", (32, 32), {}),
    ],
)
def test_cost_counts_the_bits_that_activations_move(plan, widths, others, file, tmp_path):
    made = file
    if plan is not None:
        made = tmp_path / "made.onnx"
        htp_export.quantize(file, plan, made, data={"input": X})
    modules = htp_export.cost(made).modules
    expected = {**moved(*widths), **others}
    assert {path: modules[path].moved_bits for path in expected} == expected
    assert modules[""].moved_bits == sum(expected.values())
    assert modules[""].self_moved_bits == 0


def test_a_tensor_is_written_in_the_widest_format_that_a_consumer_needs():
    text = """g (float[2,4] x) => (float[2,3] y, float[2,3] z, float[2,4] w) {
        r = Relu(x) y = MatMul(r, a) z = MatMul(r, a) s = Reshape(r, shape) w = Neg(s) }"""
    weight, shape = np.ones((4, 3), np.float32), np.int64([2, 4])
    graph = tagged_graph(text, 21, a=weight, shape=shape)
    bits = {}
    for plan in ({"y": "fixed:data=6.2", "z": "fixed:data=3.1"}, {"y": "fixed:8.4", "w": "fp32"}):
        modules = htp_export.cost(htp_export.quantize(graph, plan).tagged).modules
        bits[plan["y"]] = [modules[path].moved_bits - 8 * 32 for path in ("r",)]
    # Neg reads floats: Relu writes them
    assert bits == {"fixed:data=6.2": [8 * 32], "fixed:8.4": [8 * 32]}
    text = text.replace(", float[2,4] w", "").replace("s = Reshape(r, shape) w = Neg(s)", "")
    narrow = htp_export.quantize(
        tagged_graph(text, 21, a=weight), {"y": "fixed:data=6.2", "z": "fixed:data=3.1"}
    )
    assert htp_export.cost(narrow.tagged).modules["r"].moved_bits == 8 * 32 + 8 * 6


def test_a_relu6_before_a_rounding_moves_what_it_reads_and_writes():
    """Its bounds are no ends of a format."""
    text = """g (float[2,4] x) => (float[2,3] y) {
        r = Relu(x) c = Clip(r, low, high) y = MatMul(c, a) }"""
    constants = {"low": np.float32(0), "high": np.float32(6), "a": np.ones((4, 3), np.float32)}
    model = htp_export.quantize(tagged_graph(text, 21, **constants), {"y": "fixed:data=6.2"})
    modules = htp_export.cost(model.tagged).modules
    assert modules["c"].moved_bits == 8 * 32 + 8 * 6
    assert modules["y"].moved_bits == 8 * 6 + 6 * 32


def test_the_table_has_both_columns_of_a_quantized_model(file, tmp_path, capsys):
    htp_export.quantize(file, "fixed:8.4", made := tmp_path / "made.onnx")
    assert {"weight_bits", "moved_bits"} <= {column.name for column in htp_export.cost(made).drawn}
    assert "moved_bits" not in {column.name for column in htp_export.cost(file).drawn}
    assert main(["cost", str(made), "--json"]) == 0
    module = json.loads(capsys.readouterr().out)["modules"]["0"]
    assert (module["weight_bits"], module["moved_bits"]) == (650 * 8, moved(8, 8)["0"])
    assert main(["cost", str(made), "--columns", "moved_bits,weight_bits"]) == 0
    assert "moved bits" in capsys.readouterr().out


def test_search_has_bits_as_an_objective(file):
    choices = ["fixed:16.12", "fixed:8.6", "fixed:4.2"]
    search = htp_export.search(
        file,
        {"0": choices, "2": choices},
        objectives=("error", "bits"),
        data={"input": X},
        trials=9,
    )
    assert len(search.trials) >= 9
    widths = {"fixed:16.12": 16, "fixed:8.6": 8, "fixed:4.2": 4}
    for trial in search.trials:
        # a plan of one precision has one rule
        first, last = (trial.plan.get(path) or trial.plan["."] for path in ("0", "2"))
        stored = 650 * widths[first] + 33 * widths[last]
        moves = sum(moved(widths[first], widths[last]).values())
        assert trial.values["bits"] == stored + moves
        assert (trial.measured["weight_bits"], trial.measured["moved_bits"]) == (stored, moves)
    best = [trial.values["bits"] for trial in search.pareto]
    assert min(best) == 683 * 4 + sum(moved(4, 4).values())
    assert max(best) == 683 * 16 + sum(moved(16, 16).values())


def test_the_command_has_the_objective(file, tmp_path, capsys):
    np.savez(tmp_path / "x.npz", **{str(htp_export.load(file).model.graph.inputs[0].name): X})
    words = ["search", str(file), "--choices", "fixed:8.4,fixed:4.2", "--objectives", "error,bits"]
    assert main([*words, "--data", str(tmp_path / "x.npz"), "--trials", "4"]) == 0
    assert "bits" in capsys.readouterr().out
