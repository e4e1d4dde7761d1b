"""Nothing is removed that htp_export did not write: no folder, no target of a link, no pipe, device or file of others.

One rule for every function and command that writes, for its target and for the files beside it, and for what the next
write finishes after a kill.
"""

import contextlib
import inspect
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn

import htp_export
from htp_export import lora, tools
from htp_export.command.commands import command_names
from htp_export.command.main import main
from htp_export.errors import FileError
from htp_export.files import folders, write_file
from tests.everywhere.test_outputs import MODELS, OTHERS
from tests.exporting import every
from tests.nets import spread
from tests.obstacles import NO_FILE, OBSTACLES, drained, state, unmount, within

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes pipes")

SECONDS = 120
X = torch.ones(2, 32)


def net() -> nn.Module:
    return spread(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))).eval()


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that functions and commands read."""
    given = tmp_path_factory.mktemp("given")
    htp_export.export(net(), (X,), given / "net.onnx", verbose=False)
    assert (given / "net.onnx.data").exists()
    shutil.copy(given / "net.onnx", given / "other.onnx")
    htp_export.extract(given / "net.onnx", "0", given / "part.onnx")
    htp_export.functions(given / "net.onnx", "0", given / "nested.onnx")
    htp_export.tap(given / "net.onnx", "0:out", given / "tapped.onnx")
    lora.insert(given / "net.onnx", "0", given / "lora.onnx", rank=1)
    (given / "adapter").mkdir()
    ones = {"lora_A": np.ones((1, 32), np.float32), "lora_B": np.ones((32, 1), np.float32)}
    save_file({f"base_model.model.0.{name}.weight": array for name, array in ones.items()},
              given / "adapter" / "adapter_model.safetensors")  # fmt: skip
    (given / "adapter" / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 1, "lora_alpha": 1}'
    )
    weights = {name: value.numpy() for name, value in net().state_dict().items()}
    save_file(weights, given / "weights.safetensors")
    (given / "shapes.json").write_text('{"input": [2, 32]}')
    (given / "plan.json").write_text('{"0": "int8-dynamic"}')
    (given / "sparsity.json").write_text('{"0": 0.5}')
    (given / "devices.json").write_text('{".": "cpu"}')
    (given / "steps.yaml").write_text("[optimize]")
    (given / "nothing_lost.py").write_text("import tests.everywhere.test_nothing_lost as net\n"
                                           "def make():\n    return net.net(), net.X\n")  # fmt: skip
    return given


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder for what obstacles lead to."""
    (tmp_path / "elsewhere").mkdir()
    yield tmp_path / "elsewhere"
    unmount(tmp_path / "elsewhere")


def exported(_: Path, out: Path, **options: Any) -> None:
    htp_export.export(net(), (X,), out, verbose=False, **options)


def exported_by_torch(_: Path, out: Path, **options: Any) -> None:
    with htp_export.tagging():
        torch.onnx.export(net(), (X,), out, verbose=False, **options)


def saved_program(_: Path, out: Path) -> None:
    program = htp_export.export(net(), (X,), verbose=False)
    assert program is not None
    program.save(out, external_data=True)


def of_file(
    function: Callable[..., Any], *given_after: Any, file: str = "net.onnx", **options: Any
) -> Any:
    """A function of a file, further arguments, and an output."""
    return lambda given, out: function(given / file, *given_after, output=out, **options)


FUNCTIONS: dict[str, Callable[[Path, Path], Any]] = {
    "export": exported,
    "export dynamo=False": lambda given, out: exported(given, out, dynamo=False),
    "export names": lambda given, out: exported(given, out, names="path"),
    "export dynamo=False names": lambda given, out: exported(
        given, out, dynamo=False, names="path"
    ),
    "tagging": exported_by_torch,
    "tagging dynamo=False": lambda given, out: exported_by_torch(given, out, dynamo=False),
    "ONNXProgram.save": saved_program,
    "TaggedModel.save": lambda given, out: htp_export.load(given / "net.onnx").save(out),
    "TaggedModel.save named": lambda given, out: htp_export.load(given / "net.onnx").save(
        out, f"{out.name}.data"
    ),
    "bind": lambda given, out: htp_export.bind(
        given / "net.onnx", given / "weights.safetensors", out
    ),
    "bind share_weights": lambda given, out: htp_export.bind(
        given / "net.onnx", given / "weights.safetensors", out, share_weights=True
    ),
    "bind only": lambda given, out: htp_export.bind(
        given / "net.onnx", given / "weights.safetensors", out, only="**"
    ),
    "carry": lambda given, out: htp_export.carry(given / "net.onnx", given / "net.onnx", out),
    "embed_map": of_file(htp_export.embed_map),
    "extract": of_file(htp_export.extract, "0"),
    "splice": lambda given, out: htp_export.splice(
        given / "net.onnx", "0", given / "part.onnx", out
    ),
    "functions": of_file(htp_export.functions, "0"),
    "inline": of_file(htp_export.inline, file="nested.onnx"),
    "rename": of_file(htp_export.rename),
    "optimize": of_file(htp_export.optimize),
    "optimize external_data": lambda given, out: htp_export.optimize(
        given / "net.onnx", out, external_data=f"{out.name}.data"
    ),
    "quantize": of_file(htp_export.quantize, {"0": "int8-dynamic"}),
    "prune": of_file(htp_export.prune, {"0": 0.5}),
    "place": of_file(htp_export.place, {".": "cpu"}),
    "tap": of_file(htp_export.tap, "0:out"),
    "untap": of_file(htp_export.untap, None, file="tapped.onnx"),
    "steer": of_file(htp_export.steer, "0:out"),
    "lora.insert": of_file(lora.insert, "0", rank=1),
    "lora.fuse": lambda given, out: lora.fuse(given / "net.onnx", given / "adapter", out),
    "lora.adapter": lambda given, out: lora.adapter(given / "lora.onnx", given / "adapter", out),
    "export_plan": of_file(htp_export.export_plan, {"0": "int8"}, to="ort"),
    "pipeline": lambda given, out: htp_export.pipeline(["optimize"], given / "net.onnx", out),
    "view": of_file(htp_export.view, explorer=False),
    "partition": lambda given, out: htp_export.partition(given / "net.onnx", 2, out),
    "tools": of_file(tools.onnxscript),
}

NAMES = {"view": "out.html", "export_plan": "out.json", "lora.adapter": "out.onnx_adapter", "partition": "out",
         "diff": "out.html", "quantize --plan-for": "out.json", "lora adapter": "out.onnx_adapter",
         "search": "out"}  # fmt: skip
"""The target of those that do not write ``out.onnx``."""

ARGUMENTS = {
    **MODELS,
    **OTHERS,
    "bind": "FILE GIVEN/weights.safetensors",
    "lora fuse": "FILE GIVEN/adapter",
    "lora adapter": "GIVEN/lora.onnx GIVEN/adapter",
    "prune": "FILE GIVEN/sparsity.json",
    "place": "FILE GIVEN/devices.json",
    "quantize": "FILE GIVEN/plan.json",
    "export": "--entry nothing_lost:make",
    "carry": "FILE FILE",
    "pipeline": "GIVEN/steps.yaml -m FILE",
    "splice": "FILE 0 GIVEN/part.onnx",
    "diff": "FILE GIVEN/other.onnx",
    "quantize --plan-for": "ort FILE GIVEN/plan.json",
    "search": "FILE --choices int4 --trials 1",
    "view": "FILE --no-explorer",
    "view --netron": "FILE",
    "view --overlay": "dtype FILE",
    "run": "onnxscript FILE",
}
NAMES |= {"view --netron": "out.json", "view --overlay": "out.json"}

FOLDERS = ("partition", "search")
"""Functions and commands that write a folder."""


def test_these_are_all_functions_that_write():
    faces = {"": htp_export, "lora.": lora}
    public = {
        f"{face}{name}": getattr(module, name)
        for face, module in faces.items()
        for name in module.__all__
    }
    signatures = {
        name: inspect.signature(each).parameters
        for name, each in public.items()
        if inspect.isfunction(each)
    }
    writing = {name for name, parameters in signatures.items() if {"output", "f"} & set(parameters)}
    assert {*writing, "tagging"} == set(FUNCTIONS) & set(public)


def test_these_are_all_commands_that_write():
    assert {command.partition(" --")[0] for command in ARGUMENTS} <= set(command_names())
    assert {command.partition(" --")[0] for command in {**MODELS, **OTHERS}} == {
        command.partition(" --")[0] for command in ARGUMENTS
    }


def target_of(writer: str, folder: Path) -> Path:
    return folder / NAMES.get(writer, "out.onnx")


def run_function(writer: str, given: Path, out: Path) -> bool:
    """Run a function; return whether it wrote."""
    try:
        FUNCTIONS[writer](given, out)
    except (FileError, OSError):
        return False
    return True


def run_command(writer: str, given: Path, out: Path) -> bool:
    words = f"{writer} {ARGUMENTS[writer]} -o {out}".replace("FILE", f"{given}/net.onnx").replace(
        "GIVEN", str(given)
    )
    status = main(words.split())
    assert status in (0, 2)
    return status == 0


def beside(writer: str, target: Path) -> list[Path]:
    """The places beside a target where further files are written."""
    if writer == "partition":
        return [target / "manifest.json", target / "stage0.onnx", target / "stage1.onnx.data"]
    if writer == "search":
        return [target / "front.json", target / "plan0.json", target / "front.svg"]
    if writer == "pipeline":
        return [target.with_name(f"{target.name}.data"), target.with_name(f"{target.name}.steps"),
                target.with_name(f"{target.name}.steps") / "01-optimize.onnx"]  # fmt: skip
    return [target.with_name(f"{target.name}.data")]


WRITERS = [("function", name) for name in FUNCTIONS] + [("command", name) for name in ARGUMENTS]
REFUSED_AT_ONCE = (*NO_FILE, "pipe", "file")


def cases() -> Iterator[Any]:
    """Every writer with every obstacle in each place; of those that take time, always one for each writer."""
    turn = 0
    for kind, writer in WRITERS:
        for place in range(-1, len(beside(writer, Path("out.onnx")))):
            for obstacle in OBSTACLES:
                is_refused = place < 0 and obstacle in (
                    NO_FILE if writer not in FOLDERS else REFUSED_AT_ONCE
                )
                turn += not is_refused
                always = is_refused or turn % len(OBSTACLES) == 3
                marks = () if always else (pytest.mark.slow,)
                yield pytest.param(
                    kind,
                    writer,
                    place,
                    obstacle,
                    id=f"{kind} {writer}-{place}-{obstacle}",
                    marks=marks,
                )


NAME_THEIR_DATA = ("TaggedModel.save named", "optimize external_data")


def may_be_replaced(kind: str, writer: str, place: int, obstacle: str) -> bool:
    """Whether the caller named the file that is in the way as the one to write: ``docs/files.md``."""
    is_named = place < 0 or (writer in NAME_THEIR_DATA and place == 0)
    if writer in FOLDERS or not is_named:
        return False
    return obstacle == "broken_link" or (
        kind == "function" and obstacle in ("file", "link_to_file")
    )


@pytest.mark.parametrize(("kind", "writer", "place", "obstacle"), [*cases()])
def test_what_is_in_the_way_stays(
    kind: str, writer: str, place: int, obstacle: str, given: Path, tmp_path: Path, elsewhere: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = tmp_path / "out"
    folder.mkdir()
    monkeypatch.chdir(given)
    target = target_of(writer, folder)
    way = target if place < 0 else beside(writer, target)[place]
    way.parent.mkdir(exist_ok=True)
    OBSTACLES[obstacle](way, elsewhere)
    before, whole, precious = state(way), state(folder), state(way / "precious.txt")
    run = run_function if kind == "function" else run_command
    is_written_to = place < 0 and obstacle == "pipe" and writer not in FOLDERS
    with within(SECONDS), drained(way) if is_written_to else contextlib.nullcontext():
        wrote = run(writer, given, target)
    if not wrote:
        assert state(folder) == whole
    elif way.name.endswith(".steps"):
        assert state(way / "precious.txt") == precious
    elif not may_be_replaced(kind, writer, place, obstacle):
        assert state(way) == before
        assert obstacle not in NO_FILE or place >= 0
    assert not list(folder.rglob(".htp-*"))


@pytest.mark.parametrize("tool", tools.__all__)
def test_no_tool_takes_the_place_of_a_folder(tool: str, given: Path, tmp_path: Path) -> None:
    OBSTACLES["folder"](tmp_path / "out.onnx", tmp_path)
    before = state(tmp_path)
    with pytest.raises(FileError, match=r"out\.onnx: is a folder; name a file in it"):
        getattr(tools, tool)(
            given / "net.onnx",
            output=tmp_path / "out.onnx",
            **{"opset": 20} if tool == "version_converter" else {},
        )
    assert state(tmp_path) == before


# --- after kills ------------------------------------------------------------------------------------------


def die_at(method: str, target: str, write: Callable[[], Any]) -> None:
    """Write in a child process that dies when it is about to keep an old target, or to put the new one in its place."""
    child = os.fork()
    if child == 0:
        do = getattr(write_file._Step, method)
        setattr(
            write_file._Step,
            method,
            lambda step: os._exit(7) if step.target.name == target else do(step),
        )
        with contextlib.suppress(BaseException):
            write()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.mark.long
@forks
@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.parametrize("place", ["out.onnx", "out.onnx.data"])
@pytest.mark.parametrize("method", every(2, ["keep", "do"]))
def test_what_is_put_in_the_way_after_a_kill_stays(
    method, place, obstacle, given, tmp_path, elsewhere
):
    folder = tmp_path / "out"
    folder.mkdir()
    tagged = htp_export.load(given / "net.onnx")
    tagged.save(folder / "out.onnx", "out.onnx.data")
    die_at(method, "out.onnx", lambda: tagged.save(folder / "out.onnx", "out.onnx.data"))
    (folder / place).unlink()
    OBSTACLES[obstacle](folder / place, elsewhere)
    before = state(folder / place)
    with within(SECONDS):
        tagged.save(folder / "another.onnx")
    assert state(folder / place) == before
    assert not list(folder.glob(".htp-*"))


@forks
def test_what_is_put_into_a_folder_after_a_kill_stays_in_it(given, tmp_path):
    stages = tmp_path / "stages"
    htp_export.partition(given / "net.onnx", 2, stages)
    die_at("keep", "stages", lambda: htp_export.partition(given / "net.onnx", 3, stages))
    (stages / "notes.txt").write_text("mine")
    before = state(stages)
    htp_export.load(given / "net.onnx").save(tmp_path / "another.onnx")
    assert state(stages) == before
    assert len(htp_export.load_partition(stages).stages) == 2
    assert not list(tmp_path.glob(".htp-*"))
    (stages / "notes.txt").unlink()
    die_at("keep", "stages", lambda: htp_export.partition(given / "net.onnx", 3, stages))
    htp_export.load(given / "net.onnx").save(tmp_path / "another.onnx")
    assert len(htp_export.load_partition(stages).stages) == 3


@pytest.mark.long
@forks
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_takes_the_place_of_a_folder_after_a_kill_stays_and_so_does_the_old_one(
    obstacle, given, tmp_path, elsewhere
):
    home = tmp_path / "home"
    home.mkdir()
    htp_export.partition(given / "net.onnx", 2, home / "stages")
    old = (home / "stages" / "manifest.json").read_bytes()
    die_at("do", "stages", lambda: htp_export.partition(given / "net.onnx", 3, home / "stages"))
    assert not (home / "stages").exists()
    OBSTACLES[obstacle](home / "stages", elsewhere)
    before = state(home / "stages")
    for name in ("another.onnx", "last.onnx"):
        htp_export.load(given / "net.onnx").save(home / name)
    assert state(home / "stages") == before
    assert [file.read_bytes() for file in home.rglob("manifest.json")] == [old]


@forks
def test_files_that_are_put_into_a_folder_in_the_last_moment_stay_in_it(
    given, tmp_path, monkeypatch
):
    stages, keep = tmp_path / "stages", write_file._Step.keep
    htp_export.partition(given / "net.onnx", 2, stages)

    def late(step: Any) -> None:
        if step.target == stages:
            (stages / "notes.txt").write_text("mine")
        keep(step)

    monkeypatch.setattr(write_file._Step, "keep", late)
    with pytest.raises(
        FileError, match="stages: cannot be written: files were added to the folder meanwhile"
    ):
        htp_export.partition(given / "net.onnx", 3, stages)
    assert (stages / "notes.txt").read_text() == "mine"
    assert len(htp_export.load_partition(stages).stages) == 2
    assert not list(tmp_path.glob(".htp-*"))


@pytest.mark.parametrize("obstacle", OBSTACLES)
@pytest.mark.parametrize("place", ["journal", "lock", "new", "old"])
def test_what_looks_like_the_folder_of_a_killed_process_is_not_followed(
    place, obstacle, given, tmp_path, elsewhere
):
    killed = tmp_path / "home" / ".htp-0123456789ab"
    killed.mkdir(parents=True)
    if place != "lock":
        (killed / "lock").touch()
    OBSTACLES[obstacle](killed / place, elsewhere)
    before, lead_to = state(killed / place), state(elsewhere)
    with within(SECONDS):
        htp_export.load(given / "net.onnx").save(tmp_path / "home" / "another.onnx")
    assert state(elsewhere) == lead_to
    if place in ("journal", "lock") and obstacle in NO_FILE:
        assert state(killed / place) == before


# --- folders that are written -----------------------------------------------------------------------------


def test_an_empty_folder_stays_the_folder_that_it_was_and_is_filled(given, tmp_path):
    stages = tmp_path / "stages"
    stages.mkdir(0o2750)
    (stages / "empty").mkdir()
    before = stages.stat()
    made = htp_export.partition(given / "net.onnx", 2, stages)
    assert (stages.stat().st_ino, stages.stat().st_mode) == (before.st_ino, before.st_mode)
    assert {path.name for path in stages.iterdir()} == {"empty", "manifest.json", *made.files}
    assert len(htp_export.load_partition(stages).stages) == 2
    with pytest.raises(FileError, match="contains 'empty/', which does not belong to a partition"):
        htp_export.partition(given / "net.onnx", 3, stages)
    (stages / "empty").rmdir()
    htp_export.partition(given / "net.onnx", 3, stages)
    assert stages.stat().st_mode == before.st_mode
    assert len(htp_export.load_partition(stages).stages) == 3


def test_a_link_to_an_empty_folder_stays_and_the_folder_is_filled(given, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "stages").symlink_to(tmp_path / "real")
    before = (tmp_path / "real").stat().st_ino
    htp_export.partition(given / "net.onnx", 2, tmp_path / "stages")
    assert (tmp_path / "stages").is_symlink()
    assert (tmp_path / "real").stat().st_ino == before
    assert (tmp_path / "real" / "manifest.json").exists()


def test_a_mounted_folder_is_filled_once_and_never_replaced(given, tmp_path, elsewhere):
    OBSTACLES["mounted"](tmp_path / "stages", elsewhere)
    (tmp_path / "stages" / "precious.txt").unlink()
    htp_export.partition(given / "net.onnx", 2, tmp_path / "stages")
    assert len(htp_export.load_partition(tmp_path / "stages").stages) == 2
    before = state(tmp_path / "stages")
    with pytest.raises(FileError, match="is a mount point with files, which cannot be replaced"):
        htp_export.partition(given / "net.onnx", 3, tmp_path / "stages")
    assert state(tmp_path / "stages") == before


def test_a_new_folder_of_a_command_that_fails_keeps_what_others_put_into_it(
    given, tmp_path, monkeypatch
):
    """Another process may have begun to write there, too."""
    monkeypatch.chdir(given)
    (tmp_path / "broken.onnx").write_bytes(b"no model")

    def fail_in(folder: Path) -> None:
        with folders.new_folder(folder):
            htp_export.load(given / "net.onnx").save(folder / "net.onnx")
            (folder / "notes.txt").write_text("mine")
            raise OSError("the disk is full")

    models = [str(given / "net.onnx"), str(given / "part.onnx")]
    assert (
        main(["optimize", *models, str(tmp_path / "broken.onnx"), "-o", str(tmp_path / "made")])
        == 2
    )
    assert not (tmp_path / "made").exists()
    with pytest.raises(OSError, match="the disk is full"):
        fail_in(tmp_path / "out" / "made")
    assert [path.name for path in (tmp_path / "out" / "made").iterdir()] == ["notes.txt"]
    shutil.copy(given / "net.onnx.data", tmp_path / "out" / "net.onnx.data")
    shutil.copy(given / "net.onnx", tmp_path / "out" / "net.onnx")
    with pytest.raises(OSError, match="the disk is full"):
        fail_in(tmp_path / "out")
    assert htp_export.load(tmp_path / "out" / "net.onnx")["0"].nodes


def test_a_search_replaces_its_own_plans_and_no_others(given, tmp_path, monkeypatch, capsys):
    pytest.importorskip("optuna")
    monkeypatch.chdir(given)
    words = [
        "search",
        "net.onnx",
        "--choices",
        "int4",
        "--trials",
        "1",
        "-o",
        str(tmp_path / "found"),
    ]
    (tmp_path / "found").mkdir()
    for name in ("plan0.json", "steps3.json", "prompts0.npz", "front.svg", "front.json"):
        (tmp_path / "found" / name).write_text('{"0": "int8"}')
        assert main(words) == 2
        assert f"contains '{name}', which does not belong to a search" in capsys.readouterr().err
        (tmp_path / "found" / name).unlink()
    assert main(words) == 0
    assert main(words) == 0
    (tmp_path / "found" / "plan0.json").write_text('{"0": "fp16"}')
    capsys.readouterr()
    assert main(words) == 2
    assert "contains 'plan0.json'" in capsys.readouterr().err
    assert (tmp_path / "found" / "plan0.json").read_text() == '{"0": "fp16"}'
