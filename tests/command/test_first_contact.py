"""What a newcomer tries on the command line: nothing is overwritten, and every mistake has an answer."""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

import htp_export
from htp_export.command.commands import command_names
from htp_export.command.main import main
from tests import faults
from tests.all_commands import COMMANDS, arguments, companions, example
from tests.permissions import bound_by_permissions

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "onnx", "onnx_ir", "onnxruntime", "transformers", "rich")
FACTORY = """
import torch

def net():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)), torch.randn(2, 8)
"""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model whose weights lie in a file of their own."""
    folder = tmp_path_factory.mktemp("exported")
    net = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
    ).eval()
    htp_export.export(net, (torch.randn(2, 32),), str(folder / "net.onnx"), verbose=False)
    return folder


@pytest.fixture
def folder(exported, tmp_path, monkeypatch):
    shutil.copytree(exported, tmp_path, dirs_exist_ok=True)
    shutil.copy(tmp_path / "net.onnx", tmp_path / "other.onnx")
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"nets_{tmp_path.name}.py").write_text(FACTORY)
    return tmp_path


class Dying:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)


def in_a_finalizer():
    Dying()


def caught():
    with contextlib.suppress(BaseException):
        signal.raise_signal(signal.SIGINT)


def told():
    raise KeyboardInterrupt


def in_a_library():
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise RecursionError("maximum recursion depth exceeded") from None


class TestInputsAreNotOverwritten:
    """More of it, over all commands, is in tests/everywhere/test_outputs.py."""

    def test_a_file_whose_weights_another_file_needs_is_not_replaced(self, folder, capsys):
        # other.onnx has its weights in net.onnx.data, which this would write anew.
        assert main(["optimize", "other.onnx", "-o", "net.onnx"]) == 2
        assert "would replace net.onnx.data, the weights of other.onnx" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "command", ["optimize net.onnx", "functions net.onnx --undo", "carry net.onnx net.onnx"]
    )
    def test_in_place_is_asked_for_by_name(self, folder, command):
        assert main([*command.split(), "-o", "net.onnx", "--in-place"]) == 0
        assert not htp_export.load("net.onnx").untagged

    def test_python_refuses_to_draw_a_page_over_a_model(self, folder):
        before = Path("net.onnx").read_bytes()
        with pytest.raises(htp_export.InputError, match="has the extension of a model"):
            htp_export.view("net.onnx", "net.onnx", explorer=False)
        assert Path("net.onnx").read_bytes() == before


class TestOpset:
    @pytest.mark.parametrize("exporter", ["--dynamo", "--torchscript"])
    @pytest.mark.parametrize("opset", ["1", "5", "999"])
    def test_one_that_torch_cannot_write_is_refused_before_the_model_is_made(
        self, folder, capsys, opset, exporter
    ):
        assert (
            main(["export", "--entry", "nowhere:net", exporter, "--opset", opset, "-o", "x.onnx"])
            == 2
        )
        assert re.search(r"exporter writes opsets \d+ to \d+", capsys.readouterr().err)

    @pytest.mark.long
    def test_another_than_was_asked_for_is_status_1_and_no_file(self, folder, capsys):
        # torch's own converter cannot go down to 7, and only logs that.
        command = ["export", "--entry", f"nets_{folder.name}:net", "--opset", "7", "-o", "x.onnx"]
        assert main(command) == 1
        assert "opset 7 was asked for, and torch wrote opset 18" in capsys.readouterr().err
        assert not Path("x.onnx").exists()


class TestSpelling:
    @pytest.mark.parametrize("words", [["-h"], ["help"]])
    def test_help_of_the_program_and_of_a_command(self, capsys, words):
        assert main(words) == 0
        assert "Usage: htp-export [OPTIONS] COMMAND" in capsys.readouterr().out
        words = [words[0], "tree"] if words == ["help"] else ["tree", words[0]]
        assert main(words) == 0
        assert "Usage: htp-export tree" in capsys.readouterr().out

    @pytest.mark.parametrize("words", [["-q", "tree", "net.onnx"], ["tree", "net.onnx", "-q"]])
    def test_a_quiet_command_prints_nothing_but_errors(self, folder, capsys, words):
        assert main(words) == 0
        assert capsys.readouterr() == ("", "")
        assert main(["tree", "-q", "nowhere.onnx"]) == 2
        assert "nowhere.onnx" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("command", "problem"),
        [
            ("tree net.onx", "net.onx: is missing; nearest: net.onnx"),
            ("export model.pt -o x.onnx", "model.pt: a checkpoint has weights and no code"),
            ("export --entry nowhere:net -o x.onnx", "there is no module 'nowhere' in this folder"),
            ("quantize net.onnx FP32 -o x.onnx", "nearest: fp32"),
        ],
    )
    def test_a_misspelled_name_is_answered_without_a_host(
        self, folder, capsys, monkeypatch, command, problem
    ):
        def refuse(*_: object, **__: object) -> None:
            raise AssertionError("a host was asked")

        monkeypatch.setattr("socket.getaddrinfo", refuse)
        assert main(command.split()) == 2
        assert problem in capsys.readouterr().err
        assert not Path("x.onnx").exists()

    @pytest.mark.long
    def test_a_reader_that_needs_no_more_is_no_failure(self, folder):
        # nodes of a tall model: more than the buffer of a pipe
        deep = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(300)]).eval()
        htp_export.export(deep, (torch.randn(1, 2),), "deep.onnx", dynamo=False, verbose=False)
        program = [sys.executable, "-m", "htp_export", "nodes", "deep.onnx", "--json"]
        with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout.read(10)
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 0


class TestWhatIsSaid:
    def test_an_export_says_the_files_the_inputs_and_what_comes_next(self, folder, capsys):
        assert (
            main(["export", "--entry", f"nets_{folder.name}:net", "--opset", "20", "-o", "x.onnx"])
            == 0
        )
        lines = capsys.readouterr().out.splitlines()[-3:]
        assert re.fullmatch(r"wrote x\.onnx \(\S+ kB\)( and x\.onnx\.data \(\S+ \S?B\))?", lines[0])
        assert lines[1] == "inputs: input float [2, 8]; opset 20; dynamo exporter; seed 0"
        assert lines[2] == "next: htp-export view x.onnx"

    @pytest.mark.parametrize(
        "command", ["extract net.onnx 0", "optimize net.onnx", "run onnxruntime net.onnx"]
    )
    def test_a_command_that_writes_says_the_file_and_its_size(self, folder, capsys, command):
        assert main([*command.split(), "-o", "out.onnx"]) == 0
        wrote, then = capsys.readouterr().out.splitlines()[-2:]
        assert re.match(r"wrote out\.onnx \(\S+ \w+\)", wrote)
        assert re.match(r"next: htp-export (view|diff net.onnx) out\.onnx$", then)

    def test_an_optimisation_that_does_nothing_draws_no_empty_table(self, folder, capsys):
        assert main(["optimize", "net.onnx", "-o", "once.onnx"]) == 0
        capsys.readouterr()
        assert main(["optimize", "once.onnx", "-o", "twice.onnx"]) == 0
        assert re.match(r"(\d+) nodes before, \1 after\n", capsys.readouterr().out)

    @pytest.mark.parametrize(
        ("command", "wrote", "then"),
        [
            (
                "view net.onnx --no-explorer",
                r"wrote net\.html \(\S+ kB\)",
                "next: open net.html in a browser",
            ),
            (
                "view net.onnx --netron",
                r"wrote net\.netron\.json \(\S+ B\)",
                "next: open net.onnx in Netron, .*",
            ),
            (
                "view net.onnx --overlay dtype",
                r"wrote net\.dtype\.json \(.*\)",
                "next: .* in Model Explorer, .*",
            ),
            (
                "diff net.onnx other.onnx -o d.html",
                r"wrote d\.html \(\S+ kB\)",
                "next: open d.html in a browser",
            ),
            (
                "partition net.onnx 2 -o 'my stages'",
                r"wrote my stages/manifest\.json \(.*\), my stages/stage0\.onnx \(.*\).* and my stages/\S+ \(.*\)",
                "next: htp-export view 'my stages/stage0.onnx'",
            ),
        ],
    )
    def test_pages_and_folders_are_named_with_their_sizes_too(
        self, folder, capsys, command, wrote, then
    ):
        assert main(shlex.split(command)) == 0
        lines = capsys.readouterr().out.splitlines()[-2:]
        assert re.fullmatch(wrote, lines[0])
        assert re.fullmatch(then, lines[1])

    def test_json_of_a_page_has_its_files(self, folder, capsys):
        assert main(["view", "net.onnx", "--no-explorer", "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["files"] == {"net.html": Path("net.html").stat().st_size}


class TestLogs:
    @pytest.mark.parametrize("debug", [[], ["--debug"]], ids=["quiet", "debug"])
    def test_what_onnx_runtime_logs_in_a_tool_is_shown_with_debug_alone(
        self, folder, capfd, monkeypatch, debug
    ):
        nodes = [onnx.helper.make_node("Relu", ["x"], ["y"])]
        x, y = (
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xy"
        )
        unused = onnx.numpy_helper.from_array(np.ones(3, np.float32), "unused")
        noisy = onnx.helper.make_model(
            onnx.helper.make_graph(nodes, "noisy", [x], [y], [unused]),
            opset_imports=[onnx.helper.make_opsetid("", 18)],
            ir_version=10,
        )

        def tool(source, output=None, **settings):
            onnxruntime.InferenceSession(
                noisy.SerializeToString(), providers=["CPUExecutionProvider"]
            )
            return htp_export.carry(source, source, output)

        monkeypatch.setattr("htp_export.capabilities.carry.adapters.onnxslim", tool, raising=False)
        assert main(["run", "onnxslim", "net.onnx", "-o", "out.onnx", *debug]) == 0
        assert ("Removing initializer 'unused'" in capfd.readouterr().err) is bool(debug)


class TestErrors:
    def test_a_fault_of_the_program_is_said_to_be_one(self, folder, capsys, monkeypatch):
        def broken(*arguments, **options):
            raise ZeroDivisionError("division by zero")

        monkeypatch.setattr("htp_export.capabilities.fingerprint.families.fingerprint", broken)
        assert main(["fingerprint", "net.onnx"]) == 3
        error = capsys.readouterr().err
        assert error.startswith(
            "htp-export: error: this is a bug in htp_export (htp_export 0.1.0, Python 3"
        )
        assert "ZeroDivisionError: division by zero; run the command with --debug" in error
        assert "Traceback" not in error
        assert main(["fingerprint", "net.onnx", "--debug"]) == 3
        assert "Traceback" in capsys.readouterr().err

    @pytest.mark.parametrize("interrupted", [told, in_a_library, in_a_finalizer, caught])
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_an_interrupt_is_said_in_a_line_also_if_it_is_swallowed(
        self, folder, capsys, monkeypatch, interrupted
    ):
        fingerprint = htp_export.fingerprint

        def work(*arguments, **options):
            interrupted()
            return fingerprint(*arguments, **options)

        monkeypatch.setattr("htp_export.capabilities.fingerprint.families.fingerprint", work)
        assert main(["fingerprint", "net.onnx"]) == 130
        assert capsys.readouterr().err == "htp-export: error: interrupted\n"
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_an_interrupt_while_the_commands_are_imported_is_said_in_one_line(self, folder):
        stub = "import signal, sys; sys.meta_path.insert(0, type('F', (), {'find_spec': staticmethod(find)})())"
        code = f"""
import runpy
def find(name, *_):
    if name == "htp_export.command.terminal":
        signal.raise_signal(signal.SIGINT)
{stub}
runpy.run_module("htp_export", run_name="__main__")
"""
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (130, "htp-export: error: interrupted\n")

    def test_a_folder_that_may_not_be_written_is_refused_before_the_export(self, folder):
        (folder / "closed").mkdir(0o500)
        run = bound_by_permissions(
            folder, "export", "--entry", "nowhere:net", "-o", "closed/x.onnx"
        )
        assert run.returncode == 2
        assert "no permission to write" in run.stderr


class TestHelp:
    COMMANDS = tuple(command_names())

    def test_no_summary_is_cut(self, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        assert main(["--help"]) == 0
        commands = capsys.readouterr().out.partition("Export:")[2].partition("Words:")[0]
        listed = [line.split()[0] for line in commands.splitlines() if line.startswith("  ")]
        assert listed == list(dict.fromkeys(name.split()[0] for name in self.COMMANDS))
        assert "..." not in commands

    @pytest.mark.parametrize("name", COMMANDS)
    def test_has_an_example(self, name, capsys):
        assert main([*name.split(), "--help"]) == 0
        assert f"Example: htp-export {name} " in " ".join(capsys.readouterr().out.split())

    def test_loads_no_library(self):
        code = (
            "import sys; from htp_export.command.main import main; "
            "[main(words) for words in (['--version'], ['--help'], ['tree', '--help'], ['run', '--help'])]; "
            f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
        )
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
        )
        assert run.stderr.strip() == "[]"

    @pytest.mark.long
    def test_a_command_that_reads_a_file_loads_no_large_package(self, folder):
        code = (
            "import sys; from htp_export.command.main import main; assert main(['tree', 'net.onnx', '-q']) == 0; "
            "large = ('torch', 'transformers', 'onnxruntime', 'onnx.reference', 'sympy'); "
            "print([name for name in large if name in sys.modules]); "
            "from onnx_ir import SymbolicDim; print((SymbolicDim('n') + 1).value); "
            "print(SymbolicDim('max(n, 3)').evaluate({'n': 2})); "
            "import sympy; print(sympy.Max(1, 2))"
        )
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=folder
        )
        assert run.stdout.split("\n") == ["[]", "n + 1", "3", "2", ""]

    def test_the_shell_can_complete_commands(self):
        environment = {
            **os.environ,
            "_HTP_EXPORT_COMPLETE": "complete_bash",
            "COMP_WORDS": "htp-export fing",
        }
        program = [sys.executable, "-m", "htp_export"]
        run = subprocess.run(
            program,
            capture_output=True,
            text=True,
            check=False,
            env={**environment, "COMP_CWORD": "1"},
            cwd=ROOT,
        )
        assert run.stdout.split() == ["fingerprint"]


def test_sizes_of_open_inputs_are_given_alike(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    net = torch.nn.Sequential(torch.nn.Linear(8, 4)).eval()
    batch = torch.export.Dim("batch")
    htp_export.export(
        net, (torch.randn(2, 8),), "open.onnx", dynamic_shapes=({0: batch},), verbose=False
    )
    Path("shapes.json").write_text('{"input": [3, 8]}')
    np.savez("values.npz", input=np.ones((3, 8), np.float32))
    name = onnx.load("open.onnx").graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for command in (
        "tree open.onnx",
        "cost open.onnx",
        "profile open.onnx --runs 1",
        "compare open.onnx open.onnx",
    ):
        for sizes in (
            ["--dims", f"{name}=3"],
            ["--shapes", "shapes.json"],
            ["--data", "values.npz"],
        ):
            assert main([*command.split(), *sizes]) == 0, (command, sizes, capsys.readouterr().err)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Twelve blocks that are alike, and the same file with another weight in one of them."""
    folder = tmp_path_factory.mktemp("deep")
    torch.manual_seed(0)  # a layer of zeros would hide the other weight
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Identity(), torch.nn.ReLU())
        for _ in range(12)
    ]
    htp_export.export(
        torch.nn.Sequential(*blocks).eval(),
        (torch.randn(2, 8),),
        str(folder / "deep.onnx"),
        verbose=False,
    )
    tagged = htp_export.load(folder / "deep.onnx")
    faults.weight_changed(tagged, "10.0")
    tagged.save(folder / "changed.onnx")
    return folder


class TestTables:
    """Alike layers are one line in every table, in the order of their numbers."""

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("command", "lines"),
        [
            ("tree deep.onnx", ["0 … 11 "]),
            ("profile deep.onnx --runs 1", ["0 … 11 "]),
            ("compare deep.onnx deep.onnx --all", ["0…11 ", "0…11.0 ", "0…11.2 "]),
            ("diff deep.onnx deep.onnx", []),
            ("diff deep.onnx changed.onnx", []),
        ],
    )
    def test_alike_layers_are_folded(self, deep, monkeypatch, capsys, command, lines):
        monkeypatch.chdir(deep)
        assert main(command.split()) == 0
        out = capsys.readouterr().out
        assert all(line in out for line in lines), out
        assert all(line == line.rstrip() for line in out.splitlines())
        assert len(out.splitlines()) < 20

    def test_numbers_in_paths_are_sorted_as_numbers(self, deep, monkeypatch, capsys):
        monkeypatch.chdir(deep)
        assert main(["compare", "deep.onnx", "changed.onnx"]) == 1
        out = capsys.readouterr().out
        assert out.splitlines()[1].split()[0] == "10.0"
        assert main(["forensics", "deep.onnx", "--json"]) == 0
        modules = list(json.loads(capsys.readouterr().out)["modules"])
        assert modules == sorted(
            modules, key=lambda path: [int(part) for part in path.split(".") if part]
        )

    def test_a_table_that_is_cut_says_how_many_modules_are_left(self):
        from rich.console import Console

        from htp_export.capabilities.verify.drawing import render
        from htp_export.capabilities.verify.results import Comparison, ModuleResult

        modules = {
            f"part{k}": ModuleResult(f"part{k}", "net.Part", "computed", "not compared")
            for k in range(30)
        }
        console = Console(width=120)
        with console.capture() as shown:
            console.print(render(Comparison(modules)))
        assert "and 10 more modules; --all shows every one" in shown.get()


@pytest.mark.long
def test_docs_json_has_every_key_that_a_command_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "json.md").read_text()
    keys = {}
    for commands, listed in re.findall(r"^\| (`.*?) \| (`.*?) \|", text, re.M):
        optional = set(re.findall(r"\(`([^`]+)`\)", listed))
        keys.update(
            dict.fromkeys(
                re.findall(r"`([^`]+)`", commands),
                (set(re.findall(r"`([^`]+)`", listed)), optional),
            )
        )
    words = {
        **COMMANDS,
        "export": "--entry tests.all_commands:example -o out.onnx --verify",
        "nodes --node": "0 FILE",
        "lora adapter": "lora.onnx ADAPTER -o out.onnx_adapter",
    }
    assert keys.keys() == words.keys()
    model, args = example()
    htp_export.export(model, args, "net.onnx", verbose=False)
    htp_export.lora.insert("net.onnx", "first", output="lora.onnx")
    files = {"FILE": "net.onnx", **companions(tmp_path)}
    for name, (every, optional) in keys.items():
        if name == "search" and importlib.util.find_spec("optuna") is None:  # an extra
            continue
        capsys.readouterr()
        assert main([*arguments(f"{name} {words[name]}", files), "--json"]) == 0, name
        written = json.loads(capsys.readouterr().out)
        assert written.pop("schema_version") == 1
        assert every - optional <= {*written} <= every, name
