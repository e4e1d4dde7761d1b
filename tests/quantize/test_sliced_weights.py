"""Large weights are quantized a few rows or columns at a time, with the result of the whole weight, byte for byte."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

import htp_export
from htp_export.capabilities.quantize import sliced_weights
from htp_export.capabilities.quantize.method import Precision
from htp_export.capabilities.quantize.methods import weights as method
from htp_export.format import tags
from htp_export.model import strips
from htp_export.weights.rebuilding import _quantized, narrowed
from htp_export.weights.rounding import rounding

_WHOLE = 1 << 30
_ROOT = Path(__file__).parents[2]


def _net(file: Path) -> None:
    """A tagged file: products of odd sizes, a weight of two products, a transposed one with a factor, and a table."""
    make = onnx.helper
    random = np.random.default_rng(0)
    shapes = {"table": (37, 65), "wide": (65, 131), "shared": (131, 131), "turned": (33, 131)}
    stored = []
    for name, shape in shapes.items():
        values = random.standard_normal(shape).astype(np.float32)
        values[: shape[0] // 3, 0] = 0  # blocks of zeros, and of one sign
        values[:, 1] = np.abs(values[:, 1])
        stored.append(onnx.numpy_helper.from_array(values, name))
    stored.append(onnx.numpy_helper.from_array(np.float32(np.arange(33)), "bias"))
    nodes = [
        make.make_node("Gather", ["table", "ids"], ["h0"], "look_up"),
        make.make_node("MatMul", ["h0", "wide"], ["h1"], "first"),
        make.make_node("MatMul", ["h1", "shared"], ["h2"], "second"),
        make.make_node("MatMul", ["h2", "shared"], ["h3"], "again"),
        make.make_node("Gemm", ["h3", "turned", "bias"], ["y"], "last", transB=1, alpha=0.5),
    ]
    for node in nodes:
        make.set_metadata_props(node, tags.node_tags([""], "scope", {""}))
    first = make.make_tensor_value_info("ids", onnx.TensorProto.INT64, [3])
    last = make.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [3, 33])
    graph = make.make_graph(nodes, "Net", [first], [last], stored)
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 21)], ir_version=10)
    root = {"class": "Net", "calls": 1, "fate": "computed"}
    make.set_model_props(model, {tags.FORMAT: tags.VERSION, tags.MODULES: json.dumps({"": root})})
    onnx.save(model, file)


def _precisions() -> Iterator[dict[str, object]]:
    for weight in ("int4", "int8"):
        for symmetric in (False, True):
            for block_size in (16, 32, 64):
                yield {"weight": weight, "symmetric": symmetric, "block_size": block_size}
    for algorithm in ("rtn", "k-quant"):  # zero points of 4 bits need an even number of blocks
        for weight, block_size in (("int4", 128), ("int8", 16)):
            yield {"weight": weight, "algorithm": algorithm, "block_size": block_size}
    yield {"weight": "int4", "algorithm": "rtn", "symmetric": True}
    yield {"weight": "int4", "algorithm": "hqq"}
    yield {"weight": "int4", "format": "qdq"}
    yield {"weight": "int8", "format": "qdq", "symmetric": True}
    yield {"weight": "int4", "activation": "float16"}


def _named(fields: dict[str, object]) -> str:
    return "-".join(map(str, fields.values()))


@pytest.mark.parametrize("fields", list(_precisions()), ids=_named)
def test_slices_of_a_weight_are_quantized_into_the_file_of_the_whole_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, object]
) -> None:
    _net(tmp_path / "net.onnx")
    plan = {"**": Precision("made", "weights", **fields)}  # type: ignore[arg-type]
    runs: dict[str, int] = {}
    rounded = method.Blocks._rounded

    def counted(self: method.Blocks, *arguments: object) -> onnx.ModelProto:
        runs[name] = runs.get(name, 0) + 1
        return rounded(self, *arguments)

    monkeypatch.setattr(method.Blocks, "_rounded", counted)
    for name, limit in (("whole", _WHOLE), ("slices", 2_000)):
        monkeypatch.setattr(sliced_weights, "SLICE_BYTES", limit)
        monkeypatch.setattr(strips, "STRIP_BYTES", limit)
        htp_export.quantize(tmp_path / "net.onnx", plan, tmp_path / f"{name}.onnx")
    assert (tmp_path / "slices.onnx").read_bytes() == (tmp_path / "whole.onnx").read_bytes()
    is_divided = fields.get("algorithm") != "hqq"
    # shared: 131 columns of 524 bytes in slices of 2
    assert runs["slices"] > runs["whole"] + 60 if is_divided else runs["slices"] == runs["whole"]


_SCHEMES = [
    ["linear", "int8", -1, 1, 0],
    ["linear", "uint8", -1, 0, 1],
    ["linear", "int8", 0, 1, 0],
    ["linear", "int8", 1, 1, 1],
    ["channels", 0],
    ["channels", 1],
    ["rows", 8, 16, 0],
    ["rows", 8, 16, 1],
    ["rows", 4, 16, 0],
    ["rows", 4, 16, 1],
]


@pytest.mark.parametrize("is_view", [False, True])
@pytest.mark.parametrize("scheme", _SCHEMES, ids=str)
def test_a_weight_is_rounded_a_few_rows_at_a_time_to_equal_integers(
    monkeypatch: pytest.MonkeyPatch, scheme: list[object], is_view: bool
) -> None:
    weight = np.random.default_rng(1).standard_normal((37, 51), np.float32)
    if is_view:
        weight = weight.T
    whole = rounding(weight, scheme)
    monkeypatch.setattr(strips, "STRIP_BYTES", 500)
    by_strips = rounding(weight, scheme)
    for part in ("levels", "scales", "zero_points"):
        one, other = whole.part(part), by_strips.part(part)
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("bits", [4, 8])
def test_blocks_of_columns_are_rounded_a_few_columns_at_a_time_to_equal_integers(
    monkeypatch: pytest.MonkeyPatch, bits: int
) -> None:
    weight = np.random.default_rng(2).standard_normal((37, 51), np.float32)
    whole = _quantized(weight, [bits, 16, 0])
    monkeypatch.setattr(strips, "STRIP_BYTES", 500)
    by_strips = _quantized(weight, [bits, 16, 0])
    for part in ("levels", "scales", "zero_points"):
        assert whole.part(part).tobytes() == by_strips.part(part).tobytes()


def test_floats_are_narrowed_a_few_rows_at_a_time_to_equal_floats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = np.random.default_rng(3).standard_normal((37, 51), np.float32)
    weight[0, :4] = [np.nan, np.inf, -3e38, 1e-30]
    whole = narrowed(weight, ir.DataType.FLOAT16)
    monkeypatch.setattr(strips, "STRIP_BYTES", 500)
    assert narrowed(weight, ir.DataType.FLOAT16).tobytes() == whole.tobytes()
    assert narrowed(weight.T, ir.DataType.FLOAT16).tobytes() == whole.T.tobytes()


_PEAK = """
import json, shutil, sys
from pathlib import Path
sys.path.insert(0, "tools")
import large_model
from peak_memory import PeakOfOwn, status
import htp_export
folder, what = Path(sys.argv[1]), sys.argv[2]

def run(file):
    made = file.with_name("made.onnx")
    if what == "carry":
        htp_export.carry(file, file.with_name("other.onnx"), made)
    else:
        htp_export.quantize(file, what, made, external_data="made.data")

for name, gigabytes in (("first", 0.001), ("net", 0.8)):  # the first run imports what both need
    file = folder / name / "net.onnx"
    file.parent.mkdir()
    large_model.write_model(file, gigabytes)
    shutil.copy(file, file.with_name("other.onnx"))
    before = status("RssAnon")
    with PeakOfOwn() as peak:
        run(file)
print(json.dumps([peak.own - before, (file.parent / "net.onnx.data").stat().st_size / 12]))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="memory is counted otherwise elsewhere"
)
@pytest.mark.parametrize("what", ["int4", "int8-weights", "fp16", "carry"])
def test_a_large_file_takes_at_most_one_and_a_half_of_its_largest_tensor(tmp_path, what):
    command = [sys.executable, "-c", _PEAK, str(tmp_path), what]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True)
    peak, largest = json.loads(done.stdout.splitlines()[-1])
    # and the slice that the quantizer copies several times, whatever the size of the weight
    assert peak < 1.5 * largest + 8 * sliced_weights.SLICE_BYTES
