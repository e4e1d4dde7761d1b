"""Data files: a file that is written has its weights for itself, and every file that links lead to is read."""

import itertools
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import htp_export
from htp_export.command.main import main
from htp_export.errors import FileError, InputError
from htp_export.files import data_files, own_data
from htp_export.files.external_writers import written_whole
from htp_export.files.model_files import external_files, read_model, write_model
from htp_export.format import tags
from tests.handmade import encoder

WEIGHT = "layer.1.fc.weight"


def weight_of(model: ir.Model, name: str = WEIGHT) -> ir.TensorProtocol:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor


def save(file: Path, seed: int = 0, data: str | None = None) -> Path:
    """A small model with its weights beside it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    model = encoder(16)
    for each in (*model.graph.inputs, *(node.outputs[0] for node in model.graph)):
        each.shape = ir.Shape([16, 16])
    for name in ("layer.0.fc.weight", WEIGHT):
        model.graph.initializers[name].const_value = ir.tensor(
            np.random.default_rng([seed, len(name)]).standard_normal((16, 16)).astype(np.float32),
            name=name,
        )
    write_model(model, file, data or f"{file.name}.data")
    return file


def values(file: Path) -> np.ndarray[Any, Any]:
    return weight_of(read_model(file)).numpy().copy()


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save(tmp_path / "bert.onnx")


class TestOwned:
    def test_a_file_does_not_change_when_the_one_it_was_made_of_is_written_again(self, bert):
        before, small = values(bert), bert.with_name("small.onnx")
        write_model(read_model(bert), small)
        assert listing(bert.parent) == [
            "bert.onnx",
            "bert.onnx.data",
            "small.onnx",
            "small.onnx.data",
        ]
        save(bert, seed=1)
        assert np.abs(values(bert) - before).max() > 0.1
        np.testing.assert_array_equal(values(small), before)
        assert tags.WEIGHTS not in read_model(small).metadata_props

    @pytest.mark.parametrize("data", ["bert.onnx.data", "weights.bin"])
    def test_writing_in_place_leaves_the_data_file_where_it_is(self, tmp_path, data):
        file = save(tmp_path / "bert.onnx", data=data)
        before = (tmp_path / data).stat()
        model = read_model(file)
        model.graph.name = "another"
        write_model(model, file)
        assert read_model(file).graph.name == "another"
        assert listing(tmp_path) == ["bert.onnx", data]
        assert (tmp_path / data).stat().st_ino == before.st_ino

    @pytest.mark.parametrize("in_place", [False, True])
    def test_weights_in_memory_join_those_in_the_data_file(self, bert, in_place):
        model = read_model(bert)
        expected = values(bert)
        fresh = np.ones((16, 16), np.float32)
        model.graph.initializers["layer.0.fc.weight"].const_value = ir.tensor(fresh)
        target = bert if in_place else bert.with_name("other.onnx")
        write_model(model, target)
        assert external_files(read_model(target)) == {target.with_name(f"{target.name}.data")}
        proto = onnx.load(target, load_external_data=False)
        assert {each.name: len(each.raw_data) for each in proto.graph.initializer} == {
            "layer.0.fc.weight": 0, WEIGHT: 0
        }  # fmt: skip
        np.testing.assert_array_equal(values(target), expected)
        loaded = onnx.load(target)
        (weight,) = (w for w in loaded.graph.initializer if w.name == "layer.0.fc.weight")
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(weight), fresh)

    def test_a_model_that_is_written_over_another_does_not_take_its_data(self, bert):
        other = save(bert.with_name("other.onnx"), seed=1, data="weights.bin")
        write_model(read_model(bert), other)
        np.testing.assert_array_equal(values(other), values(bert))
        assert read_model(other).metadata_props.get(tags.WEIGHTS) is None
        assert listing(bert.parent) == [
            "bert.onnx", "bert.onnx.data", "other.onnx", "other.onnx.data", "weights.bin"
        ]  # fmt: skip


class TestShared:
    def share(self, bert: Path) -> Path:
        small = bert.with_name("small.onnx")
        write_model(read_model(bert), small, share_weights=True)
        return small

    def test_the_file_of_another_model_is_named_with_its_size_and_contents(self, bert):
        small = self.share(bert)
        assert listing(bert.parent) == ["bert.onnx", "bert.onnx.data", "small.onnx"]
        np.testing.assert_array_equal(values(small), values(bert))
        said = json.loads(read_model(small).metadata_props[tags.WEIGHTS])
        assert said.keys() == {"bert.onnx.data"}
        assert said["bert.onnx.data"]["size"] == 2048

    @pytest.mark.parametrize("change", ["values", "size"])
    def test_a_shared_file_that_changed_is_refused(self, bert, change):
        small, data = self.share(bert), bert.with_name("bert.onnx.data")
        save(bert, seed=1)
        if change == "size":
            data.write_bytes(data.read_bytes() + bytes(8))
        what = "it had 2,048 bytes and now has 2,056" if change == "size" else "its contents differ"
        with pytest.raises(
            FileError,
            match=rf"small\.onnx: its shared weights were changed.*bert\.onnx\.data is not .*{what}",
        ):
            read_model(small)
        assert values(bert).shape == (16, 16)

    def test_copies_of_both_files_are_read(self, bert, tmp_path):
        small = self.share(bert)
        (tmp_path / "copy").mkdir()
        for name in ("small.onnx", "bert.onnx.data"):
            # written just now, with the same contents
            shutil.copyfile(bert.with_name(name), tmp_path / "copy" / name)
        np.testing.assert_array_equal(values(tmp_path / "copy" / small.name), values(bert))

    def test_weights_that_are_missing_cannot_be_shared(self, bert):
        model = read_model(bert)
        bert.with_name("bert.onnx.data").unlink()
        with pytest.raises(FileError, match=r"bert\.onnx\.data: is missing"):
            write_model(model, bert.with_name("small.onnx"), share_weights=True)
        assert listing(bert.parent) == ["bert.onnx"]

    def test_a_shared_file_becomes_one_of_its_own_when_it_is_written_without(self, bert):
        small = self.share(bert)
        write_model(read_model(small), small)
        assert listing(bert.parent) == [
            "bert.onnx",
            "bert.onnx.data",
            "small.onnx",
            "small.onnx.data",
        ]
        save(bert, seed=1)
        assert np.abs(values(small) - values(bert)).max() > 0.1


class TestLinks:
    @pytest.fixture
    def hub(self, tmp_path: Path) -> Path:
        """As the Hugging Face hub lays out its cache."""
        made = save(tmp_path / "made" / "model.onnx")
        blobs, snapshot = (
            tmp_path / "hub" / "blobs",
            tmp_path / "hub" / "snapshots" / "abc" / "onnx",
        )
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        for name, blob in (("model.onnx", "111"), ("model.onnx.data", "222")):
            shutil.copyfile(made.with_name(name), blobs / blob)
            (snapshot / name).symlink_to(Path("../../../blobs") / blob)
        return snapshot / "model.onnx"

    @pytest.fixture
    def linked(self, bert: Path, tmp_path: Path) -> Path:
        """A link to a model, without one to its data."""
        (tmp_path / "links").mkdir()
        (tmp_path / "links" / "here.onnx").symlink_to(bert)
        return tmp_path / "links" / "here.onnx"

    @pytest.fixture
    def hard(self, bert: Path) -> Path:
        os.link(bert.with_name("bert.onnx.data"), bert.with_name("another.data"))
        return bert

    @pytest.fixture(params=["hub", "linked", "hard"])
    def file(self, request: pytest.FixtureRequest) -> Path:
        found: Path = request.getfixturevalue(request.param)
        return found

    def test_weights_are_read(self, file, tmp_path):
        np.testing.assert_array_equal(values(file), values(save(tmp_path / "plain" / "bert.onnx")))

    def test_a_copy_is_whole(self, file, tmp_path):
        (tmp_path / "out").mkdir()
        write_model(read_model(file), tmp_path / "out" / "copy.onnx")
        assert onnx.load(tmp_path / "out" / "copy.onnx").graph.initializer[0].raw_data
        np.testing.assert_array_equal(values(tmp_path / "out" / "copy.onnx"), values(file))

    def test_writing_in_place_follows_the_links(self, file, tmp_path):
        before, links = values(file), {path for path in _files(tmp_path) if path.is_symlink()}
        model = read_model(file)
        model.graph.name = "another"
        write_model(model, file)
        assert {path for path in _files(tmp_path) if path.is_symlink()} == links
        for name in (file, file.resolve()):
            assert read_model(name).graph.name == "another"
            np.testing.assert_array_equal(values(name), before)

    @pytest.mark.parametrize(
        "command", ["profile {0} --runs 1", "compare {0} {0}", "optimize {0} --verify -o {1}"]
    )
    def test_commands_run_it(self, file, tmp_path, command):
        assert main(command.format(file, tmp_path / "out.onnx").split()) == 0

    @pytest.mark.parametrize("tool", ["onnxruntime", "onnxscript", "quantize_dynamic"])
    def test_tools_run_on_it(self, file, tmp_path, tool):
        assert getattr(htp_export.tools, tool)(file, tmp_path / "out.onnx").nodes > 0

    @pytest.mark.parametrize("location", ["../blobs/222", "../secret", "/etc/passwd", "away"])
    def test_nothing_else_is_opened(self, file, tmp_path, location):
        (tmp_path / "secret").write_bytes(bytes(1 << 16))
        (file.parent / "away").symlink_to("/etc/passwd")
        proto = onnx.load(file, load_external_data=False)
        for initializer in proto.graph.initializer:
            for entry in initializer.external_data:
                entry.value = location if entry.key == "location" else entry.value
        file.write_bytes(proto.SerializeToString())  # through the link
        with pytest.raises(FileError, match="lies outside its folder"):
            read_model(file)


class TestBroken:
    @pytest.mark.parametrize("use", ["numpy", "tobytes", "write"])
    @pytest.mark.parametrize("fault", ["missing", "short", "folder"])
    def test_a_data_file_that_cannot_be_read_is_named(self, bert, use, fault):
        data = bert.with_name("bert.onnx.data")
        content = data.read_bytes()
        data.unlink()
        if fault == "short":
            data.write_bytes(content[:100])
        elif fault == "folder":
            data.mkdir()
        model = read_model(bert)
        said = {
            "missing": "is missing: it contains weights of .*bert.onnx",
            "short": "is too short: it has 100 bytes, and the weights of .*bert.onnx need 2,048",
            "folder": "contains weights of .*bert.onnx, and cannot be read: Is a directory",
        }
        copy = bert.with_name("copy.onnx")
        read = (
            getattr(weight_of(model), use) if use != "write" else lambda: write_model(model, copy)
        )
        with pytest.raises(FileError, match=rf"^\S*bert\.onnx\.data: {said[fault]}"):
            read()
        assert not copy.exists()

    def test_tensors_are_pickled_with_their_place(self, bert):
        tensor = weight_of(read_model(bert))
        array = tensor.numpy()
        again = pickle.loads(pickle.dumps(tensor))
        assert (again.location, again.name, again.shape) == ("bert.onnx.data", WEIGHT, tensor.shape)
        np.testing.assert_array_equal(again.numpy(), array)

    def test_a_data_file_is_opened_again_after_it_was_released(self, bert):
        tensor = weight_of(read_model(bert))
        assert isinstance(tensor, data_files.DataTensor)
        before = tensor.numpy().copy()
        tensor.release()
        np.testing.assert_array_equal(np.asarray(tensor), before)


def many_data_files(count: int) -> onnx.ModelProto:
    """A model with a data file for each tensor, when onnx saves it."""
    names = [f"h{place}" for place in range(count + 1)]
    steps = itertools.pairwise(names)
    nodes = [
        onnx.helper.make_node("Add", [before, f"w{after}"], [after]) for before, after in steps
    ]
    weights = [
        onnx.numpy_helper.from_array(np.full(100, k, np.float32), f"wh{k + 1}")
        for k in range(count)
    ]
    ends = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [100])
        for name in (names[0], names[-1])
    ]
    graph = onnx.helper.make_graph(nodes, "net", ends[:1], ends[1:], weights)
    return onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10
    )


def test_a_model_is_read_once_for_all_data_files_that_are_replaced_and_once_for_removals(
    tmp_path, monkeypatch
):
    file, read = tmp_path / "net.onnx", []
    message_of = own_data.message_of
    monkeypatch.setattr(own_data, "message_of", lambda path: read.append(path) or message_of(path))
    for _ in range(2):
        with written_whole(file) as new:
            onnx.save(
                many_data_files(20),
                new,
                save_as_external_data=True,
                all_tensors_to_one_file=False,
                size_threshold=0,
            )
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["net.onnx", *(f"wh{k + 1}" for k in range(20))]
    )
    assert read == [file, file]


def test_a_model_that_a_tool_writes_with_data_files_and_that_is_not_valid_replaces_nothing(
    tmp_path,
):
    file = tmp_path / "net.onnx"
    file.write_bytes(b"as it was")
    model = many_data_files(1)
    model.graph.input[0].type.tensor_type.elem_type = 99
    with pytest.raises(InputError, match="not a valid ONNX model"), written_whole(file) as new:
        onnx.save(model, new, save_as_external_data=True, size_threshold=0)
    assert [path.name for path in tmp_path.iterdir()] == ["net.onnx"]
    assert file.read_bytes() == b"as it was"


def with_constant_in_function(file: Path) -> np.ndarray[Any, Any]:
    """Write a model with a function whose body has a constant in a data file; return the constant."""
    values = np.arange(100, dtype=np.float32)
    constant = onnx.numpy_helper.from_array(values)
    file.with_name("weights.bin").write_bytes(constant.raw_data)
    onnx.external_data_helper.set_external_data(constant, "weights.bin", 0, values.nbytes)
    constant.ClearField("raw_data")
    nodes = [
        onnx.helper.make_node("Constant", [], ["c"], value=constant),
        onnx.helper.make_node("Add", ["a", "c"], ["b"]),
    ]
    imports = [onnx.helper.make_opsetid("", 20), onnx.helper.make_opsetid("f", 1)]
    function = onnx.helper.make_function("f", "shift", ["a"], ["b"], nodes, imports[:1])
    call = onnx.helper.make_node("shift", ["x"], ["y"], domain="f")
    ends = [onnx.helper.make_tensor_value_info(name, 1, [100]) for name in "xy"]
    graph = onnx.helper.make_graph([call], "net", ends[:1], ends[1:])
    model = onnx.helper.make_model(
        graph, functions=[function], opset_imports=imports, ir_version=10
    )
    file.write_bytes(model.SerializeToString())
    return values


def test_a_constant_of_a_function_stays_with_the_model_that_is_written_again(tmp_path):
    """The data file gets its usual name after the first version of the model was renamed."""
    (tmp_path / "source").mkdir()
    source, file = tmp_path / "source" / "net.onnx", tmp_path / "net.onnx"
    values = with_constant_in_function(source)
    for _ in range(2):
        write_model(read_model(source), file)
    loaded = onnx.load(file, load_external_data=False)
    constant = loaded.functions[0].node[0].attribute[0].t
    assert constant.data_location == onnx.TensorProto.EXTERNAL
    written = read_model(file)
    (function,) = written.functions.values()
    tensor = function.graph.node(0).attributes["value"].as_tensor()
    assert tensor.numpy().tolist() == values.tolist()
    assert sorted(path.name for path in tmp_path.glob("net*")) == ["net.onnx", "net.onnx.data"]


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file())
