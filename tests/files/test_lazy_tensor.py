"""Weights that stay in the ONNX file: the same files as protobuf writes, without the memory, and nothing lost."""

import copy
import gc
import os
import pickle
import random
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

from htp_export.errors import FileError
from htp_export.files import lazy_tensor, protobuf_bytes
from htp_export.files.lazy_tensor import FileTensor, slots
from htp_export.files.model_files import read_model, write_model

SIDE = 200  # of the weights: 160 kB each


def matrix(seed: int = 0, side: int = SIDE) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((side, side)).astype(np.float32)


def info(name: str, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, None)


def field(number: int, payload: bytes) -> bytes:
    """A field of a message that is a message itself."""
    return protobuf_bytes._head(number, len(payload)) + payload


def everywhere(side: int = SIDE) -> onnx.ModelProto:
    """A model with weights in each place that can hold one: the graph, Constants, bodies, a function."""

    def constant(name: str, seed: int) -> onnx.NodeProto:
        return helper.make_node(
            "Constant",
            [],
            [name],
            value=numpy_helper.from_array(matrix(seed, side), f"{name}_value"),
        )

    inner = helper.make_graph(
        [constant("c3", 3), helper.make_node("Add", ["c3", "held"], ["deep"])],
        "inner", [], [info("deep")], [numpy_helper.from_array(matrix(4, side), "held")],
    )  # fmt: skip
    other = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["plain"])], "other", [], [info("plain")]
    )
    body = helper.make_graph(
        [helper.make_node("If", ["flag"], ["chosen"], then_branch=inner, else_branch=other)], "body", [],
        [info("chosen")],
    )  # fmt: skip
    nodes = [
        constant("c1", 1),
        helper.make_node("MatMul", ["x", "weight"], ["a"]),
        helper.make_node("Add", ["a", "c1"], ["b"]),
        helper.make_node("If", ["flag"], ["c"], then_branch=body, else_branch=other),
        helper.make_node("Ours", ["b"], ["d"], domain="ours"),
        helper.make_node("Add", ["c", "d"], ["y"]),
    ]
    weight = numpy_helper.from_array(matrix(0, side), "weight")
    weight.doc_string = "what it is"
    weight.metadata_props.add(key="kept", value="as it is")
    small = numpy_helper.from_array(np.float32([1, 2]), "small")
    graph = helper.make_graph(
        nodes, "g", [info("x"), info("flag", TensorProto.BOOL)], [info("y")], [weight, small]
    )
    function = helper.make_function(
        "ours", "Ours", ["p"], ["q"], [constant("c5", 5), helper.make_node("Add", ["p", "c5"], ["q"])],
        [helper.make_opsetid("", 18)],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ours", 1)]
    return helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=10)


def plainly(path: Path) -> ir.Model:
    """What protobuf alone makes of a file; without what onnx_ir would write twice, the metadata of tensors."""
    proto = onnx.load(path)
    model = ir.from_proto(proto)
    for tensor in proto.graph.initializer:
        del tensor.metadata_props[:]
    return model


def proto_of(model: ir.Model) -> onnx.ModelProto:
    """What onnx_ir makes of a model, without the shapes of weights, which their tensors say."""
    proto = ir.to_proto(model)
    graphs = [proto.graph]
    for graph in graphs:
        weights = {tensor.name for tensor in graph.initializer}
        for info in [info for info in graph.value_info if info.name in weights]:
            graph.value_info.remove(info)
        graphs += [a.g for node in graph.node for a in node.attribute if a.HasField("g")]
    return proto


@pytest.fixture
def file(tmp_path: Path) -> Path:
    onnx.save(everywhere(), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def weight_of(model: ir.Model, name: str = "weight") -> ir.TensorProtocol:
    tensor = model.graph.initializers[name].const_value
    assert tensor is not None
    return tensor


def large(model: ir.Model) -> list[ir.TensorProtocol]:
    return [
        slot.tensor for slot in slots(model) if slot.tensor.nbytes >= protobuf_bytes.LARGE_BYTES
    ]


def test_large_weights_of_every_place_stay_in_the_file(file):
    model = read_model(file)
    found = {id(tensor): tensor for tensor in large(model)}.values()
    assert len(found) == 5
    assert {type(tensor) for tensor in found} == {FileTensor}
    assert not isinstance(weight_of(model, "small"), FileTensor)


def test_their_values_are_those_that_protobuf_reads(file):
    for found, expected in zip(large(read_model(file)), large(plainly(file)), strict=True):
        assert (found.name, found.dtype, found.shape) == (
            expected.name,
            expected.dtype,
            expected.shape,
        )
        assert (found.doc_string, found.metadata_props) == (
            expected.doc_string,
            expected.metadata_props,
        )
        assert found.tobytes() == expected.tobytes()
        np.testing.assert_array_equal(found.numpy(), expected.numpy())
        assert not found.numpy().flags.writeable
        assert found.raw == expected.raw


def test_what_is_written_is_what_protobuf_writes_byte_for_byte(file):
    write_model(read_model(file), file.with_name("copy.onnx"))
    assert file.with_name("copy.onnx").read_bytes() == proto_of(plainly(file)).SerializeToString()


def test_weights_in_memory_are_written_as_protobuf_writes_them(file):
    for model in (plainly(file), read_model(file)):
        lazy = ir.LazyTensor(
            lambda: ir.tensor(matrix(9)), ir.DataType.FLOAT, ir.Shape([SIDE, SIDE]), name="weight"
        )
        model.graph.initializers["weight"].const_value = lazy
        model.graph.initializers["small"].const_value = ir.tensor(
            matrix(8).astype(np.float16), name="small"
        )
        expected = proto_of(model).SerializeToString()
        write_model(model, file.with_name("copy.onnx"))
        assert file.with_name("copy.onnx").read_bytes() == expected


@pytest.mark.parametrize(
    "dtype",
    [np.float32, np.float16, np.float64, np.int8, np.int64, np.bool_, np.complex64, ml_dtypes.bfloat16,
     ml_dtypes.float8_e4m3fn, ml_dtypes.int4, ml_dtypes.uint4],
    ids=lambda dtype: dtype.__name__,
)  # fmt: skip
def test_every_type_of_element_is_read_and_written(dtype, tmp_path):
    array = (matrix(side=400) * 3).astype(dtype)
    model = everywhere()
    model.graph.initializer[0].CopyFrom(ir.to_proto(ir.tensor(array, name="weight")))
    onnx.save(model, tmp_path / "model.onnx")
    found = weight_of(read_model(tmp_path / "model.onnx"))
    assert isinstance(found, FileTensor)
    np.testing.assert_array_equal(found.numpy(), array)
    write_model(read_model(tmp_path / "model.onnx"), tmp_path / "copy.onnx")
    expected = proto_of(plainly(tmp_path / "model.onnx")).SerializeToString()
    assert (tmp_path / "copy.onnx").read_bytes() == expected


def test_values_in_fields_of_their_type_are_read_as_before(tmp_path):
    model = everywhere()
    values = matrix()
    model.graph.initializer[0].CopyFrom(
        helper.make_tensor("weight", TensorProto.FLOAT, values.shape, values.ravel().tolist())
    )
    onnx.save(model, tmp_path / "model.onnx")
    tensor = weight_of(read_model(tmp_path / "model.onnx"))
    assert not isinstance(tensor, FileTensor)
    np.testing.assert_array_equal(tensor.numpy(), values)
    write_model(read_model(tmp_path / "model.onnx"), tmp_path / "copy.onnx")
    expected = proto_of(plainly(tmp_path / "model.onnx")).SerializeToString()
    assert (tmp_path / "copy.onnx").read_bytes() == expected


def test_a_model_may_be_written_over_its_own_file_and_still_has_its_weights(file):
    model, other = read_model(file), read_model(file)
    model.graph.initializers["small"].const_value = ir.tensor(np.float32([3, 4]), name="small")
    write_model(model, file)
    for each in (model, other, read_model(file)):
        np.testing.assert_array_equal(weight_of(each).numpy(), matrix())
    assert weight_of(read_model(file), "small").numpy().tolist() == [3, 4]
    file.unlink()
    write_model(other, file)
    np.testing.assert_array_equal(weight_of(plainly(file)).numpy(), matrix())


def test_a_file_that_is_written_over_by_others_is_told(file):
    model = read_model(file)
    again = everywhere()
    again.graph.initializer[0].raw_data = matrix(7).tobytes()
    onnx.save(again, file)
    os.utime(file, ns=(0, 0))
    for use in (
        lambda: weight_of(model).numpy(),
        lambda: write_model(model, file.with_name("copy.onnx")),
    ):
        with pytest.raises(
            FileError, match=r"model\.onnx: was overwritten after it was read.*load it again"
        ):
            use()
    assert [path.name for path in file.parent.iterdir()] == ["model.onnx"]


def test_a_file_that_was_cut_off_meanwhile_is_told(file):
    model = read_model(file)
    state = file.stat()
    os.truncate(file, 1000)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    with pytest.raises(FileError, match="was overwritten"):
        weight_of(model).numpy()


@pytest.mark.usefixtures("collecting_own")
def test_a_file_is_closed_with_the_last_of_its_tensors(file):
    def opened() -> int:
        gc.collect()
        return sum(
            os.path.realpath(number) == str(file) for number in Path("/proc/self/fd").iterdir()
        )

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("no way to count open files")
    tensor = weight_of(read_model(file))
    assert opened() == 1
    del tensor
    assert opened() == 0


def test_those_who_use_a_weight_at_one_time_share_its_memory(file):
    tensor = weight_of(read_model(file))
    one, other = tensor.numpy(), tensor.numpy()
    assert np.shares_memory(one, other)
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda tensor: pickle.loads(pickle.dumps(tensor))]
)
def test_a_copy_holds_its_values(again, file):
    tensor = again(weight_of(read_model(file)))
    file.unlink()
    assert type(tensor) is ir.TensorProtoTensor
    np.testing.assert_array_equal(tensor.numpy(), matrix())


@pytest.mark.parametrize("side", [SIDE - 1, SIDE + 1])
def test_weights_that_do_not_fit_their_shape_are_refused(tmp_path, side):
    model = everywhere()
    model.graph.initializer[0].dims[0] = side
    onnx.save(model, tmp_path / "model.onnx")
    problem = f"tensor 'weight' has {4 * SIDE * SIDE:,} bytes, but its shape and type require {4 * side * SIDE:,}"
    with pytest.raises(FileError, match=f"not a valid ONNX model: {problem}"):
        read_model(tmp_path / "model.onnx")


def test_where_weights_cannot_be_kept_apart_all_are_read(tmp_path):
    data = everywhere().SerializeToString()
    twice = onnx.ModelProto(
        graph=onnx.GraphProto(initializer=[numpy_helper.from_array(matrix(6), "weight")])
    )
    # protobuf merges what follows
    (tmp_path / "model.onnx").write_bytes(data + twice.SerializeToString())
    model = read_model(tmp_path / "model.onnx")
    assert not any(isinstance(tensor, FileTensor) for tensor in large(model))
    np.testing.assert_array_equal(
        weight_of(model).numpy(), weight_of(plainly(tmp_path / "model.onnx")).numpy()
    )


def test_a_field_that_is_given_twice_has_its_last_value(tmp_path):
    tensor = numpy_helper.from_array(matrix(), "weight").SerializeToString()
    more = onnx.TensorProto(raw_data=matrix(1).tobytes()).SerializeToString()
    model = everywhere()
    del model.graph.initializer[:]
    graph = field(7, model.graph.SerializeToString() + field(5, tensor + more))
    model.ClearField("graph")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString() + graph)
    np.testing.assert_array_equal(weight_of(read_model(tmp_path / "model.onnx")).numpy(), matrix(1))


def test_files_that_end_too_soon_are_refused_and_named(file):
    data = file.read_bytes()
    drawn = random.Random(0)
    for end in [len(data) - 1, *(drawn.randrange(1, len(data)) for _ in range(60))]:
        file.write_bytes(data[:end])
        with pytest.raises(FileError, match=r"model\.onnx: not an ONNX model"):
            read_model(file)


def test_damaged_files_are_refused_or_read_as_protobuf_reads_them(file):
    data, drawn = file.read_bytes(), random.Random(1)
    heads = [
        start + offset for start in range(0, len(data), SIDE * SIDE * 4) for offset in range(200)
    ]
    refused = 0
    for place in drawn.sample([place for place in heads if place < len(data)], 150):
        damaged = bytearray(data)
        damaged[place] = drawn.randrange(256)
        file.write_bytes(damaged)
        try:
            model = read_model(file)
        except FileError:
            refused += 1
            continue
        expected = plainly(file)
        assert [tensor.raw for tensor in large(model)] == [tensor.raw for tensor in large(expected)]
    assert 0 < refused < 150


def test_a_length_beyond_the_end_or_without_one_is_refused(file):
    head = protobuf_bytes._encode_varint(7 << 3 | 2)
    for length in (
        protobuf_bytes._encode_varint(1 << 40),
        protobuf_bytes._encode_varint((1 << 64) - 1),
        b"\xff" * (1 << 20),
    ):
        file.write_bytes(b"\x08\x0a" + head + length + bytes(protobuf_bytes.LARGE_BYTES))
        with pytest.raises(FileError, match="not an ONNX model"):
            read_model(file)


def test_messages_within_each_other_without_an_end_are_refused(file):
    data = bytes(protobuf_bytes.LARGE_BYTES)
    for _ in range(400):
        data = field(1, field(5, field(6, data)))  # a node, its attribute, a graph
    file.write_bytes(b"\x08\x0a" + field(7, data))
    with pytest.raises(FileError, match="not an ONNX model"):
        read_model(file)


def test_a_mark_that_a_file_brings_along_means_nothing(tmp_path, monkeypatch):
    model = everywhere()
    guess = bytes(24) + (1).to_bytes(8, "little")
    model.graph.initializer[1].CopyFrom(
        TensorProto(name="small", data_type=TensorProto.UINT8, dims=[32], raw_data=guess)
    )
    onnx.save(model, tmp_path / "model.onnx")
    found = weight_of(read_model(tmp_path / "model.onnx"), "small")
    assert found.tobytes() == guess


def test_a_tensor_that_has_not_the_bytes_that_it_says_is_not_written(file):
    model = read_model(file)
    wrong = ir.LazyTensor(
        lambda: ir.tensor(matrix(side=300)),
        ir.DataType.FLOAT,
        ir.Shape([SIDE, SIDE]),
        name="weight",
    )
    model.graph.initializers["weight"].const_value = wrong
    before = file.read_bytes()
    with pytest.raises(FileError, match="tensor 'weight' has 360000 bytes, not 160000"):
        write_model(model, file)
    assert file.read_bytes() == before
    assert [path.name for path in file.parent.iterdir()] == ["model.onnx"]


def test_more_than_a_message_holds_is_not_written(file, monkeypatch):
    monkeypatch.setattr(lazy_tensor, "_MESSAGE_BYTES", 100_000)
    with pytest.raises(FileError, match="too large for protobuf; write it with external data"):
        write_model(read_model(file), file.with_name("copy.onnx"))
    assert [path.name for path in file.parent.iterdir()] == ["model.onnx"]


def test_weights_move_from_the_file_into_external_data(file):
    write_model(read_model(file), file.with_name("copy.onnx"), "copy.bin")
    copied = weight_of(read_model(file.with_name("copy.onnx")))
    assert isinstance(copied, ir.ExternalTensor)
    np.testing.assert_array_equal(copied.numpy(), matrix())


def test_other_formats_are_read_and_written_whole(file):
    write_model(read_model(file), file.with_suffix(".json"))
    onnx.save(proto_of(plainly(file)), file.with_name("expected.json"))
    assert file.with_suffix(".json").read_bytes() == file.with_name("expected.json").read_bytes()
    np.testing.assert_array_equal(
        weight_of(read_model(file.with_suffix(".json"))).numpy(), matrix()
    )


def test_where_files_cannot_be_read_in_parts_they_are_read_whole(file, monkeypatch):
    monkeypatch.delattr(os, "preadv")
    model = read_model(file)
    assert not any(isinstance(tensor, FileTensor) for tensor in large(model))


ROOT = Path(__file__).parents[2]
_COPY = """
import sys
from htp_export.files.model_files import read_model, write_model
from htp_export.files.lazy_tensor import slots
from tools.peak_memory import PeakOfOwn, status
before = status("RssAnon")
with PeakOfOwn() as peak:
    write_model(read_model(sys.argv[1]), sys.argv[2])
print(peak.own - before)
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="memory is counted otherwise elsewhere"
)
def test_reading_and_writing_holds_less_than_a_tenth_of_the_model(tmp_path: Path) -> None:
    # Pages of the file itself, which is mapped, are not counted: the system takes them back whenever it likes.
    model = everywhere()
    for number in range(30):  # the check takes 8 MB, whatever the size of weights
        model.graph.initializer.append(
            numpy_helper.from_array(matrix(number, 900), f"more_{number}")
        )
    onnx.save(model, tmp_path / "model.onnx")
    paths = [os.fspath(tmp_path / name) for name in ("model.onnx", "copy.onnx")]
    done = subprocess.run(
        [sys.executable, "-c", _COPY, *paths], cwd=ROOT, capture_output=True, text=True, check=True
    )
    size = (tmp_path / "model.onnx").stat().st_size
    assert int(done.stdout) < size / 10
    # its bytes are held by smaller models above
    assert abs((tmp_path / "copy.onnx").stat().st_size - size) < 1000
