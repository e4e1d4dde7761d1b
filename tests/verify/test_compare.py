"""Compare: two ONNX files of one model, module by module."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.errors import InputError
from tests import faults
from tests.exporting import exported
from tests.nets import EXPORTERS, Holding, spread, x


class Wide(Holding, first=nn.Linear(32, 32), norm=nn.LayerNorm(32), last=nn.Linear(32, 32)):
    """A linear, a norm and a linear that runs twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.last(self.norm(self.first(x)))))


def file_of(folder: Path, exporter: str = "torchscript", model: nn.Module | None = None, **options: Any) -> Path:
    folder.mkdir(exist_ok=True)
    exported(spread(model or Wide()).eval(), {"x": x(2, 32)}, exporter, folder, **options)
    return folder / "model.onnx"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same model from both exporters; not to be written to."""
    return [file_of(tmp_path_factory.mktemp(exporter), exporter) for exporter in EXPORTERS]


def test_the_files_of_both_exporters_agree_in_portions_too(files):
    inputs = {"x": x(2, 32).numpy()}
    result = htp_export.compare(*files, inputs)
    assert result.ok, str(result)
    assert [module.status for module in result.modules.values()] == ["agrees"] * 4
    assert [call.number for call in result.modules["last"].calls] == [0, 1]
    assert htp_export.compare(*reversed(files)).ok
    one, many = (htp_export.compare(*files, portion_bytes=size).to_dict() for size in (1 << 30, 1))
    assert one == many


def test_a_change_is_found_in_its_module(files):
    changed = htp_export.load(files[1])
    faults.weight_changed(changed, "norm")
    result = htp_export.compare(files[0], changed)
    assert not result.ok
    assert result.wrong == ("norm",)
    assert {path: module.status for path, module in result.modules.items()} == {
        "": "inherits",
        "first": "agrees",
        "norm": "differs",
        "last": "inherits",
    }


def test_random_inputs_follow_the_seed_and_the_sizes_asked_for(files, tmp_path):
    changed = htp_export.load(files[1])
    faults.weight_changed(changed, "norm")
    one, again, other = (htp_export.compare(files[1], changed, seed=seed).to_dict() for seed in (0, 0, 1))
    assert one == again != other
    dynamic = {"input_names": ["x"], "dynamic_axes": {"x": {0: "batch"}}}
    path = file_of(tmp_path, **dynamic)
    given = htp_export.compare(path, path, dims={"batch": 5})
    assert (given.ok, given.assumed) == (True, ())
    assumed = htp_export.compare(path, path)
    assert assumed.to_dict()["assumed"] == ["size 'batch' is 1"]
    assert "size 'batch' is 1" in str(assumed)
    with pytest.raises(InputError, match="no open dimension 'bacth' in this model, only 'batch'"):
        htp_export.compare(path, path, dims={"bacth": 5})


def in_half(path: Path, to: Path) -> Path:
    """Weights, inputs and outputs in half precision, as a converter does it."""
    model = onnx.load(path)
    for each in (*model.graph.input, *model.graph.output):
        each.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    for tensor in model.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype == np.float32:
            tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(np.float16), tensor.name))
    del model.graph.value_info[:]
    onnx.save(model, to)
    return to


def test_half_precision_is_compared_with_its_own_tolerance_and_a_note(files, tmp_path):
    half = in_half(files[1], tmp_path / "half.onnx")
    result = htp_export.compare(files[1], half)
    assert result.ok, str(result)
    assert result.modules["first"].differences[0].note == "float16 against float32, with the tolerance of float16"
    assert 0 < result.modules["first"].max_abs < 1e-2


def to_uint8(file, to):
    """Unsigned weights: products of signed ones saturate on processors without VNNI."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    quantize_dynamic(file, to, weight_type=QuantType.QUInt8)


def test_quantized_weights_agree_within_a_tolerance_and_a_module_that_a_tool_breaks_does_not(tmp_path):
    """Broken are rows of a quantized weight in another order: the error is far above that of quantization."""
    net = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32))
    exported(spread(net).eval(), {"input": x(2, 32)}, "torchscript", tmp_path)
    to_uint8(tmp_path / "model.onnx", tmp_path / "uint8.onnx")
    result = htp_export.compare(tmp_path / "model.onnx", tmp_path / "uint8.onnx")
    assert (result.ok, result.first_wrong) == (False, "0")
    assert all(module.cosine > 0.999 for module in result.modules.values())
    assert htp_export.compare(tmp_path / "model.onnx", tmp_path / "uint8.onnx", tolerances={"**": (0.1, 0.1)}).ok
    broken = onnx.load(tmp_path / "uint8.onnx")
    weight = next(w for w in broken.graph.initializer if w.name.startswith("2.weight") and len(w.dims) == 2)
    weight.CopyFrom(onnx.numpy_helper.from_array(np.roll(onnx.numpy_helper.to_array(weight), 5, 0), weight.name))
    onnx.save(broken, tmp_path / "broken.onnx")
    result = htp_export.compare(tmp_path / "model.onnx", tmp_path / "broken.onnx", tolerances={"**": (0.2, 0.2)})
    assert result.wrong == ("2",)
    assert result.modules["2"].cosine < 0.5


def test_a_module_that_was_fused_away_is_compared_at_the_one_around_it(tmp_path):
    """A Linear whose result only exists together with the ReLU after it."""
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    exported(spread(net).eval(), {"input": x(2, 4)}, "dynamo", tmp_path)
    fused = htp_export.load(tmp_path / "model.onnx")
    gemm, relu = fused["0"].nodes
    merged = ir.node(
        "FusedGemm",
        gemm.inputs,
        {"transB": 1, "activation": "Relu"},
        domain="com.microsoft",
        metadata_props={"htp.module": "0", "htp.owners": '["0.0","0.1"]', "htp.reason": "fused"},
    )
    merged.outputs[0].name = "merged"
    graph = fused.model.graph
    graph.insert_before(gemm, merged)
    relu.outputs[0].replace_all_uses_with(merged.outputs[0])
    graph.remove([relu, gemm], safe=True)
    graph.opset_imports["com.microsoft"] = 1
    result = htp_export.compare(tmp_path / "model.onnx", htp_export.load(fused.model))
    assert result.ok, str(result)
    assert result.modules["0"].status == "agrees"
    for path in ("0.0", "0.1"):
        module = result.modules[path]
        assert (module.status, module.compared_at) == ("not compared", "0")
        assert module.reason == "model b has none of its tensors; compared at 0"


def test_files_of_two_models_are_refused(files, tmp_path):
    class Wider(Wide):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.RMSNorm(32)

    other = file_of(tmp_path, "dynamo", Wider())
    with pytest.raises(InputError, match=r"are not of one model: module '\(root\)' is a Wide in one and a Wider"):
        htp_export.compare(files[0], other)
