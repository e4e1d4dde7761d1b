"""`rename`: names of nodes and tensors that are made of tags and of the graph alone, and carry the module tree."""

import io
import json
import random
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.editing.path_names import path_prefix
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.model.regions import all_nodes, all_values
from htp_export.model.tensor_names import rename
from htp_export.shapes.operator_kinds import subgraphs
from tests import nets
from tests.exporting import BOTH, quick
from tests.functions.test_functions import arrays, equal, run
from tests.nets import Holding, spread

QUICK = ("called_twice", "names_that_end_alike", "uneven_calls")
NAMES = [
    *QUICK, "called_from_outside", "calls_itself", "child_of_two_parents", "cond", "conv_bn_relu", "gru",
    "loop_of_three", "mask_made_in_every_layer", "modules_in_branches", "odd_keys", "siblings", "tied_weights",
]  # fmt: skip


def is_parameter(name: str, tagged: htp_export.TaggedModel) -> bool:
    """Whether a tensor has the name of a parameter, or of something else that a module holds."""
    return name in (tagged.declared or ()) or (name.rpartition(".")[0] in tagged and "." in name)


def scrambled(model: Any, seed: int) -> ir.Model:
    """The same model with other names, and with independent nodes and initializers in another order."""
    chosen, copy = random.Random(seed), htp_export.load(model).model.clone()
    tagged = htp_export.load(copy)
    interface = {*copy.graph.inputs, *copy.graph.outputs}
    free = [value for value in all_values(copy.graph) if value.name and value not in interface]
    free = [value for value in free if not is_parameter(str(value.name), tagged)]
    for number, value in enumerate(chosen.sample(free, len(free))):
        rename(value, f"{chosen.choice('az/:.')}{number}")
    for number, node in enumerate(chosen.sample(tagged.nodes, len(tagged.nodes))):
        node.name = f"{chosen.choice('az/:.')}{number}"
    for graph in (copy.graph, *copy.graph.subgraphs()):
        shuffle(graph, chosen)
    return copy


def shuffle(graph: ir.Graph, chosen: random.Random) -> None:
    """Put the nodes of a graph in another order in which they can run, and its initializers in any."""
    waiting, placed = list(graph), list[ir.Node]()
    while waiting:
        ready = [node for node in waiting if not (producers(node, graph) - {*placed})]
        placed.append(chosen.choice(ready))
        waiting.remove(placed[-1])
    graph.remove(placed)
    graph.extend(placed)
    initializers = list(graph.initializers.values())
    graph.initializers.clear()
    for value in chosen.sample(initializers, len(initializers)):
        graph.initializers.add(value)


def producers(node: ir.Node, graph: ir.Graph) -> set[ir.Node]:
    read = [
        *node.inputs,
        *(
            value
            for body in subgraphs(node)
            for inner in body.all_nodes()
            for value in inner.inputs
        ),
    ]
    makers = (value.producer() for value in read if value is not None)
    return {
        maker
        for maker in makers
        if maker is not None and maker.graph is graph and maker is not node
    }


def wiring(model: ir.Model) -> list[Any]:
    """Names of nodes, and what they read and make, in no order."""
    return sorted(
        (
            str(node.name),
            node.op_type,
            [v and v.name for v in node.inputs],
            [v.name for v in node.outputs],
        )
        for node in all_nodes(model)
    )


def node_names(model: ir.Model) -> list[str]:
    return [str(node.name) for node in all_nodes(model)]


def facts(model: Any) -> list[Any]:
    """Operators, tags and owners of every node."""
    tagged = htp_export.load(model)
    return [
        (node.op_type, dict(node.metadata_props), tagged.owners_of(node)) for node in tagged.nodes
    ]


def check_names(file: Any) -> ir.Model:
    """Everything that holds of the names of any model."""
    before, named = htp_export.load(file), htp_export.rename(file)
    names, values = (
        node_names(named.model),
        [v.name for v in dict.fromkeys(all_values(named.model.graph)) if v.name],
    )
    assert len(set(names)) == len(names)
    assert len(set(values)) == len(values)
    assert facts(named.model) == facts(file)
    for path in [path for path, module in before.hierarchy.items() if module.calls]:
        prefix = path_prefix(path, before.hierarchy.called)
        inside = [
            all(tags.is_under(owner, path) for owner in before.owners_of(node))
            for node in before.nodes
        ]
        assert [name.startswith(prefix) for name in names] == inside
    assert wiring(htp_export.rename(scrambled(file, 1)).model) == wiring(named.model)
    again = htp_export.rename(named.model)
    assert (again.nodes, again.tensors) == ({}, {})
    assert wiring(again.model) == wiring(named.model)
    for old, new in zip(before.model.graph.inputs, named.model.graph.inputs, strict=True):
        assert old.name == new.name
    assert [value.name for value in before.model.graph.outputs] == [
        value.name for value in named.model.graph.outputs
    ]
    signed = [call for calls in named.tagged.signatures.values() for call in calls]
    assert {name for call in signed for name in call.taken | call.given} <= set(values)
    return named.model


# --- what holds of every model ---


@BOTH
@pytest.mark.parametrize("name", quick(NAMES, *QUICK))
def test_names_are_unique_stable_idempotent_and_tell_the_module_exactly(
    name, exporter, shared_files
):
    if exporter in nets.NETS[name].skip:
        pytest.skip("torch cannot export it so")
    file = shared_files.read(name, exporter)
    named = check_names(file)
    _, kwargs = nets.NETS[name].build()
    before, feeds = htp_export.load(file).model, arrays(kwargs)[: len(named.graph.inputs)]
    assert equal(run(before, feeds), run(named, feeds))


# --- on the way of the export ---


class Block(Holding, fc=nn.Linear(4, 4), act=nn.ReLU()):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.fc(x))


def net() -> nn.Module:
    torch.manual_seed(0)
    return spread(nn.Sequential(Block(), Block(), nn.Linear(4, 2))).eval()


X = torch.randn(2, 4)
BLOCKS = ["/0/fc/Gemm", "/0/act/Relu", "/0/Add", "/1/fc/Gemm", "/1/act/Relu", "/1/Add", "/2/Gemm"]


@BOTH
def test_an_export_names_what_it_writes(exporter, tmp_path):
    model, kwargs = nets.NETS["names_that_end_alike"].build()  # TorchScript shortens their paths
    files = [tmp_path / "torch.onnx", tmp_path / "named.onnx"]
    for file, options in zip(files, ({}, {"names": "path"}), strict=True):
        htp_export.export(
            model, (), file, kwargs=kwargs, dynamo=exporter == "dynamo", verbose=False, **options
        )
    torchs, named = (htp_export.load(file).model for file in files)
    assert wiring(named) == wiring(htp_export.rename(files[0]).model) != wiring(torchs)
    assert facts(files[1]) == facts(files[0])
    assert sorted(file.name for file in tmp_path.iterdir() if "data" not in file.name) == [
        "named.onnx",
        "torch.onnx",
    ]


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "canonicalize_output_graph_node_order"),
    reason="torch knows one way to name FX nodes",
)
def test_names_stay_when_torch_calls_its_fx_nodes_otherwise():
    model, kwargs = nets.NETS["siblings"].build()
    outputs = {"output_names": ["first", "second"], "kwargs": kwargs, "verbose": False}
    models = []
    for canonical in (False, True):
        with torch._dynamo.config.patch(canonicalize_output_graph_node_order=canonical):
            models.append(
                [
                    htp_export.export(model, **outputs, **options).model
                    for options in ({}, {"names": "path"})
                ]
            )
    (torchs, named), (torchs_now, named_now) = models
    assert node_names(torchs) != node_names(torchs_now)
    assert wiring(named) == wiring(named_now)


def test_an_exported_program_is_named_and_runs_and_saves():
    program = htp_export.export(net(), (X,), names="path", verbose=False)
    assert program is not None
    assert node_names(program.model) == BLOCKS
    assert torch.equal(program(X)[0], htp_export.export(net(), (X,), verbose=False)(X)[0])  # type: ignore[misc]


def test_a_stream_gets_the_named_model():
    stream = io.BytesIO()
    htp_export.export(net(), (X,), stream, names="path", dynamo=False, verbose=False)
    assert [
        node.name for node in onnx.load_model_from_string(stream.getvalue()).graph.node
    ] == BLOCKS


@BOTH
def test_functions_are_made_of_the_named_graph(exporter, tmp_path):
    file = tmp_path / "nested.onnx"
    options: dict[str, Any] = {"dynamo": exporter == "dynamo", "verbose": False}
    htp_export.export(
        net(), (X,), file, names="path", export_modules_as_functions={Block}, **options
    )
    assert list(htp_export.load(file).model.functions) == [("htp", "Block", "")]
    assert node_names(htp_export.inline(file).model) == BLOCKS


def test_names_survive_the_end_of_tagging():
    with htp_export.tagging():
        program = htp_export.export(net(), (X,), names="path", verbose=False)
        assert program is not None
        program.model.graph[0].metadata_props["more"] = "x"
    assert node_names(program.model) == BLOCKS
    assert htp_export.load(program).untagged == []


@BOTH
def test_a_model_without_nodes_is_exported_and_named(exporter, tmp_path):
    file, dynamo = tmp_path / "x.onnx", exporter == "dynamo"
    htp_export.export(nn.Identity().eval(), (X,), file, names="path", dynamo=dynamo, verbose=False)
    assert node_names(htp_export.rename(file).model) in ([], ["/Identity"])


def test_an_unknown_style_is_refused_before_anything_runs(tmp_path):
    class Never(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("it ran")

    with pytest.raises(InputError, match="no style of names 'paths'; there is 'path'"):
        htp_export.export(Never(), (X,), tmp_path / "x.onnx", names="paths", verbose=False)
    with pytest.raises(InputError, match="'paths'"):
        htp_export.rename(tmp_path / "missing.onnx", style="paths")


def test_the_commands(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    htp_export.export(net(), (X,), "torch.onnx", verbose=False, external_data=False)
    assert main(["rename", "torch.onnx", "-o", "named.onnx"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[0].split() == ["node", "before", "node", "after"]
    assert "node_linear    /0/fc/Gemm" in shown
    assert "renamed 7 of 7 nodes and 6 of 14 tensors (style 'path')" in shown
    assert main(["rename", "torch.onnx", "-o", "named.onnx", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["nodes"] == dict(htp_export.rename("torch.onnx").nodes)
    assert (result["style"], result["nodes_total"], len(result["nodes"])) == ("path", 7, 7)
    assert result["tensors"]["linear"] == "/0/fc/Gemm_output_0"
    assert main(["rename", "torch.onnx", "-o", "torch.onnx", "--in-place"]) == 0
    assert node_names(htp_export.load("torch.onnx").model) == BLOCKS


@pytest.mark.long
def test_the_command_export_names_too(tmp_path):
    file = str(tmp_path / "net.onnx")
    entry = ["export", "--entry", "examples.net:make", "-o", file, "--quiet"]
    assert main([*entry, "--names", "path"]) == 0
    names = node_names(htp_export.load(file).model)
    assert names == node_names(htp_export.rename(file).model)
    assert all(name.startswith("/") for name in names)
