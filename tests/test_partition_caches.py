"""Stages of a decoder with a key-value cache: each layer's cache is in the stage of the layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import htp_export
from tests.nets import spread, x


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor, past: torch.Tensor, places: torch.Tensor) -> Any:
        present = torch.cat([past, self.key(hidden)], dim=1)
        return hidden + places[:, None] * present.mean(1, keepdim=True), present


class Start(nn.Module):
    def forward(self, hidden: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        return hidden + places.cos()[:, None]


class Decoder(nn.Module):
    """Reads the length of the past from the cache of its last layer, and uses it in the first one."""

    def __init__(self, counts_first: bool = False) -> None:
        super().__init__()
        self.start = Start() if counts_first else None
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, hidden: torch.Tensor, past_0: torch.Tensor, past_1: torch.Tensor, past_2: torch.Tensor) -> Any:
        places = torch.arange(past_2.shape[1], past_2.shape[1] + hidden.shape[1]).float() / 7
        if self.start is not None:
            hidden = self.start(hidden, places)
        presents = []
        for layer, past in zip(self.layers, (past_0, past_1, past_2), strict=True):
            hidden, present = layer(hidden, past, places)
            presents.append(present)
        return hidden, *presents


NAMES = [f"past_{number}" for number in range(3)]


def exported(model: Decoder, folder: Path) -> Path:
    inputs = {"hidden": x(2, 3, 4), **{name: x(2, 5, 4, seed=ord(name[-1])) for name in NAMES}}
    batch, length, past = (torch.export.Dim(name) for name in ("batch", "length", "past"))
    shapes = {"hidden": {0: batch, 1: length}, **{name: {0: batch, 1: past} for name in NAMES}}
    path = folder / "decoder.onnx"
    outputs = ["out", "present_0", "present_1", "present_2"]
    htp_export.export(
        spread(model).eval(),
        (),
        path,
        kwargs=inputs,
        dynamic_shapes=shapes,
        output_names=outputs,
        verbose=False,
        dynamo=True,
    )
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return exported(Decoder(), tmp_path)


def test_each_stage_has_the_caches_of_its_own_layers(file: Path) -> None:
    stages = htp_export.partition(file, ["layers.0", "layers.1", "layers.2"]).stages
    caches = [(sorted(set(stage.inputs) & set(NAMES)), set(stage.outputs)) for stage in stages]
    assert [taken for taken, _ in caches] == [["past_0"], ["past_1"], ["past_2"]]
    assert [[f"present_{number}" in given for number in range(3)] for _, given in caches] == np.eye(3).tolist()


@pytest.mark.parametrize(("length", "past"), [(3, 5), (4, 0), (1, 9)])
def test_stages_give_the_caches_of_the_whole(file: Path, length: int, past: int) -> None:
    given = {"hidden": x(2, length, 4), **{name: x(2, past, 4, seed=ord(name[-1])) for name in NAMES}}
    parts = htp_export.partition(file, ["layers.1", "layers.2"])
    expected = htp_export.partition(file, 1).run(given)
    found = parts.run(given)
    assert list(found) == ["out", "present_0", "present_1", "present_2"]
    for name, array in found.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-6, atol=1e-6)


def test_a_size_that_no_input_of_a_stage_has_is_read_from_another_cache(tmp_path: Path) -> None:
    """The first stage counts positions from the length of the past on, and no layer of its has a cache."""
    parts = htp_export.partition(exported(Decoder(counts_first=True), tmp_path), ["layers.0", "layers.2"])
    taken = [set(stage.inputs) & set(NAMES) for stage in parts.stages]
    assert taken == [{"past_2"}, {"past_0", "past_1"}, {"past_2"}]
    given = {"hidden": x(2, 3, 4), **{name: x(2, 6, 4, seed=ord(name[-1])) for name in NAMES}}
    expected = htp_export.partition(tmp_path / "decoder.onnx", 1).run(given)
    for name, array in parts.run(given).items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-6, atol=1e-6)
