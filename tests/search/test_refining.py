"""Plans next to measured ones: which are predicted to be better, and what a search does with them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import htp_export
from htp_export.capabilities.search.fronts import Choice, MeasuredPlan, refined_plans
from htp_export.errors import InputError
from tests.nets import spread, x

MODULES = {
    path: [Choice("fp32", 0, 0.0), Choice("int8", -6, error / 10), Choice("int4", -8, error)]
    for path, error in {"a": 1.0, "b": 2.0, "c": 8.0}.items()
}


def plan(names: str, error: float) -> MeasuredPlan:
    choices = dict(zip("abc", names.split(), strict=True))
    size = 24 + sum(choice.size for path, name in choices.items() for choice in MODULES[path] if choice.name == name)
    return MeasuredPlan(choices, size, error)


MEASURED = [plan("int4 int4 int4", 11.0), plan("fp32 fp32 fp32", 0.0), plan("int8 int8 int8", 1.1)]


def test_the_plan_that_is_predicted_to_be_the_most_below_the_front_comes_first() -> None:
    first, *others = refined_plans(MEASURED, MODULES, 10)
    assert first == {"a": "int4", "b": "int8", "c": "int8"}  # 2 instead of 11 at 4 bytes
    assert {"a": "int4", "b": "int4", "c": "int8"} in others
    assert all(each not in [dict(known.choices) for known in MEASURED] for each in (first, *others))


def test_what_does_not_add_up_in_a_plan_does_not_in_its_neighbour() -> None:
    smallest, neighbour = plan("int4 int4 int4", 11.0), {"a": "int4", "b": "int4", "c": "int8"}
    assert neighbour in refined_plans([smallest, plan("int4 int4 fp32", 3.0)], MODULES, 20)  # as the sum says
    assert neighbour not in refined_plans([smallest, plan("int4 int4 fp32", 10.0)], MODULES, 20)


def test_there_are_no_more_than_asked_for_and_none_if_nothing_is_better() -> None:
    assert len(refined_plans(MEASURED, MODULES, 2)) == 2
    assert refined_plans([plan("fp32 fp32 fp32", 0.0)], MODULES, 5) == []
    assert refined_plans([], MODULES, 5) == []


@pytest.fixture(scope="module")
def program() -> Any:
    net = spread(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval())
    return htp_export.export(net, (x(4, 64),), verbose=False)


def test_a_search_measures_them_before_optuna_chooses(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    from htp_export.capabilities.search import search_work

    asked: list[dict[str, str]] = []

    def noted(*given: Any) -> list[dict[str, str]]:
        found = refined_plans(*given)
        asked.extend(found)
        return found

    monkeypatch.setattr(search_work, "refined_plans", noted)
    data = {"input": x(4, 64).numpy()}
    found = htp_export.search(program, ["int8-weights", "int4", "fp16", "fp32"], data=data, trials=16, first=2)
    assert 12 <= len([trial for trial in found.trials if trial.number is not None]) <= 16
    measured = [dict(trial.plan) for trial in found.trials]
    assert 0 < len(asked) <= 12
    assert all(each in measured for each in asked)


def test_plans_that_fail_do_not_keep_a_search_from_ending(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("optuna")
    from htp_export.capabilities.search.measuring import Measurer

    measure = Measurer.measure

    def failing(self: Any, plan: Any, *given: Any, **named: Any) -> Any:
        if sum(precision.name != "fp32" for precision in plan.values()) > 1:
            raise InputError("no two modules")
        return measure(self, plan, *given, **named)

    monkeypatch.setattr(Measurer, "measure", failing)
    data = {"input": x(4, 64).numpy()}
    found = htp_export.search(program, ["int4", "fp32"], data=data, trials=8, first=2)
    assert found.failed > 0
