"""How far `fingerprint` looks: each limit, just inside of it and just beyond."""

from __future__ import annotations

import itertools

import onnx.parser
import onnx.shape_inference
import pytest

import htp_export
from htp_export.capabilities.fingerprint import features


def family(text: str) -> str:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]>\n{text}')
    return htp_export.fingerprint(onnx.shape_inference.infer_shapes(model)).family


def chain(op: str, first: str, last: str, count: int) -> str:
    """`count` nodes from one value to another; with none, the two are one value."""
    names = [first, *(f"{last}_{k}" for k in range(count - 1)), last]
    return "\n".join(f"{after} = {op}({before})" for before, after in itertools.pairwise(names))


def around(limit: int) -> list[tuple[int, bool]]:
    return [(limit, True), (limit + 1, False)]


def tensor(name: str, *shape: int) -> str:
    count = shape[0] * shape[1]
    return f"float[{', '.join(map(str, shape))}] {name} = {{{', '.join(['0.5'] * count)}}}"


@pytest.mark.parametrize(("experts", "expected"), around(features._MOST_EXPERTS))
def test_a_linear_layer_up_to_a_width_is_a_router(experts, expected):
    found = family(f"""net (float[3, 1] x, int64[4096] table) => (int64[3, 2] y)
        <{tensor("w", 1, experts)}, int64[1] k = {{2}}> {{
        logits = MatMul(x, w)
        best, chosen = TopK(logits, k)
        y = Gather(table, chosen)
    }}""")
    assert (found == "mixture") is expected


@pytest.mark.parametrize(("values", "expected"), around(features._NEAREST))
def test_an_input_is_followed_for_so_many_values(values, expected):
    assert (
        family(f"""net (int64[2, 3] ids) => (float[2, 3, 6] y) <{tensor("w", 4, 6)}> {{
        {chain("Identity", "ids", "index", values - 1)}
        y = Gather(w, index)
    }}""")
        == "encoder"
    ) is expected


@pytest.mark.parametrize(
    ("before", "after", "expected"), [(79, 1, True), (80, 1, False), (1, 77, True), (1, 78, False)]
)
def test_a_time_step_is_followed_to_its_waves_and_these_to_a_layer(before, after, expected):
    assert (
        family(f"""net (float[2, 1] t) => (float[2, 6] y) <{tensor("w", 2, 6)}> {{
        {chain("Identity", "t", "angle", before)}
        sines = Sin(angle)
        cosines = Cos(angle)
        waves = Concat<axis = 1>(sines, cosines)
        {chain("Identity", "waves", "embedding", after)}
        y = MatMul(embedding, w)
    }}""")
        == "diffusion-like"
    ) is expected


@pytest.mark.parametrize(
    ("steps", "cell", "expected"),
    [(features._SHORTEST_LOOP - 1, 3, False), (features._SHORTEST_LOOP, 3, True), (features._SHORTEST_LOOP, 1, False)],
)
def test_an_unrolled_loop_has_so_many_steps_and_more_than_a_sum_in_each(steps, cell, expected):
    """A state that takes a slice of the input in each step."""
    lines, state = [], "h"
    for k in range(steps):
        lines += [f"at_{k} = Constant<value_int = {k}>()", f"slice_{k} = Gather<axis = 0>(x, at_{k})"]
        lines += [f"sum_{k} = Add(slice_{k}, {state})", chain("Tanh", f"sum_{k}", f"state_{k}", cell - 1)]
        state = f"state_{k}" if cell > 1 else f"sum_{k}"
    newline = "\n"
    text = f"net (float[{steps}, 4] x, float[4] h) => (float[4] {state}) {{ {newline.join(lines)} }}"
    assert (family(text) == "recurrent") is expected
