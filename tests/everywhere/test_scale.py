"""Deep and wide models: nothing calls itself for each level, and nothing looks at the whole for each part."""

from __future__ import annotations

import functools
import io
import itertools
import json
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnxscript.rewriter import pattern
from rich.console import Console

import htp_export
from htp_export.capabilities.cost.drawing import render
from htp_export.capabilities.cost.result import ModuleRow, ModuleTree
from htp_export.capabilities.fingerprint.families import repeated_blocks
from htp_export.capabilities.functions import placing
from htp_export.capabilities.functions.placing import MOST_NESTED
from htp_export.capabilities.optimize.passes.fuse_for_onnxruntime import MOST, near, near_matching
from htp_export.capabilities.view.inventory import take_inventory
from htp_export.capabilities.view.model_explorer.graphs import drawing
from htp_export.editing.function_records import Expectations
from htp_export.editing.submodels import remove_unused
from htp_export.format import tags
from htp_export.format.call_tree import CallTree, Instance
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.hashes import Hasher
from htp_export.model.module_facts import contents_of
from htp_export.model.neighbours import replace_inputs
from htp_export.model.tensor_names import UsedNames
from htp_export.process.restoring import rare_collections
from tests.graphs import Builder
from tools import scale


def test_a_tree_of_a_thousand_levels_is_drawn() -> None:
    paths = ["", *itertools.accumulate(["m"] * 1000, lambda above, name: f"{above}.{name}")]
    tree = ModuleTree(tuple(ModuleRow(path, "net.Level", 1, "computed", nodes=1) for path in paths))
    console = Console(width=500, record=True, file=io.StringIO())
    console.print(render(tree))
    lines = console.export_text().splitlines()
    assert len(lines) == 1002
    assert lines[-1].startswith("… 999 levels └── m ")


@functools.cache
def nested_too_deep() -> htp_export.results.Nested:
    return htp_export.functions(scale.deep(MOST_NESTED + 20), "**")


def test_modules_nested_deeper_than_onnx_allows_functions_to_be_stay_flat() -> None:
    nested = nested_too_deep()
    assert len(nested.modules) == 2 * MOST_NESTED  # of both towers
    last = "a" + ".m" * MOST_NESTED
    assert last not in nested.modules
    too_deep = {path: reason for path, reason in nested.skipped.items() if path}
    assert len(too_deep) == 2 * 20
    assert set(too_deep.values()) == {"ONNX allows 100 functions inside one another"}
    onnx.checker.check_model(ir.to_proto(nested.model))  # it refuses deeper ones
    flat = htp_export.inline(nested.model).model
    before = {
        node.name: (node.op_type, dict(node.metadata_props))
        for node in ir.from_proto(scale.deep(MOST_NESTED + 20)).graph
    }
    assert {node.name: (node.op_type, dict(node.metadata_props)) for node in flat.graph} == before


def test_functions_and_inline_do_not_walk_up_from_every_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "MOST_NESTED", 8)  # each function around names the weights: as many times the work

    def python_calls(run: Callable[[], htp_export.results.Nested | htp_export.results.Inlined]) -> tuple[int, Any]:
        events: Counter[str] = Counter()
        sys.setprofile(lambda _frame, event, _argument: events.update((event,)))
        try:
            result = run()
        finally:
            sys.setprofile(None)
        return events["call"] + events["c_call"], result.model

    def of_depth(levels: int) -> tuple[int, int]:
        tagged = htp_export.load(scale.deep(levels))
        there, nested = python_calls(lambda: htp_export.functions(tagged, "**"))
        back, _ = python_calls(lambda: htp_export.inline(nested))
        return there, back

    of_depth(10)  # imports
    (there, back), (twice_there, twice_back) = of_depth(50), of_depth(100)
    assert twice_there < 2.2 * there  # 2.8 when every node looked at all modules around it
    assert twice_back < 2.2 * back


def test_weights_of_deep_modules_have_short_names_in_functions() -> None:
    for function in nested_too_deep().model.functions.values():
        names = [str(value.name) for value in function.inputs]
        assert len(set(names)) == len(names)
        assert max(map(len, names)) <= 128 + len("_100")
        assert {name.rpartition(".")[2].partition("_")[0] for name in names} <= {"bias", "input", "x"}


@pytest.mark.parametrize(
    ("path", "owners"), [("a", "a.x.z a.x"), ("a-b", "a-b.y"), ("", "ab a.x.z a-b.y a.x"), ("c", "ab a.x.z a-b.y a.x")]
)
def test_of_the_owners_of_a_shared_node_those_below_the_called_module_are_its_own(path: str, owners: str) -> None:
    every = ["ab", "a.x.z", "a-b.y", "a.x"]
    tree = Hierarchy([ModuleInfo(each, "Net", 1, "computed") for each in ["", "c", "a", "a-b", *every]])
    shared = ir.node("Relu", [ir.val("v")], metadata_props=tags.node_tags(every, "shared", tree.called))
    found = Expectations(tree, CallTree(tree)).metadata(shared, Instance(path))
    assert tags.owners_of(found) == tuple(owners.split())


def test_calls_of_modules_nested_deep_are_known() -> None:
    calls = htp_export.load(scale.deep(400)).calls
    inmost = "a" + ".m" * 399
    (part,) = calls.work((inmost,)).parts
    assert len(part.running) == 401
    assert calls.caller(Instance(inmost)) == Instance("a" + ".m" * 398)


def test_used_names_count_on_from_the_last_number() -> None:
    tried: list[str] = []

    class Counting(set[str]):
        def __contains__(self, name: object) -> bool:
            tried.append(str(name))
            return super().__contains__(name)

    used = UsedNames()
    used._names = Counting()
    names = [used.unused("output") for _ in range(1000)]
    assert names[:2] == ["output", "output_2"]
    assert names[-1] == "output_1000"
    assert len(tried) < 3000


@pytest.mark.parametrize("count", [3, 100])
def test_many_inputs_are_replaced_as_one_after_the_other(count: int) -> None:
    before, after = ([ir.val(f"{name}{k}") for k in range(count)] for name in "ab")
    node = ir.node("Sum", [*before, before[0], None])
    given: dict[ir.Value, ir.Value | None] = dict(zip(before, after, strict=True))
    replace_inputs(node, {**given, before[1]: None})
    assert node.inputs == (after[0], None, *after[2:], after[0], None)
    assert not any(value.uses() for value in before)
    assert [[use.idx for use in value.uses()] for value in after] == [[0, count], [], *([k] for k in range(2, count))]
    assert all(use.node is node for value in after for use in value.uses())


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Each attempt to match a pattern of several results."""
    attempts: list[object] = []
    multi_match = pattern.SimplePatternMatcher._multi_match
    monkeypatch.setattr(
        pattern.SimplePatternMatcher,
        "_multi_match",
        lambda self, *given, **more: attempts.append(given) or multi_match(self, *given, **more),
    )
    return attempts


def test_patterns_of_several_results_look_at_what_is_near(tried: list[object]) -> None:
    x, end = ir.val("x"), ir.Value(name="end", const_value=ir.tensor([1]))
    chain = [ir.node("Slice", [x, end])]
    for _ in range(999):
        chain.append(ir.node("Slice", [chain[-1].outputs[0], end]))
    ir.Graph([x], chain[-1].outputs, nodes=chain)
    assert near(chain[500], 2) == [chain[500], chain[499], chain[501], chain[498], chain[502]]

    rule = pattern.RewriteRule(
        lambda op, x, one, two: (op.Slice(x, one), op.Slice(x, two)), lambda op, x, one, two: (x, x)
    )
    whole = pattern.SimplePatternMatcher.match
    with near_matching():
        for node in chain:
            rule.match(ir.Model(chain[0].graph, ir_version=10), chain[0].graph, node)  # type: ignore[arg-type]
    assert 0 < len(tried) <= 5 * len(chain)
    assert pattern.SimplePatternMatcher.match is whole


@pytest.mark.parametrize("consumers", [10, 300])
def test_a_tensor_with_very_many_consumers_is_said_where_patterns_may_be_missed(
    consumers: int, caplog: pytest.LogCaptureFixture, tried: list[object]
) -> None:
    net = Builder(20, x=[4])
    net.const("b", np.array([0]))
    net.const("e", np.array([3]))
    net.add("Relu", "x", "h", "act")
    cuts = [net.add("Slice", "h b e", f"v{k}", "cut").outputs[0].name for k in range(consumers)]
    net.add("Sum", " ".join(map(str, cuts)), "y", "sum")
    model = net.model("y")
    htp_export.optimize(model, passes=["fuse_for_onnxruntime"], level="fused")
    assert 0 < len(tried) <= consumers * MOST
    said = [record.getMessage() for record in caplog.records if record.name == near.__module__]
    assert len(said) == (consumers >= MOST)
    assert all("pass fuse_for_onnxruntime: node 'n_v0' (Slice) and 299 others" in text for text in said)


def test_the_exponent_is_the_slope_of_the_logarithms() -> None:
    assert scale.exponent({10: 1.0, 100: 100.0, 1000: 10000.0}) == pytest.approx(2.0)


def test_every_module_of_many_levels_has_its_numbers() -> None:
    levels = 200
    with rare_collections():  # as commands run
        contents = contents_of(htp_export.load(scale.deep(levels))).modules
    for level in (0, 1, 99, 199):
        here = contents["a" + ".m" * level]
        left = levels - level
        assert (len(here.nodes), len(here.own_nodes)) == (3 * left, 3)
        assert (here.facts.parameters, here.facts.self_parameters) == (8 * left, 8)
        assert (here.facts.weight_bytes, here.facts.self_weight_bytes) == (32 * left, 32)
        assert here.facts.weight_bytes_by_dtype == {"float32": 32 * left}
    assert (contents[""].facts.parameters, contents[""].facts.self_parameters) == (2 * 8 * levels, 0)


def test_regions_of_nested_modules_take_memory_for_each_module_and_not_for_each_pair() -> None:
    levels = 150
    tagged = htp_export.load(scale.deep(levels))
    paths = [path for path in tagged if path]
    for path in paths:
        assert tagged.hierarchy.parent(path) is not None  # the strings of the paths are there
    tracemalloc.start()
    try:
        sizes = [len(tagged[path].nodes) for path in paths]
        crossing = {(len(tagged[path].inputs), len(tagged[path].outputs)) for path in paths}
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sizes == [3 * left for left in range(levels, 0, -1)] * 2
    assert crossing == {(1, 1)}
    assert peak < 2e6  # 1.2; sets and lists for each pair of modules: many times that
    for node, work in list(tagged.index.works.items())[::50]:
        assert work.modules == {*tags.ancestors(work.owners[0])}, node.name


def test_the_memory_of_modules_nested_deep_is_known() -> None:
    levels = 150
    found = htp_export.cost(scale.deep(levels), dims={"batch": 1}).modules
    tensor = 16 * 8 * 4
    for level in (0, 100, 149):
        here = found["a" + ".m" * level]
        assert here.activation_bytes == 3 * (levels - level) * tensor
        assert here.peak_bytes == (levels + 2) * tensor  # a skip of each level, and what a node reads and makes
    assert found[""].other_flops == 2 * found["a"].other_flops


def test_a_page_names_the_layers_of_deep_modules_without_those_around_them() -> None:
    def size(levels: int) -> int:
        inventory = take_inventory(htp_export.load(scale.deep(levels)))
        return len(json.dumps(drawing(inventory, ())["places"]))

    assert size(120) < 4.2 * size(60)  # as the paths themselves; with the layers around each, 8 times


def test_stages_of_deep_models_are_found() -> None:
    stages = htp_export.partition(scale.deep(200), 2).stages
    assert [stage.modules for stage in stages] == [("a",), ("b",)]


def test_calls_in_a_circle_have_the_chain_of_where_they_begin() -> None:
    modules = [ModuleInfo(path, "Net", 1, "computed") for path in ("", "a", "b", "c", "d")]
    said = '{"a":[["b",0]],"b":[["c",0]],"c":[["a",0]],"d":[["b",0]]}'
    for first in itertools.permutations("abcd"):  # what was asked before changes nothing
        calls = CallTree.from_json(said, Hierarchy(modules))
        for path in first:
            calls.chain(Instance(path))
        chains = {path: "".join(each.path for each in calls.chain(Instance(path))) for path in "abcd"}
        assert chains == {"a": "abc", "b": "bca", "c": "cab", "d": "dbca"}


def test_containers_above_any_of_the_calls_hold_what_they_do() -> None:
    ran = ["", "x.y.a", "x.y.a.list.b", "other.list.c"]
    tree = Hierarchy([*(ModuleInfo(path, "Net", 1, "computed") for path in ran), ModuleInfo("x.y", "List")])
    calls = CallTree.from_json('{"x.y.a":[["other.list.c",0]]}', tree)
    work = calls.work(("x.y.a.list.b",))
    assert work.modules == {*ran, "x", "x.y", "x.y.a.list", "other", "other.list"}


def test_parts_of_blocks_are_counted_once_for_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = scale.wide(2000)
    asked: list[str] = []
    ancestors = tags.ancestors
    monkeypatch.setattr(tags, "ancestors", lambda path: asked.append(path) or ancestors(path))
    (block, *_) = repeated_blocks(GraphFacts(htp_export.load(model)))
    assert block.count == 100
    assert len(asked) < 20 * 300  # modules


def test_a_chain_of_unused_nodes_is_taken_out_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    chain = [ir.node("Relu", [ir.val("x")])]
    for _ in range(999):
        chain.append(ir.node("Relu", [chain[-1].outputs[0]]))
    graph = ir.Graph(chain[0].inputs, [], nodes=chain)
    asked: list[ir.Value] = []
    uses = ir.Value.uses
    monkeypatch.setattr(ir.Value, "uses", lambda value: asked.append(value) or uses(value))
    remove_unused([value for node in chain for value in node.outputs], set(chain))
    assert len(graph) == 0
    assert len(asked) < 10 * len(chain)


def test_a_change_of_a_node_a_wire_or_a_size_changes_the_hashes_of_the_regions_around_it() -> None:
    model = scale.deep(8)
    model.graph.node[10].op_type, model.graph.node[14].op_type = "Relu", "Sigmoid"
    changed = {name: onnx.ModelProto.FromString(model.SerializeToString()) for name in ("op", "wire", "swap", "size")}
    changed["op"].graph.node[9].op_type = "Mul"
    changed["wire"].graph.node[-1].input[1] = changed["wire"].graph.node[2].output[0]
    changed["swap"].graph.node[10].op_type, changed["swap"].graph.node[14].op_type = "Sigmoid", "Relu"
    bias = changed["size"].graph.initializer[3]
    bias.CopyFrom(onnx.numpy_helper.from_array(np.ones((1, 8), "f4"), bias.name))
    sides = {name: htp_export.load(each) for name, each in {"model": model, **changed}.items()}
    hashers = {name: Hasher(GraphFacts(each)) for name, each in sides.items()}
    found = {name: {path: hashers[name].region(path) for path in each.paths} for name, each in sides.items()}
    statuses = {name: Counter(found["model"][path] == of[path] for path in of) for name, of in found.items()}
    assert statuses["model"] == {True: 17}
    assert all(0 < each[False] < 17 for name, each in statuses.items() if name != "model")


def test_a_change_deep_in_a_model_changes_the_modules_around_it() -> None:
    before, after = scale.deep(50), scale.deep(50)
    after.graph.node[98].op_type = "Sigmoid"
    assert htp_export.diff(before, before).same
    found = htp_export.diff(before, after)
    assert len(found.changed) == 27
    assert found.modules["b"].before.structure == found.modules["b"].after.structure


def test_the_digest_of_a_region_is_the_same_in_every_process() -> None:
    tagged = htp_export.load(scale.deep(2))
    assert Hasher(GraphFacts(tagged)).region("a.m") == "e1b26c7d5c34454586c6c933"
