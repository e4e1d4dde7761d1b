"""The line of the model's code that created a node: the innermost one outside of torch, with both exporters."""

import inspect
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import htp_export
from htp_export.exporter.model_lines import is_of_model
from tests.exporting import BOTH
from tests.extract.test_cutting import exported_to
from tests.nets import Holding, spread, x


class Inner(Holding, fc=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.fc(x)  # line of fc
        return hidden * torch.nn.functional.gelu(hidden)  # line of gelu


class Outer(Holding, inner=Inner(), seq=nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        return self.seq(x)  # line of seq


def line_of(text: str) -> str:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    numbers = [number for number, line in enumerate(lines, 1) if line.endswith(f"# line of {text}")]
    [number] = numbers
    return f"{__file__}:{number}"


@BOTH
def test_a_layer_of_torch_has_the_line_of_the_model_that_calls_it(exporter, tmp_path):
    file = exported_to(tmp_path / "net.onnx", spread(Outer()).eval(), {"x": x(2, 4)}, exporter)
    mapped = htp_export.nodes(file)
    for operator, path, text in (
        ("Gemm", "inner.fc", "fc"),
        ("Mul", "inner", "gelu"),
        ("Gemm", "seq.0", "seq"),
        ("LayerNormalization", "seq.1", "seq"),
    ):
        nodes = [node for node in mapped if node.operator == operator and path in node.modules]
        assert nodes
        assert {node.source for node in nodes} == {line_of(text)}, (operator, path)
        assert all(node.line.code.endswith(f"# line of {text}") for node in nodes)
    assert not [node for node in mapped if "/torch/" in node.source]
    assert len({tuple(sorted(entry.key for entry in node.metadata_props)) for node in
                onnx.load(file).graph.node if node.op_type == "Gemm"}) == 1  # fmt: skip


@pytest.mark.long
@BOTH
def test_a_library_is_outside_of_torch(exporter, tmp_path):
    pytest.importorskip("transformers")
    model = htp_export.huggingface.load_model(
        "bert", random_weights=True, overrides={"num_hidden_layers": 1, "hidden_size": 12}
    )
    inputs = htp_export.huggingface.example_inputs(model)
    file = tmp_path / "bert.onnx"
    htp_export.export(model, (), file, kwargs=inputs, dynamo=exporter == "dynamo", verbose=False)
    sources = {
        node.source
        for node in htp_export.nodes(file)
        if "encoder.layer.0.attention.self.query" in node.modules
    }
    module = model.encoder.layer[0].attention.self
    lines, first = inspect.getsourcelines(type(module))
    [place] = [k for k, line in enumerate(lines) if "self.query(" in line]
    assert sources == {f"{inspect.getsourcefile(type(module))}:{first + place}"}


@BOTH
def test_a_layer_of_torch_alone_has_no_line_of_the_caller(exporter, tmp_path):
    file = exported_to(
        tmp_path / "net.onnx", spread(nn.Linear(4, 4)).eval(), {"input": x(2, 4)}, exporter
    )
    [node] = [node for node in htp_export.nodes(file) if node.operator == "Gemm"]
    assert __file__ not in node.source


@BOTH
def test_the_line_survives_passes_and_quantization(exporter, tmp_path):
    file = exported_to(tmp_path / "net.onnx", spread(Outer()).eval(), {"x": x(2, 4)}, exporter)
    htp_export.optimize(file, tmp_path / "small.onnx")
    htp_export.quantize(file, {"**": "fp16"}, tmp_path / "half.onnx")
    for changed in ("small.onnx", "half.onnx"):
        mapped = htp_export.nodes(tmp_path / changed)
        gemms = {node.modules: node.source for node in mapped if node.operator == "Gemm"}
        assert gemms == {("inner.fc",): line_of("fc"), ("seq.0",): line_of("seq")}


@BOTH
def test_verify_and_compare_name_the_line_of_the_first_wrong_tensor(exporter, tmp_path):
    model = spread(Outer()).eval()
    file = exported_to(tmp_path / "net.onnx", model, {"x": x(2, 4)}, exporter)
    with torch.no_grad():
        model.seq[0].weight[0, 0] += 3
    other = exported_to(tmp_path / "other.onnx", model, {"x": x(2, 4)}, exporter)
    [name] = [value.name for value in onnx.load(file).graph.input]
    found = htp_export.verify(model, file, (x(2, 4),))
    compared = htp_export.compare(file, other, {name: x(2, 4).numpy()})
    for result in (found, compared):
        assert result.first_wrong == "seq.0"
        assert result.source.startswith(line_of("seq") + "  return self.seq(x)")
        assert f"computed at {result.source}" in result.notes


def test_torch_itself_its_callers_and_the_standard_library_are_no_model():
    assert not is_of_model(torch.nn.functional.__file__)
    assert not is_of_model(inspect.__file__)
    assert not is_of_model(htp_export.__file__)
    assert is_of_model(__file__)
    assert is_of_model("/home/me/torch/nn/net.py")
