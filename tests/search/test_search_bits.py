"""Bits as a size: those of formats, which can be narrower than the types in the file."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import htp_export
from htp_export.command.main import main
from tests.nets import spread

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
        assert trial.values["bits"] == 650 * widths[first] + 33 * widths[last]
    best = [trial.values["bits"] for trial in search.pareto]
    assert min(best) == 683 * 4
    assert max(best) == 683 * 16


def test_the_command_has_the_objective(file, tmp_path, capsys):
    np.savez(tmp_path / "x.npz", **{str(htp_export.load(file).model.graph.inputs[0].name): X})
    words = ["search", str(file), "--choices", "fixed:8.4,fixed:4.2", "--objectives", "error,bits"]
    assert main([*words, "--data", str(tmp_path / "x.npz"), "--trials", "4"]) == 0
    assert "bits" in capsys.readouterr().out
