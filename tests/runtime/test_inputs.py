"""Inputs of a model: open sizes are bound once, contradictions and what stays open are said, random arrays fit."""

import tracemalloc
import zipfile

import numpy as np
import onnx_ir as ir
import pytest

from htp_export.errors import FileError, InputError, OpenDimensionError
from htp_export.files.npz_file import NpzArrays
from htp_export.runtime.inputs import Inputs
from htp_export.runtime.settings import RunSettings


def inputs(**shapes: list[int | str | None] | None) -> Inputs:
    values = [ir.val(name, ir.DataType.FLOAT, shape) for name, shape in shapes.items()]
    return Inputs.of(ir.Model(ir.Graph(values, [], nodes=[]), ir_version=10))


def test_a_size_of_one_name_is_the_same_wherever_it_stands():
    bound = inputs(x=["batch", 4], mask=["batch", "length"]).bind(
        shapes={"x": (3, 4)}, dims={"length": 7}
    )
    assert bound.sizes == {"batch": 3, "length": 7}
    assert bound.shapes == {"x": (3, 4), "mask": (3, 7)}
    assert (bound.open, bound.conflicts) == ((), ())
    bound.check()


def test_what_stays_open_is_named():
    bound = inputs(x=["batch", None], y=None, z=["batch", 2]).bind()
    assert bound.shapes == {"x": (None, None), "y": None, "z": (None, 2)}
    assert bound.open == ("batch", "x: 1", "y: all")
    with pytest.raises(
        OpenDimensionError, match=r"sizes are open: 'batch', 'x: 1', 'y: all'; give shapes"
    ) as raised:
        bound.check()
    assert raised.value.names == ("batch", "x: 1", "y: all")
    with pytest.raises(OpenDimensionError, match="no open dimension 'bach'") as raised:
        inputs(x=["batch"]).bind(dims={"bach": 1})
    assert raised.value.names == ("bach",)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"shapes": {"x": [1] * 65}}, "a shape of 65 dimensions; numpy supports at most 64"),
        (
            {"shapes": {"x": [2**63, 1]}},
            "a shape must be a list of whole numbers, not one of more than 64 bits",
        ),
        (
            {"shapes": {"x": [10**5000, 1]}},
            "a shape must be a list of whole numbers, not one of more than 64 bits",
        ),
        (
            {"dims": {"batch": 10**5000}},
            "size 'batch' must be a whole number, not one of more than 64 bits",
        ),
        (
            {"dims": {"batch": 2**40}},
            r"input 'x': \[1099511627776, 4\] has more than 1,073,741,824 elements",
        ),
        ({"dims": {"batch": 2**63 - 1}}, "has more than 1,073,741,824 elements"),
    ],
)
def test_sizes_that_no_array_has_are_refused(given, said):
    with pytest.raises(InputError, match=said):
        inputs(x=["batch", 4]).random(RunSettings(**given))


@pytest.mark.parametrize(
    "shape", [[1] * 65, [2**40, 2], [2**62, 2**62], [0, 2**62, 2**62], [0, *[2**30] * 3]]
)
def test_inputs_of_a_file_that_no_array_has_are_refused(shape):
    with pytest.raises(
        InputError,
        match=r"input 'x': (has 65 dimensions; numpy|.* has more than 1,073,741,824)",
    ):
        inputs(x=shape).random()


def test_contradictions_are_said_and_do_not_hinder_who_does_not_ask():
    bound = inputs(x=["batch", 4], y=["batch"]).bind(shapes={"x": (2, 5), "y": (3,)})
    assert bound.conflicts == (
        "input 'x' is [2, 5], but a size of it is 4",
        "input 'y' is [3], but size 'batch' of it is 2",
    )
    with pytest.raises(InputError, match="a size of it is 4"):
        bound.check()


def test_values_and_shapes_that_contradict_dims_are_refused_with_both_sizes():
    wanted, array = inputs(x=["batch", 4]), np.ones((2, 4), np.float32)
    said = r"input 'x' is \[2, 4\], but dims has batch = 3"
    with pytest.raises(InputError, match=said):
        wanted.feed({"x": array}, {"batch": 3})
    with pytest.raises(InputError, match=said):
        wanted.random(RunSettings(dims={"batch": 3}, shapes={"x": (2, 4)}))
    assert wanted.feed({"x": array}, {"batch": 2}).arrays["x"] is array


def test_a_size_that_the_file_computes_of_others_follows_them():
    wanted = inputs(
        mask=["batch", "past + length"],
        ids=["batch", "length"],
        keys=["batch", "past"],
        x=["batch-size"],
    )
    given = wanted.bind(dims={"length": 4, "past": 3})
    assert (given.shapes["mask"], given.open) == ((None, 7), ("batch", "batch-size"))
    feed = wanted.random(open_sizes=(2, 5, 3, 8))
    assert {name: array.shape for name, array in feed.arrays.items()} == {
        "mask": (2, 8), "ids": (2, 5), "keys": (2, 3), "x": (8,)
    }  # fmt: skip
    assert not any("+" in note for note in feed.notes)
    said = r"input 'mask' is \[1, 6\], but size 'past \+ length' of it is 7"
    with pytest.raises(InputError, match=said):
        wanted.bind(shapes={"mask": (1, 6), "ids": (1, 4), "keys": (1, 3), "x": (1,)}).check()
    with pytest.raises(InputError, match="is 6, but follows from the others as 7"):
        wanted.bind(
            dims={"past + length": 6, "length": 4, "past": 3, "batch": 1, "batch-size": 1}
        ).check()


@pytest.mark.parametrize("size", [-1, True, 2.0, "2"])
def test_a_size_is_a_whole_number(size):
    with pytest.raises(InputError, match="whole number"):
        inputs(x=["batch"]).bind(dims={"batch": size})  # type: ignore[dict-item]
    with pytest.raises(InputError, match="list of whole numbers"):
        inputs(x=["batch"]).bind(shapes={"x": [size]})  # type: ignore[list-item]


def test_open_sizes_of_random_inputs_differ_by_name():
    feed = inputs(x=["batch", "length"], y=["length", "batch"]).random(open_sizes=(2, 8))
    assert {name: array.shape for name, array in feed.arrays.items()} == {"x": (2, 8), "y": (8, 2)}
    assert feed.notes == ("size 'batch' is 2", "size 'length' is 8")


def test_booleans_are_true_as_often_as_asked_for():
    given = Inputs.of(
        ir.Model(ir.Graph([ir.val("m", ir.DataType.BOOL, [999])], [], nodes=[]), ir_version=10)
    )
    assert given.random().arrays["m"].all()
    assert 400 < np.count_nonzero(given.random(true=0.5).arrays["m"]) < 600


def test_arrays_of_a_file_are_unpacked_after_their_shape_was_compared(tmp_path):
    size = 4_000_000
    np.savez_compressed(
        tmp_path / "x.npz", x=np.zeros(size, np.float32), y=np.ones((2, 4), np.float32)
    )
    assert (tmp_path / "x.npz").stat().st_size < 100_000
    tracemalloc.start()
    try:
        with pytest.raises(
            InputError, match=rf"'x': is float \[{size}\], but the model requires float \[2, 4\]"
        ):
            inputs(y=["batch", 4], x=[2, 4]).feed(NpzArrays(tmp_path / "x.npz"))
        with pytest.raises(InputError, match="no input 'x' in this model"):
            inputs(y=["batch", 4]).feed(NpzArrays(tmp_path / "x.npz"))
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
    arrays = NpzArrays(tmp_path / "x.npz")
    np.testing.assert_array_equal(arrays["y"], np.ones((2, 4), np.float32))
    assert (list(arrays), arrays["y"] is arrays["y"], arrays.headers["x"].shape) == (
        ["x", "y"],
        True,
        (size,),
    )
    np.testing.assert_array_equal(
        inputs(y=["batch", 4], x=[size]).feed(arrays).arrays["x"], np.zeros(size)
    )


def npz(
    file, *headers: str, values: bytes = bytes(8), compression: int = zipfile.ZIP_STORED
) -> None:
    """A file with an array for each header, as another program may write it."""
    with zipfile.ZipFile(file, "w", compression) as archive:
        for number, header in enumerate(headers):
            text = header.encode() + b"\n"
            archive.writestr(
                f"{number}.npy", b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text + values
            )


def header(shape: str = "(2,)", descr: str = "'<f4'") -> str:
    return f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}"


LIES = {
    "more values than bytes": header("(3,)"),
    "fewer values than bytes": header("(1,)"),
    "terabytes": header("(1099511627776,)"),
    "negative": header("(-2,)"),
    "two negative sizes": header("(-1, -2)"),
    "truth": header("(True, 2)"),
    "a fraction": header("(2.0,)"),
    "text": header("('2',)"),
    "no tuple": header("2"),
    "huge": header(f"({2**63}, 0)"),
    "no values of a shape that overflows": header(f"(0, {2**62}, {2**62})"),
    "70 dimensions": header(str((1,) * 69 + (2,))),
    "texts of no characters": header(f"({2**62},)", "'<U0'"),
    "objects": header("(1,)", "'|O'"),
    "fields": header("(1,)", "[('a', '<f4'), ('b', '<f4')]"),
    "an array as an element": header("(1,)", "('<f4', (2,))"),
    "an element of terabytes": header("(1,)", "'|V1099511627776'"),
    "no element type": header("(2,)", "()"),
    "depth": "(" * 9000,
    "signs": "-" * 9000 + "1",
    "a text without end": '{"""',
    "code": "__import__('os').abort()",
    "length": header("(2,)") + " " * 60000,
}


@pytest.mark.parametrize("name", LIES)
def test_a_header_of_an_array_is_believed_in_nothing(tmp_path, name):
    npz(tmp_path / "x.npz", header(), LIES[name])
    tracemalloc.start()
    try:
        with pytest.raises(FileError, match=r"x\.npz: is not an \.npz file of plain arrays"):
            NpzArrays(tmp_path / "x.npz")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
    npz(tmp_path / "x.npz", header())
    assert NpzArrays(tmp_path / "x.npz")["0"].tolist() == [0.0, 0.0]


def test_the_size_of_a_member_of_an_archive_is_not_believed_either(tmp_path):
    file, values = tmp_path / "x.npz", 4_000_000_000
    npz(file, header(f"({values // 4},)"))
    content = file.read_bytes()
    # the size in the directory, which is the one that Python reads
    entry = content.index(b"PK\1\2") + 24
    size = int.from_bytes(content[entry : entry + 4], "little") - 8 + values
    file.write_bytes(content[:entry] + size.to_bytes(4, "little") + content[entry + 4 :])
    with pytest.raises(FileError, match=r"is not an \.npz file of plain arrays"):
        NpzArrays(file)


def test_names_of_arrays_are_those_of_numpy_and_each_is_there_once(tmp_path):
    np.savez(tmp_path / "x.npz", **{"a": np.zeros(1), "a.npy": np.ones(2)})
    arrays = NpzArrays(tmp_path / "x.npz")
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "a": [0.0],
        "a.npy": [1.0, 1.0],
    }
    with zipfile.ZipFile(tmp_path / "y.npz", "w") as archive:
        with zipfile.ZipFile(tmp_path / "x.npz") as original:
            values = original.read("a.npy")
        archive.writestr("a.npy", values)
        archive.writestr("a", values)
    with pytest.raises(FileError, match=r"is not an \.npz file of plain arrays"):
        NpzArrays(tmp_path / "y.npz")


def test_a_file_that_changes_after_its_headers_were_compared_is_refused(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.zeros(2))
    arrays = NpzArrays(tmp_path / "x.npz")
    np.savez(tmp_path / "x.npz", x=np.zeros(3))
    with pytest.raises(FileError, match=r"x\.npz: was changed while it was read"):
        arrays["x"]


def test_a_file_whose_values_are_cut_off_is_refused_when_they_are_used(tmp_path):
    np.savez(tmp_path / "x.npz", x=np.arange(1000))
    content = bytearray((tmp_path / "x.npz").read_bytes())
    content[500] ^= 255
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(FileError, match=r"x\.npz: is not an \.npz file of plain arrays"):
        NpzArrays(tmp_path / "x.npz")["x"]


def test_random_integers_are_within_the_tables_in_which_they_are_looked_up():
    ids, table = ir.val("ids", ir.DataType.INT64, [8]), ir.val("table", ir.DataType.FLOAT, [1, 4])
    row = ir.node("Gather", [table, ids])
    given = Inputs.of(ir.Model(ir.Graph([ids, table], row.outputs, nodes=[row]), ir_version=10))
    assert not given.random().arrays["ids"].any()
