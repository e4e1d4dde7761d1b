"""Attention as one operation, and in steps: the operations that can be fused."""

import numpy as np
import pytest
import torch
from torch import nn

import htp_export
from htp_export.costs.memory import fusible_traffic
from tests.graphs import tagged
from tests.nets import spread


class EncoderBlock(nn.Module):
    """A block as torchvision's ViT has it (BSD-3-Clause): attention and MLP, normalized before."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.ln_1(x)
        y, _ = self.self_attention(y, y, y, need_weights=False)
        y = y + x
        return y + self.mlp(self.ln_2(y))


class Vision(nn.Module):
    """ViT in torchvision's layout."""

    def __init__(self, image: int, patch: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        tokens = (image // patch) ** 2 + 1
        self.conv_proj = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, tokens, width))
        self.layers = nn.Sequential(*(EncoderBlock(width, heads) for _ in range(layers)))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv_proj(x).flatten(2).permute(0, 2, 1)
        token = self.class_token.expand(x.size(0), -1, -1)
        x = torch.cat([token, x], 1) + self.positions
        return self.head(self.ln(self.layers(x))[:, 0])


@pytest.mark.torch
def test_attention_as_one_operation_is_counted_as_torch_fx_counts_it():
    layers = 2
    model = spread(Vision(32, 16, 8, 2, layers)).eval()
    report = htp_export.attention_report(model, (torch.randn(1, 3, 32, 32),))
    assert report.modules == tuple(f"layers.{k}.self_attention" for k in range(layers))
    # in torch.fx, modules of torch.nn are leaves; it has nodes for outputs of attention and sizes, too
    graph = torch.fx.symbolic_trace(model).graph
    calls = [node for node in graph.nodes if node.op.startswith("call_")]
    attention = [node for node in calls if str(node.target).endswith("self_attention")]
    outputs = [node for node in calls if node.args and node.args[0] in attention]
    sizes = [node for node in calls if node.target == "size"]
    independent = len(calls) - len(outputs) - len(sizes)
    assert (report.opaque.operations, report.opaque.attention_operations) == (
        independent,
        len(attention),
    )
    assert report.exposed.operations == report.after["model"].operations
    # 17 operations instead of one in each module
    assert report.exposed.operations - report.opaque.operations == layers * 17
    assert report.exposed.attention_operations == layers * 18
    assert "from 2 to 36 (x 18.0)" in str(report)


@pytest.mark.torch
def test_steps_of_attention_can_be_fused_where_one_operation_cannot():
    model = spread(Vision(32, 16, 8, 2, 1)).eval()
    report = htp_export.attention_report(model, (torch.randn(1, 3, 32, 32),))
    assert report.exposed.fusible_bytes > report.opaque.fusible_bytes
    assert report.opaque.memory_reduction < report.exposed.memory_reduction
    program = htp_export.export(model, (torch.randn(1, 3, 32, 32),), verbose=False)
    assert report.opaque.traffic_bytes == htp_export.cost(program).modules[""].traffic_bytes


def test_an_operator_of_the_shape_of_its_input_is_fused_if_nothing_else_reads_it():
    body = "[a] h = MatMul (x, w) [a] r = Relu (h) [b] s = Exp (r) [b] t = Add (s, r) [b] y = MatMul (t, w)"
    model = tagged(f"(float[4, 4] x) => (float y) {{ {body} }}", w=np.ones((4, 4), np.float32))
    matrix = 4 * 16
    # Relu after MatMul, and Add after Exp; r has two consumers, and a product is not pointwise
    assert fusible_traffic(model) == (13 * matrix, 2 * 2 * matrix)
    assert fusible_traffic(model, ["a"]) == (13 * matrix, 2 * matrix)
