"""Limits of the passes: just inside of each a pass changes the model, and just outside it leaves the model as it is."""

import numpy as np
import onnx_ir as ir
import pytest

import htp_export
from htp_export.capabilities.optimize import optimizing
from htp_export.capabilities.optimize.passes import merge_parallel_projections, merge_slices
from htp_export.shapes.symbolic import Symbolic
from tests.graphs import run, tagged

HEADER = '<ir_version: 10, opset_import: ["": 20]>'


def optimized(text: str, *passes: str) -> list[str]:
    model = ir.from_onnx_text(f"{HEADER} {text}")
    return [
        node.op_type
        for node in htp_export.optimize(model, passes=list(passes), level="tolerant").model.graph
    ]


def rolled(size: int, *bounds: tuple[int, int, int]) -> ir.Model:
    """Slices of a tensor of ``size`` numbers, joined."""
    names = [
        [f"i{number}".replace("-", "m") for number in (start, end, 0, step)]
        for start, end, step in bounds
    ]
    cuts = " ".join(f"part{k} = Slice (x, {', '.join(each)})" for k, each in enumerate(names))
    parts = ", ".join(f"part{k}" for k in range(len(bounds)))
    return tagged(
        f"(float[{size}] x) => (float y) {{ {cuts} y = Concat <axis = 0> ({parts}) }}", opset=20
    )


@pytest.mark.parametrize("beyond", [0, 1])
def test_slices_that_are_joined_are_one_gather_up_to_a_number_of_indices(beyond):
    size = merge_slices._MOST_INDICES + beyond
    result = htp_export.optimize(rolled(size, (1, size, 1), (0, 1, 1)), passes=["merge_slices"])
    joined = [node.op_type for node in result.model.graph][-1]
    assert joined == ("Concat" if beyond else "Gather")


@pytest.mark.parametrize(
    "part", [(-1, -20_000, -3), (-1, -40_000, -3), (-40_000, -50_000, -3), (5, 1, -2)]
)
def test_slices_backwards_take_what_onnxruntime_takes(part):
    size = 30_000
    before = rolled(size, part, (0, 5, 1))
    after = htp_export.optimize(before, passes=["merge_slices"]).model
    assert after.graph[-1].op_type == "Gather"
    one, other = (run(model, x=np.arange(size, dtype=np.float32))[0] for model in (before, after))
    np.testing.assert_array_equal(one, other)
    shapes = Symbolic(before.graph)
    assert [
        shapes.shape(value) for value in (before.graph[0].outputs[0], before.graph.outputs[0])
    ] == [
        (len(one) - 5,),
        one.shape,
    ]


@pytest.mark.parametrize(
    "count", [merge_parallel_projections._FEWEST - 1, merge_parallel_projections._FEWEST]
)
def test_parallel_projections_are_merged_from_a_number_on(count):
    weights = ", ".join(
        f"float[2, 2] w{k} = {{{k + 1}, 2, 3, 4}}, float[2] b{k} = {{{k}, 1}}" for k in range(count)
    )
    nodes = " ".join(f"p{k} = MatMul (x, w{k}) y{k} = Add (p{k}, b{k})" for k in range(count))
    outputs = ", ".join(f"float[3, 2] y{k}" for k in range(count))
    ops = optimized(
        f"g (float[3, 2] x) => ({outputs}) <{weights}> {{ {nodes} }}", "merge_parallel_projections"
    )
    assert ops.count("MatMul") == (1 if count == merge_parallel_projections._FEWEST else count)


@pytest.mark.parametrize("missing", [0, 1])
def test_passes_are_repeated_up_to_a_number_of_rounds(monkeypatch, missing):
    """Two passes of which the second makes work for the first: a round for each transposition that is left."""
    text = """g (float[2, 3] x) => (float[2, 3] y) {
        a = Transpose (x) b = Identity (a) c = Transpose (b) d = Identity (c) y = Relu (d) }"""
    monkeypatch.setattr(optimizing, "_MOST_ROUNDS", 2 - missing)
    ops = optimized(text, "eliminate_redundant_transposes", "eliminate_identity_ops")
    assert ops == (["Transpose", "Transpose", "Relu"] if missing else ["Relu"])
