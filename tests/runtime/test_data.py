"""Data: every form in which a user gives the inputs of runs, what is refused, and that no file runs code."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import htp_export
from htp_export.errors import FileError, InputError, ModelSourceError, UserCodeError
from htp_export.process.user_code import names_factory
from htp_export.runtime.data import check_runs, repeatable, single_run
from htp_export.runtime.samples import Samples
from htp_export.runtime.settings import RunSettings
from tests.handmade import encoder

CODE = """
import pathlib, numpy as np

def runs():
    pathlib.Path("ran").touch()
    return ({"x": np.full((2, 3), k, np.float32)} for k in range(3))

def files():
    return "runs"

def nothing():
    pass

def array():
    return np.ones(3)

def fails():
    raise ValueError("no disk")
"""
MODEL = ir.Model(
    ir.Graph([ir.val("x", ir.DataType.FLOAT, ["batch", 3])], [], nodes=[]), ir_version=10
)


@pytest.fixture(autouse=True)
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    name = f"code_{tmp_path.name}"
    Path(f"{name}.py").write_text(CODE, encoding="utf-8")
    Path("runs").mkdir()
    for number in range(3):
        np.savez(f"runs/{number}.npz", x=np.full((2, 3), number, np.float32))
    return name


def run(value: float, size: int = 2) -> dict[str, Any]:
    return {"x": np.full((size, 3), value, np.float32)}


def read(data: Any, **options: Any) -> list[float]:
    """The first number of each run, read twice."""
    samples = Samples.of(RunSettings(data, **options), MODEL, passes=2)
    found = [float(arrays["x"][0, 0]) for arrays in samples]
    assert [float(arrays["x"][0, 0]) for arrays in samples] == found
    return found


def test_runs_come_in_every_form(code):
    assert read(run(5)) == [5]
    assert read([run(5), run(6)]) == read(iter([run(5), run(6)])) == [5, 6]
    assert read("runs/1.npz") == read(Path("runs/1.npz")) == [1]
    assert read("runs") == read(Path("runs")) == [0, 1, 2]
    assert read(f"{code}:runs") == read(f"{code}:files") == [0, 1, 2]
    assert read(["runs/2.npz", run(7), "runs", f"{code}:runs"]) == [2, 7, 0, 1, 2, 0, 1, 2]
    assert read(Path(name) for name in ("runs/1.npz", "runs/0.npz")) == [1, 0]
    assert len(read(None)) == 4


def test_an_iterator_that_is_read_again_all_the_same_is_told():
    samples = Samples.of(RunSettings(iter([run(5), run(6)])), MODEL)
    assert len(list(samples)) == 2
    with pytest.raises(
        InputError,
        match="is an iterator, which can be read only once, but it is needed again; give a list",
    ):
        list(samples)


@pytest.mark.parametrize(
    "make", [iter, lambda runs: (each for each in runs), lambda runs: map(dict, runs), list]
)
def test_data_are_made_repeatable_once(make):
    data = repeatable(make([run(5), run(6)]))
    for _ in range(2):
        assert [float(arrays["x"][0, 0]) for arrays in Samples.of(RunSettings(data), MODEL)] == [
            5,
            6,
        ]
    assert repeatable(None) is None
    assert repeatable("runs") == "runs"


def test_runs_are_read_when_it_is_their_turn():
    taken: list[int] = []

    def runs() -> Iterator[dict[str, Any]]:
        for number in range(3):
            taken.append(number)
            yield run(number)

    samples = iter(Samples.of(RunSettings(runs()), MODEL))
    next(samples)
    assert taken == [0]


def test_random_inputs_have_the_sizes_that_are_given_and_data_must_have_them():
    def sizes(**options: Any) -> set[int]:
        return {len(arrays["x"]) for arrays in Samples.of(RunSettings(**options), MODEL)}

    assert (sizes(), sizes(dims={"batch": 5}), sizes(shapes={"x": (4, 3)})) == ({1}, {5}, {4})
    assert read(run(1), dims={"batch": 2}) == [1]
    with pytest.raises(InputError, match=r"data, run 0: .* dims has batch = 5"):
        read(run(1), dims={"batch": 5})
    with pytest.raises(InputError, match="shapes are for random inputs"):
        read(run(1), shapes={"x": (2, 3)})


@pytest.mark.parametrize(
    ("data", "error", "problem"),
    [
        (3, InputError, "data must be arrays by input name, several of these, .*, not int"),
        (
            np.ones((2, 3), np.float32),
            InputError,
            "data must be arrays by input name, .* not ndarray",
        ),
        (
            [np.ones(3)],
            InputError,
            "data, run 0: inputs must be a dict of name → array, not ndarray",
        ),
        ([], InputError, "data have no runs"),
        ({"y": 1}, InputError, "data, run 0: no input 'y' in this model, only 'x'"),
        (
            [run(0), {"x": np.ones((2, 4), np.float32)}],
            InputError,
            "data, run 1: input 'x': is float .2, 4., but the",
        ),
        (
            {"x": np.ones((2, 3))},
            InputError,
            "input 'x': is double .2, 3., but the model requires float .batch, 3.",
        ),
        ("nowhere.npz", FileError, "nowhere.npz: cannot be read"),
        (
            "nowhere",
            FileError,
            "nowhere: there is no such file or folder; data must be arrays by input name",
        ),
        ("{code}.py:runs", ModelSourceError, "an entry names a module, not its file: {code}:runs"),
        ("{code}:nosuch", ModelSourceError, "has no function 'nosuch'"),
        ("{code}:nothing", ModelSourceError, "{code}:nothing: returns NoneType, but data must be"),
        ("{code}:array", ModelSourceError, "{code}:array: returns ndarray, but data must be"),
        ("{code}:fails", UserCodeError, "{code}:fails: raised ValueError: no disk"),
    ],
    ids=str,
)
def test_what_is_no_data_is_refused(data, error, problem, code):
    given = data.replace("{code}", code) if isinstance(data, str) else data
    with pytest.raises(error, match=problem.replace("{code}", code)):
        read(given)


def test_a_folder_without_arrays_and_pickles_are_refused():
    Path("empty").mkdir()
    np.savez("pickled.npz", x=np.array([{}, None], dtype=object))
    for name, problem in {
        "empty": "is a folder without .npz files",
        "pickled.npz": "is not an .npz file of plain",
    }.items():
        with pytest.raises(FileError, match=f"{name}: {problem}"):
            check_runs(name)
        with pytest.raises(FileError, match=f"{name}: {problem}"):
            read([run(0), name])
    check_runs(["runs", "runs/1.npz", "nowhere:make"])  # a factory is not called


def test_one_run_is_taken_and_several_are_refused(code):
    assert Samples.of(RunSettings([run(3)]), MODEL).only("profile").arrays["x"][0, 0] == 3
    assert single_run("runs/2.npz", "cost")["x"][0, 0] == 2
    assert single_run(None, "cost") is None
    for data in ("runs", f"{code}:runs", [run(0), run(1)]):
        with pytest.raises(InputError, match="profile takes one run, but data have several"):
            Samples.of(RunSettings(data), MODEL).only("profile")


@pytest.mark.parametrize("use", ["cost", "place", "placement", "carry"])
def test_functions_of_one_run_refuse_several(use):
    files = {"carry": 2}.get(use, 1)
    data = [{"x": np.ones((2, 4), np.float32)}] * 2
    options = {"plan": {".": "cpu"}} if use == "place" else {}
    with pytest.raises(InputError, match=f"{use} takes one run, but data have several"):
        getattr(htp_export, use)(*[encoder()] * files, data=data, **options)


def test_a_text_names_a_factory_only_if_it_is_no_file():
    Path("a:b").touch()
    assert [names_factory(each) for each in ("m:f", "a:b", "runs", "C:x.npz", "/m:f", 3)] == [
        True,
        *[False] * 5,
    ]
