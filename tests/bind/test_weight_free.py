"""Files without weights of their own: they refer to the safetensors files of a checkpoint."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.errors import FileError, InputError
from tests.nets import spread

X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Two layers on sequences, whose weights torch's exporters transpose, a table and a normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 96)
        self.conv = nn.Conv1d(5, 70, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(self.out(self.norm(self.fc(x)).relu()))


def net(seed: int) -> nn.Module:
    torch.manual_seed(0)
    made = spread(Net()).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.1 * torch.rand(parameter.shape, generator=generator)
    return made


def checkpoint(folder: Path, seed: int = 2, **changes: torch.Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    state = {**net(seed).state_dict(), **changes}
    save_file(
        {name: tensor.clone() for name, tensor in state.items()}, folder / "model.safetensors"
    )
    return folder


def locations(file: Path) -> dict[str, str]:
    """Initializer → the file with its values; empty for values within the ONNX file."""
    found = {}
    for tensor in onnx.load(file, load_external_data=False).graph.initializer:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        found[tensor.name] = entries.get("location", "")
    return found


def run(file: Path, x: torch.Tensor = X) -> np.ndarray:
    session = onnxruntime.InferenceSession(file)
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def exported(file: Path, weights: Any, **options: Any) -> Path:
    file.parent.mkdir(exist_ok=True)
    htp_export.export(net(1), (X,), file, weights=weights, verbose=False, **options)
    return file


@pytest.mark.parametrize("dynamo", [True, False])
def test_parameters_are_in_the_checkpoint_and_all_others_beside(tmp_path, dynamo):
    folder = checkpoint(tmp_path / "ckpt")
    file = exported(tmp_path / "out" / "free.onnx", folder, dynamo=dynamo)
    expected = net(2)(X).detach().numpy()
    np.testing.assert_allclose(run(file), expected, atol=1e-5)
    found = locations(file)
    shared = [name for name, location in found.items() if location == "model.safetensors"]
    assert {"conv.weight", "norm.weight"} <= set(shared)
    assert set(found.values()) <= {"model.safetensors", "free.onnx.data", ""}
    assert (file.parent / "model.safetensors").samefile(folder / "model.safetensors")
    names = {path.name for path in file.parent.iterdir()}
    assert names <= {"free.onnx", "free.onnx.data", "model.safetensors"}
    tensors = htp_export.load(file).model.graph.initializers
    state = net(2).state_dict()
    for name in shared:
        assert tensors[name].const_value.tobytes() == state[name].numpy().tobytes()


def test_a_file_in_the_folder_of_the_checkpoint_needs_no_link(tmp_path):
    folder = checkpoint(tmp_path / "ckpt")
    before = (folder / "model.safetensors").stat()
    file = exported(folder / "free.onnx", folder)
    exported(folder / "free.onnx", folder)  # again
    after = (folder / "model.safetensors").stat()
    assert (after.st_ino, after.st_nlink, after.st_mtime_ns, after.st_mode) == (
        before.st_ino, 1, before.st_mtime_ns, before.st_mode
    )  # fmt: skip
    onnx.checker.check_model(file)
    assert onnx.load(file).graph.initializer[0].raw_data
    np.testing.assert_allclose(run(file), net(2)(X).detach().numpy(), atol=1e-5)


def test_shards_and_two_files_of_one_checkpoint(tmp_path):
    """As an encoder and a decoder: both link the same files."""
    folder, state = tmp_path / "ckpt", net(2).state_dict()
    folder.mkdir()
    names = sorted(state)
    files = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for name, keys in files.items():
        save_file({key: state[key].clone() for key in keys}, folder / name)
    index = {"weight_map": {key: name for name, keys in files.items() for key in keys}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    out = tmp_path / "out"
    file = exported(out / "one.onnx", folder)
    exported(out / "two.onnx", folder / "model.safetensors.index.json", dynamo=False)
    for each in (file, out / "two.onnx"):
        np.testing.assert_allclose(run(each), net(2)(X).detach().numpy(), atol=1e-5)
    for name in files:
        assert (folder / name).stat().st_nlink == 2
    # any descendant of an export, too
    htp_export.quantize(file, {"out": "int4"}, out / "int4.onnx")
    assert set(locations(out / "int4.onnx").values()) <= {"int4.onnx.data", ""}
    bound = htp_export.bind(out / "int4.onnx", folder, out / "free4.onnx", share_weights=True)
    assert {"a.safetensors", "b.safetensors"} <= set(locations(out / "free4.onnx").values())
    assert any("stay in a.safetensors" in note for note in bound.notes)
    np.testing.assert_array_equal(run(out / "free4.onnx"), run(out / "int4.onnx"))


def test_a_file_system_without_links_has_a_copy(tmp_path, monkeypatch):
    def none(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    folder = checkpoint(tmp_path / "ckpt")
    htp_export.export(net(1), (X,), tmp_path / "net.onnx", verbose=False)
    monkeypatch.setattr(os, "link", none)
    (tmp_path / "out").mkdir()
    file = tmp_path / "out" / "free.onnx"
    bound = htp_export.bind(tmp_path / "net.onnx", folder, file, share_weights=True)
    assert any("model.safetensors, which is copied into its folder" in note for note in bound.notes)
    assert not (tmp_path / "out" / "model.safetensors").samefile(folder / "model.safetensors")
    np.testing.assert_allclose(run(file), net(2)(X).detach().numpy(), atol=1e-5)
    htp_export.bind(tmp_path / "net.onnx", folder, file, share_weights=True)  # the copy is there


@pytest.mark.parametrize("pad", [1, 3])
def test_offsets_that_are_no_multiple_of_anything_are_read(tmp_path, pad):
    folder = checkpoint(tmp_path / "ckpt")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    [length] = struct.unpack("<Q", content[:8])
    header = content[8 : 8 + length] + b" " * pad
    path.write_bytes(struct.pack("<Q", len(header)) + header + content[8 + length :])
    file = exported(tmp_path / "out" / "free.onnx", folder)
    np.testing.assert_allclose(run(file), net(2)(X).detach().numpy(), atol=1e-5)
    arrays = {
        name: value.const_value.numpy()
        for name, value in htp_export.load(file).model.graph.initializers.items()
    }
    np.testing.assert_array_equal(arrays["conv.weight"], net(2).state_dict()["conv.weight"])


def test_entries_of_another_type_are_converted_beside(tmp_path):
    state = {name: tensor.bfloat16() for name, tensor in net(2).state_dict().items()}
    state["conv.weight"] = net(2).state_dict()["conv.weight"]
    folder = checkpoint(tmp_path / "ckpt", **state)
    htp_export.export(net(1), (X,), tmp_path / "net.onnx", verbose=False)
    out = tmp_path / "out"
    out.mkdir()
    bound = htp_export.bind(tmp_path / "net.onnx", folder, out / "free.onnx", share_weights=True)
    assert any("converted from BFLOAT16 to FLOAT" in note for note in bound.notes)
    found = locations(out / "free.onnx")
    assert [name for name, place in found.items() if place == "model.safetensors"] == [
        "conv.weight"
    ]
    loaded = net(1)
    loaded.load_state_dict(state)
    np.testing.assert_allclose(run(out / "free.onnx"), loaded(X).detach().numpy(), atol=1e-5)


def test_parameters_that_are_equal_refer_to_the_first(tmp_path):
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.LayerNorm(96), nn.LayerNorm(96)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x) + self.two(x.tanh())

    x, file = torch.randn(2, 96), tmp_path / "free.onnx"
    state = {name: torch.full((96,), len(name) + 0.5) for name in Pair().state_dict()}
    save_file(state, tmp_path / "model.safetensors")
    htp_export.export(Pair().eval(), (x,), file, weights=tmp_path, verbose=False)
    assert set(locations(file).values()) - {""} == {"model.safetensors"}
    expected = Pair()
    expected.load_state_dict(state)
    np.testing.assert_allclose(run(file, x), expected(x).detach().numpy(), atol=1e-5)


# --- what is refused; nothing is written then ---


@pytest.fixture
def free(tmp_path) -> Path:
    return exported(tmp_path / "out" / "free.onnx", checkpoint(tmp_path / "ckpt"))


def test_a_file_whose_weights_are_missing_or_changed_is_refused(free, tmp_path):
    shared = free.parent / "model.safetensors"
    shared.rename(tmp_path / "away")
    with pytest.raises(FileError, match=r"model\.safetensors: is missing: it contains weights of"):
        htp_export.optimize(free, tmp_path / "fast.onnx")
    assert main(["compare", str(free), str(free)]) == 2
    checkpoint(free.parent, seed=3)
    with pytest.raises(FileError, match="its shared weights were changed"):
        htp_export.load(free)
    shared.unlink()
    (tmp_path / "away").rename(shared)
    htp_export.load(free)


def test_a_checkpoint_that_does_not_fit_is_refused_by_its_parameter(tmp_path):
    folder = checkpoint(tmp_path / "ckpt", **{"fc.weight": torch.zeros(65, 32)})
    out = tmp_path / "out" / "free.onnx"
    with pytest.raises(InputError, match=r"'fc\.weight' has shape \[65, 32\]"):
        exported(out, folder)
    state = {name: tensor for name, tensor in net(2).state_dict().items() if name != "fc.bias"}
    save_file(state, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"have no 'fc\.bias'"):
        exported(out, folder, dynamo=False)
    assert list(out.parent.iterdir()) == []
    torch.save(state, tmp_path / "weights.pt")
    with pytest.raises(FileError, match="pickle"):
        exported(out, tmp_path / "weights.pt")
    with pytest.raises(InputError, match="give f, the file to write"):
        htp_export.export(net(1), (X,), weights=folder, verbose=False)
    assert list(out.parent.iterdir()) == []


def test_weights_that_are_no_files_cannot_be_shared(free, tmp_path):
    with pytest.raises(InputError, match="refers to safetensors files"):
        htp_export.bind(free, net(2), tmp_path / "new.onnx", share_weights=True)
    with pytest.raises(InputError, match="give an output"):
        htp_export.bind(free, tmp_path / "ckpt", share_weights=True)


def test_another_file_of_that_name_stays(free, tmp_path):
    other = checkpoint(tmp_path / "other", seed=3)
    before = {path.name: path.read_bytes() for path in free.parent.iterdir()}
    with pytest.raises(FileError, match=r"model\.safetensors: is another file than"):
        htp_export.bind(free, other, free, share_weights=True)
    assert {path.name: path.read_bytes() for path in free.parent.iterdir()} == before


def test_what_is_made_of_it_has_weights_of_its_own(free, tmp_path):
    htp_export.optimize(free, tmp_path / "fast.onnx")
    (free.parent / "model.safetensors").unlink()
    np.testing.assert_allclose(run(tmp_path / "fast.onnx"), net(2)(X).detach().numpy(), atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("exporter", ["--dynamo", "--torchscript"])
def test_command(tmp_path, monkeypatch, capsys, exporter):
    folder = checkpoint(tmp_path / "ckpt")
    (tmp_path / "free_net.py").write_text(
        "from tests.bind import test_weight_free as it\ndef make():\n    return it.net(1), (it.X,)\n"
    )
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    arguments = ["export", "--entry", "free_net:make", "-o", "out/free.onnx", exporter]
    # the weights are those of the checkpoint, and not those of the model
    assert main([*arguments, "--weights", "ckpt", "--verify"]) == 1
    shown = capsys.readouterr().out
    assert "stay in model.safetensors" in shown
    np.testing.assert_allclose(run(out / "free.onnx"), net(2)(X).detach().numpy(), atol=1e-5)
    names = {path.name for path in out.iterdir()}
    assert names <= {"free.onnx", "free.onnx.data", "model.safetensors"}
    assert main([*arguments, "--weights", "nowhere.safetensors"]) == 2
    arguments[4] = "ckpt/free.onnx"
    assert main([*arguments, "--weights", "ckpt", "--json"]) == 0
    assert (folder / "model.safetensors").stat().st_nlink == 2
    np.testing.assert_allclose(run(folder / "free.onnx"), net(2)(X).detach().numpy(), atol=1e-5)
