"""Attention as one operation, and in steps: the operations that can be fused."""

import numpy as np
import pytest
import torch

import htp_export
from htp_export.costs.memory import fusible_traffic
from tests.graphs import tagged
from tests.nets import spread
from tools import attention_table
from tools.compare_nets import Vision


@pytest.mark.torch
def test_attention_as_one_operation_is_counted_as_torch_fx_counts_it():
    layers = 2
    model = spread(Vision(32, 16, 8, 2, layers)).eval()
    report = htp_export.attention_report(model, (torch.randn(1, 3, 32, 32),))
    assert report.modules == tuple(f"layers.{k}.self_attention" for k in range(layers))
    counted = (report.opaque.operations, report.opaque.attention_operations)
    assert counted == attention_table.traced(model, "MultiheadAttention")
    assert counted[1] == layers
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


@pytest.mark.slow
def test_the_numbers_of_one_layer_and_of_two_give_those_of_three(monkeypatch):
    def build(layers: int):
        return Vision(32, 16, 8, 2, layers), {"x": torch.randn(1, 3, 32, 32)}

    monkeypatch.setitem(attention_table.MODELS, "small", ("MultiheadAttention", build))
    assert attention_table.extrapolated("small", 3) == attention_table.measured("small", 3)
