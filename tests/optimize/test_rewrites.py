"""Passes that rewrite slices, branches, expansions, masks, reductions and normalisations: values, owners, borders."""

import numpy as np
import onnx_ir as ir
import pytest

import htp_export
from tests.graphs import Builder, array, ops, owners, passed, rewritten, same
from tests.written import written


def sliced(
    net: Builder, source: str, result: str, owner: str, bounds: tuple[int, int], axis: int, step: int = 1
) -> None:
    numbers = {"start": bounds[0], "end": bounds[1], "axis": axis, "step": step}
    names = " ".join(net.const(f"{result}.{key}", np.array([number])) for key, number in numbers.items())
    net.add("Slice", f"{source} {names}", result, owner)


# --- gathers ---


def indexed(rows: list[int], columns: list[int], start: int = 0, ends: tuple[str, str] = ("n", "m")) -> Builder:
    """x[rows, columns] with ranges of these shapes, that are broadcast to a grid."""
    net = Builder(opset=18, x=["n", "m"])
    net.const("start", np.array(start))
    net.const("step", np.array(1))
    net.const("last", np.array([-1]))
    for axis, name in enumerate("nm"):
        net.add("Shape", "x", f"{name}.size", "net", start=axis, end=axis + 1)
        net.add("Squeeze", f"{name}.size", name, "net")
    for side, end, shape in zip(("rows", "columns"), ends, (rows, columns), strict=True):
        net.add("Range", f"start {end} step", f"{side}.range", "net")
        net.add("Reshape", f"{side}.range {net.const(f'{side}.shape', np.array(shape))}", side, "net")
    net.add("Max", "rows columns", "grid", "net")
    net.add("Shape", "grid", "sizes", "net")
    for side in ("rows", "columns"):
        net.add("Expand", f"{side} sizes", f"{side}.grid", "net")
        net.add("Unsqueeze", f"{side}.grid last", f"{side}.last", "net")
    net.add("Concat", "rows.last columns.last", "indices", "net", axis=-1)
    net.add("GatherND", "x indices", "y", "net")
    return net


def test_a_gather_of_everything_in_order_is_the_tensor_with_more_dimensions():
    model = indexed([-1, 1, 1, 1], [1, 1, 1, -1]).model("y")
    changed = rewritten(model, "eliminate_whole_gathers", x=array(3, 5))
    assert ops(changed) == ["Unsqueeze"]
    assert owners(changed) == {"y": ("net",)}
    assert ops(rewritten(indexed([-1, 1], [1, -1]).model("y"), "eliminate_whole_gathers", x=array(3, 5))) == [
        "Identity"
    ]


@pytest.mark.parametrize(
    "net",
    [
        indexed([1, -1], [-1, 1]),  # transposed
        indexed([-1, 1], [1, -1], start=1),  # without the first of each
        indexed([-1, 1], [1, -1], ends=("n", "n")),  # a square of it
        indexed([-1], [-1], ends=("n", "n")),  # its diagonal
    ],
    ids=["transposed", "from-1", "square", "diagonal"],
)
def test_a_gather_of_a_part_or_in_another_order_stays(net: Builder):
    assert "GatherND" in ops(rewritten(net.model("y"), "eliminate_whole_gathers", x=array(3, 5)))


# --- slices ---


def test_slices_in_a_row_that_cut_other_dimensions_are_one():
    net = Builder(x=["n", 8, 6])
    sliced(net, "x", "rows", "merge", (0, 2**31), 1, step=2)
    sliced(net, "rows", "left", "merge", (0, 2**31), 2, step=2)
    sliced(net, "rows", "right", "merge", (1, 2**31), -1, step=2)
    net.add("Concat", "left right", "y", "merge", axis=-1)
    changed = rewritten(net.model("y"), "merge_slices", x=array(2, 8, 6))
    assert ops(changed) == ["Slice", "Slice", "Concat"]


def test_slices_in_a_row_of_one_dimension_or_with_another_reader_stay():
    net = Builder(x=[8, 6])
    sliced(net, "x", "a", "one", (1, 7), 0)
    sliced(net, "a", "b", "one", (1, 3), 0)
    sliced(net, "x", "c", "one", (1, 7), 1)
    sliced(net, "c", "d", "one", (2, 4), 0)
    net.add("Neg", "c", "e", "one")
    assert ops(passed(net.model("b d e"), "merge_slices")[0]) == ["Slice"] * 4 + ["Neg"]


def test_a_slice_that_a_module_gives_stays():
    net = Builder(x=[8, 6])
    sliced(net, "x", "a", "one", (1, 7), 0)
    sliced(net, "a", "y", "two", (1, 3), 1)
    model = net.model("y", {"one": (["x"], ["a"]), "two": (["a"], ["y"])})
    assert ops(passed(model, "merge_slices")[0]) == ["Slice", "Slice"]


def rolled(shift: int = 2) -> Builder:
    net = Builder(x=["n", 8, 3])
    sliced(net, "x", "tail", "roll", (shift, 2**62), 1)
    sliced(net, "x", "head", "roll", (0, shift), 1)
    net.add("Concat", "tail head", "y", "roll", axis=1)
    return net


def test_parts_that_are_put_together_anew_are_one_gather():
    model = rolled().model("y", {"roll": (["x"], ["y"])})
    changed, books = passed(model, "merge_slices")
    assert ops(changed) == ["Gather"]
    assert owners(changed) == {"y": ("roll",)}
    assert books.hierarchy["roll"].fate == "computed"
    assert same(model, changed, x=array(2, 8, 3))


def test_a_tensor_turned_round_is_a_gather_too():
    net = Builder(x=[5, 3])
    sliced(net, "x", "back", "flip", (4, -(2**62)), 0, step=-1)
    sliced(net, "x", "first", "flip", (-5, 2), 0)
    net.add("Concat", "back first", "y", "flip", axis=0)
    changed = rewritten(net.model("y"), "merge_slices", x=array(5, 3))
    assert ops(changed) == ["Gather"]


def test_parts_of_a_dimension_of_free_size_stay():
    net = Builder(x=["n", 3])
    sliced(net, "x", "tail", "roll", (1, 2**62), 0)
    sliced(net, "x", "head", "roll", (0, 1), 0)
    net.add("Concat", "tail head", "y", "roll", axis=0)
    assert ops(passed(net.model("y"), "merge_slices")[0]) == ["Slice", "Slice", "Concat"]


def halves(end: int = 4, opset: int = 17) -> Builder:
    net = Builder(opset, x=["n", 8])
    sliced(net, "x", "left", "gate", (0, end), -1)
    sliced(net, "x", "right", "gate", (4, 8), 1)
    net.add("Neg", "right", "minus", "gate")
    net.add("Concat", "minus left", "y", "gate", axis=1)
    return net


@pytest.mark.parametrize("opset", [12, 13, 18])
def test_slices_that_are_all_of_a_tensor_are_one_split(opset):
    changed = rewritten(halves(opset=opset).model("y"), "merge_slices", x=array(2, 8))
    assert ops(changed) == ["Split", "Neg", "Concat"]
    assert owners(changed)["left"] == ("gate",)


def test_slices_with_a_gap_or_with_modules_of_their_own_are_no_split():
    assert ops(passed(halves(end=3).model("y"), "merge_slices")[0]).count("Slice") == 2
    given = halves().model("y", {"gate": (["x"], ["y"]), "left": (["x"], ["left"])})
    assert ops(passed(given, "merge_slices")[0]).count("Slice") == 2


@pytest.mark.parametrize("inner", [1, 0])
def test_slices_of_a_slice_that_cover_it_are_a_split_of_a_split(inner):
    net = Builder(x=[8, 8])
    sliced(net, "x", "left", "rotary", (0, 4), 1)
    sliced(net, "x", "right", "rotary", (4, 8), 1)
    sliced(net, "left", "first", "rotary", (0, 2), inner)
    sliced(net, "left", "second", "rotary", (2, 8), inner)
    net.add("Neg", "second", "minus", "rotary")
    changed = rewritten(net.model("minus first left right"), "merge_slices", "merge_slices", x=array(8, 8))
    assert ops(changed) == ["Split", "Split", "Neg"]


def test_projections_of_a_merged_projection_are_merged():
    net = Builder(x=["n", 4])
    for k, width in enumerate((4, 4, 4, 3, 3, 3)):
        net.const(f"w{k}", array(4, width, seed=k))
        net.const(f"b{k}", array(width, seed=k + 9))
        net.add("MatMul", f"{'x' if k < 3 else 'y1'} w{k}", f"p{k}", "layer")
        net.add("Add", f"p{k} b{k}", f"y{k}", "layer")
    changed = rewritten(net.model("y0 y2 y3 y4 y5"), "merge_parallel_projections", tolerance=1e-5, x=array(2, 4))
    assert ops(changed).count("MatMul") == 2


# --- branches ---

BRANCHES = """g (float[2] x) => (float[2] y) {
    a = Neg(x)
    c = If (yes) <then_branch = t () => (float[2] u) { r = Sqrt(w)  u = Mul(r, a) },
                  else_branch = e () => (float[2] v) { r = Exp(x)  v = Neg(r) }>
    d = If (no)  <then_branch = t () => (float[2] u) { u = Identity(a) },
                  else_branch = e () => (float[2] v) { r = Exp(a)  v = Neg(r) }>
    y = Add(c, d) }"""


def test_branches_that_are_always_taken_stand_in_the_graph():
    model = written(BRANCHES, yes=np.bool_(True), no=np.bool_(False), w=np.float32([4, 9]))
    changed = rewritten(model, "inline_branches", x=array(2))
    assert ops(changed) == ["Neg", "Sqrt", "Mul", "Exp", "Neg", "Add"]
    names = [value.name for node in changed.graph for value in node.outputs]
    assert len(set(names)) == len(names)


def test_nodes_of_a_branch_keep_their_modules():
    model = written(BRANCHES, owners={"c": "gate", "d": "gate", "a": "pre"}, yes=np.True_, no=np.False_, w=array(2))
    for node in model.graph.all_nodes():
        if node.graph is not model.graph:
            node.metadata_props["htp.module"] = f"gate.{node.op_type}"
    changed, _ = passed(model, "inline_branches")
    found = {
        node.op_type: node.metadata_props["htp.module"] for node in changed.graph if node.op_type in ("Mul", "Exp")
    }
    assert found == {"Mul": "gate.Mul", "Exp": "gate.Exp"}


def test_a_branch_that_gives_the_result_of_the_model_is_inlined():
    text = """g (float[2] x) => (float[2] y) {
        y = If (yes) <then_branch = t () => (float[2] u) { u = Exp(x) },
                      else_branch = e () => (float[2] v) { v = Neg(x) }> }"""
    changed = rewritten(written(text, yes=np.bool_(False)), "inline_branches", x=array(2))
    assert ops(changed) == ["Neg"]
    assert [value.name for value in changed.graph.outputs] == ["y"]


def test_a_branch_that_gives_a_constant_as_the_result_of_the_model_stays():
    stored = ir.Value(
        name="w", const_value=ir.tensor(array(2)), shape=ir.Shape([2]), type=ir.TensorType(ir.DataType.FLOAT)
    )
    yes = ir.Graph([], [stored], nodes=[], initializers=[stored], name="yes")
    net = Builder(x=[2])
    net.const("condition", np.bool_(True))
    other = ir.node("Neg", [net.values["x"]], metadata_props={"htp.module": "gate"})
    no = ir.Graph([], other.outputs, nodes=[other], name="no")
    net.add("If", "condition", "y", "gate", then_branch=yes, else_branch=no)
    assert ops(passed(net.model("y"), "inline_branches")[0]) == ["If"]


# --- expansions ---


def test_what_is_broadcast_anyway_is_not_expanded_before():
    net = Builder(x=["n", 2, 8], s=["n", 2, 1])
    net.const("shape", np.array([1, 2, 8]))
    net.add("Expand", "s shape", "wide", "norm")
    net.add("Div", "x wide", "y", "norm")
    changed = rewritten(net.model("y"), "eliminate_expands", x=array(3, 2, 8), s=array(3, 2, 1, seed=1))
    assert ops(changed) == ["Div"]


def test_an_expansion_that_makes_the_result_larger_or_is_read_otherwise_stays():
    net = Builder(x=[1, 8], s=[1, 8])
    net.const("shape", np.array([4, 8]))
    net.add("Expand", "s shape", "wide", "norm")
    net.add("Div", "x wide", "y", "norm")
    assert ops(passed(net.model("y"), "eliminate_expands")[0]) == ["Expand", "Div"]
    net = Builder(x=[4, 8], s=[1, 8])
    net.const("shape", np.array([4, 8]))
    net.add("Expand", "s shape", "wide", "norm")
    net.add("Div", "x wide", "y", "norm")
    net.add("Transpose", "wide", "z", "norm")
    assert ops(passed(net.model("y z"), "eliminate_expands")[0]) == ["Expand", "Div", "Transpose"]


def test_an_expansion_that_a_module_gives_stays():
    net = Builder(x=[4, 8], s=[1, 8])
    net.const("shape", np.array([4, 8]))
    net.add("Expand", "s shape", "wide", "repeat")
    net.add("Div", "x wide", "y", "norm")
    model = net.model("y", {"repeat": (["s"], ["wide"]), "norm": (["x", "wide"], ["y"])})
    assert ops(passed(model, "eliminate_expands")[0]) == ["Expand", "Div"]


# --- sums, reductions, normalisations ---


def test_constants_that_are_added_one_after_another_are_one():
    net = Builder(x=["n", 4])
    net.const("mask", np.float32([0, -100, 0, -100]))
    net.const("bias", array(4))
    net.add("Add", "x mask", "h", "a")
    net.add("Add", "bias h", "y", "b")
    changed = rewritten(net.model("y"), "merge_constant_sums", tolerance=1e-5, x=array(2, 4))
    assert ops(changed) == ["Add"]
    assert owners(changed) == {"y": ("a", "b")}


def test_infinite_masks_are_added_up_and_what_would_cancel_is_not():
    net = Builder(x=[2])
    net.const("one", np.float32([-np.inf, 0]))
    net.const("other", np.float32([-np.inf, -np.inf]))
    net.add("Add", "x one", "h", "a")
    net.add("Add", "h other", "y", "a")
    model = net.model("y")
    changed, _ = passed(model, "merge_constant_sums")
    assert ops(changed) == ["Add"]
    assert same(model, changed, x=array(2))
    net = Builder(x=[2])
    net.const("one", np.float32([1e6, 0]))
    net.const("other", np.float32([-1e6, 0]))
    net.add("Add", "x one", "h", "a")
    net.add("Add", "h other", "y", "a")
    assert ops(passed(net.model("y"), "merge_constant_sums")[0]) == ["Add", "Add"]


def test_a_sum_that_a_module_gives_stays():
    net = Builder(x=[2])
    net.const("one", array(2))
    net.add("Add", "x one", "h", "a")
    net.add("Add", "h one", "y", "b")
    model = net.model("y", {"a": (["x"], ["h"]), "b": (["h"], ["y"])})
    assert ops(passed(model, "merge_constant_sums")[0]) == ["Add", "Add"]


def test_zeros_are_not_added():
    net = Builder(x=["n", 2])
    net.const("zero", np.zeros((1, 2), np.float32))
    net.const("taller", np.zeros((3, 1, 2), np.float32))
    net.add("Add", "x zero", "h", "a")
    net.add("Add", "h taller", "y", "a")
    changed, _ = passed(net.model("y"), "merge_constant_sums")
    assert [node.inputs[1].name for node in changed.graph][-1:] != ["zero"]
    assert ops(changed) == ["Add"]


@pytest.mark.parametrize("order", ["x r", "r x"])
def test_a_product_with_a_reciprocal_is_a_quotient(order):
    net = Builder(x=["n", 4], s=["n", 1])
    net.add("Reciprocal", "s", "r", "norm")
    net.add("Mul", order, "y", "norm")
    changed = rewritten(
        net.model("y"), "simplify_arithmetic", tolerance=1e-5, x=array(2, 4), s=1 + array(2, 1, seed=1) ** 2
    )
    assert ops(changed) == ["Div"]


def test_a_reciprocal_that_is_read_twice_or_given_stays():
    net = Builder(x=[4], s=[4])
    net.add("Reciprocal", "s", "r", "norm")
    net.add("Mul", "x r", "a", "norm")
    net.add("Mul", "a r", "y", "norm")
    assert ops(passed(net.model("y"), "simplify_arithmetic")[0]) == ["Reciprocal", "Mul", "Mul"]
    net = Builder(x=[4], s=[4])
    net.add("Reciprocal", "s", "r", "one")
    net.add("Mul", "x r", "y", "two")
    model = net.model("y", {"one": (["s"], ["r"]), "two": (["x", "r"], ["y"])})
    assert ops(passed(model, "simplify_arithmetic")[0]) == ["Reciprocal", "Mul"]


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize("opset", [17, 18])
def test_a_mean_of_means_is_one_mean(opset, keep):
    net = Builder(opset, x=["n", 3, 4, 5])
    net.const("inner", np.array([1]))
    net.const("outer", np.array([-1]))
    if opset == 18:
        net.add("ReduceMean", "x inner", "h", "pool", keepdims=keep)
        net.add("ReduceMean", "h outer", "y", "pool", keepdims=keep)
    else:
        net.add("ReduceMean", "x", "h", "pool", keepdims=keep, axes=[1])
        net.add("ReduceMean", "h", "y", "pool", keepdims=keep, axes=[-1])
    changed = rewritten(net.model("y"), "merge_reductions", tolerance=1e-5, x=array(2, 3, 4, 5))
    assert ops(changed) == ["ReduceMean"]


def test_other_reductions_in_a_row_stay():
    net = Builder(x=[2, 3, 4])
    net.add("ReduceMax", "x", "h", "pool", axes=[1])
    net.add("ReduceMin", "h", "y", "pool", axes=[2])
    assert ops(passed(net.model("y"), "merge_reductions")[0]) == ["ReduceMax", "ReduceMin"]


def normalized(shape: tuple[int, ...]) -> ir.Model:
    net = Builder(x=["n", 3, 5])
    net.const("ones", np.ones(3, np.float32))
    net.const("zeros", np.zeros(3, np.float32))
    net.const("factor", array(*shape))
    net.const("summand", array(*shape, seed=1))
    net.add("InstanceNormalization", "x ones zeros", "h", "norm")
    net.add("Mul", "h factor", "i", "norm")
    net.add("Add", "i summand", "y", "norm")
    return net.model("y", {"norm": (["x"], ["y"])})


def test_a_normalisation_takes_in_one_factor_and_one_summand_a_channel():
    model = normalized((3, 1))
    changed, books = passed(model, "fuse_normalization_scale")
    assert ops(changed) == ["InstanceNormalization"]
    assert books.hierarchy["norm"].fate == "computed"
    assert same(model, changed, 1e-5, x=array(2, 3, 5))


@pytest.mark.parametrize("shape", [(5,), (3, 5), (1, 3, 5)])
def test_factors_of_other_dimensions_stay(shape):
    assert len(ops(passed(normalized(shape), "fuse_normalization_scale")[0])) == 3


# --- guards against NaN ---


def attention(mask: np.ndarray | None) -> ir.Model:
    net = Builder(q=["n", 3, 4], k=["n", 4, 3])
    net.const("scale", np.float32(0.5))
    net.const("zero", np.float32(0))
    net.add("MatMul", "q k", "product", "attention")
    net.add("Mul", "product scale", "scores", "attention")
    if mask is not None:
        net.const("mask", mask)
        net.add("Add", "scores mask", "masked", "attention")
    net.add("Softmax", "scores" if mask is None else "masked", "shares", "attention", axis=-1)
    net.add("IsNaN", "shares", "bad", "attention")
    net.add("Where", "bad zero shares", "y", "attention")
    return net.model("y")


NOTHING = np.float32([[0, -np.inf, -np.inf], [0, 0, -np.inf], [0, 0, 0]])
A_ROW = np.float32([[0, -np.inf, -np.inf], [-np.inf, -np.inf, -np.inf], [0, 0, 0]])


@pytest.mark.parametrize("mask", [None, NOTHING, np.float32([[0], [1], [2]])], ids=["none", "causal", "finite"])
def test_a_softmax_without_rows_that_are_masked_needs_no_guard(mask):
    changed = rewritten(attention(mask), "eliminate_nan_guards", q=array(2, 3, 4), k=array(2, 4, 3, seed=1))
    assert not {"IsNaN", "Where"} & set(ops(changed))


@pytest.mark.parametrize("mask", [A_ROW, np.float32([[0], [-np.inf], [0]])], ids=["row", "one column"])
def test_a_softmax_with_a_row_that_is_masked_keeps_its_guard(mask):
    changed, _ = passed(attention(mask), "eliminate_nan_guards")
    assert ops(changed)[-2:] == ["IsNaN", "Where"]


def test_a_mask_that_the_model_is_given_keeps_the_guard():
    net = Builder(q=["n", 3, 4], k=["n", 4, 3], mask=[3, 3])
    net.const("zero", np.float32(0))
    net.add("MatMul", "q k", "product", "attention")
    net.add("Add", "product mask", "masked", "attention")
    net.add("Softmax", "masked", "shares", "attention", axis=-1)
    net.add("IsNaN", "shares", "bad", "attention")
    net.add("Where", "bad zero shares", "y", "attention")
    assert "Where" in ops(passed(net.model("y"), "eliminate_nan_guards")[0])


def test_all_of_them_run_by_default_at_their_levels():
    reports = {
        report.name: report.level for report in htp_export.optimize(rolled().model("y"), level="tolerant").passes
    }
    assert {name for name, level in reports.items() if level == "exact"} >= {
        "merge_slices",
        "inline_branches",
        "eliminate_expands",
    }
    assert {name for name, level in reports.items() if level == "tolerant"} >= {
        "merge_constant_sums",
        "merge_reductions",
        "fuse_normalization_scale",
        "eliminate_nan_guards",
    }


@pytest.mark.parametrize("inverse", ["Div", "Reciprocal"])
def test_a_root_mean_square_norm_of_either_exporter_is_one_node(inverse: str) -> None:
    """TorchScript writes ``1 / Sqrt(x)``, dynamo ``Reciprocal``; the sum before the norm belongs to it, too."""
    net = Builder(20, x=[1, 3, 8], skip=[1, 3, 8])
    for name, value in {"two": 2.0, "eps": 1e-6, "one": 1.0}.items():
        net.const(name, np.array(value, np.float32))
    net.const("axes", np.array([-1], np.int64))
    net.const("weight", array(8))
    net.add("Add", "x skip", "sum", "layer")
    net.add("Pow", "sum two", "square", "norm")
    settings = {} if inverse == "Div" else {"noop_with_empty_axes": 0}
    net.add("ReduceMean", "square axes", "mean", "norm", keepdims=1, **settings)
    net.add("Add", "mean eps", "more", "norm")
    net.add("Sqrt", "more", "root", "norm")
    net.add(inverse, "one root" if inverse == "Div" else "root", "inverse", "norm")
    net.add("Mul", "sum inverse", "normal", "norm")
    net.add("Mul", "weight normal", "y", "norm")
    for name in ("sum", "square", "mean", "more", "root", "inverse", "normal", "y"):
        net.values[name].shape, net.values[name].type = ir.Shape([1, 3, 8]), ir.TensorType(ir.DataType.FLOAT)
    for name in ("mean", "more", "root", "inverse"):
        net.values[name].shape = ir.Shape([1, 3, 1])
    given = {"x": array(1, 3, 8, seed=1), "skip": array(1, 3, 8, seed=2)}
    changed = rewritten(net.model("y sum"), "fuse_for_onnxruntime", tolerance=1e-5, **given)
    assert ops(changed) == ["SkipSimplifiedLayerNormalization"]
    assert owners(changed)["y"] == ("layer", "norm")
