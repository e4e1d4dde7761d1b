"""Signatures in files name the tensors that PyTorch gave to modules and got back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import htp_export
from htp_export.format.signatures import Signature, signatures_from_json, signatures_to_json
from tests.exporting import BOTH, exported, exported_net
from tests.nets import NETS, spread, x
from tests.truth import equal, signatures_of, values_of


def test_nothing_is_taken_from_an_attempt_at_tracing_that_failed(tmp_path: Path, monkeypatch: Any) -> None:
    """torch.onnx.export then tries torch.export's strict mode, in which no module is seen to run."""
    from torch.onnx._internal.exporter import _capture_strategies as strategies

    attempt = strategies.TorchExportNonStrictStrategy._capture

    def fails(*args: Any, **kwargs: Any) -> None:
        attempt(*args, **kwargs)
        raise RuntimeError("not so")

    monkeypatch.setattr(strategies.TorchExportNonStrictStrategy, "_capture", fails)
    file = exported_net("cells", "dynamo", tmp_path)
    assert "htp.signatures" not in {entry.key for entry in file.metadata_props}
    model, kwargs = NETS["cells"].build()
    result = htp_export.verify(model, file, kwargs=kwargs)  # of a cell's two results the last call has one in the file
    assert (result.ok, result.modules["cell"].status, result.modules["out"].status) == (True, "agrees", "agrees")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *rest: torch.Tensor, scale: torch.Tensor, pair: Any = None) -> Any:
        return {"hidden": self.fc(x) * scale + rest[0], "pair": (pair[0].tanh(), pair[1] * 3)}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        once = self.layer(x, y, scale=x * 2, pair=(y, x))
        twice = self.layer(once["hidden"].relu(), y, scale=once["pair"][0], pair=(x, once["pair"][1]))
        return twice["hidden"] + twice["pair"][0] + twice["pair"][1]


@BOTH
def test_arguments_have_their_names_in_forward_and_calls_are_told_apart(exporter: str, tmp_path: Path) -> None:
    file = exported(spread(Model()).eval(), {"x": x(2, 4)}, exporter, tmp_path)
    first, second = signatures_of(file)["layer"]
    ops = {node.output[0]: node.op_type for node in file.graph.node}
    assert list(first.inputs) == ["x", "rest.0", "scale", "pair.0", "pair.1"]
    assert first.inputs["x"] == first.inputs["pair.1"] == file.graph.input[0].name
    assert first.inputs["rest.0"] == first.inputs["pair.0"] == second.inputs["rest.0"]
    assert [ops[str(name)] for name in first.outputs] == ["Add", "Tanh", "Mul"]
    assert ops[str(second.inputs["x"])] == "Relu"
    assert (second.inputs["scale"], second.inputs["pair.1"]) == first.outputs[1:]


class Sum(nn.Module):
    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return one.exp() + other


class PlainTensor(nn.Module):
    """Gives a module a tensor that the tracer has never seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Sum()
        self.table = torch.arange(8.0).reshape(2, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, self.table) + self.table


@BOTH
def test_a_constant_argument_names_no_tensor_of_another_value(exporter: str, tmp_path: Path) -> None:
    model, kwargs = spread(PlainTensor()).eval(), {"x": x(2, 4)}
    file = exported(model, kwargs, exporter, tmp_path)
    (signature,) = signatures_of(file)["layer"]
    values = values_of(file, kwargs)
    constant = signature.inputs["other"]
    assert signature.inputs["one"] == file.graph.input[0].name
    assert constant is None or equal(values[constant], model.table.numpy())


def test_what_is_written_is_read_back() -> None:
    signatures = {"": [Signature({"x": "in", "mask": None}, (None, "out"))], "a b": []}
    assert signatures_from_json(signatures_to_json(signatures)) == {path: tuple(c) for path, c in signatures.items()}


@pytest.mark.parametrize("text", ["", "[]", '{"fc": 1}', '{"fc": [[[], []]]}', '{"fc": [[{"x": 1}, []]]}'])
def test_what_is_no_signature_is_refused_with_the_key_at_fault(text: str) -> None:
    with pytest.raises(ValueError, match=r"htp\.signatures"):
        signatures_from_json(text)
