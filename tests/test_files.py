"""Reading and writing ONNX files: external data stays external, and nothing is lost when a write fails."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from htp_export import files
from htp_export.errors import FileError
from htp_export.files import read_model, write_model
from tests.handmade import encoder

WEIGHT = "layer.1.fc.weight"


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """A model whose weights are in ``home/weights.bin``."""
    (tmp_path / "home").mkdir()
    ir.save(encoder(16), tmp_path / "home" / "model.onnx", external_data="weights.bin")
    assert (tmp_path / "home" / "weights.bin").stat().st_size == 2048
    return tmp_path / "home" / "model.onnx"


def weight_of(model: ir.Model, name: str = WEIGHT) -> ir.TensorProtocol:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor


def expected() -> np.ndarray:
    return weight_of(encoder(16)).numpy()


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_reading_leaves_the_weights_in_their_file(external: Path) -> None:
    (external.parent / "weights.bin").rename(external.parent / "elsewhere")
    tensor = weight_of(read_model(external))
    assert isinstance(tensor, ir.ExternalTensor)
    assert tuple(tensor.shape) == (16, 16)


def test_what_cannot_be_read_is_refused_and_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"gone\.onnx: cannot be read: No such file"):
        read_model(tmp_path / "gone.onnx")
    for name, content in (("text.onnx", b"hello world"), ("empty.onnx", b""), ("bad.json", b"{")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(FileError, match=f"{name}: not an ONNX model"):
            read_model(tmp_path / name)
    with pytest.raises(FileError, match="cannot be read"):
        read_model(tmp_path)


@pytest.mark.parametrize("location", ["../secret.bin", "/etc/passwd", "link.bin"])
def test_external_data_outside_the_folder_is_refused(external: Path, location: str) -> None:
    (external.parent.parent / "secret.bin").write_bytes(bytes(4096))
    (external.parent / "link.bin").symlink_to(external.parent.parent / "secret.bin")
    proto = onnx.load(external, load_external_data=False)
    proto.graph.initializer[0].external_data[0].value = location
    onnx.save(proto, external)
    with pytest.raises(FileError, match="outside its folder"):
        read_model(external)


def test_a_copy_in_the_same_folder_refers_to_the_same_weights(external: Path) -> None:
    write_model(read_model(external), external.with_name("copy.onnx"))
    assert listing(external.parent) == ["copy.onnx", "model.onnx", "weights.bin"]
    np.testing.assert_array_equal(weight_of(read_model(external.with_name("copy.onnx"))).numpy(), expected())


def test_a_copy_in_another_folder_brings_its_weights_along(external: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    model = read_model(external)
    write_model(model, tmp_path / "other" / "copy.onnx")
    assert listing(tmp_path / "other") == ["copy.onnx", "copy.onnx.data"]
    before = weight_of(model)
    assert isinstance(before, ir.ExternalTensor)
    assert before.location == "weights.bin"
    (external.parent / "weights.bin").unlink()
    copy = weight_of(read_model(tmp_path / "other" / "copy.onnx"))
    assert isinstance(copy, ir.ExternalTensor)
    np.testing.assert_array_equal(copy.numpy(), expected())


def test_only_weights_that_the_model_still_has_are_brought_along(external: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    model = read_model(external)
    del model.graph.initializers[WEIGHT]
    write_model(model, tmp_path / "other" / "half.onnx")
    assert (tmp_path / "other" / "half.onnx.data").stat().st_size == 1024


def test_a_relative_file_name_and_another_working_directory_change_nothing(
    external: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(external.parent)
    model = read_model("model.onnx")
    monkeypatch.chdir(tmp_path)
    np.testing.assert_array_equal(weight_of(model).numpy(), expected())


def test_weights_in_memory_go_into_the_file_or_where_they_are_told_to(tmp_path: Path) -> None:
    write_model(encoder(16), tmp_path / "whole.onnx")
    assert listing(tmp_path) == ["whole.onnx"]
    model = encoder(16)
    write_model(model, tmp_path / "split.onnx", "split.bin")
    assert listing(tmp_path) == ["split.bin", "split.onnx", "whole.onnx"]
    assert not isinstance(weight_of(model), ir.ExternalTensor)
    onnx.checker.check_model(tmp_path / "split.onnx")
    np.testing.assert_array_equal(weight_of(read_model(tmp_path / "split.onnx")).numpy(), expected())


def test_models_too_large_for_one_file_get_external_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_LARGE_BYTES", 2000)
    write_model(encoder(16), tmp_path / "large.onnx")
    assert listing(tmp_path) == ["large.onnx", "large.onnx.data"]
    np.testing.assert_array_equal(weight_of(read_model(tmp_path / "large.onnx")).numpy(), expected())


def test_weights_that_are_one_tensor_are_written_once(tmp_path: Path) -> None:
    model = encoder(16)
    model.graph.initializers["layer.0.fc.weight"].const_value = weight_of(model)
    write_model(model, tmp_path / "tied.onnx", "tied.bin")
    assert (tmp_path / "tied.bin").stat().st_size == 1024
    both = read_model(tmp_path / "tied.onnx")
    np.testing.assert_array_equal(weight_of(both, "layer.0.fc.weight").numpy(), weight_of(both).numpy())


def test_a_model_may_overwrite_its_own_weights_and_still_has_them(external: Path) -> None:
    model = read_model(external)
    model.graph.initializers["layer.0.fc.weight"].const_value = ir.tensor(np.zeros((4, 4), np.float32))
    write_model(model, external, "weights.bin")
    assert listing(external.parent) == ["model.onnx", "weights.bin"]
    assert (external.parent / "weights.bin").stat().st_size == 1024  # the other one is small, and now in the file
    np.testing.assert_array_equal(weight_of(model).numpy(), expected())
    again = read_model(external)
    np.testing.assert_array_equal(weight_of(again).numpy(), expected())
    assert weight_of(again, "layer.0.fc.weight").numpy().max() == 0


def test_external_tensors_in_node_attributes_move_too(external: Path, tmp_path: Path) -> None:
    model = read_model(external)
    constant = ir.node("Constant", [], {"value": weight_of(model)})
    model.graph.insert_before(model.graph[0], constant)
    (tmp_path / "other").mkdir()
    write_model(model, tmp_path / "other" / "copy.onnx")
    copy = read_model(tmp_path / "other" / "copy.onnx")
    np.testing.assert_array_equal(copy.graph[0].attributes["value"].as_tensor().numpy(), expected())


@pytest.mark.parametrize("where", ["same", "other"])
def test_a_failed_write_leaves_what_was_there(
    external: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    folder = external.parent if where == "same" else tmp_path / "other"
    folder.mkdir(exist_ok=True)
    target = folder / "target.onnx"
    target.write_bytes(b"old model")
    (folder / "target.onnx.data").write_bytes(b"old weights")
    model = read_model(external)

    def broken(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "write_filled", broken)
    with pytest.raises(FileError, match=r"target\.onnx: cannot be written: .*No space left"):
        write_model(model, target, "target.onnx.data" if where == "same" else None)
    assert target.read_bytes() == b"old model"
    assert (folder / "target.onnx.data").read_bytes() == b"old weights"
    assert not [name for name in listing(folder) if name.startswith(".")]
    np.testing.assert_array_equal(weight_of(model).numpy(), expected())


def test_weights_that_are_gone_are_an_error_and_write_nothing(external: Path, tmp_path: Path) -> None:
    model = read_model(external)
    (external.parent / "weights.bin").unlink()
    (tmp_path / "other").mkdir()
    with pytest.raises(FileError, match=r"weights\.bin"):
        write_model(model, tmp_path / "other" / "copy.onnx")
    assert listing(tmp_path / "other") == []


def test_targets_that_cannot_be_are_refused_before_anything_is_written(external: Path, tmp_path: Path) -> None:
    model = read_model(external)
    with pytest.raises(FileError, match="is a folder"):
        write_model(model, tmp_path)
    with pytest.raises(FileError, match="another file in the same folder"):
        write_model(model, tmp_path / "a.onnx", "../a.data")
    with pytest.raises(FileError, match="holds the weights of this model"):
        write_model(model, external.parent / "weights.bin")
    with pytest.raises(FileError, match="cannot be written"):
        write_model(model, tmp_path / "nowhere" / "a.onnx")
    assert listing(tmp_path) == ["home"]
