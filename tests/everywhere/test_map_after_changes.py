"""The map of `embed_map` describes the graph of its file: after a change it is gone, or describes the new graph."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export import lora
from htp_export.format import tags

X = torch.randn(2, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.fc(x))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(8, 4)).eval()


@pytest.fixture(scope="module")
def mapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with a map."""
    file = tmp_path_factory.mktemp("mapped") / "net.onnx"
    program = htp_export.export(net(), (X,), verbose=False)
    htp_export.embed_map(program, file)
    return file


def others(factor: float = 2.0) -> dict[str, Any]:
    """The parameters of the net, with other values."""
    return {name: tensor.numpy() * factor for name, tensor in net().state_dict().items()}


def of_a_function(file: Path) -> Any:
    """The node of the last module is in a function that is no module; inlined again."""
    model = ir.load(file)
    last = model.graph.node(-1)
    inside = [ir.val(str(value.name)) for value in last.inputs]
    body = ir.node(last.op_type, inside, dict(last.attributes), metadata_props=last.metadata_props)
    graph = ir.Graph(inside, body.outputs, nodes=[body], opset_imports=model.graph.opset_imports)
    model.functions[("net", "Last", "")] = ir.Function("net", "Last", graph=graph, attributes=[])
    call = ir.node("Last", last.inputs, domain="net", outputs=[ir.val("result")])
    call.metadata_props.update(last.metadata_props)
    model.graph.append(call)
    model.graph.outputs[0] = call.outputs[0]
    call.outputs[0].dtype, call.outputs[0].shape = last.outputs[0].dtype, last.outputs[0].shape
    model.graph.remove(last, safe=True)
    model.graph.opset_imports["net"] = 1
    return htp_export.embed_map(model)


CHANGES: dict[str, Callable[[Path], Any]] = {
    "bind": lambda file: htp_export.bind(file, others()),
    "functions": lambda file: htp_export.functions(file, "**"),
    "inline": lambda file: htp_export.inline(htp_export.functions(file, "**")),
    "inline of others": lambda file: htp_export.inline(of_a_function(file)),
    "lora.insert": lambda file: lora.insert(file, "**", rank=1),
    "optimize": htp_export.optimize,
    "place": lambda file: htp_export.place(file, {".": "cpu"}),
    "place of others": lambda file: htp_export.place(of_a_function(file), {".": "cpu"}),
    "prune": lambda file: htp_export.prune(file, {"**": 0.5}),
    "prune low rank": lambda file: htp_export.prune(file, {"0.fc": "rank:2"}),
    "prune removed": lambda file: htp_export.prune(file, {"0": "drop"}),
    "quantize": lambda file: htp_export.quantize(file, "int8-dynamic"),
    "rename": htp_export.rename,
    "splice": lambda file: htp_export.splice(file, "0", htp_export.extract(file, "1")),
    "steer": lambda file: htp_export.steer(file, "0:out"),
    "tap": lambda file: htp_export.tap(file, "0:out"),
    "untap": lambda file: htp_export.untap(htp_export.tap(file, "0:out")),
}


REMOVES_IT = {"lora.insert", "optimize", "quantize", "splice"}


@pytest.mark.parametrize("change", CHANGES)
def test_the_map_of_a_changed_file_is_gone_or_describes_the_file_as_it_is_now(
    change: str, mapped: Path
) -> None:
    model = htp_export.load(CHANGES[change](mapped)).model
    found = model.metadata_props.get(tags.MAP)
    if change in REMOVES_IT:
        assert found is None
    else:
        assert found == htp_export.embed_map(model).metadata_props[tags.MAP]
