"""Tensors and nodes that are called as a tool calls its own: the numbers are right, and names that were there stay."""

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import htp_export
from htp_export.model.regions import all_values
from tests.exporting import every
from tests.quantized import distance, results, tagged_graph

PRECISIONS = (
    "uint8",
    "int8",
    "u8s8",
    "int16",
    "int8-dynamic",
    "int8-weights",
    "int4",
    "fp16",
    "fp8",
    "fixed",
    "fixed:12.6",
    "mxint8",
)


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


FEED = {"x": drawn(1, 4, 6, 4)}

# What ONNX Runtime's quantizers, and these methods, make of a tensor, a weight `w` and a bias `b`.
_TAKEN = (
    "b0", "w_quantized", "w_scale", "w_zero_point", "x_scale", "w_DequantizeLinear_Output", "x_QuantizeLinear_Output",
    "x_QuantizeLinear", "x_DequantizeLinear_Output", "b_quantized", "b_quantized_scale", "x_ReduceMin", "x_ReduceMax",
    "x_ReduceMin_Reshape", "x_quantized", "w_Q4", "w_Q8", "w_scales", "w_zero_points", "w_transposed", "x_float16",
    "y_QuantizeLinear_Input", "w_dequantized", "w_rows", "w_2", "b_row", "b_float", "y_product", "p_output_quantized",
)  # fmt: skip


def model(taken: str, other: str) -> ir.Model:
    """Two products with one weight, one convolution with the bias, and two tensors that have such names."""
    text = f"""g (float[1,4,6,4] x) => (float[1,4,6,4] y) {{
        {taken} = Conv(x, k, b)
        {other} = Relu({taken})
        p = MatMul({other}, w)
        q = MatMul(p, w)
        y = Conv(q, k, b)
    }}"""
    return tagged_graph(
        text, 21, k=drawn(4, 4, 1, 1) * np.float32(0.5), b=drawn(4), w=drawn(4, 4) * np.float32(0.5)
    )


def names_in(model: ir.Model) -> list[str]:
    return [str(value.name) for value in all_values(model.graph)]


@pytest.mark.long
@pytest.mark.parametrize("taken", every(3, _TAKEN))
def test_numbers_are_right_and_names_are_unique_and_the_users(taken):
    given = model(taken, _TAKEN[_TAKEN.index(taken) - 1])
    for precision in PRECISIONS:
        result = htp_export.quantize(given, precision, data=FEED)
        found = results(result.model, FEED)[0]
        assert distance(found, results(given, FEED)[0]) < (0.4 if precision == "int4" else 0.1), (
            precision
        )
        names = names_in(result.model)
        assert len(set(names)) == len(names)
        assert not any("htp_export" in name for name in names)
        assert not any("htp_export/" in str(node.name) for node in result.model.graph)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_nodes_that_are_called_as_a_tool_calls_its_own(precision):
    given = model("a", "r")
    for node, name in zip(
        given.graph, ("x_QuantizeLinear", "w_DequantizeLinear", "q_quant", "p", "p_Q4"), strict=True
    ):
        node.name = name
    result = htp_export.quantize(given, precision, data=FEED)
    limit = 0.4 if precision == "int4" else 0.1
    assert distance(results(result.model, FEED)[0], results(given, FEED)[0]) < limit
    names = [node.name for node in result.model.graph if node.name]
    assert len(set(names)) == len(names)
    kept = {node.name for node in result.model.graph if node.op_type in ("Conv", "Relu")}
    assert kept <= {node.name for node in given.graph} or precision == "int8-dynamic"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_recipes_name_parameters(precision):
    """They are found by the names that weights have in the model."""
    from htp_export.format.recipes import parameters_in
    from htp_export.model.recipes import recipe_of

    result: Any = htp_export.quantize(model("a", "r"), precision, data=FEED)
    recipes = [recipe_of(value) for value in result.model.graph.initializers.values()]
    assert {name for recipe in recipes for name in parameters_in(recipe)} <= {"k", "b", "w"}


def test_names_without_collisions_are_those_of_the_tool():
    result = htp_export.quantize(model("a", "r"), "u8s8", data=FEED)
    assert {"w_quantized", "w_scale", "x_QuantizeLinear_Output", "b_quantized"} <= set(
        names_in(result.model)
    )
