"""Targets: what several processes write is whole, with no data file too many; a link to itself is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import htp_export
from htp_export.command.main import main
from htp_export.files.model_files import external_files, read_model
from tests.all_commands import COMMANDS, arguments, companions, example
from tests.handmade import encoder

ROOT = Path(__file__).parents[2]
WRITES = """
import sys
import numpy as np
import onnx_ir as ir
from htp_export.files.model_files import write_model
from tests.handmade import encoder

model = encoder(16)
for number in range(30):
    for value in model.graph.initializers.values():
        value.const_value = ir.tensor(np.full((16, 16), number, np.float32), name=value.name)
    write_model(model, sys.argv[1], True)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("net")
    model, args = example()
    htp_export.export(model, args, folder / "net.onnx", verbose=False)
    return {"FILE": str(folder / "net.onnx"), **companions(folder)}


def test_processes_that_write_one_target_leave_one_model_and_its_data(tmp_path: Path) -> None:
    target = tmp_path / "net.onnx"
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-c", WRITES, str(target)]
    running = [subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    model = read_model(target)
    assert sorted(tmp_path.iterdir()) == sorted([target, *external_files(model)])
    values = {float(value.const_value.numpy().flat[0]) for value in model.graph.initializers.values()}
    assert values == {29.0}
    assert [node.op_type for node in model.graph] == [node.op_type for node in encoder(16).graph]


@pytest.mark.parametrize("command", [name for name, words in COMMANDS.items() if "-o " in words])
def test_a_link_to_itself_is_refused_as_an_output(
    command: str,
    files: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    name = COMMANDS[command].rpartition("-o ")[2]
    Path(name).symlink_to(name)
    assert main(arguments(command, files)) == 2
    assert f"{name}: cannot be written: the symbolic links form a cycle" in " ".join(capsys.readouterr().err.split())
    assert [file.name for file in tmp_path.iterdir()] == [name]
