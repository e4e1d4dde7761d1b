"""What other tools select by the names that `rename` gives, each by the tool's own rule."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import onnx
import pytest

import htp_export
from htp_export.format import tags
from tests.exporter.test_exactness import small
from tests.exporting import exported
from tests.nets import spread

LAYER = "encoder.layer.0"


@pytest.fixture(scope="module", params=["dynamo", pytest.param("torchscript", marks=pytest.mark.slow)])
def named(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of two layers whose nodes have names that are made of paths; its weights are in the file."""
    model, kwargs = small("bert")
    folder = tmp_path_factory.mktemp("bert")
    exported(spread(model).eval(), kwargs, request.param, folder, names="path")
    onnx.save(onnx.load(folder / "model.onnx"), folder / "named.onnx")
    return folder / "named.onnx"


def node_names(file: Path) -> list[str]:
    return [node.name for node in onnx.load(file, load_external_data=False).graph.node]


def inside(file: Path, path: str) -> set[str]:
    """The names of the nodes whose owners are all a module, or modules inside it."""
    tagged = htp_export.load(file)
    return {
        str(node.name) for node in tagged.nodes if all(tags.is_under(each, path) for each in tagged.owners_of(node))
    }


def netron(query: str, names: Iterable[str]) -> set[str]:
    """What Netron 9.3 lists: names with all words of a query, in any case; in quotes, the whole name.

    ``view.FindSidebar`` in ``view.js``.
    """
    if query.startswith('"'):
        return {name for name in names if name == query.strip('"')}
    return {name for name in names if all(word in name.lower() for word in query.lower().split())}


def olive(text: str, names: Iterable[str]) -> set[str]:
    """The nodes that one text of ``layer_annotations`` names in Olive 0.13.

    ``olive/passes/onnx/layer_annotation.py``.
    """
    return {name for name in names if text in name}


def test_one_pattern_of_each_tool_selects_exactly_one_layer(named: Path) -> None:
    names, expected = node_names(named), inside(named, LAYER)
    assert len(expected) > 20
    assert set(filter(re.compile(r"/encoder/layer\.0/").match, names)) == expected
    assert olive("/encoder/layer.0/", names) == expected
    assert netron("/encoder/layer.0/", names) == expected
    assert netron("layer.0/ softmax", names) == {"/encoder/layer.0/attention/self/Softmax"}
    assert netron('"/pooler/dense/Gemm"', names) == {"/pooler/dense/Gemm"}


def test_onnx_runtime_quantizes_all_but_the_nodes_of_a_layer(named: Path, tmp_path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    names = [name for name in node_names(named) if name.startswith("/encoder/layer.0/")]
    quantize_dynamic(named, tmp_path / "int8.onnx", nodes_to_exclude=names, op_types_to_quantize=["MatMul"])
    products = {name for name in node_names(tmp_path / "int8.onnx") if name.endswith("_quant")}
    excluded = {name for name in names if "/MatMul" in name}
    assert len(excluded) == 8  # four projections, two products of attention, two of the feed-forward part
    assert excluded <= set(node_names(tmp_path / "int8.onnx"))
    assert any(name.startswith("/encoder/layer.1/") for name in products)
    assert not any(name.startswith("/encoder/layer.0/") for name in products)


def test_names_of_what_onnx_runtime_quantized_still_tell_the_module(named: Path, tmp_path: Path) -> None:
    quantized = htp_export.tools.quantize_dynamic(named).model
    result = htp_export.rename(quantized)
    called = result.tagged.hierarchy.called
    for node in result.tagged.nodes:
        path = tags.common_ancestor(result.tagged.owners_of(node))
        assert str(node.name).rpartition("/")[0] == f"/{tags.namespace(path, called)}".rstrip("/")
    weights = [name for name in quantized.graph.initializers if name.endswith("weight_quantized")]
    assert weights
    assert set(weights) <= set(result.model.graph.initializers)


NNCF = """
import sys, logging, numpy as np, onnx, nncf
logging.disable(logging.INFO)
file, output = sys.argv[1:]
model = onnx.load(file)
feeds = {each.name: np.ones((2, 5), np.int64) for each in model.graph.input}
scope = nncf.IgnoredScope(patterns=[r"/encoder/layer\\.0/", r"/pooler/", r"/embeddings/"])
onnx.save(nncf.quantize(model, nncf.Dataset([feeds]), ignored_scope=scope), output)
"""


def test_nncf_leaves_a_layer_alone_whose_prefix_it_is_given(named: Path, tmp_path: Path) -> None:
    pytest.importorskip("nncf")
    output = tmp_path / "nncf.onnx"
    subprocess.run([sys.executable, "-c", NNCF, str(named), str(output)], check=True, capture_output=True)
    carried = htp_export.carry(named, output).tagged
    inserted = [node for node in carried.nodes if node.op_type == "QuantizeLinear"]
    owners = {owner for node in inserted for owner in carried.owners_of(node)}
    assert inserted
    assert any(tags.is_under(owner, "encoder.layer.1") for owner in owners)
    assert not any(tags.is_under(owner, path) for owner in owners for path in (LAYER, "pooler"))
