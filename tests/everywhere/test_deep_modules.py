"""What is known of the modules of a deep tree takes memory for each module, not for each pair of them."""

import tracemalloc

import onnx_ir as ir
import pytest

import htp_export
from htp_export.format import tags
from htp_export.format.hierarchy import Hierarchy, ModuleInfo

LEVELS = 300


@pytest.fixture(scope="module")
def nested():
    """A model whose modules lie in one another, each with one node."""
    paths = ["", *(".".join(["a"] * level) for level in range(1, LEVELS))]
    called = tags.CalledModules(paths)
    value = start = ir.val("x", ir.DataType.FLOAT, [2])
    nodes = []
    for number, path in enumerate(paths):
        nodes.append(ir.node("Relu", [value], metadata_props=tags.node_tags([path], "scope", called)))
        value = nodes[-1].outputs[0]
        value.name, value.dtype, value.shape = f"v{number}", ir.DataType.FLOAT, ir.Shape([2])
    model = ir.Model(ir.Graph([start], [value], nodes=nodes, opset_imports={"": 20}, name="nested"), ir_version=10)
    tree = Hierarchy([ModuleInfo(path, "nets.Nested", 1, "computed") for path in paths])
    model.metadata_props.update({tags.FORMAT: "1", tags.MODULES: tree.to_json(), tags.CALLERS: "{}"})
    return model


def test_regions_of_nested_modules_take_memory_for_each_module(nested):
    """As sets and lists for each pair of modules: 6.5 MB."""
    tagged = htp_export.load(nested)
    for path in tagged:
        assert tagged.hierarchy.parent(path) is None or path  # the strings of the paths are there
    tracemalloc.start()
    try:
        sizes = [len(tagged[path].nodes) for path in tagged]
        crossing = [(len(tagged[path].inputs), len(tagged[path].outputs)) for path in tagged]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sizes == [*range(LEVELS, 0, -1)]
    assert crossing == [(1, 1)] * LEVELS
    assert peak < 2e6


def test_the_modules_around_each_node_are_known(nested):
    works = htp_export.load(nested).index.works
    for node, work in list(works.items())[:: LEVELS // 5]:
        assert work.modules == {*tags.ancestors(work.owners[0])}, node.name
