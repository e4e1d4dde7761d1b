"""Whose work the nodes of an optimised graph do: graphs written down as ONNX Runtime makes them, one rule each."""

import onnx.parser
import onnx_ir as ir
import pytest

from htp_export.alignment.carried_owners import optimized_works
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.model.tagged import TaggedModel


def graph(body: str) -> ir.Model:
    """A model from ONNX text; ``[name] y = Op(x)`` gives a node its name."""
    opsets = '"": 20, "com.microsoft": 1, "com.microsoft.nchwc": 1'
    text = f"<ir_version: 10, opset_import: [{opsets}]> g (float[2] x, bool yes) => (float[2] y) {{ {body} }}"
    return ir.from_proto(onnx.parser.parse_model(text))


def owners(original: str, optimized: str) -> dict[str, list[str]]:
    """Name of each node of the optimised graph, or else its operator → owners.

    Each original node belongs to a module named as itself, or else as its operator.
    """
    before, after = graph(original), graph(optimized)
    for node in before.graph.all_nodes():
        node.metadata_props.update({"htp.module": node.name or node.op_type, "htp.reason": "scope"})
    paths = dict.fromkeys(node.metadata_props["htp.module"] for node in before.graph.all_nodes())
    modules = Hierarchy([ModuleInfo("", "Net"), *(ModuleInfo(path, "Module", 1) for path in paths)])
    found = optimized_works(TaggedModel(before, modules, "htp"), after)
    return {node.name or node.op_type: list(work.owners) for node, work in found.items()}


_BRANCHES = "y = If(yes) <then_branch = t () => (float[2] b) {{ {} }}, else_branch = e () => (float[2] b) {{ {} }}>"

CASES: dict[str, tuple[str, str, dict[str, list[str]]]] = {
    "a fused node replaces the chain behind its output and no more": (
        "a = Neg(x) b = Abs(a) c = Exp(b) y = Relu(c)",
        "a = Neg(x) y = com.microsoft.Fused(a)",
        {"Neg": ["Neg"], "Fused": ["Abs", "Exp", "Relu"]},
    ),
    "what was folded into a constant is done by nobody": (
        "w = Constant<value = float[2] {1, 2}>() v = Neg(w) y = Add(x, v)",
        "v = Constant<value = float[2] {-1, -2}>() y = Add(x, v)",
        {"Add": ["Add"]},
    ),
    "a tensor that two read is replaced by both where neither finds it": (
        "a = Neg(x) b = Abs(a) c = Exp(a) y = Add(b, c)",
        "b = com.microsoft.NegAbs(x) c = com.microsoft.NegExp(x) y = Add(b, c)",
        {"NegAbs": ["Neg", "Abs"], "NegExp": ["Neg", "Exp"], "Add": ["Add"]},
    ),
    **{
        f"a node {name} whose output is new is known by the beginning of its name": (
            "[conv] c = Neg(x) [conv_1] d = Abs(c) y = Exp(d)",
            f"[{name}] r0 = Neg(x) [conv_1_nchwc] r1 = Abs(r0) y = Exp(r1)",
            {name: ["conv"], "conv_1_nchwc": ["conv_1"], "Exp": ["Exp"]},
        )
        for name in ("conv", "conv_nchwc", "c_nchwc")
    },
    # A residual block in blocked layout: the second convolution adds the first one's result, and clips the sum.
    "sum and activation are done by the node that has all operands": (
        "[c0] a = Neg(x) [c1] b = Neg(a) s = Add(b, a) r = Relu(s) [c2] c = Neg(r) y = Exp(c)",
        """[c0_nchwc] t0 = Neg(x) [c1_nchwc] t1 = com.microsoft.Neg <activation = "Relu"> (t0, t0)
        [c2_nchwc] t2 = com.microsoft.Neg(t1) [order] c = com.microsoft.Order(t2) y = Exp(c)""",
        {
            "c0_nchwc": ["c0"],
            "c1_nchwc": ["c1", "Add", "Relu"],
            "c2_nchwc": ["c2"],
            "order": ["c2"],
            "Exp": ["Exp"],
        },
    ),
    "what an earlier layer turned out to do is not done again by a later one": (
        "[c0] a = Neg(x) [r0] ra = Relu(a) [c1] b = Neg(ra) s1 = Add(b, ra) [r1] rb = Relu(s1) [c2] y = Neg(rb)",
        """[c0_n] t0 = Neg <activation = "Relu"> (x)
        [c1_n] t1 = com.microsoft.Neg <activation = "Relu"> (t0, t0) y = Neg(t1)""",
        {"c0_n": ["c0", "r0"], "c1_n": ["c1", "Add", "r1"], "Neg": ["c2"]},
    ),
    "a mere change of form belongs to whose result gets its old form back": (
        "[c] a = Neg(x) r = Relu(a) y = Exp(r)",
        '[c_nchwc] t = Neg <activation = "Relu"> (x) r = com.microsoft.Order(t) y = Exp(r)',
        {"c_nchwc": ["c", "Relu"], "Order": ["Relu"], "Exp": ["Exp"]},
    ),
    "a fused operator may be named after the last of what it does": (
        "[conv] c = Conv(x, x) [shift] a = Add(c, x) [act] r = Relu(a) y = Neg(r)",
        "[r_nchwc] t = com.microsoft.nchwc.Conv(x, x, x) r = com.microsoft.Order(t) y = Neg(r)",
        {"r_nchwc": ["conv", "shift", "act"]},
    ),
    "equal work that was merged belongs to all who did it": (
        "[one] a = Neg(x) c = Relu(a) [two] b = Neg(x) d = Abs(b) y = Add(c, d)",
        "[both] a = Neg(x) c = Relu(a) d = Abs(a) y = Add(c, d)",
        {"both": ["one", "two"], "Relu": ["Relu"], "Abs": ["Abs"], "Add": ["Add"]},
    ),
    "quantizers belong to what they serve": (
        "[fc] m = Neg(x) [act] y = Relu(m)",
        """s = Constant<value = float {0.1}>() q = QuantizeLinear(x, s) d = DequantizeLinear(q, s)
        [fc] m = Neg(d) [act] y = Relu(m)""",
        {"QuantizeLinear": ["fc"], "DequantizeLinear": ["fc"], "fc": ["fc"], "act": ["act"]},
    ),
    "a cast back to the old type belongs to whose tensor it gives back at the end": (
        "[fc] m = Neg(x) [act] y = Relu(m)",
        "[fc] m = Neg(x) [act] h = Relu(m) y = Cast<to = 1>(h)",
        {"fc": ["fc"], "act": ["act"], "Cast": ["act"]},
    ),
    "and in the middle": (
        "[fc] m = Neg(x) [act] y = Relu(m)",
        "[fc] h = Neg(x) m = Cast<to = 1>(h) [act] y = Relu(m)",
        {"fc": ["fc"], "Cast": ["fc"], "act": ["act"]},
    ),
    "a reshape gives a tensor its old form back under another name": (
        "[fc] m = Neg(x) [act] y = Relu(m)",
        """apart = Constant<value = int64[2] {2, 1}>() whole = Constant<value = int64[1] {2}>()
        [r0] f = Reshape(x, apart) [fc] p = Neg(f) [r1] t = Reshape(p, whole) [act] y = Relu(t)""",
        {"r0": ["fc"], "fc": ["fc"], "r1": ["fc"], "act": ["act"]},
    ),
    "a node behind a tensor is not taken for its maker by its name": (
        "[add] a = Neg(x) y = Exp(a)",
        "[add] a = Neg(x) [a_cast] t = Cast<to = 1>(a) y = Exp(t)",
        {"add": ["add"], "a_cast": ["Exp"], "Exp": ["Exp"]},
    ),
    "inserted nodes belong to what reads them or else to what they read": (
        "a = Neg(x) b = Exp(a) y = Abs(b)",
        "t = Cast<to = 10>(x) a = Neg(t) b = Exp(a) u = Identity(b) v = Flatten(u) y = Abs(v) z = Size(u)",
        {
            "Cast": ["Neg"],
            "Neg": ["Neg"],
            "Exp": ["Exp"],
            **{op: ["Abs"] for op in ("Identity", "Flatten", "Abs", "Size")},
        },
    ),
    "what touches nothing known has no owner": (
        "y = Neg(x)",
        "y = Neg(x) r = RandomNormal<shape = [2]>()",
        {"RandomNormal": []},
    ),
    "branches may use the same names": (
        _BRANCHES.format("a = Neg(x) b = Exp(a)", "a = Abs(x) b = Relu(a)"),
        _BRANCHES.format("b = com.microsoft.One(x)", "b = com.microsoft.Two(x)"),
        {"If": ["If"], "One": ["Neg", "Exp"], "Two": ["Abs", "Relu"]},
    ),
    "a dissolved branch counts with its node": (
        _BRANCHES.format("b = Neg(x)", "b = Abs(x)").replace("y = If", "a = If") + " y = Exp(a)",
        "a = com.microsoft.Select(x, yes) y = Exp(a)",
        {"Select": ["If", "Abs", "Neg"]},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_owners_of_an_optimised_graph(case):
    original, optimized, expected = CASES[case]
    found = owners(original, optimized)
    assert {name: found[name] for name in expected} == expected
