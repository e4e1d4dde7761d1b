"""A process that is killed while it writes leaves the old files, the new ones, or a pair that is known to be torn."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import htp_export
from tests.killed import OPERATIONS

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forks")


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU()), nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    ).eval()


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two exports of one net with different weights, and what was made of the first before."""
    folder = tmp_path_factory.mktemp("killed")
    for seed, name in ((0, "old.onnx"), (1, "in.onnx"), (0, "out.onnx")):
        htp_export.export(net(seed), (torch.zeros(2, 64),), folder / name, verbose=False)
    htp_export.extract(folder / "in.onnx", "0", folder / "piece.onnx")
    htp_export.partition(folder / "old.onnx", 2, folder / "stages")
    return folder


# Operations that every run kills: the others write as `extract` does, and are killed with -m slow.
QUICK = ("save_named",)


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in OPERATIONS],
)
def test_files_are_old_or_new_or_known_to_be_torn(name, given, tmp_path):
    shutil.copytree(given, tmp_path / "given")
    if name == "partition":
        (tmp_path / "given" / "out.onnx").unlink()
    else:
        shutil.rmtree(tmp_path / "given" / "stages")
    if name == "bind_shared":
        (tmp_path / "given" / "tuned").mkdir()
        save_file(net(1).state_dict(), tmp_path / "given" / "tuned" / "model.safetensors")
    if name == "bind_data":  # with all weights in the data file
        out = tmp_path / "given" / "out.onnx"
        htp_export.bind(tmp_path / "given" / "old.onnx", net(0), out, in_place_data=True)
    found = run(name, tmp_path)
    assert not found["same"]
    assert found["changes"] > 10
    assert found["states"].get("wrong", 0) == 0
    # Of two names that are fixed, one is renamed first; in all other cases there is nothing between the two states.
    assert found["states"].get("refused", 0) <= (name in ("export", "save_named"))
    # A folder cannot be replaced by one rename: the old one is away before the new one is there.
    assert found["states"].get("missing", 0) <= (name == "partition")
    assert found["states"]["old"] > 5
    assert found["states"]["new"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["export", "optimize", "splice", "carry"])
def test_files_are_old_or_new_after_kills_at_random_moments(name, given, tmp_path):
    shutil.copytree(given, tmp_path / "given")
    shutil.rmtree(tmp_path / "given" / "stages")
    found = run(name, tmp_path, "15", "12")
    assert not found["same"]
    # the others had ended: the machine was faster than when it was measured
    assert found["killed"] > 0
    assert set(found["states"]) <= {"old", "new", *(["refused"] if name == "export" else [])}
    assert found["states"]["old"] > 0


def run(name: str, home: Path, *options: str) -> dict[str, Any]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.killed", name, str(home), *options]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said
