"""Limits of the work on models: just inside of each the work is done, and just outside it ends as documented."""

import base64
import contextlib
import functools
import io
import itertools
import json
import re
import time
import tracemalloc
import zlib
from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnxscript.rewriter import pattern
from rich.console import Console

import htp_export
from htp_export.alignment.origin_map import text_to_map
from htp_export.capabilities.functions.placing import MOST_NESTED
from htp_export.capabilities.optimize.onnxscript_rules import MOST, changed_rules, near
from htp_export.capabilities.verify import locating, same_model
from htp_export.capabilities.view.inventory import take_inventory
from htp_export.capabilities.view.model_explorer.graphs import drawing
from htp_export.costs.drawing import render
from htp_export.costs.result import ModuleRow, ModuleTree
from htp_export.editing.function_records import Expectations
from htp_export.errors import InputError, SelectorError, UnknownModuleError
from htp_export.format import hierarchy, selectors, tags
from htp_export.format.call_tree import CallTree, Instance
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.hashes import Hasher
from htp_export.shapes import sizes
from htp_export.shapes.inference import _MOST_TRIPS
from htp_export.shapes.operators import sums
from htp_export.shapes.symbolic import Symbolic
from tests.graphs import Builder
from tests.hostile import within
from tools import scale

HEADER = '<ir_version: 10, opset_import: ["": 20, "my.own": 1]>'


def model(text: str) -> ir.Model:
    return ir.from_onnx_text(f"{HEADER} {text}")


def inferred(model: ir.Model) -> tuple[Symbolic, dict[str | None, ir.Value]]:
    symbolic = Symbolic(model.graph, functions=model.functions)
    return symbolic, {value.name: value for node in model.graph for value in node.outputs}


# --- shapes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("trips", "size"), [(_MOST_TRIPS - 1, 2**31 - 1), (_MOST_TRIPS, None)])
def test_a_loop_without_an_end_of_its_own_has_results_of_unknown_size(trips, size):
    loop = model(f"""g (float x) => (float[n] y) <int64 trips = {{{trips}}}> {{
        y = Loop (trips) <body = b (int64 i, bool on) => (bool go, float[3] z) {{
            go = Constant <value = bool {{1}}> () z = Constant <value = float[3] {{1, 2, 3}}> () }}> }}""")
    symbolic, values = inferred(loop)
    shape = symbolic.shape(values["y"])
    assert shape is not None
    assert (shape[0] if isinstance(shape[0], int) else None) == size


@pytest.mark.parametrize("beyond", [0, 1])
def test_an_open_size_is_multiplied_by_a_factor_that_is_exact(beyond):
    factor = 1 + 1 / (sums._LARGEST_DENOMINATOR << beyond)
    resize = model(f"""g (float[1, 3, n, m] x) => (y) <float[4] factors = {{1, 1, {factor!r}, 1}}> {{
        y = Resize (x, , factors) }}""")
    symbolic, values = inferred(resize)
    shape = symbolic.shape(values["y"])
    assert shape is not None
    assert str(shape[2]) == "(65*n)//64" if not beyond else sizes.is_unnamed(shape[2])


# --- calls ----------------------------------------------------------------------------------------------


def stating(calls: int, nodes: int, *, numbered: bool = False) -> ir.Model:
    """A chain of nodes of a module that a file says ran so often, in the module tree or on a node."""
    chain = model("g (float[2] x) => (float[2] y) { y = Relu (x) }")
    entry = {"class": "net.Net", "calls": 1, "fate": "computed"}
    modules = {"": entry, **({} if numbered else {"fc": {**entry, "calls": calls}})}
    chain.metadata_props[tags.MODULES] = json.dumps(modules)
    for _ in range(nodes - 1):
        chain.graph.append(ir.node("Relu", [chain.graph.inputs[0]]))
    for node in chain.graph:
        node.metadata_props.update(
            {tags.MODULE: "fc", **({tags.CALL: str(calls - 1)} if numbered else {})}
        )
    return chain


@pytest.mark.parametrize("numbered", [False, True])
def test_more_calls_than_a_file_can_have_are_refused(numbered, monkeypatch):
    monkeypatch.setattr(hierarchy, "MOST_CALLS", 10)
    assert htp_export.load(stating(9, 1, numbered=numbered))["fc"].calls == 9
    assert htp_export.load(stating(11, 3, numbered=numbered))["fc"].calls == 11
    with pytest.raises(
        InputError,
        match="its modules have 12 calls, 11 of them module 'fc': too many for its number of",
    ):
        htp_export.load(stating(11, 2, numbered=numbered))


def test_a_file_with_as_many_calls_as_it_may_have_is_cut_in_time(monkeypatch):
    """Each call is looked at once: the square of the number would take hours."""
    made = stating(30_000, 1)
    with within(60):
        assert htp_export.extract(made, "fc").model.graph.inputs[0].name == "x"


@pytest.mark.parametrize(
    "key",
    [tags.MODULE, tags.OWNERS, tags.CALLERS, tags.MODULES, "pkg.torch.onnx.name_scopes", "name"],
)
def test_paths_with_very_many_paths_above_them_are_refused(key):
    deep = "." * 50_000
    made = stating(1, 1)
    node = made.graph.node(0)
    texts = {
        tags.OWNERS: json.dumps(["fc", deep]),
        tags.CALLERS: json.dumps({"fc": [[deep, 0]]}),
        tags.MODULES: json.dumps(
            {"": json.loads(made.metadata_props[tags.MODULES])[""], deep: {"class": "", "calls": 1}}
        ),
        "pkg.torch.onnx.name_scopes": str(["", deep, "relu"]),
    }
    if key == "name":
        node.name = deep.replace(".", "/")
    elif key in (tags.CALLERS, tags.MODULES):
        made.metadata_props[key] = texts[key]
    else:
        node.metadata_props[key] = texts.get(key, deep)
    if key.startswith("pkg") or key == "name":
        del node.metadata_props[tags.MODULE]
    tracemalloc.start()
    with contextlib.suppress(InputError):
        tagged = htp_export.load(made)
        _ = [tagged[path].nodes for path in tagged], tagged.calls.chain(Instance("fc"))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 300 << 20  # all paths above it have a gigabyte


@pytest.mark.long
def test_a_map_that_unfolds_to_very_much_is_refused():
    bomb = base64.b85encode(zlib.compress(b"[" + b"[]," * (64 << 20) + b"0]", 9)).decode()
    with pytest.raises(
        ValueError, match=r"htp\.map is not what the file format says: it is too large"
    ):
        text_to_map(bomb)


def test_names_of_any_length_are_compared_with_few_others():
    tree = Hierarchy(
        [ModuleInfo("", "Net", 1), *(ModuleInfo(f"{k:05}ab" * 15_000, "Fc", 1) for k in range(5))]
    )
    began = time.monotonic()
    for name, problem in (("00009ab" * 15_000, "is longer than"), ("00009", "matches no module")):
        with pytest.raises(SelectorError, match=problem):
            selectors.select(name, tree.classes)
        assert UnknownModuleError(name, tree).nearest == ()
    assert time.monotonic() - began < 10


# --- comparison -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("growth", "origins"), [(1.01, {"own", "grown"}), (0.99, {"own"})])
def test_an_error_that_grows_little_is_no_origin_if_another_is_sudden(growth, origins):
    """``grown`` is computed from a tensor that is just within its tolerance, ``own`` from one that is exact."""
    chain = model(
        "g (float[2] x, float[2] z) => (float[2] grown, float[2] own) "
        "{ within = Relu (x) grown = Neg (within) own = Exp (z) }"
    )
    tagged = htp_export.load(chain)
    within = 0.9
    excess = {"within": within, "grown": growth * locating._SUDDEN * within, "own": 50.0, "z": 0.0}
    found = locating._origins(tagged, {tagged.values[name]: size for name, size in excess.items()})
    assert {value.name for value in found} == origins


@pytest.mark.parametrize("changed", [same_model._FEWEST - 1, same_model._FEWEST])
def test_other_values_in_a_few_parameters_are_a_fault_and_in_more_another_model(tmp_path, changed):
    import torch

    torch.manual_seed(0)
    net, x = (
        torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).eval(),
        torch.randn(2, 4),
    )
    htp_export.export(net, (x,), tmp_path / "net.onnx", verbose=False)
    with torch.no_grad():
        for parameter in list(net.parameters())[:changed]:
            parameter += 1.0
    if changed < same_model._FEWEST:
        assert not htp_export.verify(net, tmp_path / "net.onnx", (x,)).ok
        return
    with pytest.raises(InputError, match=re.escape("3 of 4 parameters have other values")):
        htp_export.verify(net, tmp_path / "net.onnx", (x,))


@pytest.mark.parametrize("beyond", [0, 1])
def test_parameters_are_told_apart_by_their_first_values(beyond):
    values = np.zeros((2, same_model._SAMPLE + 1), np.float32)
    other = values.copy()
    other[0, same_model._SAMPLE - 1 + beyond] = 1.0
    assert np.array_equal(same_model._sample(values), same_model._sample(other)) == bool(beyond)


# --- deep and wide models: nothing calls itself for each level, or looks at the whole for each part ---


def test_a_tree_of_a_thousand_levels_is_drawn():
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


def test_modules_nested_deeper_than_onnx_allows_functions_to_be_stay_flat():
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


def test_weights_are_handed_on_to_functions_in_time_with_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: Counter[str] = Counter()
    replace = ir.Node.replace_input_with

    def replace_input_with(node: ir.Node, place: int, value: ir.Value | None) -> None:
        steps[doing] += len(node.inputs)  # it makes the tuple of all inputs anew
        replace(node, place, value)

    monkeypatch.setattr(ir.Node, "replace_input_with", replace_input_with)
    for levels in (30, 60):
        doing = f"functions {levels}"
        nested = htp_export.functions(scale.deep(levels), "**")
        doing = f"inline {levels}"
        htp_export.inline(nested.model)
    # weights times levels; 8 times, if each call replaced its inputs one by one
    for what in ("functions", "inline"):
        assert steps[f"{what} 60"] < 5 * steps[f"{what} 30"]


def test_weights_of_deep_modules_have_short_names_in_functions():
    for function in nested_too_deep().model.functions.values():
        names = [str(value.name) for value in function.inputs]
        assert len(set(names)) == len(names)
        assert max(map(len, names)) <= 128 + len("_100")
        assert {name.rpartition(".")[2].partition("_")[0] for name in names} <= {
            "bias",
            "input",
            "x",
        }


@pytest.mark.parametrize(
    ("path", "owners"),
    [("a", "a.x.z a.x"), ("a-b", "a-b.y"), ("", "ab a.x.z a-b.y a.x"), ("c", "ab a.x.z a-b.y a.x")],
)
def test_of_the_owners_of_a_shared_node_those_below_the_called_module_are_its_own(path, owners):
    every = ["ab", "a.x.z", "a-b.y", "a.x"]
    tree = Hierarchy(
        [ModuleInfo(each, "Net", 1, "computed") for each in ["", "c", "a", "a-b", *every]]
    )
    shared = ir.node(
        "Relu", [ir.val("v")], metadata_props=tags.node_tags(every, "shared", tree.called)
    )
    found = Expectations(tree, CallTree(tree)).metadata(shared, Instance(path))
    assert tags.owners_of(found) == tuple(owners.split())


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


def test_patterns_of_several_results_look_at_what_is_near(tried):
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
    with changed_rules():
        for node in chain:
            rule.match(ir.Model(chain[0].graph, ir_version=10), chain[0].graph, node)  # type: ignore[arg-type]
    assert 0 < len(tried) <= 5 * len(chain)
    assert pattern.SimplePatternMatcher.match is whole


@pytest.mark.parametrize("consumers", [10, 300])
def test_a_tensor_with_very_many_consumers_is_said_where_patterns_may_be_missed(
    consumers, caplog, tried
):
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
    assert all(
        "pass fuse_for_onnxruntime: node 'n_v0' (Slice) and 299 others" in text for text in said
    )


def test_the_exponent_is_the_slope_of_the_logarithms():
    assert scale.exponent({10: 1.0, 100: 100.0, 1000: 10000.0}) == pytest.approx(2.0)


def test_the_memory_of_modules_nested_deep_is_known():
    levels = 150
    found = htp_export.cost(scale.deep(levels), dims={"batch": 1}).modules
    tensor = 16 * 8 * 4
    for level in (0, 100, 149):
        here = found["a" + ".m" * level]
        assert here.activation_bytes == 3 * (levels - level) * tensor
        # a skip of each level, and what a node reads and makes
        assert here.peak_bytes == (levels + 2) * tensor
    assert found[""].other_flops == 2 * found["a"].other_flops


def test_a_page_names_the_layers_of_deep_modules_without_those_around_them():
    def size(levels: int) -> int:
        inventory = take_inventory(htp_export.load(scale.deep(levels)))
        return len(json.dumps(drawing(inventory, ())["places"]))

    # as the paths themselves; with the layers around each, 8 times
    assert size(120) < 4.2 * size(60)


def test_stages_of_deep_models_are_found():
    stages = htp_export.partition(scale.deep(200), 2).stages
    assert [stage.modules for stage in stages] == [("a",), ("b",)]


def test_calls_in_a_circle_have_the_chain_of_where_they_begin():
    modules = [ModuleInfo(path, "Net", 1, "computed") for path in ("", "a", "b", "c", "d")]
    said = '{"a":[["b",0]],"b":[["c",0]],"c":[["a",0]],"d":[["b",0]]}'
    for first in itertools.permutations("abcd"):  # what was asked before changes nothing
        calls = CallTree.from_json(said, Hierarchy(modules))
        for path in first:
            calls.chain(Instance(path))
        chains = {
            path: "".join(each.path for each in calls.chain(Instance(path))) for path in "abcd"
        }
        assert chains == {"a": "abc", "b": "bca", "c": "cab", "d": "dbca"}


def test_containers_above_any_of_the_calls_hold_what_they_do():
    ran = ["", "x.y.a", "x.y.a.list.b", "other.list.c"]
    tree = Hierarchy(
        [*(ModuleInfo(path, "Net", 1, "computed") for path in ran), ModuleInfo("x.y", "List")]
    )
    calls = CallTree.from_json('{"x.y.a":[["other.list.c",0]]}', tree)
    work = calls.work(("x.y.a.list.b",))
    assert work.modules == {*ran, "x", "x.y", "x.y.a.list", "other", "other.list"}


def test_a_change_of_a_node_a_wire_or_a_size_changes_the_hashes_of_the_regions_around_it():
    model = scale.deep(8)
    model.graph.node[10].op_type, model.graph.node[14].op_type = "Relu", "Sigmoid"
    changed = {
        name: onnx.ModelProto.FromString(model.SerializeToString())
        for name in ("op", "wire", "swap", "size")
    }
    changed["op"].graph.node[9].op_type = "Mul"
    changed["wire"].graph.node[-1].input[1] = changed["wire"].graph.node[2].output[0]
    changed["swap"].graph.node[10].op_type, changed["swap"].graph.node[14].op_type = (
        "Sigmoid",
        "Relu",
    )
    bias = changed["size"].graph.initializer[3]
    bias.CopyFrom(onnx.numpy_helper.from_array(np.ones((1, 8), "f4"), bias.name))
    sides = {name: htp_export.load(each) for name, each in {"model": model, **changed}.items()}
    hashers = {name: Hasher(GraphFacts(each)) for name, each in sides.items()}
    found = {
        name: {path: hashers[name].region(path) for path in each.paths}
        for name, each in sides.items()
    }
    statuses = {
        name: Counter(found["model"][path] == of[path] for path in of) for name, of in found.items()
    }
    assert statuses["model"] == {True: 17}
    assert all(0 < each[False] < 17 for name, each in statuses.items() if name != "model")


def test_a_change_deep_in_a_model_changes_the_modules_around_it():
    before, after = scale.deep(50), scale.deep(50)
    after.graph.node[98].op_type = "Sigmoid"
    assert htp_export.diff(before, before).same
    found = htp_export.diff(before, after)
    assert len(found.changed) == 27
    assert found.modules["b"].before.structure == found.modules["b"].after.structure


def test_the_digest_of_a_region_is_the_same_in_every_process():
    tagged = htp_export.load(scale.deep(2))
    assert Hasher(GraphFacts(tagged)).region("a.m") == "e1b26c7d5c34454586c6c933"
