"""Errors say whose fault they are: that of the model, of the caller's own code, of an option, or of htp_export."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import htp_export
from htp_export.command.main import main
from htp_export.errors import InputError, UserCodeError, described

CODE = """
import sys

def metric():
    return measure

def measure(outputs):
    return len(outputs) / 0

def data():
    yield {"input": [[0.0] * 32] * 2}
    raise LookupError("no more data\\nin this folder")

def leaves():
    sys.exit(3)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights and sizes lie in a data file, in a folder that is not the current one."""
    folder = tmp_path_factory.mktemp("made")
    net = torch.nn.Sequential(
        torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32)
    ).eval()
    htp_export.export(net, (torch.randn(2, 32),), folder / "net.onnx", verbose=False)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / f"code_{tmp_path.name}.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return made


def raises(_: object) -> float:
    raise ZeroDivisionError("no labels")


def test_a_metric_that_raises_is_told_with_its_line(folder):
    place = r"\(.*test_whose_fault.py:\d+, in raises\)"
    with pytest.raises(
        UserCodeError, match=rf"metric: raised ZeroDivisionError: no labels {place}"
    ):
        htp_export.sensitivity(folder / "net.onnx", ["int4"], metric=raises)


def test_data_that_raise_are_told_with_their_line(folder):
    def runs() -> Iterator[dict[str, object]]:
        yield {"input": np.ones((2, 32), np.float32)}
        raise LookupError("no more")

    with pytest.raises(
        UserCodeError,
        match=r"data: raised LookupError: no more \(.*test_whose_fault.py:\d+, in runs",
    ):
        htp_export.quantize(folder / "net.onnx", {"0": "int8"}, data=runs())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("sensitivity FILE --precision int4 --metric CODE:metric", "division by zero (CODE.py:8, in measure)"),
        ("search FILE --choices int4 --objective metric --metric CODE:metric", "raised ZeroDivisionError"),
        ("quantize FILE --rule 0=int8 -o o.onnx --data CODE:data", "more data in this folder (CODE.py:12, in data)"),
        ("export --entry CODE:leaves -o o.onnx", "CODE:leaves: raised SystemExit: 3 (CODE.py:15, in leaves)"),
        ("quantize FILE --rule 0=int8 -o o.onnx --metric CODE:leaves", "raised SystemExit: 3"),
        *((f"{command} --seed {seed}", "--seed") for seed in ("-1", "5000000000") for command in (
            "compare FILE FILE", "quantize FILE int8 -o o.onnx", "prune FILE --rule 0=0.5 --method random -o o.onnx",
            "sensitivity FILE", "search FILE --choices int4", "tree --entry CODE:net", "verify FILE --entry CODE:net",
            "export --entry CODE:net -o o.onnx", "carry FILE FILE -o o.onnx")),
        ("run onnxruntime FILE -o o.onnx --set providers=3", "onnxruntime: providers is 3, and takes Sequence[str]"),
        ("run onnxoptimizer FILE -o o.onnx --set passes=3", "onnxoptimizer: passes is 3, and takes Sequence[str]"),
        ("run onnxruntime FILE -o o.onnx --set lvl=3", "--set lvl: onnxruntime has no option 'lvl'"),
        ("profile FILE --threads 100000", "--threads, on "),
        ("profile FILE --engine openvino --threads 100000", "--threads, on "),
        ("profile FILE --runs 99999999999999999999999", "--runs"),
        ("profile FILE --warmup 99999999999999999999999", "--warmup"),
        ("sensitivity FILE --runs 99999999999999999999999", "--runs"),
        ("search FILE --choices int4 --trials 99999999999999999999999", "--trials"),
        ("compare FILE FILE --dims input=99999999999999999999999", ""),
    ],
)  # fmt: skip
def test_commands_say_whose_fault_it_is(folder, capsys, command, message):
    code = next(Path().glob("code_*.py"))
    words = command.replace("FILE", str(folder / "net.onnx")).replace("CODE", code.stem).split()
    assert main(words) == 2, capsys.readouterr().err
    error = capsys.readouterr().err
    assert message.replace("CODE.py", str(code.absolute())).replace("CODE", code.stem) in error
    assert error.count("\n") == 1
    assert "valid ONNX" not in error
    assert not Path("o.onnx").exists()


def test_python_takes_seeds_and_numbers_of_runs_in_their_range_only(folder):
    file = folder / "net.onnx"
    uses = (
        lambda: htp_export.compare(file, file, seed=-1),
        lambda: htp_export.quantize(file, "int8", seed=-1),
        lambda: htp_export.prune(file, {"0": 0.5}, method="random", seed=2**40),
        lambda: htp_export.profile(file, runs=10**23),
        lambda: htp_export.sensitivity(file, ["int4"], runs=10**23),
    )
    for use in uses:
        with pytest.raises(InputError, match="is a whole number from"):
            use()


def test_a_fault_of_our_own_is_no_fault_of_the_model_or_of_a_tool(folder, monkeypatch, capsys):
    from htp_export.capabilities.carry import adapting
    from htp_export.capabilities.quantize.work import Work
    from htp_export.costs import costing

    def fails(*_: object, **__: object) -> None:
        raise LookupError("no such axis")

    file = folder / "net.onnx"
    monkeypatch.setattr(costing, "read_flat", fails)
    monkeypatch.setattr(Work, "cut_out", fails)
    monkeypatch.setattr(adapting, "read_flat", lambda *_, **__: len(3))
    for use in (lambda: htp_export.cost(file), lambda: htp_export.quantize(file, {"0": "int4"})):
        with pytest.raises(LookupError, match="no such axis"):
            use()
    for command in ("quantize FILE --rule 0=int4 -o o.onnx", "run onnxruntime FILE -o o.onnx"):
        assert main(command.replace("FILE", str(file)).split()) == 3
        assert "this is a bug in htp_export" in capsys.readouterr().err


def test_an_import_that_failed_is_described_by_its_cause():
    with pytest.raises(ModuleNotFoundError) as lazy:  # as transformers does it
        raise ModuleNotFoundError("Could not import module 'BertModel'") from RuntimeError(
            "operator nms does not exist"
        )
    assert described(lazy.value) == "RuntimeError: operator nms does not exist"
