"""TaggedModel: regions, boundaries, calls, selection, and what untagged models give."""

import logging
import warnings
from collections import Counter

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.errors import (
    FileError,
    InputError,
    SelectorError,
    UnknownModuleError,
    UntaggedModelError,
)
from htp_export.model.regions import Region, all_nodes
from htp_export.model.tagged import TaggedModel, load
from tests.handmade import branching, called_twice, encoder, tagged_node, value, with_function
from tests.nets import Holding


def names(values: list[ir.Value]) -> list[str | None]:
    return [found.name for found in values]


def made(region: Region) -> list[str | None]:
    """The outputs of a region's nodes, which name them."""
    return [node.outputs[0].name for node in region.nodes]


def untag(model: ir.Model) -> ir.Model:
    for node in all_nodes(model):
        node.metadata_props.clear()
    return model


def test_a_region_holds_the_nodes_at_and_below_the_module_in_graph_order():
    tagged = load(encoder())
    assert made(tagged["layer.0"]) == ["mask", "turned", "fc0", "layer0"]
    assert made(tagged["layer.0.fc"]) == ["turned", "fc0"]
    assert made(tagged["layer.1"]) == ["mask", "fc1", "layer1"]
    assert made(tagged[""]) == ["mask", "turned", "fc0", "layer0", "fc1", "layer1", "out"]
    assert [node.outputs[0].name for node in tagged["layer.0"].own_nodes] == ["mask", "layer0"]
    assert tagged["dropout"].nodes == []


def test_a_boundary_has_no_weights_and_nothing_made_of_weights_alone():
    tagged = load(encoder())
    assert (names(tagged["layer.0.fc"].inputs), names(tagged["layer.0.fc"].outputs)) == (
        ["x"],
        ["fc0"],
    )
    assert names(tagged["layer.0.fc"].parameters) == ["layer.0.fc.weight"]
    assert names(tagged["layer"].parameters) == ["layer.0.fc.weight", "layer.1.fc.weight"]
    assert (names(tagged[""].inputs), names(tagged[""].outputs)) == (["x"], ["out"])


def test_a_shared_node_lies_in_the_regions_of_all_its_owners_and_leaves_none_of_them():
    tagged = load(encoder())
    assert (names(tagged["layer.0"].inputs), names(tagged["layer.0"].outputs)) == (
        ["x"],
        ["layer0"],
    )
    assert (names(tagged["layer.1"].inputs), names(tagged["layer.1"].outputs)) == (
        ["x", "layer0"],
        ["layer1"],
    )
    assert tagged.owners_of(tagged.nodes[0]) == ("layer.0", "layer.1")
    assert tagged["layer.0"].owners_of(tagged.nodes[0]) == ("layer.0", "layer.1")


def test_a_tensor_that_somebody_else_reads_or_that_the_model_returns_does_leave():
    model = encoder()
    model.graph.append(tagged_node("Abs", [model.graph.node("node_mask").outputs[0]], "", "spy"))
    assert names(load(model)["layer.0"].outputs) == ["mask", "layer0"]
    model.graph.outputs.append(model.graph.node("node_fc0").outputs[0])
    assert names(load(model)["layer.0"].outputs) == ["mask", "fc0", "layer0"]


def test_random_values_do_enter_a_region():
    model = encoder()
    noise = ir.node(
        "RandomNormal",
        [],
        {"shape": [2, 4]},
        outputs=[value("noise")],
        metadata_props={"htp.module": ""},
    )
    model.graph.insert_before(model.graph[0], noise)
    model.graph.node("node_layer1").replace_input_with(1, noise.outputs[0])
    assert names(load(model)["layer.1"].inputs) == ["x", "layer0", "noise"]


def test_modules_say_their_class_calls_fate_and_children():
    region = load(encoder())["layer.0"]
    assert (region.path, region.class_name, region.calls, region.fate) == (
        "layer.0",
        "net.Layer",
        1,
        "computed",
    )
    assert region.info.simple_class == "Layer"
    assert region.children == ["layer.0.fc"]
    assert repr(region) == "<Region 'layer.0' (Layer): 4 nodes>"
    assert repr(load(encoder())["."]).startswith("<Region '.' (")
    assert load(encoder())["dropout"].fate == "identity"


def test_a_model_is_a_collection_of_module_paths():
    tagged = load(encoder())
    assert list(tagged) == tagged.paths
    assert tagged.paths[:3] == ["", "layer", "layer.0"]
    assert len(tagged) == 7
    assert "layer.1" in tagged
    assert "layer.2" not in tagged
    assert repr(tagged) == "<TaggedModel Net: 7 modules, tags: htp>"
    assert tagged.reasons == Counter({"scope": 6, "shared": 1})


def test_selecting_uses_paths_and_classes_and_unknown_modules_are_refused_with_the_nearest():
    tagged = load(encoder())
    assert tagged.select("layer.*") == ["layer.0", "layer.1"]
    assert tagged.select(["class:Linear", "!layer.0.**"]) == ["layer.1.fc"]
    with pytest.raises(SelectorError, match="nearest: 'layer'"):
        tagged.select("layers")
    with pytest.raises(
        UnknownModuleError, match=r"no module 'layer\.0\.fd' in this model; nearest: 'layer.0.fc'"
    ):
        tagged["layer.0.fd"]


def test_the_calls_of_a_module_split_its_region_and_what_ran_evenly_in_them():
    block = load(called_twice())["block"]
    assert made(block.call(0)) == ["fc0", "fc1", "block0"]
    assert made(block.call(1)) == ["fc2", "fc3", "block1"]
    assert names(block.call(1).inputs) == ["block0", "odd2"]
    assert names(block.call(0).outputs) == ["fc1", "block0"]
    assert repr(block.call(1)) == "<Region 'block' (Block, call 1): 3 nodes>"
    assert made(load(called_twice())["block.fc"].call(2)) == ["fc2"]
    tagged = load(encoder())
    assert tagged["layer.1"].call(0).nodes == tagged["layer.1"].nodes


@pytest.mark.parametrize(("path", "call"), [("block", 2), ("block", -1), ("unused", 0)])
def test_a_call_that_never_was_is_refused(path, call):
    with pytest.raises(InputError, match=f"module '{path}' has no call {call}: it ran"):
        load(called_twice())[path].call(call)


def test_what_a_branch_captures_enters_its_region_and_that_of_the_if():
    tagged = load(branching())
    assert made(tagged["gate"]) == ["gated", "yes", "no"]
    assert (names(tagged["gate"].inputs), names(tagged["gate"].outputs)) == (
        ["condition", "x", "minus"],
        ["gated"],
    )
    assert (names(tagged["gate.yes"].inputs), names(tagged["gate.yes"].outputs)) == (
        ["x", "minus"],
        ["yes"],
    )
    assert (names(tagged[""].inputs), names(tagged[""].outputs)) == (["x", "condition"], ["out"])


def test_an_untagged_branch_counts_with_the_if_that_holds_it():
    model = branching()
    model.graph.node("node_minus").metadata_props["htp.module"] = "gate"
    next(node for node in all_nodes(model) if node.outputs[0].name == "yes").metadata_props.clear()
    tagged = load(model)
    assert made(tagged["gate"]) == ["minus", "gated", "no"]
    assert (names(tagged["gate"].inputs), names(tagged["gate"].outputs)) == (
        ["x", "condition"],
        ["gated"],
    )
    assert [node.outputs[0].name for node in tagged.untagged] == ["yes"]


def test_modules_inside_a_function_have_regions_and_find_their_weights_at_its_call():
    tagged = load(with_function())
    assert made(tagged["block"]) == ["y", "h", "r"]
    assert (names(tagged["block"].inputs), names(tagged["block"].outputs)) == (["x"], ["y"])
    assert (names(tagged["block.fc"].inputs), names(tagged["block.fc"].outputs)) == (["a"], ["h"])
    assert names(tagged["block.fc"].parameters) == ["block.fc.weight"]
    assert (names(tagged["block.act"].inputs), names(tagged["block.act"].outputs)) == (["h"], ["r"])


def test_a_function_that_calls_itself_ends():
    model = with_function()
    (function,) = model.functions.values()
    model.graph.remove(model.graph[1])
    model.graph.outputs.clear()
    model.graph.remove(model.graph[0])
    function.graph.append(ir.node("Block", list(function.inputs), domain="pkg"))
    assert names(load(model)["block.fc"].parameters) == []


def test_models_in_memory_are_taken_as_they_are():
    model = encoder()
    tagged = load(model)
    assert tagged.model is model
    assert load(tagged) is tagged
    assert load(ir.to_proto(model)).paths == tagged.paths

    class Program:
        def __init__(self) -> None:
            self.model = model

    assert load(Program()).model is model


def test_modules_that_only_nodes_name_are_in_the_tree():
    model = called_twice()
    del model.metadata_props["htp.modules"]
    tagged = load(model)
    assert {path: tagged.hierarchy[path].calls for path in tagged} == {
        "": 1,
        "block": 2,
        "block.fc": 4,
        "block.odd": 3,
    }
    assert tagged.source == "htp"


def test_broken_module_metadata_names_the_file(tmp_path):
    model = encoder()
    model.metadata_props["htp.modules"] = "[]"
    with pytest.raises(InputError, match=r"htp\.modules is not a JSON object"):
        load(model)
    ir.save(model, tmp_path / "bad.onnx")
    with pytest.raises(FileError, match=r"bad\.onnx: htp\.modules is not a JSON object"):
        load(tmp_path / "bad.onnx")


def test_an_untagged_model_loads_and_says_how_to_tag_it_when_modules_are_asked_for():
    model = untag(encoder())
    tagged = load(model)
    assert tagged.source == "none"
    assert len(tagged.untagged) == 7
    with pytest.raises(UntaggedModelError, match=r"htp_export\.carry\(before, after\)"):
        tagged.select("**")
    model.metadata_props.clear()
    with pytest.raises(
        UntaggedModelError, match=r"'Net': it has no module tags; export it with htp_export\.export"
    ):
        load(model)["layer.0"]


@pytest.mark.parametrize("key", ["namespace", "pkg.torch.onnx.name_scopes"])
def test_a_namespace_alone_and_scopes_that_are_no_list_of_strings_are_no_tags(key):
    model = untag(encoder())
    model.metadata_props.clear()
    for node in all_nodes(model):
        node.metadata_props[key] = "__import__('os').getcwd()"
    assert load(model).source == "none"


class Block(Holding, fc=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x))


class Net(Holding, blocks=nn.ModuleList([Block(), Block()])):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x)).exp()


@pytest.mark.parametrize("dynamo", [True, False])
def test_a_file_that_torch_wrote_is_read_with_its_scopes_and_a_warning(tmp_path, dynamo, caplog):
    file = tmp_path / "net.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            Net().eval(), (torch.randn(2, 4),), file, dynamo=dynamo, verbose=False
        )
    with caplog.at_level(logging.WARNING, "htp_export"):
        tagged = load(file)
    assert tagged.source == "torch"
    assert "not exact" in caplog.text
    assert tagged.paths == ["", "blocks", "blocks.0", "blocks.0.fc", "blocks.1", "blocks.1.fc"]
    assert [node.op_type for node in tagged["blocks.1"].nodes] == ["Gemm", "Relu"]
    assert [node.op_type for node in tagged[""].own_nodes] == ["Exp"]
    assert len(tagged["blocks.1.fc"].parameters) == 2
    if program is not None:
        assert tagged.select("class:Linear") == ["blocks.0.fc", "blocks.1.fc"]
        assert [node.op_type for node in load(program)["blocks.1"].nodes] == ["Gemm", "Relu"]


def test_tagged_models_are_saved_with_their_tags(tmp_path):
    load(encoder()).save(tmp_path / "copy.onnx")
    onnx.checker.check_model(tmp_path / "copy.onnx")
    copy = load(tmp_path / "copy.onnx")
    assert isinstance(copy, TaggedModel)
    assert made(copy["layer.1"]) == ["mask", "fc1", "layer1"]
    assert copy["layer.0"].fate == "computed"


@pytest.mark.parametrize(
    "result",
    [
        lambda: htp_export.optimize(encoder(), passes=["eliminate_dead_nodes"]),
        lambda: htp_export.carry(encoder(), encoder()),
        lambda: htp_export.extract(encoder(), "layer.1"),
        lambda: htp_export.functions(encoder(), "layer.*"),
        lambda: htp_export.inline(with_function()),
    ],
)
def test_results_with_a_model_read_its_modules_once(result):
    found = result()
    assert found.tagged.model is found.model
    assert found.tagged is found.tagged
    assert found.tagged.hierarchy == load(found.model).hierarchy


def test_a_clone_has_the_modules_of_the_model_and_a_graph_of_its_own():
    tagged = load(encoder())
    clone = tagged.clone()
    assert (clone.hierarchy, clone.source) == (tagged.hierarchy, tagged.source)
    assert [node.name for node in clone.nodes] == [node.name for node in tagged.nodes]
    assert not {*clone.nodes} & {*tagged.nodes}


def test_a_model_that_was_changed_finds_its_regions_and_tensors_anew():
    tagged = load(encoder())
    assert tagged["layer"] is (before := tagged["layer"])
    assert "spy" not in tagged.values
    tagged.model.graph.append(
        tagged_node("Abs", [tagged.model.graph.node("node_fc0").outputs[0]], "layer.0", "spy")
    )
    assert made(tagged["layer.0"]) == ["mask", "turned", "fc0", "layer0"]
    assert tagged.refresh() is tagged
    assert made(tagged["layer.0"]) == ["mask", "turned", "fc0", "layer0", "spy"]
    assert "spy" in tagged.values
    assert tagged["layer"] is not before
    assert "head" in tagged.refresh(tagged.hierarchy.including({"head": 1}))


def test_a_dot_is_the_root_wherever_a_path_is_taken():
    tagged = load(encoder())
    assert tagged["."] is tagged[""]
    assert "." in tagged
    assert tagged.hierarchy["."] is tagged.hierarchy[""]
    assert list(tagged).count(".") == 0
    whole = htp_export.extract(encoder(), ".")
    assert (whole.path, whole.nodes, whole.outside) == ("", len(tagged.nodes), ())
    replaced = htp_export.splice(encoder(), ".", whole.model)
    assert (replaced.path, replaced.nodes_after) == ("", len(tagged.nodes))
