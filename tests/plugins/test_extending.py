"""A capability that lives in a package of its own: the one of examples/clip_plugin, installed with pip."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import htp_export
from tests.exporting import every

ROOT = Path(__file__).parents[2]
pytest.importorskip("setuptools", minversion="70.1", reason="pip builds the package with it")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the package is installed."""
    folder = tmp_path_factory.mktemp("site")
    copy = shutil.copytree(ROOT / "examples" / "clip_plugin", folder / "source")
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        *options,
        "--target",
        str(folder / "installed"),
        str(copy),
    ]
    subprocess.run(pip, check=True, capture_output=True)
    return folder / "installed"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)).eval()
    htp_export.export(net, (torch.randn(2, 4),), tmp_path / "net.onnx", verbose=False)
    return tmp_path / "net.onnx"


def run(site: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    command = [sys.executable, "-m", "htp_export", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.long
def test_its_command_is_one_of_the_program(site, file):
    ended = run(
        site,
        "clip",
        file,
        "0",
        "--low",
        "-0.1",
        "--high",
        "0.1",
        "-o",
        file.with_name("out.onnx"),
        "--json",
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["modules"] == {"0": {"tensors": ["linear"]}}
    tagged = htp_export.load(file.with_name("out.onnx"))
    assert [node.op_type for node in tagged["0"].nodes] == ["Gemm", "Clip"]
    assert not tagged.untagged
    assert tagged.signature("0").outputs == ("linear",)

    x = np.random.default_rng(0).standard_normal((2, 4)).astype("float32")
    session = onnxruntime.InferenceSession(file.with_name("out.onnx"))
    parameters = {
        name: value.const_value.numpy() for name, value in tagged.model.graph.initializers.items()
    }
    hidden = np.clip(x @ parameters["0.weight"].T + parameters["0.bias"], -0.1, 0.1)
    expected = np.maximum(hidden, 0) @ parameters["2.weight"].T + parameters["2.bias"]
    np.testing.assert_allclose(
        session.run(None, {session.get_inputs()[0].name: x})[0], expected, atol=1e-6
    )


@pytest.mark.long
def test_the_help_lists_it_below_its_heading(site):
    lines = run(site, "--help").stdout.splitlines()
    cut = lines[lines.index("Cut:") :]
    assert any(line.split()[:2] == ["clip", "Limit"] for line in cut[: cut.index("")])


@pytest.mark.long
def test_its_errors_are_those_of_the_program(site, file):
    before = file.read_bytes()
    ended = run(site, "clip", file, "nowhere", "-o", file.with_name("out.onnx"))
    assert ended.returncode == 2
    assert "nowhere" in ended.stderr
    ended = run(site, "clip", file, "0", "--low", "2", "-o", file.with_name("out.onnx"))
    assert (ended.returncode, "the range 2 … 1 is empty" in ended.stderr) == (2, True)
    ended = run(site, "clip", file, "0", "-o", file)
    assert ended.returncode == 2
    assert file.read_bytes() == before
    assert not file.with_name("out.onnx").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("source", "problem"),
    every(
        2,
        [
            pytest.param(
                "raise RuntimeError('broken')", "cannot be imported: RuntimeError: broken"
            ),
            pytest.param("EXAMPLE = ''", "has no wrong_command"),
        ],
    ),
)
def test_a_package_that_is_broken_is_named_and_harms_no_other_command(
    tmp_path, file, source, problem
):
    (tmp_path / "wrong.py").write_text(source, encoding="utf-8")
    info = tmp_path / "wrong-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: wrong\nVersion: 1\n", encoding="utf-8"
    )
    (info / "entry_points.txt").write_text(
        "[htp_export.commands]\nwrong = wrong\ntree = wrong\n", encoding="utf-8"
    )
    ended = run(tmp_path, "wrong")
    assert ended.returncode == 2
    assert problem in ended.stderr
    assert run(tmp_path, "--help").returncode == 0
    # ours, although the package has one of that name
    assert "Linear" in run(tmp_path, "tree", file).stdout
