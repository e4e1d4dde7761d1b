"""Passes on branches, constants, sizes and norms: what they keep besides the values."""

import numpy as np
import onnx_ir as ir
import pytest
from onnx_ir.passes.common import ShapeInferencePass

from tests.graphs import Builder, array, feeds, ops, owners, passed, rewritten, same, tagged
from tests.written import written


def test_projections_of_a_merged_projection_are_merged():
    layers = [
        f"[layer] p{k} = MatMul ({'x' if k < 3 else 'y1'}, w{k}) [layer] y{k} = Add (p{k}, b{k})"
        for k in range(6)
    ]
    weights = {f"w{k}": array(4, 4 if k < 3 else 3, seed=k) for k in range(6)}
    weights |= {f"b{k}": array(4 if k < 3 else 3, seed=k + 9) for k in range(6)}
    outputs = ", ".join(f"float y{k}" for k in (0, 2, 3, 4, 5))
    model = tagged(f"(float[n, 4] x) => ({outputs}) {{ {' '.join(layers)} }}", **weights)
    changed = rewritten(model, "merge_parallel_projections", tolerance=1e-5, x=array(2, 4))
    assert ops(changed).count("MatMul") == 2


# --- branches ---

BRANCHES = """g (float[2] x) => (float[2] y) {
    a = Neg(x)
    c = If (yes) <then_branch = t () => (float[2] u) { r = Sqrt(w)  u = Mul(r, a) },
                  else_branch = e () => (float[2] v) { r = Exp(x)  v = Neg(r) }>
    d = If (no)  <then_branch = t () => (float[2] u) { u = Identity(a) },
                  else_branch = e () => (float[2] v) { r = Exp(a)  v = Neg(r) }>
    y = Add(c, d) }"""


def test_branches_that_are_always_taken_stand_in_the_graph_with_their_modules():
    constants = {"yes": np.True_, "no": np.False_, "w": np.float32([4, 9])}
    model = written(BRANCHES, owners={"c": "gate", "d": "gate", "a": "pre"}, **constants)
    for node in model.graph.all_nodes():
        if node.graph is not model.graph:
            node.metadata_props["htp.module"] = f"gate.{node.op_type}"
    changed = rewritten(model, "inline_branches", x=array(2))
    assert ops(changed) == ["Neg", "Sqrt", "Mul", "Exp", "Neg", "Add"]
    names = [value.name for node in changed.graph for value in node.outputs]
    assert len(set(names)) == len(names)
    found = {node.op_type: node.metadata_props["htp.module"] for node in changed.graph}
    assert (found["Mul"], found["Exp"]) == ("gate.Mul", "gate.Exp")


def test_a_branch_that_gives_the_result_of_the_model_is_inlined():
    text = """g (float[2] x) => (float[2] y) {
        y = If (yes) <then_branch = t () => (float[2] u) { u = Exp(x) },
                      else_branch = e () => (float[2] v) { v = Neg(x) }> }"""
    changed = rewritten(written(text, yes=np.bool_(False)), "inline_branches", x=array(2))
    assert ops(changed) == ["Neg"]
    assert [value.name for value in changed.graph.outputs] == ["y"]


def test_a_branch_that_gives_a_constant_as_the_result_of_the_model_stays():
    stored = ir.Value(
        name="w",
        const_value=ir.tensor(array(2)),
        shape=ir.Shape([2]),
        type=ir.TensorType(ir.DataType.FLOAT),
    )
    yes = ir.Graph([], [stored], nodes=[], initializers=[stored], name="yes")
    net = Builder(x=[2])
    net.const("condition", np.bool_(True))
    other = ir.node("Neg", [net.values["x"]], metadata_props={"htp.module": "gate"})
    no = ir.Graph([], other.outputs, nodes=[other], name="no")
    net.add("If", "condition", "y", "gate", then_branch=yes, else_branch=no)
    assert ops(passed(net.model("y"), "inline_branches")[0]) == ["If"]


# --- names, constants, sizes ---


def test_an_argument_of_a_module_is_what_it_reads_now():
    graph = "(float[n, 3] x) => (float y) { [drop] a = Identity (x) [act] y = Relu (a) }"
    _, books = passed(
        tagged(graph, {"drop": (["x"], ["a"]), "act": (["a"], ["y"])}), "eliminate_identity_ops"
    )
    assert books.signatures["act"][0].inputs == {"arg0": "x"}


def test_duplicate_constants_are_kept_once():
    graph = """(float[2] x) => (float y) <float[2] one = {1, 2}, float[2] other = {1, 2}> {
        [a] third = Constant <value = float[2] {1, 2}> ()
        [a] h = Add (x, one) [a] i = Add (h, other) [a] y = Add (i, third) }"""
    changed = rewritten(tagged(graph), "eliminate_duplicate_constants", x=array(2))
    assert ops(changed) == ["Add"] * 3
    assert len({node.inputs[1] for node in changed.graph}) == 1


def test_unused_initializers_go():
    model = tagged("(float[2] x) => (float y) <float[2] w = {1, 2}> { [a] y = Relu (x) }")
    assert list(passed(model, "eliminate_unused_initializers")[0].graph.initializers) == []


def test_sizes_taken_elsewhere_keep_their_owners():
    """A size that module b takes from what it is given is equal to that of the input; b does not get the input."""
    graph = """(float[n, 6] x) => (float y, float r) <int64[2] ones = {1, 1}> {
        [a] s0 = Shape (x) [a] n0 = Gather (s0, i0) [a] h = Expand (x, ones) [b] r = Relu (h) [b] s1 = Shape (r)
        [b] n1 = Gather (s1, i0) [c] both = Concat <axis = 0> (n0, n1) [c] y = ConstantOfShape (both) }"""
    model = tagged(graph, {"a": (["x"], ["h"]), "b": (["h"], ["r"])})
    changed, books = passed(model, "simplify_shape_chains")
    assert owners(changed)["s0"] == ("a",)
    assert books.hierarchy["b"].fate == "computed"
    assert same(model, changed, x=array(2, 6))


def test_a_size_with_two_new_axes_keeps_its_rank():
    """``Gather`` of a vector of one index has one axis; a size that gets two has to keep its ``Unsqueeze``."""
    graph = """(float[n, 3] x) => (int64[1, 1] y) { [a] s = Shape (x) [a] n = Gather (s, first)
        [a] y = Unsqueeze (n, both) }"""
    model = tagged(graph, first=np.int64(0), both=np.int64([0, 1]))
    changed = rewritten(model, "simplify_shape_chains", x=array(2, 3))
    assert ops(changed) == ["Shape", "Gather", "Unsqueeze"]


def test_tensors_of_equal_size_are_not_taken_for_one_another():
    graph = """(float[n, 3] x, float[n, 4] z) => (float a, float b, float c) { [embed] h = Neg (x) hs = Shape (h)
        hn = Gather (hs, i0) a = ConstantOfShape (hn) [block] g = Neg (z) [block] gs = Shape (g)
        [block] gn = Gather (gs, i0) [block] b = ConstantOfShape (gn) c = Abs (h) }"""
    changed, _ = passed(tagged(graph), "simplify_shape_chains")
    assert ops(changed).count("Neg") == 1
    assert owners(changed)["h"] == ("embed",)


@pytest.mark.parametrize("inverse", ["Div", "Reciprocal"])
def test_a_root_mean_square_norm_of_either_exporter_is_one_node(inverse):
    """TorchScript writes ``1 / Sqrt(x)``, dynamo ``Reciprocal``; the sum before the norm belongs to it, too."""
    turned = "Div (one, root)" if inverse == "Div" else "Reciprocal (root)"
    settings = "keepdims = 1" if inverse == "Div" else "keepdims = 1, noop_with_empty_axes = 0"
    graph = f"""(float[1, 3, 8] x, float[1, 3, 8] skip) => (float y, float sum)
        <float two = {{2}}, float eps = {{1e-6}}, float one = {{1}}> {{ [layer] sum = Add (x, skip)
        [norm] square = Pow (sum, two) [norm] mean = ReduceMean <{settings}> (square, im1) [norm] more = Add (mean, eps)
        [norm] root = Sqrt (more) [norm] inverse = {turned} [norm] normal = Mul (sum, inverse)
        [norm] y = Mul (weight, normal) }}"""
    model = tagged(graph, opset=20, weight=array(8))
    ShapeInferencePass()(model)
    changed = rewritten(model, "fuse_for_onnxruntime", tolerance=1e-5, **feeds(model))
    assert ops(changed) == ["SkipSimplifiedLayerNormalization"]
    assert owners(changed)["y"] == ("layer", "norm")
