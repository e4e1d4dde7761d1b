"""What `info` says of a file, and which commands it names."""

import dataclasses
import shutil
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch

import htp_export
from tests.all_commands import example
from tests.nets import composed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A net, tagged with its weights beside it, with open sizes, as torch writes it, bare, and quantized."""
    folder, (net, (x,)) = tmp_path_factory.mktemp("info"), example()
    htp_export.export(net, (x,), folder / "net.onnx", verbose=False)
    htp_export.load(folder / "net.onnx").save(
        folder / "external.onnx", external_data="external.data"
    )
    shapes = {"x": {0: torch.export.Dim("batch"), 1: 32}}
    htp_export.export(net, (x,), folder / "open.onnx", dynamic_shapes=shapes, verbose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (x,), folder / "torch.onnx", dynamo=True, verbose=False)
    htp_export.quantize(folder / "net.onnx", {"first": "int8-dynamic"}, folder / "int8.onnx")
    htp_export.functions(folder / "net.onnx", "first", folder / "nested.onnx")
    bare = onnx.load(folder / "net.onnx")
    del bare.metadata_props[:]
    for number, node in enumerate(bare.graph.node):
        del node.metadata_props[:]
        node.name = f"n{number}"
    onnx.save(bare, folder / "bare.onnx")
    return folder


def steps(found: htp_export.results.Info) -> set[str]:
    """The commands that are named, without their arguments."""
    return {command.split()[1] for command in found.next}


def test_a_tagged_file_is_described_whole(folder):
    found = htp_export.info(folder / "net.onnx")
    assert [
        (each.name, each.role, each.type, each.shape) for each in (*found.inputs, *found.outputs)
    ] == [
        ("x", "input", "float32", (2, 32)),
        (found.outputs[0].name, "output", "float32", (2, 3)),
    ]
    model = onnx.load(folder / "net.onnx", load_external_data=False)
    assert (found.opsets, found.ir_version) == (
        {"ai.onnx": model.opset_import[0].version},
        model.ir_version,
    )
    assert found.producer == f"{model.producer_name} {model.producer_version}"
    assert (found.exporter, found.format, found.nodes, found.modules) == ("dynamo", "1", 3, 4)
    elements = 32 * 32 + 32 + 3 * 32 + 3
    assert (found.elements, found.weights) == (elements, {"float32": 4 * elements})
    assert found.file_bytes == (folder / "net.onnx").stat().st_size
    assert (found.tags.source, found.tags.untagged, found.notes) == ("htp", 0, ())
    assert found.family == htp_export.fingerprint(folder / "net.onnx").family
    assert steps(found) == {"tree", "optimize", "view"}


@pytest.mark.parametrize(
    ("file", "named", "example"),
    [
        ("open.onnx", {"tree", "cost", "optimize", "view"}, "htp-export cost open.onnx --dims batch=1"),
        ("torch.onnx", {"carry", "tree", "view"}, "htp-export carry MODEL torch.onnx -o tagged.onnx"),
        ("bare.onnx", {"carry", "view"}, "htp-export carry MODEL bare.onnx -o tagged.onnx"),
        ("int8.onnx", {"tree", "compare", "optimize", "view"}, "htp-export compare ORIGINAL int8.onnx"),
        ("nested.onnx", {"tree", "functions", "optimize", "view"},
         "htp-export functions nested.onnx --undo -o flat.onnx"),
    ],
)  # fmt: skip
def test_the_next_commands_fit_the_file(folder, monkeypatch, file, named, example):
    monkeypatch.chdir(folder)
    found = htp_export.info(file)
    assert steps(found) == named
    assert example in found.next


def test_tags_that_a_tool_dropped_are_brought_back(folder, tmp_path):
    model = onnx.load(folder / "net.onnx")
    for node in model.graph.node:
        del node.metadata_props[:]
    found = htp_export.info(model)
    assert found.tags.lost
    assert next(iter(found.next)) == "htp-export carry BEFORE FILE -o tagged.onnx"
    assert found.file_bytes is None


def test_a_file_without_nodes_lost_no_tags(tmp_path):
    file = tmp_path / "weight.onnx"
    gives_its_weight = composed(
        lambda self, x: self.weight, weight=torch.nn.Parameter(torch.ones(3))
    ).eval()
    htp_export.export(gives_its_weight, (torch.ones(2),), file, verbose=False)
    found = htp_export.info(file)
    assert (found.tags.source, found.tags.lost) == ("htp", False)
    assert "carry" not in str(found)


def test_weights_beside_the_file_are_not_read_and_may_be_missing(folder, tmp_path, monkeypatch):
    shutil.copy(folder / "external.onnx", tmp_path / "external.onnx")
    whole, missing = (
        htp_export.info(folder / "external.onnx"),
        htp_export.info(tmp_path / "external.onnx"),
    )
    size = (folder / "external.data").stat().st_size
    assert (whole.data_files, missing.data_files) == (
        {"external.data": size},
        {"external.data": None},
    )
    assert whole.elements == missing.elements
    assert "external.data: is missing: it contains weights of" in missing.notes[0]
    assert steps(whole) - steps(missing) == {"optimize"}
    (tmp_path / "external.data").write_bytes(b"short")
    assert "is too short" in htp_export.info(tmp_path / "external.onnx").notes[0]

    def refuse(*_: object) -> None:
        raise AssertionError("a weight is read")

    monkeypatch.setattr(ir.ExternalTensor, "numpy", refuse)
    monkeypatch.setattr(ir.ExternalTensor, "tobytes", refuse)
    assert htp_export.info(folder / "external.onnx").weights == whole.weights


def test_values_that_are_no_tensors_and_sizes_that_have_no_name_are_said():
    kinds = [
        onnx.helper.make_tensor_sequence_value_info("s", onnx.TensorProto.FLOAT, None),
        onnx.helper.make_tensor_value_info("x", onnx.TensorProto.INT4, [None, 3]),
        onnx.helper.make_tensor_value_info("y", onnx.TensorProto.STRING, None),
        onnx.helper.make_tensor_value_info("z", onnx.TensorProto.BFLOAT16, []),
    ]
    graph = onnx.helper.make_graph([], "g", kinds, [])
    found = htp_export.info(onnx.helper.make_model(graph, ir_version=10))
    assert [(each.type, each.shape) for each in found.inputs] == [
        ("Sequence(Tensor(FLOAT))", None),
        ("int4", (None, 3)),
        ("string", None),
        ("bfloat16", ()),
    ]
    assert "? × 3" in str(found)  # noqa: RUF001 - "times"
    assert (found.family, found.producer, found.weights) == ("unknown", "", {})


def test_a_cache_by_layer_is_two_lines_and_sizes_made_of_others_are_not_asked_for():
    tensor, shape = onnx.TensorProto.FLOAT, ["batch", "past", 4]
    values = [
        onnx.helper.make_tensor_value_info(f"past.{k}.{what}", tensor, shape)
        for k in range(9)
        for what in "kv"
    ]
    mask = onnx.helper.make_tensor_value_info("mask", tensor, ["batch", "past + sequence"])
    found = htp_export.info(
        onnx.helper.make_model(onnx.helper.make_graph([], "g", [*values, mask], []), ir_version=10)
    )
    rows = [
        line.split("  ")[1].strip()
        for line in str(found).splitlines()
        if line.startswith("input  ")
    ]
    assert rows == ["past.0.k … past.8.k × 9", "past.0.v … past.8.v × 9", "mask"]  # noqa: RUF001 - "times"
    assert "batch × (past + sequence)" in str(found)  # noqa: RUF001
    assert "htp-export cost FILE --dims batch=1,past=1" in found.next
    assert len(found.inputs) == 19
    assert "... and 3 more" in str(dataclasses.replace(found, evidence=tuple("abcdefghi")))


def test_a_file_name_is_quoted_in_commands(folder, tmp_path, monkeypatch):
    shutil.copy(folder / "bare.onnx", tmp_path / "my net; rm.onnx")
    monkeypatch.chdir(tmp_path)
    assert "htp-export view 'my net; rm.onnx'" in htp_export.info("my net; rm.onnx").next


def test_initializers_of_any_type_are_counted():
    strings = ir.StringTensor([b"a", b"b"], shape=ir.Shape([2]), name="s")
    weights = [ir.tensor(np.zeros(3, np.float16), name="h"), strings]
    values = [
        ir.Value(name=each.name, const_value=each, type=ir.TensorType(each.dtype))
        for each in weights
    ]
    graph = ir.Graph([], [], nodes=[], initializers=values, opset_imports={"": 20}, name="g")
    found = htp_export.info(ir.Model(graph, ir_version=10))
    assert (found.elements, found.weights) == (5, {"float16": 6})
