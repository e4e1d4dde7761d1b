"""The modules that a fused one is named with: found alike by an export, by `carry` and by passes."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.format import tags
from htp_export.format.call_tree import CallTree
from htp_export.format.fates import Fate
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.lineage.fates import FateEvidence, Outcome, find_fates, fused_with
from htp_export.lineage.settling import SignatureEvidence
from htp_export.model.boundaries import OUTSIDE, Boundaries
from htp_export.tools import onnxscript, onnxslim
from tests.exporting import BOTH, exported
from tests.graphs import Builder
from tests.handmade import stripped
from tests.nets import EXPORTERS, NETS, Apply, spread, x
from tests.truth import equal, inexact, nodes_of

# Permutations, one after another: all that come out in between are different, and so are the first and the last one.
TURNS = [order for order in itertools.permutations(range(4)) if order != (0, 1, 2, 3)]


class Turns(nn.Module):
    """Modules whose transpositions exporters merge into one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        reached, orders = [(0, 1, 2, 3)], list[tuple[int, ...]]()
        while len(orders) < count:
            steps = ((order, tuple(reached[-1][axis] for axis in order)) for order in TURNS)
            order, result = next(
                (order, result) for order, result in steps if result not in reached
            )
            orders.append(order)
            reached.append(result)
        self.turns = nn.ModuleList(
            Apply(lambda x, order=order: x.permute(order)) for order in orders
        )

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


@pytest.mark.long
@BOTH
@pytest.mark.parametrize(
    "count", [14, *(pytest.param(count, marks=pytest.mark.slow) for count in (2, 3, 8))]
)
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
    unfolded = exported(
        model, kwargs, "torchscript", tmp_path, training=torch.onnx.TrainingMode.PRESERVE
    )
    assert [node.op_type for node in unfolded.graph.node] == [
        "Conv",
        "BatchNormalization",
        "Relu",
        "Conv",
    ]
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
    assert set(fused_with("block.6", (), few)) == {
        f"block.{place}" for place in range(1, 13) if place != 6
    }
    assert fused_with("block.6", (), many) == ("block",)


class Told(FateEvidence[str]):
    """What is said of ``m``, which reads ``x`` and makes ``y``, beside ``up`` and ``down``.

    ``said``: what the methods ``predetermined``, ``without_work`` and ``partners`` give back; None as a rule.
    """

    def __init__(self, known: str = "x y", *, has_nodes: bool = True, **said: Any) -> None:
        work = CallTree(Hierarchy([ModuleInfo("", "Net", 1)])).work
        nodes: list[tuple[list[str], list[str]]] = [
            (["in"], ["x"]),
            (["x"], ["y"]),
            (["y"], ["out"]),
        ]
        works = [work((path,)) for path in ("up", "m" if has_nodes else "up", "down")]
        super().__init__(Boundaries(nodes, works, {"in", "x", "y", "out"}.__contains__, {"out"}))
        self._known, self._said = known, said

    def predetermined(self, path: str) -> Any:
        return self._said.get("predetermined")

    def without_work(self, path: str) -> Any:
        return self._said.get("without_work")

    def partners(self, path: str) -> Any:
        return self._said.get("partners")

    def ran(self, path: str) -> bool:
        return True

    def known(self, path: str) -> list[str]:
        return {"m": self._known.split(), "up": ["in", "x"], "down": ["y", "out"]}.get(
            path, ["in", "out"]
        )

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
        yield [
            self._row[place]
            for place in (min(places) - 1, max(places) + 1)
            if 0 <= place < len(self._row)
        ]


def test_modules_without_a_node_take_the_nearest_that_has_one():
    assert fused_with("m.3", (), Cancelled(20, 0, 19)) == ("m.2", "m.4", "m.1", "m.5", "m.0")
    assert fused_with("m.3", ("m.2",), Cancelled(20, 4)) == ("m.2", "m.4")
    assert fused_with("m.10", (), Cancelled(20, 0, 19)) == ("m",)


@pytest.mark.parametrize(
    ("evidence", "outcome", "contamination"),
    [
        (Told(), Outcome(Fate.COMPUTED), []),
        (Told("x"), Outcome(Fate.COMPUTED), [("m", "y", True)]),  # nothing is lost, but said
        (Told(predetermined=Outcome(Fate.DEAD)), Outcome(Fate.DEAD), []),
        (Told("", predetermined=Outcome(Fate.COMPUTED)), Outcome(Fate.COMPUTED), []),
        (Told(has_nodes=False, without_work=Fate.IDENTITY), Outcome(Fate.IDENTITY), []),
        # it has nodes, so that it did some
        (Told(without_work=Fate.IDENTITY), Outcome(Fate.COMPUTED), []),
        (Told(has_nodes=False), Outcome(Fate.FUSED, ("up",)), []),
        (Told("x", partners=[]), Outcome(Fate.FUSED, ("down",)), []),
        (Told(partners=["up"]), Outcome(Fate.FUSED, ("up",)), []),
        # nobody is beyond what it lost: the module around it
        (Told(partners=[]), Outcome(Fate.FUSED, ("",)), []),
    ],
)
def test_the_fate_of_a_module_follows_from_the_evidence(evidence, outcome, contamination):
    tree = Hierarchy([ModuleInfo("", "Net", 1), ModuleInfo("m", "M", 1)])
    found, unknown = find_fates(tree, evidence)
    assert Outcome(found["m"].fate, found["m"].fused_with) == outcome
    assert [entry for entry in unknown if entry[0] == "m"] == contamination


# --- boundaries where a node does the work of several modules: one rule, whoever asks ---


# every module ran once, in the one above it
BY_PATH = CallTree(Hierarchy([ModuleInfo("", "net.Net", 1)]))
GAINS = ("blocks.0.gain", "blocks.1.gain")


@pytest.mark.parametrize(
    ("owners", "paths", "blocks"),
    [
        (["a.x", "b.y"], ["a.x"], ["b"]),
        (["a.x", "b.y"], ["a"], ["b"]),
        (["a.x", "a.y.z"], ["a.x"], ["a.y"]),  # a is around both
        (["a.x", "a.y.z"], ["a"], []),
        (["a.x", "b.y", "b.z", "c"], ["a.x"], ["b", "c"]),
        (["a.x", "b.y", "c.z"], ["a.x", "c.w"], ["b", "c.z"]),
        (["ab.x", "a.x"], ["a"], ["ab"]),
        (["a", "a.x"], ["a.x"], ["a"]),  # a computes the same itself
        (["a", "a.x"], ["a"], []),
        (["a.x", ""], ["a.x"], [""]),
        (["a", "a.b.x"], ["a.b"], ["a"]),
        (["a.x", "a.x.y", "b"], ["a.x.y"], ["a.x", "b"]),
        (["a.x", "b.y"], [""], []),
        (["b.y"], ["a.x"], []),  # alone, it is no other's work
    ],
)
def test_the_other_blocks_of_merged_work_are_the_largest_that_are_not_around_the_module(
    owners, paths, blocks
):
    others = BY_PATH.work(tuple(owners)).blocks_outside(paths)
    assert {path for path in others if tags.nearest_above(path, others) is None} == set(blocks)


def merged() -> ir.Model:
    """``exp`` is made for both gains, and read by the one and by the block around the other."""
    graph = Builder(x=[2, 4])
    graph.add("Exp", "x", "exp", GAINS[0]).metadata_props.update(
        tags.node_tags(GAINS, "shared", {"", *GAINS})
    )
    graph.add("Sigmoid", "exp", "gain", "blocks.0.gain")
    graph.add("Neg", "gain", "first", "blocks.0")
    graph.add("Mul", "first exp", "last", "blocks.1")
    return graph.model(
        "last", {"": (["x"], ["last"]), GAINS[0]: (["x"], ["gain"]), GAINS[1]: (["x"], ["exp"])}
    )


def read_elsewhere() -> ir.Model:
    """The same, with a further reader outside of both blocks."""
    model = merged()
    exp, last = model.graph.node("n_exp").outputs[0], model.graph.node("n_last")
    model.graph.append(
        ir.node("Add", [last.outputs[0], exp], name="sum", metadata_props={tags.MODULE: "head"})
    )
    model.graph.outputs[0] = model.graph.node("sum").outputs[0]
    model.graph.outputs[0].name = "sum"
    return model


def leaving(model: ir.Model, path: str) -> list[str]:
    """What leaves a module, by `Region` and by the boundaries that fates are found by; both have to agree."""
    tagged = htp_export.load(model)
    by_region = [(str(value.name), True) for value in tagged[path].outputs]
    by_region += [(str(value.name), False) for value in tagged[path].inputs]
    by_values = tagged.index.boundaries_by_values.of([path])
    assert {(str(value.name), leaves) for value, _, leaves in by_values} == {*by_region}
    return [name for name, leaves in by_region if leaves]


def test_merged_work_of_two_blocks_feeds_both_of_them():
    model = merged()
    assert leaving(model, "blocks.0.gain") == ["gain"]
    assert leaving(model, "blocks.0") == ["first"]
    assert leaving(model, "blocks.1.gain") == ["exp"]
    assert leaving(model, "blocks.1") == ["last"]
    tagged = htp_export.load(model)
    evidence = SignatureEvidence(tagged.index, tagged.hierarchy, tagged.signatures)
    assert not any(evidence.strange(path) for path in tagged)


def test_merged_work_that_is_read_outside_of_both_blocks_leaves_both():
    model = read_elsewhere()
    assert leaving(model, "blocks.0.gain") == ["exp", "gain"]
    assert leaving(model, "blocks.0") == ["exp", "first"]
    assert leaving(model, "blocks.1") == ["exp", "last"]


def test_modules_taken_together_are_no_blocks_of_each_other():
    works = [BY_PATH.work(("a.x", "b.y")), BY_PATH.work(("b.z",))]
    boundaries = Boundaries(
        [(["x"], ["h"]), (["h"], ["y"])], works, {"x", "h", "y"}.__contains__, {"y"}
    )
    assert list(boundaries.of(["a.x"])) == [("x", OUTSIDE, False)]
    assert list(boundaries.of(["a.x", "b.w"])) == [("h", 1, True), ("x", OUTSIDE, False)]


@BOTH
def test_repair_leaves_no_contamination_where_merged_work_feeds_two_blocks(exporter, shared_files):
    file = shared_files.read("merged_work_read_in_both_blocks", exporter)
    found = htp_export.contamination(file)
    assert found.after == []
    assert "htp.contamination" not in {entry.key for entry in file.metadata_props}
    assert found.kinds() == {
        "blocks.0.gain → blocks.1, Exp": (2, 0),
        "blocks.0 → blocks.1, Exp": (1, 0),
    }


@BOTH
def test_merged_work_that_another_module_reads_is_contamination_and_is_seen_by_the_judge(
    exporter, shared_files
):
    file = shared_files.read("merged_work_read_in_both_blocks", exporter)
    model, kwargs = NETS["merged_work_read_in_both_blocks"].build()
    last = file.graph.node[-1]
    for entry in last.metadata_props:
        if entry.key == tags.MODULE:
            entry.value = ""
    exp = next(node.output[0] for node in nodes_of(file) if node.op_type == "Exp")
    assert ("blocks.0.gain", f"{exp} leaves, and is no output of it") in inexact(
        model, kwargs, file
    )
    tagged = htp_export.load(file)
    assert exp in [value.name for value in tagged["blocks.0.gain"].outputs]


@BOTH
def test_a_gain_is_cut_out_with_its_own_result_alone(exporter, shared_files):
    file = shared_files.read("merged_work_read_in_both_blocks", exporter)
    bare = htp_export.load(file)
    del bare.model.metadata_props[tags.SIGNATURES]
    result = htp_export.extract(bare, "blocks.0.gain").model
    assert [node.op_type for node in result.graph] == ["Exp", "Sigmoid"]
    assert len(result.graph.outputs) == 1


def test_the_tolerance_of_the_judge_grows_with_the_tensor():
    large, small = np.float32([4000, 0.01]), np.float32([1, 0.01])
    error = np.float32([0, 0.005])
    assert equal(large + error, large)  # rounded by a part of the largest element
    assert not equal(small + error, small)
    assert not equal(large + 20 * error, large)
    # the lowest number there is measures nothing
    mask = np.float32([np.finfo(np.float32).min, 0.01])
    assert not equal(mask + error, mask)
    assert not equal(np.float32([np.inf, 0.01]) + error, np.float32([np.inf, 0.01]))


# --- equal work of a module and one inside it ---------------------------------------------------

NESTED = "equal_work_of_a_module_and_one_inside_it"


@BOTH
def test_work_that_a_module_does_as_one_inside_it_does_is_no_contamination(exporter, shared_files):
    file = shared_files.read(NESTED, exporter)
    assert htp_export.contamination(file).after == []
    flat = next(node.output[0] for node in file.graph.node if node.op_type == "Reshape")
    tagged = htp_export.load(file)
    assert flat not in {str(value.name) for value in tagged["routed.router"].outputs}
    assert [str(value.name) for value in tagged["routed.experts"].inputs] == [flat]


@BOTH
def test_such_work_that_is_read_outside_of_the_outer_module_leaves_the_inner_one(
    exporter, shared_files
):
    file = shared_files.read(NESTED, exporter)
    flat = next(node.output[0] for node in file.graph.node if node.op_type == "Reshape")
    experts = next(
        node
        for node in file.graph.node
        if "routed.experts" in {each.value for each in node.metadata_props}
    )
    del experts.metadata_props[:]
    experts.metadata_props.add(key=tags.MODULE, value="last")
    assert flat in {str(value.name) for value in htp_export.load(file)["routed.router"].outputs}
    model, kwargs = NETS[NESTED].build()
    assert ("routed.router", f"{flat} leaves, and is no output of it") in inexact(
        model, kwargs, file
    )
