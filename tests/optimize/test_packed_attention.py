"""Products of queries, keys and values as one, read by GroupQueryAttention: equal results, owners, and what stays."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import htp_export
from htp_export.weights.rebuilding import rebuilt
from tests.graphs import Builder, array, ops, owners, passed, rewritten, same

WIDTHS = {"q": 64, "k": 32, "v": 32}  # four heads of 16 features, and two for keys and values
GIVEN = {
    "x": array(1, 3, 32),
    "past_k": array(1, 2, 5, 16, seed=1),
    "past_v": array(1, 2, 5, 16, seed=2),
}
PASSES = ("pack_attention_inputs",) * 2  # it makes one product, and then lets the attention read it


OUTPUTS = "y present_k present_v"


def decoder(**layers: str) -> Builder:
    """A layer of a decoder, whose input goes through linear layers: end of the name of a weight → their results."""
    net = Builder(20, x=[1, 3, 32], past_k=[1, 2, 5, 16], past_v=[1, 2, 5, 16])
    for seed, (name, result) in enumerate(layers.items()):
        net.const(f"w{name}", array(32, WIDTHS.get(name, 128), seed=seed))
        net.add("MatMul", f"x w{name}", result, f"attention.{name}")
    return net


def attended(net: Builder, read: str, outputs: str = OUTPUTS, given: str = "") -> ir.Model:
    """The model with attention to what is read; ``given`` is put before the names of the results of modules."""
    net.const("last", np.array([7], np.int32))
    net.const("total", np.array([8], np.int32))
    heads: dict[str, Any] = {"num_heads": 4, "kv_num_heads": 2}
    inputs = f"{read} past_k past_v last total"
    net.add("GroupQueryAttention", inputs, OUTPUTS, "attention", "com.microsoft", **heads)
    signatures = {
        f"attention.{name}": (["x"], [given + name]) for name in WIDTHS if f"w{name}" in net.values
    }
    return net.model(outputs, signatures)


def attention(read: str = "q k v", outputs: str = OUTPUTS, bias: bool = False) -> ir.Model:
    """Its queries, keys and values are three linear layers."""
    net = decoder(**{name: f"m{name}" if bias else name for name in WIDTHS})
    for seed, (name, width) in enumerate(WIDTHS.items() if bias else ()):
        net.const(f"b{name}", array(width, seed=seed))
        net.add("Add", f"m{name} b{name}", name, f"attention.{name}")
    return attended(net, read, outputs)


@pytest.mark.parametrize("bias", [False, True])
def test_one_product_of_all_three_is_read_as_it_is(bias):
    model = attention(bias=bias)
    changed, books = passed(model, *PASSES)
    assert ops(changed) == ["MatMul", *["Add"] * bias, "GroupQueryAttention"]
    assert same(model, changed, 1e-5, **GIVEN)
    projections = tuple(f"attention.{name}" for name in WIDTHS)
    assert set(projections) <= set(owners(changed)[str(changed.graph[0].outputs[0].name)])
    assert {books.hierarchy[path].fate for path in projections} == {"fused"}
    assert changed.graph.initializers["q_joint_weight"].shape == (32, 128)


def test_weights_in_few_bits_are_packed_block_by_block():
    plan = {".": {"precision": "int4", "accuracy_level": 4}}
    quantized = htp_export.quantize(attention(), plan).model
    assert ops(quantized).count("MatMulNBits") == 3
    changed = rewritten(quantized, *PASSES, tolerance=1e-5, **GIVEN)
    assert ops(changed) == ["MatMulNBits", "GroupQueryAttention"]
    joint = changed.graph[0]
    assert (joint.attributes["N"].as_int(), joint.attributes["accuracy_level"].as_int()) == (128, 4)
    weights = {
        name: value.const_value.numpy() for name, value in attention().graph.initializers.items()
    }
    remade = rebuilt(htp_export.load(changed), weights).tensors
    for value in joint.inputs[1:3]:
        np.testing.assert_array_equal(remade[value].numpy(), value.const_value.numpy())


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_projections_that_are_normalized_are_parts_of_one_product(precision):
    """As in Qwen3, whose queries and keys are normalized head by head, and OLMo 2, where they are as a whole."""
    net = decoder(**{name: f"m{name}" for name in WIDTHS})
    net.const("heads", np.array([1, 3, 4, 16], np.int64))
    net.const("whole", np.array([1, 3, 64], np.int64))
    net.const("scale_q", array(16, seed=3))
    net.const("scale_k", array(32, seed=4))
    net.add("Reshape", "mq heads", "hq", "attention")
    net.add("SimplifiedLayerNormalization", "hq scale_q", "nq", "attention.q_norm", axis=-1)
    net.add("Reshape", "nq whole", "q", "attention")
    net.add("SimplifiedLayerNormalization", "mk scale_k", "k", "attention.k_norm", axis=-1)
    model = attended(net, "q k mv", given="m")
    model = htp_export.quantize(model, {"**": precision}).model if precision != "fp32" else model
    changed = rewritten(model, *PASSES, tolerance=1e-5, **GIVEN)
    assert [op for op in ops(changed) if op != "Reshape"] == [
        "MatMul" if precision == "fp32" else "MatMulNBits",
        "Split",
        *["SimplifiedLayerNormalization"] * 2,
        "GroupQueryAttention",
    ]
    assert {value.name for value in changed.graph[1].outputs} == {"mq", "mk", "mv"}


@pytest.mark.parametrize(
    "plan", [{"**.q": "int4"}, {".": "int4", "**.k": {"precision": "int4", "accuracy_level": 0}}]
)
def test_weights_of_other_precisions_stay_apart(plan):
    quantized = htp_export.quantize(attention(), plan).model
    assert ops(rewritten(quantized, *PASSES, tolerance=1e-5, **GIVEN)) == ops(quantized)


@pytest.mark.parametrize(
    "changes", [{"outputs": f"{OUTPUTS} q"}, {"read": "q v k"}], ids=["q read", "order"]
)
def test_columns_stand_in_the_order_of_the_inputs_and_can_be_read_elsewhere(changes):
    changed = rewritten(attention(**changes), *PASSES, tolerance=1e-5, **GIVEN)
    assert ops(changed).count("MatMul") == 1


def test_layers_stay_exact_where_no_operator_of_onnx_runtime_may_be_made():
    """The file has the attention already; ``tolerant`` is no leave to make its projections inexact."""
    result = htp_export.optimize(attention(), level="tolerant")
    assert ops(result.model) == ops(attention())
    assert result.fused == {}
    result = htp_export.optimize(attention(bias=True), level="tolerant")
    assert ops(result.model) == ["MatMul", "Add", *["Slice"] * 3, "GroupQueryAttention"]
    assert result.fused == {}


@pytest.mark.parametrize(("parts", "left"), [("q k v", []), ("q v k", ["Split"])])
def test_parts_of_one_product_need_no_split_if_they_are_in_order(parts, left):
    """As in models whose projection is one layer, such as GPT-2 and Phi-3."""
    net = decoder(qkv="all")
    net.const("sizes", np.array([64, 32, 32], np.int64))
    net.add("Split", "all sizes", parts, "attention", axis=-1)
    changed = rewritten(attended(net, "q k v"), "pack_attention_inputs", tolerance=1e-6, **GIVEN)
    assert ops(changed) == ["MatMul", *left, "GroupQueryAttention"]
