"""Noisy numbers: times beside those of the original, plans of the front measured again, and what is ahead of what."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.errors import InputError
from htp_export.results import Search
from htp_export.runtime import runner
from tests.nets import spread

pytest.importorskip("optuna")

SPACE = ["int8-dynamic", "fp32"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    net = spread(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))).eval()
    found = tmp_path_factory.mktemp("noisy") / "net.onnx"
    htp_export.export(net, (torch.randn(2, 64),), found, verbose=False)
    return found


def test_a_machine_that_becomes_slower_does_not_change_times(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run takes one tick, and each tick is longer than the one before."""
    ticks = itertools.accumulate(1.01**number for number in itertools.count())
    monkeypatch.setattr(runner, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    found = htp_export.search(file, SPACE, objectives=["latency", "size"], trials=4, runs=15)
    times = [trial.values["latency"] for trial in found.trials]
    assert len(times) > 4
    assert max(times) < 1.05 * min(times)


def noisy(seed: int) -> Any:
    numbers = random.Random(seed)

    def metric(outputs: Sequence[Mapping[str, Any]]) -> float:
        return numbers.gauss(0.0, 1.0)

    return metric


def test_plans_of_the_front_have_medians_and_no_noise_makes_one_better(file: Path) -> None:
    settings: dict[str, Any] = {"objectives": ["metric"], "trials": 4}
    once = htp_export.search(file, SPACE, metric=noisy(0), **settings)
    assert len(once.pareto) == 1
    assert not once.pareto[0].spread
    found = htp_export.search(file, SPACE, metric=noisy(0), repeats=9, **settings)
    assert len(found.pareto) > 1
    for trial in found.pareto:
        assert trial.spread["metric"] > 0
        assert trial.values["metric"] == trial.measured["metric"] < once.pareto[0].values["metric"]
    assert "9 more times: medians and half the range of metric; no plan is ahead" in found.notes[-1]
    again = Search(found.objectives, found.trials, 0, {})
    assert [trial.name for trial in again.pareto] == [trial.name for trial in found.pareto]


def test_what_does_not_differ_is_said(file: Path) -> None:
    found = htp_export.search(file, SPACE, objectives=["error", "size"], trials=4, repeats=2)
    assert "plans were measured 2 more times: no value differed" in found.notes[-1]
    with pytest.raises(InputError, match="one measurement has no spread"):
        htp_export.search(file, SPACE, repeats=1)


def test_sensitivity_has_the_spread_of_a_metric(file: Path) -> None:
    found = htp_export.sensitivity(file, ["int8-dynamic"], metric=noisy(1), repeats=3, all_but=False)
    values = [row.alone for row in found.ranking]
    assert all(measured is not None and measured.spread["metric"] > 0 for measured in values)


def test_the_command_shows_the_spread(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--choices", "int8-dynamic,fp32", "--objectives", "latency,size", "--trials", "4", "--repeats", "3"]
    assert main(["search", str(file), *words]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "latency ±" in said
    assert "were measured 3 more times: medians and half the range of latency" in said
