"""What is drawn of a model, and the files that other viewers read."""

import itertools
import json
import re
import tomllib
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from model_explorer_onnx.main import ONNXAdapter

import htp_export
from htp_export.capabilities.inspect import inspecting
from htp_export.capabilities.inspect.inspected import Inspected
from htp_export.capabilities.view import viewing
from htp_export.capabilities.view.inventory import take_inventory
from htp_export.capabilities.view.measures import Measure, measures_of, spread
from htp_export.capabilities.view.model_explorer import application
from htp_export.capabilities.view.model_explorer.graphs import (
    dtype_overlay,
    graph_of,
    netron_attachment,
    overlay_of,
)
from htp_export.capabilities.view.model_explorer.main import HtpExportAdapter
from htp_export.capabilities.view.page.document import asset
from htp_export.command.main import main
from htp_export.errors import InputError, UntaggedModelError
from htp_export.format.hierarchy import ModuleInfo
from htp_export.format.parameters import ModuleParameters, parameters_to_json
from htp_export.model.tagged import load
from tests import handmade
from tests.exporting import exported_net
from tests.nets import Holding

TIME = {
    "modules": {
        "": {"total_ms": 10.0, "self_ms": 1.0},
        "layer.0": {"total_ms": 4.0, "self_ms": 1.0},
        "layer.0.fc": {"total_ms": 3.0, "self_ms": 3.0},
        "layer.1": {"total_ms": 5.0, "self_ms": 2.0},
        "layer.1.fc": {"total_ms": 3.0, "self_ms": 3.0},
    },
    "kernels": [{"name": "node_fc0", "ms": 2.5}, {"name": "not_in_the_graph", "ms": 9.0}],
}


def encoder():
    return take_inventory(load(handmade.encoder()))


def test_a_module_is_drawn_with_its_nodes_weights_and_borders():
    module = encoder().modules["layer.0"]
    assert (module.nodes, module.own_nodes) == (4, (0, 3))
    assert module.operators == {"Neg": 1, "Transpose": 1, "MatMul": 1, "Add": 1}
    assert module.reasons == {"shared": 1, "scope": 3}
    assert [(tensor.name, tensor.type) for tensor in module.inputs] == [("x", "float32[2, 4]")]
    assert [tensor.name for tensor in module.outputs] == ["layer0"]
    assert module.parameters == 16
    assert module.weight_bytes == 64
    assert encoder().modules["layer.0.fc"].weights[0].type == "float32[4, 4]"


def test_a_node_knows_what_it_reads_and_where_that_is_made():
    nodes = encoder().nodes
    assert nodes[3].inputs == (("fc0", 2, 0), ("mask", 0, 0))
    assert nodes[0].inputs == (("x", None, 0),)
    assert nodes[0].owners == ("layer.0", "layer.1")
    assert nodes[0].module == "layer"


def test_edges_go_into_subgraphs_and_come_out_at_the_node_that_holds_them():
    inventory = take_inventory(load(handmade.branching()))
    named = {node.name: node for node in inventory.nodes}
    place = {node.name: position for position, node in enumerate(inventory.nodes)}
    assert [link.node for link in named["node_gated"].inputs] == [
        None,
        place["node_yes"],
        place["node_no"],
    ]
    assert ("minus", place["node_minus"], 0) in named["node_yes"].inputs


def test_the_line_of_python_is_the_innermost_frame_that_torch_wrote_down():
    model = handmade.encoder()
    frames = 'File "/a.py", line 7, in f\n    self.fc(x)\n  File "/b/linear.py", line 134, in forward\n    return F'
    for node in list(model.graph)[:2]:
        node.metadata_props["pkg.torch.onnx.stack_trace"] = frames
    inventory = take_inventory(load(model))
    assert inventory.nodes[0].source == ("/b/linear.py", 134, "forward", "return F")
    assert inventory.modules["layer.0.fc"].source == "/b/linear.py:134"


def test_a_model_without_tags_is_its_root_alone_and_says_what_to_do():
    relu = ir.node("Relu", [handmade.value("x")], outputs=[handmade.value("y")])
    inventory = take_inventory(load(handmade.model(list(relu.inputs), [relu], [], [])))
    assert list(inventory.modules) == [""]
    assert inventory.modules[""].operators == {"Relu": 1}
    assert "htp_export.export" in inventory.tags.advice
    neg = ir.node("Neg", [handmade.value("x")], outputs=[handmade.value("y")])
    lost = handmade.model(list(neg.inputs), [neg], [], [ModuleInfo("", "net.Net", 1, "computed")])
    assert "carry" in take_inventory(load(lost)).tags.advice


def test_numbers_by_module_are_found_in_objects_and_in_json():
    for result in (TIME, json.loads(json.dumps(TIME))):
        [time] = measures_of(result)
        assert (time.title, time.unit, time.additive, time.main) == ("time", "ms", True, True)
        assert time.total["layer.0"] == 4.0
        assert time.own["layer.0"] == 1.0
        assert time.nodes == {"node_fc0": 2.5, "not_in_the_graph": 9.0}
    assert (
        measures_of({"modules": {"fc": {"wobble": 2, "calls": 1, "name": "x"}}})[0].title
        == "wobble"
    )
    with pytest.raises(InputError, match="no numbers by module"):
        measures_of(3)


def test_words_of_a_result_are_kept_and_numbers_that_are_none():
    [error] = measures_of(
        {"modules": {"fc": {"max_abs": "nan", "status": "differs", "problem": "shape"}}}
    )
    assert str(error.total["fc"]) == "nan"
    assert error.words == {"fc": "differs: shape"}


def test_nodes_sum_up_to_what_their_modules_have():
    inventory = encoder()
    [time] = measures_of(TIME)
    values = dict(
        zip((node.name for node in inventory.nodes), spread(time, inventory), strict=True)
    )
    assert values["node_fc0"] == 2.5
    assert values["node_turned"] == pytest.approx(0.5)  # what is left of layer.0.fc's 3 ms
    assert values["node_out"] == 1.0
    assert values["node_mask"] == pytest.approx(0.5 + 1.0)  # a half of each layer's own
    assert sum(filter(None, values.values())) == pytest.approx(10.0)


def test_a_node_has_the_error_of_its_owner():
    inventory = encoder()
    [error] = measures_of({"modules": {"layer.0": {"max_abs": 0.5}, "layer.1": {"max_abs": 0.25}}})
    values = dict(
        zip((node.name for node in inventory.nodes), spread(error, inventory), strict=True)
    )
    assert (values["node_mask"], values["node_layer0"], values["node_layer1"]) == (0.5, 0.5, 0.25)
    assert values["node_out"] is None


def test_the_graph_has_modules_as_layers_with_their_attributes():
    drawn = graph_of(encoder(), measures_of(TIME), keep_layers=False)
    spaces = {node["id"]: node["namespace"] for node in drawn["nodes"]}
    assert spaces["node_fc0"] == "layer.0/fc"
    assert spaces["node_mask"] == "layer"
    said = drawn["groupNodeAttributes"]["layer.0/fc"]
    assert (said["class"], said["time"]) == ("torch.nn.modules.linear.Linear", "3 ms")
    edges = next(node for node in drawn["nodes"] if node["id"] == "node_layer0")["incomingEdges"]
    assert [edge["sourceNodeId"] for edge in edges] == ["node_fc0", "node_mask"]
    assert [node["label"] for node in drawn["nodes"]][-2:] == ["Input: x", "Output: out"]


def test_small_constants_are_kept_and_large_ones_are_not_read():
    x, shape = (
        handmade.value("x"),
        ir.Value(name="shape", const_value=ir.tensor([8, -1], name="shape")),
    )
    away = ir.ExternalTensor(
        "no.data", 0, 8, ir.DataType.INT64, shape=ir.Shape([1]), name="away", base_dir="nowhere"
    )
    node = handmade.tagged_node("Reshape", [x, shape], "fc", "flat")
    other = handmade.tagged_node(
        "Gather", [x, ir.Value(name="away", const_value=away)], "fc", "picked"
    )
    weights = [shape, other.inputs[1], handmade.weight("fc.weight", 5)]
    modules = [ModuleInfo("", "net.Net", 1, "computed"), ModuleInfo("fc", "net.Fc", 1, "computed")]
    inventory = take_inventory(load(handmade.model([x], [node, other], weights, modules)))
    values = {tensor.name: tensor.value for tensor in inventory.constants}
    assert values == {"shape": "[8, -1]", "away": "", "fc.weight": ""}
    assert not inventory.statistics


def test_a_tied_parameter_is_marked_at_the_module_that_holds_it_second():
    model = handmade.encoder()
    second = ModuleParameters({"weight": (4, 4)}, {"weight": "layer.0.fc.weight"})
    held = {"layer.0.fc": ModuleParameters({"weight": (4, 4)}), "layer.1.fc": second}
    model.metadata_props["htp.parameters"] = parameters_to_json(held)
    modules = take_inventory(load(model)).modules
    tied = {path: dict(module.tied) for path, module in modules.items() if module.tied}
    assert tied == {"layer.1.fc": {"layer.1.fc.weight": "layer.0.fc.weight"}}
    assert (modules[""].parameters, modules["layer.1.fc"].parameters) == (16, 16)
    counted = {
        path: modules[path].counted_parameters
        for path in ("", "layer.0", "layer.0.fc", "layer.1", "layer.1.fc")
    }
    assert counted == {"": 16, "layer.0": 16, "layer.0.fc": 16, "layer.1": 0, "layer.1.fc": 0}


def test_nodes_without_a_name_of_their_own_are_told_apart():
    model = handmade.encoder()
    for node in model.graph:
        node.name = "same"
    ids = [node["id"] for node in graph_of(take_inventory(load(model)))["nodes"]]
    assert len(ids) == len(set(ids))


def test_overlays_hold_a_value_and_a_colour_for_each_node():
    overlay = overlay_of(measures_of(TIME)[0], encoder())
    assert overlay["results"]["node_fc1"] == {"value": 3.0, "bgColor": "#d7301f"}
    assert overlay["name"] == "time (ms)"
    counted = Measure(
        "flops",
        "FLOPs",
        additive=True,
        total={"layer.0.fc": 12345678.0},
        own={"layer.0.fc": 12345678.0},
    )
    values = [result["value"] for result in overlay_of(counted, encoder())["results"].values()]
    assert sum(values) == 12345678
    nothing = overlay_of(Measure("flops", "FLOPs", additive=True), encoder())
    assert nothing["results"] == {}
    assert dtype_overlay(encoder())["results"]["node_fc0"]["value"] == "float32"


def test_netrons_sidecar_has_short_values_for_nodes_that_have_a_name():
    sidecar = netron_attachment(encoder(), measures_of(TIME))
    assert sidecar["signature"] == "netron:attachment"
    said = {
        (entry["target"], entry["name"]): entry["value"]
        for key in ("metadata", "metrics")
        for entry in sidecar[key]
    }
    assert said["node_fc0", "module"] == "layer.0.fc"
    assert said["node_fc0", "class"] == "Linear"
    assert said["node_mask", "owners"] == "layer.0, layer.1"
    assert said["node_fc0", "time"] == "2.5 ms"
    assert said["node_fc0", "time of the module"] == "3 ms"
    assert said["", "time"] == "10 ms"


@pytest.fixture(scope="module")
def exported_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    exported_net("mask_made_in_every_layer", "dynamo", folder)
    return folder / "model.onnx"


def layers_in(adapter, file) -> set[str]:
    """The layers that Model Explorer makes of what an adapter gives it: all prefixes of the nodes' namespaces."""
    [graph] = adapter.convert(str(file), {})["graphs"]
    spaces = {
        node.namespace
        for node in graph.nodes
        if not node.label.startswith(("Input", "Output", "Initializer"))
    }
    return {space for full in spaces for space in prefixes(full)}


def prefixes(space: str) -> list[str]:
    parts = space.split("/") if space else []
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]


def expected_layers(file) -> set[str]:
    tagged = load(file)
    spaces = {node.metadata_props["namespace"] for node in tagged.nodes}
    return {prefix for space in spaces for prefix in prefixes(space)}


def test_model_explorers_adapter_draws_the_modules_that_have_nodes_as_layers(exported_file):
    assert layers_in(HtpExportAdapter(), exported_file) == expected_layers(exported_file)
    [graph] = HtpExportAdapter().convert(str(exported_file), {})["graphs"]
    some = next(iter(expected_layers(exported_file)))
    assert "class" in graph.groupNodeAttributes[some]
    hidden = [node for node in graph.nodes if node.label in graph.nodeLabelsToHide]
    assert {node.namespace for node in hidden} == {node.namespace for node in graph.nodes} - {""}


def test_an_adapter_that_knows_nothing_of_our_tags_draws_the_same_layers(exported_file):
    root = onnx.load(str(exported_file), load_external_data=False).graph.name
    found = {
        space.removeprefix(f"{root}/") for space in layers_in(ONNXAdapter(), exported_file)
    } - {root}
    assert found == expected_layers(exported_file)


def test_without_model_explorer_the_page_is_written_and_says_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(application.util, "find_spec", lambda name: None)
    shown = htp_export.view(handmade.encoder(), tmp_path / "bare.html")
    assert "pip install 'htp-export[view]'" in shown.missing
    assert "htp-export[view]" in (tmp_path / "bare.html").read_text(encoding="utf-8")


def test_the_extra_allows_the_versions_that_pages_were_tested_with():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    first, *_, last = application._TESTED
    assert project["optional-dependencies"]["view"] == [f"ai-edge-model-explorer>={first},<={last}"]


def test_a_file_of_functions_is_drawn_flat():
    shown = htp_export.view(handmade.with_function(), explorer=False)
    assert shown.nodes == 3
    assert '"MatMul"' in shown.html


@pytest.fixture
def without_dynamo(monkeypatch):
    """The last way, parts, for models of which Dynamo makes graphs."""
    ways = {name: way for name, way in inspecting._WAYS.items() if name != "dynamo"}
    monkeypatch.setattr(inspecting, "_WAYS", ways)  # an item put back would stand behind the others


class Bad(Holding, inner=torch.nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x)
        return y if y.sum().item() > 0 else -y


class Half(Holding, good=torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), bad=Bad()):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bad(self.good(x))


@pytest.mark.long
def test_a_model_that_exports_in_parts_shows_them_with_their_costs_and_what_failed(
    without_dynamo, capsys
):
    net = Half().eval()
    shown = htp_export.view(net, torch.ones(2, 4), explorer=False, weights=True)
    assert "def forward" not in capsys.readouterr().err  # torch's graph of what failed
    assert set(shown.failures) == {"", "bad"}
    assert shown.failures[""] == "because of bad"
    assert shown.failures["bad"]
    data = page_data_of(shown.html)
    nodes = {module["path"]: module["nodes"] for module in data["modules"]}
    assert (nodes["good.0"], nodes["good"], nodes["bad.inner"], nodes[""]) == (1, 2, 1, 3)
    assert not any(module._forward_pre_hooks for module in net.modules())
    flops = next(measure for measure in data["measures"] if measure["key"] == "flops")
    linear = 2 * 2 * 4 * 4
    expected = {
        "": 2 * linear,
        "good": linear,
        "good.0": linear,
        "good.1": 0,
        "bad": linear,
        "bad.inner": linear,
    }
    assert dict(zip(nodes, flops["total"], strict=True)) == expected
    assert [value for value in flops["nodes"] if value] == [linear, linear]


def page_data_of(page: str, name: str = "data"):
    return json.loads(re.search(rf'id="{name}">(.*?)</script>', page, re.DOTALL)[1])


def test_a_page_has_the_costs_of_its_nodes_and_the_parameters_that_they_read():
    model = handmade.encoder()
    costs = htp_export.cost(model)
    data = page_data_of(htp_export.view(model, explorer=False).html)
    measures = {measure["key"]: measure for measure in data["measures"]}
    assert list(measures) == ["flops", "other_flops", "activation_bytes"]
    for key, measure in measures.items():
        paths = [module["path"] for module in data["modules"]]
        assert measure["total"] == [getattr(costs.modules[path], key) for path in paths]
        assert measure["nodes"] == [getattr(node, key) for node in costs.nodes]
        assert measure["said"] is True
    assert sum(measures["flops"]["nodes"]) > 0
    read = {node["name"]: node["parameters"] for node in data["nodes"] if "parameters" in node}
    assert read == {"node_turned": 16, "node_fc1": 16}


def test_numbers_that_the_user_gives_replace_those_that_view_computes():
    given = {"modules": {"": {"flops": 7.0, "total_ms": 1.0}}}
    data = page_data_of(htp_export.view(handmade.encoder(), explorer=False, results=[given]).html)
    keys = [measure["key"] for measure in data["measures"]]
    assert sorted(keys) == ["activation_bytes", "flops", "other_flops", "total_ms"]
    assert data["measures"][keys.index("flops")]["total"][0] == 7


def test_work_of_an_operator_without_a_formula_is_not_written_as_zero():
    x = handmade.value("x")
    node = handmade.tagged_node("Neg", [x], "a", "y")
    node.domain, node.op_type = "some.domain", "Unheard"
    model = handmade.model([x], [node], [], [ModuleInfo("", "net.Net", 1, "computed")])
    model.graph.opset_imports["some.domain"] = 1
    data = page_data_of(htp_export.view(model, explorer=False).html)
    measures = {measure["key"]: measure for measure in data["measures"]}
    assert (measures["flops"]["nodes"], measures["flops"]["said"]) == ([None], [])
    assert measures["activation_bytes"]["said"] is True


def test_a_page_says_which_sizes_its_costs_are_for():
    x = ir.val("x", ir.DataType.FLOAT, ["batch", 4])
    model = handmade.model([x], [handmade.tagged_node("Neg", [x], "", "y")], [], [])
    shown = htp_export.view(model, explorer=False)
    [graph] = page_data_of(shown.html, "graphs")
    assert graph["note"] == "FLOPs and activations: size 'batch' is 1."


def test_a_model_whose_costs_cannot_be_computed_is_drawn_without_them():
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT))
    model = handmade.model([x], [handmade.tagged_node("Neg", [x], "", "y")], [], [])
    shown = htp_export.view(model, explorer=False)
    assert page_data_of(shown.html)["measures"] == []
    assert page_data_of(shown.html, "graphs")[0]["note"].startswith(
        "FLOPs and activations are not known: "
    )


@pytest.mark.long
def test_parts_that_are_alike_stand_each_at_their_own_place(without_dynamo):
    shown = htp_export.view(
        torch.nn.Sequential(Half(), Half()).eval(), torch.ones(2, 4), explorer=False
    )
    assert {path for path, why in shown.failures.items() if not why.startswith("because")} == {
        "0.bad",
        "1.bad",
    }
    data = page_data_of(shown.html)
    nodes = [(node["owners"], node["op"], node["name"].split("/")[0]) for node in data["nodes"]]
    part = [
        ("good.0", "Gemm", "good"),
        ("good.1", "Relu", "good"),
        ("bad.inner", "Gemm", "bad.inner"),
    ]
    assert nodes == [
        ([f"{k}.{path}"], op, f"{k}.{name}") for k in (0, 1) for path, op, name in part
    ]


def test_a_view_shows_itself_in_a_notebook():
    shown = htp_export.view(handmade.encoder(), explorer=False)
    frame = shown._repr_html_()
    assert frame.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert '"' not in re.match(r'<iframe srcdoc="(.*?)" style', frame, re.DOTALL)[1]


def test_a_tagged_model_shows_its_tree_in_a_notebook_as_text():
    model = handmade.encoder()
    model.metadata_props["htp.modules"] = model.metadata_props["htp.modules"].replace(
        "net.Layer", "net.<b>"
    )
    drawn = load(model)._repr_html_()
    assert "layer.0.fc" in drawn
    assert "&lt;b&gt;" in drawn
    assert "<b>" not in drawn
    assert "6 captured at export, 1 shared by several modules" in drawn
    # the root and both layers; "layer" never ran
    assert drawn.count("<details") == drawn.count("</details>") == 3
    assert ">layer.1 <" in drawn
    assert "Linear · 2 nodes" in drawn


def test_the_command_writes_pages_overlays_and_sidecars(tmp_path, capsys):
    file, time = tmp_path / "net.onnx", tmp_path / "time.json"
    load(handmade.encoder()).save(file)
    time.write_text(json.dumps(TIME), encoding="utf-8")
    assert main(["view", str(file), "--no-explorer", "--profile", str(time)]) == 0
    # As `info` counts them: with the container, which has no row.
    assert "7 modules, 7 nodes" in capsys.readouterr().out
    assert htp_export.info(file).modules == 7
    assert '"total_ms"' in (tmp_path / "net.html").read_text(encoding="utf-8")
    assert main(["view", str(file), "--overlay", "latency", "--profile", str(time)]) == 0
    assert (
        json.loads((tmp_path / "net.latency.json").read_text())["results"]["node_fc0"]["value"]
        == 2.5
    )
    assert main(["view", str(file), "--netron", "-o", str(tmp_path / "side.json")]) == 0
    assert json.loads((tmp_path / "side.json").read_text())["signature"] == "netron:attachment"


def test_the_page_measures_what_it_is_asked_to(tmp_path, capsys):
    file = tmp_path / "net.onnx"
    load(handmade.encoder()).save(file)
    keys = {"time": "total_ms", "cost": "peak_bytes"}
    for measure in ("time", ("cost",), "time, cost", ["cost", "time", "cost"]):
        data = page_data_of(htp_export.view(file, measure=measure, explorer=False).html)
        found = [entry["key"] for entry in data["measures"]]
        assert {kind for kind, key in keys.items() if key in found} == {
            kind for kind in keys if kind in measure
        }
        assert len(found) == len(set(found))
        assert bool(data["offer"]) == ("time" not in measure)
    given = htp_export.view(file, results=[TIME], measure="cost", explorer=False)
    assert page_data_of(given.html)["measures"][0]["total"][0] == 10.0
    command = ["view", str(file), "--no-explorer"]
    assert main([*command, "--measure", "time,cost", "--json"]) == 0
    assert '"peak_bytes"' in (tmp_path / "net.html").read_text(encoding="utf-8")
    assert main(["view", str(file), "--overlay", "latency", "--measure", "time"]) == 0
    assert json.loads((tmp_path / "net.latency.json").read_text())["name"] == "time (ms)"


def test_what_is_measured_runs_on_the_sizes_that_are_given_and_the_page_says_no_others(tmp_path):
    file = str(tmp_path / "net.onnx")
    dynamic = {"dynamic_shapes": ({0: "batch"},), "verbose": False}
    htp_export.export(torch.nn.Linear(3, 2).eval(), (torch.ones(2, 3),), file, **dynamic)

    def flops(**given):
        data = page_data_of(htp_export.view(file, measure="cost", explorer=False, **given).html)
        return next(entry["total"][0] for entry in data["measures"] if entry["key"] == "flops")

    shown = htp_export.view(file, measure="cost", dims={"batch": 8}, explorer=False)
    # the batch is 8 in all of its numbers
    assert page_data_of(shown.html, "graphs")[0]["note"] == ""
    assert (
        flops(dims={"batch": 8})
        == flops(data={"input": np.ones((8, 3), np.float32)})
        == 8 * flops()
    )
    assert (
        main(["view", file, "--measure", "cost", "--dims", "batch=8", "--no-explorer", "--json"])
        == 0
    )
    with pytest.raises(InputError, match="give measure, too"):
        htp_export.view(file, dims={"batch": 8})


def test_a_pytorch_model_is_measured_if_it_exports():
    shown = htp_export.view(
        torch.nn.Linear(3, 2).eval(), torch.ones(1, 3), measure=("time", "cost"), explorer=False
    )
    data = page_data_of(shown.html)
    assert {"total_ms", "peak_bytes"} <= {entry["key"] for entry in data["measures"]}
    assert data["offer"] == data["file"] == ""  # there is no file to name
    with pytest.raises(InputError, match="times need an ONNX model"):
        htp_export.view(
            Inspected(handmade.encoder(), "torch.export"), measure="time", explorer=False
        )


def test_a_file_without_tags_has_no_times_and_none_are_offered(tmp_path):
    relu = ir.node("Relu", [handmade.value("x")], outputs=[handmade.value("y")])
    load(handmade.model(list(relu.inputs), [relu], [], [])).save(tmp_path / "bare.onnx")
    assert page_data_of(htp_export.view(tmp_path / "bare.onnx", explorer=False).html)["offer"] == ""
    with pytest.raises(UntaggedModelError):
        htp_export.view(tmp_path / "bare.onnx", measure="time", explorer=False)


def test_large_models_have_model_explorer_on_demand(tmp_path, monkeypatch, capsys):
    file = tmp_path / "net.onnx"
    load(handmade.encoder()).save(file)
    assert htp_export.view(file).missing == ""
    monkeypatch.setattr(viewing, "_MOST_NODES", 6)
    shown = htp_export.view(file)
    assert "explorer-drawing-0" not in shown.html
    assert shown.missing.startswith("of 7 nodes")
    assert (
        "--explorer (in Python: view(..., explorer=True)) puts it in"
        in page_data_of(shown.html)["missing_explorer"]
    )
    assert main(["view", str(file)]) == 0
    assert (
        "without Model Explorer: of 7 nodes, it would make the page large and slow; --explorer puts it in"
        in (" ".join(capsys.readouterr().out.split()))
    )
    assert 'id="explorer-drawing-0"' in htp_export.view(file, explorer=True).html


def test_the_page_of_a_difference_says_what_changed_and_what_is_known(tmp_path):
    before, after = tmp_path / "a.onnx", tmp_path / "b.onnx"
    load(handmade.encoder()).save(before)
    changed = handmade.encoder()
    changed.graph[6].op_type = "Abs"
    load(changed).save(after)
    assert main(["diff", str(before), str(after), "-o", str(tmp_path / "diff.html")]) == 0
    data = page_data_of((tmp_path / "diff.html").read_text(encoding="utf-8"))
    assert {row["path"]: row["status"] for row in data["rows"]}[""] == "changed"
    assert {row["path"]: row["status"] for row in data["rows"]}["layer.0"] == "same"
    evidence = [["captured at export", 6, ["scope"]], ["shared by several modules", 1, ["shared"]]]
    known = {
        "source": "htp",
        "headline": "every node has a module",
        "untagged": 0,
        "evidence": evidence,
    }
    assert data["files"] == [{"name": "a.onnx", **known}, {"name": "b.onnx", **known}]
    assert data["notes"] == []
    assert data["columns"] == ["nodes", "parameters", "weight_bytes"]


def test_every_word_for_how_owners_are_known_is_explained_in_pages():
    docs = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
    tables = docs.split("| `htp.reason` | the owners are known from |")[1:]
    documented = {
        word
        for table in tables
        for word in re.findall(r"^\| `(\w+)` \|", table.split("\n\n")[0], re.M)
    }
    assert documented == set(re.findall(r"^  (\w+): \[", asset("reasons.js"), re.M))


def linear(colour: str) -> np.ndarray:
    channels = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """WCAG 2.2, "contrast ratio"."""
    light, dark = sorted(
        (linear(colour) @ [0.2126, 0.7152, 0.0722] for colour in (one, other)), reverse=True
    )
    return float((light + 0.05) / (dark + 0.05))


def variables(theme: str) -> dict[str, str]:
    block = asset("page.css").split(theme, 1)[1].split("}", 1)[0]
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))


def test_text_has_enough_contrast_on_everything_that_it_stands_on():
    pairs = re.findall(r'\["#\w{6}", "#\w{6}"\]', asset("colours.js"))
    palette = [re.findall(r"#[0-9a-f]{6}", pair) for pair in pairs][2:]
    for theme, name in enumerate((":root {", ':root[data-theme="dark"] {')):
        colours = variables(name)
        assert min(contrast(colours["text"], pair[theme]) for pair in palette) >= 4.5
        plain = itertools.product(("text", "soft", "faint", "accent", "node"), ("ground", "raised"))
        pills = (
            ("accent", "accent-soft"),
            ("warn", "warn-soft"),
            ("bad", "bad-soft"),
            ("text", "accent-soft"),
            ("soft", "accent-soft"),
        )
        for text, ground in (*plain, *pills):
            assert contrast(colours[text], colours[ground]) >= 4.5, (name, text, ground)
