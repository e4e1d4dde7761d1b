"""Quantization-aware training: files have the scales of the modules of fake quantization, and their tags."""

import itertools

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.ao import quantization

import htp_export
from htp_export.errors import InputError, SelectorError
from tests.exporting import BOTH, quick
from tests.nets import EXPORTERS, Holding, x
from tests.truth import inexact, nodes_of, owners_of, untagged, values_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
    # torch's own configuration
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning"),
]


class Net(Holding, conv=nn.Conv2d(3, 4, 3), act=nn.ReLU(), fc=nn.Linear(4, 5)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.act(self.conv(x)).mean((2, 3)))


def trained(backend: str) -> nn.Module:
    """A model with fake quantization after a few steps of training."""
    torch.manual_seed(0)
    model = Net().train()
    model.qconfig = quantization.get_default_qat_qconfig(backend)
    model = quantization.prepare_qat(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(x(4, 3, 6, 6, seed=step)).square().mean().backward()
        optimizer.step()
    return model.eval().apply(quantization.disable_observer)


def scales(file: onnx.ModelProto, kwargs: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Module of fake quantization → scale of its QuantizeLinear."""
    values = values_of(file, kwargs)
    found = {}
    for node in nodes_of(file):
        if node.op_type == "QuantizeLinear":
            [owner] = owners_of(node)
            found[owner] = np.ravel(values[node.input[1]])
    return found


@pytest.mark.parametrize(
    ("backend", "exporter"),
    quick(
        itertools.product(("qnnpack", "fbgemm"), EXPORTERS),
        ("qnnpack", "torchscript"),
        ("fbgemm", "dynamo"),
    ),
)
def test_fake_quantized_models_export_with_tags_and_scales(backend, exporter, tmp_path):
    model, kwargs, file = trained(backend), {"x": x(2, 3, 6, 6)}, tmp_path / "qat.onnx"
    wanted = model(**kwargs)
    options = {"opset_version": 17} if exporter == "torchscript" else {}
    with htp_export.frozen_fake_quantize(model):
        assert torch.equal(model(**kwargs), wanted)
        htp_export.export(
            model, (), file, kwargs=kwargs, dynamo=exporter == "dynamo", verbose=False, **options
        )
        assert inexact(model, kwargs, onnx.load(file)) == []
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, quantization.FakeQuantizeBase)
    }
    assert all("forward" not in vars(module) for module in modules.values())
    found = scales(onnx.load(file), kwargs)
    assert found.keys() == modules.keys()
    for name, module in modules.items():
        assert np.allclose(found[name], module.scale.numpy(), rtol=1e-6), name
    assert untagged(onnx.load(file)) == []
    assert htp_export.verify(model, file, (), kwargs).ok
    onnx.checker.check_model(str(file), full_check=True)


def test_disabled_fake_quantization_does_nothing(tmp_path):
    model = trained("qnnpack").apply(quantization.disable_fake_quant)
    with htp_export.frozen_fake_quantize(model):
        exported = htp_export.export(model, (x(2, 3, 6, 6),), verbose=False)
    assert "QuantizeLinear" not in {node.op_type for node in htp_export.load(exported).nodes}


def test_the_model_is_as_before_after_an_error():
    model = trained("qnnpack")
    model.conv.weight_fake_quant.forward = own = model.conv.weight_fake_quant.forward

    def fails() -> None:
        with htp_export.frozen_fake_quantize(model):
            assert model.conv.weight_fake_quant.forward is not own
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert model.conv.weight_fake_quant.forward is own
    assert "forward" not in vars(model.fc.weight_fake_quant)


def test_a_model_without_fake_quantization_is_refused():
    with (
        pytest.raises(InputError, match="Net has no module of fake quantization"),
        htp_export.frozen_fake_quantize(Net()),
    ):
        pass


class TestFilter:
    NET = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4), nn.Linear(4, 2))

    def named(self, *arguments: object) -> list[str]:
        wanted = htp_export.module_filter(self.NET, *arguments)  # type: ignore[arg-type]
        return [name for name, module in self.NET.named_modules() if wanted(module, name)]

    def test_names_linear_layers_at_or_below_modules(self):
        assert self.named("0, 2") == ["0.0", "2"]
        assert self.named(["class:Linear", "!1"]) == ["0.0", "2"]

    def test_of_a_plan_the_last_rule_holds(self):
        plan = {"**": "int8", "1": "int4", "0": "fp16"}
        assert [self.named(plan, value) for value in ("int8", "int4", "fp16")] == [
            ["2"],
            ["1"],
            ["0.0"],
        ]

    def test_what_names_nothing_is_refused(self):
        with pytest.raises(SelectorError, match="matches no module"):
            self.named("nowhere")
        with pytest.raises(InputError, match="the plan gives 'int3' to no linear layer"):
            self.named({"**": "int8"}, "int3")
        with pytest.raises(InputError, match="names no linear layer"):
            self.named("0.1")


@BOTH
def test_weights_that_torchao_trained_export_with_tags_and_scales(exporter, tmp_path):
    pytest.importorskip("torchao")
    from torchao.quantization import quantize_
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8))
    config = QATConfig(
        weight_config=IntxFakeQuantizeConfig(torch.int8, "per_channel"), step="prepare"
    )
    quantize_(model, config, htp_export.module_filter(model, {"**": "fp32", "0": "int8"}, "int8"))
    kwargs, file = {"input": x(3, 32)}, tmp_path / "qat.onnx"
    wanted = model.eval()(**kwargs)
    with htp_export.frozen_fake_quantize(model):
        assert torch.allclose(model(**kwargs), wanted, atol=1e-5)
        htp_export.export(
            model, (), file, kwargs=kwargs, dynamo=exporter == "dynamo", verbose=False
        )
    found = scales(onnx.load(file), kwargs)
    assert list(found) == ["0.weight_fake_quantizer"]
    assert np.allclose(
        found["0.weight_fake_quantizer"],
        model[0].weight_fake_quantizer.scale.detach().numpy().ravel(),
    )
    assert untagged(onnx.load(file)) == []
    # The largest weight of a row lies between two steps and rounds to either: PyTorch multiplies by the inverse scale.
    verified = htp_export.verify(
        model, file, (), kwargs, tolerances={"**": (1.5 * float(max(found.popitem()[1])) * 8, 0.0)}
    )
    assert verified.ok, str(verified)
