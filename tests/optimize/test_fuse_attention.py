"""fuse_attention: ONNX's own Attention by name only, equal values, exact modules; what it has to leave alone."""

import numpy as np
import onnx_ir as ir
import pytest
import torch

import htp_export
from htp_export.capabilities.optimize.registry import DEFAULT, choose
from htp_export.errors import InputError
from htp_export.shapes.symbolic import Symbolic
from tests.exporting import exported
from tests.graphs import Builder, array, ops, owners, passed, run, tagged
from tests.nets import composed
from tests.truth import inexact

HEADS, LENGTH, KEYS, FEATURES = 2, 3, 5, 4


TOGETHER = "[attention] back = Transpose <perm = [0, 2, 1, 3]> (context) [attention] y = Reshape (back, together)"
SHAPES = {
    "apart": np.array([0, 0, HEADS, FEATURES]),
    "together": np.array([0, 0, HEADS * FEATURES]),
}


def heads(name: str) -> str:
    """Nodes that set the heads of a tensor apart."""
    turned = f"[attention] {name}h = Transpose <perm = [0, 2, 1, 3]> ({name}a)"
    return f"[attention] {name}a = Reshape ({name}, apart) {turned}"


def attention(
    mask: list[int] | None = None,
    *,
    opset: int = 23,
    scale: str = "Mul",
    joined: bool = True,
    extra: str = "",
) -> ir.Model:
    """Scaled, masked attention of heads that lie side by side, or are apart from the beginning."""
    sizes = {"q": LENGTH, "k": KEYS, "v": KEYS}
    shape = "n, {}, " + str(HEADS * FEATURES) if joined else f"n, {HEADS}, {{}}, {FEATURES}"
    inputs = [f"float[{shape.format(size)}] {name}" for name, size in sizes.items()]
    inputs += [f"float{mask} mask"] if mask else []
    perm = [0, 2, 3, 1] if joined else [0, 1, 3, 2]
    graph = f"""({", ".join(inputs)}) => (float y{extra}) {{ {" ".join(map(heads, "qkv")) if joined else ""}
        [attention] kt = Transpose <perm = {perm}> ({"ka" if joined else "k"})
        [attention] product = MatMul ({"qh" if joined else "q"}, kt) [attention] scores = {scale} (product, scale)
        {"[attention] masked = Add (mask, scores)" if mask else ""}
        [attention] shares = Softmax <axis = -1> ({"masked" if mask else "scores"})
        [attention] {"context = MatMul (shares, vh)" if joined else "y = MatMul (shares, v)"}
        {TOGETHER if joined else ""} }}"""
    signatures = {"attention": ([*"qkv", *(["mask"] if mask else [])], ["y", "shares"])}
    return tagged(
        graph, signatures, opset, scale=np.float32(0.3 if scale == "Mul" else 3), **SHAPES
    )


def fed(mask: list[int] | None, joined: bool = True) -> dict[str, np.ndarray]:
    sizes = {"q": LENGTH, "k": KEYS, "v": KEYS}
    shapes = {
        name: (2, size, HEADS * FEATURES) if joined else (2, HEADS, size, FEATURES)
        for name, size in sizes.items()
    }
    feeds = {name: array(*shape, seed=place) for place, (name, shape) in enumerate(shapes.items())}
    return feeds | ({"mask": array(*mask, seed=9)} if mask else {})


@pytest.mark.parametrize("scale", ["Mul", "Div"])
@pytest.mark.parametrize("mask", [None, [3, 5], [1, 1, 3, 5], [2, 2, 3, 5], [1, 3, 5]], ids=str)
@pytest.mark.parametrize("joined", [True, False], ids=["side by side", "apart"])
def test_an_attention_is_one_node_that_computes_the_same(mask, scale, joined):
    model = attention(mask, scale=scale, joined=joined)
    changed, books = passed(model, "fuse_attention")
    assert ops(changed) == ["Attention"]
    assert owners(changed)["y"] == ("attention",)
    assert books.hierarchy["attention"].fate == "computed"
    feeds = fed(mask, joined)
    assert np.allclose(run(model, **feeds)[0], run(changed, **feeds)[0], rtol=1e-5, atol=1e-5)


def test_an_attention_of_heads_takes_in_what_sets_them_apart():
    inputs = ", ".join(
        f"float[n, {size}, 8] {name}" for name, size in (("q", LENGTH), ("k", KEYS), ("v", KEYS))
    )
    graph = f"""({inputs}) => (float y) {{ {" ".join(map(heads, "qkv"))}
        [attention] context = Attention <scale = 0.3> (qh, kh, vh) {TOGETHER} }}"""
    model = tagged(graph, opset=23, **SHAPES)
    changed, _ = passed(model, "fuse_attention")
    assert ops(changed) == ["Attention"]
    assert np.allclose(
        run(model, **fed(None))[0], run(changed, **fed(None))[0], rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    "changes",
    [
        *({"mask": mask} for mask in ([1, 5], [2, 1, 1, 5], [3, 1])),
        {"opset": 22},
        {"extra": ", float shares"},
    ],
    ids=str,
)
def test_other_masks_older_opsets_and_weights_that_the_model_returns_stay(changes):
    """ONNX Runtime repeats a mask over batch and heads only."""
    assert "Attention" not in ops(passed(attention(**changes), "fuse_attention")[0])


def test_it_runs_by_name_alone_also_beside_the_default_passes():
    assert "fuse_attention" not in DEFAULT
    names = [info.name for info in choose("default, fuse_attention", "tolerant")]
    assert names[-1] == "fuse_attention"
    assert "fuse_matmul_add" in names
    with pytest.raises(InputError, match="more than level 'exact' allows"):
        choose(["default", "fuse_attention"], "exact")


def attend(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = (
        layer(x).view(*x.shape[:2], 2, 4).transpose(1, 2)
        for layer in (self.query, self.key, self.value)
    )
    shares = self.dropout(torch.softmax(q @ k.transpose(-1, -2) / 2, -1))
    return (shares @ v).transpose(1, 2).reshape(x.shape), shares


def test_modules_stay_exact_where_weights_that_nobody_reads_are_gone(tmp_path):
    """A block takes the first of two things that its attention gives, as transformers do."""
    torch.manual_seed(0)
    layers = {name: torch.nn.Linear(8, 8) for name in ("query", "key", "value")}
    inner = composed(attend, **layers, dropout=torch.nn.Dropout(0.1))
    model = composed(
        lambda self, x: self.output(self.inner(x)[0]) + x, inner=inner, output=torch.nn.Linear(8, 8)
    ).eval()
    kwargs = {"x": torch.randn(2, 5, 8)}
    exported(model, kwargs, "dynamo", tmp_path, opset_version=23)
    small = tmp_path / "small.onnx"
    result = htp_export.optimize(
        tmp_path / "model.onnx",
        small,
        passes="default,fuse_attention",
        level="tolerant",
        verify=True,
    )
    assert "Attention" in ops(result.model)
    assert "Softmax" not in ops(result.model)
    assert (result.rolled_back, dict(result.fused)) == ({}, {})
    assert inexact(model, kwargs, small) == []
    assert htp_export.verify(model, small, kwargs=kwargs).ok


@pytest.mark.parametrize(
    ("inputs", "attributes"),
    [
        ("x roi scales", {"mode": "nearest"}),
        ("x roi none sizes", {"mode": "linear"}),
        ("x roi none some", {"mode": "linear", "axes": [3, -2]}),
        ("x roi none some", {"axes": [3, 2], "keep_aspect_ratio_policy": "not_larger"}),
    ],
)
def test_the_shape_of_a_resized_tensor_is_known(inputs, attributes):
    net = Builder(19, x=[1, 2, 5, 7])
    net.const("roi", np.zeros(0, np.float32))
    net.const("none", np.zeros(0, np.float32))
    net.const("scales", np.float32([1, 1, 1.5, 0.5]))
    net.const("sizes", np.array([1, 2, 8, 3]))
    net.const("some", np.array([8, 3]))
    net.add("Resize", inputs, "y", "resize", **attributes)
    model = net.model("y")
    found = Symbolic(model.graph).shape(model.graph.outputs[0])
    shape = run(model, x=array(1, 2, 5, 7))[0].shape
    assert found == shape
