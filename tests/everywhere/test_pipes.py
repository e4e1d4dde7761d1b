"""A pipe, or a device, that lies in a folder or that a file names is refused at once: nothing is waited for."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.numpy import save_file
from torch import nn

import htp_export
from htp_export.capabilities.huggingface.packed.checkpoints import is_packed, read_packed
from htp_export.capabilities.huggingface.sources import Source
from htp_export.command.main import main
from htp_export.errors import FileError, InputError
from htp_export.files.checkpoint import read_checkpoint
from htp_export.files.npz_file import NpzArrays
from htp_export.format.model_metadata import ProvenanceNote, write_provenance
from tests.nets import spread
from tests.obstacles import OBSTACLES, within

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes pipes")

SECONDS = 60
KINDS = ("pipe", "null_device", "a_socket", "folder")
X = torch.ones(2, 32)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    net = spread(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))).eval()
    htp_export.export(net, (X,), folder / "net.onnx", verbose=False)
    htp_export.partition(folder / "net.onnx", 2, folder / "stages")
    (folder / "data").mkdir()
    np.savez(folder / "data" / "a.npz", input=np.ones((2, 32), np.float32))
    (folder / "adapter").mkdir()
    ones = {"lora_A": np.ones((1, 32), np.float32), "lora_B": np.ones((32, 1), np.float32)}
    save_file({f"base_model.model.0.{name}.weight": array for name, array in ones.items()},
              folder / "adapter" / "adapter_model.safetensors")  # fmt: skip
    (folder / "adapter" / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 1, "lora_alpha": 1}'
    )
    (folder / "steps.yaml").write_text("steps: [{quantize: {plan: {'0': int8}, data: named.npz}}]\n"
                                       "model: net.onnx\noutput: out.onnx\n")  # fmt: skip
    (folder / "plan.yaml").write_text("[{quantize: {plan: named.json}}]")
    (folder / "model.yaml").write_text("steps: [optimize]\nmodel: named.onnx\noutput: out.onnx\n")
    model = onnx.load(folder / "net.onnx")
    noted: dict[str, str] = {}
    step = ProvenanceNote("quantize", {"plan": {"0": "int8"}, "data": "named.npz"}, "", "")
    write_provenance(noted, [step])
    onnx.helper.set_model_props(
        model, {entry.key: entry.value for entry in model.metadata_props} | noted
    )
    onnx.save(model, folder / "made.onnx")
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "config.json").write_text("{}")
    return folder


def command(*words: str | Path) -> None:
    if main([*map(str, words)]) == 2:
        raise InputError("as the command says")


def compared(at: Path) -> Any:
    return htp_export.compare(at / "net.onnx", at / "net.onnx", data=at / "data")


def fused(at: Path) -> Any:
    return htp_export.lora.fuse(at / "net.onnx", at / "adapter")


def searched(at: Path) -> Any:
    return htp_export.search(at / "net.onnx", ["int4"], storage=at / "journal", trials=1)


def repeated(at: Path) -> Any:
    return htp_export.pipeline(at / "made.onnx", at / "net.onnx", at / "out.onnx")


OPENED: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "data in a folder": ("data/x.npz", compared),
    "data of quantize": (
        "data/x.npz",
        lambda at: htp_export.quantize(at / "net.onnx", {"0": "int8"}, data=at / "data"),
    ),
    "data": ("x.npz", lambda at: NpzArrays(at / "x.npz")),
    "config of an adapter": ("adapter/adapter_config.json", fused),
    "weights of an adapter": ("adapter/adapter_model.safetensors", fused),
    "manifest": ("stages/manifest.json", lambda at: htp_export.load_partition(at / "stages")),
    "stage": ("stages/stage0.onnx", lambda at: htp_export.load_partition(at / "stages")),
    "external data": (
        "net.onnx.data",
        lambda at: htp_export.optimize(at / "net.onnx", at / "out.onnx"),
    ),
    "steps": ("named.npz", lambda at: htp_export.pipeline(at / "steps.yaml")),
    "plan of a step": (
        "named.json",
        lambda at: command("pipeline", at / "plan.yaml", "-m", at / "net.onnx", "-o", "out.onnx"),
    ),
    "model of a pipeline": ("named.onnx", lambda at: htp_export.pipeline(at / "model.yaml")),
    "steps of a model file": ("named.npz", repeated),
    "journal of a search": ("journal", searched),
    "journal of runs": (
        "journal",
        lambda at: htp_export.sensitivity(at / "net.onnx", ["int4"], results=at / "journal"),
    ),
    "checkpoint": ("checkpoint/model.safetensors", lambda at: read_checkpoint(at / "checkpoint")),
    "index of a checkpoint": (
        "checkpoint/model.safetensors.index.json",
        lambda at: read_checkpoint(at / "checkpoint"),
    ),
    "packed checkpoint": (
        "checkpoint/quantize_config.json",
        lambda at: read_packed(at / "checkpoint"),
    ),
    "config of a model": (
        "checkpoint/config.json",
        lambda at: Source(str(at / "checkpoint")).config(),
    ),
}
"""What opens a file → where the file lies in the folder, and the function."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("opened", OPENED)
def test_it_is_refused_at_once(
    opened: str, kind: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = tmp_path / "at"
    shutil.copytree(made, at)
    monkeypatch.chdir(at)
    place, use = OPENED[opened]
    path = at / place
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    OBSTACLES[kind](path, tmp_path)
    before = sorted(each.relative_to(at).as_posix() for each in at.rglob("*"))
    with within(SECONDS), pytest.raises(InputError):
        use(at)
    assert sorted(each.relative_to(at).as_posix() for each in at.rglob("*")) == before


def test_a_pipe_beside_a_model_says_nothing_of_it(made, tmp_path):
    """A ``genai_config.json`` is looked for beside files that are written, and of checkpoints their kind."""
    shutil.copytree(made, tmp_path / "at")
    at = tmp_path / "at"
    os.mkfifo(at / "genai_config.json")
    os.mkfifo(at / "checkpoint" / "quantize_config.json")
    with within(SECONDS):
        htp_export.optimize(at / "net.onnx", at / "out.onnx")
        assert not is_packed(at / "checkpoint")


def test_the_error_names_the_pipe(made, tmp_path):
    os.mkfifo(tmp_path / "x.npz")
    with (
        within(SECONDS),
        pytest.raises(FileError, match=r"x\.npz: cannot be read: it is not a regular file"),
    ):
        htp_export.compare(made / "net.onnx", made / "net.onnx", data=tmp_path)
