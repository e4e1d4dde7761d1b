"""Precisions in several calls, one after the other, and what other modules read of a module in another float type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

import htp_export
from tests.nets import EXPORTERS, spread
from tests.quantized import IDS, Net, assert_others_are_the_same, outputs, slow, written

BOTH = pytest.mark.parametrize("exporter", EXPORTERS)


@BOTH
@pytest.mark.parametrize(
    ("first", "second"),
    [
        *(("int4", "int8"), ("fp16", "fp16")),
        *(slow("int8-dynamic", "int8"), slow("int8-dynamic", "fp16"), slow("int4", "fp16"), slow("fp16", "int8")),
    ],
)
def test_a_second_call_quantizes_what_the_first_one_left(
    first: str, second: str, exporter: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    net = written(Net(), (torch.from_numpy(IDS),), tmp_path / "net.onnx", exporter, ["ids"])
    kwargs: dict[str, Any] = {"data": {"ids": IDS}}
    htp_export.quantize(net, {"table": first, "first": first}, tmp_path / "one.onnx", **kwargs)
    htp_export.quantize(tmp_path / "one.onnx", {"second": second}, tmp_path / "two.onnx", **kwargs)
    htp_export.quantize(tmp_path / "two.onnx", {"head": second}, tmp_path / "three.onnx", **kwargs)
    [expected], [found] = outputs(net, {"ids": IDS}), outputs(tmp_path / "three.onnx", {"ids": IDS})
    assert np.abs(found - expected).max() / np.abs(expected).max() < 0.5
    for node in htp_export.load(tmp_path / "one.onnx").nodes:  # ONNX's own inference cannot tell these
        assert node.domain == "" or node.outputs[0].dtype is not None, node.name


class Sized(nn.Module):
    """The size of what one module makes is read by another module and by the root."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.after, self.head = nn.Embedding(50, 8), nn.Linear(8, 8), Reader(), nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y = self.body(self.table(ids))
        z = self.after(y)
        return self.head(z.reshape(y.shape[0], y.shape[1], 8))


class Reader(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.reshape(x.shape[0] * x.shape[1], 8))


@BOTH
@pytest.mark.parametrize("chosen", ["body", "after", "head"])
def test_sizes_are_read_of_the_tensor_that_was_there(chosen: str, exporter: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = (
        {"dynamic_shapes": {"ids": dict.fromkeys((0, 1), torch.export.Dim.DYNAMIC)}}
        if exporter == "dynamo"
        else {"input_names": ["ids"], "dynamic_axes": {"ids": {0: "batch", 1: "length"}}}
    )
    net = tmp_path / "net.onnx"
    htp_export.export(
        spread(Sized().eval()), (torch.from_numpy(IDS),), net, dynamo=exporter == "dynamo", verbose=False, **options
    )
    assert any(node.op_type == "Shape" for node in onnx.load(net).graph.node)
    htp_export.quantize(net, {chosen: "fp16"}, tmp_path / "half.onnx")
    assert_others_are_the_same(net, tmp_path / "half.onnx", chosen)
    graph = htp_export.load(tmp_path / "half.onnx")
    for node in graph.nodes:
        if node.op_type == "Shape" and chosen not in graph.owners_of(node):
            assert graph.inferred.dtype(node.inputs[0]).name in ("FLOAT", "INT64"), node.name
    [expected], [found] = outputs(net, {"ids": IDS}), outputs(tmp_path / "half.onnx", {"ids": IDS})
    assert np.allclose(found, expected, rtol=1e-2, atol=1e-2)
