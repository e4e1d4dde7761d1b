"""optimize(): levels, attribution, verification and rollback, the registry, files, and real models held to PyTorch."""

import collections
import functools
import json
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export import discovery
from htp_export.capabilities.optimize import registry
from htp_export.capabilities.optimize.optimizing import OutputCheck
from htp_export.capabilities.optimize.registry import register
from htp_export.capabilities.optimize.results import Change
from htp_export.command.main import main
from htp_export.editing.outputs import add_zeros_input
from htp_export.errors import InputError, PassError
from htp_export.model.regions import all_nodes
from htp_export.runtime.samples import Samples
from htp_export.runtime.settings import RunSettings
from tests.exporting import BOTH, exported, of_type
from tests.graphs import array, ops, owners, passed, run, tagged
from tests.nets import Apply, composed, ready, spread
from tests.truth import inexact


class Changing(ir.passes.InPlacePass):
    """Puts one operator in the place of another."""

    def __init__(self, old: str, new: str) -> None:
        self.old, self.new = old, new

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        found = [node for node in model.graph if node.op_type == self.old]
        for node in found:
            new = ir.node(self.new, node.inputs)
            ir.convenience.replace_nodes_and_values(
                model.graph, node, [node], [new], node.outputs, new.outputs
            )
        return ir.passes.PassResult(model, bool(found))


def doing(change: Callable[[ir.Model], object]) -> Callable[[], ir.passes.PassBase]:
    """A pass that does something to a model, and says so."""

    class Does(ir.passes.InPlacePass):
        def call(self, model: ir.Model) -> ir.passes.PassResult:
            change(model)
            return ir.passes.PassResult(model, modified=True)

    return Does


def small_net() -> ir.Model:
    graph = "{ [drop] a = Identity (x) [layer__act] b = Relu (a) [layer] y = Neg (b) }"
    signatures = {"drop": (["x"], ["a"]), "layer": (["a"], ["y"]), "layer.act": (["a"], ["b"])}
    return tagged(f"(float[2, 4] x) => (float y) {graph}", signatures)


def test_attribution_says_how_many_nodes_went_where():
    model = small_net()
    before = ir.to_proto(model).SerializeToString()
    result = htp_export.optimize(model)
    assert ir.to_proto(model).SerializeToString() == before
    assert (result.nodes_before, result.nodes_after) == (3, 2)
    assert {name: dict(found) for name, found in result.attribution.items() if found} == {
        "eliminate_identity_ops": {"drop": Change(removed=1), "layer.act": Change(changed=1)}
    }
    assert result.below("")["eliminate_identity_ops"].saved == 1
    assert result.below("layer")["eliminate_identity_ops"].saved == 0
    assert result.max_abs is None


def weighted_net() -> ir.Model:
    """Two layers that read equal weights, one that reads a weight of its own, and one that nobody reads."""
    graph = """(float[2, 4] x) => (float y) { [stack__one] a = MatMul (x, one) [stack__two] b = MatMul (a, two)
        [head__three] c = Transpose (b) [head__three] d = Transpose (c) [head__three] y = MatMul (d, three) }"""
    return tagged(
        graph, one=array(4, 4), two=array(4, 4), three=array(4, 4, seed=1), left=array(10)
    )


def test_attribution_counts_bytes_of_weights_at_the_modules_that_read_them():
    result = htp_export.optimize(weighted_net())
    saved = {
        (name, path): change.saved_bytes
        for name, found in result.attribution.items()
        for path, change in found.items()
        if change.saved_bytes
    }
    assert saved == {
        ("eliminate_duplicate_constants", "stack.two"): 64,
        ("eliminate_dead_nodes", ""): 40,
    }
    weights = [value.const_value for value in result.model.graph.initializers.values()]
    assert sum(saved.values()) == 3 * 64 + 40 - sum(tensor.nbytes for tensor in weights)


def test_new_weights_count_against_the_module_that_reads_them():
    layers = " ".join(
        f"[at__{n}] m{n} = MatMul (x, w{n}) [at__{n}] {n} = Add (m{n}, b{n})" for n in "qkv"
    )
    weights = {
        f"{kind}{n}": array(*shape, seed=k)
        for k, n in enumerate("qkv")
        for kind, shape in (("w", (4, 4)), ("b", (4,)))
    }
    graph = f"(float[2, 4] x) => (float y) {{ {layers} [at] y = Concat <axis = 1> (q, k, v) }}"
    result = htp_export.optimize(
        tagged(graph, **weights), passes="merge_parallel_projections", level="tolerant"
    )
    found = {
        path: change.saved_bytes
        for path, change in result.attribution["merge_parallel_projections"].items()
    }
    own, number = 4 * 4 * 4 + 4 * 4, 8  # where a slice begins or ends, or its axis
    assert found == {"at": -3 * own - number, **{f"at.{name}": own - 2 * number for name in "qkv"}}


def test_bytes_of_a_pass_that_changes_weights_alone(passes):
    @doing
    def halves(model):
        weight = model.graph.initializers["three"]
        weight.const_value = ir.tensor(weight.const_value.numpy().astype(np.float16))

    passes("halves", level="exact")(halves)
    result = htp_export.optimize(weighted_net(), passes="halves")
    assert result.attribution["halves"] == {"head.three": Change(saved_bytes=32)}


def test_attribution_adds_up_at_any_depth():
    result = htp_export.optimize(weighted_net())
    name = "eliminate_redundant_transposes"
    assert {
        path: change.saved for path, change in result.attribution[name].items() if change.saved
    } == {"head.three": 2}
    assert {
        path: change.saved for path, change in result.at_depth(1)[name].items() if change.saved
    } == {"head": 2}
    for depth in range(4):
        found = result.at_depth(depth)
        assert all(
            path.count(".") < max(depth, 1) for changes in found.values() for path in changes
        )
        for report in result.passes:
            assert sum(found[report.name].values(), Change()) == report.change
    assert set(result.at_depth(0)[name]) == {""}
    assert result.at_depth(9) == result.attribution
    with pytest.raises(InputError, match="0 or more, not -1"):
        result.at_depth(-1)


def test_a_result_prints_as_a_table_and_goes_into_json():
    result = htp_export.optimize(small_net(), verify=True)
    assert "eliminate_identity_ops" in str(result)
    assert "3 nodes before, 2 after; outputs differ by 0 at most" in str(result).splitlines()
    data = json.loads(json.dumps(result.to_dict()))
    assert data["max_abs"] == 0.0
    assert [entry["modules"] for entry in data["passes"] if entry["modules"]] == [
        {
            "drop": {"removed": 1, "changed": 0, "added": 0, "saved_bytes": 0},
            "layer.act": {"removed": 0, "changed": 1, "added": 0, "saved_bytes": 0},
        }
    ]


def test_a_pass_of_ones_own_gets_its_tags_from_the_policy(passes):
    @passes("negate_differently", level="exact")
    class Softens(Changing):
        """Computes something else, and is not asked."""

        def __init__(self) -> None:
            super().__init__("Neg", "Softsign")

    result = htp_export.optimize(small_net(), passes="negate_differently", level="exact")
    assert owners(result.model)["y"] == ("layer",)


def test_a_default_that_is_written_out_is_no_change_of_a_node():
    model = tagged(
        """(float[2, 4] x) => (float[2, 4] y) {
            [norm] h = BatchNormalization <training_mode = 0> (x, s, s, s, s)
            [pad] p = Pad (h, none)
            [act] y = Relu (p)
        }""",
        s=np.float32([1, 2, 3, 4]),
        none=np.zeros(4, np.int64),
    )
    # onnx_ir takes `training_mode` away, where it looks for dead nodes
    found = htp_export.optimize(model)
    assert owners(found.model) == {"h": ("norm",), "y": ("act",)}


def test_a_pass_that_breaks_its_level_is_undone_and_named(passes):
    passes("wrong", level="tolerant")(lambda: Changing("Neg", "Abs"))
    model = small_net()
    result = htp_export.optimize(
        model, passes=["eliminate_identity_ops", "wrong"], level="tolerant", verify=True
    )
    assert list(result.rolled_back) == ["wrong"]
    assert "output 'y' is off by" in result.rolled_back["wrong"]
    assert ops(result.model) == ["Relu", "Neg"]
    assert owners(result.model) == {"b": ("layer.act",), "y": ("layer",)}
    signatures = htp_export.load(result.model).signatures
    assert signatures["layer.act"][0].inputs == {"arg0": "x"}
    assert np.array_equal(run(result.model, x=array(2, 4))[0], run(model, x=array(2, 4))[0])
    believed = htp_export.optimize(model, passes="wrong", level="tolerant")
    assert ops(believed.model) == ["Identity", "Relu", "Abs"]


def test_an_exact_pass_may_not_change_a_bit(passes):
    @doing
    def scales(model):
        weight = model.graph.initializers["w"]
        weight.const_value = ir.tensor(weight.const_value.numpy() * np.float32(1 + 2e-7))

    model = tagged("(float[2, 4] x) => (float y) { [fc] y = Mul (x, w) }", w=array(4))
    for level, undone in (("exact", ["scales"]), ("tolerant", [])):
        passes("scales", level=level)(scales)
        result = htp_export.optimize(model, passes="scales", level=level, verify=True)
        assert list(result.rolled_back) == undone


def test_values_that_are_not_numbers_are_compared():
    one, other = (tagged(f"(float[2] x) => (float y) {{ y = {op} (x) }}") for op in ("Log", "Relu"))
    check = OutputCheck(one, Samples.of(RunSettings({"x": np.float32([-1, 1])}), one))
    assert check.fault(one, "exact") == ""
    assert "off by inf" in check.fault(other, "tolerant")


def test_every_run_of_the_data_is_verified():
    relu, other = (
        tagged(f"(float[2] x) => (float y) {{ y = {op} (x) }}") for op in ("Relu", "Identity")
    )
    # the second one shows the difference
    runs = [{"x": np.float32([1, 2])}, {"x": np.float32([-1, 2])}]
    assert OutputCheck(relu, Samples.of(RunSettings(runs[:1]), relu)).fault(other, "exact") == ""
    assert "output 'y, run 1' is off by 1" in OutputCheck(
        relu, Samples.of(RunSettings(runs), relu)
    ).fault(other, "exact")
    assert htp_export.optimize(relu, verify=True, data=runs).max_abs == 0
    with pytest.raises(htp_export.InputError, match="are for verify, which runs the model"):
        htp_export.optimize(relu, data=runs)


class TwoInOne(ir.passes.InPlacePass):
    """Lets one node compute a sum and what is made of it, and give the sum, too, where others read it."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = False
        for last in [node for node in model.graph if node.op_type in ("Neg", "Abs")]:
            first = last.inputs[0].producer() if last.inputs[0] is not None else None
            if first is None or first.op_type != "Add":
                continue
            old = [last.outputs[0], first.outputs[0]][: len(first.outputs[0].uses())]
            new = ir.node(f"Add{last.op_type}", first.inputs, domain="ours", num_outputs=len(old))
            ir.convenience.replace_nodes_and_values(
                model.graph, last, [first, last], [new], old, new.outputs
            )
            modified = True
        return ir.passes.PassResult(model, modified)


def pre_norm_net() -> ir.Model:
    """A sum that one module takes and that is read again after it; and a sum that only one module reads."""
    graph = """(float[2, 4] x) => (float y) { [block] sum = Add (x, x) [block__norm] normed = Neg (sum)
        [block__mixer] mixed = Relu (normed) [block] out = Add (mixed, sum) [last] y = Abs (out) }"""
    inside = {"block.norm": (["sum"], ["normed"]), "block.mixer": (["normed"], ["mixed"])}
    return tagged(graph, {"block": (["x"], ["out"]), **inside, "last": (["out"], ["y"])})


def fates(model: ir.Model) -> dict[str, str]:
    return {path: module.fate for path, module in htp_export.load(model).hierarchy.items() if path}


def test_fusions_across_tensors_that_stay_are_left_out_where_that_is_asked_for(passes):
    passes("two_in_one", level="fused")(TwoInOne)
    assert passed(pre_norm_net(), "two_in_one")[1].worked_across(
        ["block", "block.norm", "last"]
    ) == {"sum"}
    free = htp_export.optimize(pre_norm_net(), passes="two_in_one", level="fused")
    assert ops(free.model) == ["AddNeg", "Relu", "AddAbs"]
    assert fates(free.model)["block.norm"] == "fused"
    kept = htp_export.optimize(pre_norm_net(), passes="two_in_one", level="fused", keep_exact=True)
    # the other sum is gone: that fusion is what it says
    assert ops(kept.model) == ["Add", "Neg", "Relu", "AddAbs"]
    assert fates(kept.model) == {
        "block": "fused",
        "block.norm": "computed",
        "block.mixer": "computed",
        "last": "fused",
    }
    assert set(kept.fused) == {"block", "last"}
    assert owners(kept.model)["sum"] == ("block",)
    assert (kept.nodes_before, kept.nodes_after) == (5, 4)
    assert kept.model.graph.opset_imports.keys() == {""}


def norm_between(outputs: str = "") -> ir.Model:
    graph = "{ sum = Add (x, x) [norm] normed = Neg (sum) y = Mul (normed, sum) }"
    return tagged(f"(float[2, 4] x) => ({outputs}float y) {graph}", {"norm": (["sum"], ["normed"])})


def test_where_nothing_is_left_of_a_pass_it_has_done_nothing(passes):
    passes("two_in_one", level="fused")(TwoInOne)
    result = htp_export.optimize(
        norm_between(), passes="two_in_one", level="fused", keep_exact=True
    )
    assert ops(result.model) == ["Add", "Neg", "Mul"]
    assert result.attribution == {"two_in_one": {}}
    assert result.fused == {}


@pytest.mark.parametrize("output", ["normed", "sum"])
def test_results_of_the_model_may_be_tensors_that_nothing_works_across(output, passes):
    passes("two_in_one", level="fused")(TwoInOne)
    model = norm_between(f"float {output}, ")
    result = htp_export.optimize(model, passes="two_in_one", level="fused", keep_exact=True)
    assert [value.name for value in result.model.graph.outputs] == [output, "y"]
    for found, expected in zip(
        run(result.model, x=array(2, 4)), run(model, x=array(2, 4)), strict=True
    ):
        assert np.array_equal(found, expected)


class Failing(ir.passes.InPlacePass):
    """Takes half of a node away, then fails."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        next(iter(model.graph)).replace_input_with(0, None)
        raise LookupError("no such pattern")


def test_a_pass_that_fails_is_named_with_those_that_ran_and_the_model_is_as_it_was(
    passes, tmp_path, capsys
):
    passes("failing", level="exact")(Failing)
    model = small_net()
    before = ir.to_proto(model).SerializeToString()
    with pytest.raises(
        PassError, match=r"'failing' failed \(LookupError: no such pattern\); it ran after"
    ) as caught:
        htp_export.optimize(
            model,
            tmp_path / "out.onnx",
            passes=["eliminate_dead_nodes", "failing", "fold_constants"],
        )
    assert (caught.value.name, caught.value.ran) == ("failing", ("eliminate_dead_nodes",))
    assert isinstance(caught.value.__cause__, LookupError)
    assert ir.to_proto(model).SerializeToString() == before
    ir.save(model, tmp_path / "in.onnx")
    assert (
        main(
            [
                "optimize",
                str(tmp_path / "in.onnx"),
                "-o",
                str(tmp_path / "out.onnx"),
                "--passes",
                "failing",
            ]
        )
        == 1
    )
    assert (
        "pass 'failing' failed (LookupError: no such pattern); it ran as the first one"
        in capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.iterdir()] == ["in.onnx"]


def test_a_pass_that_cannot_be_made_or_gives_no_result_is_named(passes):
    passes("unmade", level="exact")(lambda: 1 / 0)
    passes("mute", level="exact")(lambda: lambda model: None)
    for name, problem in (("unmade", "ZeroDivisionError"), ("mute", "AttributeError")):
        with pytest.raises(PassError, match=f"{name!r} failed .{problem}"):
            htp_export.optimize(small_net(), passes=name)


def test_a_pass_that_leaves_nodes_without_owners_is_named(passes):
    @doing
    def untagging(model):
        for node in model.graph:
            node.metadata_props.clear()
        Changing("Neg", "Abs").call(model)

    passes("untagging", level="exact")(untagging)
    with pytest.raises(
        PassError, match=r"'untagging' failed \(HtpExportError: 3 nodes have no owner"
    ):
        htp_export.optimize(small_net(), passes="untagging")


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        (
            lambda graph: setattr(graph.outputs[0], "name", "z"),
            r"the outputs of the model were \['y'\], and are \['z'\]",
        ),
        (
            lambda graph: setattr(graph.inputs[0], "name", "z"),
            r"the inputs of the model were \['x'\], and are \['z'\]",
        ),
        (lambda graph: graph.remove(graph[1]), "Neg '.*' reads 'b', which has no producer"),
        (lambda graph: graph.remove(graph[2]), "the output 'y' has no producer"),
        (
            lambda graph: graph[1].replace_input_with(0, ir.val("foreign")),
            "Relu '.*' reads 'foreign', which has no",
        ),
    ],
    ids=["output", "input", "removed", "removed output", "foreign"],
)
def test_a_pass_ensures_names_of_inputs_and_outputs_and_a_producer_of_every_tensor(
    passes, fault, problem
):
    passes("faulty", level="exact")(doing(lambda model: fault(model.graph)))
    with pytest.raises(PassError, match=problem):
        htp_export.optimize(small_net(), passes="faulty")


def test_a_pass_that_fails_leaves_no_barriers(passes):
    seen = []

    class FailsAtBarriers(TwoInOne):
        def call(self, model: ir.Model) -> ir.passes.PassResult:
            seen.append(model)
            if any(node.op_type == "Barrier" for node in model.graph):
                raise LookupError("no such operator: Barrier")
            return super().call(model)

    passes("fails_at_barriers", level="fused")(FailsAtBarriers)
    with pytest.raises(PassError, match="no such operator: Barrier"):
        htp_export.optimize(
            pre_norm_net(), passes="fails_at_barriers", level="fused", keep_exact=True
        )
    assert len(seen) == 2
    assert ops(seen[-1]) == ops(pre_norm_net())
    assert seen[-1].graph.opset_imports.keys() == pre_norm_net().graph.opset_imports.keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": "wild"}, "level 'wild'"),
        ({"passes": "nothing"}, "no pass 'nothing'; there are: "),
        ({"passes": []}, "no passes"),
        (
            {"passes": "fuse_conv_batchnorm"},
            "'fuse_conv_batchnorm' is tolerant, more than level 'exact' allows",
        ),
    ],
)
def test_what_cannot_be_chosen_is_told(arguments, message):
    with pytest.raises(InputError, match=message):
        htp_export.optimize(small_net(), **arguments)
    with pytest.raises(InputError, match="level 'wild' is none of"):
        register("mine", level="wild")


def test_passes_of_other_packages_come_from_entry_points(passes, monkeypatch):
    entry = EntryPoint(
        "from_elsewhere", "tests.optimize.test_optimize:Elsewhere", "htp_export.passes"
    )
    monkeypatch.setattr(
        discovery, "entry_points", lambda group: [entry] if group == "htp_export.passes" else []
    )
    assert registry.find("from_elsewhere").level == "exact"
    assert ops(htp_export.optimize(small_net(), passes="from_elsewhere").model) == [
        "Identity",
        "Relu",
        "Neg",
    ]


class Elsewhere(ir.passes.InPlacePass):
    """Does nothing."""

    level = "exact"

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return ir.passes.PassResult(model, modified=False)


def test_copies_that_a_pass_of_the_user_removes_are_the_work_of_nobody(passes):
    class RemovesCopies(ir.passes.InPlacePass):
        def call(self, model: ir.Model) -> ir.passes.PassResult:
            for node in [node for node in model.graph if node.op_type == "Identity"]:
                node.outputs[0].replace_all_uses_with(node.inputs[0])
                model.graph.remove(node, safe=True)
            return ir.passes.PassResult(model, modified=True)

    passes("removes_copies", level="exact")(RemovesCopies)
    graph = "{ [a] h = Relu (x) [one] i = Identity (h) [two] j = Identity (i) [b] y = Neg (j) }"
    signatures = {
        "a": (["x"], ["h"]),
        "one": (["h"], ["i"]),
        "two": (["i"], ["j"]),
        "b": (["j"], ["y"]),
    }
    model = tagged(f"(float[2, 4] x) => (float y) {graph}", signatures)
    optimized = htp_export.load(
        htp_export.optimize(model, passes="removes_copies", level="exact").model
    )
    assert [optimized.hierarchy[path].fate for path in ("one", "two")] == ["identity", "identity"]
    assert optimized.signature("one").outputs == ("h",)
    assert owners(optimized.model) == {"h": ("a",), "y": ("b",)}


@pytest.mark.long
@BOTH
@pytest.mark.parametrize(
    "make",
    [nn.Dropout, lambda: Apply(lambda x: x.unsqueeze(0).squeeze(0))],
    ids=["dropout", "layout"],
)
def test_two_modules_in_a_row_that_return_their_input_are_identities(make, exporter, tmp_path):
    net = nn.Sequential(nn.Linear(4, 4), make(), make(), nn.Linear(4, 2)).eval()
    options = {"optimize": False} if exporter == "dynamo" else {}
    exported(net, {"input": torch.ones(2, 4)}, exporter, tmp_path, **options)
    optimized = htp_export.optimize(tmp_path / "model.onnx", level="exact").tagged
    assert [optimized.hierarchy[path].fate for path in "0123"] == [
        "computed",
        "identity",
        "identity",
        "computed",
    ]


def test_a_pass_may_give_another_model_and_takes_no_default_for_a_constant(passes):
    seen = []

    class Copies(ir.passes.FunctionalPass):
        def call(self, model: ir.Model) -> ir.passes.PassResult:
            seen.append(dict(model.graph.initializers))
            return ir.passes.PassResult(model.clone(), modified=True)

    passes("copies", level="exact")(Copies)
    passes("fails", level="exact")(Failing)
    model = small_net()
    vector = add_zeros_input(model.graph, "v", ir.DataType.FLOAT, [4])
    result = htp_export.optimize(model, passes=["copies", "eliminate_identity_ops"], level="exact")
    assert seen[0] == {}
    assert owners(result.model) == {"b": ("layer.act",), "y": ("layer",)}
    assert htp_export.load(result.model).hierarchy["layer"].fate == "computed"
    for graph in (result.model.graph, model.graph):
        assert graph.initializers["v"] is graph.inputs[-1]
        np.testing.assert_array_equal(graph.initializers["v"].const_value.numpy(), np.zeros(4))
    with pytest.raises(PassError):
        htp_export.optimize(model, passes=["fails"], level="exact")
    assert model.graph.initializers == {"v": vector}


def test_an_untagged_model_is_optimised_too():
    model = small_net()
    for node in model.graph:
        node.metadata_props.clear()
    model.metadata_props.clear()
    result = htp_export.optimize(model)
    assert ops(result.model) == ["Relu", "Neg"]
    assert dict(result.model.metadata_props) == {}


def saved(model: ir.Model, folder: Path) -> tuple[Path, Path]:
    """The file of a model, and one to write."""
    ir.save(model, folder / "in.onnx")
    return folder / "in.onnx", folder / "out.onnx"


def test_the_command_writes_a_file_and_tells_what_it_did(tmp_path, capsys):
    source, target = saved(small_net(), tmp_path)
    assert main(["optimize", str(source), "-o", str(target), "--verify"]) == 0
    assert "3 nodes before, 2 after; outputs differ by 0 at most" in capsys.readouterr().out
    assert ops(ir.load(target)) == ["Relu", "Neg"]
    assert main(["optimize", str(source), "-o", str(target), "--keep-exact", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["nodes_after"] == 2


def test_the_command_attributes_what_it_did_to_modules(tmp_path, capsys):
    source, target = saved(weighted_net(), tmp_path)
    assert main(["optimize", str(source), "-o", str(target), "--attribution", "--depth", "1"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["pass", "removed", "changed", "added", "saved", "modules"]
    assert ["eliminate_redundant_transposes", "2", "1", "0", "0", "B"] in lines
    assert ["2", "1", "0", "0", "B", "head"] in lines
    assert ["0", "1", "0", "64", "B", "stack"] in lines


def test_the_command_optimises_several_files_into_a_folder(tmp_path, capsys):
    sources = [tmp_path / "small.onnx", tmp_path / "weighted.onnx"]
    for source, model in zip(sources, (small_net(), weighted_net()), strict=True):
        ir.save(model, source)
    assert main(["optimize", *map(str, sources), "-o", str(sources[0])]) == 2
    assert "is a file; several files go into a folder" in capsys.readouterr().err
    arguments = ["optimize", *map(str, sources), "-o", str(tmp_path / "out")]
    assert main(arguments) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["nodes", "fewer", "by", "small.onnx", "weighted.onnx", "all", "saved"]
    assert ["eliminate_identity_ops", "1", "0", "1", "0", "B"] in lines
    assert lines[-4] == ["nodes", "after", "2", "3", "5"]
    assert [line[0] for line in lines[-3:]] == ["wrote", "wrote", "next:"]
    assert ops(ir.load(tmp_path / "out" / "small.onnx")) == ["Relu", "Neg"]
    assert main([*arguments, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert list(data["models"]) == ["small.onnx", "weighted.onnx"]
    assert data["total"]["eliminate_duplicate_constants"]["saved_bytes"] == 64


def test_a_new_folder_does_not_stay_if_one_of_several_files_fails(tmp_path):
    model, broken = tmp_path / "model.onnx", tmp_path / "broken.onnx"
    ir.save(ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 20}), ir_version=10), model)
    broken.write_bytes(b"no model")
    assert main(["optimize", str(model), str(broken), "-o", str(tmp_path / "out")]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.onnx", "model.onnx"]


def test_files_of_one_name_do_not_go_into_one_folder(tmp_path, capsys):
    for folder in ("a", "b", "out"):
        (tmp_path / folder).mkdir()
    sources = [tmp_path / folder / "model.onnx" for folder in ("a", "b")]
    for source in sources:
        ir.save(small_net(), source)
    assert main(["optimize", *map(str, sources), "-o", str(tmp_path / "out")]) == 2
    assert "several files are called model.onnx" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


# --- real architectures ---------------------------------------------------


SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
OF_TYPE = {
    "bert": {**SIZES, "num_hidden_layers": 1, "vocab_size": 100},
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 100,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "resnet": {"embedding_size": 8, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]},
}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """A model, its inputs and its file, exported once."""

    @functools.cache
    def made(name, exporter) -> tuple[torch.nn.Module, dict[str, torch.Tensor], Path]:
        model, kwargs = of_type(name, **OF_TYPE[name])
        options = {}
        if exporter == "torchscript":
            ranks = {2: {0: "batch", 1: "length"}, 4: {0: "batch"}}
            axes = {key: ranks[value.ndim] for key, value in kwargs.items()}
            options = {"opset_version": 14, "do_constant_folding": False, "dynamic_axes": axes}
            options["input_names"] = [*kwargs]
        folder = tmp_path_factory.mktemp(name)
        exported(ready(model), kwargs, exporter, folder, **options)
        return model, kwargs, folder / "model.onnx"

    return made


@pytest.mark.long
@pytest.mark.parametrize(
    "exporter", [pytest.param("torchscript", marks=pytest.mark.slow), "dynamo"]
)
@pytest.mark.parametrize(
    ("name", "most"),
    [
        pytest.param("bert", (88, 43), id="bert"),
        pytest.param("gpt2", (149, 87), id="gpt2", marks=pytest.mark.slow),
        pytest.param("resnet", (45, 45), id="resnet", marks=pytest.mark.slow),
    ],
)
def test_real_models_stay_exact_or_say_with_what_they_are_fused(
    name, most, exporter, tmp_path, real
):
    model, kwargs, source = real(name, exporter)
    target = tmp_path / "small.onnx"
    result = htp_export.optimize(source, target, level="tolerant", verify=True)
    assert result.rolled_back == {}
    assert result.max_abs is not None
    assert result.max_abs <= 1e-4
    assert result.nodes_after <= most[exporter == "dynamo"]
    assert all("htp.module" in node.metadata_props for node in all_nodes(result.model))
    assert inexact(model, kwargs, target) == []


def test_attention_for_onnxruntime_has_all_its_owners(tmp_path, real):
    model, kwargs, source = real("bert", "dynamo")
    result = htp_export.optimize(source, tmp_path / "small.onnx", level="fused", verify=True)
    assert result.rolled_back == {}
    attention = next(
        node for node in result.model.graph if node.op_type in ("Attention", "MultiHeadAttention")
    )
    path = "encoder.layer.0.attention.self"
    found = owners(result.model)[attention.outputs[0].name]
    assert set(found) >= {path}
    assert inexact(model, kwargs, tmp_path / "small.onnx") == []


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_group_normalization_stays_one_that_every_machine_can_run(exporter, tmp_path):
    """onnxscript's rules make an operator of it that ONNX Runtime has for GPUs alone."""
    model = ready(
        torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.GroupNorm(2, 8), torch.nn.GELU())
    )
    exported(model, {"input": torch.randn(1, 3, 8, 8)}, exporter, tmp_path)
    result = htp_export.optimize(tmp_path / "model.onnx", level="fused", verify=True)
    assert result.rolled_back == {}
    assert {"InstanceNormalization", "Gelu"} <= {node.op_type for node in result.model.graph}
    assert set(result.model.opset_imports) <= {"", "com.microsoft"}


@pytest.mark.long
def test_a_product_turns_no_batch_where_onnxruntime_cannot(tmp_path):
    """Factors of a FusedMatMul with transBatchA have equal ranks; onnxscript's rules do not ask for that.

    Attention of a few learned queries to a sequence: torch puts the batch second for it.
    """
    reads = composed(
        lambda self, x: self.attention(self.queries.expand(x.shape[0], -1, -1), x, x)[0],
        queries=torch.nn.Parameter(torch.randn(4, 8)),
        attention=torch.nn.MultiheadAttention(8, 2, batch_first=True),
    )
    model, kwargs = ready(reads), {"x": torch.randn(2, 7, 8)}
    exported(model, kwargs, "dynamo", tmp_path)
    result = htp_export.optimize(
        tmp_path / "model.onnx", tmp_path / "small.onnx", level="fused", verify=True
    )
    assert result.rolled_back == {}
    assert "FusedMatMul" in {node.op_type for node in result.model.graph}
    assert all("htp.module" in node.metadata_props for node in all_nodes(result.model))
    assert inexact(model, kwargs, tmp_path / "small.onnx") == []


@BOTH
def test_a_tensor_that_is_returned_twice_still_is(exporter, tmp_path):
    twice = composed(
        lambda self, x: (lambda y: (y, y.tanh(), y))(self.fc(x)), fc=torch.nn.Linear(4, 4)
    )
    before = exported(spread(twice.eval()), {"x": torch.randn(2, 4)}, exporter, tmp_path)
    small = htp_export.optimize(before, level="fused").model
    assert [output.name for output in small.graph.outputs] == [
        output.name for output in before.graph.output
    ]
    assert [node.op_type for node in small.graph] == [node.op_type for node in before.graph.node]


@pytest.mark.long
def test_changes_of_layout_around_fused_attention_go(tmp_path):
    """onnxscript's rules leave out the shape of what an attention gives; without it such changes seem to be needed."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    sizes = {
        "d_model": 32,
        "encoder_layers": 1,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
    }
    model = ready(WhisperEncoder(WhisperConfig(num_mel_bins=20, max_source_positions=10, **sizes)))
    exported(model, {"input_features": torch.randn(1, 20, 20)}, "dynamo", tmp_path)
    result = htp_export.optimize(tmp_path / "model.onnx", level="fused", verify=True)
    assert result.rolled_back == {}
    ops = collections.Counter(node.op_type for node in result.model.graph)
    # behind the convolutions
    assert (ops["MultiHeadAttention"], ops["Reshape"], ops["Transpose"]) == (1, 0, 1)
    shapes = {
        node.op_type: node.outputs[0].shape
        for node in result.model.graph
        if node.domain == "com.microsoft"
    }
    assert tuple(shapes["MultiHeadAttention"]) == (1, 10, 32)
    # slower than a sum and a norm
    assert (ops["LayerNormalization"], ops["SkipLayerNormalization"]) == (3, 0)
