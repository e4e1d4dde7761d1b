"""Whose work the nodes of an optimised graph do: graphs written down as ONNX Runtime makes them, one rule each."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir
import pytest

from htp_export.capabilities.carry.ownership import optimized_works
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.model.tagged import TaggedModel


def graph(body: str, inputs: str = "float[2] x") -> ir.Model:
    """A model from ONNX text; ``[name] y = Op(x)`` gives a node its name."""
    text = f'<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1]> g ({inputs}) => (float[2] y) {{ {body} }}'
    return ir.from_proto(onnx.parser.parse_model(text))


def owners(original: str, optimized: str, inputs: str = "float[2] x") -> dict[str, list[str]]:
    """Name of each node of the optimised graph, or else its operator → owners.

    Each original node belongs to a module named as itself, or else as its operator.
    """
    before, after = graph(original, inputs), graph(optimized, inputs)
    for node in before.graph.all_nodes():
        node.metadata_props.update({"htp.module": node.name or node.op_type, "htp.reason": "scope"})
    paths = dict.fromkeys(node.metadata_props["htp.module"] for node in before.graph.all_nodes())
    modules = Hierarchy([ModuleInfo("", "Net"), *(ModuleInfo(path, "Module", 1) for path in paths)])
    found = optimized_works(TaggedModel(before, modules, "htp"), after)
    return {node.name or node.op_type: list(work.owners) for node, work in found.items()}


def test_a_fused_node_replaces_the_chain_behind_its_output_and_no_more():
    original = "a = Neg(x) b = Abs(a) c = Exp(b) y = Relu(c)"
    assert owners(original, "a = Neg(x) y = com.microsoft.Fused(a)") == {
        "Neg": ["Neg"],
        "Fused": ["Abs", "Exp", "Relu"],
    }


def test_what_was_folded_into_a_constant_is_done_by_nobody():
    original = "w = Constant<value = float[2] {1, 2}>() v = Neg(w) y = Add(x, v)"
    assert owners(original, "v = Constant<value = float[2] {-1, -2}>() y = Add(x, v)")["Add"] == ["Add"]


def test_a_tensor_that_two_read_is_replaced_by_both_where_neither_finds_it():
    original = "a = Neg(x) b = Abs(a) c = Exp(a) y = Add(b, c)"
    found = owners(original, "b = com.microsoft.NegAbs(x) c = com.microsoft.NegExp(x) y = Add(b, c)")
    assert found == {"NegAbs": ["Neg", "Abs"], "NegExp": ["Neg", "Exp"], "Add": ["Add"]}


@pytest.mark.parametrize("name", ["conv", "conv_nchwc", "c_nchwc"])
def test_a_node_whose_output_is_new_is_known_by_the_beginning_of_its_name(name):
    original = "[conv] c = Neg(x) [conv_1] d = Abs(c) y = Exp(d)"
    found = owners(original, f"[{name}] r0 = Neg(x) [conv_1_nchwc] r1 = Abs(r0) y = Exp(r1)")
    assert found == {name: ["conv"], "conv_1_nchwc": ["conv_1"], "Exp": ["Exp"]}


def test_sum_and_activation_are_done_by_the_node_that_has_all_operands():
    """A residual block in blocked layout: the second convolution adds the first one's result, and clips the sum."""
    original = "[c0] a = Neg(x) [c1] b = Neg(a) s = Add(b, a) r = Relu(s) [c2] c = Neg(r) y = Exp(c)"
    optimized = """
        [c0_nchwc] t0 = Neg(x) [c1_nchwc] t1 = com.microsoft.Neg <activation = "Relu"> (t0, t0)
        [c2_nchwc] t2 = com.microsoft.Neg(t1) [order] c = com.microsoft.Order(t2) y = Exp(c)
    """
    assert owners(original, optimized) == {
        "c0_nchwc": ["c0"],
        "c1_nchwc": ["c1", "Add", "Relu"],
        "c2_nchwc": ["c2"],
        "order": ["c2"],
        "Exp": ["Exp"],
    }


def test_what_an_earlier_layer_turned_out_to_do_is_not_done_again_by_a_later_one():
    original = """
        [c0] a = Neg(x) [r0] ra = Relu(a) [c1] b = Neg(ra) s1 = Add(b, ra) [r1] rb = Relu(s1) [c2] y = Neg(rb)
    """
    optimized = """
        [c0_n] t0 = Neg <activation = "Relu"> (x)
        [c1_n] t1 = com.microsoft.Neg <activation = "Relu"> (t0, t0) y = Neg(t1)
    """
    assert owners(original, optimized) == {"c0_n": ["c0", "r0"], "c1_n": ["c1", "Add", "r1"], "Neg": ["c2"]}


def test_a_mere_change_of_form_belongs_to_whose_result_gets_its_old_form_back():
    original = "[c] a = Neg(x) r = Relu(a) y = Exp(r)"
    optimized = '[c_nchwc] t = Neg <activation = "Relu"> (x) r = com.microsoft.Order(t) y = Exp(r)'
    assert owners(original, optimized) == {"c_nchwc": ["c", "Relu"], "Order": ["Relu"], "Exp": ["Exp"]}


def test_a_node_behind_a_tensor_is_not_taken_for_its_maker_by_its_name():
    original = "[add] a = Neg(x) y = Exp(a)"
    found = owners(original, "[add] a = Neg(x) [a_cast] t = Cast<to = 1>(a) y = Exp(t)")
    assert found == {"add": ["add"], "a_cast": ["Exp"], "Exp": ["Exp"]}


def test_inserted_nodes_belong_to_what_reads_them_or_else_to_what_they_read():
    original = "a = Neg(x) b = Exp(a) y = Abs(b)"
    optimized = "t = Cast<to = 10>(x) a = Neg(t) b = Exp(a) u = Identity(b) v = Flatten(u) y = Abs(v) z = Size(u)"
    assert owners(original, optimized) == {
        "Cast": ["Neg"],
        "Neg": ["Neg"],
        "Exp": ["Exp"],
        "Identity": ["Abs"],
        "Flatten": ["Abs"],
        "Abs": ["Abs"],
        "Size": ["Abs"],
    }


def test_what_touches_nothing_known_has_no_owner():
    assert owners("y = Neg(x)", "y = Neg(x) r = RandomNormal<shape = [2]>()")["RandomNormal"] == []


def test_branches_may_use_the_same_names():
    inputs = "float[2] x, bool c"
    before = (
        "y = If(c) <then_branch = t () => (float[2] b) { a = Neg(x) b = Exp(a) },"
        " else_branch = e () => (float[2] b) { a = Abs(x) b = Relu(a) }>"
    )
    after = (
        "y = If(c) <then_branch = t () => (float[2] b) { b = com.microsoft.One(x) },"
        " else_branch = e () => (float[2] b) { b = com.microsoft.Two(x) }>"
    )
    assert owners(before, after, inputs) == {"If": ["If"], "One": ["Neg", "Exp"], "Two": ["Abs", "Relu"]}


def test_a_dissolved_branch_counts_with_its_node():
    inputs = "float[2] x, bool c"
    before = (
        "a = If(c) <then_branch = t () => (float[2] b) { b = Neg(x) },"
        " else_branch = e () => (float[2] d) { d = Abs(x) }> y = Exp(a)"
    )
    found = owners(before, "a = com.microsoft.Select(x, c) y = Exp(a)", inputs)
    assert found["Select"][0] == "If"
    assert sorted(found["Select"][1:]) == ["Abs", "Neg"]
