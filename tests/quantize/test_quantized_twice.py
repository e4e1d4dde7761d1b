"""Files that are quantized already: a second precision is right, or modules keep the first one, with a reason."""

import contextlib
import itertools
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.errors import RuleError
from htp_export.lora import insert
from tests.exporting import quick
from tests.nets import EXPORTERS, composed
from tests.quantized import IDS, distance, outputs, results, tagged_graph, written

X = np.random.default_rng(0).standard_normal((2, 4, 32)).astype(np.float32)

PRECISIONS = (
    "int8", "u8s8", "uint8", "int16", "int8-dynamic", "int8-weights", "int8-weights:format=qdq", "int4",
    "int4:format=qdq", "fp8", "fp16", "bf16", "fixed", "mxint8", "mxfp8",
)  # fmt: skip
_QUICK = {"int8": "dynamo", "int8-dynamic": "torchscript", "int4": "dynamo"}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A convolution, an LSTM, a norm, and products with and without bias."""
    torch.manual_seed(0)
    net = composed(
        lambda self, x: self.head(self.norm(self.lstm(torch.relu(self.conv(x)))[0]) @ self.matrix),
        conv=nn.Conv1d(4, 8, 3, padding=1),
        lstm=nn.LSTM(32, 32, batch_first=True),
        norm=nn.LayerNorm(32),
        matrix=nn.Parameter(torch.randn(32, 32) / 6),
        head=nn.Linear(32, 8),
    )
    folder, given = tmp_path_factory.mktemp("twice"), (torch.from_numpy(X),)
    return {each: written(net, given, folder / f"{each}.onnx", each, ["x"]) for each in EXPORTERS}


@pytest.mark.long
@pytest.mark.parametrize(
    ("first", "exporter"), quick(itertools.product(PRECISIONS, EXPORTERS), *_QUICK.items())
)
def test_a_second_precision_is_right_or_refused_with_a_reason(first, exporter, files, tmp_path):
    source, once, twice = files[exporter], tmp_path / "once.onnx", tmp_path / "twice.onnx"
    [given] = htp_export.load(source).model.graph.inputs
    feed = {str(given.name): X}
    [expected] = outputs(source, feed)
    htp_export.quantize(source, first, once, data=feed)
    done = []
    for second in PRECISIONS:
        with contextlib.suppress(RuleError):  # nothing can have it: the message says why
            htp_export.quantize(once, second, twice, data=feed)
            done.append(second)
        if second not in done:
            continue
        if "bf16" in (first, second):  # ONNX Runtime's CPU has few such operators
            continue
        for optimized in (False, True):
            [found] = results(twice, feed, optimized=optimized)
            assert distance(found.astype(np.float32), expected) < 0.25, (second, optimized)
    assert done


_STATIC = [
    ("int8", "int8"),
    ("int16", "int8"),
    ("int8", "fp16"),
    ("u8s8", "int4"),
    ("fp8", "fp8"),
    ("int16", "fp16"),
    ("fixed", "mxfp8"),
    ("mxint8", "fixed"),
]


@pytest.mark.parametrize(("first", "second"), _STATIC)
def test_products_that_are_static_already_stay_and_the_reason_says_so(first, second, files):
    once = htp_export.quantize(files["dynamo"], {"head": first}).model
    with pytest.raises(
        RuleError, match=f"its weight is quantized already: give it {second} in the file as it was"
    ):
        htp_export.quantize(once, {"head": second})


@pytest.mark.parametrize("first", ["int4", "int8-weights"])
def test_products_with_blocks_that_become_float16_have_no_level(first, net):
    """Of level 4 in float16, ONNX Runtime computes something else without optimizations."""
    feed = {"ids": IDS}
    once = htp_export.quantize(net, first).model
    twice = htp_export.quantize(once, "fp16").model
    levels = {
        node.attributes.get_int("accuracy_level", 0)
        for node in twice.graph
        if node.op_type == "MatMulNBits"
    }
    assert levels == {0}
    for optimized in (False, True):
        pairs = [ir.external_data.load_to_model(model) for model in (once, twice)]
        expected, found = (results(model, feed, optimized=optimized)[0] for model in pairs)
        assert distance(found, expected) < 0.02


def test_a_module_beside_one_that_is_static_already_gets_the_precision(files, tmp_path):
    source, made = files["dynamo"], tmp_path / "made.onnx"
    [given] = htp_export.load(source).model.graph.inputs
    feed = {str(given.name): X}
    once = htp_export.quantize(source, {"lstm,norm,conv": "int8"}, data=feed).model
    result = htp_export.quantize(once, {"head": "int8"}, made, data=feed)
    assert result.modules["head"].precision == "int8"
    assert distance(results(made, feed)[0], outputs(source, feed)[0]) < 0.05


def test_scales_of_sixteen_bits_stay_in_float32():
    """Before opset 21, their operators are ONNX Runtime's own; a bias has a scale that float16 does not have."""
    text = "g (float[3,8] x) => (float[3,4] z) { y = Gemm(x,w,b) z = MatMul(y,v) }"
    random = np.random.default_rng(0).standard_normal
    weights = {"w": random((8, 4)) / 1000, "b": random(4) / 1000, "v": random((4, 4))}
    model = tagged_graph(text, 17, **weights)
    feed = {"x": random((3, 8)).astype(np.float32) / 1000}
    once = htp_export.quantize(model, {"y": "int16"}, data=feed).model
    assert {node.domain for node in once.graph if node.op_type == "QuantizeLinear"} == {
        "com.microsoft"
    }
    twice = htp_export.quantize(once, {"y,z": "fp16"}, data=feed).model
    assert [node.outputs[0].dtype for node in twice.graph if node.op_type == "MatMul"] == [
        ir.DataType.FLOAT16
    ]
    assert distance(results(twice, feed)[0], results(model, feed)[0]) < 0.01


def test_an_adapter_releases_ranges_of_sixteen_bits_whosever_operators_they_are():
    text = "g (float[3,8] x) => (float[3,4] z) { y = MatMul(x,w) z = MatMul(y,v) }"
    random = np.random.default_rng(0).standard_normal
    weights = {"w": random((8, 6)), "v": random((6, 4))}
    kinds, domains = [], []
    for opset in (17, 21):
        model = tagged_graph(text, opset, **weights)
        once = htp_export.quantize(model, "int16", data={"x": np.ones((3, 8), np.float32)}).model
        graph = insert(once, ["y"]).model.graph
        kinds.append([node.op_type for node in graph])
        domains.append({node.domain for node in graph if node.op_type == "QuantizeLinear"})
    assert domains == [{"com.microsoft"}, {""}]
    assert kinds[0] == kinds[1]
    # of what the layer reads and makes; the result is behind the adapter
    assert kinds[0].count("QuantizeLinear") == 2
