"""The modules that a fused one is named with: found alike by an export, by `carry` and by passes."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.optimize.bookkeeping import SignatureEvidence
from htp_export.format.call_tree import CallTree
from htp_export.format.fates import Fate
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.model.boundaries import Boundaries
from htp_export.model.fates import FateEvidence, Outcome, find_fates, fused_with
from htp_export.tools import onnxscript, onnxslim
from tests.exporting import BOTH, exported
from tests.graphs import Builder
from tests.handmade import stripped
from tests.nets import EXPORTERS, NETS, Apply, spread, x
from tests.truth import inexact

# Permutations, one after another: all that come out in between are different, and so are the first and the last one.
TURNS = [order for order in itertools.permutations(range(4)) if order != (0, 1, 2, 3)]


class Turns(nn.Module):
    """Modules whose transpositions exporters merge into one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        reached, orders = [(0, 1, 2, 3)], list[tuple[int, ...]]()
        while len(orders) < count:
            steps = ((order, tuple(reached[-1][axis] for axis in order)) for order in TURNS)
            order, result = next((order, result) for order, result in steps if result not in reached)
            orders.append(order)
            reached.append(result)
        self.turns = nn.ModuleList(Apply(lambda x, order=order: x.permute(order)) for order in orders)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for turn in self.turns:
            x = turn(x)
        return x


class Merged(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.first, self.chain, self.last = nn.Linear(3, 3), Turns(count), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.chain(self.first(x)))


def partners(model: Any) -> dict[str, tuple[str, ...]]:
    tree = htp_export.load(model).hierarchy
    return {path: tree[path].fused_with for path in tree if tree[path].fate == "fused"}


@BOTH
@pytest.mark.parametrize("count", [14, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 3, 8))])
def test_modules_merged_into_one_node_have_partners_that_carry_finds_too(count, exporter, tmp_path):
    model, kwargs = spread(Merged(count)).eval(), {"x": x(3, 3, 3, 3)}
    file = exported(model, kwargs, exporter, tmp_path)
    tagged = htp_export.load(file)
    found = partners(tagged)
    assert found
    for path, others in found.items():
        assert 1 <= len(others) < 12
        assert any(tagged[other].nodes for other in (path, *others)), path
    assert partners(htp_export.carry(file, stripped(tagged.model)).model) == found
    if exporter == "dynamo":
        assert inexact(model, kwargs, file) == []
        assert set(found) == {f"chain.turns.{place}" for place in range(count)}


def test_a_folded_convolution_has_the_same_partners_whoever_folded_it(tmp_path):
    model, kwargs = NETS["conv_bn_relu"].build()
    unfolded = exported(model, kwargs, "torchscript", tmp_path, training=torch.onnx.TrainingMode.PRESERVE)
    assert [node.op_type for node in unfolded.graph.node] == ["Conv", "BatchNormalization", "Relu", "Conv"]
    assert partners(unfolded) == {}
    expected = {"0": ("1",), "1": ("0",)}
    for exporter in EXPORTERS:
        assert partners(exported(model, kwargs, exporter, tmp_path)) == expected
    assert partners(htp_export.optimize(unfolded, level="tolerant").model) == expected
    assert partners(onnxslim(unfolded).model) == expected
    assert partners(onnxscript(unfolded).model) == expected


def chain(count: int, known: str = "") -> SignatureEvidence:
    """Modules in a row, without a tensor between them that PyTorch knows; ``known`` names some that it does."""
    graph = Builder(x=[2])
    names = ["x", *(f"t{place}" for place in range(count))]
    for place in range(count):
        graph.add("Neg", names[place], names[place + 1], f"block.{place}")
    graph.add("Neg", names[-1], "y", "tail")
    signatures = {"": (["x"], ["y"]), "block": (["x"], [names[-1]]), "tail": ([names[-1]], ["y"])}
    signatures |= {f"block.{place}": ([], known.split()) for place in range(count)}
    model = graph.model("y", signatures)
    tagged = htp_export.load(model)
    return SignatureEvidence(tagged.index, tagged.hierarchy, tagged.signatures)


def test_modules_are_taken_along_until_the_common_boundary_is_known():
    assert fused_with("block.3", (), chain(9, known="t2 t5")) == ("block.4", "block.5")
    assert fused_with("block.3", ("tail",), chain(9, known="t2 t5"))[:1] == ("tail",)


def test_where_that_goes_far_the_innermost_known_module_around_it_is_named():
    few, many = chain(13, known="t0 t12"), chain(14, known="t0 t13")
    assert set(fused_with("block.6", (), few)) == {f"block.{place}" for place in range(1, 13) if place != 6}
    assert fused_with("block.6", (), many) == ("block",)


class Told(FateEvidence[str]):
    """What is said of ``m``, which reads ``x`` and makes ``y``, beside ``up`` and ``down``.

    ``said``: what the methods ``settled``, ``without_work`` and ``partners`` give back; None as a rule.
    """

    def __init__(self, known: str = "x y", *, has_nodes: bool = True, **said: Any) -> None:
        work = CallTree(Hierarchy([ModuleInfo("", "Net", 1)])).work
        nodes: list[tuple[list[str], list[str]]] = [(["in"], ["x"]), (["x"], ["y"]), (["y"], ["out"])]
        works = [work((path,)) for path in ("up", "m" if has_nodes else "up", "down")]
        super().__init__(Boundaries(nodes, works, {"in", "x", "y", "out"}.__contains__, {"out"}))
        self._known, self._said = known, said

    def settled(self, path: str) -> Any:
        return self._said.get("settled")

    def without_work(self, path: str) -> Any:
        return self._said.get("without_work")

    def partners(self, path: str) -> Any:
        return self._said.get("partners")

    def ran(self, path: str) -> bool:
        return True

    def known(self, path: str) -> list[str]:
        return {"m": self._known.split(), "up": ["in", "x"], "down": ["y", "out"]}.get(path, ["in", "out"])

    def around(self, group: Sequence[str]) -> Iterable[list[str]]:
        return [["up"], ["down"]]


class Cancelled(Told):
    """Boundaries of modules in a row, of which those named have nodes; nothing crosses what has none."""

    def __init__(self, count: int, *nodes: int) -> None:
        super().__init__()
        self._row = [f"m.{place}" for place in range(count)]
        self._nodes = {f"m.{place}" for place in nodes}

    def has_nodes(self, path: str) -> bool:
        return path in self._nodes

    def is_closed(self, path: str) -> bool:
        return path == "m"

    def behind_unknown(self, group: Sequence[str]) -> Iterator[str]:
        return iter(())

    def around(self, group: Sequence[str]) -> Iterable[list[str]]:
        places = [self._row.index(path) for path in group]
        yield [self._row[place] for place in (min(places) - 1, max(places) + 1) if 0 <= place < len(self._row)]


def test_modules_without_a_node_take_the_nearest_that_has_one():
    assert fused_with("m.3", (), Cancelled(20, 0, 19)) == ("m.2", "m.4", "m.1", "m.5", "m.0")
    assert fused_with("m.3", ("m.2",), Cancelled(20, 4)) == ("m.2", "m.4")
    assert fused_with("m.10", (), Cancelled(20, 0, 19)) == ("m",)


@pytest.mark.parametrize(
    ("evidence", "outcome", "contamination"),
    [
        (Told(), Outcome(Fate.COMPUTED), []),
        (Told("x"), Outcome(Fate.COMPUTED), [("m", "y", True)]),  # nothing is lost, but said
        (Told(settled=Outcome(Fate.DEAD)), Outcome(Fate.DEAD), []),
        (Told("", settled=Outcome(Fate.COMPUTED)), Outcome(Fate.COMPUTED), []),
        (Told(has_nodes=False, without_work=Fate.IDENTITY), Outcome(Fate.IDENTITY), []),
        (Told(without_work=Fate.IDENTITY), Outcome(Fate.COMPUTED), []),  # it has nodes, so that it did some
        (Told(has_nodes=False), Outcome(Fate.FUSED, ("up",)), []),
        (Told("x", partners=[]), Outcome(Fate.FUSED, ("down",)), []),
        (Told(partners=["up"]), Outcome(Fate.FUSED, ("up",)), []),
        (Told(partners=[]), Outcome(Fate.FUSED, ("",)), []),  # nobody is beyond what it lost: the module around it
    ],
)
def test_the_fate_of_a_module_follows_from_the_evidence(evidence, outcome, contamination):
    tree = Hierarchy([ModuleInfo("", "Net", 1), ModuleInfo("m", "M", 1)])
    found, unknown = find_fates(tree, evidence)
    assert Outcome(found["m"].fate, found["m"].fused_with) == outcome
    assert [entry for entry in unknown if entry[0] == "m"] == contamination
