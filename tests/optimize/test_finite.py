"""No pass and no level changes what is finite into NaN or infinity: epsilons, exponents and masks at the edges."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch.nn import functional

import htp_export
from htp_export.passes import available
from tests.graphs import run
from tests.nets import Apply, composed

Tensor = torch.Tensor

_EDGES = [0.0, -0.0, 1e-40, 1e-30, -1e-20, 1e-8, 1.0, -3.0, 88.0, -200.0, 1e6, -1e15]


def root_mean_square(x: Tensor) -> Tensor:
    """As transformers write it; TorchScript has no translation of torch's."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-9) * 3.0


def epsilons(_: torch.nn.Module, x: Tensor) -> Tensor:
    p = x.clamp(-100, 100).softmax(-1)
    parts = [
        torch.log(p + 1e-15),
        torch.log(1e-12 + p) - 1e-9,
        x / (x.abs() + 1e-30),
        x / x.abs().clamp(min=1e-20),
        torch.rsqrt(x.square().clamp(max=1e20).mean(-1, keepdim=True) + 1e-10),
        functional.normalize(x.clamp(-1e9, 1e9), dim=-1, eps=1e-12),
        p.clamp(min=1e-20).log(),
        -(p * (p + 1e-10).log()),
        torch.sqrt(x.abs() + 1e-20 + 1e-12) ** 1.0,
    ]
    return torch.cat([part.expand_as(x) for part in parts], -1)


def factors(_: torch.nn.Module, x: Tensor) -> Tensor:
    small, large = x.clamp(-1e-30, 1e-30), x.clamp(-1, 1)
    parts = [
        small * 1e25 * 1e25,
        small * 0.0 * 3e38 * 3e38,
        (large - large) * 3e38 * 3e38,
        small / 1e-20 / 1e-20,
    ]
    parts += [torch.log(x.abs().clamp(min=1e20) * 1e-30 * 1e-30 + 1e-44), large + 3e38 - 3e38]
    return torch.cat([*parts, (x.clamp(-1e38, -9e37) + 3e38) + 2e38], -1)


def exponents(_: torch.nn.Module, x: Tensor) -> Tensor:
    parts = [
        x.sigmoid(),
        functional.softplus(x),
        functional.gelu(x),
        functional.silu(x),
        functional.mish(x),
        x.tanh(),
    ]
    parts += [
        functional.gelu(x, approximate="tanh"),
        functional.hardswish(x),
        x.softmax(-1),
        x.log_softmax(-1),
    ]
    return torch.cat(
        [*parts, x.clamp(max=88).exp(), x.logsumexp(-1, keepdim=True).expand_as(x)], -1
    )


def norms(layers: torch.nn.Module, x: Tensor) -> Tensor:
    return torch.cat([layer(x.clamp(-1e4, 1e4)) for layer in layers.children()], -1)


def convolutions(layers: torch.nn.Module, x: Tensor) -> Tensor:
    return layers(functional.pad(x.clamp(-1, 1).reshape(-1, 3, 2, 2), (1, 1, 1, 1)))


def masked(_: torch.nn.Module, x: Tensor) -> Tensor:
    heads = x.clamp(-30, 30).reshape(-1, 2, 3, 2)
    future = torch.ones(3, 3, dtype=torch.bool).tril()
    nothing = future & torch.tensor([[False], [True], [True]])
    infinite = torch.zeros(3, 3).masked_fill(~future, -torch.inf)
    attend = functional.scaled_dot_product_attention
    lowest = torch.zeros(3, 3).masked_fill(~nothing, torch.finfo(torch.float32).min)
    parts = [
        attend(heads, heads, heads, mask)
        for mask in (future, nothing, infinite, lowest, lowest + lowest / 2)
    ]
    parts += [attend(heads, heads, heads, scale=0.5), attend(heads, heads, heads, is_causal=True)]
    for mask in (infinite, lowest):
        scores = heads @ heads.transpose(-1, -2) / 3
        parts += [
            (scores + mask).softmax(-1) @ heads,
            (scores * -2 + mask + mask).softmax(-1) @ heads,
        ]
    return torch.cat([*parts, scores.masked_fill(~future, -torch.inf).softmax(-1) @ heads], -1)


def norms_at_the_edges() -> torch.nn.Module:
    dead = torch.nn.Parameter(torch.zeros(3))
    layers = torch.nn.Sequential(
        torch.nn.LayerNorm(12, eps=1e-12),
        Apply(root_mean_square),
        torch.nn.Sequential(
            torch.nn.Unflatten(-1, (3, 4)), torch.nn.GroupNorm(3, 3, eps=1e-10), torch.nn.Flatten()
        ),
        torch.nn.Sequential(
            torch.nn.Unflatten(-1, (3, 4)), torch.nn.BatchNorm1d(3, eps=1e-9), torch.nn.Flatten()
        ),
    )
    layers[3][1].running_var = dead.data.clone()  # type: ignore[index, union-attr]
    return layers


def convolutions_at_the_edges() -> torch.nn.Module:
    """A convolution of large weights before a normalisation of large factors: each is finite, their product is not."""
    conv, norm = torch.nn.Conv2d(3, 3, 3, bias=False), torch.nn.BatchNorm2d(3, eps=1e-12)
    with torch.no_grad():
        conv.weight.copy_(torch.tensor([1e-3, 1e30, 0.0]).reshape(3, 1, 1, 1).expand(3, 3, 3, 3))
        norm.weight.copy_(torch.tensor([1.0, 1e20, 3.0]))
        norm.running_var.copy_(torch.tensor([0.0, 1.0, 0.0]))  # type: ignore[operator, union-attr]
    return torch.nn.Sequential(conv, norm, torch.nn.ReLU())


NETS: dict[str, tuple[Callable[..., Tensor], Callable[[], torch.nn.Module]]] = {
    "epsilons": (epsilons, torch.nn.Identity),
    "factors": (factors, torch.nn.Identity),
    "exponents": (exponents, torch.nn.Identity),
    "norms": (norms, norms_at_the_edges),
    "convolutions": (convolutions, convolutions_at_the_edges),
    "masked": (masked, torch.nn.Identity),
}
"""A function that stands at the edges, and the layers that it uses."""


def rows() -> np.ndarray[Any, Any]:
    """Edges in several orders, each alone, and none of them."""
    random = np.random.default_rng(0)
    mixed = [random.permutation(_EDGES) for _ in range(3)]
    alone = [np.full(len(_EDGES), edge) for edge in _EDGES]
    return np.array([*mixed, *alone, random.standard_normal(len(_EDGES))], np.float32)


def file_of(net: str, exporter: str, folder: Path) -> ir.Model:
    function, layers = NETS[net]
    model = composed(lambda self, x: function(self.layers, x), layers=layers()).eval()
    example = torch.from_numpy(rows()).sin()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options: dict[str, Any] = (
            {"dynamo": True, "opset_version": 23} if exporter == "dynamo" else {"dynamo": False}
        )
        htp_export.export(model, (example,), folder / "net.onnx", verbose=False, **options)
    return htp_export.load(onnx.load(folder / "net.onnx")).model


def broken(before: np.ndarray[Any, Any], after: np.ndarray[Any, Any]) -> str:
    """Outputs that were finite and are not, or are another number; empty if there are none."""
    finite = np.isfinite(before)
    with np.errstate(all="ignore"):
        off = np.abs(before.astype(np.float64) - after)
    limit = 1e-3 * np.maximum(1, np.abs(np.where(finite, before, 0).astype(np.float64)))
    wrong = finite & ~(off <= limit)
    return (
        f"{before[wrong][:3]} -> {after[wrong][:3]} at {np.argwhere(wrong)[:3].tolist()}"
        if wrong.any()
        else ""
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "exporter", ["dynamo", pytest.param("torchscript", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "net",
    [
        "factors",
        "norms",
        *(
            pytest.param(net, marks=pytest.mark.slow)
            for net in NETS
            if net not in ("factors", "norms")
        ),
    ],
)
def test_no_level_and_no_pass_changes_what_is_finite(net, exporter, tmp_path):
    model = file_of(net, exporter, tmp_path)
    inputs = {str(model.graph.inputs[0].name): rows()}
    (before,) = run(model, **inputs)
    assert np.isfinite(before).mean() > 0.5
    chains: list[dict[str, Any]] = [{"level": level} for level in ("exact", "tolerant", "fused")]
    chains += [
        {"passes": ["default", name], "level": "fused"}
        for name in ("fuse_attention", "fuse_matmul_add_3d")
    ]
    chains += [{"passes": [name], "level": "fused"} for name in available()]
    faults = {}
    for chain in chains:
        (after,) = run(htp_export.optimize(model, **chain).model, **inputs)
        if fault := broken(before, after):
            faults[str(chain)] = fault
    assert not faults, "\n".join(f"{chain}: {fault}" for chain, fault in faults.items())


_ATTENTION = """
    t = Transpose <perm = [0, 1, 3, 2]> (x) p = MatMul (x, t) z = Mul (p, a)
    w = Softmax <axis = -1> (z) y = MatMul (w, x)"""

OVERFLOWS: dict[str, tuple[str, str, str, float]] = {
    "negative scale": ("1, 1, 2, 4", "float a = {-0.5}", _ATTENTION, 1.5),
    "scale of zero": ("1, 1, 2, 4", "float a = {0}", _ATTENTION, 1.5),
    "normalization": (
        "1, 1, 2",
        "float[1] g = {1e30}, float[1] b = {0}, float[1] v = {1}, float a = {1e20}",
        "h = BatchNormalization (x, g, b, b, v) y = Mul (h, a)",
        0.0,
    ),
    "convolution": (
        "1, 1, 2",
        "float[1, 1, 1] w = {1e30}, float[1] g = {1e20}, float[1] b = {0}, float[1] v = {1e-9}",
        "h = Conv (x, w) y = BatchNormalization <epsilon = 1e-12> (h, g, b, b, v)",
        0.0,
    ),
    "products of products": (
        "2, 2",
        "int64[1] a = {1}, int64[1] b = {0}, float[2, 2] c = {1e30, 1e-30, 1e30, 1e-30}",
        "z = Mul (x, c) h = ReduceProd <keepdims = 0> (z, a) y = ReduceProd <keepdims = 0> (h, b)",
        1.0,
    ),
    "divided product": ("1, 1", "float a = {1e-39}", "h = MatMul (x, x) y = Div (h, a)", 0.0),
    "product divided by zero": (
        "1, 1",
        "float a = {0}",
        "h = MatMul (x, x) c = Div (h, a) d = IsNaN (c) y = Where (d, x, c)",
        0.0,
    ),
    # no overflow, but onnxscript's rule for products between reshapes forgets it
    "transposed factor": (
        "1, 2, 2",
        "float[2, 2] w = {1, 2, 3, 4}, float[2] b = {0, 0}, int64[2] s = {-1, 2}, int64[3] r = {1, 2, 2}",
        "h = Reshape (x, s) p = Gemm <alpha = 1.0, beta = 1.0, transB = 1> (h, w, b) y = Reshape (p, r)",
        1.0,
    ),
    "sums": ("1", "float a = {3e38}", "h = Add (x, a) y = Add (h, a)", -3.2e38),
    "factors": ("1", "float a = {1e30}", "h = Mul (x, a) y = Mul (h, a)", 0.0),
    "divisors": ("1", "float a = {1e-30}", "h = Div (x, a) y = Div (h, a)", 0.0),
    "divisor without a reciprocal": (
        "1",
        "float a = {1e-39}, float b = {2}",
        "h = Div (x, a) y = Mul (h, b)",
        0.0,
    ),
}
"""Name → the shape of the input, constants, nodes, and the value of all elements of the input."""


@pytest.mark.long
@pytest.mark.parametrize("case", OVERFLOWS)
def test_no_pass_changes_what_is_finite_by_an_overflow(case):
    shape, constants, body, value = OVERFLOWS[case]
    model = ir.from_onnx_text(
        f'<ir_version: 10, opset_import: ["": 23]> g (float[{shape}] x) => (float y) <{constants}> {{ {body} }}'
    )
    model.graph.outputs[0].shape = None
    x = np.full([int(size) for size in shape.split(",")], value, np.float32)
    (before,) = run(model, x=x)
    assert np.isfinite(before).all()
    for passes in ("default", "default,fuse_attention"):
        for level in ("exact", "tolerant", "fused"):
            if passes == "default" or level != "exact":
                (after,) = run(htp_export.optimize(model, passes=passes, level=level).model, x=x)
                assert not broken(before, after), (passes, level)


def float16(body: str, passes: str) -> list[str]:
    """Operators after passes; ONNX Runtime on a processor computes in float32, where no value shows an overflow."""
    text = f"""g (float16[2, 2] x) => (float16[2, 2] y) <float16 half = {{14336}}, float16 nothing = {{0}}> {{
        t = Transpose <perm = [1, 0]> (x) {body} }}"""
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["": 23]> {text}')
    return [
        node.op_type
        for node in htp_export.optimize(model, passes=passes, level="tolerant").model.graph
    ]


def test_products_of_float16_are_not_larger_than_they_were():
    scaled = float16("a = Mul (x, half) b = Mul (t, half) y = MatMul (a, b)", "cleanup_attention")
    assert scaled == ["Transpose", "Mul", "MatMul"]
    guarded = (
        "p = MatMul (x, t) w = Softmax <axis = -1> (p) b = IsNaN (w) y = Where (b, nothing, w)"
    )
    assert float16(guarded, "eliminate_nan_guards")[-2:] == ["IsNaN", "Where"]
