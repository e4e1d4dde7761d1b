"""Under TorchScript, operations that torch merges, replaces or makes out of place still belong to their modules."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import htp_export
from tests.exporting import BOTH, exported, metadata
from tests.extract.test_cutting import wrong_parts
from tests.nets import Apply, Holding, composed, ready, x
from tests.truth import fates_of, inexact, owners_by_type, owners_of, tree_of

Tensor = torch.Tensor


# --- transpositions that torch joins ---------------------------------------------------


class TurnsAround(Holding, s=nn.Sequential(nn.Conv1d(8, 8, 1))):
    def forward(self, x: Tensor) -> Tensor:
        return self.s(x.transpose(1, 2)).transpose(1, 2)


class TurnsTheResult(Holding, c=TurnsAround(), norm=nn.LayerNorm(8)):
    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.c(x).transpose(0, 1) + x.transpose(0, 1))


def permute(*order: int) -> nn.Module:
    return Apply(lambda x: x.permute(order))


def permutes(*orders: tuple[int, ...]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Tanh(), *(permute(*order) for order in orders), nn.Sigmoid())


class ProductOfTurned(nn.Module):
    """``Gemm`` takes a transposition of one of its inputs into its attributes."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.turned, self.first = composed(lambda self, x: self.fc(x).tanh().t(), fc=nn.Linear(4, 4)), first
        self.weight = nn.Parameter(torch.zeros(2, 5) if first else torch.zeros(5, 4))
        self.bias = nn.Parameter(torch.zeros(5) if first else torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        turned = self.turned(x)
        factors = (turned, self.weight) if self.first else (self.weight, turned)
        return torch.addmm(self.bias, *factors).sigmoid()


THREE = {"1": "fused", "2": "fused", "3": "fused"}


@pytest.mark.parametrize(
    ("make", "inputs", "expected"),
    [
        (TurnsTheResult, (2, 5, 8), {"c": "fused", "c.s": "computed", "norm": "computed"}),
        (lambda: ProductOfTurned(True), (2, 4), {"turned": "fused", "turned.fc": "computed"}),
        (lambda: ProductOfTurned(False), (2, 4), {"turned": "fused", "turned.fc": "computed"}),
        (permutes((1, 0, 2), (0, 2, 1), (2, 0, 1)), (2, 5, 8), THREE),
        (permutes((1, 2, 0), (1, 2, 0), (1, 2, 0)), (2, 5, 8), THREE),
        (permutes((0, 2, 1), (0, 2, 1), (1, 0, 2)), (2, 5, 8), {"1": "fused", "2": "fused", "3": "computed"}),
        # What the first made is made again at the end.
        (permutes((1, 0, 2), (0, 2, 1), (0, 2, 1)), (2, 5, 8), {"1": "computed", "2": "fused", "3": "fused"}),
        # The last one makes it of the same tensor, by the same work: they share the node.
        (permutes((0, 2, 1), (0, 2, 1), (0, 2, 1)), (2, 5, 8), {"1": "computed", "2": "fused", "3": "computed"}),
    ],
    ids=["issue", "gemm_first", "gemm_second", "three", "to_nothing", "cancel_first", "cancel_last", "all_equal"],
)
def test_transpositions_that_are_joined_are_fused_and_no_module_has_anothers_tensor(make, inputs, expected, tmp_path):
    model, kwargs = ready(make()), {"input" if isinstance(make(), nn.Sequential) else "x": x(*inputs)}
    file = exported(model, kwargs, "torchscript", tmp_path)
    assert {path: fates_of(file)[path] for path in expected} == expected
    assert inexact(model, kwargs, file) == []
    assert wrong_parts(model, kwargs, tmp_path / "model.onnx", tmp_path / "part.onnx") == []
    assert htp_export.verify(model, tmp_path / "model.onnx", tuple(kwargs.values())).ok


class TurnedBeside(nn.Module):
    """What a module turned is turned again, and is read beside that, too."""

    def __init__(self, order: tuple[int, ...], end: nn.Module) -> None:
        super().__init__()
        self.c, self.again, self.end = TurnsAround(), permute(*order), end

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        turned = self.c(x)
        return self.end(self.again(turned)), turned.sigmoid()


def test_a_module_whose_work_is_taken_back_is_no_identity(tmp_path):
    """Both tensors at its border are in the file, but no node makes the one of the other."""
    model, kwargs = ready(TurnedBeside((0, 2, 1), nn.Tanh())), {"x": x(2, 5, 8)}
    file = exported(model, kwargs, "torchscript", tmp_path)
    assert (tree_of(file)["again"]["fate"], tree_of(file)["again"]["with"]) == ("fused", ["c"])
    assert [path for path, _ in inexact(model, kwargs, file)] == ["c"]
    assert json.loads(metadata(file)["htp.contamination"])[0][0] == "c"


def test_a_tensor_that_is_read_inside_another_module_is_said_to_be_so(tmp_path):
    """Two transpositions are joined, and the tensor between them is needed too."""
    model, kwargs = ready(TurnedBeside((1, 0, 2), nn.LayerNorm(8))), {"x": x(2, 5, 8)}
    file = exported(model, kwargs, "torchscript", tmp_path)
    inside = next(node.output[0] for node in file.graph.node if node.op_type == "Conv")
    listed = json.loads(metadata(file)["htp.contamination"])
    assert sorted(listed) == [["again", inside, False], ["c", inside, True]]
    assert sorted(path for path, _ in inexact(model, kwargs, file)) == ["again", "c"]
    assert htp_export.extract(tmp_path / "model.onnx", "again").outside == (inside,)
    assert htp_export.verify(model, tmp_path / "model.onnx", (kwargs["x"],)).ok  # the tensors that are there are right


# --- changes in place ---------------------------------------------------


class ReadInParts(nn.Module):
    """What a module changed in place is read by an operation for which torch puts another."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.r, self.read = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU(inplace=True)), read
        self.a, self.b = nn.Conv2d(4, 3, 1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.read(self.r(x))
        return self.a(first) + self.b(second)


@pytest.mark.parametrize(
    "read",
    [
        lambda y: y.chunk(2, 1),
        lambda y: y.split(4, 1),
        lambda y: y.split([4, 4], 1),
        lambda y: (y[:, :4], y[:, 4:]),
        lambda y: y.unflatten(1, (2, 4)).unbind(1),
    ],
    ids=["chunk", "split", "sizes", "slices", "unbind"],
)
def test_what_is_changed_in_place_and_read_in_parts_is_its_modules_own(read, tmp_path):
    model, kwargs = ready(ReadInParts(read)), {"x": x(2, 4, 3, 3)}
    file = exported(model, kwargs, "torchscript", tmp_path)
    assert owners_by_type(file, "Relu")["Relu"] == [("r.1",)]
    assert set(fates_of(file).values()) == {"computed"}
    assert inexact(model, kwargs, file) == []
    assert wrong_parts(model, kwargs, tmp_path / "model.onnx", tmp_path / "part.onnx") == []


class LeakyPairs(
    Holding,
    a=nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(0.1, inplace=True)),
    b=nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(0.2, inplace=True), nn.LeakyReLU(0.3, inplace=True)),
    weight=nn.Parameter(torch.zeros(4, 2)),
):
    """Operations in place that differ in a constant alone, each read by an operation for which torch puts another."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.a(x).chunk(2, 1)
        return torch.tanh(first * second + (self.b(x).mm(self.weight) + self.weight[0]))


def test_operations_in_place_that_differ_in_a_constant_are_told_apart(tmp_path):
    model, kwargs = ready(LeakyPairs()), {"x": x(2, 4)}
    file = exported(model, kwargs, "torchscript", tmp_path)
    assert owners_by_type(file, "LeakyRelu")["LeakyRelu"] == [("a.1",), ("b.1",), ("b.2",)]
    assert set(fates_of(file).values()) == {"computed"}
    assert inexact(model, kwargs, file) == []


def adds_in_place(other: Any) -> nn.Module:
    return Apply(lambda x: x.clone().add_(other))


class AddsThrice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused, self.number, self.cast = map(adds_in_place, (1.0, 2.0, torch.tensor([3, 1, 4, 1])))

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x).chunk(2, 1)
        first, second = self.number(x).chunk(2, 1)
        third, fourth = self.cast(x).chunk(2, 1)
        return first * second + third * fourth


def test_an_operand_that_torch_casts_for_a_change_in_place_is_still_the_operand(tmp_path):
    model, kwargs = ready(AddsThrice()), {"x": x(2, 4)}
    file = exported(model, kwargs, "torchscript", tmp_path)
    added = [owners_of(node) for node in file.graph.node if node.op_type == "Add" and "onnx::Add_0" in node.input]
    assert added == [("number",), ("cast",)]
    assert fates_of(file) == {"": "computed", "unused": "dead", "number": "computed", "cast": "computed"}
    assert inexact(model, kwargs, file) == []


class ShiftsThenLooksUp(Holding, shifts=Apply(lambda x: (x >> 1) << 2), table=nn.Embedding(64, 4)):
    def forward(self, x: Tensor) -> Tensor:
        return self.table(self.shifts(x) + (x << 1))


def test_shifts_of_bits_change_nothing_in_place(tmp_path):
    """``aten::__rshift__`` is named like an operation in place."""
    model, kwargs = ready(ShiftsThenLooksUp()), {"x": torch.arange(6).reshape(2, 3)}
    file = exported(model, kwargs, "torchscript", tmp_path)
    assert set(fates_of(file).values()) == {"computed"}
    assert owners_by_type(file, "Div")["Div"] == [("shifts",)]
    assert owners_by_type(file, "Mul")["Mul"] == [("shifts",), ("",)]
    assert inexact(model, kwargs, file) == []


# --- hooks of the user ---------------------------------------------------


class Chain(Holding, first=nn.Linear(4, 4), extra=nn.Linear(4, 4), second=nn.Tanh()):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).abs()


@BOTH
def test_what_forward_hooks_compute_belongs_to_the_module_that_has_them(exporter, tmp_path):
    model = ready(Chain())
    model.first.register_forward_hook(lambda _module, _args, out: model.extra(out.exp()))
    model.second.register_forward_hook(lambda _module, _args, out: out.sin())
    model.second.register_forward_hook(lambda _module, _args, _kwargs, out: out.cos(), with_kwargs=True)
    model.register_forward_hook(lambda _module, _args, out: out.neg())
    file = exported(model, {"x": x(2, 4)}, exporter, tmp_path)
    found = {node.op_type: owners_of(node) for node in file.graph.node if node.op_type != "Gemm"}
    assert owners_by_type(file, "Gemm")["Gemm"] == [("first",), ("first", "extra")]
    assert found.pop("Exp") == ("first",)
    assert (found.pop("Tanh"), found.pop("Sin"), found.pop("Cos")) == (("second",),) * 3
    assert found == {"Abs": ("",), "Neg": ("",)}
    assert inexact(model, {"x": x(2, 4)}, file) == []


def test_an_export_that_fails_in_a_hook_leaves_the_hooks_as_they_were(tmp_path):
    def fails(*_: Any) -> None:
        raise RuntimeError("no")

    model = ready(Chain())
    model.second.register_forward_hook(fails)
    with pytest.raises(RuntimeError, match="no") as caught:
        exported(model, {"x": x(2, 4)}, "torchscript", tmp_path)
    assert "'second'" in caught.value.__notes__[0]
    assert [len(module._forward_hooks) for module in model.modules()] == [0, 0, 0, 1]
    assert list(tmp_path.iterdir()) == []
