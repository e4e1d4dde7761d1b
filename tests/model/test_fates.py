"""What the metadata says: fates, calls, owners, reasons, namespaces, and the keys on nodes and on the model."""

import json
from collections import Counter, OrderedDict
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import htp_export
from htp_export.format import tags
from tests.exporting import BOTH, exported, metadata
from tests.nets import NETS, Holding, x
from tests.truth import nodes_of, owners_of, tree_of


def of_type(file: onnx.ModelProto, op_type: str) -> list[dict[str, str]]:
    return [metadata(node) for node in nodes_of(file) if node.op_type == op_type]


# --- calls, owners, reasons ---------------------------------------------------


@pytest.mark.long
@BOTH
def test_calls_of_a_repeated_module_have_numbers_and_no_others_have(exporter, shared_files):
    tree = tree_of(shared_files.read("loop_of_three", exporter))
    assert tree["block"]["calls"] == tree["block.0"]["calls"] == 3
    for name, op_type, expected in (
        ("loop_of_three", "Gemm", ["0", "1", "2"]),
        ("loop_of_three", "Tanh", ["0", "1", "2"]),
        ("called_twice", "Gemm", ["0", "1"]),
        ("called_twice", "Tanh", [None]),
        ("siblings", "Gemm", [None, None]),
        ("two_parents", "Gemm", ["0", "1"]),
    ):
        assert [
            said.get("htp.call") for said in of_type(shared_files.read(name, exporter), op_type)
        ] == expected, name


@pytest.mark.long
@BOTH
def test_a_merged_node_has_its_owners_in_order_of_execution_and_the_module_around_them(
    exporter, shared_files
):
    for name, op_type, expected in (
        (
            "mask_made_in_every_layer",
            "Cast",
            [("layers", '["layers.0","layers.1","layers.2"]', "shared")],
        ),
        ("conv_bn_relu", "Conv", [("", '["0","1"]', "fused"), ("3", None, "scope")]),
    ):
        said = of_type(shared_files.read(name, exporter), op_type)
        assert [
            (each["htp.module"], each.get("htp.owners"), each["htp.reason"]) for each in said
        ] == expected
        assert all(each["namespace"] == each["htp.module"] for each in said)


@BOTH
def test_order_of_execution_is_not_order_of_registration(exporter, tmp_path):
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            siblings, _ = NETS["same_cast_in_two_siblings"].build()
            self.last, self.first = (
                siblings.get_submodule("first"),
                siblings.get_submodule("second"),
            )

        def forward(self, ids: torch.Tensor) -> Any:
            return self.first(ids) - self.last(ids).exp()

    file = exported(Backwards().eval(), {"ids": torch.tensor([[1, 5, 3]])}, exporter, tmp_path)
    (cast,) = of_type(file, "Cast")
    assert json.loads(cast["htp.owners"]) == ["first", "last"]
    assert cast["htp.module"] == cast["namespace"] == ""


@pytest.mark.long
def test_calls_in_branches_are_counted_with_those_outside(shared_files):
    file = shared_files.read("outside_and_in_a_branch", "dynamo")
    assert tree_of(file)["block"]["calls"] == tree_of(file)["block.rest.1"]["calls"] == 3
    assert [said["htp.call"] for said in of_type(file, "Sin")] == ["0", "1", "1", "2"]


@BOTH
def test_a_graph_module_has_the_class_that_was_traced(exporter, shared_files):
    file = shared_files.read("graph_module_as_the_model", exporter)
    assert file.graph.name == "ForNested"
    assert htp_export.load(file)["inner"].info.simple_class == "Traced"


# --- keys ---------------------------------------------------

SEVERAL = (
    *("siblings", "loop_of_three", "conv_bn_relu", "mask_made_in_every_layer"),
    *("odd_keys", "lstm", "dict_of_tuples"),
)
REASONS = {"scope", "shared", "fused", "flow", "parameters"}


@pytest.mark.long
@BOTH
@pytest.mark.parametrize("name", SEVERAL)
def test_every_node_and_the_model_keep_to_the_format(name, exporter, shared_files):
    file = shared_files.read(name, exporter)
    tree = tree_of(file)
    model, _ = NETS[name].build()
    assert file.ir_version >= 10
    assert file.graph.name == type(model).__name__
    written = {entry.key: entry.value for entry in file.metadata_props}
    assert len(written) == len(file.metadata_props)
    assert written["htp.version"] == "1"
    ours = {key for key in written if key.startswith("htp.")}
    stored = onnx.load(shared_files.net(name, exporter), load_external_data=False).graph.initializer
    apart = any(tensor.data_location == onnx.TensorProto.EXTERNAL for tensor in stored)
    always = {"htp.version", "htp.modules", "htp.callers", "htp.signatures"}
    always |= {"htp.parameters", "htp.frozen"}
    assert ours == always | ({"htp.data"} if apart else set())
    for entry in tree.values():
        assert set(entry) - {"with"} == {"class", "calls", "fate"}
        assert ("with" in entry) == (entry["fate"] == "fused")
    for node in nodes_of(file):
        said = metadata(node)
        counts = Counter(entry.key for entry in node.metadata_props)
        assert set(counts.values()) == {1}, f"repeated keys: {counts}"
        assert {"htp.module", "htp.reason", "namespace"} <= set(said)
        assert {key for key in said if not key.startswith("pkg.")} <= {*tags.NODE_KEYS, tags.SOURCE}
        assert said["htp.reason"] in REASONS
        assert set(owners_of(node)) <= set(tree)
        assert said["htp.module"] in tree
        assert ("htp.owners" in said) == (len(owners_of(node)) > 1)
        assert ";" not in said["namespace"]
        assert "" not in said["namespace"].split("/") or said["namespace"] == ""


@BOTH
def test_the_namespace_has_one_level_for_each_module_that_runs(exporter, shared_files):
    odd = ["a", "a%2Fb", "a-b", "a::b", "a%3Bb"]  # slashes and semicolons are no levels
    for name, expected in (
        ("odd_keys", [f"by_name.{key}" for key in (*odd, "a b", "ä%252F", "a")]),
        ("nested_sequentials", ["0/0/0/0", "1"]),
        ("mask_made_in_every_layer", [f"layers.{i}/fc" for i in range(3)]),
    ):
        nodes = [
            node
            for node in nodes_of(shared_files.read(name, exporter))
            if node.op_type in ("Gemm", "MatMul")
        ]
        assert [metadata(node)["namespace"] for node in nodes] == expected


def test_the_program_that_dynamo_returns_has_the_tags_of_the_file_and_torchs_own_keys(tmp_path):
    model, kwargs = NETS["loop_of_three"].build()
    program = htp_export.export(model, (), tmp_path / "model.onnx", kwargs=kwargs, verbose=False)
    assert program is not None
    file = onnx.load(str(tmp_path / "model.onnx"))
    assert [dict(node.metadata_props) for node in program.model.graph] == [
        metadata(node) for node in file.graph.node
    ]
    assert json.loads(program.model.metadata_props["htp.modules"]) == tree_of(file)
    assert all(metadata(node)["pkg.torch.onnx.name_scopes"] for node in file.graph.node)
    assert all("pkg.torch.onnx.fx_node" in metadata(node) for node in file.graph.node)


@pytest.mark.long
@BOTH
def test_metadata_is_under_150_bytes_a_node_on_average(exporter, shared_files):
    file = shared_files.read("transformer_encoder", exporter)
    ours = [
        entry
        for node in nodes_of(file)
        for entry in node.metadata_props
        if entry.key in tags.NODE_KEYS
    ]
    assert sum(entry.ByteSize() + 2 for entry in ours) / len(nodes_of(file)) < 150


class Second(nn.Module):
    def __init__(self, fc: nn.Module) -> None:
        super().__init__()
        self.fc, self.act = fc, nn.Softsign()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = self.act(x * 2).neg()
        return self.fc(y).sin().cos()


class Swaps(Holding, body=nn.Sequential(OrderedDict(fc=nn.Linear(4, 4))), act=nn.Sigmoid()):
    """Puts another module in place while it runs, as BigBird does for short inputs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        if isinstance(self.body, nn.Sequential):
            self.body = Second(self.body.fc)  # type: ignore[assignment]
        return self.act(self.body(y - 1)).tanh()


@pytest.mark.long
@BOTH
def test_a_module_that_is_put_in_place_while_the_model_runs_is_computed(exporter, tmp_path):
    files = []
    for export in (htp_export.export, torch.onnx.export):
        torch.manual_seed(0)
        target = tmp_path / "model.onnx"
        export(Swaps().eval(), (x(2, 4),), target, dynamo=exporter == "dynamo", verbose=False)
        files.append(onnx.load(str(target)))
    ours, torchs = files
    tagged = htp_export.load(ours)
    assert {path: tagged[path].fate for path in tagged.paths} == dict.fromkeys(
        ["", "body", "body.fc", "body.act", "act"], "computed"
    )
    assert tagged.hierarchy["body"].simple_class == "Second"
    owners = {node.op_type: node.metadata_props["htp.module"] for node in tagged.model.graph}
    expected = {
        "Exp": "",
        "Abs": "body.act",
        **dict.fromkeys(("Mul", "Neg", "Sin", "Cos"), "body"),
        "Sigmoid": "act",
    }
    assert expected.items() <= owners.items()
    assert owners["Tanh"] == ""
    names = [
        [(node.name, list(node.input), list(node.output)) for node in file.graph.node]
        for file in (ours, torchs)
    ]
    assert names[0] == names[1]
