"""Costs by module: sums, shared work and weights, what is not counted, and PyTorch's own counts."""

import json
import math
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnxruntime.quantization import quantize_dynamic
from torch import nn

import htp_export
from htp_export.costs.execution import RunStep
from htp_export.costs.result import Cost
from htp_export.errors import InputError
from htp_export.format.hierarchy import ModuleInfo
from htp_export.format.parameters import (
    frozen_to_json,
    parameters_from_json,
    parameters_of,
    parameters_to_json,
    with_frozen,
)
from tests.handmade import encoder, model, tagged_node, value

BOTH = pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
SUMMED = (
    "flops",
    "macs",
    "other_flops",
    "parameters",
    "weight_bytes",
    "activation_bytes",
    "traffic_bytes",
)


def costs(net: nn.Module, x: torch.Tensor, exporter: str, folder: Path) -> Cost:
    file = folder / "model.onnx"
    htp_export.export(net.eval(), (x,), file, dynamo=exporter == "dynamo", verbose=False)
    return htp_export.cost(file)


def test_a_node_of_two_modules_counts_once_above_them_and_is_divided_between_them():
    modules = htp_export.cost(encoder()).modules
    # mask (8 elements) is of both layers; each layer has a product of 2 x 4 x 4 and 8 elements of its own
    assert {path: (m.macs, m.other_flops, m.self_other_flops) for path, m in modules.items()} == {
        "": (64, 32, 8),
        "layer": (64, 24, 0),
        "layer.0": (32, 16, 12),
        "layer.0.fc": (32, 0, 0),
        "layer.1": (32, 16, 12),
        "layer.1.fc": (32, 0, 0),
        "dropout": (0, 0, 0),
    }
    assert modules["layer.0"].nodes == 4
    assert modules["layer.0"].self_nodes == 2


def test_work_that_does_not_divide_evenly_is_not_lost():
    x = value("x", 1)
    x.shape = ir.Shape([7])
    node = tagged_node("Relu", [x], ["a", "b", "c"], "y")
    node.outputs[0].shape = ir.Shape([7])
    modules = [ModuleInfo(path, "net.Any", 1, "computed") for path in ("", "a", "b", "c")]
    report = htp_export.cost(model([x], [node], [], modules))
    assert [report.modules[path].self_other_flops for path in "abc"] == [3, 2, 2]


def test_sizes_whose_sums_have_more_than_64_bits_are_added_up():
    x = value("x", 1)
    x.shape = ir.Shape([2**60])
    first = tagged_node("Relu", [x], ["a"], "first")
    second = tagged_node("Neg", first.outputs, ["b"], "second")
    third = tagged_node("Add", [x, *second.outputs], ["b"], "third")
    modules = [ModuleInfo(path, "net.Any", 1, "computed") for path in ("", "a", "b")]
    report = htp_export.cost(model([x], [first, second, third], [], modules))
    # the input, and what a node reads and makes
    assert report.modules[""].peak_bytes == 3 * 4 * 2**60
    assert report.modules[""].other_flops == 3 * 2**60


@pytest.mark.parametrize("shape", [[2**62, 2**62], [2] * 65, [2**62] * 400])
def test_a_shape_that_no_tensor_has_is_not_known(shape):
    x = value("x", 1)
    x.shape = ir.Shape(shape)
    node = tagged_node("Relu", [x], ["a"], "y")
    node.outputs[0].shape = ir.Shape(shape)
    modules = [ModuleInfo(path, "net.Any", 1, "computed") for path in ("", "a")]
    report = htp_export.cost(model([x], [node], [], modules))
    assert report.uncounted == {"Relu": 1}
    assert "have no known shape" in str(report)


class Trunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.body = nn.Sequential(nn.Linear(36, 20), nn.GELU(), nn.Linear(20, 36))
        self.head = nn.Linear(36, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).flatten(2)
        return self.head(x + self.body(x)).softmax(-1)


@BOTH
def test_modules_add_up_to_the_whole_and_have_pytorchs_parameters_where_a_norm_is_folded(
    exporter, tmp_path
):
    net = Trunk()
    report = costs(net, torch.randn(2, 3, 8, 8), exporter, tmp_path)
    for name in SUMMED:
        own = sum(getattr(module, f"self_{name}") for module in report.modules.values())
        assert own == getattr(report.modules[""], name), name
    assert report.from_pytorch
    for path, module in net.named_modules():
        assert report.modules[path].parameters == sum(p.numel() for p in module.parameters()), path
    assert report.modules["norm"].parameters == 16
    assert report.modules["norm"].self_parameters == 16
    assert report.modules["norm"].weight_bytes + report.modules["conv"].weight_bytes <= 4 * 2 * (
        8 * 3 * 9 + 8
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body, self.head = (
            nn.Embedding(20, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 20, bias=False),
        )
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(8))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(x)) * self.scale) / self.temperature


@BOTH
def test_tied_parameters_count_once_and_are_named_and_buffers_do_not_count(exporter, tmp_path):
    net = Tied()
    report = costs(net, torch.randint(0, 20, (2, 6)), exporter, tmp_path)
    assert report.modules[""].parameters == sum(p.numel() for p in net.parameters()) == 160 + 72 + 1
    assert (report.modules["head"].parameters, report.modules["head"].self_parameters) == (160, 0)
    assert report.modules["embedding"].self_parameters == 160
    assert report.shared == {"embedding.weight": ("embedding", "head")}
    assert "embedding.weight (embedding, head)" in str(report)


def test_without_word_of_pytorch_parameters_are_the_weights_that_are_read():
    report = htp_export.cost(encoder())
    assert not report.from_pytorch
    assert {path: m.parameters for path, m in report.modules.items() if m.parameters} == {
        "": 32, "layer": 32, "layer.0": 16, "layer.0.fc": 16, "layer.1": 16, "layer.1.fc": 16,
    }  # fmt: skip
    assert any("does not say which PyTorch had" in note for note in report.notes)


def test_weights_that_several_modules_read_are_shared():
    made = encoder()
    nodes = list(made.graph)
    nodes[4].replace_input_with(1, nodes[1].inputs[0])
    report = htp_export.cost(made)
    assert report.shared == {"layer.0.fc.weight": ("layer.0.fc", "layer.1.fc")}
    assert report.modules[""].parameters == report.modules["layer.1.fc"].parameters == 16
    assert report.modules["layer.1.fc"].self_weight_bytes == 0


def test_a_pruned_weight_counts_with_its_size_and_parameters_of_modules_that_are_not_there_are_not_believed():
    made = encoder()
    made.metadata_props["htp.parameters"] = (
        '{"layer.0.fc":{"weight":[4,8]},"layer.1.fc":{"gone":[3]}}'
    )
    modules = htp_export.cost(made).modules
    assert (modules["layer.0.fc"].parameters, modules["layer.1.fc"].parameters) == (16, 3)
    made.metadata_props["htp.parameters"] = '{"elsewhere":{"weight":[4,8]}}'
    assert not htp_export.cost(made).from_pytorch
    made.metadata_props["htp.parameters"] = '{"layer":'
    with pytest.raises(InputError, match=r"htp\.parameters is not JSON"):
        htp_export.cost(made)


def test_an_extracted_module_knows_its_parameters(tmp_path):
    htp_export.export(
        Trunk().eval(), (torch.randn(2, 3, 8, 8),), tmp_path / "m.onnx", verbose=False
    )
    part = htp_export.cost(htp_export.extract(tmp_path / "m.onnx", "body").model)
    assert part.from_pytorch
    assert (
        part.modules["body"].parameters
        == part.modules[""].parameters
        == 36 * 20 + 20 + 20 * 36 + 36
    )


def test_written_parameters_come_back_the_same():
    held = parameters_of(Tied())
    assert {path: (module.shapes, module.tied) for path, module in held.items()} == {
        "": ({"temperature": ()}, {}),
        "embedding": ({"weight": (20, 8)}, {}),
        "body": ({"weight": (8, 8), "bias": (8,)}, {}),
        "head": ({"weight": (20, 8)}, {"weight": "embedding.weight"}),
    }
    read = parameters_from_json(parameters_to_json(held))
    assert with_frozen(read, frozen_to_json(held)) == held
    only = {"head": held["head"]}
    assert parameters_from_json(parameters_to_json(only))["head"].shapes == {"weight": (20, 8)}


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"a": []}', '{"a": {"w": [-1]}}', '{"a": {"w": "b.w"}}']
)
def test_malformed_parameters_are_refused(text):
    with pytest.raises(ValueError, match=r"htp\.parameters"):
        parameters_from_json(text)


def test_what_has_no_formula_is_listed_by_operator_and_module():
    made = encoder()
    nodes = list(made.graph)
    nodes[4].op_type, nodes[4].domain = "Mystery", "my.own"
    nodes[6].op_type = "TfIdfVectorizer"
    report = htp_export.cost(made)
    assert report.uncounted == {"Mystery": 1, "TfIdfVectorizer": 1}
    assert report.modules["layer.1"].uncounted == {"Mystery": 1}
    assert report.modules["layer.0"].uncounted == {}
    assert "not counted: Mystery × 1, TfIdfVectorizer × 1" in str(report)  # noqa: RUF001 - "times"
    assert [node.counted for node in report.nodes] == [True, True, True, True, False, True, False]


def test_formulas_of_the_caller_count_what_has_none_and_go_before_the_others():
    made = encoder()
    nodes = list(made.graph)
    nodes[4].op_type, nodes[4].domain = "Mystery", "my.own"
    before = htp_export.cost(made).modules[""]

    def mystery(step: RunStep) -> htp_export.Work:
        return htp_export.Work(macs=1000, other=math.prod(step.shape(0)))

    report = htp_export.cost(made, formulas={("my.own", "Mystery"): mystery})
    assert report.uncounted == {}
    assert report.modules[""].macs == before.macs + 1000
    assert report.modules["layer.1"].uncounted == {}
    free = {("ai.onnx", "MatMul"): lambda step: htp_export.Work()}
    assert htp_export.cost(encoder(), formulas=free).modules[""].flops == 0
    assert htp_export.cost(encoder()).modules[""].flops == 128


@pytest.mark.parametrize(
    ("formulas", "message"),
    [
        ({"MatMul": lambda step: htp_export.Work()}, "no pair of domain and operator"),
        ({("", "MatMul"): 3}, "not a function"),
        ({("", "MatMul"): lambda step: 64}, "returned 64; return htp_export.Work"),
    ],
)
def test_formulas_that_cannot_be_used_are_refused(formulas, message):
    with pytest.raises(InputError, match=message):
        htp_export.cost(encoder(), formulas=formulas)


def test_weights_are_told_by_type():
    x, scale, zero = (
        ir.val(n, ir.DataType.FLOAT, s) for n, s in (("x", [2, 4]), ("s", []), ("z", []))
    )
    eight = ir.Value(name="w8", const_value=ir.tensor(np.ones((4, 4), np.int8), name="w8"))
    half = ir.Value(name="w16", const_value=ir.tensor(np.ones((4,), np.float16), name="w16"))
    indices = ir.Value(name="i", const_value=ir.tensor(np.ones((4,), np.int64), name="i"))
    nodes = [
        tagged_node("MatMulInteger", [x, eight], "", "a"),
        tagged_node("Mul", [x, half], "", "b"),
        tagged_node("Gather", [x, indices], "", "c"),
    ]
    made = model(
        [x, scale, zero], nodes, [eight, half, indices], [ModuleInfo("", "net.Net", 1, "computed")]
    )
    whole = htp_export.cost(made).modules[""]
    assert whole.weight_bytes_by_dtype == {"int8": 16, "float16": 8}
    assert whole.weight_bytes == 24


def test_an_untagged_model_has_costs_of_the_whole_and_of_its_nodes():
    text = '<ir_version: 10, opset_import: ["": 20]> net (float[2, 3] x, float[3, 5] w) => (float[2, 5] y)'
    report = htp_export.cost(onnx.parser.parse_model(text + "{ y = MatMul(x, w) }"))
    assert list(report.modules) == [""]
    assert (report.modules[""].flops, report.modules[""].nodes, report.nodes[0].shapes) == (
        60,
        1,
        ((2, 5),),
    )
    assert "only the whole is known" in report.notes
    assert "no module tags" in str(report).splitlines()[-1]


def test_the_result_is_plain_data_and_prints_and_the_model_is_left_as_it_is():
    made = encoder()
    before = ir.to_proto(made).SerializeToString()
    report = htp_export.cost(made)
    assert ir.to_proto(made).SerializeToString() == before
    data = json.loads(json.dumps(report.to_dict()))
    assert data["modules"]["layer.0.fc"]["flops"] == 64
    assert data["nodes"][2] | {"name": "fc0"} == {
        "name": "fc0", "op_type": "MatMul", "owners": ["layer.0.fc"], "times": 1, "counted": True, "macs": 32,
        "flops": 64, "other_flops": 0, "shapes": [[2, 4]], "activation_bytes": 32, "moved_bits": 512,
        "traffic_bytes": 128, "read_bytes": 96, "written_bytes": 32,
    }  # fmt: skip
    assert str(report).splitlines()[0].split() == [
        "module", "class", "nodes", "parameters", "weights", "FLOPs", "other", "peak",
    ]  # fmt: skip
    assert report.by_path("macs")["layer.1"] == 32


def test_fusing_and_quantizing_leave_the_flops_as_they_are(tmp_path):
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    plain, fused, eight = (tmp_path / f"{name}.onnx" for name in ("plain", "fused", "eight"))
    htp_export.export(layer, (torch.randn(2, 10, 32),), plain, dynamo=False, verbose=False)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(fused)
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    onnxruntime.InferenceSession(plain, options, providers=["CPUExecutionProvider"])
    quantize_dynamic(plain, eight, extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT})
    before = htp_export.cost(plain)
    for file, operator in ((fused, "SkipLayerNormalization"), (eight, "MatMulInteger")):
        after = htp_export.cost(file)
        assert operator in {node.op_type for node in after.nodes}
        assert (after.modules[""].flops, after.uncounted) == (before.modules[""].flops, {})


def test_nodes_without_owner_count_in_the_whole():
    made = encoder()
    list(made.graph)[6].metadata_props.clear()
    whole = htp_export.cost(made).modules[""]
    assert (whole.other_flops, whole.self_other_flops, whole.nodes) == (32, 8, 7)


def test_a_model_without_nodes_costs_nothing():
    x = value("x")
    empty = ir.Model(ir.Graph([x], [x], nodes=[], opset_imports={"": 20}, name="g"), ir_version=10)
    report = htp_export.cost(empty)
    assert (report.modules[""].flops, report.peak.bytes, report.peak.modules) == (0, 0, ())
