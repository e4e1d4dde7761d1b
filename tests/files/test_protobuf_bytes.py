"""SerializedModel: reading and changing a serialized model without touching its weights."""

import onnx
import pytest

from htp_export.files.protobuf_bytes import SerializedModel, Weight
from tests.files.test_lazy_tensor import SIDE, everywhere


def small_model(large: bool = False) -> onnx.ModelProto:
    """A model with everything that may stand in a file: functions, metadata, bodies, weights."""
    return everywhere() if large else everywhere(4)


def written(model: SerializedModel) -> bytes:
    return b"".join(model.chunks())


@pytest.mark.parametrize("large", [False, True])
def test_an_unchanged_model_gives_the_same_bytes_each_time(large):
    data = small_model(large).SerializeToString()
    model = SerializedModel(data)
    assert written(model) == written(model) == data


@pytest.mark.parametrize("large", [False, True])
def test_everything_that_is_changed_is_read_back_and_nothing_else_has_changed(large):
    expected = small_model(large)
    model = SerializedModel(expected.SerializeToString())
    for proto in (expected, model.proto):
        proto.ir_version, proto.graph.name = 10, "a name that is longer than the one it had: ä"
        proto.metadata_props.add(key="htp.version", value="1")
        proto.graph.node[0].metadata_props.add(key="htp.module", value="layer." * 50)
        proto.graph.node[3].attribute[0].g.node[0].metadata_props.add(
            key="htp.module", value="body"
        )
        proto.functions[0].node[0].metadata_props.add(key="htp.module", value="function")
    assert onnx.load_from_string(written(model)) == expected


@pytest.mark.parametrize("size", [1, 127, 128, 16383, 16384, 70000])
def test_lengths_of_any_size_are_written_right(size):
    model = SerializedModel(small_model(large=True).SerializeToString())
    model.proto.graph.node[0].metadata_props.add(key="k", value="v" * size)
    found = onnx.load_from_string(written(model))
    assert found.graph.node[0].metadata_props[0].value == "v" * size


def test_weights_are_not_copied():
    data = small_model(large=True).SerializeToString()
    model = SerializedModel(data)
    model.proto.graph.node[0].metadata_props.add(key="htp.module", value="layer")
    large = [chunk for chunk in model.chunks() if len(chunk) >= SIDE * SIDE * 4]
    assert len(large) >= 2  # of the initializer, and of the constants
    assert all(isinstance(chunk, memoryview) and chunk.obj is data for chunk in large)
    assert sum(len(chunk) for chunk in model.chunks() if not isinstance(chunk, memoryview)) < 10_000


@pytest.mark.parametrize("large", [False, True])
def test_weights_come_into_the_places_that_were_kept_for_them(large):
    expected, places = small_model(large), small_model(large)
    weight = expected.graph.initializer[0].raw_data
    places.graph.initializer[0].raw_data = b"here"
    model = SerializedModel(places.SerializeToString(), weights={"weight": Weight.of(weight)})
    assert written(model) == expected.SerializeToString()
    assert any(chunk is weight for chunk in model.chunks())


def test_a_weight_without_a_byte_has_its_place_as_well():
    model = small_model()
    model.graph.initializer[0].raw_data = b"here"
    found = onnx.load_from_string(
        written(SerializedModel(model.SerializeToString(), weights={"weight": Weight.of(b"")}))
    )
    assert found.graph.initializer[0].HasField("raw_data")
    assert found.graph.initializer[0].raw_data == b""


@pytest.mark.parametrize("size", [8, SIDE])
def test_a_weight_may_bring_its_shape(size):
    data = bytes(size * size * 4)
    model = small_model()
    model.graph.initializer[0].raw_data = b"here"
    read: list[int] = []
    weight = Weight(len(data), lambda: (read.append(1), data)[1], (size, size))
    chunks = SerializedModel(model.SerializeToString(), weights={"weight": weight}).chunks()
    found = onnx.load_from_string(b"".join(chunks)).graph.initializer[0]
    assert (list(found.dims), found.raw_data, read) == ([size, size], data, [1])


def test_a_number_that_does_not_end_is_refused_at_its_eleventh_byte():
    with pytest.raises(ValueError, match="an integer of more than 10 bytes before byte 11"):
        SerializedModel(b"\x08" + b"\xff" * 100)
