"""Softmax, GELU and normalizations that a model computes step by step become one operator each."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import htp_export
from htp_export.capabilities.forensics.finding import SINGLE_STEPS
from htp_export.capabilities.optimize.passes.fuse_single_steps import FuseSingleSteps
from htp_export.capabilities.optimize.registry import declined
from tests.exporting import exported
from tests.graphs import array, feeds, ops, owners, passed, run, same, tagged
from tests.nets import spread

ROWS, COLUMNS = 6, 8


class Weighted(nn.Module):
    """A module that computes a function of its input, a weight and a bias."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(COLUMNS))
        self.bias = nn.Parameter(torch.randn(COLUMNS))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


def softmax(x: Tensor, *_: Tensor) -> Tensor:
    e = torch.exp(x - x.max(dim=-1, keepdim=True).values)
    return e / e.sum(-1, keepdim=True)


def log_softmax(x: Tensor, *_: Tensor) -> Tensor:
    largest = x.amax(-1).unsqueeze(-1)
    return x - (largest + torch.log(torch.exp(x - largest).sum(-1, keepdim=True)))


def gelu_erf(x: Tensor, *_: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gelu_tanh(x: Tensor, *_: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * x * (1 + 0.044715 * x * x)))


def rms_norm(x: Tensor, weight: Tensor, _: Tensor) -> Tensor:
    return weight * (x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6))


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    variance = x.var(-1, keepdim=True, unbiased=False)
    return weight * (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + 1e-5) + bias


FUNCTIONS = (softmax, log_softmax, gelu_erf, gelu_tanh, rms_norm, layer_norm)
OPERATORS = ("Softmax", "LogSoftmax", "Gelu", "Gelu", "RMSNormalization", "LayerNormalization")
FOR_ONNXRUNTIME = {"RMSNormalization": "SimplifiedLayerNormalization"}


@pytest.mark.long
@pytest.mark.parametrize(("exporter", "opset"), [("dynamo", 23), ("torchscript", 20)])
def test_each_function_is_one_operator_of_its_module_and_agrees_with_pytorch(
    exporter, opset, tmp_path
):
    net = spread(nn.Sequential(*map(Weighted, FUNCTIONS))).eval()
    x = torch.randn(ROWS, COLUMNS)
    file = exported(net, {"input": x}, exporter, tmp_path, opset_version=opset)
    small = tmp_path / "small.onnx"
    # ONNX has RMSNormalization from opset 23 on, which TorchScript does not write
    level = "tolerant" if opset >= 23 else "fused"
    result = htp_export.optimize(file, small, level=level, verify=True)
    assert not any(report.rolled_back for report in result.passes)
    wanted = [FOR_ONNXRUNTIME.get(op, op) if opset < 23 else op for op in OPERATORS]
    assert ops(result.model) == wanted
    assert [node.metadata_props["htp.module"] for node in result.model.graph] == list("012345")
    report = htp_export.verify(net, small, (x,))
    assert report.ok, str(report)
    assert {row.status for row in report.modules.values()} == {"agrees"}


EXP = "[a] m = ReduceMax <axes = [-1]> (x) [a] d = Sub (x, m) [a] e = Exp (d)"
TOTAL = "[a] s = ReduceSum (e, im1)"
X = "(float[n, 3, 4] x) => (float y)"
NUMBERS = """<float one = {1}, float half = {0.5}, float two = {2}, float root = {1.4142135}, float eps = {0.00001},
    float fraction = {1.3333334}, float[1] inverse = {0.70710677}>"""
WEIGHTS = {"w": array(4), "b": array(4, seed=1)}
SQUARES = "[a] m = ReduceMean <axes = [-1]> (x) [a] c = Sub (x, m) [a] q = Pow (c, two)"
SQUARES += " [a] v = ReduceMean <axes = [-1]> (q)"
VARIANCE = f"{SQUARES} [a] ve = Add (v, eps) [a] r = Sqrt (ve)"
ERF = "[a] d = Div (x, root) [a] t = Erf (d) [a] t1 = Add (one, t)"

FUSED = {
    "a softmax": (f"{EXP} {TOTAL} [a] y = Div (e, s)", 17, "Softmax"),
    "a softmax without its maximum": (
        "[a] e = Exp (x) [a] s = ReduceSum (e, im1) [a] y = Div (e, s)",
        17,
        "Softmax",
    ),
    "a softmax along another axis": (
        "[a] e = Exp (x) [a] s = ReduceSum (e, i1) [a] y = Div (e, s)",
        17,
        "Softmax",
    ),
    "a softmax by the first axis without its size of 1": (
        "[a] e = Exp (x) [a] s = ReduceSum <keepdims = 0> (e, i0) [a] y = Div (e, s)",
        17,
        "Softmax",
    ),
    "a softmax whose sum gets its axis back": (
        f"{EXP} [a] k = ReduceSum <keepdims = 0> (e, im1) [a] s = Unsqueeze (k, im1) [a] y = Div (e, s)",
        17,
        "Softmax",
    ),
    "a softmax by a reciprocal": (
        f"{EXP} {TOTAL} [a] i = Reciprocal (s) [a] y = Mul (i, e)",
        17,
        "Softmax",
    ),
    "a softmax less another number in each row": (
        f"[a] k = ReduceMin <axes = [-1]> (x) [a] d = Sub (x, k) [a] e = Exp (d) {TOTAL} [a] y = Div (e, s)",
        17,
        "ReduceMin Sub Softmax",
    ),
    "a softmax in opset 11 along the last axis": (
        "[a] e = Exp (x) [a] s = ReduceSum <axes = [2]> (e) [a] y = Div (e, s)",
        11,
        "Softmax",
    ),
    "a log-softmax": (f"{EXP} {TOTAL} [a] l = Log (s) [a] y = Sub (d, l)", 17, "LogSoftmax"),
    "a log-softmax by the sum of the exponentials": (
        "[a] l = ReduceLogSumExp <axes = [-1]> (x) [a] y = Sub (x, l)",
        17,
        "LogSoftmax",
    ),
    "the logarithm of a softmax": (
        f"{EXP} {TOTAL} [a] p = Div (e, s) [a] y = Log (p)",
        17,
        "LogSoftmax",
    ),
    **{
        f"a GELU, its half {where}": (f"{ERF} {half}", 20, "Gelu")
        for where, half in {
            "first": "[a] h = Mul (half, x) [a] y = Mul (h, t1)",
            "last": "[a] h = Mul (t1, x) [a] y = Div (h, two)",
        }.items()
    },
    "a GELU by the root of a half": (
        "[a] d = Mul (x, inverse) [a] t = Erf (d) [a] t1 = Add (t, one) [a] h = Mul (x, t1) [a] y = Mul (h, half)",
        20,
        "Gelu",
    ),
    "a GELU, its half in the sum": (
        "[a] d = Div (x, root) [a] t = Erf (d) [a] th = Mul (t, half) [a] h = Add (th, half) [a] y = Mul (h, x)",
        20,
        "Gelu",
    ),
    "a layer norm": (
        f"{VARIANCE} [a] n = Div (c, r) [a] z = Mul (n, w) [a] y = Add (b, z)",
        17,
        "LayerNormalization",
    ),
    "a layer norm without weights": (f"{VARIANCE} [a] y = Div (c, r)", 17, "LayerNormalization"),
    "a layer norm without an epsilon": (
        f"{SQUARES} [a] r = Sqrt (v) [a] y = Div (c, r)",
        17,
        "LayerNormalization",
    ),
    "a layer norm by the power of minus a half": (
        f"{SQUARES} [a] ve = Add (v, eps) [a] r = Pow (ve, power) [a] n = Mul (r, c) [a] y = Mul (w, n)",
        17,
        "LayerNormalization",
    ),
    "an RMS norm": (
        "[a] q = Mul (x, x) [a] v = ReduceMean (q, im1) [a] ve = Add (eps, v) [a] r = Sqrt (ve) [a] y = Div (x, r)",
        23,
        "RMSNormalization",
    ),
}


@pytest.mark.parametrize("case", FUSED)
def test_steps_in_any_form_are_one_operator(case):
    body, opset, wanted = FUSED[case]
    model = tagged(f"{X} {NUMBERS} {{ {body} }}", None, opset, **WEIGHTS, power=np.float32(-0.5))
    changed, _ = passed(model, "fuse_single_steps")
    assert ops(changed) == wanted.split()
    assert owners(changed)["y"] == ("a",)
    assert same(model, changed, 1e-6, **feeds(model, n=2))


LEFT = {
    "the exponentials are needed elsewhere": (
        f"{EXP} {TOTAL} [a] y = Div (e, s) [b] z = Neg (e)",
        17,
        "softmax",
        "other nodes read 'e'",
    ),
    "a number is added to the sum": (
        f"{EXP} {TOTAL} [a] se = Add (s, eps) [a] y = Div (e, se)",
        17,
        "softmax",
        "the sum is changed",
    ),
    "a sum over two axes": (
        "[a] e = Exp (x) [a] s = ReduceSum (e, axes) [a] y = Div (e, s)",
        17,
        "softmax",
        "Softmax has one axis",
    ),
    "another axis than the last one in opset 11": (
        "[a] e = Exp (x) [a] s = ReduceSum <axes = [1]> (e) [a] y = Div (e, s)",
        11,
        "softmax",
        "needs opset 13",
    ),
    "an unbiased variance": (
        f"{SQUARES} [a] u = Mul (v, fraction) [a] ve = Add (u, eps) [a] r = Sqrt (ve) [a] y = Div (c, r)",
        17,
        "layer_norm",
        "multiplied by 1.33333",
    ),
    "an epsilon behind the root": (
        f"{SQUARES} [a] r = Sqrt (v) [a] re = Add (r, eps) [a] y = Div (c, re)",
        17,
        "layer_norm",
        "after the square root",
    ),
    "a norm of another axis": (
        VARIANCE.replace("[-1]", "[1]") + " [a] y = Div (c, r)",
        17,
        "layer_norm",
        "other axes than the last",
    ),
    "a layer norm in opset 14": (
        f"{VARIANCE} [a] y = Div (c, r)",
        14,
        "layer_norm",
        "LayerNormalization needs opset 17, and the model has 14",
    ),
    "a GELU in opset 17": (f"{ERF} [a] h = Mul (half, x) [a] y = Mul (h, t1)", 17, "gelu_erf", "needs opset 20"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_steps_that_cannot_be_one_operator_stay_and_say_why(case):
    body, opset, kind, why = LEFT[case]
    results = "(float y, float z)" if " z = " in body else "(float y)"
    graph = f"(float[n, 3, 4] x) => {results} {NUMBERS} {{ {body} }}"
    model = tagged(graph, None, opset, axes=np.array([1, 2]))
    changed, _ = passed(model, "fuse_single_steps")
    assert ops(changed) == ops(model)
    copy = model.clone()
    FuseSingleSteps()(copy)
    (note,) = declined(list(copy.graph))
    assert note.kind == kind
    assert why in note.why


def test_a_tensor_that_a_module_returns_stays():
    graph = f"{X} {{ {EXP} {TOTAL} [b] y = Div (e, s) }}"
    model = tagged(graph, {"a": (["x"], ["e", "s"]), "b": (["e", "s"], ["y"])})
    assert ops(passed(model, "fuse_single_steps")[0]) == ops(model)
    (found,) = htp_export.forensics(model).of("softmax")
    assert (found.fixed_by, "is an input or output of a module" in found.why) == (None, True)


def test_half_precision_stays():
    body = "e = Exp(x) s = ReduceSum(e, im1) y = Div(e, s)"
    graph = f"(float16[3, 4] x) => (float16[3, 4] y) {{ {body} }}"
    (found,) = htp_export.forensics(tagged(graph)).of("softmax")
    assert "in FLOAT16, each step rounds" in found.why


@pytest.mark.parametrize(
    "body",
    [
        # of a square matrix: each column is divided by the sum of a row
        "[a] e = Exp (x) [a] s = ReduceSum <keepdims = 0> (e, im1) [a] y = Div (e, s)",
        "[a] e = Exp (x) [a] o = Exp (e) [a] s = ReduceSum (o, im1) [a] y = Div (e, s)",
        "[a] d = Div (x, root) [a] t = Erf (d) [a] t1 = Add (t, one) [a] y = Mul (x, t1)",  # twice
        "[a] d = Div (x, two) [a] t = Erf (d) [a] t1 = Add (t, one) [a] h = Mul (x, t1) [a] y = Mul (h, half)",
        "[a] m = ReduceMean <axes = [0]> (x) [a] c = Sub (x, m) [a] q = Mul (c, c) "
        "[a] v = ReduceMean <axes = [-1]> (q) [a] r = Sqrt (v) [a] y = Div (x, r)",
    ],
)
def test_what_only_looks_like_steps_is_none(body):
    model = tagged(f"(float[4, 4] x) => (float y) {NUMBERS} {{ {body} }}", None, 17)
    assert ops(passed(model, "fuse_single_steps")[0]) == ops(model)
    assert not set(htp_export.forensics(model).kinds) & set(SINGLE_STEPS)


def test_a_softmax_without_its_maximum_is_finite_where_the_steps_overflow():
    body = "[a] e = Exp (x) [a] s = ReduceSum (e, im1) [a] y = Div (e, s)"
    model = tagged(f"(float[1, 2] x) => (float y) {{ {body} }}")
    changed, _ = passed(model, "fuse_single_steps")
    small, large = np.float32([[1, 2]]), np.float32([[100, 101]])
    assert same(model, changed, 1e-6, x=small)
    assert not np.isfinite(run(model, x=large)[0]).all()
    expected = torch.softmax(torch.tensor(large), -1).numpy()
    np.testing.assert_allclose(run(changed, x=large)[0], expected, rtol=1e-6)


def test_cost_and_forensics_have_what_is_read_and_written_before_and_after():
    m, n, size = 16, 32, 4
    body = f"{EXP} {TOTAL} [a] y = Div (e, s)"
    model = tagged(f"(float[{m}, {n}] x) => (float y) {{ {body} }}")
    before = htp_export.cost(model).modules["a"]
    after = htp_export.cost(htp_export.optimize(model, level="tolerant").model).modules["a"]
    # https://arxiv.org/abs/1805.02867 counts the accesses of a safe softmax; these are one kernel a step
    axes = 8  # the constant of ReduceSum
    assert (before.read_bytes - axes, before.written_bytes) == (
        size * (5 * m * n + 2 * m),
        size * (3 * m * n + 2 * m),
    )
    assert (after.read_bytes, after.written_bytes) == (size * m * n, size * m * n)
    assert before.traffic_bytes == before.read_bytes + before.written_bytes
    (found,) = htp_export.forensics(model).of("softmax")
    assert found.fixed_by == "fuse_single_steps"
    assert found.moved is not None
    assert (found.moved.read, found.moved.written) == (before.read_bytes, before.written_bytes)
    assert (found.moved.read_after, found.moved.written_after) == (after.read_bytes, after.written_bytes)  # fmt: skip
