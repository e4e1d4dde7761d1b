"""`rename` on small models made by hand, each with one trap, and on what other operations of this package write."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.editing.path_names import bodies_of, path_prefix
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from tests.functions.test_functions import equal, run
from tests.handmade import (
    branching,
    called_twice,
    encoder,
    model,
    stripped,
    tagged_node,
    value,
    weight,
    with_function,
)
from tests.nets import spread
from tests.rename.test_rename import Block, check_names, node_names, wiring


def modules(*paths: str) -> list[ModuleInfo]:
    return [ModuleInfo(path, "net.Any", 1, "computed") for path in ("", *paths)]


def outputs(named: ir.Model) -> list[list[str]]:
    return [[str(result.name) for result in node.outputs] for node in named.graph]


def one(path: str, op: str = "Relu") -> ir.Model:
    """One node of one module, and one of the root after it."""
    x = value("x")
    first = tagged_node(op, [x], path, "first")
    return model([x], [first, tagged_node("Neg", [first.outputs[0]], "", "out")], [], modules(path))


def first_name(path: str, op: str = "Relu") -> str:
    return node_names(htp_export.rename(one(path, op)).model)[0]


# --- paths ---


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("layer.0.fc", "/layer/0/fc/Relu"),
        ("a/b", "/a%2Fb/Relu"),
        ("a b\t", "/a%20b%09/Relu"),
        ("a,b:c*'\"", "/a%2Cb%3Ac%2A%27%22/Relu"),
        ("@0", "/%400/Relu"),
        ("é层", "/é层/Relu"),
        ("50%", "/50%25/Relu"),
        ("#2", "/#2/Relu"),
        ("a.", "/a//Relu"),
    ],
)
def test_odd_module_paths_have_names_that_tools_can_write(path, name):
    assert first_name(path) == name
    assert htp_export.rename(htp_export.rename(one(path)).model).nodes == {}


def test_different_paths_have_different_prefixes():
    paths = [
        "a.b",
        "a/b",
        "a%2Fb",
        "a.@1",
        "@1",
        "%401",
        "a,b",
        "a%2Cb",
        "a b",
        "a%20b",
        "a.b.",
        "#2",
        "",
        "a",
    ]
    assert len({path_prefix(path, {"", "a", "a.b"}) for path in paths}) == len(paths)


def test_a_module_that_looks_like_a_call_number_is_not_taken_for_one():
    x = value("x")
    nodes = [tagged_node("Neg", [x], "m", "a", 1), tagged_node("Neg", [x], "m.@1", "b")]
    nodes.append(tagged_node("Add", [node.outputs[0] for node in nodes], "", "sum"))
    infos = [ModuleInfo("", "Net", 1), ModuleInfo("m", "M", 2), ModuleInfo("m.@1", "N", 1)]
    assert node_names(htp_export.rename(model([x], nodes, [], infos)).model) == [
        "/m/@1/Neg",
        "/m/%401/Neg",
        "/Add",
    ]


def test_an_operator_whose_name_ends_like_a_number_takes_no_name_twice():
    x = value("x")
    nodes = [
        tagged_node(op, [x], "m", str(place))
        for place, op in enumerate(["Neg", "Neg_1", "Neg", "Neg"])
    ]
    nodes.append(tagged_node("Sum", [node.outputs[0] for node in nodes], "", "sum"))
    source = model([x], nodes, [], modules("m"))
    assert node_names(htp_export.rename(source).model) == [
        "/m/Neg",
        "/m/Neg_1",
        "/m/Neg_2",
        "/m/Neg_3",
        "/Sum",
    ]
    check_names(source)


# --- calls and shared work ---


def test_nodes_of_one_of_several_calls_have_its_number():
    assert node_names(htp_export.rename(called_twice()).model) == [
        "/block/fc/@0/Neg", "/block/fc/@1/Neg", "/block/odd/@0/Neg", "/block/@0/Neg", "/block/fc/@2/Neg",
        "/block/fc/@3/Neg", "/block/odd/@1/Neg", "/block/odd/@2/Neg", "/block/@1/Neg",
    ]  # fmt: skip


def test_a_node_of_several_modules_is_named_after_the_module_above_them():
    named = htp_export.rename(encoder()).model
    assert node_names(named) == [
        "/layer/Neg", "/layer.0/fc/Transpose", "/layer.0/fc/MatMul", "/layer.0/Add", "/layer.1/fc/MatMul",
        "/layer.1/Mul", "/Relu",
    ]  # fmt: skip
    assert list(named.graph.initializers) == ["layer.0.fc.weight", "layer.1.fc.weight"]
    assert outputs(named)[0] == ["/layer/Neg_output_0"]


def test_a_node_without_owner_is_named_as_one_of_the_root():
    source = encoder()
    source.graph[2].metadata_props.clear()
    assert node_names(htp_export.rename(source).model)[2] == "/MatMul"


# --- tensors ---


def test_inputs_and_outputs_keep_names_that_others_would_have_and_outputs_left_out_stay_so():
    x = value("/m/Neg_output_0")
    two = ir.node(
        "Dropout", [x], num_outputs=2, metadata_props={"htp.module": "m", "htp.reason": "scope"}
    )
    two.outputs[0].name, two.outputs[1].name = "kept", ""
    neg = tagged_node("Neg", [two.outputs[0]], "m", "n")
    out = tagged_node("Relu", [neg.outputs[0]], "", "/m/Dropout_output_0")
    named = htp_export.rename(model([x], [two, neg, out], [], modules("m"))).model
    assert outputs(named) == [
        ["/m/Dropout_output_0_1", ""],
        ["/m/Neg_output_0_1"],
        ["/m/Dropout_output_0"],
    ]
    assert named.graph.inputs[0].name == "/m/Neg_output_0"
    check_names(named)


def constants(*names: str) -> ir.Model:
    """The module ``m`` adds tensors of these names, one after the other; one more is not read."""
    x, weights = value("x"), [weight(name) for name in names]
    nodes = [tagged_node("Add", [x, weights[0]], "m", "h0")]
    for place, each in enumerate(weights[1:-1], 1):
        nodes.append(tagged_node("Add", [nodes[-1].outputs[0], each], "m", f"h{place}"))
    nodes.append(tagged_node("Relu", [nodes[-1].outputs[0]], "", "y"))
    source = model([x], nodes, weights, modules("m"))
    source.metadata_props["htp.parameters"] = json.dumps(
        {"": {"scale": [4]}, "m": {"weight": [4, 4], "0": [4]}}
    )
    return source


def test_weights_and_what_tools_make_of_them_keep_their_names_and_others_are_named_after_their_reader():
    source = constants(
        "m.weight", "m.0", "scale", "m.running_mean", "m.weight_quantized", "val_3", "m.7", "unread"
    )
    assert list(htp_export.rename(source).model.graph.initializers) == [
        "m.weight", "m.0", "scale", "m.running_mean", "m.weight_quantized", "/m/Add_5_input_1", "/m/Add_6_input_1",
        "/Initializer",
    ]  # fmt: skip
    check_names(source)


def numbers(source: ir.Model) -> dict[str, list[Any]]:
    """Name → numbers, of each initializer."""
    initializers = source.graph.initializers.items()
    return {
        name: each.const_value.numpy().tolist()
        for name, each in initializers
        if each.const_value is not None
    }


def test_initializers_may_take_each_others_names():
    source = constants("/m/Add_1_input_1", "/m/Add_input_1", "scale", "0")
    before = numbers(source)
    after = numbers(htp_export.rename(source).model)
    assert list(after) == ["/m/Add_input_1", "/m/Add_1_input_1", "scale", "/Initializer"]
    assert list(after.values()) == list(before.values())
    assert list(numbers(source)) == list(before)


def test_metadata_names_the_tensors_by_their_new_names_and_forgets_those_that_are_gone():
    source = encoder()
    signatures = {
        "layer.0": [[{"x": "x", "mask": "mask", "gone": "/layer/Neg_output_0"}, ["layer0", None]]]
    }
    source.metadata_props["htp.signatures"] = json.dumps(signatures)
    source.metadata_props["htp.contamination"] = json.dumps(
        [["layer.1", "mask", False], ["layer.1", "gone", True]]
    )
    values = {str(each.name): each for node in source.graph for each in node.outputs}
    values["fc0"].meta["quant_parameter_tensor_names"] = {"SCALE_TENSOR": "mask"}
    named = htp_export.rename(source)
    [call] = named.tagged.signatures["layer.0"]
    assert call.inputs == {"x": "x", "mask": "/layer/Neg_output_0", "gone": None}
    assert call.outputs == ("/layer.0/Add_output_0", None)
    assert json.loads(named.model.metadata_props["htp.contamination"]) == [
        ["layer.1", "/layer/Neg_output_0", False]
    ]
    [annotation] = ir.to_proto(named.model).graph.quantization_annotation
    assert annotation.tensor_name == "/layer.0/fc/MatMul_output_0"
    assert annotation.quant_parameter_tensor_names[0].value == "/layer/Neg_output_0"


# --- subgraphs and functions ---


def test_branches_and_what_they_read_are_named_in_the_order_of_their_attributes():
    named = htp_export.rename(branching()).model
    assert node_names(named) == ["/Neg", "/gate/If", "/gate/yes/Add", "/gate/Abs", "/Relu"]
    check_names(branching())


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_what_only_a_branch_reads_is_numbered_as_the_branch_reads_it(order):
    source = branching()
    minus, gate, _ = source.graph
    more = tagged_node("Neg", [minus.inputs[0]], "", "more")
    source.graph.insert_before(minus, more)
    [difference, _] = (body[0] for _, body in bodies_of(gate))
    read = [minus.outputs[0], more.outputs[0]]
    for place in (0, 1):
        difference.resize_inputs(2)
        difference.replace_input_with(place, read[order[place]])
    named = htp_export.rename(source)
    numbers = {"node_minus": order.index(0), "node_more": order.index(1)}
    assert {old: named.nodes[old] for old in numbers} == {
        old: ["/Neg", "/Neg_1"][k] for old, k in numbers.items()
    }


def test_the_inputs_of_a_body_are_named_after_the_node_that_holds_it():
    loop = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 20]> net (int64 n, bool go, float[2] x) => (float[2] y) {
            h = Neg(x)
            y = Loop(n, go, h) <body = b (int64 i, bool c, float[2] z) => (bool d, float[2] w) <float[1] k = {2.0}>
                { d = Identity(c) w = Mul(z, k) }>
        }"""
    )
    for node in (*loop.graph.node, *loop.graph.node[1].attribute[0].g.node):
        node.metadata_props.add(key="htp.module", value="m")
    loop.metadata_props.add(key="htp.modules", value=Hierarchy(modules("m")).to_json())
    named = check_names(loop)
    body = named.graph[1].attributes["body"].as_graph()
    assert [value.name for value in body.inputs] == [
        f"/m/Loop_body_input_{place}" for place in range(3)
    ]
    assert [value.name for value in body.outputs] == ["/m/Identity_output_0", "/m/Mul_output_0"]
    assert list(body.initializers) == ["/m/Mul_input_1"]
    feeds = [np.array(3), np.array(True), np.array([1, 2], np.float32)]
    assert equal(run(loop, feeds), run(named, feeds))


def test_a_function_keeps_its_inputs_and_outputs_and_has_names_of_its_own():
    named = htp_export.rename(with_function()).model
    function = named.functions["pkg", "Block", ""]
    assert [each.name for each in (*function.inputs, *function.outputs)] == ["a", "formal", "r"]
    assert [node.name for node in function] == ["/block/fc/MatMul", "/block/act/Relu"]
    assert [each.name for node in function for each in node.outputs] == [
        "/block/fc/MatMul_output_0",
        "r",
    ]
    assert [node.name for node in named.graph] == ["/block/Block", "/Neg"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three blocks and a head, with weights in a data file."""
    torch.manual_seed(0)
    net = spread(nn.Sequential(Block(), Block(), Block(), nn.Linear(4, 200))).eval()
    path = tmp_path_factory.mktemp("net") / "net.onnx"
    htp_export.export(net, (torch.randn(2, 4),), path, verbose=False)
    return path


def test_modules_that_are_functions_stay_functions_and_the_flat_graph_has_the_names(file):
    nested = htp_export.functions(file, "class:Block")
    named = htp_export.rename(nested)
    assert list(named.model.functions) == list(nested.model.functions) == [("htp", "Block", "")]
    flat = htp_export.inline(named)
    assert wiring(flat.model) == wiring(htp_export.rename(file).model)
    assert named.nodes == htp_export.rename(file).nodes
    assert wiring(htp_export.rename(named.model).model) == wiring(named.model)
    assert {path: len(nested.tagged[path].nodes) for path in nested.tagged} == {
        path: len(named.tagged[path].nodes) for path in named.tagged
    }


# --- files ---


def test_weights_are_not_read(file, monkeypatch):
    for read in ("tobytes", "numpy"):
        monkeypatch.setattr(
            ir.ExternalTensor, read, lambda tensor: pytest.fail(f"{tensor.name} was read")
        )
    assert len(htp_export.rename(file).nodes) == 10


def test_a_map_describes_the_named_model(file):
    named = htp_export.rename(htp_export.embed_map(file)).model
    assert htp_export.carry(stripped(named)).recovered == {"tensor": 10}


# --- after other operations, and before them ---


def test_carry_works_between_a_model_and_its_named_copy_and_after_a_tool(file, tmp_path):
    def owners(source: Any) -> list[tuple[str, ...]]:
        tagged = htp_export.load(source)
        return [tagged.owners_of(node) for node in tagged.nodes]

    named = htp_export.rename(file, tmp_path / "named.onnx")
    assert owners(htp_export.carry(file, stripped(named.model)).model) == owners(file)
    assert htp_export.carry(named, stripped(named.model)).recovered == {"tensor": 10}
    result = htp_export.tools.onnxruntime(tmp_path / "named.onnx", level="basic")
    assert [node.name for node in result.model.graph] == node_names(named.model)
    assert owners(result) == owners(file)
