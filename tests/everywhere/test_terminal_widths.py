"""Output in terminals of several widths, of a decoder with a cache: tables fit, and names are not torn apart."""

import json
import re
import shutil
from pathlib import Path

import pytest

from htp_export.command.main import main
from tests.all_commands import NAMES, WITHOUT_FILE
from tests.decoders import DECODERS

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
BLOCK = "transformer.h.0"
COMMANDS = {
    "info": "FILE",
    "tree": "FILE",
    "nodes": "FILE",
    "nodes --node": "FILE --node 12",
    "nodes --table": "FILE --table parameters",
    "view": "FILE --no-explorer -o out.html",
    "cost": "FILE",
    "profile": "FILE --runs 1 --warmup 0 --threads 1",
    "compare": "FILE FILE",
    "diff": "FILE SMALL",
    "extract": f"FILE {BLOCK} -o out.onnx",
    "functions": "FILE transformer.h.* -o out.onnx",
    "tap": "FILE transformer.h.*:out -o out.onnx",
    "steer": f"FILE {BLOCK}:out -o out.onnx",
    "rename": "FILE -o out.onnx",
    "partition": "FILE 2 -o stages",
    "place": "FILE --rule .=cpu -o out.onnx",
    "place --show": "FILE --show",
    "optimize": "FILE -o out.onnx --level tolerant",
    "quantize": f"FILE --rule {BLOCK}=int8-dynamic -o out.onnx",
    "prune": f"FILE --rule {BLOCK}=0.5 -o out.onnx",
    "sensitivity": f"FILE --precision int8-weights --select {BLOCK}.mlp.c_fc",
    "search": f"FILE --choices int8-weights --trials 2 --select {BLOCK}.mlp.c_fc",
    "lora insert": "FILE **.c_fc -o out.onnx",
    "run": "onnxoptimizer FILE -o out.onnx",
    "carry": "FILE FILE -o out.onnx",
    "forensics": "FILE",
    "forensics --list": "FILE --list",
    "fingerprint": "FILE",
    "pipeline": "STEPS -m FILE -o out.onnx",
}
NEED_OTHER_FILES = {"verify", "splice", "bind", "lora fuse"}
"""Commands that need more than one file of a decoder; what they print is drawn as by the others."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("decoder")
    sizes = [f"{name}={value}" for name, value in DECODERS["gpt2"].items()]
    words = ["export", "gpt2", "--random-weights", "--task", "text-generation-with-past", "-q"]
    for size in sizes:
        words += ["--set", size]
    file, small, steps = folder / "decoder.onnx", folder / "small.onnx", folder / "steps.yaml"
    assert main([*words, "-o", str(file)]) == 0
    assert main(["optimize", str(file), "-o", str(small), "--level", "tolerant", "-q"]) == 0
    steps.write_text(json.dumps(["optimize", "compare"]), encoding="utf-8")
    return {"FILE": str(file), "SMALL": str(small), "STEPS": str(steps)}


def words_of(command: str, files: dict[str, str]) -> list[str]:
    """What is typed: an option in a key of `COMMANDS` only tells it from another one."""
    name = command.partition(" --")[0]
    typed = [files.get(word, word) for word in COMMANDS[command].split()]
    return [*name.split(), *typed]


def test_every_command_is_here():
    names = {name.partition(" --")[0] for name in COMMANDS}
    assert names | NEED_OTHER_FILES | {*WITHOUT_FILE} == NAMES | {*WITHOUT_FILE}


@pytest.mark.long
@pytest.mark.parametrize("width", [80, 120, 200])
def test_tables_fit_and_names_stay_whole(files, width, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal
    monkeypatch.setenv("COLUMNS", str(width))
    for command in COMMANDS:
        assert main(words_of(command, files)) == 0, (command, capsys.readouterr().err)
        lines = _COLOURS.sub("", capsys.readouterr().out).splitlines()
        assert lines, command
        assert max(map(len, lines)) <= width, command
        # A name that is wrapped in itself has a rest that begins another line, as of `transformer.h.0`.
        torn = [
            line
            for line in lines
            if re.match(r"\s*(r|er|mer|ormer|former)\.(h|wte|wpe|drop)", line)
        ]
        assert not torn, (command, torn)
        for made in tmp_path.iterdir():
            shutil.rmtree(made) if made.is_dir() else made.unlink()


@pytest.mark.long
def test_lines_for_a_pipe_have_all_columns_and_no_padding(files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    for command in ("diff", "forensics --list", "partition"):
        assert main(words_of(command, files)) == 0
        lines = capsys.readouterr().out.splitlines()
        assert not any("too narrow" in line or line != line.rstrip() for line in lines)
        assert f"{Path(files['FILE']).name}" not in lines[0]
