"""The check of a file against PyTorch: what it must let through, and what it must not."""

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import htp_export
from htp_export.errors import InputError
from htp_export.run.parity import check_parity
from htp_export.run.readers import parameter_readers


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return {"hidden": torch.relu(self.first(x)), "out": self.second(torch.relu(self.first(x)))}


class Tied(nn.Module):
    """The decoder reads the weight of the embedding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.decoder = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.decoder.weight = self.embedding.weight

    def forward(self, x):
        return self.decoder(self.embedding(x))


class Equal(nn.Module):
    """Two norms whose parameters are equal: the TorchScript exporter merges them under one name."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


class Borrowing(nn.Module):
    """Reads the weight of a module that never runs."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        return nn.functional.linear(x, self.fc.weight, self.fc.bias)


class Sum(nn.Module):
    def forward(self, y, z):
        return y + z


X = {"x": torch.randn(2, 4, generator=torch.Generator().manual_seed(0))}
IDS = {"x": torch.tensor([[1, 5, 2]])}
EXPORTERS = pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])


def exported(model: nn.Module, kwargs: dict, path: Path, dynamo: bool = True) -> Path:
    htp_export.export(model.eval(), (), path, kwargs=kwargs, dynamo=dynamo, verbose=False, input_names=list(kwargs))
    return path


def edited(path: Path, edit) -> Path:
    model = onnx.load(path)
    edit(model.graph)
    onnx.save(model, path)
    return path


def owned_by(path: str, op_type: str):
    def edit(graph):
        for node in graph.node:
            if node.op_type == op_type:
                del node.metadata_props[:]
                node.metadata_props.add(key="htp.module", value=path)

    return edit


@EXPORTERS
@pytest.mark.parametrize(
    ("model_class", "kwargs"),
    [(Net, X), (Tied, IDS), (Equal, X), (Borrowing, X)],
)
def test_what_was_exported_agrees(tmp_path, dynamo, model_class, kwargs):
    model = model_class()
    parity = check_parity(model, exported(model, kwargs, tmp_path / "net.onnx", dynamo), kwargs)
    assert parity.ok, str(parity)
    assert parity.parameters >= 1
    assert f"owners of {parity.parameters} parameters right" in str(parity)


def test_other_weights_differ(tmp_path):
    path = exported(Net(), X, tmp_path / "net.onnx")
    parity = check_parity(Net(), path, X)
    assert not parity.ok
    assert parity.max_abs > 1e-3
    assert len(parity.wrong_outputs) == parity.outputs == 2
    assert "every module agrees" not in str(parity)


def test_parameter_read_by_a_node_of_another_module_is_misplaced(tmp_path):
    model = Net()
    path = edited(exported(model, X, tmp_path / "net.onnx"), owned_by("second", "Gemm"))
    parity = check_parity(model, path, X)
    assert not parity.ok
    assert not parity.wrong_outputs
    assert {line.split()[0] for line in parity.misplaced} == {"first.weight", "first.bias"}
    assert "outputs agree with PyTorch" in str(parity)


def test_weight_that_lost_its_name_to_a_transposition_is_looked_at_too(tmp_path):
    model, kwargs = nn.Sequential(nn.Linear(4, 3), nn.ReLU()), {"input": torch.ones(1, 2, 4)}
    path = exported(model, kwargs, tmp_path / "net.onnx")
    assert check_parity(model, path, kwargs).parameters == 2
    parity = check_parity(model, edited(path, owned_by("1", "MatMul")), kwargs)
    assert [line.split()[0] for line in parity.misplaced] == ["0.weight"]


def test_parameter_read_by_an_untagged_node_is_misplaced(tmp_path):
    def untag(graph):
        gemm = next(node for node in graph.node if node.op_type == "Gemm")
        del gemm.metadata_props[:]

    model = Net()
    parity = check_parity(model, edited(exported(model, X, tmp_path / "net.onnx"), untag), X)
    assert any("no module" in line for line in parity.misplaced)


def test_nan_agrees_with_nan_alone(tmp_path):
    model = Net()
    path = exported(model, X, tmp_path / "net.onnx")
    nan = {"x": X["x"].clone().fill_(float("nan"))}
    assert check_parity(model, path, nan).ok
    with torch.no_grad():
        model.second.bias[0] = float("nan")
    parity = check_parity(model, path, X)
    assert not parity.ok
    assert np.isnan(parity.max_abs)


def test_missing_output_is_a_difference(tmp_path):
    def drop_output(graph):
        del graph.output[1]

    model = Net()
    parity = check_parity(model, edited(exported(model, X, tmp_path / "net.onnx"), drop_output), X)
    assert parity.wrong_outputs == ("PyTorch returns 2 tensors, and the file 1",)


def test_shape_that_would_broadcast_is_a_difference(tmp_path):
    path = exported(nn.ReLU(), {"input": torch.ones(1, 4)}, tmp_path / "net.onnx")
    parity = check_parity(nn.Flatten(0), path, {"input": torch.ones(1, 4)})
    assert parity.wrong_outputs == ("output 0: shape (1, 4), not (4,)",)


def test_model_is_left_as_it_was(tmp_path):
    model = Net()
    path = exported(model, X, tmp_path / "net.onnx")
    model.train()
    model.first.eval()
    check_parity(model, path, X)
    assert [module.training for module in model.modules()] == [True, False, True]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_file_that_takes_other_inputs_is_bad_input(tmp_path):
    path = exported(Net(), X, tmp_path / "net.onnx")
    with pytest.raises(InputError, match="takes 1 inputs, and the call has 2"):
        check_parity(Sum(), path, {"y": X["x"], "z": X["x"]})


def test_readers_are_the_modules_that_hold_or_read_a_parameter():
    model = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.randn(1, 3, 4)
    with parameter_readers(model) as readers:
        model(x, x, x)
    assert readers["out_proj.weight"] == {"", "out_proj"}
    assert readers["in_proj_weight"] == {""}
