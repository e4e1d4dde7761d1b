"""quantize with NNCF as the engine: only the chosen modules change, and what it makes is run before it is believed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import htp_export
from htp_export.errors import InputError, ToolError
from tests.nets import EXPORTERS
from tests.test_quantize import IDS, Net, assert_others_are_the_same, assert_tagged, outputs, written

INT8 = {"precision": "int8", "engine": "nncf"}


@pytest.fixture(scope="module", params=EXPORTERS)
def net(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("net") / "net.onnx"
    torch.manual_seed(0)
    return written(Net(), (torch.from_numpy(IDS),), file, request.param, ["ids"])


@pytest.fixture
def nncf() -> Any:
    return pytest.importorskip("nncf")


def initializers(file: Path, owner: str) -> dict[str, np.ndarray]:
    """The weights that the nodes of a module read, by name."""
    tagged = htp_export.load(file)
    read = {value for node in tagged.nodes if owner in tagged.owners_of(node) for value in node.inputs if value}
    return {str(value.name): value.const_value.numpy() for value in read if value.const_value is not None}


def error(before: Path, after: Path) -> float:
    [expected], [found] = outputs(before, {"ids": IDS}), outputs(after, {"ids": IDS})
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("fields", [{}, {"symmetric": True, "per_channel": False}, {"reduce_range": True}])
@pytest.mark.parametrize("chosen", [".", "second", "class:Linear"])
def test_exactly_the_chosen_modules_change(
    net: Path, fields: dict[str, Any], chosen: str, nncf: Any, tmp_path: Path
) -> None:
    file = tmp_path / "quantized.onnx"
    plan = {chosen: INT8 | fields}
    result = htp_export.quantize(net, plan, file, data={"ids": IDS})
    assert_others_are_the_same(net, file, chosen)
    assert_tagged(net, file, chosen)
    onnx.checker.check_model(str(file))
    assert 0 < error(net, file) < 0.03
    kinds = [node.op_type for node in onnx.load(file).graph.node]
    weights = {".": 4, "second": 1, "class:Linear": 3}[chosen]
    assert kinds.count("DequantizeLinear") == weights + kinds.count("QuantizeLinear")
    predicted = htp_export.quantize(net, plan, dry_run=True)
    assert {path: module.bytes_after for path, module in predicted.modules.items()} == {
        path: module.bytes_after for path, module in result.modules.items()
    }
    assert result.notes == ()


def test_smooth_quant_scales_what_the_chosen_products_read(net: Path, nncf: Any, tmp_path: Path) -> None:
    file = tmp_path / "quantized.onnx"
    htp_export.quantize(net, {"second": INT8 | {"smooth_quant": True}}, file, data={"ids": IDS})
    assert_others_are_the_same(net, file, "second")
    assert_tagged(net, file, "second")
    tagged = htp_export.load(file)
    kinds = [node.op_type for node in tagged.nodes if "second" in tagged.owners_of(node)]
    assert kinds == ["Mul", "QuantizeLinear", "DequantizeLinear", "DequantizeLinear", "MatMul"]
    assert error(net, file) < 0.03


def test_bias_correction_changes_the_biases_of_the_chosen_modules(net: Path, nncf: Any, tmp_path: Path) -> None:
    files = {corrected: tmp_path / f"{corrected}.onnx" for corrected in (False, True)}
    for corrected, file in files.items():
        htp_export.quantize(net, {"first": INT8 | {"bias_correction": corrected}}, file, data={"ids": IDS})
        assert_others_are_the_same(net, file, "first")
        assert_tagged(net, file, "first")

    vectors = {
        corrected: [a for a in initializers(file, "first").values() if a.shape == (48,) and a.dtype == np.float32]
        for corrected, file in files.items()
    }
    before = [array for array in initializers(net, "first").values() if array.shape == (48,)]
    assert len(before) == 1
    assert any(np.array_equal(before[0], array) for array in vectors[False])
    assert not any(np.array_equal(before[0], array) for array in vectors[True])
    assert any(np.abs(before[0] - array).max() < 0.05 for array in vectors[True])


def test_two_engines_share_a_plan(net: Path, nncf: Any, tmp_path: Path) -> None:
    file = tmp_path / "quantized.onnx"
    result = htp_export.quantize(net, {".": "fp16", "first": INT8, "second": "int8"}, file, data={"ids": IDS})
    assert_tagged(net, file, ".")
    assert result.modules["first"].precision == result.modules["second"].precision == "int8"
    assert result.operators["int8"] == {"MatMul": 2, "Add": 1}
    assert error(net, file) < 0.03


def test_values_that_fill_masks_are_not_divided_into_steps(nncf: Any, tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = nn.Linear(16, 16)
            self.position = nn.Parameter(torch.zeros(5, 5))

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (self.query(x) @ x.transpose(1, 2) + (self.position + mask)).softmax(-1)

    torch.manual_seed(0)
    x, mask = torch.randn(2, 5, 16), torch.zeros(2, 5, 5)
    mask[:, :, 3:] = torch.finfo(torch.float32).min
    before = written(Masked(), (x, mask), tmp_path / "net.onnx", "dynamo", ["x", "mask"])
    feed = {"x": x.numpy(), "mask": mask.numpy()}
    result = htp_export.quantize(before, {".": INT8}, tmp_path / "after.onnx", data=feed)
    [expected], [found] = outputs(before, feed), outputs(tmp_path / "after.onnx", feed)
    assert np.abs(expected - found).max() < 0.05
    assert len(result.notes) == 1
    assert result.notes[0].startswith("2 nodes stay in fp32: NNCF leaves them, or values")


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("smooth_quant", [False, True])
def test_a_transformer_runs_close_to_what_it_was(exporter: str, smooth_quant: bool, nncf: Any, tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=99)
    torch.manual_seed(0)
    ids, mask = torch.arange(16).reshape(2, 8), torch.ones(2, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    before = written(BertModel(config), (ids, mask), tmp_path / "bert.onnx", exporter, ["input_ids", "attention_mask"])
    after = tmp_path / "after.onnx"
    names = [value.name for value in onnx.load(before).graph.input]
    feed = dict(zip(names, (ids.numpy(), mask.numpy()), strict=True))
    plan = {"encoder": INT8 | {"smooth_quant": smooth_quant, "bias_correction": True}}
    htp_export.quantize(before, plan, after, data=feed)
    assert_others_are_the_same(before, after, "encoder")
    assert_tagged(before, after, "encoder")
    for expected, found in zip(outputs(before, feed), outputs(after, feed), strict=True):
        assert np.abs(expected - found).max() < 0.1 * np.abs(expected).max()


class TestWhatNncfMakes:
    """It is loaded and run before it is believed, and no file is written if it is wrong."""

    def refused(self, net: Path, made: Any, nncf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        quantize = nncf.quantize
        monkeypatch.setattr(nncf, "quantize", lambda *given, **options: made(quantize(*given, **options)))
        with pytest.raises(ToolError) as caught:
            htp_export.quantize(net, {"second": INT8}, tmp_path / "no.onnx", data={"ids": IDS})
        assert caught.value.tool == "nncf"
        assert not (tmp_path / "no.onnx").exists()
        return str(caught.value)

    def test_without_an_opset_import(
        self, net: Path, nncf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def made(model: onnx.ModelProto) -> onnx.ModelProto:
            model.graph.node[-1].domain = "com.microsoft"
            return model

        said = self.refused(net, made, nncf, tmp_path, monkeypatch)
        assert said.startswith("nncf made an invalid model: ValidationError: No opset import for domain")

    def test_that_does_not_run(self, net: Path, nncf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def made(model: onnx.ModelProto) -> onnx.ModelProto:
            weight = next(tensor for tensor in model.graph.initializer if list(tensor.dims) == [48, 40])
            weight.CopyFrom(onnx.numpy_helper.from_array(np.ones((47, 40), np.int8), weight.name))
            return model

        assert "nncf made an invalid model: OnnxRuntimeError" in self.refused(net, made, nncf, tmp_path, monkeypatch)

    def test_that_is_not_finite(self, net: Path, nncf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def made(model: onnx.ModelProto) -> onnx.ModelProto:
            for tensor in model.graph.initializer:
                if tensor.data_type == onnx.TensorProto.FLOAT:
                    values = np.full(tuple(tensor.dims), np.inf, np.float32)
                    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
            return model

        assert self.refused(net, made, nncf, tmp_path, monkeypatch).endswith("is not finite")

    def test_nothing_because_it_fails(
        self, net: Path, nncf: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def made(model: onnx.ModelProto) -> onnx.ModelProto:
            raise RuntimeError("no such operator")

        said = self.refused(net, made, nncf, tmp_path, monkeypatch)
        assert said == "nncf failed on the modules of 'int8': RuntimeError: no such operator"


def test_it_prints_and_logs_nothing(net: Path, nncf: Any, capfd: pytest.CaptureFixture[str]) -> None:
    htp_export.quantize(net, {"second": INT8}, data={"ids": IDS})
    assert capfd.readouterr() == ("", "")


def test_without_the_extra_the_command_that_installs_it_is_said(net: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(InputError, match=r'pip install "htp-export\[nncf\]"'):
        htp_export.quantize(net, {"second": INT8}, data={"ids": IDS})


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ({"precision": "int4", "engine": "nncf"}, "the engine 'nncf' has int8 with the method static alone"),
        ({"precision": "uint8", "engine": "nncf"}, "the engine 'nncf' has int8 with the method static alone"),
        (INT8 | {"calibration": "entropy"}, "with the engine 'nncf', calibration can be minmax"),
        (INT8 | {"bias_correction": "slow"}, "bias_correction is 'slow', and can be False, True"),
        ({"precision": "int8", "smooth_quant": True}, "smooth_quant and bias_correction are of the engine 'nncf'"),
        ({"precision": "int8", "engine": "tvm"}, "engine is 'tvm', and can be onnxruntime, nncf"),
    ],
)
def test_fields_that_do_not_go_together_are_refused(rule: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError) as caught:
        htp_export.quantize("no.onnx", {"second": rule})
    assert problem in str(caught.value)
