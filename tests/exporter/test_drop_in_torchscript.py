"""Models of which torch's TorchScript exporter does not trace a plain ``nn.Module``, or names what it traces."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.ao.nn.quantized import FloatFunctional

import htp_export
from tests import truth
from tests.nets import Holding, spread, x
from tests.same_graph import assert_same_graph
from tests.truth import fates_of, inexact, tree_of, untagged, work_of

Tensor = torch.Tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:Currently, qnnpack"),
    pytest.mark.filterwarnings("ignore:no signature found"),  # for the method of a frozen module
]


def export(
    exporter: Any, model: Any, args: tuple[Any, ...], folder: Path, **options: Any
) -> onnx.ModelProto:
    exporter(model, args, folder / "model.onnx", dynamo=False, verbose=False, **options)
    return onnx.load(str(folder / "model.onnx"))


# --- quantized models ---------------------------------------------------


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "qnnpack"
    yield
    torch.backends.quantized.engine = before


class Block(Holding, conv=nn.Conv2d(3, 4, 3), act=nn.ReLU()):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv(x))


class Stubbed(Holding, quant=quantization.QuantStub(), dequant=quantization.DeQuantStub()):
    """A model between the modules that quantize and dequantize."""


class Blocks(Stubbed):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())])
        self.pool, self.flat, self.fc = nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.quant(x)
        for block in self.blocks:
            x = block(x)
        return self.dequant(self.fc(self.flat(self.pool(x))))


class Residual(Holding, conv=nn.Conv2d(4, 4, 1), act=nn.ReLU(), plus=FloatFunctional()):
    def forward(self, x: Tensor) -> Tensor:
        return self.plus.add(x, self.act(self.conv(x)))


class CalledTwice(Stubbed):
    """torch keeps no scope for a module's second call; and two modules have the same last name."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.residual, self.last = nn.Conv2d(3, 4, 1), Residual(), nn.ReLU()
        self.heads = nn.ModuleDict(
            {"a": nn.ModuleList([nn.Conv2d(4, 4, 1)]), "b": nn.ModuleList([nn.Conv2d(4, 4, 1)])}
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.residual(self.residual(self.stem(self.quant(x))))
        x = self.heads["b"][0](self.heads["a"][0](x))
        return self.dequant(self.last(x))


class Concatenates(Stubbed):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 6), nn.Linear(4, 6)
        self.plus = FloatFunctional()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.a(self.quant(x))
        return self.dequant(self.plus.cat([self.b(x), self.c(x)], 1)), self.dequant(x)


def quantized(model: nn.Module, given: Tensor, *fused: list[str]) -> nn.Module:
    model = spread(model).eval()
    model.qconfig = quantization.get_default_qconfig("qnnpack")
    prepared = quantization.prepare(
        quantization.fuse_modules(model, list(fused)) if fused else model
    )
    prepared(given)
    return quantization.convert(prepared)


def image() -> Tensor:
    return x(1, 3, 6, 6)


def work(*steps: str) -> list[tuple[str, tuple[str, ...]]]:
    """Operators and their owners, written as ``Conv blocks.0.conv``."""
    return [(kind, (path,)) for kind, _, path in (step.partition(" ") for step in steps)]


BLOCKS = work(
    "QuantizeLinear quant",
    "Conv blocks.0.conv",
    "QuantizeLinear blocks.0.conv",
    "Relu blocks.0.act",
)
BLOCKS += work(
    "QuantizeLinear blocks.0.act", "Conv blocks.1.0", "QuantizeLinear blocks.1.0", "Relu blocks.1.1"
)
REST = work("GlobalAveragePool pool", "QuantizeLinear pool", "Flatten flat", "QuantizeLinear flat")
REST += work("Gemm fc", "QuantizeLinear fc")
BLOCKS += [*work("QuantizeLinear blocks.1.1"), *REST]
FUSED = work(
    "QuantizeLinear quant",
    "Conv blocks.0.conv",
    "Relu blocks.0.conv",
    "QuantizeLinear blocks.0.conv",
)
FUSED += [*work("Conv blocks.1.0", "Relu blocks.1.0", "QuantizeLinear blocks.1.0"), *REST]
RESIDUAL = ("Conv residual.conv", "Relu residual.act", "Add residual")
BESIDE = work("Gemm a", "Gemm b", "Gemm c", "Concat ")
TWICE = work("Conv stem", *RESIDUAL, *RESIDUAL, "Conv heads.a.0", "Conv heads.b.0", "Relu last")
KINDS = ("QuantizeLinear", "Conv", "Relu", "GlobalAveragePool", "Flatten", "Gemm")


def one_step(one: truth.Array, other: truth.Array) -> bool:
    """Equal, but for one step of a quantized scale: ONNX Runtime and PyTorch round at other places."""
    if one.shape != other.shape:
        return False
    step = 1 if one.dtype == np.uint8 else 0.03 * float(np.abs(other).max(initial=0))
    return bool(np.allclose(one.astype(np.float64), other.astype(np.float64), rtol=0, atol=step))


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "given", "kinds", "expected"),
    [
        (lambda: quantized(Blocks(), image()), image(), KINDS, BLOCKS),
        (
            lambda: quantized(
                Blocks(), image(), ["blocks.0.conv", "blocks.0.act"], ["blocks.1.0", "blocks.1.1"]
            ),
            image(),
            KINDS,
            FUSED,
        ),
        (lambda: quantized(CalledTwice(), image()), image(), ("Conv", "Relu", "Add"), TWICE),
        (lambda: quantized(Concatenates(), x(2, 4)), x(2, 4), ("Gemm", "Concat"), BESIDE),
    ],
    ids=["blocks", "fused_before", "called_twice", "two_outputs"],
)
def test_each_node_of_a_quantized_model_belongs_to_its_module(
    make, given, kinds, expected, tmp_path
):
    model = make()
    # the first export of a structure gives nodes other names
    export(torch.onnx.export, model, (given,), tmp_path)
    plain = export(torch.onnx.export, model, (given,), tmp_path)
    file = export(htp_export.export, model, (given,), tmp_path)
    assert_same_graph(file, plain)
    assert (work_of(file, *kinds), untagged(file)) == (expected, [])
    with mock.patch.object(truth, "equal", one_step):
        assert inexact(model, {"x": given}, file) == []


def test_verify_reads_the_integers_of_quantized_tensors(tmp_path):
    model = quantized(Concatenates(), x(2, 4))
    export(htp_export.export, model, (x(2, 4),), tmp_path)
    report = htp_export.verify(model, tmp_path / "model.onnx", (x(2, 4),))
    assert all(report.modules[path].max_abs <= 1 for path in ("quant", "a", "b", "c"))


def test_a_model_that_torch_cannot_export_fails_as_under_torch(tmp_path):
    model = quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)).eval(), {nn.Linear})
    messages = []
    for exporter in (torch.onnx.export, htp_export.export):
        with pytest.raises(torch.onnx.errors.UnsupportedOperatorError) as caught:
            export(exporter, model, (x(2, 4),), tmp_path)
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert "linear_dynamic" in messages[0]


class Gradient(Holding, energy=nn.Linear(4, 1), fc=nn.Linear(4, 4)):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.func.grad(lambda x: self.energy(x).tanh().sum())(x))


class GradientOfRead(Holding, fc=nn.Linear(4, 4)):
    """The gradient of a function that reads a number of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: self.fc(x).sum() * self.fc(x).sum().item())(x)


@pytest.mark.parametrize("model", [Gradient, GradientOfRead])
def test_a_gradient_in_a_model_ends_the_export_as_under_torch(model, tmp_path):
    """The tracer knows no wrapped tensor; asked for one, it crashes the process."""
    outcomes = []
    for exporter in (torch.onnx.export, htp_export.export):
        try:
            outcomes.append(export(exporter, model().eval(), (x(2, 4),), tmp_path) is not None)
        except RuntimeError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]


class Valued(Holding, fc=nn.Linear(4, 4)):
    """Equal to every other one."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Valued)

    def __hash__(self) -> int:
        return 0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).tanh()


def test_a_module_that_torch_leaves_out_because_it_equals_another_is_work_of_its_caller(tmp_path):
    net = nn.Sequential(Valued(), Valued()).eval()
    assert [name for name, _ in net.named_modules()] == ["", "0", "0.fc"]
    plain = export(torch.onnx.export, net, (x(2, 4),), tmp_path)
    file = export(htp_export.export, net, (x(2, 4),), tmp_path)
    assert_same_graph(file, plain)
    assert work_of(file) == [
        ("Gemm", ("0.fc",)),
        ("Tanh", ("0",)),
        ("Gemm", ("",)),
        ("Tanh", ("",)),
    ]
    assert htp_export.verify(net, tmp_path / "model.onnx", (x(2, 4),)).ok


# --- scripted and frozen modules, modules that bring their arguments -----------------------------------


def test_a_frozen_module_is_exported_and_ran_once(tmp_path):
    net = spread(nn.Sequential(nn.Linear(4, 3), nn.ReLU())).eval()
    frozen = torch.jit.freeze(torch.jit.trace(net, (x(2, 4),)))
    plain = export(torch.onnx.export, frozen, (x(2, 4),), tmp_path)
    file = export(htp_export.export, frozen, (x(2, 4),), tmp_path)
    assert_same_graph(file, plain)
    assert (untagged(file), tree_of(file)[""]["calls"]) == ([], 1)


class BringsArguments(Holding, fc=nn.Linear(4, 3)):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.fc(x))

    def example_arguments(self) -> tuple[tuple[Any, ...], None]:
        return (torch.ones(2, 4),), None


@pytest.mark.skipif(not hasattr(torch.onnx, "ExportableModule"), reason="since torch 2.11")
@pytest.mark.parametrize("dynamo", [True, False])
def test_a_module_that_brings_its_arguments_has_tags_whatever_dynamo_says(dynamo, tmp_path):
    """torch gives it to the dynamo exporter in both cases."""
    exportable = type("Exportable", (BringsArguments, torch.onnx.ExportableModule), {})
    htp_export.export(exportable().eval(), f=tmp_path / "model.onnx", dynamo=dynamo, verbose=False)
    assert work_of(onnx.load(str(tmp_path / "model.onnx")), "Gemm", "Relu") == [
        ("Gemm", ("fc",)),
        ("Relu", ("",)),
    ]


# --- names ---------------------------------------------------


class ReadsPairs(nn.Module):
    def forward(self, pairs: dict[Tensor, Tensor]) -> Tensor:
        return sum((key * value for key, value in pairs.items()), start=torch.zeros(2))


class HoldsPairs(Holding, reads=ReadsPairs(), act=nn.Tanh()):
    def forward(self, x: Tensor, pairs: dict[Tensor, Tensor]) -> Tensor:
        return self.act(self.reads(pairs) + x)


def test_values_have_the_names_that_torch_gives_where_tensors_are_keys(tmp_path):
    """The tracer names values by variables of Python; none of ours must be found there."""
    files = []
    for exporter in (torch.onnx.export, htp_export.export):
        pairs = {torch.full((2,), 2.0): x(2, seed=1), torch.full((2,), 3.0): x(2, seed=2)}
        files.append(export(exporter, HoldsPairs().eval(), (x(2), pairs, {}), tmp_path))
    assert_same_graph(files[1], files[0])
    assert work_of(files[1], "Mul", "Tanh") == [
        ("Mul", ("reads",)),
        ("Mul", ("reads",)),
        ("Tanh", ("act",)),
    ]
    assert fates_of(files[1]) == {"": "computed", "reads": "computed", "act": "computed"}
