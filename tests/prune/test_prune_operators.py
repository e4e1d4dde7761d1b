"""Channels cut through operators that repeat or pick them, and plans of which a part can be cut."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.errors import InputError, RuleError
from tests.exporting import BOTH, open_sizes
from tests.extract.test_cutting import run_file
from tests.nets import EXPORTERS, composed, x
from tests.prune.test_prune_structured import export
from tests.random_tokens import repeated
from tools.prune_models import (
    MODELS,
    Recurrent,
    compared,
    kept_of,
    masked,
    outputs_of,
    shrink,
    shuffled,
    spread,
)

SWEPT = (("gru", "dynamo"), ("rnn", "dynamo"))  # as the LSTM, with fewer gates


def in_groups(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Grouped convolutions: of two groups, with a shuffle between, and one result for each group."""
    y = self.second(shuffled(self.first(torch.relu(self.stem(x))), 2).relu())
    return self.head(self.merged(self.multiplied(self.up(y)).relu()))


GROUPS: dict[str, Callable[[], nn.Module]] = {
    "stem": lambda: nn.Conv2d(3, 12, 1),
    "first": lambda: nn.Conv2d(12, 8, 1, groups=2),
    "second": lambda: nn.Conv2d(8, 12, 3, padding=1, groups=2),
    "up": lambda: nn.ConvTranspose2d(12, 8, 2, 2, groups=2),
    "multiplied": lambda: nn.Conv2d(8, 16, 1, groups=8),
    "merged": lambda: nn.Conv2d(16, 4, 1, groups=4),
    "head": lambda: nn.Conv2d(4, 2, 1),
}


def upscaled(self: Any, x: torch.Tensor) -> torch.Tensor:
    """PixelShuffle and its inverse."""
    y = torch.nn.functional.pixel_shuffle(torch.relu(self.first(x)), 2)
    return self.third(torch.nn.functional.pixel_unshuffle(torch.relu(self.second(y)), 2))


def strided(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Every second row and column, by their places in memory."""
    y = torch.relu(self.first(x))
    b, c, h, w = y.shape
    return self.second(y.as_strided((b, c, h // 2, w // 2), (c * h * w, h * w, 2 * w, 2)))


def convolved(forward: Callable[..., Any], **sizes: tuple[int, int]) -> nn.Module:
    return composed(forward, **{name: nn.Conv2d(*size, 1) for name, size in sizes.items()})


NETS: dict[str, tuple[Callable[[], Any], Callable[[], torch.Tensor], list[str]]] = {
    "groups": (
        lambda: composed(in_groups, **{name: make() for name, make in GROUPS.items()}),
        lambda: x(2, 3, 4, 4),
        ["first", "merged", "multiplied", "second", "stem", "up"],
    ),
    "pixels": (
        lambda: convolved(upscaled, first=(1, 16), second=(4, 4), third=(16, 2)),
        lambda: x(2, 1, 4, 4),
        ["first", "second"],
    ),
    "strides": (
        lambda: convolved(strided, first=(1, 6), second=(6, 2)),
        lambda: x(2, 1, 4, 4),
        ["first"],
    ),
    "lstm": (
        lambda: Recurrent(nn.LSTM, 2, True),
        lambda: torch.randint(0, 30, (2, 5)),
        ["embed", "rnn"],
    ),
    "gru": (
        lambda: Recurrent(nn.GRU, 1, True),
        lambda: torch.randint(0, 30, (2, 5)),
        ["embed", "rnn"],
    ),
    "rnn": (
        lambda: Recurrent(nn.RNN, 1, False),
        lambda: torch.randint(0, 30, (2, 5)),
        ["embed", "rnn"],
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "exporter"),
    [
        pytest.param(name, exporter, marks=pytest.mark.slow if (name, exporter) in SWEPT else ())
        for name in NETS
        for exporter in EXPORTERS
    ],
)
def test_operators_that_repeat_channels(name, exporter, tmp_path):
    torch.manual_seed(0)
    build, make_input, cut = NETS[name]
    model, given = spread(build()), make_input()
    argument = "words" if isinstance(model, Recurrent) else "x"
    file = export(model, {argument: given}, exporter, tmp_path)
    result = htp_export.prune(file, {"**": "channels:0.5"}, tmp_path / "cut.onnx")
    written = onnx.load(tmp_path / "cut.onnx")
    onnx.checker.check_model(written, full_check=True)
    kept = kept_of(model, written)
    before = {
        name: p.shape[axis]
        for name, p in model.named_parameters()
        for axis in [int("embed" in name)]
    }
    after = {name: len(kept[name][int("embed" in name)]) for name in before}
    weights = {name.split(".")[0] for name in before if after[name] < before[name]}
    assert sorted(weights) == cut
    [found] = run_file(tmp_path / "cut.onnx", {written.graph.input[0].name: given.numpy()})
    for same in (shrink(model, kept), masked(model, kept)):
        assert np.abs(found - outputs_of(same, (given,))).max() < 1e-5
    assert set(result.whole.values())


def multi_query(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Attention of two heads that share keys and values, which are expanded to sizes that are open."""
    batch, length, _ = x.shape
    query = self.query(x).view(batch, length, 2, 4).transpose(1, 2)
    key, value = (
        repeated(layer(x).view(batch, length, 1, 4).transpose(1, 2), 2)
        for layer in (self.key, self.value)
    )
    made = (query @ key.transpose(2, 3)).softmax(-1) @ value
    return self.out(made.transpose(1, 2).reshape(batch, length, 8))


@pytest.mark.long
@BOTH
def test_a_head_of_those_that_share_expanded_keys_is_cut(exporter, tmp_path):
    layers = {
        "query": nn.Linear(6, 8),
        "key": nn.Linear(6, 4),
        "value": nn.Linear(6, 4),
        "out": nn.Linear(8, 6),
    }
    model, given = spread(composed(multi_query, **layers)), x(2, 5, 6)
    file = export(
        model, {"x": given}, exporter, tmp_path, **open_sizes(exporter, x={0: "batch", 1: "length"})
    )
    htp_export.prune(file, {"**": "channels:0.5"}, tmp_path / "cut.onnx")
    written = onnx.load(tmp_path / "cut.onnx")
    kept = kept_of(model, written)
    assert [len(kept[f"{name}.weight"][0]) for name in layers] == [2, 2, 2, 6]
    [found] = run_file(tmp_path / "cut.onnx", {written.graph.input[0].name: given.numpy()})
    assert np.abs(found - outputs_of(masked(model, kept), (given,))).max() < 1e-5


def test_indices_of_channels_are_those_of_the_channels_that_stay(tmp_path):
    torch.manual_seed(0)
    parts = {"up": nn.Linear(4, 6), "down": nn.Linear(4, 2), "order": [5, 0, 2, 5]}
    model: Any = spread(
        composed(lambda self, x: self.down(self.up(x)[:, torch.tensor(self.order)]), **parts)
    )
    with torch.no_grad():
        model.up.weight[[2, 3]] *= 0.01
    file = export(model, {"x": x(2, 4)}, "dynamo", tmp_path)
    htp_export.prune(file, {"up": "channels:0.34"}, tmp_path / "cut.onnx")
    written = onnx.load(tmp_path / "cut.onnx")
    kept = kept_of(model, written)
    smaller = shrink(model, kept)
    smaller.order = [3, 0, 3]  # of 0, 1, 4 and 5
    assert smaller.down.weight.shape == (2, 3)
    [found] = run_file(tmp_path / "cut.onnx", {"x": x(2, 4).numpy()})
    for same in (smaller, masked(model, kept)):
        assert np.abs(found - outputs_of(same, (x(2, 4),))).max() < 1e-5


def test_what_cannot_be_cut_stays_and_is_listed(tmp_path, capsys):
    torch.manual_seed(0)
    parts = {"up": nn.Linear(4, 6), "sums": nn.Linear(6, 6), "down": nn.Linear(6, 2)}
    net = composed(lambda self, x: self.down(self.sums(torch.relu(self.up(x))).cumsum(1)), **parts)
    file = export(spread(net), {"x": x(2, 4)}, "dynamo", tmp_path)
    result = htp_export.prune(file, {"**": "channels:0.5"})
    assert sorted(result.cut) == ["sums.weight", "up.bias", "up.weight"]
    assert {name: reason.split(",")[0] for name, reason in result.whole.items()} == {
        "sums.weight": "its channels cannot be cut",
        "down.weight": "its channels reach output 'linear_2'",
    }
    assert "2 weights stay as they are" in "\n".join(result.notes)
    assert result.to_dict()["whole"] == dict(result.whole)
    for strict in (
        {"**": "channels:0.5"},
        {"up": 0.5, "down": "channels:0.5"},
        {"up": "channels:0.5", "sums": "rank:9"},
    ):
        with pytest.raises(
            RuleError, match=r"(cannot be cut, at CumSum|reach output|keeps its rank)"
        ):
            htp_export.prune(file, strict, strict=True)
    for alone in ("sums", "down"):
        with pytest.raises(InputError, match=f"rule .{alone}.: weight .*its channels"):
            htp_export.prune(
                file, {"up": "channels:0.5", alone: "channels:0.25"}, tmp_path / "cut.onnx"
            )
    assert not (tmp_path / "cut.onnx").exists()
    command = ["prune", str(file), "--rule", "**=channels:0.5", "-o", str(tmp_path / "cut.onnx")]
    assert main([*command, "--strict"]) == 2
    assert "CumSum" in capsys.readouterr().err
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["whole"] == dict(result.whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_are_those_of_pytorch_without_the_channels(name, tmp_path):
    row = compared(name, tmp_path)
    assert row.difference < 1e-4
    assert row.masked is None or row.masked < 1e-4
    assert row.spread > 0.1
    assert row.share > 0.15
    assert row.whole <= 3
