"""Weights that are mapped from files are written with the values that they have, and their pages are released."""

import io
import os
import sys
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses import FakeTensorMode

import htp_export
from htp_export.exporter.capture import saving
from htp_export.process.mapped_memory import MappedFiles, release_pages

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
MEGABYTE = 1 << 20


class Net(nn.Module):
    """A large weight that the exporter keeps, and one that it transposes without copying it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5000, 256)
        self.up = nn.Linear(256, 2048, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.up(self.embed(ids))


def saved_state(folder: Path, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    save_file(Net().state_dict(), folder / "net.safetensors")
    return folder / "net.safetensors"


def mapped_net(file: Path) -> Net:
    with torch.device("meta"):
        net = Net()
    net.load_state_dict(load_file(file), assign=True)
    return net.eval()


def exported(net: nn.Module, folder: Path) -> bytes:
    folder.mkdir()
    htp_export.export(net, (torch.zeros(1, 3, dtype=torch.long),), folder / "m.onnx", verbose=False)
    return (folder / "m.onnx").read_bytes() + (folder / "m.onnx.data").read_bytes()


def resident_bytes(path: Path) -> int:
    """How much of a file is resident in this process."""
    total, here = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split()[0]:
            here = line.endswith(os.fspath(path))
        elif here and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@LINUX
def test_what_was_read_of_a_mapped_file_is_released_after_it_was_written(tmp_path):
    file = saved_state(tmp_path)
    net = mapped_net(file)
    exported(net, tmp_path / "out")
    assert resident_bytes(file) < MEGABYTE < net.embed.weight.nbytes
    net.embed.weight.sum(), net.up.weight.sum()
    assert resident_bytes(file) > net.embed.weight.nbytes


def test_mapped_weights_give_the_file_that_copies_of_them_give(tmp_path):
    net = mapped_net(saved_state(tmp_path))
    in_memory = Net().eval()
    in_memory.load_state_dict(net.state_dict())
    assert exported(net, tmp_path / "mapped") == exported(in_memory, tmp_path / "memory")


def test_a_program_of_fake_weights_gets_mapped_ones_before_it_is_saved(tmp_path):
    file = saved_state(tmp_path)
    with FakeTensorMode():
        net = Net().eval()
        program = htp_export.export(
            net, (torch.zeros(1, 3, dtype=torch.long),), optimize=False, verbose=False
        )
    state = load_file(file)
    program.apply_weights(state)
    program.save(tmp_path / "m.onnx", external_data=True)
    model = htp_export.load(tmp_path / "m.onnx").model
    written = {name: value.const_value.numpy() for name, value in model.graph.initializers.items()}
    assert written.keys() == state.keys()
    assert all((written[name] == state[name].numpy()).all() for name in state)
    assert [node.metadata_props["htp.module"] for node in model.graph] == ["embed", "up", "up"]


def test_a_mapped_weight_that_was_changed_is_written_as_it_is_now(tmp_path):
    net = mapped_net(saved_state(tmp_path))
    with torch.no_grad():
        net.embed.weight[7] = 3.0
        net.up.weight[:, 9] = 4.0
    exported(net, tmp_path / "out")
    model = htp_export.load(tmp_path / "out" / "m.onnx").model
    embed, up = (value.const_value.numpy() for value in model.graph.initializers.values())
    assert (embed[7] == 3).all()
    assert (up[9] == 4).all()
    assert (embed[8] == net.embed.weight[8].detach().numpy()).all()


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        *(
            (torch.float32, layout)
            for layout in ("in order", "transposed", "every second row", "permuted")
        ),
        *((dtype, "transposed") for dtype in (torch.bfloat16, torch.float64, torch.int8)),
    ],
)
def test_parts_are_the_bytes_that_torch_writes(dtype, layout, monkeypatch):
    from torch.onnx._internal.exporter._core import TorchTensor

    monkeypatch.setattr(saving, "_PART_BYTES", 1 << 19)
    whole = torch.arange(1_200_000).remainder(251).to(dtype)
    weight = {
        "in order": whole.view(1000, 1200),
        "transposed": whole.view(1000, 1200).T,
        "every second row": whole.view(1000, 1200)[::2],
        "permuted": whole.view(10, 100, 1200).permute(1, 2, 0),
    }[layout]
    value = ir.Value(name="w", const_value=TorchTensor(weight, "w"))
    model = ir.Model(ir.Graph([], [], nodes=[], initializers=[value], name="g"), ir_version=10)
    plain, parts = io.BytesIO(), io.BytesIO()
    value.const_value.tofile(plain)
    before = value.const_value
    with saving.written_in_parts(model):
        assert value.const_value is not before
        value.const_value.tofile(parts)
        assert value.const_value.tobytes() == plain.getvalue()
        assert (value.const_value.dtype, value.const_value.shape) == (before.dtype, before.shape)
    assert value.const_value is before
    assert parts.getvalue() == plain.getvalue()


def test_a_conjugated_weight_is_left_to_torch():
    # torch gives no other view of its bytes
    weight = torch.ones(400, 400, dtype=torch.complex64).conj()
    value = ir.Value(name="w", const_value=ir.tensor_adapters.TorchTensor(weight, name="w"))
    before = value.const_value
    model = ir.Model(ir.Graph([], [], nodes=[], initializers=[value], name="g"), ir_version=10)
    with saving.written_in_parts(model):
        assert value.const_value is before


@LINUX
def test_ranges_of_memory_are_known_by_their_file(tmp_path):
    file = saved_state(tmp_path)
    weight = load_file(file)["embed.weight"]
    mapped, copy = MappedFiles.now(), weight.clone()
    assert mapped.path_of(weight.data_ptr(), weight.nbytes) == os.fspath(file)
    assert mapped.path_of(copy.data_ptr(), copy.nbytes) is None
    assert mapped.path_of(weight.data_ptr(), 1 << 40) is None


def test_release_keeps_what_was_changed_in_the_pages(tmp_path):
    weight = load_file(saved_state(tmp_path))["embed.weight"]
    weight[11] = 5.0
    release_pages(weight.data_ptr(), weight.nbytes)
    assert (weight[11] == 5).all()
