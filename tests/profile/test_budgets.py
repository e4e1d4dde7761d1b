"""Budgets of modules: which hold, what is over, and the exit status; times are those of a file, not of this machine."""

from __future__ import annotations

import json
from pathlib import Path

import onnx_ir as ir
import pytest

import htp_export
from htp_export.command.main import main
from htp_export.errors import InputError
from tests.plugins.test_tensorrt import NODES, model, times

MS = dict(zip((name for name, _ in NODES.values()), (4.0, 1.0, 1.0, 2.0, 1.0, 0.0, 6.0, 2.0, 3.0), strict=True))
MEASURED = ["--engine", "tensorrt", "--measured", "layers.json", "--measured", "times.json"]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose modules take 20 ms: block 9 (conv1 4, act 2, conv2 2), fc 6, head 5."""
    monkeypatch.chdir(tmp_path)
    ir.save(model(), "net.onnx")
    Path("layers.json").write_text(json.dumps({"Layers": list(MS), "Bindings": ["x", "y"]}), encoding="utf-8")
    Path("times.json").write_text(json.dumps(times(**MS)), encoding="utf-8")


def profile() -> htp_export.results.Profile:
    return htp_export.profile("net.onnx", engine="tensorrt", measured=("layers.json", "times.json"))


@pytest.mark.parametrize(
    ("budgets", "over"),
    [
        ({"**": 20}, {}),
        ({".": 19.5, "fc": "6 ms"}, {"": 19.5}),
        ({"block.*": "2ms"}, {"block.conv1": 2}),
        ({"fc": "25%", "head": "25%"}, {"fc": 5}),
        ({"block.*": 2, "block.conv1": 4}, {}),
        ({"block.conv1": 4, "block.*": 2}, {"block.conv1": 2}),
        ({"class:*,!block.*": 0, "fc,block": "100ms"}, {"": 0, "head": 0}),
        ({"fc": "1us", "head": "1 µs", "block": "10s"}, {"fc": 0.001, "head": 0.001}),
        ({}, {}),
    ],
)  # fmt: skip
def test_modules_that_take_longer_than_their_budget(budgets, over):
    assert profile().over(budgets) == over


@pytest.mark.parametrize("budget", ["5", "5 seconds", "-1ms", "100%", "", -1.0, float("nan")])
def test_a_budget_is_a_time_or_a_share(budget):
    with pytest.raises(InputError, match=r"budget .* of 'fc': write a time or a share below 100 %, such as 5ms or 20%"):
        profile().over({"fc": budget})


def test_the_command_ends_with_status_1_if_a_module_is_over_and_names_it(capsys):
    assert main(["profile", "net.onnx", *MEASURED, "--budget", "block.*=4ms", "--budget", "fc=30%"]) == 0
    assert main(["profile", "net.onnx", *MEASURED, "--budget", "block.*=4ms", "--budget", "fc=29%"]) == 1
    shown = capsys.readouterr()
    assert shown.err.endswith("htp-export: error: over budget: fc takes 6.000 of 5.800 ms\n")
    assert "block" in shown.out


def test_json_has_what_is_over_if_there_are_budgets(capsys):
    assert main(["profile", "net.onnx", *MEASURED, "--json", "--budget", ".=1ms"]) == 1
    assert json.loads(capsys.readouterr().out)["over_budget"] == {"": 1}
    assert main(["profile", "net.onnx", *MEASURED, "--json"]) == 0
    assert "over_budget" not in json.loads(capsys.readouterr().out)
