"""RunSettings: every function that runs a model takes the same object apart, and refuses the same values."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

import htp_export
from htp_export.errors import InputError
from htp_export.runtime.samples import Samples
from htp_export.runtime.settings import DEFAULTS, RunSettings
from tests.handmade import encoder

PACKAGE = Path(htp_export.__file__).parent
NAMES = {field.name for field in fields(RunSettings)}
ARRAYS = {"x": np.ones((2, 4), np.float32)}
OTHERS: dict[str, dict[str, Any]] = {
    "compare": {"b": encoder()},
    "optimize": {"verify": True},
    "place": {"plan": {".": "cpu"}},
    "quantize": {"plan": {"layer.0.fc": "int8"}},
    "search": {"space": ["int8", "fp32"], "trials": 2},
    "sensitivity": {"precisions": ["int8"]},
    "view": {"measure": "time", "explorer": False},
}
"""The other arguments with which each public function runs a model."""


def settings_of(name: str) -> set[str]:
    """The settings that are parameters of a public function."""
    function = getattr(htp_export, name)
    return NAMES & inspect.signature(function).parameters.keys() if callable(function) else set()


RUNNING = sorted(name for name in htp_export.__all__ if settings_of(name) & {"data", "providers"})


def having(*names: str) -> list[str]:
    return [name for name in RUNNING if settings_of(name).issuperset(names)]


def called(name: str, **given: Any) -> Any:
    pytest.importorskip("optuna")
    return getattr(htp_export, name)(encoder(), **OTHERS.get(name, {}), **given)


def test_public_functions_have_the_defaults_of_the_settings():
    assert len(RUNNING) >= 10
    for name in RUNNING:
        parameters = inspect.signature(getattr(htp_export, name)).parameters
        for setting in settings_of(name) - {"runs"}:  # how often is another question for each
            assert parameters[setting].default == getattr(DEFAULTS, setting), (name, setting)


@pytest.mark.parametrize("name", having("dims"))
def test_a_size_that_no_input_has_is_refused_alike(name):
    with pytest.raises(InputError, match=r"no open dimension|this model has no open dimensions"):
        called(name, dims={"nosuch": 2})


@pytest.mark.parametrize("name", having("seed", "dims"))
@pytest.mark.parametrize("seed", [-1, 0.5, True, 2**32])
def test_a_seed_that_no_generator_accepts_is_refused_alike(name, seed):
    with pytest.raises(InputError, match=rf"^seed {seed!r}: it is a whole number from 0 to \d+$"):
        called(name, seed=seed)


# cost and place do not run the model: some inputs may have examples, and others shapes
@pytest.mark.parametrize("name", [*having("seed", "dims"), "profile"])
def test_data_and_shapes_of_random_inputs_exclude_each_other(name):
    with pytest.raises(InputError, match=r"^shapes are for random inputs; give either shapes or"):
        called(name, data=ARRAYS, shapes={"x": (2, 4)})


@pytest.mark.parametrize("name", [name for name in having("providers") if name != "verify"])
def test_a_provider_that_is_not_installed_is_refused_alike(name):
    with pytest.raises(InputError, match=r"this ONNX Runtime has no NoSuchProvider, only .*CPU"):
        called(name, providers=iter(["NoSuchProvider"]))


@pytest.mark.parametrize("name", having("runs"))
def test_a_number_of_timed_runs_is_refused_alike(name):
    with pytest.raises(InputError, match=r"^runs -1: it is a whole number from [01] to 1000000$"):
        called(name, runs=-1)


def test_settings_can_be_used_for_several_sessions_and_are_not_compared_by_their_arrays():
    settings = RunSettings(ARRAYS, providers=iter(["CPUExecutionProvider"]))
    assert settings.providers == ("CPUExecutionProvider",)
    assert settings != replace(settings)
    assert settings.has_default_session
    assert not replace(settings, providers=()).has_default_session
    options = onnxruntime.SessionOptions()
    assert not replace(settings, session_options=options).has_default_session


@pytest.mark.parametrize(
    "given", [{"data": ARRAYS}, {"dims": {"n": 1}}, {"shapes": {"x": (1,)}}, {"seed": 1}]
)
def test_settings_of_inputs_are_told_from_none(given):
    assert RunSettings(**given).has_inputs
    assert not replace(DEFAULTS, runs=3).has_inputs


def test_random_runs_have_the_seed_and_the_next_ones():
    x = ir.val("x", ir.DataType.FLOAT, [3])
    model = ir.Model(ir.Graph([x], [], nodes=[]), ir_version=10)

    def only(seed: int) -> list[float]:
        arrays: list[float] = (
            Samples.of(RunSettings(seed=seed), model).only("run").arrays["x"].tolist()
        )
        return arrays

    runs = [arrays["x"].tolist() for arrays in Samples.of(RunSettings(seed=7), model)]
    assert runs == [only(7), only(8), only(9), only(10)]
    assert only(7) != only(8)


def loose() -> Iterator[str]:
    """The functions with three settings or more as parameters of their own."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef):
                continue
            arguments = node.args
            every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            if len(NAMES & {argument.arg for argument in every}) >= 3:
                yield node.name


@pytest.mark.long
def test_only_public_functions_have_settings_as_parameters():
    assert set(loose()) == {name for name in RUNNING if len(settings_of(name)) >= 3}
