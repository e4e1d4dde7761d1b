"""What the values of weights are like."""

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest

from htp_export.capabilities.view import inventory as module
from htp_export.capabilities.view.inventory import weight_statistics
from htp_export.command.main import main
from htp_export.errors import InputError
from htp_export.model.tagged import load
from tests import handmade


def found(array: np.ndarray | ir.TensorProtocol):
    tensor = array if not isinstance(array, np.ndarray) else ir.tensor(array, name="w")
    value = ir.Value(name="w", const_value=tensor)
    graph = ir.Graph([], [], nodes=[], initializers=[value], opset_imports={"": 20}, name="Net")
    return weight_statistics(ir.Model(graph, ir_version=10))["w"]


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16, np.int8, np.uint8, np.int64]
)
def test_statistics_are_those_of_numpy_whatever_the_type(dtype):
    array = (np.random.default_rng(0).normal(3, 20, (7, 31)).clip(0, 100)).astype(dtype)
    wide = array.astype(np.float64)
    said = found(array)
    assert said.mean == pytest.approx(wide.mean())
    assert said.std == pytest.approx(wide.std())
    assert (said.least, said.most) == (wide.min(), wide.max())
    assert said.zeros == np.count_nonzero(wide == 0) > 0
    assert (said.elements, said.not_finite) == (217, 0)


def test_parts_of_a_large_weight_make_one_mean_and_one_spread(monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", 10)
    array = np.random.default_rng(0).normal(1e6, 1, 237)
    said = found(array)
    assert said.mean == pytest.approx(array.mean(), rel=1e-12)
    assert said.std == pytest.approx(array.std(), rel=1e-9)


def test_what_is_no_number_is_counted_and_left_out():
    said = found(np.array([1.0, np.nan, 3.0, np.inf, -np.inf, 0.0]))
    assert (said.not_finite, said.zeros, said.elements) == (3, 1, 6)
    assert (said.mean, said.least, said.most) == (pytest.approx(4 / 3), 0.0, 3.0)


def test_weights_without_a_value_have_zeros():
    for array in (np.zeros((0, 4), np.float32), np.full(3, np.nan, np.float32)):
        said = found(array)
        assert (said.mean, said.std, said.least, said.most) == (0.0, 0.0, 0.0, 0.0)


def test_a_data_file_that_is_missing_is_named(tmp_path):
    tensor = ir.ExternalTensor(
        "w.data", 0, 16, ir.DataType.FLOAT, shape=ir.Shape([4]), name="w", base_dir=tmp_path
    )
    with pytest.raises(InputError, match=r"'w' cannot be read.*w\.data"):
        found(tensor)


def test_weights_in_constant_nodes_are_in_the_order_of_the_file():
    nodes = []
    for place in range(12):  # of sets in another order, hardly any is this one
        weight = onnx.numpy_helper.from_array(np.full((4, 4), place, np.float32))
        nodes.append(onnx.helper.make_node("Constant", [], [f"w{place}"], value=weight))
        nodes.append(onnx.helper.make_node("MatMul", [f"h{place}", f"w{place}"], [f"h{place + 1}"]))
    ends = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2, 4])
        for name in ("h0", "h12")
    ]
    graph = onnx.helper.make_graph(nodes, "net", ends[:1], ends[1:])
    opsets = [onnx.helper.make_opsetid("", 20)]
    tagged = load(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10))
    assert list(module.take_inventory(tagged, statistics=True).statistics) == [
        f"w{place}" for place in range(12)
    ]


def test_the_command_reads_weights_where_it_is_asked_to(tmp_path, capsys):
    file = tmp_path / "net.onnx"
    load(handmade.encoder()).save(file)
    page = tmp_path / "net.html"
    assert main(["view", str(file), "--no-explorer"]) == 0
    assert '"statistics":{}' in page.read_text(encoding="utf-8")
    assert main(["view", str(file), "--no-explorer", "--weights"]) == 0
    # 0 to 15, and the length of the name, 17, is added to each
    assert (
        '"layer.0.fc.weight":{"elements":16,"mean":24.5,"std":4.61,"least":17.0,"most":32.0'
        in page.read_text(encoding="utf-8")
    )
    assert "7 modules, 7 nodes" in capsys.readouterr().out
