"""Models that somebody rewrites after `torch.onnx.export` has returned, while tags are wanted."""

import gc
import json
import weakref
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch

import htp_export
from htp_export.errors import CaptureError, UntaggedExportWarning
from htp_export.exporter.capture.dynamo import DynamoCapture
from tests.exporting import metadata
from tests.nets import NETS
from tests.truth import nodes_of, owners_of, tree_of, untagged


def exported(name: str = "siblings") -> ir.Model:
    model, kwargs = NETS[name].build()
    program = torch.onnx.export(model, (), kwargs=kwargs, dynamo=True, verbose=False)
    assert program is not None
    return program.model


def fuse(model: ir.Model, first: str = "Gemm", second: str = "Tanh") -> ir.Node:
    """Make one node of the last node of a type and the one that reads it, as a library does that knows no tags."""
    [after] = [node for node in model.graph if node.op_type == second]
    before = after.inputs[0].producer()
    assert before.op_type == first
    fused = ir.node(f"{first}{second}", before.inputs, domain="my.domain")
    model.opset_imports["my.domain"] = 1
    model.graph.insert_after(after, fused)
    fused.outputs[0].shape, fused.outputs[0].type = after.outputs[0].shape, after.outputs[0].type
    after.outputs[0].replace_all_uses_with(fused.outputs[0], replace_graph_outputs=True)
    model.graph.remove([after, before], safe=True)
    return fused


def fused_while_tagging(
    models: list[ir.Model], error: Exception | None = None, *, strict: bool = True
) -> None:
    with htp_export.tagging(strict=strict):
        models.append(exported())
        fuse(models[-1])
        if error is not None:
            raise error


def said_of(file: onnx.ModelProto) -> dict[str, Any]:
    return {
        entry.key: json.loads(entry.value)
        for entry in file.metadata_props
        if entry.value[:1] in "[{"
    }


def check_fused(file: onnx.ModelProto) -> None:
    [node] = [node for node in nodes_of(file) if node.op_type == "GemmTanh"]
    assert owners_of(node) == ("", "second")
    assert metadata(node)["htp.reason"] == "fused"
    assert untagged(file) == []
    tree = tree_of(file)
    assert {path: entry["fate"] for path, entry in tree.items()} == {
        "": "computed",
        "first": "computed",
        "second": "fused",
    }
    assert said_of(file)["htp.signatures"]["second"] == [[{"input": "x"}, [None]]]


def test_a_node_that_somebody_fuses_has_the_owners_of_what_it_replaces(tmp_path):
    with htp_export.tagging():
        model = exported()
        fuse(model)
        ir.save(model, tmp_path / "inside.onnx")
        proto = ir.to_proto(model)
    ir.save(model, tmp_path / "later.onnx")
    assert isinstance(proto, onnx.ModelProto)
    for file in (onnx.load(tmp_path / "inside.onnx"), onnx.load(tmp_path / "later.onnx"), proto):
        check_fused(file)


def test_names_that_somebody_gives_are_those_of_the_signatures():
    with htp_export.tagging():
        model = exported()
        model.graph.outputs[0].name = "product"
    assert json.loads(model.metadata_props["htp.signatures"])[""] == [[{"x": "x"}, ["product"]]]


def test_a_model_that_nobody_rewrites_keeps_its_tags():
    with htp_export.tagging():
        model = exported("called_twice")
        tags = [dict(node.metadata_props) for node in model.graph.all_nodes()]
        other = exported()
        fuse(other)
    assert [dict(node.metadata_props) for node in model.graph.all_nodes()] == tags
    check_fused(ir.to_proto(other))


def test_nodes_of_branches_keep_their_owners_when_a_node_outside_is_replaced():
    with htp_export.tagging():
        model = exported("cond")
        tags = [
            dict(node.metadata_props)
            for node in model.graph.all_nodes()
            if node.graph is not model.graph
        ]
        node = next(node for node in model.graph if node.op_type != "If")
        same = ir.node(node.op_type, node.inputs, dict(node.attributes), domain=node.domain)
        model.graph.insert_after(node, same)
        same.outputs[0].shape, same.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
        node.outputs[0].replace_all_uses_with(same.outputs[0], replace_graph_outputs=True)
        owner = node.metadata_props["htp.module"]
        model.graph.remove(node, safe=True)
    assert [
        dict(node.metadata_props)
        for node in model.graph.all_nodes()
        if node.graph is not model.graph
    ] == tags
    assert same.metadata_props["htp.module"] == owner


@pytest.mark.usefixtures("collecting_own")
def test_what_follows_a_model_goes_with_it():
    with htp_export.tagging():
        model = exported()
        assert model.meta
        gone = weakref.ref(next(iter(model.meta.values())))
        del model
        gc.collect()
        assert gone() is None
        model = exported()
    assert not model.meta
    assert not any("htp.stamp" in node.meta for node in model.graph)


def test_a_fault_while_a_rewriting_is_followed_is_an_error_or_leaves_no_tags(monkeypatch):
    def fails(*_: Any) -> None:
        raise ValueError("not so")

    monkeypatch.setattr(DynamoCapture, "replaced_later", fails)
    with pytest.raises(CaptureError, match="a model that is rewritten"):
        fused_while_tagging([])
    models: list[ir.Model] = []
    with pytest.warns(UntaggedExportWarning, match="not so"):
        fused_while_tagging(models, strict=False)
    file = ir.to_proto(models[0])
    assert len(untagged(file)) == len(nodes_of(file))
    assert "htp.version" not in said_of(file)


def test_an_error_of_the_user_is_not_hidden():
    error = RuntimeError("theirs")
    with pytest.raises(RuntimeError, match="theirs"):
        fused_while_tagging([], error)
