"""Heads of attention with one matrix for queries, keys and values, which `unbind` takes apart, as in timm's ViT, DeiT,
BEiT and Swin: what prune writes is what PyTorch computes with the same heads removed.
"""

from typing import Any

import onnx
import pytest
import torch
from torch import nn

import htp_export
from tests.exporting import BOTH
from tests.extract.test_cutting import run_file
from tests.nets import Holding, composed, spread, x
from tests.prune.test_prune_structured import TORCHSCRIPT, checked, export, keep

WIDTH, HEADS, SIZE, PLACES = 24, 4, 6, 9


class Fused(Holding, heads=HEADS, qkv=nn.Linear(WIDTH, 3 * WIDTH), proj=nn.Linear(WIDTH, WIDTH)):
    """The attention of ViT and DeiT; the attributes are those that subclasses and pruning change."""

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch, places, _ = x.shape
        return (
            self.projected(x)
            .reshape(batch, places, 3, self.heads, SIZE)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )

    def projected(self, x: torch.Tensor) -> torch.Tensor:
        return self.qkv(x)

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q * SIZE**-0.5) @ k.transpose(-2, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(x)
        mixed = self.scores(q, k).softmax(-1) @ v
        return self.proj(mixed.transpose(1, 2).reshape(x.shape[0], x.shape[1], self.heads * SIZE))

    def without(self, kept: list[int]) -> None:
        """Leave some heads."""
        rows = torch.tensor([h * SIZE + i for h in kept for i in range(SIZE)])
        keep(self.qkv, torch.cat([part * HEADS * SIZE + rows for part in range(3)]))
        self.proj.weight = nn.Parameter(self.proj.weight[:, rows])
        self.heads = len(kept)


class Scaled(Fused):
    """With torch's own attention, and norms of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.split(x)
        mixed = nn.functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.proj(mixed.transpose(1, 2).reshape(x.shape[0], x.shape[1], self.heads * SIZE))


class Relative(Fused):
    """A bias by relative position, looked up in a table with a column for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * PLACES - 1, HEADS))
        places = torch.arange(PLACES)
        self.register_buffer("index", places[:, None] - places[None, :] + PLACES - 1)

    def bias(self) -> torch.Tensor:
        return (
            self.table[self.index.view(-1)].view(PLACES, PLACES, -1).permute(2, 0, 1).contiguous()
        )

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return super().scores(q, k) + self.bias().unsqueeze(0)

    def without(self, kept: list[int]) -> None:
        super().without(kept)
        self.table = nn.Parameter(self.table[:, kept])


class Beit(Relative):
    """The bias of queries, keys and values put together of parts; keys have none."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.q_bias, self.v_bias = (
            nn.Parameter(torch.randn(WIDTH)),
            nn.Parameter(torch.randn(WIDTH)),
        )
        self.register_buffer("k_bias", torch.zeros(WIDTH))

    def projected(self, x: torch.Tensor) -> torch.Tensor:
        bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
        return nn.functional.linear(x, self.qkv.weight, bias)

    def without(self, kept: list[int]) -> None:
        super().without(kept)
        rows = torch.tensor([h * SIZE + i for h in kept for i in range(SIZE)])
        self.q_bias, self.v_bias = nn.Parameter(self.q_bias[rows]), nn.Parameter(self.v_bias[rows])
        self.k_bias = self.k_bias[rows]


class Swin(Relative):
    """A mask of windows, added between two reshapes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.randn(2, PLACES, PLACES))

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = super().scores(q, k)
        windows = scores.shape[0] // 2
        scores = scores.view(windows, 2, self.heads, PLACES, PLACES) + self.mask.unsqueeze(
            1
        ).unsqueeze(0)
        return scores.view(-1, self.heads, PLACES, PLACES)


class Batched(Fused):
    """The heads are in the batch, as in ``nn.MultiheadAttention``: the number of heads is a factor of an open size."""

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        shape = (q.shape[0] * self.heads, PLACES, SIZE)
        scores = super().scores(q.reshape(shape), k.reshape(shape))
        return scores.reshape(q.shape[0], self.heads, PLACES, PLACES)


def open_batch(exporter: str) -> dict[str, Any]:
    if exporter == "dynamo":
        return {"dynamic_shapes": {"x": {0: torch.export.Dim("batch", min=2) * 2}}}
    return {"input_names": ["x"], "dynamic_axes": {"x": {0: "batch"}}}


QUICK = ((Fused, False), (Swin, True), (Batched, True))


@TORCHSCRIPT
@pytest.mark.parametrize(
    ("attention", "is_open"),
    [
        pytest.param(kind, is_open, marks=() if (kind, is_open) in QUICK else pytest.mark.slow)
        for kind in (Fused, Scaled, Relative, Beit, Swin, Batched)
        for is_open in (False, True)
    ],
)
def test_heads_of_a_fused_projection_are_cut(attention, is_open, exporter, tmp_path):
    torch.manual_seed(0)
    parts = {"norm": nn.LayerNorm(WIDTH), "attention": attention(), "head": nn.Linear(WIDTH, 5)}
    model: Any = spread(
        composed(lambda self, x: self.head(x + self.attention(self.norm(x))), **parts)
    ).eval()
    kwargs = {"x": x(4 if is_open else 2, PLACES, WIDTH)}
    file = export(model, kwargs, exporter, tmp_path, **(open_batch(exporter) if is_open else {}))
    result = htp_export.prune(file, {"attention": "heads:0.5"}, tmp_path / "cut.onnx")
    sums = model.attention.qkv.weight.detach().abs().reshape(3, HEADS, -1).sum((0, 2))
    model.attention.without(sorted(sums.argsort()[HEADS // 2 :].tolist()))
    checked(model, kwargs, tmp_path / "cut.onnx")
    assert result.modules["attention"].sparsity == 0.5


@BOTH
def test_channels_are_cut_so_that_no_part_of_a_tensor_is_left_without_any(exporter, tmp_path):
    """Two halves of one matrix that never meet; one is much smaller than the other."""

    def halves(self: Any, x: torch.Tensor) -> torch.Tensor:
        both, size = self.both(x), self.first.in_features
        return torch.cat([self.first(both[..., :size]), self.second(both[..., size:])], -1)

    torch.manual_seed(0)
    net: Any = composed(halves, both=nn.Linear(5, 8), first=nn.Linear(4, 3), second=nn.Linear(4, 3))
    model, kwargs = spread(net).eval(), {"x": x(2, 3, 5)}
    with torch.no_grad():
        model.both.weight[:4] *= 0.01
    file = export(model, kwargs, exporter, tmp_path)
    htp_export.prune(file, {"both": "channels:0.5"}, tmp_path / "cut.onnx")
    norms = model.both.weight.detach().abs().mean(1)
    left = [int(norms[:4].argmax())], sorted(norms[4:].argsort()[1:].tolist())
    keep(model.both, torch.tensor([*left[0], *(4 + k for k in left[1])]))
    model.first.weight = nn.Parameter(model.first.weight[:, left[0]])
    model.first.in_features = 1
    model.second.weight = nn.Parameter(model.second.weight[:, left[1]])
    names = [value.name for value in onnx.load(file).graph.input]
    [found] = run_file(tmp_path / "cut.onnx", {names[0]: kwargs["x"].numpy()})
    assert torch.allclose(torch.tensor(found), model(**kwargs), atol=1e-5)


@TORCHSCRIPT
def test_projections_are_split_by_their_own_width_where_less_is_read(exporter, tmp_path):
    """`nn.MultiheadAttention` splits its projections by the width of its input."""
    parts = {
        "read": nn.Linear(5, 8),
        "attention": nn.MultiheadAttention(8, 2, batch_first=True),
        "head": nn.Linear(8, 3),
    }
    torch.manual_seed(0)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.read(x)
        return self.head(self.attention(x, x, x)[0])

    model: Any = spread(composed(forward, **parts)).eval()
    kwargs = {"x": x(4, 3, 5)}
    file = export(model, kwargs, exporter, tmp_path, **open_batch(exporter))
    htp_export.prune(file, {"read": "channels:0.5"}, tmp_path / "cut.onnx")
    with torch.no_grad():
        cut = model.read.weight.abs().mean(1).argsort()[:4]
        model.read.weight[cut], model.read.bias[cut] = 0, 0
    [found] = run_file(tmp_path / "cut.onnx", {"x": kwargs["x"].numpy()})
    assert torch.allclose(torch.tensor(found), model(**kwargs), atol=1e-5)
