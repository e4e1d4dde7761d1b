"""How far `carry` looks: each limit, just inside of it and just beyond."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from htp_export.capabilities.carry import likenesses, origins
from htp_export.capabilities.carry.graph_summary import summarize

HEADER = '<ir_version: 10, opset_import: ["": 20, "com.microsoft": 1, "my.own": 1]>'


def test_values_outside_of_the_sample_count_too() -> None:
    array = np.zeros(likenesses._PLACES * 4, dtype=np.float32)
    array[1:4] = 1, 2, 3
    assert likenesses.is_distinctive(array)


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
