"""Whether two exported files are the same but for what `htp_export` adds."""

import re

import onnx

from tests.truth import nodes_of

OURS = {
    "htp.module",
    "htp.owners",
    "htp.call",
    "htp.calls",
    "htp.reason",
    "htp.source",
    "namespace",
}


def bare(file: onnx.ModelProto) -> onnx.ModelProto:
    """A file without what htp_export adds: torch's own namespace goes as well.

    And without the numbers of code that torch makes up for `torch.cond`: it counts on from export to export.
    """
    plain = onnx.ModelProto()
    plain.CopyFrom(file)
    for node in nodes_of(plain):
        for entry in node.metadata_props:
            entry.value = re.sub(r"<eval_with_key>\.\d+", "<eval_with_key>", entry.value)
        kept = [entry for entry in node.metadata_props if entry.key not in OURS]
        del node.metadata_props[:]
        node.metadata_props.extend(kept)
    for tensor in plain.graph.initializer:
        assert all(entry.key == "htp.recipe" for entry in tensor.metadata_props)
        del tensor.metadata_props[:]
    kept = [entry for entry in plain.metadata_props if not entry.key.startswith("htp.")]
    del plain.metadata_props[:]
    plain.metadata_props.extend(kept)
    plain.ClearField("ir_version")
    plain.graph.ClearField("name")
    return plain


def assert_same_graph(ours: onnx.ModelProto, torchs: onnx.ModelProto) -> None:
    """Part by part first, for a message that can be read; then every byte."""
    ours, torchs = bare(ours), bare(torchs)
    assert [node.name for node in ours.graph.node] == [node.name for node in torchs.graph.node]
    for one, other in zip(nodes_of(ours), nodes_of(torchs), strict=True):
        assert one == other
    for part in ("initializer", "input", "output", "value_info"):
        assert list(getattr(ours.graph, part)) == list(getattr(torchs.graph, part))
    assert list(ours.functions) == list(torchs.functions)
    assert list(ours.opset_import) == list(torchs.opset_import)
    assert ours.SerializeToString(deterministic=True) == torchs.SerializeToString(
        deterministic=True
    )


def difference(ours: onnx.ModelProto, torchs: onnx.ModelProto) -> str:
    """The first part in which two files differ; empty where they are the same."""
    ours, torchs = bare(ours), bare(torchs)
    if ours.SerializeToString(deterministic=True) == torchs.SerializeToString(deterministic=True):
        return ""
    one, other = nodes_of(ours), nodes_of(torchs)
    if len(one) != len(other):
        return f"{len(one)} nodes, and torch has {len(other)}"
    for mine, its in zip(one, other, strict=True):
        if mine != its:
            return f"node {its.name or its.op_type}"
    for part in ("initializer", "input", "output", "value_info"):
        if list(getattr(ours.graph, part)) != list(getattr(torchs.graph, part)):
            return part
    return "functions, opsets or metadata"
