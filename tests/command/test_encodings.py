"""Commands write to a stdout and a stderr of any encoding: signs have counterparts in ASCII, names are escaped."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import htp_export
from htp_export.command.main import main
from htp_export.files.text_files import read_json

NAME = "größe模"
CODE = f"""
import torch

def net():
    torch.manual_seed(0)
    modules = {{f"{NAME}{{i}}": torch.nn.Linear(16, 16) for i in range(3)}}
    return torch.nn.Sequential(__import__("collections").OrderedDict(modules)), torch.randn(2, 16)
"""
COMMANDS = [
    "tree FILE", "tree FILE --no-fold --csv", "tree FILE --json", "tree --entry {code}:net", "cost FILE", "nodes FILE",
    "nodes FILE --csv", "profile FILE --runs 1", "verify FILE --entry {code}:net --all", "compare FILE FILE --all",
    "diff FILE OTHER", "forensics FILE", "forensics FILE --list", "fingerprint FILE", "place FILE --show",
    "place FILE --rule .=cpu -o o.onnx", "quantize FILE int8 --dry-run", "quantize FILE --rule **=int4 -o o.onnx",
    "prune FILE --rule **=0.5 -o o.onnx", "sensitivity FILE --precision int4", "search FILE --choices int4 --trials 1",
    "optimize FILE -o o.onnx --attribution", "optimize --list", "partition FILE 2 -o stages", "rename FILE -o o.onnx",
    "functions FILE ** -o o.onnx", "extract FILE {name}0 -o o.onnx", "export --entry {code}:net -o o.onnx --verify",
    "view FILE -o o.html", "pipeline steps.yaml -m FILE -o o.onnx", "functions FILE --undo -o o.onnx", "search --help",
    "carry FILE OTHER -o o.onnx", "quantize FILE int8 --plan-for ort -o o.json",
    "lora insert FILE ** -o o.onnx", "run onnxruntime FILE -o o.onnx",
]  # fmt: skip
WRONG = [
    "tree 模.onnx",
    "extract FILE 模 -o o.onnx",
    "cost FILE --select 模",
    "export --entry 模:net -o o.onnx",
    "模",
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    torch.manual_seed(0)
    net = torch.nn.Sequential()
    for number in range(3):
        net.add_module(f"{NAME}{number}", torch.nn.Linear(16, 16))
    htp_export.export(net.eval(), (torch.randn(2, 16),), folder / "net.onnx", verbose=False)
    htp_export.prune(folder / "net.onnx", {"**": 0.5}, folder / "other.onnx")
    (folder / "steps.yaml").write_text("- optimize\n- compare\n")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"code_{tmp_path.name}.py").write_text(CODE, encoding="utf-8")
    return made


def run(
    folder: Path, command: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str, str]:
    """The exit status, and what is written to a stdout and a stderr with this encoding."""
    files = {
        "FILE": folder / "net.onnx",
        "OTHER": folder / "other.onnx",
        "steps.yaml": folder / "steps.yaml",
    }
    words = (
        command.replace("{code}", next(Path().glob("code_*.py")).stem)
        .replace("{name}", NAME)
        .split()
    )
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict") for _ in range(2)]
    with monkeypatch.context() as changed:
        changed.setattr(sys, "stdout", streams[0])
        changed.setattr(sys, "stderr", streams[1])
        status = main([str(files.get(word, word)) for word in words])
    texts = []
    for stream in streams:
        stream.flush()
        assert stream.errors == "strict"
        texts.append(stream.buffer.getvalue().decode(encoding))  # type: ignore[attr-defined]
    return status, texts[0], texts[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("command", "encoding"),
    [*((command, "ascii") for command in COMMANDS),
     *((command, encoding) for command in COMMANDS[:3] for encoding in ("cp1252", "latin-1"))],
)  # fmt: skip
def test_every_command_writes_in_every_encoding(folder, monkeypatch, command, encoding):
    status, out, error = run(folder, command, encoding, monkeypatch)
    assert "a bug in" not in error
    assert status in (0, 1), error
    assert out
    if "--json" in command:
        assert NAME in out.encode().decode("unicode_escape")
        json.loads(out)


@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
@pytest.mark.parametrize("command", WRONG)
def test_errors_are_written_in_every_encoding(folder, monkeypatch, command, encoding):
    status, out, error = run(folder, command, encoding, monkeypatch)
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert r"\u6a21" in error


def test_lines_fall_back_to_ascii_and_names_are_escaped(folder, monkeypatch):
    lines = {encoding: run(folder, "tree FILE --no-fold", encoding, monkeypatch)[1].splitlines()
             for encoding in ("utf-8", "cp1252", "ascii")}  # fmt: skip
    assert [line.split("  ")[0] for line in lines["utf-8"][2:5]] == [
        f"├── {NAME}0", f"├── {NAME}1", f"└── {NAME}2"]  # fmt: skip
    assert [line.split("  ")[0] for line in lines["cp1252"][2:5]] == [
        rf"+-- größe\u6a21{n}" for n in range(3)
    ]
    assert [line.split("  ")[0] for line in lines["ascii"][2:5]] == [
        rf"+-- gr\xf6\xdfe\u6a21{n}" for n in range(3)
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_stdout_that_is_full_is_no_bug(folder):
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        ended = subprocess.run(
            [sys.executable, "-m", "htp_export", "nodes", str(folder / "net.onnx")],
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    message = "htp-export: error: the output cannot be written: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (2, message)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_json_is_read_as_any_shell_writes_it(encoding, tmp_path):
    """``>`` of Windows PowerShell writes UTF-16, ``Out-File -Encoding utf8`` a byte order mark."""
    (tmp_path / "a.json").write_text(json.dumps({NAME: 1}, ensure_ascii=False), encoding=encoding)
    assert read_json(tmp_path / "a.json") == {NAME: 1}
