"""Equal calls of a module, and equal chains, that passes merge: owners, calls, fates and signatures of all of them."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import htp_export
from htp_export.format import tags
from htp_export.tools import onnxslim
from tests.exporting import BOTH, exported, quick
from tests.nets import EXPORTERS, Apply, Holding, composed, spread, x
from tests.truth import inexact

Tensor = torch.Tensor


def linear() -> nn.Module:
    return nn.Linear(4, 4)


class Block(Holding, fc=linear(), act=nn.Tanh()):
    """It calls a layer twice with the same."""

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x)) + self.fc(x)


def calls(net: nn.Module, x: Tensor) -> Tensor:
    return net.a(x).relu() * net.a(x).tanh()


def chains(net: nn.Module, x: Tensor) -> Tensor:
    return net.out(net.a(x).relu()) + net.a(x).relu()


def three(net: nn.Module, x: Tensor) -> Tensor:
    return net.out(net.a(x).exp()) + net.a(x).exp() + net.a(x).exp().sum()


def nested(net: nn.Module, x: Tensor) -> Tensor:
    return net.out(net.block(x)) * net.block(x).sigmoid()


def split(net: nn.Module, x: Tensor) -> Tensor:
    """Chains that part and join again."""

    def half() -> Tensor:
        h = net.a(x)
        return (h.exp() + h).relu()

    return net.out(half()) + half()


def crossing(net: nn.Module, x: Tensor) -> Tensor:
    """What is equal is called by two modules, in another order."""
    one, other = net.a(x), net.b(x)
    return net.out(one * other) + net.b(x) - net.a(x)


NETS: dict[str, Callable[[], nn.Module]] = {
    "calls": lambda: composed(calls, a=linear()),
    "chains": lambda: composed(chains, a=linear(), out=linear()),
    "three": lambda: composed(three, a=linear(), out=linear()),
    "nested": lambda: composed(nested, block=Block(), out=linear()),
    "split": lambda: composed(split, a=nn.Sequential(linear(), nn.Tanh()), out=linear()),
    "crossing": lambda: composed(crossing, a=linear(), b=linear(), out=linear()),
}


def said(model: Any) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """What the tags of a model say: of nodes, of modules, and of what modules take and give."""
    tagged = htp_export.load(model)
    nodes = [
        (node.op_type, tagged.owners_of(node), {*tagged.work_of(node).calls})
        for node in tagged.model.graph
    ]
    fates = {path: (str(info.fate), info.fused_with) for path, info in tagged.hierarchy.items()}
    signatures = {
        path: [([*each.inputs.values()], each.outputs) for each in listed]
        for path, listed in tagged.signatures.items()
    }
    return nodes, fates, signatures


def unmerged(net: nn.Module, file: Path) -> Path:
    """A file in which each call has nodes of its own."""
    htp_export.export(net, (x(3, 4),), file, optimize=False, verbose=False)
    return file


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "level"),
    quick(
        itertools.product(NETS, ("exact", "fused")),
        ("calls", "exact"),
        ("chains", "exact"),
        ("split", "fused"),
    ),
)
def test_merged_calls_are_said_as_by_an_export_that_merges_them(name, level, tmp_path):
    net = spread(NETS[name]()).eval()
    unmerged(net, tmp_path / "all.onnx")
    # torch merges, the capture tells
    htp_export.export(net, (x(3, 4),), tmp_path / "merged.onnx", verbose=False)
    found = htp_export.optimize(tmp_path / "all.onnx", level=level).model
    assert said(found) == said(tmp_path / "merged.onnx")
    htp_export.load(found).save(tmp_path / "found.onnx")
    assert inexact(net, {"x": x(3, 4)}, onnx.load(tmp_path / "found.onnx")) == []
    carried = said(onnxslim(tmp_path / "all.onnx").model)
    assert said(found)[1:] == carried[1:]
    assert [calls for *_, calls in said(found)[0]] == [calls for *_, calls in carried[0]]


@pytest.mark.parametrize("call", [0, 1])
def test_each_of_two_merged_calls_can_be_cut_out(call, tmp_path):
    unmerged(spread(NETS["calls"]()).eval(), tmp_path / "all.onnx")
    htp_export.optimize(tmp_path / "all.onnx", tmp_path / "one.onnx")
    part = htp_export.extract(tmp_path / "one.onnx", "a", call=call)
    assert [node.op_type for node in part.model.graph] == ["Gemm"]


def convolved(net: nn.Module, x: Tensor) -> Tensor:
    image = x.reshape(-1, 1, 3, 4)
    return net.out(net.norm(net.conv(image)).relu()) + net.norm(net.conv(image)).relu()


def test_a_chain_that_is_merged_and_fused_at_once_has_all_calls(tmp_path):
    parts = {"conv": nn.Conv2d(1, 2, 3), "norm": nn.BatchNorm2d(2), "out": nn.Conv2d(2, 1, 1)}
    unmerged(spread(composed(convolved, **parts)).eval(), tmp_path / "all.onnx")
    nodes, fates, signatures = said(htp_export.optimize(tmp_path / "all.onnx", level="fused").model)
    _, owners, done = next(entry for entry in nodes if entry[0] == "FusedConv")
    assert {*owners} == {"conv", "norm", ""}
    assert done == {("conv", 0), ("conv", 1), ("norm", 0), ("norm", 1)}
    assert (fates["conv"], fates["norm"]) == (("fused", ("norm", "")), ("fused", ("conv", "")))
    assert signatures["norm"] == [([None], (None,))] * 2


# --- modules that are fused with the module around them ---


def activated(net: nn.Module, x: Tensor) -> Tensor:
    return net.out(net.norm(net.conv(x)).relu())


class Around(Holding, conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4)):
    """The activation is its own."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()


@pytest.mark.parametrize(
    ("around", "exporter"),
    quick(itertools.product(("", "block"), EXPORTERS), ("", "torchscript"), ("block", "dynamo")),
)
def test_who_fuses_an_activation_of_the_module_around_names_all_three(around, exporter, tmp_path):
    convs = {"conv": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4), "out": nn.Conv2d(4, 2, 3)}
    net = composed(activated, **convs) if not around else nn.Sequential()
    if around:
        net.add_module("block", Around())
        net.add_module("out", nn.Conv2d(4, 2, 3))
    file = exported(
        spread(net).eval(), {"x" if not around else "input": x(1, 3, 8, 8)}, exporter, tmp_path
    )
    expected = {f"{around}.{name}".lstrip("."): set() for name in ("conv", "norm")}
    everyone = {*expected, around}
    for path in expected:
        expected[path] = everyone - {path}
    own = htp_export.optimize(file, level="fused").model
    htp_export.load(file).save(tmp_path / "tagged.onnx")
    theirs = htp_export.tools.onnxruntime(tmp_path / "tagged.onnx", level="extended").model
    for model in (own, theirs):
        tagged = htp_export.load(model)
        assert {*tagged.owners_of(next(iter(tagged.model.graph)))} == everyone
        assert {path: {*tagged.hierarchy[path].fused_with} for path in expected} == expected


def turned(net: nn.Module, x: Tensor) -> Tensor:
    return net.two(net.one(x)).permute(0, 2, 1, 3)


class Turns(
    Holding, one=Apply(lambda x: x.permute(1, 2, 0, 3)), two=Apply(lambda x: x.permute(3, 0, 1, 2))
):
    def forward(self, x: Tensor) -> Tensor:
        return turned(self, x)


@BOTH
def test_an_export_names_the_module_around_merged_transpositions_and_not_who_reads_them(
    exporter, tmp_path
):
    net = spread(nn.Sequential(nn.Linear(3, 3), Turns(), nn.Linear(3, 3))).eval()
    file = exported(net, {"input": x(3, 3, 3, 3)}, exporter, tmp_path)
    node = next(node for node in file.graph.node if node.op_type == "Transpose")
    assert tags.owners_of({entry.key: entry.value for entry in node.metadata_props}) == (
        "1",
        "1.one",
        "1.two",
    )
    found = htp_export.load(file).hierarchy
    assert {*found["1.one"].fused_with} == {"1", "1.two"}
    assert {*found["1.two"].fused_with} == {"1", "1.one"}
    assert found["1"].fate == "computed"
