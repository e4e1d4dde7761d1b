"""``in_place_data``: the data file has new weights, and the ONNX file stays byte for byte as it is."""

import json
import shutil
from pathlib import Path

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
from htp_export.files.model_files import write_model
from tests.bind.test_bind import TOKENS, files, net, same, stored

__all__ = ["files"]


@pytest.fixture
def ready(files, tmp_path) -> Path:
    """A file of the first net with every weight in its data file."""
    file = tmp_path / "model.onnx"
    htp_export.bind(files[0], net(1), file, in_place_data=True)
    return file


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def note_of(file: Path) -> dict[str, object]:
    """The description of the data file."""
    [note] = json.loads(htp_export.load(file).model.metadata_props["htp.data"]).values()
    return note


def run(file: Path) -> np.ndarray:
    session = onnxruntime.InferenceSession(file)
    [fed] = session.get_inputs()
    return session.run(None, {fed.name: TOKENS.numpy()})[0]


@pytest.mark.long
def test_the_data_change_and_the_onnx_file_does_not(ready, files, tmp_path):
    before = contents(tmp_path)
    bound = htp_export.bind(ready, net(2), in_place_data=True)
    after = contents(tmp_path)
    assert before.keys() == after.keys() == {"model.onnx", "model.onnx.data"}
    assert after["model.onnx"] == before["model.onnx"]
    assert after["model.onnx.data"] != before["model.onnx.data"]
    found, expected = stored(ready), stored(files[1])
    assert all(same(found[name], expected[name]) for name in expected)
    assert all(same(bound.arrays[name], expected[name]) for name in bound.arrays)
    np.testing.assert_allclose(run(ready), net(2)(TOKENS).detach().numpy(), atol=1e-5)


def test_back_again_is_the_first_pair_byte_for_byte(ready, tmp_path):
    first = contents(tmp_path)
    htp_export.bind(ready, net(2), in_place_data=True)
    second = contents(tmp_path)
    htp_export.bind(ready, net(3), ready, in_place_data=True)
    htp_export.bind(ready, net(2), in_place_data=True)
    assert contents(tmp_path) == second
    htp_export.bind(ready, net(1), in_place_data=True)
    assert contents(tmp_path) == first


@pytest.mark.parametrize("precision", ["int4", "int8-weights", "fp16"])
def test_a_quantized_file_is_what_quantizing_the_new_weights_gives(files, tmp_path, precision):
    made = [tmp_path / name / "q.onnx" for name in ("one", "two")]
    for file, output in zip(files, made, strict=True):
        output.parent.mkdir()
        htp_export.quantize(file, precision, output)
    ready = tmp_path / "ready.onnx"
    htp_export.bind(made[0], net(1), ready, in_place_data=True)
    before = ready.read_bytes()
    htp_export.bind(ready, net(2), in_place_data=True)
    assert ready.read_bytes() == before
    found, expected = stored(ready), stored(made[1])
    assert all(same(found[name], expected[name]) for name in expected)


def test_zeros_of_prune_stay_and_the_result_can_be_read(files, tmp_path):
    htp_export.prune(files[0], {"fc": 0.5}, tmp_path / "pruned.onnx")
    ready = tmp_path / "ready.onnx"
    htp_export.bind(tmp_path / "pruned.onnx", net(1), ready, in_place_data=True)
    bound = htp_export.bind(ready, net(2), in_place_data=True)
    masked = [name for name, recipe in bound.recipes.items() if recipe[0] == "masked"]
    assert masked
    for name in masked:
        assert np.array_equal(bound.arrays[name] == 0, stored(tmp_path / "pruned.onnx")[name] == 0)


# --- what cannot be ---


def test_tensors_within_the_onnx_file_are_named_and_nothing_is_written(tmp_path):
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)).eval()
    file = tmp_path / "net.onnx"
    htp_export.export(model, (torch.ones(2, 32),), file, verbose=False)
    assert (tmp_path / "net.onnx.data").exists()
    before = contents(tmp_path)
    new = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    with pytest.raises(InputError, match=r"'2\.bias' \(12 bytes\)") as raised:
        htp_export.bind(file, new, in_place_data=True)
    assert "net.onnx would change" in str(raised.value)
    assert contents(tmp_path) == before
    kept = {**new, "0.bias": model[0].bias.detach(), "2.bias": model[2].bias.detach()}
    htp_export.bind(file, kept, in_place_data=True)  # small tensors that stay do not matter
    assert contents(tmp_path)["net.onnx"] == before["net.onnx"]
    assert contents(tmp_path) != before
    with pytest.raises(InputError, match="give the path of a model"):
        htp_export.bind(htp_export.load(file), new, in_place_data=True)


def test_data_of_another_model_are_refused(files, ready, tmp_path):
    sharing = tmp_path / "sharing.onnx"
    write_model(htp_export.load(ready).model, sharing, share_weights=True)
    before = contents(tmp_path)
    with pytest.raises(FileError, match=r"shares model\.onnx\.data with another model"):
        htp_export.bind(sharing, net(2), in_place_data=True)
    assert contents(tmp_path) == before


def test_several_data_files_are_refused(tmp_path):
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)).eval()
    file = tmp_path / "net.onnx"
    htp_export.export(model, (torch.ones(2, 32),), file, verbose=False)
    proto = onnx.load(file)
    (tmp_path / "net.onnx.data").unlink()
    onnx.save(proto, file, save_as_external_data=True, all_tensors_to_one_file=False)
    before = contents(tmp_path)
    new = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    with pytest.raises(FileError, match="in 2 data files"):
        htp_export.bind(file, new, in_place_data=True)
    assert contents(tmp_path) == before


def test_a_file_that_another_process_replaces_meanwhile_is_refused(ready, files, tmp_path):
    class Replacing(dict):
        """A checkpoint that is read when the file is already another one."""

        def items(self):  # type: ignore[no-untyped-def]
            shutil.copy(ready, tmp_path / "new.onnx")
            (tmp_path / "new.onnx").replace(ready)
            return super().items()

    with pytest.raises(FileError, match="was changed after it was read"):
        htp_export.bind(ready, Replacing(net(2).state_dict()), in_place_data=True)
    assert sorted(contents(tmp_path)) == ["model.onnx", "model.onnx.data"]


def test_a_pair_that_is_torn_apart_is_refused(ready, files, tmp_path):
    """Data that stand for other data stand for no others."""
    htp_export.bind(ready, net(2), in_place_data=True)
    data = (tmp_path / "model.onnx.data").read_bytes()
    # a file of the third net in the same layout, with these data
    other = tmp_path / "third" / "model.onnx"
    other.parent.mkdir()
    htp_export.bind(files[0], net(3), other, in_place_data=True)
    (other.parent / "model.onnx.data").write_bytes(data)
    with pytest.raises(FileError, match="does not match its data file"):
        htp_export.load(other)
    # data that another program changed behind our back
    changed = bytearray(data)
    changed[0] ^= 1
    (tmp_path / "model.onnx.data").write_bytes(changed)
    with pytest.raises(FileError, match="does not match its data file"):
        htp_export.load(ready)


def test_the_same_weights_written_over_replaced_data_are_told_apart(ready, tmp_path):
    """The old file and the new data of a killed write: equal weights, but other data lie there."""
    htp_export.bind(ready, net(2), in_place_data=True)
    replaced = (tmp_path / "model.onnx.data").read_bytes()
    again = tmp_path / "again.onnx"
    htp_export.bind(ready, net(1), again, in_place_data=True)
    old, model = note_of(ready), htp_export.load(again).model
    model.graph.name = "another"
    write_model(model, ready, "model.onnx.data")
    assert note_of(ready)["tensors"] == old["tensors"]
    (tmp_path / "model.onnx.data").write_bytes(replaced)
    with pytest.raises(FileError, match="does not match its data file"):
        htp_export.load(ready)


def test_data_of_others_behind_the_weights_are_not_removed(ready, tmp_path):
    with (tmp_path / "model.onnx.data").open("ab") as file:
        file.write(b"theirs")
    before = contents(tmp_path)
    with pytest.raises(FileError, match="contains other data behind the weights"):
        htp_export.bind(ready, net(2), in_place_data=True)
    assert contents(tmp_path) == before


# --- other places, other commands ---


def test_a_link_to_the_data_stays_a_link(ready, tmp_path):
    data = tmp_path / "model.onnx.data"
    (tmp_path / "store").mkdir()
    data.rename(tmp_path / "store" / "data")
    data.symlink_to(Path("store") / "data")
    before = ready.read_bytes()
    htp_export.bind(ready, net(2), in_place_data=True)
    assert data.is_symlink()
    assert ready.read_bytes() == before
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["data"]
    assert len(stored(ready))


def test_what_is_made_of_replaced_data_is_whole(ready, tmp_path):
    htp_export.bind(ready, net(2), in_place_data=True)
    htp_export.optimize(ready, tmp_path / "fast.onnx")
    np.testing.assert_allclose(
        run(tmp_path / "fast.onnx"), net(2)(TOKENS).detach().numpy(), atol=1e-5
    )
    htp_export.rename(ready, output=ready)  # the data file stays, with what lies behind the weights
    htp_export.bind(ready, net(3), in_place_data=True)
    np.testing.assert_allclose(run(ready), net(3)(TOKENS).detach().numpy(), atol=1e-5)


def test_command(ready, tmp_path, capsys):
    save_file(
        {
            name: tensor.clone()
            for name, tensor in net(2).state_dict().items()
            if name != "head.weight"
        },
        tmp_path / "tuned.safetensors",
    )
    before = ready.read_bytes()
    arguments = ["bind", str(ready), str(tmp_path / "tuned.safetensors")]
    assert main(arguments) == 2
    assert "--in-place-data" in capsys.readouterr().err
    assert main([*arguments, "--in-place-data", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["unbound"] == {}
    assert ready.read_bytes() == before
    np.testing.assert_allclose(run(ready), net(2)(TOKENS).detach().numpy(), atol=1e-5)
