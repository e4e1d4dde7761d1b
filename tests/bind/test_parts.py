"""``only``: several runs write the weights of a file in parts, and the last one writes the file."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.errors import FileError, InputError, SelectorError
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from tests.nets import spread

X = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def state(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: 0.2 * torch.randn(tensor.shape) for name, tensor in Net().state_dict().items()}


@pytest.fixture
def given(tmp_path) -> Path:
    """A file and two checkpoints."""
    htp_export.export(spread(Net()).eval(), (X,), tmp_path / "base.onnx", verbose=False)
    for seed in (1, 2):
        save_file(state(seed), tmp_path / f"{seed}.safetensors")
    (tmp_path / "out").mkdir()
    return tmp_path


def bind(given: Path, only: str, seed: int = 1) -> htp_export.results.Bound:
    out = given / "out" / "new.onnx"
    return htp_export.bind(given / "base.onnx", given / f"{seed}.safetensors", out, only=only)


def arrays(file: Path) -> dict[str, bytes]:
    initializers = htp_export.load(file).model.graph.initializers
    return {name: value.const_value.tobytes() for name, value in initializers.items()}


PARTS = ("layers.0,layers.1", "**,!layers.0,!layers.1")


@pytest.mark.long
@pytest.mark.parametrize("order", [PARTS, PARTS[::-1], (*PARTS, PARTS[0]), ("layers.**", *PARTS)])
def test_the_last_part_writes_the_model_that_one_run_would_write(given, order):
    htp_export.bind(given / "base.onnx", given / "1.safetensors", given / "whole.onnx")
    out = given / "out" / "new.onnx"
    first = bind(given, order[0])
    assert not out.exists()
    assert "new.onnx is written when those of" in first.notes[-1]
    for only in order[1:]:
        last = bind(given, only)
    assert "all parts are there" in last.notes[-1]
    assert arrays(out) == arrays(given / "whole.onnx")
    expected = Net()
    expected.load_state_dict(state(1))
    session = onnxruntime.InferenceSession(out)
    found = session.run(None, {session.get_inputs()[0].name: X.numpy()})[0]
    np.testing.assert_allclose(found, expected(X).detach().numpy(), atol=1e-4)


def test_parts_of_other_weights_are_not_mixed_and_the_old_model_stays_until_the_new_is_whole(given):
    out = given / "out" / "new.onnx"
    for only in PARTS:
        bind(given, only)
    old = arrays(out)
    bind(given, PARTS[0], seed=2)
    assert arrays(out) == old
    bind(given, PARTS[1], seed=2)
    htp_export.bind(given / "base.onnx", given / "2.safetensors", given / "whole.onnx")
    assert arrays(out) == arrays(given / "whole.onnx")
    data = [path for path in out.parent.iterdir() if path.suffix == ".data"]
    assert len(data) <= 3  # the parts of the old model are gone


def test_a_part_whose_data_are_gone_or_broken_does_not_count(given):
    bind(given, PARTS[0])
    [data] = (given / "out").glob("*.data")
    content = data.read_bytes()
    data.write_bytes(content[:-1])
    assert "is written when those of" in bind(given, PARTS[1]).notes[-1]
    assert not (given / "out" / "new.onnx").exists()
    for text in (
        "{",
        "7",
        '{"data": "../x", "places": {}}',
        '{"data": "x", "places": {"a": [-1, 2]}}',
    ):
        (given / "out" / "new.onnx.zzz.json").write_text(text)
        bind(given, PARTS[1])
    assert "all parts are there" in bind(given, PARTS[0]).notes[-1]


def test_wrong_input(given):
    with pytest.raises(SelectorError):
        bind(given, "nowhere")
    with pytest.raises(InputError, match="give the path of a model"):
        htp_export.bind(given / "base.onnx", state(1), given / "out" / "new.onnx", only="head")
    with pytest.raises(InputError, match="leave in_place_data"):
        htp_export.bind(given / "base.onnx", state(1), only="head", in_place_data=True)
    with pytest.raises(FileError):
        htp_export.bind(
            given / "base.onnx", given / "1.safetensors", given / "no" / "x.onnx", only="head"
        )
    assert list((given / "out").iterdir()) == []


def test_command(given, capsys):
    arguments = ["bind", str(given / "base.onnx"), str(given / "1.safetensors")]
    arguments += ["-o", str(given / "out" / "new.onnx"), "--only"]
    assert main([*arguments, PARTS[0]]) == 0
    assert "is written when those of" in " ".join(capsys.readouterr().out.split())
    assert main([*arguments, PARTS[1]]) == 0
    assert "all parts are there" in " ".join(capsys.readouterr().out.split())


# --- larger than a machine ---

GB = 1 << 30


def sparse_model(file: Path, layers: int, width: int, *, turned: bool = False) -> Path:
    """A tagged chain of square matrices whose data file and whose checkpoint are holes; return the checkpoint.

    ``turned``: The file has every second matrix transposed.
    """
    size = 4 * width * width
    last = start = ir.val("x", ir.DataType.FLOAT, [1, width])
    nodes, infos, weights = [], [ModuleInfo("", "net.Net", 1, "computed")], []
    header: dict[str, dict[str, object]] = {}
    for layer in range(layers):
        name = f"layers.{layer}.weight"
        tensor = ir.ExternalTensor(
            f"{file.name}.data", layer * size, size, ir.DataType.FLOAT,
            shape=ir.Shape([width, width]), name=name, base_dir=file.parent,
        )  # fmt: skip
        if turned and layer % 2:
            tensor.metadata_props["htp.recipe"] = json.dumps(["transpose", name, [1, 0]])
        value = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype))
        value.shape = tensor.shape
        weights.append(value)
        result = ir.val(f"h{layer}", ir.DataType.FLOAT, [1, width])
        said = {"htp.module": f"layers.{layer}", "htp.reason": "scope"}
        nodes.append(ir.node("MatMul", [last, value], outputs=[result], metadata_props=said))
        infos.append(ModuleInfo(f"layers.{layer}", "torch.nn.Linear", 1, "computed"))
        places = [layer * size, (layer + 1) * size]
        header[name] = {"dtype": "F32", "shape": [width, width], "data_offsets": places}
        last = result
    graph = ir.Graph(
        [start], [last], nodes=nodes, initializers=weights, opset_imports={"": 20}, name="Net"
    )
    model = ir.Model(graph, ir_version=10)
    model.metadata_props.update({"htp.version": "1", "htp.modules": Hierarchy(infos).to_json()})
    file.write_bytes(ir.to_proto(model).SerializeToString())
    os.truncate(_touched(file.with_name(f"{file.name}.data")), layers * size)
    checkpoint = file.with_name("sparse.safetensors")
    text = json.dumps(header).encode()
    checkpoint.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(checkpoint, 8 + len(text) + layers * size)
    return checkpoint


def _touched(path: Path) -> Path:
    path.touch()
    return path


_PEAK = """
import sys, resource
import htp_export
file, weights, output, *only = sys.argv[1:]
if file:
    htp_export.bind(file, weights, output, **({"only": only[0]} if only else {}))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


def peak(*arguments: str) -> int:
    """The peak memory of a process that binds, in bytes."""
    launcher = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"
    command = [sys.executable, "-c", launcher, sys.executable, "-c", _PEAK, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout)


@pytest.mark.long
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="sparse files, and bytes of ru_maxrss"
)
def test_a_checkpoint_of_400_gigabytes_takes_seconds_and_no_memory(tmp_path):
    width, layers = 16_384, 400  # 1 GB each
    weights = sparse_model(tmp_path / "base.onnx", layers, width)
    if weights.stat().st_blocks * 512 > GB:
        pytest.skip("a file system without sparse files")
    small = tmp_path / "small"
    small.mkdir()
    control = sparse_model(small / "base.onnx", 1, 8)
    (tmp_path / "out").mkdir()
    before = peak(str(small / "base.onnx"), str(control), str(small / "out.onnx"))
    parts = ["layers.[0-9],layers.?[0-9],layers.1??", "layers.[23]??"]
    output = tmp_path / "out" / "new.onnx"
    for only in parts:
        assert not output.exists()
        after = peak(str(tmp_path / "base.onnx"), str(weights), str(output), only)
        assert after - before < 200 << 20
    assert len(htp_export.load(output).model.graph.initializers) == layers
    sizes = {path.name: path.stat() for path in output.parent.iterdir()}
    assert sum(each.st_size for each in sizes.values()) > 400 * GB
    assert sum(each.st_blocks for each in sizes.values()) * 512 < GB
    tensor = htp_export.load(output).model.graph.initializers["layers.399.weight"].const_value
    assert tensor.nbytes == GB


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bytes of ru_maxrss")
def test_3_gigabytes_are_bound_within_200_megabytes(tmp_path):
    weights = sparse_model(tmp_path / "base.onnx", 48, 4096, turned=True)
    small = tmp_path / "small"
    small.mkdir()
    control = sparse_model(small / "base.onnx", 2, 8, turned=True)
    before = peak(str(small / "base.onnx"), str(control), str(small / "out.onnx"))
    after = peak(str(tmp_path / "base.onnx"), str(weights), str(tmp_path / "out.onnx"))
    assert (tmp_path / "out.onnx.data").stat().st_size == 48 * 4096 * 4096 * 4
    (tmp_path / "out.onnx.data").unlink()
    assert after - before < 200e6
