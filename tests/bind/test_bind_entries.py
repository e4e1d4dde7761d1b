"""`htp_export.bind` of entries that are no weights: positions, conditions, frequencies, numbers that Python reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import htp_export
from htp_export.errors import InputError
from tests.nets import composed
from tools.bind_models import STEPS, silent

EXPORTERS = ("dynamo", "torchscript")
POSITIONS = ((3, 1, 0, 2), (0, 2, 3, 3))
CONDITIONS = ((True, False, True, False), (False, False, True, True))


def buffered(forward: Callable[..., Any], buffers: dict[str, Any], **parts: Any) -> nn.Module:
    """A module of some parts and buffers, all of whose parameters have different numbers."""
    torch.manual_seed(0)
    net = composed(forward, **{name: part() for name, part in parts.items()})
    for name, numbers in buffers.items():
        net.register_buffer(name, torch.tensor(numbers))
    return net.eval()


def looked_up(version: int) -> nn.Module:
    """A bias that positions select from a table, as that of relative positions."""
    buffers = {"positions": POSITIONS[version]}
    parts = {"table": lambda: nn.Embedding(4, 8), "fc": lambda: nn.Linear(8, 8)}
    return buffered(lambda net, x: net.fc(x) + net.table(net.positions), buffers, **parts)


def masked(version: int) -> nn.Module:
    buffers = {"mask": CONDITIONS[version]}
    return buffered(
        lambda net, x: net.fc(x).masked_fill(net.mask[:, None], -1.0),
        buffers,
        fc=lambda: nn.Linear(8, 8),
    )


def selected(version: int) -> nn.Module:
    """Rows of an input that positions select."""
    buffers = {"positions": POSITIONS[version]}
    return buffered(lambda net, x: net.fc(x[net.positions]), buffers, fc=lambda: nn.Linear(8, 8))


X = torch.linspace(-1, 1, 32).reshape(4, 8)


def exported(net: nn.Module, exporter: str, file: Path) -> Path:
    with silent():  # torch warns that numbers become constants
        htp_export.export(net, (X,), file, dynamo=exporter == "dynamo", verbose=False)
    return file


def result_of(file: Path) -> np.ndarray:
    session = onnxruntime.InferenceSession(file)
    [name] = [each.name for each in session.get_inputs()]
    return np.asarray(session.run(None, {name: X.numpy()})[0])


@pytest.mark.long
@pytest.mark.parametrize("step", ["export", "exact", "fused", "onnxruntime", "onnxslim"])
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("make", [looked_up, masked, selected])
def test_positions_and_conditions_of_the_state_dict_are_bound(make, exporter, step, tmp_path):
    file = exported(make(0), exporter, tmp_path / "net.onnx")
    with silent():
        STEPS[step](file, tmp_path / "made.onnx")
    bound = htp_export.bind(tmp_path / "made.onnx", make(1), tmp_path / "bound.onnx")
    assert not bound.unbound
    with torch.no_grad():
        expected = make(1)(X).numpy()
    assert np.abs(make(0)(X).detach().numpy() - expected).max() > 0.1
    np.testing.assert_allclose(result_of(tmp_path / "bound.onnx"), expected, atol=1e-6)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_row_that_a_parameter_selects_is_no_constant(exporter, tmp_path):
    def make(version: int) -> nn.Module:
        def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
            return net.fc(x) + net.table.weight[net.fc.bias.argmax()]

        parts = {"table": lambda: nn.Embedding(8, 8), "fc": lambda: nn.Linear(8, 8)}
        net = buffered(forward, {}, **parts)
        with torch.no_grad():
            net.fc.bias += torch.arange(8.0) * (2 * version - 1)
        return net

    file = exported(make(0), exporter, tmp_path / "net.onnx")
    htp_export.optimize(file, tmp_path / "fast.onnx")
    with pytest.raises(InputError, match="ArgMax"):
        htp_export.bind(tmp_path / "fast.onnx", make(1), tmp_path / "bound.onnx")
    assert not (tmp_path / "bound.onnx").exists()


def rotated(frequency: float, weight: float) -> nn.Module:
    """Sines of a buffer, which many checkpoints have with the same numbers."""
    net = buffered(
        lambda net, x: net.fc(x) * net.frequencies.sin(),
        {"frequencies": [frequency * each for each in range(1, 9)]},
        fc=lambda: nn.Linear(8, 8),
    )
    with torch.no_grad():
        net.fc.weight += weight
    return net


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_tensor_that_cannot_be_computed_again_stays_if_its_entries_are_unchanged(
    exporter, tmp_path
):
    file = exported(rotated(0.1, 0.0), exporter, tmp_path / "net.onnx")
    htp_export.optimize(file, tmp_path / "fast.onnx")
    same = rotated(0.1, 0.5)
    bound = htp_export.bind(tmp_path / "fast.onnx", same, tmp_path / "bound.onnx")
    assert not bound.unbound
    with torch.no_grad():
        expected = same(X).numpy()
    np.testing.assert_allclose(result_of(tmp_path / "bound.onnx"), expected, atol=1e-6)
    # in the type of a checkpoint, too
    other = rotated(0.2, 0.5).state_dict()
    found = htp_export.bind(tmp_path / "fast.onnx", other, strict=False)
    assert list(found.unbound) == ["frequencies"]


def scaled(forward: Callable[..., Any]) -> Callable[[float], nn.Module]:
    def make(scale: float) -> nn.Module:
        buffers = {"scale": scale, "scales": [scale, 1.0, 2.0]}
        return buffered(forward, buffers, fc=lambda: nn.Linear(8, 8))

    return make


READ_BY_PYTHON = {
    "item": scaled(lambda net, x: net.fc(x) * net.scale.item()),
    "float": scaled(lambda net, x: net.fc(x) * float(net.scale)),
    "branch": scaled(lambda net, x: net.fc(x).sin() if net.scale > 1 else net.fc(x)),
    "sum": scaled(lambda net, x: net.fc(x) * (net.scales.sum() * 2).item()),
    "list": scaled(lambda net, x: net.fc(x) * sum(net.scales.tolist())),
    "data": scaled(lambda net, x: net.fc(x) * net.scales.data[:1]),
    "array": scaled(lambda net, x: net.fc(x) * float(net.scales.numpy()[0])),
}


@pytest.mark.parametrize("name", READ_BY_PYTHON)
def test_an_entry_that_python_reads_in_a_trace_is_named_if_it_differs(name, tmp_path):
    """A trace has a constant in its place: before, other weights were bound without a word."""
    make = READ_BY_PYTHON[name]
    file = exported(make(0.5), "torchscript", tmp_path / "net.onnx")
    assert htp_export.bind(file, make(0.5)).unbound == {}
    with pytest.raises(InputError, match=r"'scales?' cannot be bound: .*Python code"):
        htp_export.bind(file, make(1.5), tmp_path / "bound.onnx")
    assert not (tmp_path / "bound.onnx").exists()


def test_a_number_of_the_input_that_python_reads_names_no_entry(tmp_path):
    def forward(net: Any, x: torch.Tensor) -> torch.Tensor:
        y = net.fc(x)
        return y if torch.isfinite(y).all() else y * 0

    net = buffered(forward, {}, fc=lambda: nn.Linear(8, 8))
    file = exported(net, "torchscript", tmp_path / "net.onnx")
    assert htp_export.load(file).assumed == {}


def test_the_size_of_an_entry_that_python_reads_is_no_number_of_it(tmp_path):
    net = composed(
        lambda net, x: net.table(x) if net.table.weight.sum(0).size(0) == 8 else x,
        table=nn.Embedding(5, 8, padding_idx=0),  # torch compares it with the size of the table
    )
    file = tmp_path / "net.onnx"
    with silent():
        htp_export.export(
            net.eval(), (torch.arange(4),), file, dynamo=False, verbose=False, input_names=["x"]
        )
    assert htp_export.load(file).assumed == {}


# --- back again ---


@pytest.mark.long
@pytest.mark.parametrize("step", ["export", "fused", "int4", "int8-dynamic"])
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_there_and_back_again_is_the_first_file_byte_for_byte(exporter, step, tmp_path):
    """A file of torch is written in another order by the first command that changes it: not by the second."""

    def net(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(8, 64), nn.LayerNorm(64), nn.Linear(64, 8)).eval()

    file = exported(net(1), exporter, tmp_path / "net.onnx")
    STEPS[step](file, tmp_path / "made.onnx")
    folders = [tmp_path / name for name in ("a", "b", "c")]
    for folder in folders:
        folder.mkdir()
    a, b, c = (folder / "net.onnx" for folder in folders)
    htp_export.load(tmp_path / "made.onnx").save(a, external_data="net.onnx.data")
    htp_export.bind(a, net(2), b)
    htp_export.bind(b, net(1), c)
    assert sorted(each.name for each in a.parent.iterdir()) == ["net.onnx", "net.onnx.data"]
    for each in a.parent.iterdir():
        assert (c.parent / each.name).read_bytes() == each.read_bytes()
    assert (b.parent / "net.onnx.data").read_bytes() != (a.parent / "net.onnx.data").read_bytes()
