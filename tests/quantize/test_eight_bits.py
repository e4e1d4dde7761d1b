"""Weights of convolutions and tables in 8 bits, and of LSTMs with ranges at run time."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import htp_export
from tests.nets import composed, spread
from tests.quantized import assert_others_are_the_same, assert_predicted, assert_tagged, outputs


def convolutions() -> nn.Module:
    """One that ends on a BatchNorm, one in groups, a transposed one, and a table whose rows have 40 elements."""
    return composed(
        lambda self, ids: self.last(
            self.second(torch.relu(self.norm(self.first(self.table(ids)))))
        ),
        table=nn.Embedding(30, 40),
        first=nn.Conv1d(7, 12, 3),
        norm=nn.BatchNorm1d(12),
        second=nn.Conv1d(12, 8, 3, groups=4),
        last=nn.ConvTranspose1d(8, 6, 3, groups=2),
    )


def exported(
    model: nn.Module, array: np.ndarray[Any, Any], file: Path, *, dynamo: bool = True
) -> Path:
    model = spread(model.eval())
    names = {} if dynamo else {"input_names": ["input"]}
    htp_export.export(
        model, (torch.from_numpy(array),), file, dynamo=dynamo, verbose=False, **names
    )
    return file


@pytest.mark.long
@pytest.mark.parametrize("symmetric", [False, True])
def test_weights_of_convolutions_and_tables_have_8_bits(tmp_path, symmetric):
    ids = np.arange(14, dtype=np.int64).reshape(2, 7)
    file, made = exported(convolutions(), ids, tmp_path / "net.onnx"), tmp_path / "made.onnx"
    plan = {"**,!second": {"precision": "int8-weights", "symmetric": symmetric}}
    result = htp_export.quantize(file, plan, made)
    kinds = Counter(node.op_type for node in result.model.graph)
    assert (kinds["DequantizeLinear"], kinds["GatherBlockQuantized"], kinds["Conv"]) == (2, 1, 2)
    assert_predicted(result, file, plan)
    assert_others_are_the_same(file, made, "**,!second")
    assert_tagged(file, made, "**,!second")
    # Levels of one byte, and a scale for each of 12 channels; for 30 rows of two blocks each, and their zero points.
    weights = {path: result.modules[path].bytes_after for path in ("table", "first")}
    assert weights == {
        "table": 1200 + 60 * (4 if symmetric else 5),
        "first": 7 * 12 * 3 + 12 * 4 + 12 * 4,
    }
    name = htp_export.load(file).model.graph.inputs[0].name
    [expected], [found] = outputs(file, {name: ids}), outputs(made, {name: ids})
    assert 0 < np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


def test_a_table_that_is_tied_to_a_product_stays_for_it(tmp_path, net):
    result = htp_export.quantize(net, {"table": "int8-weights"})
    before = htp_export.load(net)["table"]
    assert [node.op_type for node in result.tagged["table"].nodes] == ["GatherBlockQuantized"]
    assert result.modules["table"].bytes_after < 0.35 * sum(
        p.nbytes for p in [before.nodes[0].inputs[0].const_value]
    )


def test_an_lstm_is_computed_in_integers_and_a_gru_stays(tmp_path):
    x = np.random.default_rng(0).standard_normal((1, 5, 16)).astype(np.float32)
    for kind, left in ((nn.LSTM, 0), (nn.GRU, 2)):  # ONNX Runtime has no such GRU
        rnn = kind(16, 24, 2, batch_first=True, bidirectional=True)
        net = composed(lambda self, x: self.head(self.rnn(x)[0]), rnn=rnn, head=nn.Linear(48, 4))
        file = exported(net, x, tmp_path / f"{kind.__name__}.onnx", dynamo=False)
        made = tmp_path / "made.onnx"
        result = htp_export.quantize(file, "int8-dynamic", made)
        kinds = Counter(node.op_type for node in result.model.graph)
        assert (kinds["DynamicQuantizeLSTM"], kinds["GRU"]) == (2 - left, left)
        assert result.left["int8-dynamic"].get("GRU", 0) == left
        assert_predicted(result, file, "int8-dynamic")
        assert not result.tagged.untagged
        [expected], [found] = outputs(file, {"input": x}), outputs(made, {"input": x})
        assert 0 < np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


def test_files_that_do_not_say_the_shapes_of_tensors_are_quantized(tmp_path):
    net = composed(
        lambda self, x: self.fc(self.conv(x)),
        conv=nn.Conv1d(4, 4, 3, padding=1),
        fc=nn.Linear(8, 3),
    )
    x = np.ones((2, 4, 8), np.float32)
    proto = onnx.load(exported(net, x, tmp_path / "net.onnx"))
    del proto.graph.value_info[:]
    onnx.save(proto, tmp_path / "bare.onnx")
    htp_export.quantize(tmp_path / "bare.onnx", "int8-dynamic", tmp_path / "small.onnx")
    name = proto.graph.input[0].name
    found, expected = (
        outputs(tmp_path / each, {name: x})[0] for each in ("small.onnx", "net.onnx")
    )
    assert np.allclose(found, expected, atol=0.1)


def test_an_lstm_that_is_called_twice_has_its_integers_once(tmp_path):
    net = composed(lambda self, x: self.lstm(self.lstm(x)[0] + x)[0], lstm=nn.LSTM(16, 16))
    x = np.random.default_rng(0).standard_normal((1, 5, 16)).astype(np.float32)
    file, made = exported(net, x, tmp_path / "twice.onnx", dynamo=False), tmp_path / "made.onnx"
    result = htp_export.quantize(file, "int8-dynamic", made)
    assert [node.op_type for node in result.model.graph].count("DynamicQuantizeLSTM") == 2
    assert_predicted(result, file, "int8-dynamic")
    [expected], [found] = outputs(file, {"input": x}), outputs(made, {"input": x})
    assert 0 < np.abs(found - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "weight"), [((5, 16), (3, 16, 8)), ((3, 5, 16), (3, 16, 8)), ((5, 8, 16), (16,))]
)
def test_several_matrices_at_once_and_a_vector_are_multiplied_in_integers(shape, weight, tmp_path):
    experts = nn.ParameterList([torch.randn(weight)])
    net = composed(
        lambda self, x: self.head(torch.tanh(x @ self.experts[0])),
        experts=experts,
        head=nn.Linear(8, 4),
    )
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    file, made = exported(net, x, tmp_path / "experts.onnx"), tmp_path / "made.onnx"
    result = htp_export.quantize(file, "int8-dynamic", made)
    assert [node.op_type for node in result.model.graph].count("MatMulInteger") == 2
    assert_predicted(result, file, "int8-dynamic")
    name = onnx.load(file).graph.input[0].name
    [expected], [found] = outputs(file, {name: x}), outputs(made, {name: x})
    assert 0 < np.abs(found - expected).max() < 0.1 * np.abs(expected).max()


_ROOT = Path(__file__).parents[2]
_QUANTIZE = """
import json, sys
from pathlib import Path
sys.path.insert(0, "tools")
import large_model
from peak_memory import PeakOfOwn, status
import htp_export
from htp_export.capabilities.quantize import ort_quantizers
folder, precision = Path(sys.argv[1]), sys.argv[2]
for name, gigabytes in (("first", 0.001), ("net", 0.1)):  # the first run imports what both need
    large_model.write_model(folder / f"{name}.onnx", gigabytes)
    ort_quantizers.GROUP_BYTES = 4 << 20
    before = status("RssAnon")
    with PeakOfOwn() as peak:
        made = folder / "made.onnx"
        result = htp_export.quantize(folder / f"{name}.onnx", precision, made, external_data="made.data")
print(json.dumps([peak.own - before, result.modules[""].bytes_before, result.modules[""].bytes_after]))
"""


@pytest.mark.long
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="memory is counted otherwise elsewhere"
)
@pytest.mark.parametrize(
    "precision", ["int4", pytest.param("int8-dynamic", marks=pytest.mark.slow)]
)
def test_quantizing_weights_holds_a_few_of_them_and_not_the_model(tmp_path, precision):
    command = [sys.executable, "-c", _QUANTIZE, str(tmp_path), precision]
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True)
    peak, before, after = json.loads(done.stdout.splitlines()[-1])
    assert after < 0.26 * before
    # seven of twelve weights; what is computed of one takes up to six times its bytes
    assert peak < 0.6 * before
