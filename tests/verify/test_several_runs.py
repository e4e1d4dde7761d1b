"""``compare`` and ``profile`` on several runs of data: worst and mean, module by module."""

import json

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.errors import ModelSourceError
from tests.exporting import BOTH
from tests.extract.test_cutting import exported_to
from tests.nets import Holding, spread, x


class Net(Holding, first=nn.Linear(8, 8), act=nn.ReLU(), second=nn.Linear(8, 3)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.act(self.first(x)))


def model_and_inputs():
    return Net().eval(), (x(2, 8),)


def runs():
    return [{"x": x(2, 8, seed=seed).numpy() * 10**seed} for seed in range(3)]


@pytest.fixture
def files(exporter, tmp_path):
    model = spread(Net()).eval()
    file = exported_to(tmp_path / "net.onnx", model, {"x": x(2, 8)}, exporter)
    htp_export.quantize(file, {"**": "fp16"}, tmp_path / "half.onnx")
    [name] = [value.name for value in onnx.load(file).graph.input]
    data = [{name: run["x"]} for run in runs()]
    return file, tmp_path / "half.onnx", data


@BOTH
class TestRuns:
    def test_a_module_has_its_worst_run_and_the_mean_of_all(self, files, exporter):
        first, second, data = files
        alone = [htp_export.compare(first, second, run) for run in data]
        together = htp_export.compare(first, second, data)
        assert together.runs == 3
        for path, row in together.modules.items():
            rows = [each.modules[path] for each in alone]
            assert row.max_abs == max(each.max_abs for each in rows)
            assert row.mean_max_abs == pytest.approx(np.mean([each.max_abs for each in rows]))
            assert row.mean_cosine == pytest.approx(np.mean([each.cosine for each in rows]))
        assert "the worst of 3 runs" in str(together)
        assert alone[0].runs == 1
        assert "mean_max_abs" not in alone[0].to_dict()["modules"][""]

    def test_one_wrong_run_is_enough_and_names_the_module(self, files, exporter):
        first, second, data = files
        [name] = data[0]
        large = {name: np.full((2, 8), 3e5, np.float32)}
        found = htp_export.compare(first, second, [data[0], large, data[1]])
        assert not found.ok
        assert found.first_wrong == htp_export.compare(first, second, large).first_wrong
        assert found.not_finite
        assert found.modules[found.first_wrong].status == "differs"

    def test_profile_has_the_mean_and_the_worst_of_several_inputs(self, files, exporter):
        file, _, data = files
        found = htp_export.profile(file, data, runs=3, warmup=1)
        assert found.runs == 9
        assert len(found.kernels) == len(htp_export.profile(file, data[0], runs=1).kernels)
        for row in found.modules.values():
            assert row.worst_ms >= row.total_ms
        assert found.kernels_ms == pytest.approx(found.modules[""].total_ms + found.unattributed_ms)
        assert "the mean of 3 inputs" in str(found)
        assert "worst_ms" in found.to_dict()["modules"][""]
        assert "worst_ms" not in htp_export.profile(file, data[0], runs=1).to_dict()["modules"][""]


def test_the_commands_take_a_factory_of_several_runs(tmp_path, capsys):
    file = exported_to(tmp_path / "net.onnx", spread(Net()).eval(), {"x": x(2, 8)}, "dynamo")
    data = ["--data", f"{__name__}:runs", "--json"]
    assert main(["compare", str(file), str(file), *data]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == 3
    assert main(["profile", str(file), "--runs", "2", *data]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == 6


@pytest.mark.long
@pytest.mark.parametrize("factory", ["model_and_inputs", "Net"])
def test_a_factory_that_returns_a_model_is_told_from_one_that_returns_data(factory, tmp_path):
    file = exported_to(tmp_path / "net.onnx", spread(Net()).eval(), {"x": x(2, 8)}, "dynamo")
    entry = f"{__name__}:{factory}"
    what = "a model" if factory == "Net" else r"\(model, example inputs\)"
    for use in (
        lambda: htp_export.compare(file, file, entry),
        lambda: htp_export.profile(file, entry),
        lambda: htp_export.quantize(file, {"**": "int8"}, data=entry),
        lambda: htp_export.cost(file, entry),
    ):
        with pytest.raises(
            ModelSourceError, match=f"returns {what}, as a factory for --entry does"
        ):
            use()
