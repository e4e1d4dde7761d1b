"""Noisy numbers, and plans next to measured ones.

Times beside those of the original, plans of the front measured again, and what is ahead of what; which neighbours are
predicted to be better, and what a search does with them.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

import htp_export
from htp_export.capabilities.search import search_work
from htp_export.capabilities.search.fronts import Choice, MeasuredPlan, refined_plans
from htp_export.capabilities.search.measuring import Measurer
from htp_export.command.main import main
from htp_export.errors import InputError
from htp_export.results import Search
from htp_export.runtime import runner
from tests.nets import spread, x

pytest.importorskip("optuna")

SPACE = ["int8-dynamic", "fp32"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    net = spread(
        nn.Sequential(
            nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)
        ).eval()
    )
    found = tmp_path_factory.mktemp("noisy") / "net.onnx"
    htp_export.export(net, (x(4, 64),), found, verbose=False)
    return found


def test_a_machine_that_becomes_slower_does_not_change_times(file, monkeypatch):
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


def test_plans_of_the_front_have_medians_and_no_noise_makes_one_better(file):
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


def test_what_does_not_differ_is_said(file):
    found = htp_export.search(file, SPACE, objectives=["error", "size"], trials=4, repeats=2)
    assert "plans were measured 2 more times: no value differed" in found.notes[-1]
    with pytest.raises(InputError, match="one measurement has no spread"):
        htp_export.search(file, SPACE, repeats=1)


def test_sensitivity_has_the_spread_of_a_metric(file):
    found = htp_export.sensitivity(
        file, ["int8-dynamic"], metric=noisy(1), repeats=3, all_but=False
    )
    values = [row.alone for row in found.ranking]
    assert all(measured is not None and measured.spread["metric"] > 0 for measured in values)


def test_the_command_shows_the_spread(file, capsys):
    words = "--choices int8-dynamic,fp32 --objectives latency,size --trials 4 --runs 3 --repeats 3"
    assert main(["search", str(file), *words.split()]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "latency ±" in said
    assert "were measured 3 more times: medians and half the range of latency" in said


MODULES = {
    path: [Choice("fp32", 0, 0.0), Choice("int8", -6, error / 10), Choice("int4", -8, error)]
    for path, error in {"a": 1.0, "b": 2.0, "c": 8.0}.items()
}


def plan(names: str, error: float) -> MeasuredPlan:
    choices = dict(zip("abc", names.split(), strict=True))
    size = 24 + sum(
        choice.size
        for path, name in choices.items()
        for choice in MODULES[path]
        if choice.name == name
    )
    return MeasuredPlan(choices, size, error)


MEASURED = [plan("int4 int4 int4", 11.0), plan("fp32 fp32 fp32", 0.0), plan("int8 int8 int8", 1.1)]


def test_the_plan_that_is_predicted_to_be_the_most_below_the_front_comes_first():
    first, *others = refined_plans(MEASURED, MODULES, 10)
    assert first == {"a": "int4", "b": "int8", "c": "int8"}  # 2 instead of 11 at 4 bytes
    assert {"a": "int4", "b": "int4", "c": "int8"} in others
    assert all(each not in [dict(known.choices) for known in MEASURED] for each in (first, *others))


def test_what_does_not_add_up_in_a_plan_does_not_in_its_neighbour():
    smallest, neighbour = plan("int4 int4 int4", 11.0), {"a": "int4", "b": "int4", "c": "int8"}
    # as the sum says
    assert neighbour in refined_plans([smallest, plan("int4 int4 fp32", 3.0)], MODULES, 20)
    assert neighbour not in refined_plans([smallest, plan("int4 int4 fp32", 10.0)], MODULES, 20)


def test_there_are_no_more_than_asked_for_and_none_if_nothing_is_better():
    assert len(refined_plans(MEASURED, MODULES, 2)) == 2
    assert refined_plans([plan("fp32 fp32 fp32", 0.0)], MODULES, 5) == []
    assert refined_plans([], MODULES, 5) == []


def test_a_search_measures_them_before_optuna_chooses(file, monkeypatch):
    asked: list[dict[str, str]] = []

    def noted(*given: Any) -> list[dict[str, str]]:
        found = refined_plans(*given)
        asked.extend(found)
        return found

    monkeypatch.setattr(search_work, "refined_plans", noted)
    data = {"input": x(4, 64).numpy()}
    found = htp_export.search(
        file, ["int8-weights", "int4", "fp16", "fp32"], data=data, trials=16, first=2
    )
    assert 12 <= len([trial for trial in found.trials if trial.number is not None]) <= 16
    measured = [dict(trial.plan) for trial in found.trials]
    assert 0 < len(asked) <= 12
    assert all(each in measured for each in asked)


def test_plans_that_fail_are_noted_and_do_not_keep_a_search_from_ending(file, monkeypatch):
    measure = Measurer.measure

    def failing(self: Any, plan: Any, *given: Any, **named: Any) -> Any:
        if sum(precision.name != "fp32" for precision in plan.values()) > 1:
            raise InputError("no two modules")
        return measure(self, plan, *given, **named)

    monkeypatch.setattr(Measurer, "measure", failing)
    data = {"input": x(4, 64).numpy()}
    found = htp_export.search(file, ["int4", "fp32"], data=data, trials=8, first=2)
    assert found.failed > 0
    assert "no two modules" in found.notes
