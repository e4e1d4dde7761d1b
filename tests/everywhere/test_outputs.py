"""Paths that commands write: what is read stays as it is, and so does what is no file of the kind that is written."""

import shutil
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import htp_export
from htp_export.command.commands import CommandGroup, command_names
from htp_export.command.main import main
from htp_export.errors import FileError
from tests.files.test_data_files import listing

ENTRY = "import torch\n\ndef net():\n    return torch.nn.Linear(4, 4), torch.ones(2, 4)\n"

# Each command that writes, without -o; FILE is an ONNX file with its weights beside it.
MODELS = {
    "bind": "FILE weights.safetensors",
    "carry": "FILE FILE --shapes shapes.json",
    "export": "--entry {net}:net",
    "extract": "FILE 0",
    "functions": "FILE 0",
    "lora fuse": "FILE factors.safetensors",
    "functions --undo": "FILE",
    "lora insert": "FILE 0",
    "rename": "FILE",
    "optimize": "FILE",
    "pipeline": "steps.yaml -m FILE",
    "place": "FILE plan.json --shapes shapes.json",
    "prune": "FILE plan.json",
    "quantize": "FILE plan.json --data data.npz",
    "run": "onnxruntime FILE",
    "splice": "FILE 0 other.onnx",
    "steer": "FILE 0:out",
    "tap": "FILE 0:out",
}
OTHERS = {
    "diff": "FILE other.onnx",
    "quantize --plan-for": "ort FILE plan.json",
    "lora adapter": "FILE factors.safetensors",
    "partition": "FILE 2",
    "search": "FILE --choices int4",
    "view": "FILE --no-explorer",
}
SOURCES = ["{net}.py", "data.npz", "factors.safetensors", "net.onnx.data", "page.html", "plan.json", "shapes.json",
           "steps.yaml", "weights.safetensors"]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    net = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 3)).eval()
    htp_export.export(net, (torch.randn(2, 32),), folder / "net.onnx", verbose=False)
    shutil.copy(folder / "net.onnx", folder / "other.onnx")
    (folder / "shapes.json").write_text('{"input": [2, 32]}')
    (folder / "plan.json").write_text('{"0": "int4"}')
    (folder / "steps.yaml").write_text("- quantize: {plan: {'0': int8}, data: data.npz}\n")
    (folder / "page.html").write_text("<!DOCTYPE html>\n<title>mine</title>")
    np.savez(folder / "data.npz", input=np.ones((2, 32), np.float32))
    save_file(
        {"base_model.model.0.lora_A.weight": np.ones((1, 32), np.float32)},
        folder / "factors.safetensors",
    )
    weights = {name: value.numpy() for name, value in net.state_dict().items()}
    save_file(weights, folder / "weights.safetensors")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    (tmp_path / f"net_{tmp_path.name}.py").write_text(ENTRY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def run(folder: Path, command: str, output: str, *more: str) -> int:
    words = f"{command} {(MODELS | OTHERS)[command]} -o {output}".replace("FILE", "net.onnx")
    return main([*words.replace("{net}", f"net_{folder.name}").split(), *more])


def test_these_are_all_commands_that_write():
    program = CommandGroup()
    commands = {
        name: reduce(lambda group, word: group.get_command(None, word), name.split(), program)
        for name in command_names()
    }
    writing = {
        name for name in commands if any(each.name == "force" for each in commands[name].params)
    }
    assert writing == {command.partition(" --")[0] for command in (*MODELS, *OTHERS)}
    assert writing == {
        name for name in commands if any("--output" in each.opts for each in commands[name].params)
    }


# these may be replaced
OWN_KIND = {"diff": "page.html", "view": "page.html", "quantize --plan-for": "shapes.json"}


@pytest.mark.long
@pytest.mark.parametrize("command", sorted(MODELS | OTHERS))
def test_no_file_of_another_kind_is_replaced(folder, capsys, command):
    before = contents(folder)
    for source in [*SOURCES, "net.onnx"]:
        if OWN_KIND.get(command) == source or (command, source) == ("export", "net.onnx"):
            continue
        output = source.replace("{net}", f"net_{folder.name}")
        assert run(folder, command, output) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"htp-export: error: {output}: ")
        assert error.count("\n") == 1
        assert contents(folder) == before


@pytest.mark.parametrize("command", OWN_KIND)
def test_a_file_of_the_kind_that_is_written_is_replaced(folder, command):
    assert run(folder, command, OWN_KIND[command]) == 0


@pytest.mark.parametrize(
    ("command", "output"),
    [("carry", "shapes.json"), ("export", "{net}.py"), ("pipeline", "steps.yaml"), ("pipeline", "data.npz"),
     ("lora fuse", "factors.safetensors"), ("quantize", "data.npz"), ("extract", "net.onnx.data"),
     ("splice", "other.onnx"), ("quantize --plan-for", "plan.json"), ("bind", "weights.safetensors")],
)  # fmt: skip
def test_what_is_read_is_not_replaced_by_force_either(folder, capsys, command, output):
    before, output = contents(folder), output.replace("{net}", f"net_{folder.name}")
    assert run(folder, command, output, "--force") == 2
    error = capsys.readouterr().err
    assert f"{output}: is an input of this command" in error or "would replace" in error
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("command", "output"),
    [("export --entry {code}:net", "teacher.onnx"), ("export --entry {code}:net --torchscript", "teacher.onnx"),
     ("export --entry {code}:net", "helper_{code}.py"), ("export --entry {code}:net", "config.json"),
     ("quantize net.onnx --rule 0=int8 --data {code}:data", "teacher.onnx")],
)  # fmt: skip
def test_what_the_code_of_an_entry_reads_is_not_replaced(folder, capsys, command, output):
    code = f"code_{folder.name}"
    shutil.copy("other.onnx", "teacher.onnx")
    Path("config.json").write_text('{"size": 4}')
    Path(f"helper_{code}.py").write_text("import onnx, json\nlast = 0\n")
    Path(f"{code}.py").write_text(
        f"import json, onnx, torch, helper_{code} as helper\n"
        "size = json.load(open('config.json'))['size']\n"
        "def net():\n    onnx.load('teacher.onnx')\n    return torch.nn.Linear(size, size), torch.ones(2, size)\n"
        "def data():\n    onnx.load('teacher.onnx')\n    return [{'input': torch.ones(2, 32)}]\n"
    )
    before, output = contents(folder), output.replace("{code}", code)
    assert main([*command.replace("{code}", code).split(), "-o", output, "--force"]) == 2
    assert f"{output}: is read by the Python code that this command runs" in capsys.readouterr().err
    assert contents(folder) == before


def test_a_file_of_another_kind_is_replaced_where_that_is_asked_for(folder):
    assert run(folder, "optimize", "page.html") == 2
    assert run(folder, "optimize", "page.html", "--force") == 0
    assert htp_export.load("page.html")["1"].nodes
    Path("empty").touch()
    assert run(folder, "functions --undo", "empty") == 0
    assert run(folder, "functions --undo", "empty") == 0


def test_python_functions_refuse_what_they_read(folder):
    before = listing(folder)
    uses = {
        "data.npz": lambda file: htp_export.quantize("net.onnx", {"0": "int8"}, file, data=file),
        "steps.yaml": lambda file: htp_export.pipeline(file, "net.onnx", file),
        "weights.safetensors": lambda file: htp_export.bind("net.onnx", file, file),
        "factors.safetensors": lambda file: htp_export.lora.fuse("net.onnx", file, file),
    }
    for file, use in uses.items():
        with pytest.raises(FileError, match="is an input of this command"):
            use(file)
    assert listing(folder) == before


@pytest.mark.parametrize(
    "command", [*sorted({*MODELS} - {"export"}), "view", "quantize --plan-for"]
)
def test_links_in_a_circle_are_no_bug(folder, capsys, command):
    Path("one").symlink_to("two")
    Path("two").symlink_to("one")
    assert run(folder, command, "one") == 2
    assert "one: cannot be written: " in capsys.readouterr().err


def test_a_text_that_is_no_journal_gets_no_lines(folder, capsys):
    before = contents(folder)
    assert main(["search", "net.onnx", "--choices", "int4", "--storage", "steps.yaml"]) == 2
    assert "steps.yaml: is no journal of Optuna" in capsys.readouterr().err
    assert contents(folder) == before
