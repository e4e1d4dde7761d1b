"""Boundaries where a node does the work of several modules: one rule, whoever asks for the boundary."""

import numpy as np
import onnx_ir as ir
import pytest

import htp_export
from htp_export.capabilities.optimize.bookkeeping import SignatureEvidence
from htp_export.format import tags
from htp_export.format.call_tree import CallTree
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.model.boundaries import OUTSIDE, Boundaries
from tests.exporting import BOTH
from tests.graphs import Builder
from tests.nets import NETS
from tests.truth import equal, inexact, nodes_of

BY_PATH = CallTree(Hierarchy([ModuleInfo("", "net.Net", 1)]))  # every module ran once, in the one above it
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
def test_the_other_blocks_of_merged_work_are_the_largest_that_are_not_around_the_module(owners, paths, blocks):
    others = BY_PATH.work(tuple(owners)).others(paths)
    assert {path for path in others if tags.nearest_above(path, others) is None} == set(blocks)


def merged() -> ir.Model:
    """``exp`` is made for both gains, and read by the one and by the block around the other."""
    graph = Builder(x=[2, 4])
    graph.add("Exp", "x", "exp", GAINS[0]).metadata_props.update(tags.node_tags(GAINS, "shared", {"", *GAINS}))
    graph.add("Sigmoid", "exp", "gain", "blocks.0.gain")
    graph.add("Neg", "gain", "first", "blocks.0")
    graph.add("Mul", "first exp", "last", "blocks.1")
    return graph.model("last", {"": (["x"], ["last"]), GAINS[0]: (["x"], ["gain"]), GAINS[1]: (["x"], ["exp"])})


def read_elsewhere() -> ir.Model:
    """The same, with a further reader outside of both blocks."""
    model = merged()
    exp, last = model.graph.node("n_exp").outputs[0], model.graph.node("n_last")
    model.graph.append(ir.node("Add", [last.outputs[0], exp], name="sum", metadata_props={tags.MODULE: "head"}))
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
    boundaries = Boundaries([(["x"], ["h"]), (["h"], ["y"])], works, {"x", "h", "y"}.__contains__, {"y"})
    assert list(boundaries.of(["a.x"])) == [("x", OUTSIDE, False)]
    assert list(boundaries.of(["a.x", "b.w"])) == [("h", 1, True), ("x", OUTSIDE, False)]


@BOTH
def test_repair_leaves_no_contamination_where_merged_work_feeds_two_blocks(exporter, shared_files):
    file = shared_files.read("merged_work_read_in_both_blocks", exporter)
    found = htp_export.contamination(file)
    assert found.after == []
    assert "htp.contamination" not in {entry.key for entry in file.metadata_props}
    assert found.kinds() == {"blocks.0.gain → blocks.1, Exp": (2, 0), "blocks.0 → blocks.1, Exp": (1, 0)}


@BOTH
def test_merged_work_that_another_module_reads_is_contamination_and_is_seen_by_the_judge(exporter, shared_files):
    file = shared_files.read("merged_work_read_in_both_blocks", exporter)
    model, kwargs = NETS["merged_work_read_in_both_blocks"].build()
    last = file.graph.node[-1]
    for entry in last.metadata_props:
        if entry.key == tags.MODULE:
            entry.value = ""
    exp = next(node.output[0] for node in nodes_of(file) if node.op_type == "Exp")
    assert ("blocks.0.gain", f"{exp} leaves, and is no output of it") in inexact(model, kwargs, file)
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
    mask = np.float32([np.finfo(np.float32).min, 0.01])  # the lowest number there is measures nothing
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
def test_such_work_that_is_read_outside_of_the_outer_module_leaves_the_inner_one(exporter, shared_files):
    file = shared_files.read(NESTED, exporter)
    flat = next(node.output[0] for node in file.graph.node if node.op_type == "Reshape")
    experts = next(node for node in file.graph.node if "routed.experts" in {each.value for each in node.metadata_props})
    del experts.metadata_props[:]
    experts.metadata_props.add(key=tags.MODULE, value="last")
    assert flat in {str(value.name) for value in htp_export.load(file)["routed.router"].outputs}
    model, kwargs = NETS[NESTED].build()
    assert ("routed.router", f"{flat} leaves, and is no output of it") in inexact(model, kwargs, file)
