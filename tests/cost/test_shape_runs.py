"""Running a model by shapes: open sizes, subgraphs, functions, and what is not known."""

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

import htp_export
from htp_export.costs.execution import Run, run_by_shapes
from htp_export.errors import InputError
from htp_export.model.tagged import load
from htp_export.runtime.settings import RunSettings
from tests.exporting import open_sizes
from tests.handmade import branching, with_function
from tests.nets import Holding

TEXT = """
<ir_version: 10, opset_import: ["": 20]>
net (float[n, 3] x, float[8, 3] w) => (float y) {
    shape = Shape(x)
    first = Constant<value_ints=[0]>()
    n = Gather(shape, first)
    twelve = Constant<value_ints=[3, -1]>()
    turned = Reshape(x, twelve)
    ones = ConstantOfShape(n)
    wt = Transpose(w)
    h = MatMul(x, wt)
    two = Constant<value_ints=[2]>()
    sizes = Concat<axis=0>(n, two, two, two)
    cube = Reshape(h, sizes)
    y = Relu(cube)
}
"""


def parsed(text: str) -> ir.Model:
    model = onnx.parser.parse_model(text)
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    return ir.from_proto(model)


def run(model: Any, **given: Any) -> Run:
    return run_by_shapes(load(model), RunSettings(**given))


def test_shapes_that_are_computed_from_shapes_are_known():
    found = {
        t.name: t.shape for step in run(parsed(TEXT), dims={"n": 5}).steps for t in step.outputs
    }
    assert found["turned"] == (3, 5)
    assert found["ones"] == (5,)
    assert found["h"] == (5, 8)
    assert found["cube"] == found["y"] == (5, 2, 2, 2)


def test_example_inputs_say_sizes_as_their_names_do():
    by_name = run(parsed(TEXT), dims={"n": 5})
    by_example = run(parsed(TEXT), data={"x": np.zeros((5, 3), np.float32)})
    by_shape = run(parsed(TEXT), shapes={"x": (5, 3)})
    assert [t.shape for s in by_name.steps for t in s.outputs] == [
        t.shape for s in by_example.steps for t in s.outputs
    ]
    assert by_shape.outputs[0].shape == (5, 2, 2, 2)


def test_values_of_small_whole_inputs_decide_shapes():
    text = """
    <ir_version: 10, opset_import: ["": 20]>
    net (int64[4] mask, float[4, 3] x) => (float y) {
        kept = NonZero(mask)
        y = GatherND(x, kept)
    }
    """
    model = parsed(text)
    without = run(model)
    assert without.outputs[0].shape is None
    found = run(model, data={"mask": np.array([1, 0, 1, 1])})
    assert found.steps[0].outputs[0].shape == (1, 3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dims": {"m": 1}}, "no open dimension 'm' in this model, only 'n'"),
        ({"dims": {"n": -1}}, "whole number, not -1"),
        (
            {"dims": {"n": 2}, "shapes": {"x": (5, 3)}},
            "input 'x' is \\[5, 3\\], but dims has n = 2",
        ),
        ({"shapes": {"x": (5, 4)}}, "input 'x' is \\[5, 4\\], but a size of it is 3"),
        ({"shapes": {"x": (5,)}}, "input 'x' has 2 dimensions in the model, not 1"),
        ({"shapes": {"xs": (5, 3)}}, "no input 'xs' in this model, only 'x', 'w'; nearest: 'x'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(given, message):
    with pytest.raises(InputError, match=message):
        run(parsed(TEXT), **given)


def test_sizes_that_nothing_tells_are_1():
    assert run(parsed(TEXT)).notes == ("size 'n' is 1",)
    assert [t.shape for t in run(parsed(TEXT)).outputs] == [
        t.shape for t in run(parsed(TEXT), dims={"n": 1}).outputs
    ]


def test_an_input_whose_number_of_dimensions_is_not_known_is_refused():
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT))
    with pytest.raises(
        InputError, match="input 'x': the model does not contain its shape; give shapes or data"
    ):
        run(ir.Model(ir.Graph([x], [], nodes=[]), ir_version=10))


def test_expressions_of_open_sizes_are_worked_out():
    x, y = (
        ir.val("x", ir.DataType.FLOAT, ["n"]),
        ir.val("y", ir.DataType.FLOAT, ["Min(5, 2*n + 1)"]),
    )
    node = ir.node("Mystery", [x], outputs=[y], domain="my.own")
    model = ir.Model(
        ir.Graph([x], [y], nodes=[node], opset_imports={"": 20, "my.own": 1}, name="g"),
        ir_version=10,
    )
    assert run(model, dims={"n": 1}).outputs[0].shape == (3,)
    assert run(model, dims={"n": 9}).outputs[0].shape == (5,)


def test_a_shape_that_is_not_known_is_noted_with_the_node_that_does_not_tell():
    text = """
    <ir_version: 10, opset_import: ["": 20, "my.own": 1]>
    net (float[2, 3] x) => (float y) { m = my.own.Mystery(x) y = Relu(m) }
    """
    assert htp_export.cost(parsed(text)).notes[-1] == (
        "2 tensors have no known shape; they are missing from bytes and peaks (first 'm', made by Mystery)"
    )


def test_weights_are_not_read(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 20)).eval()
    file = tmp_path / "model.onnx"
    htp_export.export(net, (torch.randn(2, 40),), file, verbose=False, external_data=True)
    (tmp_path / "model.onnx.data").unlink()
    report = htp_export.cost(file)
    assert (report.modules[""].parameters, report.modules[""].flops) == (
        1850,
        2 * 2 * (40 * 30 + 30 * 20),
    )
    assert report.modules[""].weight_bytes == 4 * 1850


LOOP = """
<ir_version: 10, opset_import: ["": 20]>
net (float[3, 3] x, {inputs}) => (float[3, 3] y) {{
    {trips}
    go = Constant<value = bool {{1}}>()
    y = Loop(m, go, x) <body = step (int64 i, bool c, float[3, 3] s) => (bool c2, float[3, 3] s2) {{
        c2 = Identity(c)
        s2 = MatMul(s, x)
    }}>
}}
"""


def test_the_body_of_a_loop_counts_as_often_as_it_runs():
    known = LOOP.format(inputs="float[1] z", trips="m = Constant<value = int64 {7}>()")
    report = htp_export.cost(ir.from_proto(onnx.parser.parse_model(known)))
    assert (report.modules[""].macs, report.uncounted) == (7 * 27, {})


def test_a_loop_that_runs_nobody_knows_how_often_counts_once_and_is_listed():
    unknown = LOOP.format(inputs="int64 m", trips="")
    report = htp_export.cost(ir.from_proto(onnx.parser.parse_model(unknown)))
    assert (report.modules[""].macs, report.uncounted) == (27, {"Loop": 1})
    given = htp_export.cost(ir.from_proto(onnx.parser.parse_model(unknown)), {"m": np.array(4)})
    assert (given.modules[""].macs, given.uncounted) == (4 * 27, {})


def test_a_scan_runs_once_for_each_slice():
    text = """
    <ir_version: 10, opset_import: ["": 20]>
    net (float[3] start, float[5, 3] xs, float[3, 3] w) => (float[3] last, float[5, 3] ys) {
        last, ys = Scan(start, xs) <num_scan_inputs = 1,
            body = step (float[3] s, float[3] v) => (float[3] s2, float[3] out) {
                p = MatMul(s, w)
                s2 = Add(p, v)
                out = Identity(s2)
            }>
    }
    """
    report = htp_export.cost(ir.from_proto(onnx.parser.parse_model(text)))
    whole = report.modules[""]
    assert (whole.macs, whole.other_flops, report.uncounted) == (5 * 9, 5 * 3, {})


def test_of_two_branches_the_one_that_costs_more_counts():
    report = htp_export.cost(branching())
    ran = {node.name: node.times for node in report.nodes}
    assert ran["node_yes"] + ran["node_no"] == 1
    assert report.modules["gate"].other_flops == 8


def test_a_branch_that_is_known_is_the_one_that_counts():
    text = """
    <ir_version: 10, opset_import: ["": 20]>
    net (float[n, n] x) => (float[n, n] y) {
        size = Size(x)
        limit = Constant<value = int64 {10}>()
        small = Less(size, limit)
        y = If(small) <
            then_branch = a () => (float[n, n] a1) { a1 = Relu(x) },
            else_branch = b () => (float[n, n] b1) { b1 = MatMul(x, x) }>
    }
    """
    model = onnx.parser.parse_model(text)
    assert htp_export.cost(ir.from_proto(model), dims={"n": 3}).modules[""].macs == 0
    assert htp_export.cost(ir.from_proto(model), dims={"n": 4}).modules[""].macs == 64


def test_a_function_counts_for_each_call_with_the_shapes_and_modules_of_the_call():
    report = htp_export.cost(with_function())
    assert {path: (m.macs, m.other_flops) for path, m in report.modules.items()} == {
        "": (32, 16),
        "block": (32, 8),
        "block.fc": (32, 0),
        "block.act": (0, 8),
    }


class Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) * 2
        return x


def test_a_model_with_functions_costs_what_the_flat_one_does():
    program = htp_export.export(Layers().eval(), (torch.randn(2, 8),), verbose=False)
    flat = htp_export.cost(program)
    nested = htp_export.cost(htp_export.functions(program, "layers.*").model)
    names = (
        "flops",
        "other_flops",
        "parameters",
        "weight_bytes",
        "activation_bytes",
        "self_flops",
        "peak_bytes",
    )
    for path in flat.modules:
        for name in names:
            assert getattr(nested.modules[path], name) == getattr(flat.modules[path], name), (
                path,
                name,
            )
    assert flat.modules["layers.1.2"].flops == 2 * 2 * 8 * 8


class Attending(Holding, qkv=torch.nn.Linear(16, 48)):
    """Sizes are computed from sizes: heads apart, a causal mask, half of the positions kept."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 4, 4).permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length).tril() > 0
        scores = (q @ k.transpose(-1, -2)).masked_fill(~mask, -1e4).softmax(-1)
        return (scores @ v).transpose(1, 2).reshape(batch, length, 16)[:, : length // 2]


@pytest.mark.long
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_shapes_are_those_that_onnx_runtime_finds(exporter, tmp_path):
    file = tmp_path / "model.onnx"
    x = torch.randn(2, 6, 16)
    sizes = open_sizes(exporter, x={0: "batch", 1: "length"})
    htp_export.export(
        Attending().eval(), (x,), file, verbose=False, dynamo=exporter == "dynamo", **sizes
    )
    found = {
        tensor.name: tensor.shape
        for step in run(file, dims={"batch": 3, "length": 10}).steps
        for tensor in step.outputs
        if tensor.origin == "made"
    }
    model = onnx.load(str(file))
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in found)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    made = session.run(None, {"x": np.zeros((3, 10, 16), np.float32)})
    assert found == {name: tuple(array.shape) for name, array in zip(found, made, strict=True)}


def test_values_that_would_be_large_are_not_computed():
    text = """
    <ir_version: 10, opset_import: ["": 20]>
    net (int64[4000, 1] a, int64[1, 4000] b) => (int64[n, m] y) { y = Add(a, b) }
    """
    given = {"a": np.zeros((4000, 1), np.int64), "b": np.zeros((1, 4000), np.int64)}
    made = run(parsed(text), data=given).outputs[0]
    assert (made.shape, made.value) == ((4000, 4000), None)
