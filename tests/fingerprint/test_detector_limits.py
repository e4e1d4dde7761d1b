"""How far the detectors of `fingerprint` look: each limit, just inside of it and just beyond."""

from __future__ import annotations

import itertools

import onnx
import onnx.parser
import pytest

from htp_export import load
from htp_export.capabilities.fingerprint.detectors import inputs, recurrence, routing, timestep
from htp_export.capabilities.fingerprint.detectors.features import GraphFeatures
from htp_export.model.graph_facts import GraphFacts


def features(text: str) -> GraphFeatures:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20]>\n{text}')
    return GraphFeatures.of(GraphFacts(load(onnx.shape_inference.infer_shapes(model))))


def chain(op: str, first: str, last: str, count: int) -> str:
    """`count` nodes from one value to another; with none, the two are one value."""
    names = [first, *(f"{last}_{k}" for k in range(count - 1)), last]
    return "\n".join(f"{after} = {op}({before})" for before, after in itertools.pairwise(names))


def around(limit: int) -> list[tuple[int, bool]]:
    return [(limit, True), (limit + 1, False)]


WEIGHT = "float[4, 6] w = {" + ", ".join(f"0.{k + 1}" for k in range(24)) + "}"


@pytest.mark.parametrize(("nodes", "expected"), around(routing._GATE_NODES))
def test_a_router_has_so_many_nodes_between_its_linear_layer_and_its_selection(nodes, expected):
    graph = features(f"""net (float[3, 4] x, int64[6] table) => (int64[3, 2] y) <{WEIGHT}, int64[1] k = {{2}}> {{
        logits = MatMul(x, w)
        {chain("Softmax", "logits", "scores", nodes)}
        best, chosen = TopK(scores, k)
        y = Gather(table, chosen)
    }}""")
    assert bool(graph.routers) is expected


@pytest.mark.parametrize(("steps", "expected"), around(routing._PICK_STEPS))
def test_selected_indices_are_followed_for_so_many_steps(steps, expected):
    graph = features(f"""net (float[3, 4] x, int64[6] table) => (int64[3, 2] y) <{WEIGHT}, int64[1] k = {{2}}> {{
        logits = MatMul(x, w)
        best, chosen = TopK(logits, k)
        {chain("Identity", "chosen", "index", steps - 1)}
        y = Gather(table, index)
    }}""")
    assert bool(graph.routers) is expected


@pytest.mark.parametrize(("width", "expected"), around(routing._MOST_EXPERTS))
def test_a_linear_layer_up_to_a_width_is_a_router(width, expected):
    weight = f"float[1, {width}] w = {{{', '.join(['0.5'] * width)}}}"
    graph = features(f"""net (float[3, 1] x, int64[4096] table) => (int64[3, 2] y) <{weight}, int64[1] k = {{2}}> {{
        logits = MatMul(x, w)
        best, chosen = TopK(logits, k)
        y = Gather(table, chosen)
    }}""")
    assert bool(graph.routers) is expected


@pytest.mark.parametrize(("steps", "expected"), around(timestep._STEPS_TO_WAVES))
def test_sines_and_cosines_are_found_within_so_many_steps(steps, expected):
    graph = features(f"""net (float[2, 1] t) => (float[2, 6] y) <float[2, 6] w = {{{", ".join(["0.5"] * 12)}}}> {{
        {chain("Identity", "t", "angle", steps - 1)}
        sines = Sin(angle)
        cosines = Cos(angle)
        waves = Concat<axis = 1>(sines, cosines)
        y = MatMul(waves, w)
    }}""")
    assert bool(graph.timesteps) is expected


@pytest.mark.parametrize(("steps", "expected"), around(timestep._STEPS_TO_LAYER))
def test_sines_and_cosines_enter_a_layer_within_so_many_steps(steps, expected):
    graph = features(f"""net (float[2, 1] t) => (float[2, 6] y) <float[2, 6] w = {{{", ".join(["0.5"] * 12)}}}> {{
        sines = Sin(t)
        cosines = Cos(t)
        waves = Concat<axis = 1>(sines, cosines)
        {chain("Identity", "waves", "embedding", steps - 2)}
        y = MatMul(embedding, w)
    }}""")
    assert bool(graph.timesteps) is expected


@pytest.mark.parametrize(("values", "expected"), around(inputs._NEAREST_VALUES))
def test_an_input_is_classified_by_so_many_values(values, expected):
    table = "float[4, 6] w = {" + ", ".join(["0.5"] * 24) + "}"
    graph = features(f"""net (int64[2, 3] ids) => (float[2, 3, 6] y) <{table}> {{
        {chain("Identity", "ids", "index", values - 1)}
        y = Gather(w, index)
    }}""")
    assert [each.kind for each in graph.inputs.all] == ["tokens" if expected else "control"]


def recurrent(steps: int, between: int) -> GraphFeatures:
    """A state that takes a slice of the input in each step, some nodes behind the slice."""
    lines, state = [], "start"
    for k in range(steps):
        lines += [f"at_{k} = Constant<value_int = {k}>()", f"slice_{k} = Gather<axis = 0>(x, at_{k})"]
        lines.append(chain("Identity", f"slice_{k}", f"entry_{k}", between))
        lines += [f"sum_{k} = Add(entry_{k}, {state})", f"tanh_{k} = Tanh(sum_{k})", f"state_{k} = Sigmoid(tanh_{k})"]
        state = f"state_{k}"
    deep = chain("Neg", "h", "start", 30)
    return features(f"""net (float[{steps}, 4] x, float[4] h) => (float[4] {state}) {{
        {deep}
        {chr(10).join(lines)}
    }}""")


@pytest.mark.parametrize(("between", "expected"), around(recurrence._ENTRY_NODES))
def test_a_slice_meets_the_state_of_an_unrolled_loop_behind_so_many_nodes(between, expected):
    assert recurrent(5, between).unrolled_loops == ([5] if expected else [])


@pytest.mark.parametrize(("steps", "expected"), [(recurrence._SHORTEST - 1, False), (recurrence._SHORTEST, True)])
def test_an_unrolled_loop_has_at_least_so_many_steps(steps, expected):
    assert recurrent(steps, 1).unrolled_loops == ([steps] if expected else [])
