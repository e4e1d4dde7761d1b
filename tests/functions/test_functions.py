"""Modules as functions of the model, and back: nesting, sharing, convexity, tags, and equal results."""

import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import htp_export
from htp_export.capabilities.functions import placing
from htp_export.command.main import main
from htp_export.errors import InputError, UntaggedModelError
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from tests import graphs, handmade
from tests.exporting import exported, tiny_bert
from tests.handmade import tagged_node, value
from tests.nets import EXPORTERS, NETS, composed


def run(model, feeds):
    """The outputs of a model, computed as the graph says: no optimisation but that functions are inlined."""
    model = model if isinstance(model, ir.Model) else ir.from_proto(model)
    onnx.checker.check_model(ir.to_proto(model))
    return graphs.run(
        model, **dict(zip([given.name for given in model.graph.inputs], feeds, strict=True))
    )


def arrays(kwargs):
    return [tensor.numpy() for tensor in kwargs.values()]


def equal(one, other):
    return len(one) == len(other) and all(
        np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True)
    )


def same_file(one, other):
    """Whether two models are equal to the last bit, but for the order in which types are listed."""
    protos = [
        ir.to_proto(ir.from_proto(m) if isinstance(m, onnx.ModelProto) else m) for m in (one, other)
    ]
    types = []
    for proto in protos:
        types.append(sorted(info.SerializeToString() for info in proto.graph.value_info))
        del proto.graph.value_info[:]
        entries = sorted((entry.key, entry.value) for entry in proto.metadata_props)
        del proto.metadata_props[:]
        types[-1].append(entries)
        for tensor in proto.graph.initializer:  # onnx_ir writes those of a message once more
            types[-1].append(
                (tensor.name, {entry.key: entry.value for entry in tensor.metadata_props})
            )
            del tensor.metadata_props[:]
    return protos[0] == protos[1] and types[0] == types[1]


def assert_same(nested, flat, feeds):
    """The functions compute what the flat model does, which comes back to the last bit."""
    assert equal(run(nested.model, feeds), run(flat, feeds))
    assert same_file(htp_export.inline(nested).model, flat)


def function(model, name):
    return model.functions["htp", name, ""]


def op_types(nodes):
    return [node.op_type for node in nodes]


def owners(nodes):
    return [htp_export.format.tags.owners_of(node.metadata_props) for node in nodes]


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """Flat files of a BERT of two layers, with its inputs, by exporter."""
    model, kwargs = tiny_bert(layers=2)
    return {
        exporter: (
            exported(model, kwargs, exporter, tmp_path_factory.mktemp(exporter)),
            arrays(kwargs),
        )
        for exporter in EXPORTERS
    }


# --- what is made ---------------------------------------------------------------------------------


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_equal_layers_share_one_function_with_their_weights_as_inputs(bert, exporter):
    flat, _ = bert[exporter]
    nested = htp_export.functions(flat, "encoder.layer.*")
    assert dict(nested.modules) == {f"encoder.layer.{k}": "htp::BertLayer" for k in range(2)}
    assert list(nested.functions) == ["htp::BertLayer"]
    calls = [node for node in nested.model.graph if node.domain == "htp"]
    assert [call.name for call in calls] == ["encoder.layer.0", "encoder.layer.1"]
    layer = function(nested.model, "BertLayer")
    position = [given.name for given in layer.inputs].index("attention.self.query.bias")
    assert [call.inputs[position].name for call in calls] == [
        f"encoder.layer.{k}.attention.self.query.bias" for k in range(2)
    ]
    assert layer.inputs[0].name == "hidden_states"
    assert [result.name for result in layer.outputs] == ["output"]
    assert nested.functions["htp::BertLayer"].calls == 2


def encoder():
    """Two layers, copies of one, as ``nn.TransformerEncoder`` makes them: their weights are equal."""
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


@pytest.mark.long
def test_arithmetic_on_sizes_that_torch_does_once_belongs_to_all_layers():
    model = encoder()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.1)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    flat = htp_export.export(model, (torch.randn(2, 5, 8),), dynamic_shapes=(sizes,), verbose=False)
    nested = htp_export.functions(flat, "class:TransformerEncoderLayer")
    assert {name: row.calls for name, row in nested.functions.items()} == {
        "htp::TransformerEncoderLayer": 2
    }
    feeds = arrays({"src": torch.randn(3, 4, 8)})
    assert equal(run(nested.model, feeds), run(flat.model, feeds))
    products = [
        owners([node])
        for node in flat.model.graph
        if node.op_type == "Mul" and not node.outputs[0].shape
    ]
    assert products == [[tuple(f"layers.{k}.self_attn" for k in range(2))]]


def test_weights_that_torchscript_joined_are_inputs_of_one_function(tmp_path):
    file = tmp_path / "encoder.onnx"
    htp_export.export(encoder(), (torch.randn(2, 5, 8),), file, dynamo=False, verbose=False)
    nested = htp_export.functions(file, "class:TransformerEncoderLayer")
    assert {name: row.calls for name, row in nested.functions.items()} == {
        "htp::TransformerEncoderLayer": 2
    }
    joined = [node for node in nested.model.graph if node.op_type == "Identity"]
    assert joined
    assert all(node.inputs[0].is_initializer() for node in joined)
    assert same_file(htp_export.inline(nested.model).model, htp_export.load(file).model)


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_functions_nest_as_modules_do_and_compute_the_same(bert, exporter):
    flat, feeds = bert[exporter]
    nested = htp_export.functions(flat, "**")
    tagged = htp_export.load(flat)
    assert set(nested.modules) == {
        path for path in tagged if path and tagged[path].fate == "computed"
    }
    assert op_types(function(nested.model, "BertLayer")) == [
        "BertAttention",
        "BertIntermediate",
        "BertOutput",
    ]
    assert op_types(function(nested.model, "BertAttention")) == [
        "BertSelfAttention",
        "BertSelfOutput",
    ]
    assert [node.name for node in function(nested.model, "BertAttention")] == ["self", "output"]
    assert nested.functions["htp::Linear"].calls == 12
    assert equal(run(nested.model, feeds), run(flat, feeds))
    onnx.shape_inference.infer_shapes(ir.to_proto(nested.model), strict_mode=True)


def test_names_in_a_function_are_unique_and_those_of_parameters_relative(bert):
    nested = htp_export.functions(bert["dynamo"][0], "**")
    for made in nested.model.functions.values():
        names = [
            v.name
            for v in (*made.inputs, *(out for node in made.all_nodes() for out in node.outputs))
        ]
        assert len(set(names)) == len(names)
        assert not made.graph.initializers
    attention = [given.name for given in function(nested.model, "BertSelfAttention").inputs]
    assert {"hidden_states", "query.weight", "query.bias", "key.bias", "value.bias"} <= set(
        attention
    )


def test_call_is_tagged_with_its_module_and_body_with_those_of_all_calls(bert):
    nested = htp_export.functions(bert["dynamo"][0], "encoder.layer.*")
    call = next(node for node in nested.model.graph if node.name == "encoder.layer.1")
    assert {key: call.metadata_props[key] for key in ("htp.module", "htp.reason", "namespace")} == {
        "htp.module": "encoder.layer.1",
        "htp.reason": "function",
        "namespace": "encoder/layer.1",
    }
    assert ("encoder.layer.0.output", "encoder.layer.1.output") in owners(
        function(nested.model, "BertLayer")
    )
    tagged = htp_export.load(nested.model)
    assert not tagged.untagged
    assert call in tagged["encoder.layer.1"].nodes
    assert len(tagged["encoder.layer.1"].nodes) > 20


def test_function_called_once_keeps_names_and_tags_of_its_nodes():
    nested = htp_export.functions(handmade.encoder(), "layer.0")
    made = function(nested.model, "Layer")
    assert [(node.name, *owner) for node, owner in zip(made, owners(made), strict=True)] == [
        ("node_turned", "layer.0.fc"),
        ("node_fc0", "layer.0.fc"),
        ("node_layer0", "layer.0"),
    ]
    assert "htp.functions" not in nested.model.metadata_props


def test_modules_of_a_class_that_compute_differently_are_numbered_and_shared_nodes_stay_outside():
    nested = htp_export.functions(handmade.encoder(), "layer.*")
    assert dict(nested.modules) == {"layer.0": "htp::Layer", "layer.1": "htp::Layer_2"}
    assert op_types(nested.model.graph) == ["Neg", "Layer", "Layer_2", "Relu"]
    assert dict(nested.outside) == {"layer.0": 1, "layer.1": 1}


def scales(*numbers, inside=""):
    """A chain of modules that each multiply by a constant; those of one layer lie in it, with work of its own."""
    last, nodes, paths = value("x"), [], [""]
    for place, number in enumerate(numbers):
        owner = f"layer{place}.scale" if inside else f"scale{place}"
        paths += [f"layer{place}"] * bool(inside) + [owner]
        constant = tagged_node("Constant", [], owner, f"c{place}")
        constant.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.float32([number])))
        nodes += [constant, tagged_node("Mul", [last, constant.outputs[0]], owner, f"m{place}")]
        if inside:
            nodes.append(tagged_node("Neg", [nodes[-1].outputs[0]], f"layer{place}", f"n{place}"))
        last = nodes[-1].outputs[0]
    classes = {path: "net.Scale" if "scale" in path else "net.Layer" for path in paths}
    modules = [ModuleInfo(path, name, 1, "computed") for path, name in classes.items()]
    return handmade.model([value_of(nodes)], nodes, [], modules)


def value_of(nodes):
    """The first input of a chain."""
    return nodes[1].inputs[0]


def test_equal_constants_are_in_the_function():
    nested = htp_export.functions(scales(2.0, 2.0), "**")
    assert op_types(function(nested.model, "Scale")) == ["Constant", "Mul"]
    assert nested.functions["htp::Scale"].calls == 2


def test_constants_that_differ_are_inputs_of_one_function():
    model = scales(2.0, 2.0, 3.0)
    nested = htp_export.functions(model, "**")
    assert set(nested.modules.values()) == {"htp::Scale"}
    assert op_types(nested.model.graph) == [
        "Constant",
        "Scale",
        "Constant",
        "Scale",
        "Constant",
        "Scale",
    ]
    assert dict(nested.outside) == {"scale0": 1, "scale1": 1, "scale2": 1}
    assert_same(nested, model, [X])


def test_constants_that_differ_between_functions_in_functions_are_inputs_of_all_around_them():
    model = scales(2.0, 3.0, 3.0, inside="layer")
    nested = htp_export.functions(model, "**")
    assert op_types(nested.model.graph) == ["Constant", "Layer"] * 3
    assert [(row.calls, row.nodes) for row in nested.functions.values()] == [(3, 1), (3, 2)]
    assert_same(nested, model, [X])


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_every_call_of_a_module_is_a_call_of_its_function(exporter, shared_files):
    flat = shared_files.read("loop_of_three", exporter)
    nested = htp_export.functions(flat, "**")
    assert [
        (node.name, node.op_type, node.metadata_props.get("htp.call"))
        for node in nested.model.graph
    ][::2] == [
        ("block", "Sequential", "0"),
        ("block#1", "Sequential", "1"),
        ("block#2", "Sequential", "2"),
    ]
    assert nested.functions["htp::Sequential"].calls == 3
    assert op_types(function(nested.model, "Sequential")) == ["Linear", "Tanh"]


def test_node_whose_call_is_not_known_is_in_the_call_whose_nodes_lie_around_it():
    model = handmade.called_twice()  # block.odd ran three times in two calls of block
    nested = htp_export.functions(model, "block")
    assert dict(nested.modules) == {"block": "htp::Block"}
    assert op_types(nested.model.graph) == ["Block", "Block_2"]
    assert [len(made) for made in nested.model.functions.values()] == [4, 5]
    assert same_file(htp_export.inline(nested).model, model)


def test_branch_is_a_function_whose_captured_tensors_are_inputs():
    model = handmade.branching()
    nested = htp_export.functions(model, "**")
    assert op_types(nested.model.graph) == ["Neg", "Gate", "Relu"]
    gate = function(nested.model, "Gate")
    assert sorted(given.name for given in gate.inputs) == ["condition", "input", "x"]
    then = next(iter(gate)).attributes["then_branch"].as_graph()
    assert op_types(then) == ["Yes"]
    x = np.float32([[1, -2, 3, -4]] * 2)
    for condition in (True, False):
        assert equal(
            run(nested.model, [x, np.array(condition)]), run(model, [x, np.array(condition)])
        )
    assert same_file(htp_export.inline(nested).model, model)


# --- sets of nodes that do not hold together --------------------------------------------------------


def chain(*owners_of_nodes):
    """A chain of nodes; each is of the module named, or of none for an empty name, and of the root for a dot."""
    x, nodes = value("x"), []
    for number, owner in enumerate(owners_of_nodes):
        source = nodes[-1].outputs[0] if nodes else x
        nodes.append(tagged_node("Neg", [source], "" if owner == "." else owner, f"v{number}"))
        if not owner:
            nodes[-1].metadata_props.clear()
    paths = ["", *sorted({owner for owner in owners_of_nodes if owner not in ("", ".")})]
    return handmade.model(
        [x], nodes, [], [ModuleInfo(path, "net.Any", 1, "computed") for path in paths]
    )


X = np.float32([[1, -2, 3, -4]] * 2)


def test_nodes_before_what_lies_between_are_left_outside():
    model = chain("a", ".", "a", "a", "a")
    nested = htp_export.functions(model, "a")
    assert op_types(nested.model.graph) == ["Neg", "Neg", "Any"]
    assert op_types(function(nested.model, "Any")) == ["Neg", "Neg", "Neg"]
    assert dict(nested.outside) == {"a": 1}
    assert_same(nested, model, [X])


def test_module_in_two_halves_stays_flat_and_what_lies_between_is_named():
    with pytest.raises(
        InputError, match=r"a: it does not hold together: node 'node_v2' of '' lies between"
    ):
        htp_export.functions(chain("a", "a", ".", "a", "a"), "a")


def test_modules_in_each_others_way_are_cut_until_the_graph_has_an_order():
    model = chain("a", "b", "a", "a", "b", "b", "b")
    nested = htp_export.functions(model, "**")
    assert set(nested.modules) == {"a", "b"}
    assert dict(nested.outside) == {"a": 1, "b": 1}
    assert equal(run(nested.model, [X]), run(model, [X]))


def test_each_set_of_modules_in_each_others_way_is_cut_alone(monkeypatch):
    looked_at = []
    level = placing._Level
    monkeypatch.setattr(
        placing,
        "_Level",
        lambda nodes, *given: looked_at.append(len(nodes)) or level(nodes, *given),
    )
    pairs = 30
    owners = [f"{name}{pair}" for pair in range(pairs) for name in "abaabbb"]
    nested = htp_export.functions(chain(*owners), "**")
    assert dict(nested.outside) == {f"{name}{pair}": 1 for pair in range(pairs) for name in "ab"}
    assert sum(looked_at) < 10 * len(owners)  # and not all of them for each pair


def test_functions_that_other_tools_nested_too_deep_leave_modules_flat():
    model = ir.to_proto(chain("a", "a"))
    opsets = [onnx.helper.make_opsetid("net", 1), onnx.helper.make_opsetid("", 20)]
    for number in range(130):
        name, domain = (f"f{number - 1}", "net") if number else ("Neg", "")
        node = onnx.helper.make_node(name, ["x"], ["y"], domain=domain)
        model.functions.append(
            onnx.helper.make_function("net", f"f{number}", ["x"], ["y"], [node], opsets)
        )
    model.opset_import.append(opsets[0])
    last = model.graph.node[-1]
    last.op_type, last.domain = "f129", "net"
    with pytest.raises(InputError, match="a: ONNX allows 100 functions inside one another"):
        htp_export.functions(model, "a")


def test_untagged_node_inside_a_module_goes_with_it():
    nested = htp_export.functions(chain("a", "", "a", "."), "a")
    assert op_types(nested.model.graph) == ["Any", "Neg"]
    assert len(function(nested.model, "Any")) == 3


def test_modules_below_one_that_stays_flat_are_still_made():
    nested = htp_export.functions(chain("a.x", "a.x", ".", "a.y", "a.y"), "**")
    assert dict(nested.modules) == {"a.x": "htp::Any", "a.y": "htp::Any"}


def test_module_that_also_runs_inside_another_keeps_what_it_did_at_its_own_place(shared_files):
    flat = shared_files.read("two_parents", "dynamo")
    nested = htp_export.functions(flat, "**")
    assert set(nested.modules) == {"left", "left.shared", "right"}
    assert same_file(htp_export.inline(nested).model, flat)


# --- and back -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("select", "exporter"),
    [
        *(("**", exporter) for exporter in EXPORTERS),
        *(("class:Linear", "dynamo"), (["**.attention", "class:BertEncoder"], "torchscript")),
    ],
)
def test_inline_gives_the_flat_file_to_the_last_bit(bert, exporter, select):
    flat, _ = bert[exporter]
    nested = htp_export.functions(flat, select)
    assert same_file(htp_export.inline(ir.to_proto(nested.model)).model, flat)


@pytest.mark.parametrize(
    ("name", "exporter"),
    [
        ("cond", "dynamo"),
        ("cond_over_self", "dynamo"),
        ("positions_from_shapes", "dynamo"),
        ("called_twice", "torchscript"),
        ("lstm", "torchscript"),
        ("odd_keys", "torchscript"),
        ("tied_weights", "torchscript"),
    ],
)
def test_nets_compute_the_same_and_come_back(name, exporter, shared_files):
    flat = shared_files.read(name, exporter)
    feeds = arrays(NETS[name].build()[1])
    nested = htp_export.functions(flat, "**")
    assert_same(nested, flat, feeds)


def test_functions_of_an_earlier_call_are_dissolved_first(bert):
    flat, _ = bert["dynamo"]
    again = htp_export.functions(htp_export.functions(flat, "**"), "encoder.layer.*")
    assert list(again.functions) == ["htp::BertLayer"]
    assert same_file(again.model, htp_export.functions(flat, "encoder.layer.*").model)


def test_without_its_record_a_file_still_comes_back_with_owners_and_unique_names(bert):
    flat, feeds = bert["dynamo"]
    nested = htp_export.functions(flat, "**").model
    del nested.metadata_props["htp.functions"]
    back = htp_export.inline(nested).model
    names = [result.name for node in back.graph for result in node.outputs]
    assert len(set(names)) == len(names) == len(flat.graph.node)
    tagged, before = htp_export.load(back), htp_export.load(flat)
    for path in before:
        assert sorted(op_types(tagged[path].nodes)) == sorted(op_types(before[path].nodes)), path
    assert equal(run(back, feeds), run(flat, feeds))


def test_what_another_inliner_makes_of_it_has_the_owner_among_the_owners(bert):
    import onnx.inliner

    nested = htp_export.functions(bert["dynamo"][0], "encoder.layer.*")
    foreign = htp_export.load(onnx.inliner.inline_local_functions(ir.to_proto(nested.model)))
    assert not foreign.untagged
    assert len(foreign["encoder.layer.1"].nodes) >= len(
        htp_export.load(bert["dynamo"][0])["encoder.layer.1"].nodes
    )


def test_inline_gives_nodes_of_other_functions_their_own_tags_or_those_of_the_call():
    model = handmade.with_function()
    body = next(iter(model.functions.values()))
    call = model.graph[0]
    call.metadata_props["htp.call"] = "1"
    untagged = next(node for node in body if node.op_type == "Relu")
    untagged.metadata_props.clear()
    inlined = htp_export.inline(model)
    assert dict(inlined.functions) == {"pkg::Block": 1}
    assert [
        (node.op_type, node.metadata_props["htp.module"], node.metadata_props.get("htp.call"))
        for node in inlined.model.graph
    ] == [("MatMul", "block.fc", None), ("Relu", "block", "1"), ("Neg", "", None)]
    assert equal(run(inlined.model, [X]), run(model, [X]))


def test_inline_of_a_flat_model_changes_nothing():
    assert same_file(htp_export.inline(handmade.encoder()).model, handmade.encoder())


# --- models, files and weights are left alone ---------------------------------------------------------


def test_model_in_memory_is_left_as_it_was_and_weights_are_not_copied():
    model = handmade.encoder()
    before = ir.to_proto(model).SerializeToString()
    nested = htp_export.functions(model, "**")
    htp_export.inline(nested)
    assert ir.to_proto(model).SerializeToString() == before
    for name, initializer in model.graph.initializers.items():
        assert nested.model.graph.initializers[name].const_value is initializer.const_value


# --- results and errors ---------------------------------------------------------------------------


def test_result_says_what_was_left_flat_and_why():
    nested = htp_export.functions(handmade.encoder(), "**")
    assert dict(nested.skipped) == {
        "": "it is the graph itself",
        "layer": "it never ran; select what it holds",
        "dropout": "it gives back what it is given",
    }
    assert nested.to_dict()["functions"]["htp::Layer"] == {
        "class_name": "net.Layer",
        "modules": ["layer.0"],
        "calls": 1,
        "nodes": 2,
        "inputs": 3,
        "outputs": 1,
    }
    assert str(nested).splitlines()[0].split() == [
        "function",
        "calls",
        "nodes",
        "inputs",
        "outputs",
        "first",
        "module",
    ]
    assert str(nested).splitlines()[-1] == "4 functions of 4 modules; left flat: 3 of 7 modules"


def test_module_whose_nodes_are_all_shared_is_flat(shared_files):
    flat = shared_files.read("equal_siblings", "dynamo")
    with pytest.raises(InputError, match="first: all its nodes are shared with other modules"):
        htp_export.functions(flat, "first")


def test_module_whose_calls_share_all_nodes_is_flat():
    doubled = composed(lambda self, x: self.fc(x) + self.fc(x), fc=torch.nn.Linear(3, 3)).eval()
    with pytest.raises(InputError, match="fc: its calls share all its nodes"):
        htp_export.functions(htp_export.export(doubled, (torch.ones(2, 3),), verbose=False), "fc")


def test_module_that_lies_in_a_function_of_the_model_is_flat():
    with pytest.raises(
        InputError, match=r"block\.fc: it lies in functions that the model has already"
    ):
        htp_export.functions(handmade.with_function(), "block.fc")


def test_models_without_tags_of_this_package_are_refused():
    bare = handmade.encoder()
    bare.metadata_props.clear()
    for node in bare.graph:
        node.metadata_props.clear()
    with pytest.raises(UntaggedModelError, match="no module tags"):
        htp_export.functions(bare, "**")
    for node in bare.graph:
        node.metadata_props["pkg.torch.onnx.name_scopes"] = "['', 'layer', 'n']"
        node.metadata_props["pkg.torch.onnx.class_hierarchy"] = "['net.Net', 'net.Layer', 'op']"
    with pytest.raises(UntaggedModelError, match="not exact enough"):
        htp_export.functions(bare, "**")


@pytest.mark.parametrize("kind", ["sequence", "optional"])
def test_a_body_that_calls_share_gives_sequences_and_optional_values_back_with_their_types(kind):
    middle = {
        "sequence": "SplitToSequence <axis = 0> ({0}) {1} = ConcatFromSequence <axis = 0>",
        "optional": "Optional ({0}) {1} = OptionalGetElement",
    }[kind]
    first, second = (
        f"m{k} = {middle.format(given, made)} (m{k})"
        for k, given, made in ((0, "x", "y"), (1, "z", "w"))
    )
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 20]>
        Net (float[3, 4] x, double[3, 4] z) => (float[3, 4] y, double[3, 4] w) {{ {first} {second} }}"""
    )
    model = ir.from_proto(onnx.shape_inference.infer_shapes(proto))
    for place, node in enumerate(model.graph):
        node.name = f"node_{place}"
        node.metadata_props.update({"htp.module": f"part.{place // 2}", "htp.reason": "scope"})
    modules = [ModuleInfo("", "net.Net", 1, "computed"), ModuleInfo("part", "torch.nn.ModuleList")]
    modules += [ModuleInfo(f"part.{place}", "net.Part", 1, "computed") for place in range(2)]
    model.metadata_props.update({"htp.version": "1", "htp.modules": Hierarchy(modules).to_json()})
    nested = htp_export.functions(model, "**")
    assert list(nested.functions) == ["htp::Part"]
    back = htp_export.inline(nested.model).model
    types = [(value.type, value.shape) for node in model.graph for value in node.outputs]
    assert types == [(value.type, value.shape) for node in back.graph for value in node.outputs]
    assert types[0][0] != types[2][0]
    assert isinstance(types[0][0], ir.SequenceType if kind == "sequence" else ir.OptionalType)


@pytest.mark.parametrize(
    "record",
    [
        "[",
        "3",
        '{"calls": 3}',
        '{"calls": {"block": []}}',
        '{"order": "x"}',
        '{"calls": {"block": {"fc": 1}}}',
        '{"calls": {"block": {"fc": {"inside": {"node_fc0": {"outputs": {"7": {}}}}}}}}',
        '{"calls": {"block": {"fc": {"inside": {"node_fc0": {"outputs": {"0": {"type": {"map": [1, null]}}}}}}}}}',
        '{"calls": {"block": {"fc": {"inside": {"node_fc0": {"outputs": {"0": {"type": {}}}}}}}}}',
    ],
)
def test_broken_record_is_refused(record):
    nested = htp_export.functions(handmade.called_twice(), "**").model
    nested.metadata_props["htp.functions"] = record
    with pytest.raises(InputError, match=r"cannot be inlined: htp\.functions"):
        htp_export.inline(nested)


def test_commands_write_the_files_and_say_what_was_made(tmp_path, capsys):
    flat, nested, back = (tmp_path / name for name in ("flat.onnx", "nested.onnx", "back.onnx"))
    htp_export.load(handmade.encoder()).save(flat)
    assert main(["functions", str(flat), "layer.*", "!layer.1", "-o", str(nested)]) == 0
    assert "htp::Layer" in capsys.readouterr().out
    assert main(["functions", str(nested), "--undo", "-o", str(back), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "schema_version": 1,
        "functions": {"htp::Layer": 1}, "nodes_before": 8, "nodes_after": 7
    }  # fmt: skip
    assert same_file(onnx.load(back), onnx.load(flat))


@pytest.fixture(scope="module")
def flat_and_nested(bert):
    flat, _ = bert["dynamo"]
    return flat, htp_export.functions(flat, "**").model


def test_a_module_of_a_nested_file_is_cut_out_and_put_back(flat_and_nested, bert):
    (flat, nested), feeds = flat_and_nested, bert["dynamo"][1]
    path, before = "encoder.layer.1.attention.self", flat.SerializeToString()
    part = htp_export.extract(nested, path)
    assert same_file(part.model, htp_export.extract(flat, path).model)
    assert equal(run(htp_export.splice(nested, path, part).model, feeds), run(flat, feeds))
    htp_export.splice(flat, path, part)
    assert flat.SerializeToString() == before  # nothing of a model in memory is renamed


def test_nested_and_flat_compare_module_by_module(flat_and_nested):
    result = htp_export.compare(*flat_and_nested)
    assert result.ok
    assert result.modules["encoder.layer.1.attention.self.query"].status == "agrees"
