"""ONNX Runtime's quantizer searches all weights of its part for each product: a part has at most 100 of them."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

import htp_export
from htp_export.capabilities.quantize import ort_quantizers
from htp_export.format import tags

_PRODUCTS = 250


def _chain(file: Path) -> None:
    """A tagged file of products one after another, each with a weight of its own."""
    make = onnx.helper
    random = np.random.default_rng(0)
    names = [f"h{place}" for place in range(_PRODUCTS + 1)]
    nodes = []
    weights = []
    for place in range(_PRODUCTS):
        values = random.standard_normal((8, 8)).astype(np.float32) / 3
        weights.append(onnx.numpy_helper.from_array(values, f"w{place}"))
        read = [names[place], f"w{place}"]
        node = make.make_node("MatMul", read, [names[place + 1]], f"n{place}")
        make.set_metadata_props(node, tags.node_tags([""], "scope", {""}))
        nodes.append(node)
    shape = [2, 8]
    first = make.make_tensor_value_info(names[0], onnx.TensorProto.FLOAT, shape)
    last = make.make_tensor_value_info(names[-1], onnx.TensorProto.FLOAT, shape)
    graph = make.make_graph(nodes, "Net", [first], [last], weights)
    opset = make.make_opsetid("", 20)
    model = make.make_model(graph, opset_imports=[opset], ir_version=10)
    root = {"class": "Net", "calls": 1, "fate": "computed"}
    make.set_model_props(model, {tags.FORMAT: tags.VERSION, tags.MODULES: json.dumps({"": root})})
    onnx.save(model, file)


def test_weights_are_quantized_in_groups_of_a_hundred_into_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _chain(tmp_path / "net.onnx")
    sizes = []
    in_groups = ort_quantizers._groups

    def groups(nodes):
        found = in_groups(nodes)
        sizes.append([len(group) for group in found])
        return found

    monkeypatch.setattr(ort_quantizers, "_groups", groups)
    for limit, name in ((100, "groups"), (_PRODUCTS, "whole")):
        monkeypatch.setattr(ort_quantizers, "_GROUP_WEIGHTS", limit)
        htp_export.quantize(tmp_path / "net.onnx", "int8-weights", tmp_path / f"{name}.onnx")
    assert sizes == [[100, 100, 50], [_PRODUCTS]]
    in_parts, whole = (onnx.load(tmp_path / f"{name}.onnx") for name in ("groups", "whole"))
    assert in_parts.graph == whole.graph
