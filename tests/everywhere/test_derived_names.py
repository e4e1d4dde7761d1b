"""What a function adds has names of its own, also where the file has tensors and nodes that are called so already."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.format import tags
from htp_export.model.regions import all_values
from tests.nets import EXPORTERS, composed
from tests.quantized import results, written


class Scores(nn.Module):
    """Two heads, whose number and size are constants of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 32)
        self.out = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key = (part(x).view(2, 3, 2, 16).transpose(1, 2) for part in (self.query, self.key))
        return self.out((query @ key.transpose(2, 3) @ query).transpose(1, 2).reshape(2, 3, 32))


def network() -> nn.Module:
    """A convolution with a norm, two heads, and a layer."""
    return composed(
        lambda self, x: self.head(self.heads(torch.relu(self.norm(self.conv(x)))).flatten(1)),
        conv=nn.Conv1d(3, 3, 3, padding=1),
        norm=nn.BatchNorm1d(3),
        heads=Scores(),
        head=nn.Linear(96, 8),
    )


X = np.random.default_rng(0).standard_normal((2, 3, 32)).astype(np.float32)

_PRECISIONS = (
    "int8",
    "u8s8",
    "int16",
    "int8-dynamic",
    "int8-weights",
    "int4",
    "int4:format=qdq",
    "fp8",
    "fp16",
    "fixed:12.6",
    "mxint8",
)


def _quantized(precision: str) -> Callable[[Any, str], Any]:
    return lambda model, name: htp_export.quantize(model, precision, data={name: X})


CHANGES: dict[str, Callable[[Any, str], Any]] = {
    **{f"quantize {precision}": _quantized(precision) for precision in _PRECISIONS},
    "prune channels": lambda model, name: htp_export.prune(model, {"heads": "heads:0.5"}),
    "prune rank": lambda model, name: htp_export.prune(model, {"head": "rank:2"}),
    "prune activations": lambda model, name: htp_export.prune(
        model, {"heads,head": "activations:0.5"}, data={name: X}
    ),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("names")
    torch.manual_seed(0)
    net, given = network(), (torch.from_numpy(X),)
    return {each: written(net, given, folder / f"{each}.onnx", each, ["x"]) for each in EXPORTERS}


def names(model: ir.Model) -> tuple[list[str], list[str]]:
    """Those of tensors, and of nodes."""
    values = [str(value.name) for value in all_values(model.graph) if value.name]
    return values, [str(node.name) for node in model.graph.all_nodes() if node.name]


def full(source: Path, tensors: set[str], nodes: set[str]) -> ir.Model:
    """The model of a file, with results and nodes of these names."""
    model = ir.load(source)
    for number, (tensor, node) in enumerate(itertools.zip_longest(sorted(tensors), sorted(nodes))):
        result = ir.val(tensor or f"no other {number}", ir.DataType.FLOAT, [1])
        noise = ir.node("RandomNormal", [], {"shape": [1], "seed": float(number)}, outputs=[result])
        noise.name = node or f"no other {number}"
        noise.metadata_props.update({tags.MODULE: "", tags.REASON: "scope"})
        model.graph.append(noise)
        model.graph.outputs.append(result)
    return model


@pytest.mark.long
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("change", CHANGES)
def test_every_name_that_a_change_derives_may_be_taken(change, exporter, files):
    source = files[exporter]
    before = names(ir.load(source))
    [given] = ir.load(source).graph.inputs
    once = CHANGES[change](source, str(given.name)).model
    tensors, nodes = (set(now) - {*was} for now, was in zip(names(once), before, strict=True))
    assert tensors
    numbered = {f"{name}_{number}" for name in tensors for number in (1, 2)}
    model = full(source, tensors | numbered, nodes)
    again = CHANGES[change](model, str(given.name)).model
    for found in names(again):
        assert len(set(found)) == len(found)
    assert [node.op_type for node in again.graph if node.op_type != "RandomNormal"] == [
        node.op_type for node in once.graph
    ]
    in_memory = [ir.external_data.load_to_model(each) for each in (once, again)]
    [expected], [found, *_] = (results(each, {given.name: X}) for each in in_memory)
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-5)
