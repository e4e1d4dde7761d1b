"""How far `carry` looks: each limit, just inside of it and just beyond."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from htp_export.capabilities.carry import alignment, graph_summary, likenesses, origins
from htp_export.capabilities.carry.alignment import Alignment
from htp_export.capabilities.carry.graph_summary import summarize

HEADER = '<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1, "my.own": 1]>'


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_fused_node_is_followed_over_the_nodes_that_it_took_in(beyond: int) -> None:
    """A product and sums with further inputs, and one node that reads all of them and has the name of the product."""
    count = alignment._MOST_FOLLOWERS + beyond
    added = [f"r{k}" for k in range(count)]
    inputs = ", ".join(f"float[2, 2] {name}" for name in ("x", *added))
    sums = " ".join(f"h{k} = Add ({f'h{k - 1}' if k else 'm'}, {name})" for k, name in enumerate(added))
    weight = "<float[2, 2] w = {1, 2, 3, 4}>"
    before = ir.from_onnx_text(
        f"{HEADER} g ({inputs}) => (float[2, 2] y, float[2, 2] z) {weight} {{ m = MatMul (x, w) {sums} "
        f"q = Relu (h{count - 1}) y = Exp (q) z = Neg (q) }}"
    )
    after = ir.from_onnx_text(
        f"{HEADER} g ({inputs}) => (float[2, 2] y, float[2, 2] z) {weight} {{ "
        f"f = com.microsoft.FusedMatMul (x, w, {', '.join(added)}) y = my.own.A (f) z = my.own.B (f) }}"
    )
    before.graph[0].name = after.graph[0].name = "product"
    summaries = [summarize(each)[0] for each in (before, after)]
    aligned = Alignment(*summaries)
    fused = next(index for index, value in enumerate(summaries[1].values) if value.name == "f")
    number = aligned.counterpart[fused]
    names = [value.name for index, value in enumerate(summaries[0].values) if aligned.numbers.number[index] == number]
    assert names == ["m" if beyond else f"h{count - 1}"]


@pytest.mark.parametrize("fewer", [0, 1])
def test_tensors_are_told_apart_by_a_number_of_different_values(fewer: int) -> None:
    different = likenesses._FEWEST - fewer
    array = np.arange(1000, dtype=np.float32) % different
    assert likenesses.is_distinctive(array) == (not fewer)


def test_values_outside_of_the_sample_count_too() -> None:
    array = np.zeros(likenesses._PLACES * 4, dtype=np.float32)
    array[1:4] = 1, 2, 3
    assert likenesses.is_distinctive(array)


@pytest.mark.parametrize("beyond", [0, 1])
def test_constants_are_compared_by_their_values_up_to_a_size(beyond: int) -> None:
    numbers = np.zeros(graph_summary._SMALL_BYTES // 4 + beyond, np.float32)
    assert bool(graph_summary._content(ir.tensor(numbers))) == (not beyond)


def test_constants_of_many_plain_numbers_are_told_apart() -> None:
    texts = [f"c = Constant <value_ints = [{', '.join([str(k)] * 40)}]> ()" for k in (1, 2)]
    models = [ir.from_onnx_text(f"{HEADER} g () => (int64[40] y) {{ {text} y = Identity (c) }}") for text in texts]
    first, second = (summarize(each)[0].nodes[0].attributes for each in models)
    assert first != second


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_map_in_a_file_is_unfolded_up_to_a_size(monkeypatch: pytest.MonkeyPatch, beyond: int) -> None:
    relu = ir.from_onnx_text(f"{HEADER} g (float[2] x) => (float[2] y) {{ y = Relu (x) }}")
    text = origins.map_to_text(summarize(relu)[0])
    size = len(origins.zlib.decompress(origins.base64.b85decode(text)))
    monkeypatch.setattr(origins, "_LARGEST", size - beyond)
    if not beyond:
        assert [node.op for node in origins.text_to_map(text).nodes] == ["Relu"]
        return
    with pytest.raises(ValueError, match="it is too large"):
        origins.text_to_map(text)
