"""Which values depend on the values of the inputs: sizes do not count, subgraphs and functions do."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import pytest

from htp_export.capabilities.carry.graph_summary import summarize
from htp_export.capabilities.optimize.merging import PassDifference, Snapshot
from htp_export.model.dependence import dependence, input_dependent_values
from htp_export.model.regions import all_nodes
from tests.handmade import branching

HEADER = '<ir_version: 10, opset_import: ["": 20, "my": 1]>'


def dependent(text: str) -> set[str]:
    model = ir.from_proto(onnx.parser.parse_model(f"{HEADER} {text}"))
    return {str(value.name) for value in input_dependent_values(model, all_nodes(model))}


def test_sizes_of_a_tensor_are_none_of_its_values() -> None:
    text = "g (float[n] x) => (float[n] y) { s = Shape(x) c = Size(x) d = Add(s, c) y = Expand(x, d) }"
    assert dependent(text) == {"x", "y"}


def test_a_tensor_that_is_read_for_its_type_alone_gives_no_values() -> None:
    text = "g (float[2] x, float[2] w) => (float[2] y) <float[2] c = {1, 2}> { y = CastLike(c, x) v = CastLike(w, x) }"
    assert dependent(text) == {"x", "w", "v"}


def test_an_operator_of_another_domain_that_is_called_shape_reads_values() -> None:
    assert dependent("g (float[n] x) => (float[n] y) { y = my.Shape(x) }") == {"x", "y"}


def test_a_weight_that_stands_among_the_inputs_is_none() -> None:
    assert dependent("g (float[2] x, float[2] w = {1, 2}) => (y) { v = Neg(w) y = Add(x, v) }") == {"x", "y"}


BRANCHES = """
g (float[2] x, float[n] z) => (y, k) <bool c = {1}, float[2] w = {1, 2}> {
    y = If(c) <then_branch = t () => (float[2] a) { a = Neg(x) }, else_branch = e () => (float[2] b) { b = Neg(w) }>
    k = If(c) <then_branch = t () => (int64[1] p) { p = Shape(z) }, else_branch = e () => (int64[1] q) { q = Shape(w) }>
}
"""


def test_what_subgraphs_read_goes_into_what_their_node_makes() -> None:
    assert dependent(BRANCHES) == {"x", "z", "y", "a"}  # k depends on a constant condition and on sizes


@pytest.mark.parametrize(("start", "found"), [("x", {"x", "y", "v", "v2"}), ("w", {"x"})])
def test_inputs_of_a_loop_body_depend_on_what_the_loop_reads(start: str, found: set[str]) -> None:
    text = f"""
    g (float[2] x) => (y) <int64 n = {{3}}, bool c = {{1}}, float[2] w = {{1, 2}}> {{
        y = Loop(n, c, {start}) <body = b (int64 i, bool go, float[2] v) => (bool go2, float[2] v2) {{
            go2 = Identity(go) v2 = Neg(v)
        }}>
    }}"""
    assert dependent(text) - {"i", "go", "go2"} == found


def test_inputs_of_functions_are_starts() -> None:
    text = """g (float[2] x) => (y) { y = my.f(x) }
    <domain: "my", opset_import: ["": 20]> f (a) => (b) { s = Shape(a) b = Neg(a) }"""
    assert dependent(text) == {"x", "y", "a", "b"}


def test_starts_are_told_apart() -> None:
    steps = [(("x", None), ("h",)), (("y", "h"), ("z",)), (("w",), ("v",))]
    assert dependence(steps, {"x": 1, "y": 2}) == {"x": 1, "y": 2, "h": 1, "z": 3}


def test_an_output_that_is_left_out_makes_no_left_out_input_depend_on_anything() -> None:
    text = """g (float[2, 4] x, float[4] w) => (y, v) <float[4] c = {1, 1, 1, 1}, float[2] low = {0, 0}> {
        y, , i = LayerNormalization(x, c)
        v = Clip(low, , )
    }"""
    model = ir.from_proto(onnx.parser.parse_model(f"{HEADER} {text}"))
    summary, _ = summarize(model)
    live = {value.name for value, is_live in zip(summary.values, summary.live, strict=True) if is_live}
    assert live - {""} == {"x", "w", "y", "i"}


LOOP = """g (float[2] x, float[n] z) => (y) <int64 n = {3}, bool c = {1}, float[2] w = {1, 2}> {
    y = Loop(n, c, w) <body = b (int64 i, bool go, float[2] v) => (bool go2, float[2] v2) {
        go2 = Identity(go) s = Shape(z) u = Expand(v, s) v2 = Neg(u)
    }>
}"""
FUNCTION = """g (float[2] x) => (y) { y = my.f(x) }
<domain: "my", opset_import: ["": 20]> f (a) => (b) { s = Shape(a) b = Neg(a) }"""


@pytest.mark.parametrize("text", [BRANCHES, LOOP, LOOP.replace("(n, c, w)", "(n, c, x)"), FUNCTION])
def test_carry_and_passes_see_the_same_dependence_as_files(text: str) -> None:
    model = ir.from_proto(onnx.parser.parse_model(f"{HEADER} {text}"))
    summary, _ = summarize(model, model.functions.values())
    live = {value.name for value, is_live in zip(summary.values, summary.live, strict=True) if is_live}
    assert live == dependent(text)
    snapshot = Snapshot(model)
    assert {str(value.name) for value in PassDifference.between(snapshot, snapshot).live_values} == dependent(text)


def test_what_a_branch_gives_back_from_outside_goes_into_what_its_node_makes() -> None:
    model = branching()
    summary, _ = summarize(model)
    live = {value.name for value, is_live in zip(summary.values, summary.live, strict=True) if is_live}
    assert live == {value.name for value in input_dependent_values(model, all_nodes(model))}
