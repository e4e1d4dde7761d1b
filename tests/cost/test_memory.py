"""Activation memory, traffic and what fusing would save, on graphs whose answer is worked out by hand."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

import htp_export
from htp_export.capabilities.cost.result import Cost
from htp_export.format.hierarchy import ModuleInfo
from tests.handmade import model, tagged_node, value, weight

UNIT = 32  # bytes of one tensor of 2 x 4 floats


def of_text(body: str, outputs: str = "float[2, 4] y") -> Cost:
    text = f'<ir_version: 10, opset_import: ["": 20]>\nnet (float[2, 4] x) => ({outputs}) {{ {body} }}'
    return htp_export.cost(onnx.shape_inference.infer_shapes(onnx.parser.parse_model(text)))


@pytest.mark.parametrize(
    ("body", "units"),
    [
        ("y = Relu(x)", 2),
        ("a = Relu(x) b = Neg(a) y = Abs(b)", 2),
        ("a = Relu(x) b = Neg(a) y = Add(b, a)", 3),
        ("a = Relu(x) b = Neg(x) c = Abs(x) d = Add(a, b) y = Add(c, d)", 4),
        ("a = Relu(x) b = Neg(a) c = Abs(b) y = Add(c, x)", 3),  # the input is needed to the end
        ("a = Relu(x) b = Flatten(a) y = Neg(b)", 2),  # a view is no memory of its own
        ("a = Concat<axis = 0>(x, x, x) y = ReduceMax<keepdims = 1>(a)", 4),
    ],
    ids=["one node", "chain", "diamond", "three branches", "residual", "view", "one that grows"],
)
def test_peak_is_what_is_alive_at_once(body: str, units: int) -> None:
    outputs = "float[1, 1] y" if "Reduce" in body else "float[2, 4] y"
    assert of_text(body, outputs).peak.bytes == units * UNIT


def test_outputs_of_the_model_stay_to_the_end() -> None:
    report = of_text("y = Relu(x) a = Neg(x) b = Abs(a) z = Neg(b)", "float[2, 4] y, float[2, 4] z")
    assert report.peak.bytes == 3 * UNIT
    assert of_text("y = Relu(x) a = Neg(y) b = Abs(a) z = Neg(b)", "float[2, 4] z").peak.bytes == 2 * UNIT


def test_a_subgraph_takes_memory_while_its_node_runs() -> None:
    text = """
    <ir_version: 10, opset_import: ["": 20]>
    net (float[2, 4] x, bool c) => (float[2, 4] y) {
        h = Neg(x)
        y = If(c) <
            then_branch = a () => (float[2, 4] a1) {
                    a0 = Concat<axis = 0>(h, h) k = Constant<value_ints = [0, 1]>() a1 = Gather(a0, k) },
            else_branch = b () => (float[2, 4] b1) { b1 = Relu(h) }>
    }
    """
    proto = onnx.parser.parse_model(text)
    branch = proto.graph.node[1].attribute[0].g
    branch.value_info.append(onnx.helper.make_tensor_value_info("a0", onnx.TensorProto.FLOAT, [4, 4]))
    report = htp_export.cost(proto)
    # h and the result, one byte of condition no longer, and inside the branch four rows: twice a tensor
    assert report.peak.bytes == 2 * UNIT + 2 * UNIT + 1
    assert report.peak.node == "If"


def block() -> ir.Model:
    """``block`` makes two intermediates from its input, and its result; then the root adds its own input."""
    x = value("x")
    w = weight("block.fc.weight")
    fc = tagged_node("MatMul", [x, w], "block.fc", "fc")
    act = tagged_node("Relu", [fc.outputs[0]], "block", "act")
    out = tagged_node("Add", [act.outputs[0], fc.outputs[0]], "block", "block_out")
    end = tagged_node("Add", [out.outputs[0], x], "", "end")
    modules = [ModuleInfo(path, "net.Any", 1, "computed") for path in ("", "block", "block.fc")]
    return model([x], [fc, act, out, end], [w], modules)


def test_the_module_on_top_of_the_peak_and_what_is_alive_there_are_named() -> None:
    report = htp_export.cost(block())
    # x, fc, act and what is made of them
    assert report.peak.bytes == 4 * UNIT
    assert (report.peak.node, report.peak.modules) == ("node_block_out", ("block",))
    assert sorted(report.peak.live) == [("act", UNIT), ("block_out", UNIT), ("fc", UNIT), ("x", UNIT)]
    peaks = {path: module.peak_bytes // UNIT for path, module in report.modules.items()}
    assert peaks == {"": 4, "block": 4, "block.fc": 2}


def test_traffic_is_what_nodes_read_and_write_and_fusing_saves_the_intermediates() -> None:
    modules = htp_export.cost(block()).modules
    weights = 64
    fc = UNIT + weights + UNIT
    inside = fc + 2 * UNIT + 3 * UNIT
    assert modules["block.fc"].traffic_bytes == fc
    assert modules["block"].traffic_bytes == inside
    assert modules[""].traffic_bytes == inside + 3 * UNIT
    # fc is written once and read twice, act written and read once
    assert modules["block"].fused_traffic_bytes == inside - 5 * UNIT
    assert modules["block.fc"].fused_traffic_bytes == fc
    assert modules["block"].fused_peak_bytes == 3 * UNIT  # x, the result of the block, the end
    assert modules[""].fused_peak_bytes == 2 * UNIT
    assert modules["block.fc"].intensity == pytest.approx(2 * 2 * 4 * 4 / fc)


def test_a_lookup_reads_the_rows_it_gives_and_not_the_table() -> None:
    table = weight("table", 64)
    ids = ir.val("ids", ir.DataType.INT64, [3])
    out = tagged_node("Gather", [table, ids], "", "rows")
    out.outputs[0].shape = ir.Shape([3, 64])
    report = htp_export.cost(model([ids], [out], [table], [ModuleInfo("", "net.Net", 1, "computed")]))
    assert report.modules[""].traffic_bytes == 3 * 64 * 4 + 3 * 8 + 3 * 64 * 4
    assert report.modules[""].weight_bytes == 64 * 64 * 4
