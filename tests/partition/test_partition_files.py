"""Folders of stages: written whole, read with care, and the command that writes them."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from torch import nn

import htp_export
from htp_export import discovery
from htp_export.command.main import main
from htp_export.errors import FileError, InputError
from htp_export.runtime.faulty_optimizers import DISABLED
from tests import handmade
from tests.nets import x

FEED = {"x": np.arange(8, dtype=np.float32).reshape(2, 4)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two stages of two layers."""
    htp_export.partition(handmade.encoder(), 2, tmp_path / "stages")
    return tmp_path / "stages"


def contents(folder: Path) -> dict[str, bytes]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def results(found: htp_export.results.Partition) -> list[list[float]]:
    return [array.tolist() for array in found.run(FEED).values()]


# --- what is written --------------------------------------------------------------------------------------


def test_the_manifest_says_what_the_result_says(tmp_path):
    found = htp_export.partition(handmade.encoder(), 2, tmp_path / "stages")
    manifest = json.loads((tmp_path / "stages" / "manifest.json").read_text())
    assert manifest == found.to_dict()
    assert manifest["inputs"] == [{"name": "x", "type": "FLOAT", "shape": [2, 4]}]
    assert manifest["outputs"] == [
        {"name": "out", "type": "FLOAT", "shape": [2, 4], "stage": 1, "tensor": "out"}
    ]
    assert [
        (stage["file"], stage["modules"], stage["parameter_bytes"]) for stage in manifest["stages"]
    ] == [
        ("stage0.onnx", ["layer.0"], 64),
        ("stage1.onnx", ["layer.1"], 64),
    ]
    assert [(each["name"], each["from"], each["to"]) for each in manifest["crossing"]] == [
        ("mask", 0, [1]),
        ("layer0", 0, [1]),
    ]
    assert [(each["name"], each["stage"]) for each in manifest["stages"][1]["inputs"]] == [
        ("mask", 0),
        ("layer0", 0),
    ]
    assert manifest["files"] == ["stage0.onnx", "stage1.onnx"]
    assert manifest["versions"]["opset"] == {"": 20, "pkg": 1}


def test_what_is_read_again_is_what_was_written_and_runs_where_the_folder_was_moved(
    folder, tmp_path
):
    in_memory = htp_export.partition(handmade.encoder(), 2)
    assert htp_export.load_partition(folder) == htp_export.partition(handmade.encoder(), 2, folder)
    shutil.move(folder, tmp_path / "elsewhere")
    assert results(htp_export.load_partition(tmp_path / "elsewhere")) == results(in_memory)


def test_external_weights_go_beside_the_stage_that_reads_them(tmp_path):
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)).eval()
    htp_export.export(net, (x(2, 64),), tmp_path / "net.onnx", verbose=False, external_data=True)
    found = htp_export.partition(tmp_path / "net.onnx", 2, tmp_path / "stages")
    sizes = {name: len(data) for name, data in contents(tmp_path / "stages").items()}
    assert [stage.files for stage in found.stages] == [
        (f"stage{k}.onnx", f"stage{k}.onnx.data") for k in range(2)
    ]
    assert [sizes[f"stage{k}.onnx.data"] for k in range(2)] == [64 * 64 * 4] * 2
    assert sizes["stage0.onnx"] < 64 * 64
    (tmp_path / "net.onnx.data").unlink()  # nothing refers to it
    (result,) = found.run({"input": x(2, 64)}).values()
    assert np.allclose(result, net(x(2, 64)).detach().numpy(), atol=1e-5)


def plug_in(monkeypatch: pytest.MonkeyPatch, write_stages: Any) -> None:
    """Make a plug-in ``engine``."""
    entry = SimpleNamespace(
        name="engine", value="engine", load=lambda: SimpleNamespace(write_stages=write_stages)
    )
    monkeypatch.setattr(
        discovery, "entry_points", lambda group: [entry] if group == "htp_export.partition" else []
    )


def test_a_new_partition_takes_the_place_of_an_old_one(folder, monkeypatch):
    def write_stages(
        partition: htp_export.results.Partition, new: Path
    ) -> htp_export.results.Partition:
        assert all((new / stage.files[0]).is_file() for stage in partition.stages), (
            "the stages are there already"
        )
        (new / "engine.yaml").write_text("engine")
        return partition

    plug_in(monkeypatch, write_stages)
    htp_export.partition(handmade.encoder(), 1, folder, serve="engine")
    assert contents(folder).keys() == {"manifest.json", "stage0.onnx", "engine.yaml"}
    htp_export.partition(handmade.encoder(), 1, folder)
    assert contents(folder).keys() == {"manifest.json", "stage0.onnx"}
    assert [each.name for each in folder.parent.iterdir()] == ["stages"]
    expected = results(htp_export.load_partition(folder))
    assert results(htp_export.partition(folder / "stage0.onnx", 2, folder)) == expected  # cut again


def test_a_folder_with_something_else_in_it_is_left_alone(folder):
    (folder / "notes.txt").write_text("mine")
    before = contents(folder)
    with pytest.raises(
        FileError, match=r"contains 'notes\.txt', which does not belong to a partition"
    ):
        htp_export.partition(handmade.encoder(), 1, folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(FileError, match="which does not belong to a partition"):
        htp_export.partition(handmade.encoder(), 1, folder)
    before.pop("manifest.json")
    assert contents(folder) == before


def test_a_failure_leaves_what_was_there_and_nothing_else(folder, monkeypatch):
    def write_stages(
        partition: htp_export.results.Partition, new: Path
    ) -> htp_export.results.Partition:
        raise InputError("the engine cannot run it")

    plug_in(monkeypatch, write_stages)
    before = contents(folder)
    with pytest.raises(InputError, match="the engine cannot run it"):
        htp_export.partition(handmade.encoder(), 1, folder, serve="engine")
    assert contents(folder) == before
    assert [each.name for each in folder.parent.iterdir()] == ["stages"]


# --- what is read -----------------------------------------------------------------------------------------


def changed(folder: Path, change: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "name",
    [
        "../stage0.onnx",
        "sub/../../stage0.onnx",
        "/etc/passwd",
        "C:\\stage0.onnx",
        "..\\stage0.onnx",
        "",
        "a\0b",
    ],
)
@pytest.mark.parametrize("place", ["file", "files", "all"])
def test_files_outside_the_folder_are_not_read(folder, name, place):
    shutil.copy(folder / "stage0.onnx", folder.parent)

    def change(manifest: Any) -> None:
        if place == "file":
            manifest["stages"][0]["file"] = name
        elif place == "files":
            manifest["stages"][0]["files"] = [name]
        else:
            manifest["files"] = [name]

    changed(folder, change)
    with pytest.raises(FileError, match="is outside of its folder"):
        htp_export.load_partition(folder)


def test_links_out_of_the_folder_are_not_followed(folder):
    shutil.move(folder / "stage0.onnx", folder.parent / "secret.onnx")
    (folder / "stage0.onnx").symlink_to(folder.parent / "secret.onnx")
    with pytest.raises(FileError, match="a link out of its folder"):
        htp_export.load_partition(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update({"htp.partition": "2"}), "'htp.partition' is not '1'"),
        (lambda m: m.pop("stages"), "no 'stages'"),
        (lambda m: m.update(stages=[]), "it has no stages"),
        (lambda m: m.update(stages=7), "not iterable"),
        (lambda m: m["stages"][0].update(file="stage9.onnx"), r"'stage9\.onnx' is missing"),
        (lambda m: m["stages"][0].update(file=7), "7 is not a string"),
        (lambda m: m["stages"][0].update(nodes=-1), "-1 is not a whole number"),
        (lambda m: m["stages"][1]["inputs"][0].update(stage=1), "of a stage that is not before it"),
        (lambda m: m["stages"][1]["inputs"][0].update(name="y"), "'y', which no stage produces"),
        (lambda m: m["stages"][0]["inputs"][0].update(name="y"), "'y', which no stage produces"),
        (lambda m: m["outputs"][0].update(stage=5), "a stage that does not produce it"),
        (lambda m: m["inputs"][0].update(type="FLOATS"), "no 'FLOATS'"),
        (lambda m: m["inputs"][0].update(shape=1.5), "not iterable"),
        (lambda m: m["inputs"][0].update(shape=[{}]), "{} is not a whole number"),
        (
            lambda m: m["stages"][0].update(session_config=["session.x"]),
            r"session_config: \['session.x'\] is not an object",
        ),
        *(
            (
                lambda m, key=key: m["stages"][0].update(session_config={key: "1"}),
                f"session_config: '{key}' is not",
            )
            for key in (
                "session.profile_file",
                "ep.context_file_path",
                "session.optimized_model_external_initializers",
            )
        ),
        *(
            (
                lambda m, names=names: m["stages"][0].update(session_config={DISABLED: names}),
                "session_config: '.*' are no",
            )
            for names in ("", "a;", "../a", "a b")
        ),
        (lambda m: m["stages"][0].update(session_config={DISABLED: 1}), "1 is not a string"),
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(folder, change, message):
    changed(folder, change)
    with pytest.raises(
        FileError, match=rf"manifest\.json: not the manifest of a partition: .*{message}"
    ):
        htp_export.load_partition(folder)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "not the"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_manifest_is_refused(folder, text, problem):
    (folder / "manifest.json").unlink()
    if text is not None:
        (folder / "manifest.json").write_text(text)
    with pytest.raises(FileError, match=rf"manifest\.json: {problem}"):
        htp_export.load_partition(folder)


# --- the command ------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path: Path) -> str:
    onnx.save(ir.to_proto(handmade.encoder()), tmp_path / "net.onnx")
    return str(tmp_path / "net.onnx")


def test_command_takes_a_number_and_prints_a_table(model, tmp_path, capsys):
    assert main(["partition", model, "2", "-o", str(tmp_path / "stages")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [
        ["0", "layer.0", "4"],
        ["1", "layer.1", "3"],
    ]
    assert lines[3:5] == ["2 stages; 2 tensors cross", "  mask: FLOAT[2, 4], from stage 0 to 1"]


@pytest.mark.parametrize(
    "numbers",
    [
        {"layer.0": 1, "layer.1": 2},
        {"modules": {"layer.0": {"total_ms": 1}, "layer.1": {"total_ms": 2.5}}},
    ],
)
def test_command_balances_by_a_file_of_numbers(model, numbers, tmp_path):
    (tmp_path / "latency.json").write_text(json.dumps(numbers))
    command = [
        "partition",
        model,
        "2",
        "-o",
        str(tmp_path / "stages"),
        "--balance",
        str(tmp_path / "latency.json"),
    ]
    assert main(command) == 0
