"""Bytes of data files are copied as they are, and holes of sparse files stay holes."""

import io
import os
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from htp_export.files import filesystem
from htp_export.files.filesystem import copy_range
from htp_export.files.lazy_tensor import write_values

MB = 1 << 20


@pytest.fixture
def sparse(tmp_path) -> Path:
    """A file with data, a hole, data, and a hole at its end."""
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.write(os.urandom(MB + 3))
        file.seek(64 * MB + 5)
        file.write(os.urandom(MB))
        file.truncate(200 * MB)
    return path


@pytest.mark.long
@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("begun", [b"", b"before"])
def test_every_range_is_copied(sparse, tmp_path, monkeypatch, kernel, begun):
    if not kernel:
        monkeypatch.delattr(os, "copy_file_range", raising=False)
        monkeypatch.setattr(filesystem, "_next_part", lambda source, offset, count, target: count)
    whole = sparse.read_bytes()
    ranges = [(0, len(whole)), (5, 17), (MB - 1, 64 * MB), (150 * MB, 7), (64 * MB, 2 * MB + 9)]
    with sparse.open("rb", buffering=0) as source, (tmp_path / "copy").open("w+b") as target:
        target.write(begun)
        expected = begun
        for offset, count in ranges:
            assert copy_range(source, offset, count, target) == count
            target.write(b"between")
            expected += whole[offset : offset + count] + b"between"
        assert target.tell() == len(expected)
        # over bytes that are there, a hole is written as zeros
        target.seek(3)
        assert copy_range(source, 150 * MB, 10, target) == 10
        expected = expected[:3] + bytes(10) + expected[13:]
        assert copy_range(source, len(whole) - 4, 10, target) == 4
    expected = expected[:13] + bytes(4) + expected[17:]
    assert (tmp_path / "copy").read_bytes() == expected
    stream = io.BytesIO()
    with sparse.open("rb", buffering=0) as source:
        copy_range(source, MB, 10, stream)
    assert stream.getvalue() == whole[MB : MB + 10]


@pytest.mark.skipif(not hasattr(os, "SEEK_DATA"), reason="no holes")
def test_holes_stay_holes(sparse, tmp_path):
    if sparse.stat().st_blocks * 512 > 100 * MB:
        pytest.skip("a file system without sparse files")
    with sparse.open("rb", buffering=0) as source, (tmp_path / "copy").open("xb") as target:
        copy_range(source, 0, 200 * MB, target)
    copy = (tmp_path / "copy").stat()
    assert copy.st_size == 200 * MB
    assert copy.st_blocks * 512 < 4 * MB


@pytest.mark.parametrize("shape", [(3, 5), (256, 256), (700, 513), (1, 4), (0, 4), (4, 5, 6), ()])
@pytest.mark.parametrize("kind", [np.float32, np.int8, np.float16])
def test_a_transposed_array_is_written_in_c_order(shape, kind, tmp_path):
    array = np.random.default_rng(0).integers(-100, 100, shape).astype(kind).T
    for each in (
        array,
        array[::2] if array.ndim else array,
        array[..., ::-1] if array.ndim else array,
    ):
        whole = ir.Tensor(each)
        lazy = ir.LazyTensor(lambda whole=whole: whole, whole.dtype, whole.shape)
        stream = io.BytesIO()
        write_values(lazy, stream)
        assert stream.getvalue() == each.tobytes()
        with (tmp_path / "file").open("wb") as file:
            write_values(lazy, file)
            file.write(b"end")
        assert (tmp_path / "file").read_bytes() == each.tobytes() + b"end"
