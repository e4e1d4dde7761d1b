"""A change has the same owners, calls, fates and signatures whoever makes it: an exporter, our passes, another tool.

Each net is changed by each engine that can make the change. What has to hold is written beside the net; the oracle of
`tests/truth.py`, which compares values alone, has to find each module exact, and each tensor of a signature to be what
PyTorch passed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the name that torch's own documentation uses

import htp_export
from htp_export import tools
from tests.handmade import nameless
from tests.nets import NETS, Holding, HoldsRouted, composed, sequence, spread, x
from tests.truth import Judge, named_wrongly, run_pytorch, values_of

Tensor = torch.Tensor


def without_names(tool: Callable[..., Any]) -> Callable[[Path, Path], Any]:
    """A tool whose result loses its tags and the names of its nodes and tensors, and gets tags by `carry`."""

    def run(file: Path, output: Path) -> Any:
        plain = output.with_name("plain.onnx")
        tool(file, plain)
        ir.save(nameless(ir.load(plain)), plain)
        return htp_export.carry(file, plain, output)

    return run


ENGINES: dict[str, Callable[[Path, Path], Any]] = {
    "exact": lambda file, output: htp_export.optimize(file, output),
    "tolerant": lambda file, output: htp_export.optimize(file, output, level="tolerant"),
    "fused": lambda file, output: htp_export.optimize(file, output, level="fused"),
    "onnxruntime": lambda file, output: tools.onnxruntime(file, output, level="extended"),
    "onnxslim": tools.onnxslim,
    "onnxsim": tools.onnxsim,
    "onnxoptimizer": tools.onnxoptimizer,
    "onnxslim, no names": without_names(tools.onnxslim),
    "onnxsim, no names": without_names(tools.onnxsim),
    "onnxoptimizer, no names": without_names(tools.onnxoptimizer),
    "onnxruntime extended, no names": without_names(
        lambda file, output: tools.onnxruntime(file, output, level="extended")
    ),
    "onnxruntime, no names": without_names(
        lambda file, output: tools.onnxruntime(file, output, level="basic")
    ),
}


@dataclass
class Change:
    """A net, how it is exported, and what holds after a change.

    Attributes:
        build: Makes the net.
        inputs: Its inputs.
        engines: Who makes the change; ``"export"``: torch itself, with the options ``exported``.
        owners: Operator → the owners of its nodes, in order.
        calls: Operator → the numbers of the calls that its first node computes.
        fates: Module path → its fate.
        groups: Modules that are all fused with one another.
        options: Of the export before the change.
        exported: Of the export that makes the change.
        lost: Modules whose signatures lack a tensor, as the file has none of its value.
        reasons: Operator → why its nodes have these owners, where that is the same for all engines.
        inexact: Modules that the oracle finds inexact: known limits.
    """

    build: Callable[[], nn.Module]
    inputs: dict[str, Any]
    engines: tuple[str, ...]
    owners: dict[str, list[set[str]]] = field(default_factory=dict)
    calls: dict[str, list[int]] = field(default_factory=dict)
    fates: dict[str, str] = field(default_factory=dict)
    groups: list[set[str]] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    exported: dict[str, Any] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    reasons: dict[str, str] = field(default_factory=dict)
    inexact: frozenset[str] = frozenset()


UNFOLDED = {"dynamo": False, "do_constant_folding": False}
PLAIN = {"dynamo": True, "optimize": False}


def image() -> dict[str, Any]:
    return {"input": x(1, 3, 8, 8)}


def conv_norm_twice() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2)
    )


def conv_norm_relu(net: nn.Module, input: Tensor) -> Tensor:
    return net.out(net.norm(net.conv(input)).relu())


def equal_calls(net: nn.Module, x: Tensor) -> Tensor:
    return net.a(x).relu() * net.a(x).tanh()


def equal_chains(net: nn.Module, x: Tensor) -> Tensor:
    return net.o(net.a(x).relu()) + net.a(x).relu()


class Masked(Holding, q=nn.Linear(4, 4)):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.q(x).masked_fill(~(mask[..., None] > 0), -1e4)


def masked_twice(net: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    return net.b(net.a(x, mask), mask)


def self_attention(net: nn.Module, x: Tensor) -> Tensor:
    def heads(t: Tensor) -> Tensor:
        return t.view(1, 5, 2, 4).transpose(1, 2)

    y = F.scaled_dot_product_attention(heads(net.q(x)), heads(net.k(x)), heads(net.v(x)))
    return net.o(y.transpose(1, 2).reshape(1, 5, 8))


def three_layers(net: nn.Module, x: Tensor) -> Tensor:
    return net.q(x).tanh() * net.k(x).sigmoid() * net.v(x)


def linear_relu_linear(net: nn.Module, x: Tensor) -> Tensor:
    return net.second(net.turn(net.first(x).relu()))


class Turn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(0, 1)


class Sized(Holding, fc=nn.Linear(4, 4)):
    def forward(self, x: Tensor, causal: bool = False) -> tuple[int, Tensor]:
        return x.shape[0], self.fc(x)


def with_numbers(net: nn.Module, x: Tensor) -> Tensor:
    size, y = net.patch(x, False)
    return net.out(y) / size


CHANGES: dict[str, Change] = {
    "linear layers that compute in two dimensions": Change(
        lambda: composed(
            linear_relu_linear, first=nn.Linear(4, 5), turn=Turn(), second=nn.Linear(5, 3)
        ),
        {"x": x(2, 3, 4)},
        ("onnxruntime", "onnxruntime, no names"),
        owners={
            "Reshape": [{"first"}, {"first"}, {"second"}, {"second"}],
            "Transpose": [{"turn"}],
            "Gemm": [{"first"}, {"second"}],
            "Relu": [{""}],
        },
        fates={"first": "computed", "turn": "computed", "second": "computed"},
    ),
    "batch norms folded into convolutions": Change(
        conv_norm_twice,
        image(),
        (
            "export",
            "tolerant",
            "onnxslim",
            "onnxsim",
            "onnxslim, no names",
            "onnxruntime, no names",
        ),
        owners={"Conv": [{"0", "1"}, {"3", "4"}]},
        reasons={"Conv": "fused"},
        fates={
            "0": "fused",
            "1": "fused",
            "3": "fused",
            "4": "fused",
            "2": "computed",
            "": "computed",
        },
        options=UNFOLDED,
        exported={"dynamo": False},
        lost=frozenset("0134"),
    ),
    "a convolution with a norm and its parent's relu": Change(
        lambda: composed(
            conv_norm_relu, conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4), out=nn.Conv2d(4, 2, 3)
        ),
        image(),
        ("fused", "onnxruntime", "onnxruntime extended, no names"),
        owners={"FusedConv": [{"conv", "norm", ""}]},
        groups=[{"conv", "norm", ""}],
        lost=frozenset(("conv", "norm")),
        options={"dynamo": False},
    ),
    "two modules in a row that return their input": Change(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Dropout(), nn.Linear(4, 2)),
        {"input": x(2, 4)},
        ("export", "exact", "onnxslim", "onnxsim", "onnxslim, no names"),
        fates={"0": "computed", "1": "identity", "2": "identity", "3": "computed"},
        options=PLAIN,
    ),
    "a shape that a module takes back and makes again": Change(
        lambda: NETS["a_shape_that_a_module_takes_back_and_makes_again"].build()[0],
        {"input": x(1, 2, 5, 8)},
        ("exact", "onnxruntime", "onnxruntime, no names", "onnxslim", "onnxoptimizer", "onnxsim"),
        owners={"Reshape": [{"0"}], "Tanh": [{"2"}]},
        fates={"0": "computed", "1": "identity", "2": "computed"},
        options={"dynamo": False},
    ),
    "equal calls of one module": Change(
        lambda: composed(equal_calls, a=nn.Linear(4, 4)),
        {"x": x(3, 4)},
        ("export", "exact", "onnxslim", "onnxslim, no names"),
        owners={"Gemm": [{"a"}]},
        calls={"Gemm": [0, 1]},
        fates={"a": "computed"},
        options=PLAIN,
    ),
    "equal chains": Change(
        lambda: composed(equal_chains, a=nn.Linear(4, 4), o=nn.Linear(4, 4)),
        {"x": x(3, 4)},
        ("export", "exact", "onnxslim", "onnxslim, no names"),
        calls={"Relu": [0]},
        fates={"a": "computed", "o": "computed"},
        options=PLAIN,
    ),
    "a mask of two modules": Change(
        lambda: composed(masked_twice, a=Masked(), b=Masked()),
        {"x": x(2, 3, 4), "mask": torch.tensor([[1, 1, 0], [1, 1, 1]])},
        ("onnxoptimizer", "onnxoptimizer, no names"),
        owners={"Cast": [{"a", "b"}], "Not": [{"a", "b"}], "Where": [{"a"}, {"b"}]},
        options={"dynamo": False},
    ),
    "a mask of two modules, computed once": Change(
        lambda: composed(masked_twice, a=Masked(), b=Masked()),
        {"x": x(2, 3, 4), "mask": torch.tensor([[1, 1, 0], [1, 1, 1]])},
        ("exact", "onnxslim", "onnxoptimizer"),
        owners={"Not": [{"a", "b"}], "Where": [{"a"}, {"b"}]},
        reasons={"Not": "shared"},
        options={"dynamo": False},
    ),
    "three linear layers as one product": Change(
        lambda: composed(three_layers, **{name: nn.Linear(4, 4) for name in "qkv"}),
        {"x": x(2, 3, 4)},
        ("tolerant",),
        # a part of the work of each, not equal work
        owners={"MatMul": [{"q", "k", "v"}], "Slice": [{"q"}, {"k"}, {"v"}]},
        reasons={"MatMul": "fused", "Slice": "scope"},
        fates={"q": "computed", "k": "computed", "v": "computed"},
        options={"dynamo": True},
    ),
    "attention as one node": Change(
        lambda: composed(self_attention, **{name: nn.Linear(8, 8) for name in "qkvo"}),
        {"x": x(1, 5, 8)},
        ("onnxsim", "onnxsim, no names"),
        owners={
            "Attention": [{"", "q", "k", "v"}],
            "Gemm": [{"o"}],
            "Reshape": [{"o"}, {"o"}],
        },
        fates={"o": "computed"},
        lost=frozenset("qkv"),
        options=UNFOLDED,
    ),
}
CHANGES["attention as one node of a pass"] = Change(
    CHANGES["attention as one node"].build,
    {"x": x(1, 5, 8)},
    ("fused",),
    owners={"Attention": [{"", "q", "k", "v"}], "MatMul": [{"o"}]},
    fates={"o": "computed"},
    lost=frozenset("qkv"),
    options={"dynamo": True},
)
CHANGES["a linear layer before a reshape of two modules"] = Change(
    HoldsRouted,
    sequence(),
    ("onnxsim",),
    owners={
        "Reshape": [{"first"}, {"first"}, {"routed"}, {"last"}, {"last"}],
        "Gemm": [{"first"}, {"routed.experts"}, {"last"}],
    },
    fates={"first": "computed", "routed.router": "computed", "last": "computed"},
    options={"dynamo": False},
    # the reshaped tensor, which `routed` and its router read, is the result of the Gemm now
    inexact=frozenset(("first", "routed", "routed.router")),
)


def wrong_signatures(model: nn.Module, inputs: dict[str, Any], path: Path) -> list[Any]:
    """The tensors of signatures whose values PyTorch did not pass."""
    file = onnx.load(path)
    calls = run_pytorch(model, inputs)[0]
    return [*named_wrongly(calls, file, values_of(file, inputs))]


CASES = [(change, engine) for change, found in CHANGES.items() for engine in found.engines]


@pytest.mark.parametrize(("change", "engine"), CASES, ids=[" - ".join(case) for case in CASES])
def test_a_change_has_the_same_owners_whoever_makes_it(
    change: str, engine: str, tmp_path: Path
) -> None:
    found = CHANGES[change]
    torch.manual_seed(0)
    model = spread(found.build()).eval()
    file, output = tmp_path / "model.onnx", tmp_path / "changed.onnx"
    if engine == "export":
        htp_export.export(model, (), output, kwargs=found.inputs, verbose=False, **found.exported)
    else:
        htp_export.export(model, (), file, kwargs=found.inputs, verbose=False, **found.options)
        ENGINES[engine](file, output)
    tagged = htp_export.load(output)
    nodes = {
        op: [node for node in tagged.nodes if node.op_type == op]
        for op in {*found.owners, *found.calls, *found.reasons}
    }
    for op, owners in found.owners.items():
        assert [set(tagged.owners_of(node)) for node in nodes[op]] == owners, op
    calls = {
        op: sorted({call.call for call in tagged.work_of(nodes[op][0]).calls}) for op in found.calls
    }
    assert calls == found.calls
    for op, reason in found.reasons.items():
        assert {node.metadata_props["htp.reason"] for node in nodes[op]} == {reason}
    assert {path: str(tagged[path].fate) for path in found.fates} == found.fates
    for group in found.groups:
        for path in group - {""}:
            assert {path, *tagged.hierarchy[path].fused_with} == group
    lost = set()
    for path, signatures in tagged.signatures.items():
        for signature in signatures:
            if None in (*signature.inputs.values(), *signature.outputs):
                lost.add(path)
    assert lost == found.lost
    assert wrong_signatures(model, found.inputs, output) == []
    faults = Judge(model, found.inputs, output).faults()
    assert {fault[0] for fault in faults} == found.inexact


@pytest.mark.parametrize(
    "engine", ["dynamo", "torchscript", "exact", "onnxslim", "onnxslim, no names"]
)
def test_numbers_are_in_no_signature(engine: str, tmp_path: Path) -> None:
    model, input = composed(with_numbers, patch=Sized(), out=nn.Linear(4, 2)).eval(), x(3, 4)
    file, output = tmp_path / "model.onnx", tmp_path / "changed.onnx"
    htp_export.export(
        model, (), file, kwargs={"x": input}, dynamo=engine != "torchscript", verbose=False
    )
    if engine in ENGINES:
        ENGINES[engine](file, output)
        file = output
    signature = htp_export.load(file).signature("patch")
    assert [*signature.inputs] == ["x"]
    assert len(signature.outputs) == 1
    assert wrong_signatures(model, {"x": input}, file) == []
