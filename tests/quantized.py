"""A small net for tests of quantization, and what holds of every quantized file."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from onnxruntime import GraphOptimizationLevel, InferenceSession, SessionOptions
from torch import nn

import htp_export
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.format.selectors import select_below
from tests.nets import spread
from tests.written import written as graph_of_text

IDS = np.arange(14, dtype=np.int64).reshape(2, 7)


class Net(nn.Module):
    """A table, products with and without bias, a norm, and a head: three and two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.first = nn.Linear(64, 48)
        self.act = nn.ReLU()
        self.norm = nn.LayerNorm(48)
        self.second = nn.Linear(48, 40, bias=False)
        self.head = nn.Linear(40, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.act(self.first(self.table(ids))))
        return self.head(self.second(x).mean(1))


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def written(
    model: nn.Module, inputs: tuple[Any, ...], file: Path, exporter: str, names: list[str]
) -> Path:
    options = {} if exporter == "dynamo" else {"input_names": names}
    htp_export.export(
        spread(model.eval()), inputs, file, dynamo=exporter == "dynamo", verbose=False, **options
    )
    return file


def node_bytes(model: onnx.ModelProto) -> dict[str, bytes]:
    """First output → a node with everything that it says."""
    for node in model.graph.node:
        # onnx_ir writes them in another order
        metadata = sorted(node.metadata_props, key=lambda entry: entry.key)
        del node.metadata_props[:]
        node.metadata_props.extend(metadata)
    return {node.output[0]: node.SerializeToString(deterministic=True) for node in model.graph.node}


def outside(file: Path, chosen: str) -> list[str]:
    """The first outputs of the nodes of which no owner is in the modules of a selector."""
    tagged = htp_export.load(file)
    inside = set(select_below(chosen, tagged.hierarchy.classes))
    return [
        str(node.outputs[0].name)
        for node in tagged.nodes
        if not inside.intersection(tagged.owners_of(node))
    ]


def assert_others_are_the_same(before: Path, after: Path, chosen: str) -> None:
    """The nodes outside of the chosen modules, their order and their weights are the same, bit for bit."""
    others = outside(before, chosen)
    old, new = onnx.load(before), onnx.load(after)
    was, now = node_bytes(old), node_bytes(new)
    assert [name for name in now if name in set(others)] == [
        name for name in was if name in set(others)
    ]
    assert {name: now[name] for name in others} == {name: was[name] for name in others}
    read = {name for node in old.graph.node if node.output[0] in set(others) for name in node.input}
    weights = {tensor.name: tensor for tensor in new.graph.initializer}
    for tensor in old.graph.initializer:
        if tensor.name in read:
            assert np.array_equal(
                onnx.numpy_helper.to_array(tensor), onnx.numpy_helper.to_array(weights[tensor.name])
            )
    assert [value.SerializeToString() for value in old.graph.output] == [
        value.SerializeToString() for value in new.graph.output
    ]


def assert_tagged(before: Path, after: Path, chosen: str) -> None:
    """Every node has an owner, and what was inserted belongs to the chosen modules."""
    tagged, original = htp_export.load(after), htp_export.load(before)
    assert not tagged.untagged
    inside = set(select_below(chosen, original.hierarchy.classes))
    known = {(node.op_type, node.outputs[0].name) for node in original.nodes}
    for node in tagged.nodes:
        if (node.op_type, node.outputs[0].name) not in known:
            assert set(tagged.owners_of(node)) <= inside, (
                node.op_type,
                node.name,
                tagged.owners_of(node),
            )


def assert_predicted(
    result: htp_export.results.Quantized, source: Path, plan: Any, **options: Any
) -> None:
    """A dry run says the bytes of each module before it is quantized."""
    predicted = htp_export.quantize(source, plan, dry_run=True, **options)
    sizes = [
        {path: each.bytes_after for path, each in made.modules.items()}
        for made in (result, predicted)
    ]
    assert sizes[0] == sizes[1]


def outputs(file: Path, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    return InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, feed)


def matrix_of(node: ir.Node) -> np.ndarray[Any, Any]:
    """What a ``MatMulNBits`` multiplies with, (outputs, inputs), bit by bit as its documentation says."""
    rows, columns, bits = (
        node.attributes["N"].as_int(),
        node.attributes["K"].as_int(),
        node.attributes["bits"].as_int(),
    )
    levels, scales, *points = (
        value.const_value.numpy().reshape(rows, -1) for value in node.inputs[1:]
    )

    def numbers(packed: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return packed if bits == 8 else np.stack([packed & 15, packed >> 4], -1).reshape(rows, -1)

    blocks = scales.shape[1]
    zeros = numbers(points[0])[:, :blocks, None] if points else np.full((1, 1, 1), 1 << (bits - 1))
    held = numbers(levels).reshape(rows, blocks, -1).astype(np.float32) - zeros.astype(np.float32)
    return (held * scales[..., None]).reshape(rows, -1)[:, :columns].copy()


def tagged_graph(text: str, opset: int = 17, /, **constants: Any) -> ir.Model:
    """The model of a graph in ONNX's text notation, in which each node is a module, named by its first output."""
    nodes = onnx.parser.parse_graph(text).node
    owners = {node.output[0]: node.output[0] for node in nodes}
    model = graph_of_text(
        text, opset, owners, **{name: _constant(array) for name, array in constants.items()}
    )
    for node in model.graph:
        node.metadata_props["htp.reason"] = "scope"
    modules = [ModuleInfo(path, "net.Module", 1, "computed") for path in sorted({"", *owners})]
    model.metadata_props.update({"htp.version": "1", "htp.modules": Hierarchy(modules).to_json()})
    return model


def results(model: Path | ir.Model, feed: dict[str, Any], *, optimized: bool = False) -> list[Any]:
    """The outputs of a model in ONNX Runtime, as it is written or with the default optimizations."""
    options = SessionOptions()
    options.log_severity_level = 4
    levels = GraphOptimizationLevel
    options.graph_optimization_level = (
        levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    )
    source = str(model) if isinstance(model, Path) else ir.to_proto(model).SerializeToString()
    return InferenceSession(source, options, providers=["CPUExecutionProvider"]).run(None, feed)


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, as a share of the largest number that is expected."""
    assert found.shape == expected.shape
    return float(
        np.abs(found - expected).max(initial=0) / max(np.abs(expected).max(initial=0), 1e-9)
    )


def _constant(array: Any) -> np.ndarray:
    """An array; of floats of Python, in 32 bits."""
    found = np.asarray(array)
    return found.astype(np.float32) if found.dtype == np.float64 else found
