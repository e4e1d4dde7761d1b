"""Modules with results that nothing reads: what is left of their work keeps its signature and its call."""

import itertools
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import htp_export
import htp_export.tools
from tests.exporting import BOTH, exported, quick
from tests.extract.test_cutting import wrong_parts
from tests.nets import EXPORTERS, Holding, spread, x
from tests.truth import (
    equal,
    fates_of,
    inexact,
    named_wrongly,
    run_pytorch,
    signatures_of,
    values_of,
)

Tensor = torch.Tensor


def faults(
    model: nn.Module, kwargs: dict[str, Any], file: onnx.ModelProto, folder: Path
) -> list[Any]:
    """Tensors that signatures name wrongly or not at all, and modules that do something else when they are cut out."""
    calls, (result,) = run_pytorch(model, kwargs)
    wrong: list[Any] = [*named_wrongly(calls, file, values_of(file, kwargs))]
    unnamed = (
        (path, nth, place)
        for path, signatures in signatures_of(file).items()
        for nth, signature in enumerate(signatures)
        for place, name in enumerate(signature.outputs)
        if name is None
    )
    wrong += [
        result_of
        for result_of in unnamed
        if not equal(run_pytorch(model, kwargs, result_of)[1][0], result)
    ]
    return wrong + wrong_parts(model, kwargs, folder / "model.onnx", folder / "part.onnx")


class Chunk(Holding, fc=nn.Linear(4, 9)):
    def forward(self, x: Tensor) -> Any:
        p, q, r = self.fc(x).chunk(3, -1)
        return p.reshape(-1, 3), q.reshape(-1, 3), r.reshape(-1, 3)


class Sum(nn.Module):
    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return x.sum() + a * 2 + b.exp()


class LeavesOne(nn.Module):
    def __init__(self, unread: int) -> None:
        super().__init__()
        self.chunk, self.sum, self.unread = Chunk(), Sum(), unread

    def forward(self, x: Tensor) -> Tensor:
        read = [each for place, each in enumerate(self.chunk(x)) if place != self.unread]
        return self.sum(x.reshape(-1, 4), *read)


@pytest.mark.parametrize(
    ("unread", "exporter"),
    quick(itertools.product(range(3), EXPORTERS), *((k, "torchscript") for k in range(3))),
)
def test_results_beside_one_that_nothing_reads_have_their_places(unread, exporter, tmp_path):
    model, kwargs = spread(LeavesOne(unread)).eval(), {"x": x(2, 4, 4)}
    file = exported(model, kwargs, exporter, tmp_path)
    assert faults(model, kwargs, file, tmp_path) == []
    signatures = signatures_of(file)
    outputs = list(signatures["chunk"][0].outputs)
    assert outputs.pop(unread) is None
    assert [signatures["sum"][0].inputs[name] for name in "ab"] == outputs


class ReadsTheSecondCall(Holding, fc=nn.Linear(4, 4)):
    def forward(self, x: Tensor) -> Tensor:
        self.fc(x)
        return self.fc(x + 1)


@BOTH
def test_a_node_of_a_second_call_is_none_of_a_first_that_nothing_reads(exporter, tmp_path):
    exported(spread(ReadsTheSecondCall()).eval(), {"x": x(2, 4)}, exporter, tmp_path)
    region = htp_export.load(tmp_path / "model.onnx")["fc"]
    assert (len(region.call(0).nodes), len(region.call(1).nodes)) == (0, len(region.nodes))


class GivesWhatItChanged(Holding, fc=nn.Linear(4, 4)):
    def forward(self, x: Tensor) -> Tensor:
        y = x.exp()
        y[:, 0] = 1.0
        self.fc(y)
        return y


@BOTH
def test_a_dead_module_was_given_what_a_tensor_was_then(exporter, tmp_path):
    model, kwargs = spread(GivesWhatItChanged()).eval(), {"x": x(2, 4)}
    file = exported(model, kwargs, exporter, tmp_path)
    assert fates_of(file)["fc"] == "dead"
    assert faults(model, kwargs, file, tmp_path) == []


def changed_in_place(y: Tensor) -> None:
    y = y.clone()
    y[:, 0] = 1.0


# What torch calls impure, each for a reason of its own, and a tensor that it makes an input of the traced graph.
UNREAD = {
    "random, if it drops out": lambda y: torch.nn.functional.scaled_dot_product_attention(y, y, y),
    "asserted to be of a type": lambda y: (y * 2).to(torch.float64),
    "changed in place": changed_in_place,
    "picked by a constant": lambda y: y.index_select(1, torch.tensor([1, 0])),
}


class DoesUnread(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, y: Tensor) -> Tensor:
        UNREAD[self.kind](y)
        return y


class ReadsNothingOfIt(nn.Module):
    """Reads what a module takes, and nothing that it computes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.unread = nn.Linear(4, 4), DoesUnread(kind)

    def forward(self, x: Tensor) -> Tensor:
        self.unread(self.fc(x))
        return x * 2


@pytest.mark.long
@BOTH
@pytest.mark.parametrize("kind", UNREAD)
def test_modules_are_dead_whatever_operators_do_the_work_that_nothing_reads(
    kind, exporter, tmp_path
):
    file = exported(spread(ReadsNothingOfIt(kind)).eval(), {"x": x(2, 4, 4)}, exporter, tmp_path)
    assert {path: fates_of(file)[path] for path in ("fc", "unread")} == dict.fromkeys(
        ("fc", "unread"), "dead"
    )


class Casts(Holding, fc=nn.Linear(4, 4)):
    """Begins with a cast to the type that there is: what is read afterwards is what it gave, for the tracer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x.to(torch.float32) * 2)


class ReadsTheCast(Holding, casts=Casts()):
    def forward(self, x: Tensor) -> Tensor:
        self.casts(x)
        return x.tanh()


@pytest.mark.parametrize("removed", [htp_export.optimize, htp_export.tools.onnxoptimizer])
def test_a_module_that_loses_its_last_node_is_dead_if_nothing_read_its_result(removed, tmp_path):
    model, kwargs = spread(ReadsTheCast()).eval(), {"x": x(2, 4)}
    assert fates_of(exported(model, kwargs, "torchscript", tmp_path))["casts"] == "computed"
    removed(tmp_path / "model.onnx", tmp_path / "smaller.onnx")
    assert fates_of(onnx.load(str(tmp_path / "smaller.onnx")))["casts"] == "dead"
    assert inexact(model, kwargs, tmp_path / "smaller.onnx") == []


class Table(nn.Module):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(4)[None].cos()


class ReadsATable(Holding, fc=nn.Linear(4, 4), table=Table()):
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.table(x)


class ReadsOneOfTwo(Holding, unread=ReadsATable(), read=ReadsATable()):
    def forward(self, x: Tensor) -> Tensor:
        self.unread(x)
        return self.read(x)


@BOTH
def test_a_dead_module_is_dead_although_torch_leaves_constants_of_it_in_the_graph(
    exporter, tmp_path
):
    model, kwargs = spread(ReadsOneOfTwo()).eval(), {"x": x(2, 4)}
    fates = fates_of(exported(model, kwargs, exporter, tmp_path))
    assert [fates[path] for path in ("unread", "unread.fc", "read.table")] == [
        "dead",
        "dead",
        "constant",
    ]
