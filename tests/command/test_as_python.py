"""``--as-python`` prints a program that does what the command does, and does nothing itself."""

import ast
from pathlib import Path

import onnx
import pytest

import htp_export
from htp_export.command.main import main
from tests.all_commands import COMMANDS, arguments, companions, example

OF_MODELS = {"verify", "pipeline"}
"""Commands that pass objects which have no short form in Python."""

RUN = ("extract", "optimize", "quantize", "tap", "rename", "diff", "lora insert", "place")
"""Commands whose programs are run here."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The files of the commands, in a folder of their own."""
    folder = tmp_path_factory.mktemp("commands")
    model, args = example()
    htp_export.export(model, args, folder / "net.onnx")
    return {"FILE": str(folder / "net.onnx"), **companions(folder)}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_as_python_is_a_program_and_nothing_is_written(
    command, files, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    status = main([*arguments(command, files), "--as-python"])
    printed = capsys.readouterr()
    assert list(tmp_path.iterdir()) == []
    if command in OF_MODELS:
        assert status == 2
        assert "--as-python" in printed.err
        return
    assert status == 0
    *_, call, shown = ast.parse(printed.out).body
    assert ast.unparse(call).startswith("result = htp_export.")
    assert ast.unparse(shown) == "print(result)"
    if command in RUN:
        run_alike(command, printed.out, arguments(command, files), tmp_path, capsys)


def run_alike(command, program, words, folder, capsys):
    """Run the program and the command, and compare what they print and write."""
    output = folder / "out.onnx"
    exec(program, {})
    printed = capsys.readouterr().out
    graphs = [graph_of(output)] if output.exists() else []
    assert main([*words, *(["--force"] if output.exists() else [])]) == 0
    assert printed.splitlines()[-1].partition(" -> ")[0] in capsys.readouterr().out
    if graphs:
        assert graph_of(output) == graphs[0]


def graph_of(file: Path) -> bytes:
    return onnx.load(file).graph.SerializeToString(deterministic=True)
