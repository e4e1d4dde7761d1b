"""Forensics: each pattern in the smallest graph that has it, whose it is, and what changes it."""

import json
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.forensics.finding import KINDS, Forensics
from htp_export.capabilities.optimize import registry
from htp_export.capabilities.optimize.registry import decline
from htp_export.command.main import main
from htp_export.editing.editing import remove_unused, replace
from htp_export.errors import SelectorError, UntaggedModelError
from tests.exporting import exported
from tests.nets import Holding, conv_bn_relu, spread
from tests.written import weight, written

S = np.array


def kinds(model: ir.Model) -> dict[str, int]:
    return dict(htp_export.forensics(model).kinds)


def only(model: ir.Model, kind: str) -> tuple[list[str], str | None, str]:
    """Nodes, pass and reason of the one finding of a kind."""
    (finding,) = htp_export.forensics(model).of(kind)
    return list(finding.nodes), finding.fixed_by, finding.why


LINEAR = "g (float[{rows}] x) => (float[{out}] y) {{ h = MatMul(x, w)  y = Add({add}) }}"
ATTENTION = """g (float[1,2,5,4] q, float[1,2,5,4] k, float[1,2,5,4] v, float[1,1,5,5] mask) => (float[1,2,5,4] y) {
    t = Transpose<perm=[0,1,3,2]>(k)  scores = MatMul(q, t)  scaled = Div(scores, root)
    masked = Add(scaled, mask)  p = Softmax<axis=-1>(masked)  y = MatMul(p, v) }"""
NORM = """g (float[2,3,4] x) => (float[2,3,4] y) {{ {mean} sq = Pow({d}, two)
    m2 = ReduceMean<axes=[-1]>(sq)  e = Add(m2, eps)  r = Sqrt(e)  {divide}  z = Mul(n, g)  y = Add(z, b) }}"""
NUMBERS = {
    "two": S(2, np.float32),
    "eps": S(1e-5, np.float32),
    "g": weight(4),
    "b": weight(4, seed=1),
}
CONV = "g (float[1,2,6,6] x) => (float[1,3,4,4] y{more}) {{ c = Conv(x, w)  y = {op} }}"
STATISTICS = {
    "s": weight(3),
    "b": weight(3, seed=1),
    "m": weight(3, seed=2),
    "v": abs(weight(3, seed=3)),
}

FULLY = {"w": weight(4, 5), "b": weight(5)}
THREE = {"a": weight(4, 4), "b": weight(4, 4, seed=1), "c": weight(4, 4, seed=2)}
PRODUCTS = "{ q = MatMul(x, a) k = MatMul(x, b) v = MatMul(x, c) }"
RESHAPES = """g (float[2,6] x) => (float[2,6] y, float[4,3] z)
    { i = Reshape(x, a)  y = Sin(i)  r = Relu(x)  t = Reshape(r, b)  z = Reshape(t, c) }"""
SIZES_OF = {"a": S([2, 6]), "b": S([12]), "c": S([4, 3])}
IDENTITIES = """g (float[3,4] x) => (float[3,4] y, float[3,4] z)
    { i = Identity(w)  y = MatMul(x, i)  j = Identity(x)  z = Relu(j) }"""
FILTER = {"w": weight(3, 2, 3, 3)}
NORMALIZED = "BatchNormalization(c, s, b, m, v)"

# Graph, its constants, a kind of which it has one, the nodes of that, the pass that changes it, and why none does.
DEAD = "g (float[2] x) => (float[2] y) { d = Neg(x)  e = Abs(d)  y = Relu(x) }"
FOUND: list[tuple[str, dict[str, Any], str, str, str | None, str]] = [
    (
        LINEAR.format(rows="3,4", out="3,5", add="h, b"),
        FULLY,
        "matmul_add_2d",
        "h y",
        "fuse_matmul_add",
        "",
    ),
    (
        LINEAR.format(rows="3,4", out="3,5", add="b, h"),
        FULLY,
        "matmul_add_2d",
        "h y",
        "fuse_matmul_add",
        "",
    ),
    (
        LINEAR.format(rows="2,3,4", out="2,3,5", add="h, b"),
        FULLY,
        "matmul_add_3d",
        "h y",
        "fuse_matmul_add_3d",
        "",
    ),
    (
        "g (float[3,4] x) => (float[3,5] y, float[3,5] h) { h = MatMul(x, w)  y = Add(h, b) }",
        *(FULLY, "matmul_add_2d", "h y", None, "without its bias"),
    ),
    (
        "g (float[3,4] x) => (float[3,4] q, float[3,4] k, float[3,4] v)" + PRODUCTS,
        *(THREE, "qkv_projections", "q k v", None, "they have no bias"),
    ),
    (
        ATTENTION,
        {"root": S(2, np.float32)},
        "attention",
        "t scores scaled masked p y",
        "fuse_for_onnxruntime",
        "",
    ),
    (
        "g (float[2,3,4] q, float[2,4,3] k) => (float[2,3,3] y) { a = Mul(q, s)  b = Mul(k, s)  y = MatMul(a, b) }",
        *({"s": S(0.5, np.float32)}, "double_scaling", "a b y", "cleanup_attention", ""),
    ),
    (
        NORM.format(
            mean="m = ReduceMean<axes=[-1]>(x)  d = Sub(x, m)", d="d", divide="n = Div(d, r)"
        ),
        *(NUMBERS, "layer_norm", "m d sq m2 e r n z y", "fuse_single_steps", ""),
    ),
    (
        """g (float[2,3] x) => (float[2,3] y) { m = ReduceMax<axes=[-1]>(x)  d = Sub(x, m)  e = Exp(d)
        s = ReduceSum(e, axes)  y = Div(e, s) }""",
        *({"axes": S([-1])}, "softmax", "m d e s y", "fuse_single_steps", ""),
    ),
    (
        CONV.format(op=NORMALIZED, more=""),
        FILTER | STATISTICS,
        "conv_batchnorm",
        "c y",
        "fuse_conv_batchnorm",
        "",
    ),
    (
        CONV.format(op=NORMALIZED, more=", float[1,3,4,4] c"),
        *(
            FILTER | STATISTICS,
            "conv_batchnorm",
            "c y",
            None,
            "other nodes use the result of the Conv",
        ),
    ),
    (RESHAPES, SIZES_OF, "identity_reshape", "i", "eliminate_identity_ops", ""),
    (RESHAPES, SIZES_OF, "chained_reshapes", "t z", "merge_reshapes", ""),
    (IDENTITIES, {"w": weight(4, 4)}, "identity_weight", "i", "eliminate_identity_ops", ""),
    (IDENTITIES, {"w": weight(4, 4)}, "identity", "j", "eliminate_identity_ops", ""),
    (
        "g (float[n,m] x) => (float[n,m] y) { s = Shape(x)  y = ConstantOfShape(s) }",
        *({}, "shape_chain", "s", None, "depend on the model's inputs"),
    ),
    (
        "g (float[2,4] x) => (float[2,4] y) { n = DequantizeLinear(w, scale)  y = MatMul(x, n) }",
        {"w": np.ones((4, 4), np.int8), "scale": np.float32(2)},
        *("unfolded_constants", "n", None, "it unpacks quantized weights"),
    ),
    (
        "g (float[2,200] x) => (float[2,200] y) { n = Neg(w)  y = MatMul(x, n) }",
        *({"w": weight(200, 200)}, "unfolded_constants", "n", "fold_constants", ""),
    ),
    (
        "g (float[600,600] x) => (float[600,600] y) { n = Expand(row, shape)  y = MatMul(x, n) }",
        {"row": weight(600), "shape": S([600, 600])},
        *("unfolded_constants", "n", None, "the result is large: 1,437,584 bytes more"),
    ),
    (
        "g (float[4,64] x) => (float[4,64] y) { r = Gather(table, i)  y = Add(x, r) }",
        {"table": weight(512, 64), "i": S([3, 1, 0, 2])},
        *("unfolded_constants", "r", "fold_constants", ""),
    ),
    (DEAD, {"w": weight(4)}, "dead_nodes", "d e", "eliminate_dead_nodes", ""),
    (DEAD, {"w": weight(4)}, "unused_initializers", "", "eliminate_unused_initializers", ""),
    (  # what is given as it came needs a node that gives it
        "g (float[2,2] x) => (float[2,2] y) { y = Transpose<perm=[0,1]>(x) }",
        *({}, "identity_transpose", "y", None, "a graph's output needs a name of its own"),
    ),
]


@pytest.mark.parametrize(("text", "constants", "kind", "nodes", "fixed_by", "why"), FOUND)
def test_a_pattern_is_found_with_its_nodes_and_what_changes_it(
    text, constants, kind, nodes, fixed_by, why
):
    found = only(written(text, **constants), kind)
    assert found[:2] == (nodes.split(), fixed_by)
    assert why in found[2]
    assert not fixed_by or not found[2]


@pytest.mark.parametrize(
    ("text", "constants", "expected"),
    [
        (
            "g (float[3,4] x) => (float[3,4] y) { h = MatMul(x, w)  y = Add(h, x) }",
            {"w": weight(4, 4)},
            {},
        ),
        (
            "g (float[3,4] x) => (float[3,2] q, float[3,4] k, float[3,6] v)" + PRODUCTS,
            *({"a": weight(4, 2), "b": weight(4, 4), "c": weight(4, 6)}, {}),
        ),
        (
            "g (float[2,4] x) => (float[2,3] y) { h = MatMul(x, w)  y = Softmax<axis=-1>(h) }",
            *({"w": weight(4, 3)}, {}),
        ),
        (
            "g (float[2,3] x) => (float[2,3] y) { d = Div(x, r)  e = Erf(d)  a = Add(e, one)  y = Mul(x, a) }",
            *({"r": S(2**0.5, np.float32), "one": S(1, np.float32)}, {}),
        ),
        ("g (float[2,3] x) => (float[3,2] y) { y = Transpose(x) }", {}, {}),
        (CONV.format(op="Relu(c)", more=""), FILTER, {"conv_relu": 1}),
    ],
    ids=[
        "residual sum",
        "three widths",
        "softmax over classes",
        "erf of something else",
        "transpose",
        "conv and relu",
    ],
)
def test_what_only_looks_like_a_pattern_is_none(text, constants, expected):
    assert kinds(written(text, **constants)) == expected


QKV = """g (float[2,3,4] x) => (float[2,3,{q}] q, float[2,3,4] k, float[2,3,4] v) {{
    a = MatMul(x, wq)  q = Add(a, bq)  b = MatMul(x, wk)  k = Add(b, bk)  c = MatMul(x, wv)  v = Add(c, bv) }}"""


@pytest.mark.parametrize("width", [4, 8])  # 8: two groups of queries for each key
def test_three_projections_of_one_tensor(width):
    weights = {"wq": weight(4, width), "wk": weight(4, 4, seed=1), "wv": weight(4, 4, seed=2)}
    biases = {"bq": weight(width), "bk": weight(4, seed=1), "bv": weight(4, seed=2)}
    model = written(QKV.format(q=width), **weights, **biases)
    assert only(model, "qkv_projections") == (
        ["a", "q", "b", "k", "c", "v"],
        "merge_parallel_projections",
        "",
    )


@pytest.mark.parametrize(
    "divide",
    ["n = Div(x, r)", "i = Reciprocal(r) n = Mul(x, i)", "i = Reciprocal(r) n = Mul(i, x)"],
)
def test_rms_norm_takes_no_mean_off(divide):
    found = kinds(written(NORM.format(mean="", d="x", divide=divide), **NUMBERS))
    assert (found.get("rms_norm"), found.get("layer_norm")) == (1, None)


@pytest.mark.parametrize(
    "half",
    [
        "h = Mul(x, s)  y = Mul(h, a)",
        "h = Mul(x, a)  y = Mul(h, s)",
        "h = Mul(a, s)  y = Mul(x, h)",
    ],
)
def test_gelu_by_erf_in_any_order(half):
    text = f"g (float[2,3] x) => (float[2,3] y) {{ d = Div(x, r)  e = Erf(d)  a = Add(e, one)  {half} }}"
    numbers = {"r": S(2**0.5, np.float32), "one": S(1, np.float32), "s": S(0.5, np.float32)}
    nodes, *_ = only(written(text, **numbers), "gelu_erf")
    assert sorted(nodes) == ["a", "d", "e", "h", "y"]


def test_a_pass_of_a_higher_level_is_not_said_to_leave_anything():
    model = written(ATTENTION, root=S(2, np.float32))
    (finding,) = htp_export.forensics(model, level="exact").of("attention")
    assert (finding.fixed_by, finding.why) == (
        None,
        "level exact leaves it: fuse_for_onnxruntime is of level fused",
    )


def test_gelu_by_tanh_as_torchscript_writes_it(tmp_path):
    net = nn.GELU(approximate="tanh").eval()
    model = exported(net, {"input": torch.randn(2, 3)}, "torchscript", tmp_path, opset_version=18)
    assert htp_export.forensics(model).kinds["gelu_tanh"] == 1


@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        ("[0,1,2]", None, "identity_transpose"),
        ("[0,2,1]", "[0,2,1]", "cancelling_transposes"),
        ("[1,0,2]", "[0,2,1]", "chained_transposes"),
    ],
)
def test_transposes(first, second, kind):
    body = f"a = Relu(x)  t = Transpose<perm={first}>(a)  "
    body += f"u = Transpose<perm={second}>(t)  y = Sin(u)" if second else "y = Sin(t)"
    model = written(f"g (float[2,2,2] x) => (float[2,2,2] y) {{ {body} }}")
    assert only(model, kind)[1] == "eliminate_redundant_transposes"
    assert set(kinds(model)) == {kind}


def test_casts_for_nothing_and_in_a_row():
    text = """g (float[2] x) => (float[2] a, float[2] c, float[2] e) {
        a = Cast<to=1>(x)  b = Cast<to=11>(x)  c = Cast<to=1>(b)  d = Cast<to=10>(x)  e = Cast<to=1>(d) }"""
    found = htp_export.forensics(written(text))
    assert [finding.nodes for finding in found.of("identity_cast")] == [("a",)]
    assert [(finding.nodes, finding.detail, finding.why) for finding in found.of("cast_chain")] == [
        (("b", "c"), "FLOAT to DOUBLE to FLOAT", "no pass merges casts"),
        (
            ("d", "e"),
            "FLOAT to FLOAT16 to FLOAT",
            "the type in between holds less, so that both count",
        ),
    ]


SIZES = """g (float[{shape}] x) => (float[a,b] y) {{ s = Shape(x)  d = Gather(s, zero)  u = Unsqueeze(d, at)
    t = Concat<axis=0>(u, rest)  y = Reshape(x, t) }}"""


def test_sizes_that_are_known_need_no_nodes():
    numbers = {"zero": S(0), "at": S([0]), "rest": S([-1])}
    known = written(SIZES.format(shape="2,3,4"), **numbers)
    assert only(known, "shape_chain") == (["s", "d", "u", "t"], "simplify_shape_chains", "")
    assert htp_export.forensics(known).of("shape_chain")[0].detail == "feeds Reshape"


def test_work_on_constants_is_one_finding_for_what_hangs_together():
    text = """g (float[3,4] x) => (float[3,4] y, float[3,4] z) {
        t = Transpose(w)  n = Neg(t)  y = MatMul(x, n)  o = Neg(w)  z = MatMul(x, o) }"""
    found = htp_export.forensics(written(text, w=weight(4, 4))).of("unfolded_constants")
    assert [finding.nodes for finding in found] == [("t", "n"), ("o",)]
    assert {finding.fixed_by for finding in found} == {"fold_constants"}


def test_equal_constants_are_found_by_their_values():
    text = "g (float[3,4] x) => (float[3,4] y) { a = Add(x, p)  b = Add(a, q)  y = Add(b, r) }"
    model = written(text, p=weight(4), q=weight(4), r=weight(4, seed=1))
    (finding,) = htp_export.forensics(model).of("duplicate_constants")
    assert (finding.tensors, finding.nodes) == (("p", "q"), ("a", "b"))
    assert (finding.fixed_by, finding.detail) == (
        "eliminate_duplicate_constants",
        "2 equal, 16 bytes too many",
    )


def test_large_equal_weights_are_found_and_stay():
    text = "g (float[2,600] x) => (float[2,600] y) { a = MatMul(x, p)  b = MatMul(a, q)  y = MatMul(b, r) }"
    first = weight(600, 600)
    last = first.copy()
    last[-1, -1] += 1  # the same in all that is looked at first
    model = written(text, p=first, q=first.copy(), r=last)
    (finding,) = htp_export.forensics(model).of("duplicate_constants")
    assert (finding.tensors, finding.fixed_by) == (("p", "q"), None)
    assert "1,024" in finding.why


def test_weights_in_a_missing_file_are_not_needed(tmp_path):
    text = "g (float[2,600] x) => (float[2,600] y) { a = MatMul(x, p)  y = MatMul(a, q) }"
    onnx.save(
        ir.to_proto(written(text, p=weight(600, 600), q=weight(600, 600))),
        tmp_path / "m.onnx",
        save_as_external_data=True,
        location="m.data",
    )
    assert kinds(tmp_path / "m.onnx") == {"duplicate_constants": 1}
    (tmp_path / "m.data").unlink()
    assert kinds(tmp_path / "m.onnx") == {}


def test_findings_belong_to_the_deepest_module_above_their_nodes():
    owners = {"h": "net.fc", "y": "net.fc", "i": "net.act"}
    text = "g (float[3,4] x) => (float[3,5] z) { h = MatMul(x, w)  y = Add(h, b)  i = Identity(y)  z = Relu(i) }"
    found = htp_export.forensics(written(text, 17, owners, w=weight(4, 5), b=weight(5)))
    assert [(finding.kind, finding.module) for finding in found.findings] == [
        ("matmul_add_2d", "net.fc"),
        ("identity", "net.act"),
    ]
    assert found.modules == {
        "": {"matmul_add_2d": 1, "identity": 1},
        "net": {"matmul_add_2d": 1, "identity": 1},
        "net.act": {"identity": 1},
        "net.fc": {"matmul_add_2d": 1},
    }


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / 8**0.5
        return torch.softmax(scores, -1) @ self.value(x)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_modules_of_an_exported_net(exporter, tmp_path):
    net = spread(nn.Sequential(Attention(), Attention())).eval()
    found = htp_export.forensics(exported(net, {"input": torch.randn(2, 5, 8)}, exporter, tmp_path))
    assert [finding.module for finding in found.of("attention")] == ["0", "1"]
    assert [finding.module for finding in found.of("qkv_projections")] == ["0", "1"]
    assert [finding.module for finding in found.of("matmul_add_3d")] == [
        f"{layer}.{name}" for layer in (0, 1) for name in ("query", "key", "value")
    ]


def test_a_selection_keeps_what_lies_in_it_and_needs_tags():
    owners = {"i": "a", "j": "b"}
    model = written(
        "g (float[2] x) => (float[2] y) { i = Identity(x) j = Identity(i) y = Relu(j) }", 17, owners
    )
    assert [finding.module for finding in htp_export.forensics(model, select="b").findings] == ["b"]
    with pytest.raises(SelectorError):
        htp_export.forensics(model, select="c")
    untagged = written("g (float[2] x) => (float[2] y) { i = Identity(x) y = Relu(i) }")
    assert [finding.module for finding in htp_export.forensics(untagged).findings] == [""]
    with pytest.raises(UntaggedModelError):
        htp_export.forensics(untagged, select="a")


def test_the_model_is_not_changed():
    model = written(
        LINEAR.format(rows="2,3,4", out="2,3,5", add="h, b"), w=weight(4, 5), b=weight(5)
    )
    before = ir.to_proto(model).SerializeToString()
    assert htp_export.forensics(model).findings
    htp_export.fingerprint(model)
    assert ir.to_proto(model).SerializeToString() == before


def test_patterns_in_branches_are_found():
    body = "g1 () => (float[2] a) { i = Identity(x)  a = Relu(i) }"
    other = "g2 () => (float[2] b) { b = Abs(x) }"
    text = f"g (float[2] x, bool c) => (float[2] y) {{ y = If(c) <then_branch = {body}, else_branch = {other}> }}"
    assert kinds(written(text)) == {"identity": 1}


def test_prints_as_a_table_and_is_plain_data():
    graph = written(
        "g (float[2] x) => (float[2] y) { i = Identity(x) y = Relu(i) }", 17, {"i": "act"}
    )
    found = htp_export.forensics(graph)
    assert str(found).splitlines() == [
        "found  nodes  what      fixed by                not fixed",
        "    1      1  Identity  eliminate_identity_ops",
        "1 finding in 2 nodes, 1 of which a pass changes",
        "every node has a module",
    ]
    assert (
        json.loads(json.dumps(found.to_dict()))["findings"][0]["fixed_by"]
        == "eliminate_identity_ops"
    )
    assert str(Forensics((), 3)) == "nothing found in 3 nodes"


def test_the_command_prints_tables_and_json(tmp_path, capsys):
    path = tmp_path / "[red]x.onnx"
    text = "g (float[2] x) => (float[2] y) { i = Identity(x) y = Relu(i) }"
    onnx.save(ir.to_proto(written(text, 17, {"i": "act"})), path)
    assert main(["forensics", str(path)]) == 0
    assert "eliminate_identity_ops" in capsys.readouterr().out
    assert main(["forensics", str(path), "--list"]) == 0
    assert "act" in capsys.readouterr().out
    assert main(["forensics", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kinds"] == {"identity": 1}


def test_every_kind_says_which_pass_changes_it_or_why_none_does():
    assert {kind.fixed_by for kind in KINDS.values() if kind.fixed_by} <= set(registry.available())
    assert all(kind.fixed_by or kind.why for kind in KINDS.values())


class _Failing(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        raise RuntimeError("no kernel\nand more")


def test_a_pass_that_fails_is_named_and_the_others_run(monkeypatch):
    registry.available()
    monkeypatch.setitem(
        registry._registered, "failing", registry.PassInfo("failing", "exact", _Failing)
    )
    found = htp_export.forensics(
        written("g (float[2] x) => (float[2] y) { i = Identity(x) y = Relu(i) }")
    )
    assert found.kinds == {"identity": 1}
    assert list(found.failed) == ["failing"]
    assert "RuntimeError: no kernel" in found.failed["failing"]
    assert "failing could not run, and is left out" in str(found)
    assert found.to_dict()["failed"] == found.failed


class _Tan(ir.passes.InPlacePass):
    """Makes ``Tan`` of a quotient, and says why it does not where it does not."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        for node in list(model.graph):
            if node.op_type == "Div" and node.inputs[0].producer().op_type == "Sin":
                replace(node, [ir.node("Tan", node.inputs[0].producer().inputs)])
                remove_unused(model)
                return ir.passes.PassResult(model, True)
            if node.op_type == "Mul":
                decline("make_tan", [node], "it is no quotient")
        return ir.passes.PassResult(model, False)


def test_a_pass_of_a_user_is_a_kind_of_its_own(monkeypatch):
    registry.available()
    monkeypatch.setitem(
        registry._registered, "make_tan", registry.PassInfo("make_tan", "tolerant", _Tan)
    )
    text = "g (float[2] x) => (float[2] y, float[2] z) { s = Sin(x) c = Cos(x) z = Mul(x, x) y = Div(s, c) }"
    found = htp_export.forensics(written(text, 17, {"s": "a", "c": "a.b", "y": "a"}))
    assert [
        (each.kind, each.module, each.nodes, each.fixed_by, each.why, each.detail)
        for each in found.findings
    ] == [
        ("make_tan", "a", ("s", "c", "y"), "make_tan", "", "becomes Tan"),
        ("make_tan", "", ("z",), None, "it is no quotient", ""),
    ]
    assert htp_export.forensics(written(text), level="exact").findings == ()


def test_equal_work_is_found_with_the_module_of_what_is_eliminated():
    text = "g (float[2] x) => (float[2] y) { a = Sin(x) b = Sin(x) y = Add(a, b) }"
    found = htp_export.forensics(written(text, 17, {"a": "one", "b": "two", "y": ""}))
    assert [(each.kind, each.module, each.nodes) for each in found.findings] == [
        ("eliminate_common_subexpressions", "two", ("b",))
    ]


class _Rotating(
    Holding,
    up=nn.Linear(16, 32),
    gate=nn.Linear(16, 32),
    down=nn.Linear(32, 16),
    scale=nn.Parameter(torch.randn(16)),
):
    """RMSNorm, SiLU and sizes that are read while it runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.scale
        x = x.view(x.shape[0], -1, 4, 4).transpose(1, 2).transpose(1, 2).reshape(x.shape[0], -1, 16)
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.mark.parametrize(
    ("make", "shape"),
    [(Attention, (1, 6, 8)), (conv_bn_relu, (1, 3, 8, 8)), (_Rotating, (2, 5, 16))],
)
def test_what_is_said_to_be_fixed_is_gone_after_optimising_and_the_rest_is_not(
    make, shape, tmp_path
):
    """Held against ``optimize`` itself, level by level, on three kinds of models."""
    torch.manual_seed(0)
    path = tmp_path / "m.onnx"
    htp_export.export(
        make().eval(), (torch.randn(shape),), path, dynamo=False, opset_version=14, do_constant_folding=False,
        dynamic_axes={"x": {0: "batch"}}, input_names=["x"], verbose=False,
    )  # fmt: skip
    before = htp_export.forensics(path).findings
    assert {finding.level for finding in before if finding.fixed_by} >= {"exact"}
    for level in registry.LEVELS:
        ours = {info.name for info in registry.choose("default", level)}
        model = htp_export.optimize(path, level=level).model
        left = {node.name for node in model.graph} | set(model.graph.initializers)
        for finding in before:
            if finding.fixed_by in ours and registry.LEVELS.index(
                finding.level
            ) <= registry.LEVELS.index(level):
                assert not {*finding.nodes, *finding.tensors} <= left
        after = htp_export.forensics(model, level=level).findings
        assert not [finding for finding in after if finding.fixed_by in ours]
