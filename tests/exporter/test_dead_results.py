"""Modules with results that nothing reads: what is left of their work keeps its signature and its call."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import htp_export
from tests.exporting import BOTH, exported, quick
from tests.extract.test_cutting import wrong_parts
from tests.nets import spread, x
from tests.truth import equal, fates_of, run_pytorch, signatures_of, values_of

Tensor = torch.Tensor


def written(y: Tensor, k: int) -> Tensor:
    y = y.clone()
    y[:, :1].add_(k)
    return y


def written_beside(y: Tensor, k: int) -> Tensor:
    beside = y.clone()  # the same work, which nothing reads
    beside[:, :1].add_(k)
    return written(y, k)


# Each has the same kind of node for every ``k``.
WORK = {
    "reshape": lambda y, k: y.reshape(-1, 4),
    "scale": lambda y, k: y * k,
    "exp": lambda y, k: y.exp() - k,
    "sum": lambda y, k: y + y.sum(k % 2, keepdim=True),
    "written": written,
    "written beside": written_beside,
    "stack": lambda y, k: torch.stack([y, y + k]).mean(0),
}


class Part(nn.Module):
    """Gives several results of the same work: of one tensor, of slices of it, or of calls of a module."""

    def __init__(self, pick: random.Random) -> None:
        super().__init__()
        self.count, self.source = pick.choice((2, 3, 4)), pick.choice(("same", "chunk", "calls", "modules"))
        self.work = [WORK[pick.choice(list(WORK))]] * self.count
        if pick.random() < 0.3:
            self.work = [WORK[pick.choice(list(WORK))] for _ in range(self.count)]
        self.container = pick.choice((tuple, list, lambda values: dict(zip("abcd", values, strict=False))))
        if self.source == "chunk":
            self.fc = nn.Linear(4, 4 * self.count)
        elif self.source == "calls":
            self.fc = nn.Linear(4, 4)
        elif self.source == "modules":
            self.fc = nn.ModuleList(nn.Linear(4, 4) for _ in range(self.count))

    def forward(self, y: Tensor, other: Tensor) -> Any:
        match self.source:
            case "chunk":
                read = self.fc(y).chunk(self.count, -1)
            case "calls":
                read = [self.fc(y + k) if k else self.fc(y) for k in range(self.count)]
            case "modules":
                read = [fc(y) for fc in self.fc]
            case _:
                read = [y] * self.count
        pairs = enumerate(zip(self.work, read, strict=True))
        return self.container([work(each, k + 2) + other for k, (work, each) in pairs])


class Net(nn.Module):
    """Calls parts, some of them twice, and reads some of what they give."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        pick = random.Random(seed)
        self.parts = nn.ModuleList(Part(pick) for _ in range(3))
        self.order = [pick.randrange(3) for _ in range(pick.choice((3, 4, 5)))]
        self.read = [sorted(pick.sample(range(4), pick.choice((0, 1, 2)))) for _ in self.order]
        self.given = [(pick.random(), pick.random()) for _ in self.order]
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        values = [x, x * 2]
        for number, read, (first, second) in zip(self.order, self.read, self.given, strict=True):
            given = values[int(first * len(values))], values[int(second * len(values))]
            results = self.parts[number](*given)
            results = list(results.values()) if isinstance(results, dict) else results
            values += [results[k] for k in read if k < len(results)]
        return self.out(torch.stack(values[2:] or values).sum(0))


def faults(model: nn.Module, kwargs: dict[str, Any], exporter: str, folder: Path) -> list[Any]:
    """Tensors that signatures name wrongly or not at all, and modules that do something else when they are cut out."""
    file = exported(model, kwargs, exporter, folder)
    calls, (result,) = run_pytorch(model, kwargs)
    values, wrong = values_of(file, kwargs), list[Any]()
    for path, signatures in signatures_of(file).items():
        for nth, (call, signature) in enumerate(zip(calls[path], signatures, strict=True)):
            named = [*zip(call.given, signature.inputs.values(), strict=True)]
            named += zip(call.returned, signature.outputs, strict=True)
            wrong += [(path, nth, name) for array, name in named if name and not equal(values[name], array)]
            for place, name in enumerate(signature.outputs):
                if name is None and not equal(run_pytorch(model, kwargs, (path, nth, place))[1][0], result):
                    wrong.append((path, nth, place, "is read, and has no name"))
    return wrong + wrong_parts(model, kwargs, folder / "model.onnx", folder / "part.onnx")


@pytest.mark.parametrize(
    ("seed", "exporter"),
    quick(
        [*((seed, "torchscript") for seed in range(16)), *((seed, "dynamo") for seed in range(2))],
        *((seed, "torchscript") for seed in range(8)),
        (0, "dynamo"),
    ),
)
def test_modules_of_random_nets_keep_their_results_and_calls(seed: int, exporter: str, tmp_path: Path) -> None:
    assert faults(spread(Net(seed)).eval(), {"x": x(4, 4)}, exporter, tmp_path) == []


class Chunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 9)

    def forward(self, x: Tensor) -> Any:
        p, q, r = self.fc(x).chunk(3, -1)
        return p.reshape(-1, 3), q.reshape(-1, 3), r.reshape(-1, 3)


class Sum(nn.Module):
    def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return x.sum() + a * 2 + b.exp()


class LeavesTheFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.chunk, self.sum = Chunk(), Sum()

    def forward(self, x: Tensor) -> Tensor:
        _, a, b = self.chunk(x)
        return self.sum(x.reshape(-1, 4), a, b)


@BOTH
def test_results_after_one_that_nothing_reads_have_their_places(exporter: str, tmp_path: Path) -> None:
    model, kwargs = spread(LeavesTheFirst()).eval(), {"x": x(2, 4, 4)}
    assert faults(model, kwargs, exporter, tmp_path) == []
    file = exported(model, kwargs, exporter, tmp_path)
    signatures = signatures_of(file)
    first, *others = signatures["chunk"][0].outputs
    assert first is None
    assert [signatures["sum"][0].inputs[name] for name in "ab"] == others


class ReadsTheSecondCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.fc(x)
        return self.fc(x + 1)


@BOTH
def test_a_node_of_a_second_call_is_none_of_a_first_that_nothing_reads(exporter: str, tmp_path: Path) -> None:
    exported(spread(ReadsTheSecondCall()).eval(), {"x": x(2, 4)}, exporter, tmp_path)
    region = htp_export.load(tmp_path / "model.onnx")["fc"]
    assert (len(region.call(0).nodes), len(region.call(1).nodes)) == (0, len(region.nodes))


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


@BOTH
@pytest.mark.parametrize("kind", UNREAD)
def test_modules_are_dead_whatever_operators_do_the_work_that_nothing_reads(
    kind: str, exporter: str, tmp_path: Path
) -> None:
    file = exported(spread(ReadsNothingOfIt(kind)).eval(), {"x": x(2, 4, 4)}, exporter, tmp_path)
    assert {path: fates_of(file)[path] for path in ("fc", "unread")} == dict.fromkeys(("fc", "unread"), "dead")
