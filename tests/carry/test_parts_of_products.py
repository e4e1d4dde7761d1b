"""A node with the weights of an original product may do less, or more: files divide the work differently."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses

import htp_export
from htp_export import tools
from tests.handmade import nameless
from tests.nets import composed, spread, x

Tensor = torch.Tensor


def padded(net: nn.Module, x: Tensor) -> Tensor:
    return net.b(net.a(F.pad(x, (0, 1, 0, 1))).tanh())


def pooled(net: nn.Module, x: Tensor) -> Tensor:
    return net.b(net.a(F.pad(x, (0, 1, 0, 1))))


def scaled(net: nn.Module, x: Tensor) -> Tensor:
    return net.b(net.a(x * 0.25).tanh())


def transposed(net: nn.Module, x: Tensor) -> Tensor:
    return net.b(net.a(x.t()).t())


def activated(net: nn.Module, x: Tensor) -> Tensor:
    return net.b(net.a(x).relu())


def gelu(net: nn.Module, x: Tensor) -> Tensor:
    return net.b(F.gelu(net.a(x)))


def attention(net: nn.Module, x: Tensor) -> Tensor:
    return net.o((net.q(x) @ net.k(x).transpose(1, 2)).softmax(-1) @ net.v(x))


def image(net: Callable[[nn.Module, Tensor], Tensor], first: nn.Module) -> Any:
    return lambda: composed(net, a=first, b=nn.Conv2d(4, 2, 3)), x(1, 3, 8, 8)


NETS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "padding before a convolution": image(padded, nn.Conv2d(3, 4, 3)),
    "padding before pooling": (
        lambda: composed(pooled, a=nn.AvgPool2d(2), b=nn.Conv2d(3, 2, 3)),
        x(1, 3, 8, 8),
    ),
    "activation after a convolution": image(activated, nn.Conv2d(3, 4, 3)),
    "factor before a product": (
        lambda: composed(scaled, a=nn.Linear(8, 8, bias=False), b=nn.Linear(8, 4, bias=False)),
        x(2, 3, 8),
    ),
    "transposition before a product": (
        lambda: composed(transposed, a=nn.Linear(8, 8), b=nn.Linear(3, 4)),
        x(8, 3),
    ),
    "activation after a linear layer": (
        lambda: composed(gelu, a=nn.Linear(8, 8), b=nn.Linear(8, 4)),
        x(2, 3, 8),
    ),
    "joined projections": (
        lambda: composed(attention, **{name: nn.Linear(8, 8) for name in "qkvo"}),
        x(1, 5, 8),
    ),
}


def exported(net: str, exporter: str, tool: str, file: Path) -> Path:
    """A file of a net; `tool` moved work of modules into products of others."""
    build, input = NETS[net]
    torch.manual_seed(0)
    model = spread(build()).eval()
    htp_export.export(
        model, (), file, kwargs={"x": input}, dynamo=exporter == "dynamo", verbose=False
    )
    if tool == "fused":
        htp_export.optimize(file, file, level="fused")
    elif tool == "onnxruntime":
        tools.onnxruntime(file, file, level="extended")
    elif tool:
        getattr(tools, tool)(file, file)
    return file


def rounded(tagged: ir.Model, precision: str) -> htp_export.TaggedModel:
    """A file whose tensors are those of no float32 model."""
    if precision == "float16":
        return htp_export.load(tools.float16(tagged, keep_io_types=True))
    if precision == "int8":
        return htp_export.load(tools.quantize_dynamic(tagged))
    return htp_export.load(tagged)


# The original, the other file, and its precision: one of the files has merged what the other has not.
PAIRS = [
    ("padding before a convolution", "dynamo,", "script,", "float16"),
    ("padding before a convolution", "script,", "dynamo,", "int8"),
    ("padding before a convolution", "dynamo,onnxruntime", "script,", "int8"),
    ("padding before pooling", "dynamo,", "script,", "float16"),
    ("activation after a convolution", "dynamo,onnxruntime", "dynamo,", "float16"),
    ("activation after a convolution", "dynamo,", "dynamo,onnxruntime", "float16"),
    ("factor before a product", "dynamo,", "dynamo,onnxruntime", "float16"),
    ("transposition before a product", "dynamo,", "dynamo,onnxsim", "float16"),
    ("transposition before a product", "dynamo,", "script,", "float16"),
    ("activation after a linear layer", "dynamo,onnxsim", "dynamo,onnxslim", "float32"),
    ("joined projections", "script,", "script,fused", "float32"),
    ("joined projections", "script,", "script,fused", "float16"),
]


@pytest.mark.long
@pytest.mark.parametrize(("net", "before", "after", "precision"), PAIRS)
def test_no_node_has_owners_that_did_not_compute_it_or_lacks_one(
    net: str, before: str, after: str, precision: str, tmp_path: Path
) -> None:
    original = exported(net, *before.split(","), tmp_path / "original.onnx")
    other = exported(net, *after.split(","), tmp_path / "other.onnx")
    truth = rounded(htp_export.load(other).model, precision)
    feed = {"x": NETS[net][1].numpy()}
    name = htp_export.load(original).model.graph.inputs[0].name
    data = {str(name): feed["x"]}
    carried = htp_export.carry(original, nameless(truth.model.clone()), data=data, require=0)
    wrong = []
    for node, known in zip(carried.model.graph.all_nodes(), truth.nodes, strict=True):
        if node.metadata_props["htp.reason"] == "unknown" or not truth.owners_of(known):
            continue
        owners = node.metadata_props["htp.module"]
        if owners != known.metadata_props["htp.module"]:
            wrong.append((node.op_type, owners, known.metadata_props["htp.module"]))
    assert not wrong
