"""A signal that asks a command to end: no unfinished file is left, and the exit status says which signal it was."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import htp_export
from htp_export.command.main import main
from htp_export.files import filesystem, write_file
from tests.all_commands import example
from tests.exporting import every
from tests.files.test_data_files import listing

pytestmark = pytest.mark.skipif(
    not hasattr(signal, "SIGHUP"), reason="other systems have other signals"
)

# A process that nohup started has SIGHUP ignored, and so have its children.
ENDINGS = [
    each
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    if signal.getsignal(each) != signal.SIG_IGN
]

ENTRY = """
import os, signal, torch

class Net(torch.nn.Module):
    def forward(self, x):
        os.kill(os.getpid(), signal.{name})
        return x.exp()

def net():
    return Net(), (torch.ones(2),)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    model, args = example()
    htp_export.export(model, args, tmp_path / "net.onnx", verbose=False)
    monkeypatch.chdir(tmp_path)
    return "net.onnx"


@pytest.mark.long
@pytest.mark.parametrize("number", ENDINGS)
@pytest.mark.parametrize("exporter", ["--dynamo", "--torchscript"])
def test_an_export_that_is_ended_leaves_nothing(exporter, number, file, tmp_path, capsys):
    name = f"ended_{tmp_path.name}_{number.name.lower()}"
    (tmp_path / f"{name}.py").write_text(ENTRY.format(name=number.name))
    before, handlers = listing(tmp_path), [*map(signal.getsignal, ENDINGS)]
    assert main(["export", "--entry", f"{name}:net", exporter, "-o", "out.onnx"]) == 128 + number
    word = "interrupted" if number == signal.SIGINT else "terminated"
    assert f"htp-export: error: {word}" in capsys.readouterr().err
    assert set(listing(tmp_path)) - {"__pycache__"} == set(before)
    assert [*map(signal.getsignal, ENDINGS)] == handlers


# Functions of the last steps of a write, in which a signal leaves the old files, or the new ones, and no more.
PLACES: list[tuple[Any, str]] = [
    (filesystem, "make_work_folder"),
    (filesystem, "sync_file"),
    (filesystem, "remove"),
    (write_file._Step, "keep"),
    (write_file._Step, "do"),
    (write_file._Removal, "done"),
    (write_file, "_note_placed"),
    (write_file.WorkFolder, "close"),
]


@pytest.mark.long
@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place[1])
@pytest.mark.parametrize("times", every(2, [1, 2]))
def test_a_signal_in_the_last_steps_leaves_a_whole_model_and_no_work_folder(
    times: int,
    place: tuple[Any, str],
    is_after: bool,
    file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main(["optimize", file, "-o", "out.onnx"]) == 0
    owner, name = place
    original, calls = getattr(owner, name), []

    def signalled(*given: Any, **named: Any) -> Any:
        calls.append(name)
        if len(calls) == times and not is_after:
            signal.raise_signal(signal.SIGTERM)
        result = original(*given, **named)
        if len(calls) == times and is_after:
            signal.raise_signal(signal.SIGTERM)
        return result

    monkeypatch.setattr(owner, name, signalled)
    status = main(["optimize", file, "-o", "out.onnx"])
    monkeypatch.undo()
    assert status == (143 if len(calls) >= times else 0)
    assert len(htp_export.load(tmp_path / "out.onnx").model.graph) > 0
    assert not list(tmp_path.glob(".htp-*"))
    names = [name for name in listing(tmp_path) if name.startswith("out.onnx")]
    assert len(names) == 2


@pytest.mark.long
def test_a_program_that_gets_a_signal_says_so_and_ends(file, tmp_path):
    (tmp_path / "ended.py").write_text(ENTRY.format(name="SIGTERM"))
    command = [
        sys.executable,
        "-m",
        "htp_export",
        "export",
        "--entry",
        "ended:net",
        "-o",
        "out.onnx",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    done = subprocess.run(
        command,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr.splitlines()[-1]) == (143, "htp-export: error: terminated")
    assert not list(tmp_path.glob(".htp-*"))


def test_functions_in_python_leave_signals_alone(file, tmp_path, monkeypatch):
    before = [*map(signal.getsignal, ENDINGS)]
    seen: list[list[Any]] = []
    sync = filesystem.sync_folder
    monkeypatch.setattr(
        filesystem,
        "sync_folder",
        lambda path: (seen.append([*map(signal.getsignal, ENDINGS)]), sync(path)),
    )
    for _ in range(2):
        htp_export.optimize(tmp_path / file, tmp_path / "out.onnx")
    assert seen
    assert all(handlers == before for handlers in seen)
