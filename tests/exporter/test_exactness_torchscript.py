"""Under TorchScript, operations that torch merges, replaces or makes out of place still belong to their modules."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import htp_export
from htp_export.exporter.capture.jit_rewriting import follow
from htp_export.exporter.capture.torchscript_internals import JitStep, Reading
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
        self.turned, self.first = (
            composed(lambda self, x: self.fc(x).tanh().t(), fc=nn.Linear(4, 4)),
            first,
        )
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
        (
            permutes((0, 2, 1), (0, 2, 1), (1, 0, 2)),
            (2, 5, 8),
            {"1": "fused", "2": "fused", "3": "computed"},
        ),
        # What the first made is made again at the end.
        (
            permutes((1, 0, 2), (0, 2, 1), (0, 2, 1)),
            (2, 5, 8),
            {"1": "computed", "2": "fused", "3": "fused"},
        ),
        # The last one makes it of the same tensor, by the same work: they share the node.
        (
            permutes((0, 2, 1), (0, 2, 1), (0, 2, 1)),
            (2, 5, 8),
            {"1": "computed", "2": "fused", "3": "computed"},
        ),
    ],
    ids=[
        "issue",
        "gemm_first",
        "gemm_second",
        "three",
        "to_nothing",
        "cancel_first",
        "cancel_last",
        "all_equal",
    ],
)
def test_transpositions_that_are_joined_are_fused_and_no_module_has_anothers_tensor(
    make, inputs, expected, tmp_path
):
    model, kwargs = (
        ready(make()),
        {"input" if isinstance(make(), nn.Sequential) else "x": x(*inputs)},
    )
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
    """Two transpositions are joined, and the tensor between them is needed too: one node does the work of both."""
    model, kwargs = ready(TurnedBeside((1, 0, 2), nn.LayerNorm(8))), {"x": x(2, 5, 8)}
    file = exported(model, kwargs, "torchscript", tmp_path)
    inside = next(node.output[0] for node in file.graph.node if node.op_type == "Conv")
    _, joined = (
        node for node in file.graph.node if node.op_type == "Transpose" and inside in node.input
    )
    assert (owners_of(joined), metadata(joined)["htp.reason"]) == (("c", "again"), "fused")
    listed = json.loads(metadata(file)["htp.contamination"])
    assert sorted(listed) == [["again", inside, False], ["c", joined.output[0], True]]
    assert sorted(path for path, _ in inexact(model, kwargs, file)) == ["again", "c"]
    assert htp_export.extract(tmp_path / "model.onnx", "again").outside == (inside,)
    # the tensors that are there are right
    assert htp_export.verify(model, tmp_path / "model.onnx", (kwargs["x"],)).ok


# --- recurrent layers, which transpose at both ends ---------------------------------------------------


class Stacked(nn.Module):
    """Recurrent layers one after the other, with what is computed between them."""

    def __init__(
        self, layers: list[nn.Module], between: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.r, self.d, self.between = nn.ModuleList(layers), nn.Dropout(), between

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.r:
            x = self.d(layer(x if self.between is None else self.between(x))[0])
        return x


def recurrent(kind: type[nn.RNNBase], count: int, **options: Any) -> list[nn.Module]:
    return [
        kind(4, 4 // (1 + bool(options.get("bidirectional"))), batch_first=True, **options)
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("make", "operator"),
    [
        (lambda: Stacked(recurrent(nn.LSTM, 2)), "LSTM"),
        (lambda: Stacked(recurrent(nn.GRU, 3)), "GRU"),
        (lambda: Stacked(recurrent(nn.RNN, 3)), "RNN"),
        (lambda: Stacked(recurrent(nn.GRU, 2, bidirectional=True)), "GRU"),
        (lambda: Stacked(recurrent(nn.LSTM, 2, num_layers=2)), "LSTM"),
        # cancels with both
        (lambda: Stacked(recurrent(nn.LSTM, 3), lambda x: x.transpose(0, 1)), "LSTM"),
        # is joined with both
        (lambda: Stacked(recurrent(nn.GRU, 2), lambda x: x.permute(1, 2, 0)), "GRU"),
        (
            lambda: Stacked(recurrent(nn.RNN, 2), lambda x: x.permute(2, 0, 1).permute(1, 2, 0)),
            "RNN",
        ),
    ],
    ids=[
        "lstm",
        "gru",
        "rnn",
        "both_ways",
        "inner_layers",
        "turned_by_the_root",
        "joined_with_the_root",
        "turned_twice",
    ],
)
def test_transpositions_that_cancel_make_no_layer_an_owner_of_the_next(make, operator, tmp_path):
    """Joined ones do the work of both; ones that cancel do nobody's."""
    model, kwargs = ready(make()), {"x": x(4, 4, 4)}
    file = exported(model, kwargs, "torchscript", tmp_path)
    layers = [owners for owners in owners_by_type(file, operator)[operator] for _ in owners]
    assert sorted(set(layers)) == [(f"r.{place}",) for place in range(len(model.r))]
    work = [
        (node.op_type, owners_of(node))
        for node in file.graph.node
        if node.op_type not in ("Constant", "Transpose")
    ]
    assert [each for each in work if len(each[1]) != 1 or each[1] in ((), ("",), ("d",))] == []
    assert fates_of(file)["d"] == "identity"
    assert inexact(model, kwargs, file) == []
    flops = htp_export.cost(tmp_path / "model.onnx").modules
    assert sum(flops[f"r.{place}"].flops for place in range(len(model.r))) == flops[""].flops > 0


def test_the_transposition_of_two_is_owned_by_both_and_nothing_else_is(tmp_path):
    model, kwargs = (
        ready(Stacked(recurrent(nn.GRU, 2), lambda x: x.permute(1, 2, 0))),
        {"x": x(4, 4, 4)},
    )
    file = exported(model, kwargs, "torchscript", tmp_path)
    shared = [
        (node.op_type, owners_of(node)) for node in file.graph.node if len(owners_of(node)) > 1
    ]
    assert shared == [("Transpose", ("", "r.0")), ("Transpose", ("", "r.0", "r.1"))]


class TurnsBetween(
    Holding,
    first=composed(lambda self, x: self.r(x)[0].permute(2, 0, 1), r=nn.GRU(4, 4, batch_first=True)),
    second=composed(lambda self, x: self.r(x.transpose(0, 1))[0], r=nn.GRU(4, 4, batch_first=True)),
):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_the_last_of_transpositions_that_cancel_in_part_does_the_work_of_the_first(tmp_path):
    """Torch keeps the opening one of the second layer, with the order of axes of what the first module returned."""
    model, kwargs = ready(TurnsBetween()), {"x": x(4, 4, 4)}
    file = exported(model, kwargs, "torchscript", tmp_path)
    tree = tree_of(file)
    fates = {path: (entry["fate"], entry.get("with")) for path, entry in tree.items()}
    assert fates == {
        "": ("computed", None),
        "first": ("computed", None),
        "first.r": ("fused", ["first"]),
        "second": ("computed", None),
        "second.r": ("fused", ["second"]),
    }
    assert owners_by_type(file, "Transpose")["Transpose"] == [
        ("first.r",),
        ("first", "first.r"),
        ("second.r",),
    ]
    assert inexact(model, kwargs, file) == []


def test_a_plan_for_one_of_two_recurrent_layers_skips_no_node_of_the_other(tmp_path):
    model, kwargs = ready(Stacked(recurrent(nn.LSTM, 2))), {"x": x(4, 4, 4)}
    exported(model, kwargs, "torchscript", tmp_path)
    modules = htp_export.quantize(
        tmp_path / "model.onnx", {"r.1": "int8"}, tmp_path / "q.onnx"
    ).modules
    counts = {path: (modules[path].nodes, modules[path].precision) for path in ("", "r.0", "r.1")}
    half = counts["r.1"][0]
    assert counts == {"": (2 * half, "mixed"), "r.0": (half, "fp32"), "r.1": (half, "int8")}


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
    b=nn.Sequential(
        nn.Linear(4, 4), nn.LeakyReLU(0.2, inplace=True), nn.LeakyReLU(0.3, inplace=True)
    ),
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
        self.unused, self.number, self.cast = map(
            adds_in_place, (1.0, 2.0, torch.tensor([3, 1, 4, 1]))
        )

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x).chunk(2, 1)
        first, second = self.number(x).chunk(2, 1)
        third, fourth = self.cast(x).chunk(2, 1)
        return first * second + third * fourth


def test_an_operand_that_torch_casts_for_a_change_in_place_is_still_the_operand(tmp_path):
    model, kwargs = ready(AddsThrice()), {"x": x(2, 4)}
    file = exported(model, kwargs, "torchscript", tmp_path)
    added = [
        owners_of(node)
        for node in file.graph.node
        if node.op_type == "Add" and "onnx::Add_0" in node.input
    ]
    assert added == [("number",), ("cast",)]
    assert fates_of(file) == {
        "": "computed",
        "unused": "dead",
        "number": "computed",
        "cast": "computed",
    }
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
    model.second.register_forward_hook(
        lambda _module, _args, _kwargs, out: out.cos(), with_kwargs=True
    )
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


def test_equal_operations_that_are_merged_into_one_node_before_them_have_its_result():
    def steps(weight: int, *later: JitStep) -> list[JitStep]:
        return [JitStep("onnx::Conv", (0, weight), (10,)), *later]

    norms = [JitStep("onnx::BatchNormalization", (10, 2), (number,)) for number in (11, 12)]
    reads = [JitStep("onnx::Add", (11, 12), (13,)), JitStep("onnx::Add", (10, 10), (13,))]
    before = Reading(steps(1, *norms, reads[0]), inputs=[0], parameters=[1, 2], outputs=[13])
    after = Reading(steps(3, reads[1]), inputs=[0], parameters=[3], outputs=[13])
    assert follow(before, after) == {0: 0, 11: 10, 12: 10, 13: 13}
