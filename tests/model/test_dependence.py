"""Which values depend on the values of the inputs: sizes do not count, subgraphs and functions do."""

import onnx
import onnx_ir as ir
import pytest

from htp_export.alignment.graph_summary import summarize
from htp_export.lineage.difference import Snapshot
from htp_export.model.boundaries import input_dependent_values
from htp_export.model.regions import all_nodes
from tests.handmade import branching

HEADER = '<ir_version: 10, opset_import: ["": 20, "my": 1]>'


def live_in(model: ir.Model) -> set[str]:
    """What depends on the inputs, as `carry` knows it."""
    summary, _ = summarize(model, model.functions.values())
    return {value.name for index, value in enumerate(summary.values) if summary.live[index]}


BRANCHES = """
g (float[2] x, float[n] z) => (y, k) <bool c = {1}, float[2] w = {1, 2}> {
    y = If(c) <then_branch = t () => (float[2] a) { a = Neg(x) }, else_branch = e () => (float[2] b) { b = Neg(w) }>
    k = If(c) <then_branch = t () => (int64[1] p) { p = Shape(z) }, else_branch = e () => (int64[1] q) { q = Shape(w) }>
}
"""
LOOP = """g (float[2] x, float[n] z) => (y) <int64 n = {3}, bool c = {1}, float[2] w = {1, 2}> {
    y = Loop(n, c, w) <body = b (int64 i, bool go, float[2] v) => (bool go2, float[2] v2) {
        go2 = Identity(go) s = Shape(z) u = Expand(v, s) v2 = Neg(u)
    }>
}"""
FUNCTION = """g (float[2] x) => (y) { y = my.f(x) }
<domain: "my", opset_import: ["": 20]> f (a) => (b) { s = Shape(a) b = Neg(a) }"""

TEXTS = {
    "sizes of a tensor are none of its values": (
        "g (float[n] x) => (float[n] y) { s = Shape(x) c = Size(x) d = Add(s, c) y = Expand(x, d) }",
        {"x", "y"},
    ),
    "a tensor that is read for its type alone gives no values": (
        "g (float[2] x, float[2] w) => (float[2] y) <float[2] c = {1, 2}> { y = CastLike(c, x) v = CastLike(w, x) }",
        {"x", "w", "v"},
    ),
    "an operator of another domain that is called Shape reads values": (
        "g (float[n] x) => (float[n] y) { y = my.Shape(x) }",
        {"x", "y"},
    ),
    "a weight that stands among the inputs is none": (
        "g (float[2] x, float[2] w = {1, 2}) => (y) { v = Neg(w) y = Add(x, v) }",
        {"x", "y"},
    ),
    # k: sizes, a constant
    "what subgraphs read goes into what their node makes": (BRANCHES, {"x", "z", "y", "a"}),
    "inputs of a loop body depend on what the loop reads": (
        LOOP.replace("(n, c, w)", "(n, c, x)"),
        {"x", "z", "i", "go", "go2", "v", "u", "v2", "y"},
    ),
    "and on nothing where it reads weights": (LOOP, {"x", "z"}),
    "inputs of functions are starts": (FUNCTION, {"x", "y", "a", "b"}),
}


def test_an_output_that_is_left_out_makes_no_left_out_input_depend_on_anything():
    text = """g (float[2, 4] x, float[4] w) => (y, v) <float[4] c = {1, 1, 1, 1}, float[2] low = {0, 0}> {
        y, , i = LayerNormalization(x, c)
        v = Clip(low, , )
    }"""
    model = ir.from_proto(onnx.parser.parse_model(f"{HEADER} {text}"))
    assert live_in(model) - {""} == {"x", "w", "y", "i"}


@pytest.mark.parametrize("rule", TEXTS)
def test_what_depends_on_the_inputs_follows_from_rules_in_files_in_carry_and_in_passes(rule):
    text, expected = TEXTS[rule]
    model = ir.from_proto(onnx.parser.parse_model(f"{HEADER} {text}"))
    assert {
        str(value.name) for value in input_dependent_values(model, all_nodes(model))
    } == expected
    assert live_in(model) == expected
    assert {str(value.name) for value in Snapshot(model).live} == expected


def test_what_a_branch_gives_back_from_outside_goes_into_what_its_node_makes():
    model = branching()
    assert live_in(model) == {
        value.name for value in input_dependent_values(model, all_nodes(model))
    }
