"""Products of queries, keys and values as one, read by GroupQueryAttention: equal results, owners, and what stays."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import htp_export
from tests.graphs import Builder, array, ops, owners, passed, rewritten, same

WIDTHS = {"q": 64, "k": 32, "v": 32}  # four heads of 16 features, and two for keys and values
GIVEN = {"x": array(1, 3, 32), "past_k": array(1, 2, 5, 16, seed=1), "past_v": array(1, 2, 5, 16, seed=2)}
PASSES = ("pack_attention_inputs",) * 2  # it makes one product, and then lets the attention read it


def attention(read: str = "q k v", outputs: str = "y present_k present_v", bias: bool = False) -> ir.Model:
    """A layer of a decoder whose queries, keys and values are three linear layers."""
    net = Builder(20, x=[1, 3, 32], past_k=[1, 2, 5, 16], past_v=[1, 2, 5, 16])
    for seed, (name, width) in enumerate(WIDTHS.items()):
        net.const(f"w{name}", array(32, width, seed=seed))
        net.add("MatMul", f"x w{name}", f"m{name}" if bias else name, f"attention.{name}")
        if bias:
            net.const(f"b{name}", array(width, seed=seed))
            net.add("Add", f"m{name} b{name}", name, f"attention.{name}")
    add_attention(net, read)
    return net.model(outputs, {f"attention.{name}": (["x"], [name]) for name in WIDTHS})


def add_attention(net: Builder, read: str) -> None:
    net.const("last", np.array([7], np.int32))
    net.const("total", np.array([8], np.int32))
    heads: dict[str, Any] = {"num_heads": 4, "kv_num_heads": 2}
    inputs = f"{read} past_k past_v last total"
    net.add("GroupQueryAttention", inputs, "y present_k present_v", "attention", "com.microsoft", **heads)


@pytest.mark.parametrize("bias", [False, True])
def test_one_product_of_all_three_is_read_as_it_is(bias: bool) -> None:
    model = attention(bias=bias)
    changed, books = passed(model, *PASSES)
    assert ops(changed) == ["MatMul", *["Add"] * bias, "GroupQueryAttention"]
    assert same(model, changed, 1e-5, **GIVEN)
    projections = tuple(f"attention.{name}" for name in WIDTHS)
    assert set(projections) <= set(owners(changed)[str(changed.graph[0].outputs[0].name)])
    assert {books.hierarchy[path].fate for path in projections} == {"fused"}
    assert changed.graph.initializers["q_joint_weight"].shape == (32, 128)


def test_weights_in_few_bits_are_packed_block_by_block() -> None:
    plan = {".": {"precision": "int4", "accuracy_level": 4}}
    quantized = htp_export.quantize(attention(), plan).model
    assert ops(quantized).count("MatMulNBits") == 3
    changed = rewritten(quantized, *PASSES, tolerance=1e-5, **GIVEN)
    assert ops(changed) == ["MatMulNBits", "GroupQueryAttention"]
    joint = changed.graph[0]
    assert (joint.attributes["N"].as_int(), joint.attributes["accuracy_level"].as_int()) == (128, 4)


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_projections_that_are_normalized_are_parts_of_one_product(precision: str) -> None:
    """As in Qwen3, whose queries and keys are normalized head by head, and OLMo 2, where they are as a whole."""
    net = Builder(20, x=[1, 3, 32], past_k=[1, 2, 5, 16], past_v=[1, 2, 5, 16])
    for seed, (name, width) in enumerate(WIDTHS.items()):
        net.const(f"w{name}", array(32, width, seed=seed))
        net.add("MatMul", f"x w{name}", f"m{name}", f"attention.{name}")
    net.const("heads", np.array([1, 3, 4, 16], np.int64))
    net.const("whole", np.array([1, 3, 64], np.int64))
    net.const("scale_q", array(16, seed=3))
    net.const("scale_k", array(32, seed=4))
    net.add("Reshape", "mq heads", "hq", "attention")
    net.add("SimplifiedLayerNormalization", "hq scale_q", "nq", "attention.q_norm", axis=-1)
    net.add("Reshape", "nq whole", "q", "attention")
    net.add("SimplifiedLayerNormalization", "mk scale_k", "k", "attention.k_norm", axis=-1)
    add_attention(net, "q k mv")
    model = net.model("y present_k present_v", {f"attention.{name}": (["x"], [f"m{name}"]) for name in WIDTHS})
    model = htp_export.quantize(model, {"**": precision}).model if precision != "fp32" else model
    changed = rewritten(model, *PASSES, tolerance=1e-5, **GIVEN)
    assert [op for op in ops(changed) if op != "Reshape"] == [
        "MatMul" if precision == "fp32" else "MatMulNBits",
        "Split",
        *["SimplifiedLayerNormalization"] * 2,
        "GroupQueryAttention",
    ]
    assert {value.name for value in changed.graph[1].outputs} == {"mq", "mk", "mv"}


@pytest.mark.parametrize("plan", [{"**.q": "int4"}, {".": "int4", "**.k": {"precision": "int4", "accuracy_level": 0}}])
def test_weights_of_other_precisions_stay_apart(plan: dict[str, Any]) -> None:
    quantized = htp_export.quantize(attention(), plan).model
    assert ops(rewritten(quantized, *PASSES, tolerance=1e-5, **GIVEN)) == ops(quantized)


@pytest.mark.parametrize(
    "changes", [{"outputs": "y present_k present_v q"}, {"read": "q v k"}], ids=["q read", "order"]
)
def test_columns_stand_in_the_order_of_the_inputs_and_can_be_read_elsewhere(changes: dict[str, str]) -> None:
    changed = rewritten(attention(**changes), *PASSES, tolerance=1e-5, **GIVEN)
    assert ops(changed).count("MatMul") == 1


def test_layers_stay_exact_where_no_operator_of_onnx_runtime_may_be_made() -> None:
    """The file has the attention already; ``tolerant`` is no leave to make its projections inexact."""
    result = htp_export.optimize(attention(), level="tolerant")
    assert ops(result.model) == ops(attention())
    assert result.fused == {}
    result = htp_export.optimize(attention(bias=True), level="tolerant")
    assert ops(result.model) == ["MatMul", "Add", *["Slice"] * 3, "GroupQueryAttention"]
    assert result.fused == {}


def test_parts_of_one_product_need_no_split() -> None:
    """As in models whose projection is one layer, such as GPT-2 and Phi-3."""
    net = Builder(20, x=[1, 3, 32], past_k=[1, 2, 5, 16], past_v=[1, 2, 5, 16])
    net.const("w", array(32, 128))
    net.const("sizes", np.array([64, 32, 32], np.int64))
    net.add("MatMul", "x w", "all", "attention.qkv")
    net.add("Split", "all sizes", "q k v", "attention", axis=-1)
    add_attention(net, "q k v")
    changed = rewritten(net.model("y present_k present_v"), "pack_attention_inputs", tolerance=1e-6, **GIVEN)
    assert ops(changed) == ["MatMul", "GroupQueryAttention"]


def test_parts_in_another_order_stay() -> None:
    net = Builder(20, x=[1, 3, 32], past_k=[1, 2, 5, 16], past_v=[1, 2, 5, 16])
    net.const("w", array(32, 128))
    net.const("sizes", np.array([64, 32, 32], np.int64))
    net.add("MatMul", "x w", "all", "attention.qkv")
    net.add("Split", "all sizes", "q v k", "attention", axis=-1)
    add_attention(net, "q k v")
    assert ops(passed(net.model("y"), "pack_attention_inputs")[0]) == ["MatMul", "Split", "GroupQueryAttention"]
