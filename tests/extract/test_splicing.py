"""What is put in a module's place does its work, under the module's name."""

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
from htp_export.command.main import main
from htp_export.errors import InputError
from tests import handmade
from tests.exporting import BOTH, exported_once
from tests.extract.test_cutting import run_file
from tests.nets import NETS, Holding, x
from tests.truth import equal, inexact


def feeds_of(file: Path, kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [value.name for value in onnx.load(str(file), load_external_data=False).graph.input]
    return {name: tensor.numpy() for name, tensor in zip(names, kwargs.values(), strict=True)}


NAMES = ("called_twice", "mask_made_in_every_layer", "lstm")
MORE = ("siblings", "tied_weights", "transformer_encoder")


@BOTH
@pytest.mark.parametrize(
    "name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)
def test_a_module_put_back_in_its_own_place_changes_nothing_that_is_computed(
    name, exporter, shared_files, tmp_path
):
    model, kwargs = NETS[name].build()
    file = shared_files.net(name, exporter)
    before, tagged = run_file(file, feeds_of(file, kwargs)), htp_export.load(file)
    spliced = 0
    for path in tagged:
        if not path or tagged[path].fate != "computed":
            continue
        htp_export.extract(file, path, tmp_path / "part.onnx")
        try:
            htp_export.splice(file, path, tmp_path / "part.onnx", tmp_path / "whole.onnx")
        except InputError:  # its result is another module's as well
            continue
        spliced += 1
        after = run_file(tmp_path / "whole.onnx", feeds_of(file, kwargs))
        assert all(map(np.array_equal, before, after)), path
        onnx.checker.check_model(str(tmp_path / "whole.onnx"))
        assert inexact(model, kwargs, tmp_path / "whole.onnx") == [], path
    assert spliced > 0


class Block(Holding, fc=nn.Linear(4, 4), act=nn.Tanh()):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.fc(x))


class Rewritten(Holding, linear=nn.Linear(4, 4), gate=nn.Sigmoid()):
    """The same signature, other work, other modules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(self.linear(x)) * x


class Net(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(4, 4), block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.first(x)) + 1


class TwiceNet(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(self.first(x)) * 2) + 1


def given() -> dict[str, torch.Tensor]:
    return {"x": x(2, 4)}


def net_and_part(net: type[Net], exporter: str, folder: Path) -> tuple[Any, Path, nn.Module, Path]:
    """A net, and what is to take the place of its block, each with its file."""
    (folder / "part").mkdir()
    return *exported_once(net, given, exporter, folder), *exported_once(
        Rewritten, given, exporter, folder / "part"
    )


@BOTH
@pytest.mark.parametrize("net", [Net, TwiceNet])
def test_a_module_of_another_class_that_was_exported_alone_takes_the_place(net, exporter, tmp_path):
    model, file, other, part = net_and_part(net, exporter, tmp_path)
    result = htp_export.splice(file, "block", part, tmp_path / "whole.onnx")
    model.block = other
    (found,) = run_file(tmp_path / "whole.onnx", feeds_of(file, {"x": x(2, 4, seed=3)}))
    whole = htp_export.load(tmp_path / "whole.onnx")
    assert equal(found, model(x(2, 4, seed=3)).detach().numpy())
    assert whole.paths == ["", "first", "block", "block.linear", "block.gate"]
    assert inexact(model, {"x": x(2, 4)}, tmp_path / "whole.onnx") == []
    assert len(result.calls) == (2 if net is TwiceNet else 1)
    assert (
        sum(
            value.name.endswith("linear.weight")
            for value in whole.model.graph.initializers.values()
        )
        == 1
    )


def test_one_call_alone_can_be_replaced(tmp_path):
    model, file, other, part = net_and_part(TwiceNet, "dynamo", tmp_path)
    htp_export.splice(file, "block", part, tmp_path / "whole.onnx", call=1)
    hidden = x(2, 4, seed=3)
    (found,) = run_file(tmp_path / "whole.onnx", {"x": hidden.numpy()})
    assert equal(found, (other(model.block(model.first(hidden)) * 2) + 1).detach().numpy())


def untagged(
    ops: list[str], shape: list[int | str], dtype: ir.DataType = ir.DataType.FLOAT
) -> ir.Model:
    value = ir.val("in", dtype, shape)
    nodes: list[ir.Node] = []
    for op in ops:
        nodes.append(
            ir.node(
                op,
                [nodes[-1].outputs[0] if nodes else value],
                outputs=[ir.val(f"fc0_{len(nodes)}")],
            )
        )
    nodes[-1].outputs[0].type, nodes[-1].outputs[0].shape = ir.TensorType(dtype), ir.Shape(shape)
    return ir.Model(
        ir.Graph([value], nodes[-1].outputs, nodes=nodes, opset_imports={"": 20}, name="g"),
        ir_version=10,
    )


def test_untagged_nodes_belong_to_the_module():
    result = htp_export.splice(
        handmade.called_twice(), "block.fc", untagged(["Abs", "Exp"], [2, 4])
    )
    whole = htp_export.load(result.model)
    nodes = whole["block.fc"].nodes
    assert [(node.op_type, node.metadata_props["htp.reason"]) for node in nodes] == [
        (op, "spliced") for _ in range(4) for op in ("Abs", "Exp")
    ]
    assert [node.metadata_props["htp.call"] for node in nodes] == list("00112233")
    assert whole.untagged == []


def test_names_that_are_taken_change():
    other = untagged(["Abs", "Exp"], [2, 4])
    other.graph.node(0).outputs[0].name, other.graph.node(0).name = "mask", "node_fc1"
    result = htp_export.splice(handmade.encoder(), "layer.0.fc", other)
    values = [value.name for node in result.model.graph for value in node.outputs]
    nodes = [node.name for node in result.model.graph]
    assert (len(set(values)), len(set(nodes))) == (len(values), len(nodes))
    assert "fc0" in values
    assert "layer.0.fc.weight" not in result.model.graph.initializers


def test_functions_of_a_replacement_get_names_of_their_own():
    part = htp_export.extract(handmade.with_function(), "block").model
    result = htp_export.splice(handmade.with_function(), "block", part)
    assert [name for _, name, _ in result.model.functions] == ["Block", "Block_1"]
    assert [node.op_type for node in result.model.graph] == ["Block_1", "Neg"]


def opset(model: ir.Model, version: int) -> ir.Model:
    model.graph.opset_imports[""] = version
    return model


@pytest.mark.parametrize(
    ("path", "replacement", "message"),
    [
        (
            "layer.0.fc",
            untagged(["Abs"], [2, 5]),
            r"'in' of the replacement has shape \[2,5\], and the module \[2,4\]",
        ),
        (
            "layer.0.fc",
            untagged(["Abs"], [2, 4], ir.DataType.INT64),
            "type INT64, and the module FLOAT",
        ),
        ("layer.0.fc", handmade.branching(), "has the inputs x, and the replacement x, condition"),
        ("layer.0.fc", opset(untagged(["Abs"], [2, 4]), 17), "uses opset 17"),
        ("dropout", untagged(["Abs"], [2, 4]), "gives back what it is given"),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_written(path, replacement, message, tmp_path):
    with pytest.raises(InputError, match=message):
        htp_export.splice(handmade.encoder(), path, replacement, tmp_path / "out.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_result_that_two_modules_share_is_not_replaced_for_one(shared_files):
    file = shared_files.net("equal_siblings", "dynamo")
    with pytest.raises(
        InputError,
        match=r"'first' shares its result '\w+' with module 'second'; replace '\(root\)'",
    ):
        htp_export.splice(file, "first", htp_export.extract(file, "first").model)


def test_the_commands_do_the_same_and_say_it(tmp_path, capsys):
    _, file = exported_once(Net, given, "dynamo", tmp_path)
    part, whole = str(tmp_path / "part.onnx"), str(tmp_path / "whole.onnx")
    assert main(["extract", str(file), "block", "-o", part, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["inputs"] == {"x": "FLOAT[2,4]"}
    assert main(["splice", str(file), "block", part, "-o", whole]) == 0
    assert "block: replaced; 4 nodes before, 4 now" in capsys.readouterr().out


def test_weights_that_only_a_branch_of_the_module_reads_are_gone():
    text = """<ir_version: 10, opset_import: ["": 20]>
    g (bool c, float[2] x) => (float[2] y) <float[2] w = {1.0, 2.0}> {
      a = If(c) <
        then_branch = t () => (float[2] p) { p = Add(x, w) },
        else_branch = e () => (float[2] q) { q = Mul(x, w) }
      >
      y = Relu(a)
    }"""
    model = ir.from_proto(onnx.parser.parse_model(text))
    for node in model.graph.all_nodes():
        node.metadata_props["htp.module"] = "" if node.op_type == "Relu" else "block"
    other = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 20]> h (bool c, float[2] x) => (float[2] a) { a = Neg(x) }'
    )
    spliced = htp_export.splice(model, "block", other).model
    assert [node.op_type for node in spliced.graph] == ["Neg", "Relu"]
    assert not spliced.graph.initializers
