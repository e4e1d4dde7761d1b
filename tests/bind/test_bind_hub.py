"""bind by hub id: safetensors files in the cache of the hub, without a connection."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import htp_export

pytest.importorskip("huggingface_hub")
pytest.importorskip("transformers")

COMMIT = "0" * 40


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()


def snapshot(home: Path, name: str) -> Path:
    """The folder of a model in the layout of the hub's cache."""
    folder = home / "hub" / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT, encoding="utf-8")
    files = folder / "snapshots" / COMMIT
    files.mkdir(parents=True)
    return files


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A cache with one model in a file, and one in two files with an index."""
    state = net(2).state_dict()
    save_file(state, snapshot(tmp_path / "home", "owner/tuned") / "model.safetensors")
    shards = snapshot(tmp_path / "home", "owner/sharded")
    names = {}
    for number, prefix in enumerate(("0.", "2."), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        part = {name: each for name, each in state.items() if name.startswith(prefix)}
        save_file(part, shards / file)
        names.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": names}
    (shards / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    snapshot(tmp_path / "home", "owner/empty")
    return tmp_path / "home"


def run(home: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "htp_export", "bind", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.long
@pytest.mark.parametrize("name", ["owner/tuned", "owner/sharded"])
def test_a_hub_id_is_read_from_the_cache(name, home, tmp_path):
    file, output = tmp_path / "net.onnx", tmp_path / "bound.onnx"
    htp_export.export(net(1), (torch.ones(2, 8),), file, dynamo=False, verbose=False)
    done = run(home, file, name, "-o", output)
    assert done.returncode == 0, done.stderr
    expected = htp_export.bind(file, net(2)).arrays
    found = htp_export.load(output).model.graph.initializers
    for entry, array in expected.items():
        np.testing.assert_array_equal(found[entry].const_value.numpy(), array)


@pytest.mark.long
@pytest.mark.parametrize("name", ["owner/absent", "owner/empty"])
def test_a_hub_id_without_weights_is_refused_by_its_name(name, home, tmp_path):
    file, output = tmp_path / "net.onnx", tmp_path / "bound.onnx"
    htp_export.export(net(1), (torch.ones(2, 8),), file, dynamo=False, verbose=False)
    done = run(home, file, name, "-o", output)
    assert done.returncode == 2, done.stderr
    assert name in done.stderr
    assert "Traceback" not in done.stderr
    assert not output.exists()
