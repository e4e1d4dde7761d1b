"""Weights in ``Constant`` nodes, as Paddle2ONNX writes them: they are found wherever initializers are."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import htp_export
from tests.exporting import every
from tests.lora.test_lora import adapter, factors
from tests.nets import EXPORTERS, Holding, spread

OWNED = ("htp.module", "htp.owners", "htp.reason", "htp.call", "namespace")


class Mixed(
    Holding,
    words=nn.Embedding(20, 16),
    conv=nn.Conv1d(16, 16, 3, padding=1),
    first=nn.Linear(16, 32),
    second=nn.Linear(32, 16),
    attention=nn.MultiheadAttention(16, 4, batch_first=True),
    rnn=nn.GRU(16, 8, batch_first=True),
    head=nn.Linear(8, 5),
):
    """Every kind of product with a weight."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y = self.conv(self.words(ids).transpose(1, 2)).transpose(1, 2)
        y = y + self.second(torch.relu(self.first(y)))
        y = y + self.attention(y, y, y)[0]
        result: torch.Tensor = self.head(self.rnn(y)[0])
        return result


def feed() -> dict[str, Any]:
    return {"ids": np.arange(14).reshape(2, 7) % 20}


def with_constants(file: Path, output: Path) -> None:
    """Write a model with a ``Constant`` node in the place of each initializer, which belongs to its first reader."""
    model = onnx.load(file)
    readers: dict[str, onnx.NodeProto] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, node)
    constants = []
    for tensor in model.graph.initializer:
        node = onnx.helper.make_node(
            "Constant", [], [tensor.name], name=f"constant/{tensor.name}", value=tensor
        )
        del node.attribute[0].t.metadata_props[:]
        for entry in readers[tensor.name].metadata_props:
            if entry.key in OWNED:
                node.metadata_props.add(key=entry.key, value=entry.value)
        constants.append(node)
    nodes = [*constants, *model.graph.node]
    del model.graph.initializer[:], model.graph.node[:]
    model.graph.node.extend(nodes)
    onnx.checker.check_model(model)
    onnx.save(model, output)


@pytest.fixture(scope="module", params=every(2, EXPORTERS))
def files(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A model with initializers, and with constants."""
    folder = tmp_path_factory.mktemp("constants")
    dynamo = request.param == "dynamo"
    ids = torch.from_numpy(feed()["ids"])
    model = spread(Mixed()).eval()
    htp_export.export(
        model,
        (ids,),
        folder / "stored.onnx",
        input_names=["ids"],
        opset_version=18,
        dynamo=dynamo,
        verbose=False,
    )
    with_constants(folder / "stored.onnx", folder / "constants.onnx")
    return folder / "stored.onnx", folder / "constants.onnx"


def run(file: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"]).run(
        None, feed()
    )[0]


PRUNED: dict[str, Any] = {
    "elements": {"**": 0.5},
    "n:m": {"first": "2:4"},
    "channels": {"first": "channels:0.5"},
    "channels of a convolution": {"conv": "channels:0.25"},
    "channels of an RNN": {"rnn": "channels:0.5"},
    "heads": {"attention": "heads:0.5"},
    "rank": {"first": "rank:4", "second": "rank:25%"},
    "table": {"words": 0.3},
}


@pytest.mark.long
@pytest.mark.parametrize("name", PRUNED)
def test_the_same_is_pruned_in_constants_and_initializers(name, files, tmp_path):
    found = []
    for place, file in enumerate(files):
        output = tmp_path / f"{place}.onnx"
        result = htp_export.prune(file, PRUNED[name], output)
        counts = {
            path: (each.weights_after, each.zeros_after) for path, each in result.modules.items()
        }
        found.append((counts, result.whole, run(output)))
        onnx.checker.check_model(str(output), full_check=True)
    (stored, stored_whole, stored_output), (constants, constants_whole, constants_output) = found
    assert constants == stored
    assert constants_whole == stored_whole
    np.testing.assert_allclose(constants_output, stored_output, rtol=1e-4, atol=1e-5)
    assert np.abs(constants_output - run(files[0])).max() > 1e-3  # it was pruned


def test_info_counts_weights_in_nodes(files):
    for file in files:
        weights = sum(parameter.numel() for parameter in Mixed().parameters())
        assert htp_export.cost(file).modules[""].parameters == weights
        # and factors
        assert htp_export.info(file).weights["float32"] == pytest.approx(4 * weights, rel=0.02)
    stored, constants = map(htp_export.info, files)
    # but for single numbers
    assert constants.weights["float32"] == pytest.approx(stored.weights["float32"], abs=8)
    assert " 0 weights" not in constants.summary


CALLS: dict[str, Callable[[Path, Path], Any]] = {
    "quantize": lambda file, out: {
        path: each.precision
        for path, each in htp_export.quantize(file, {"**": "int8-dynamic"}, out).modules.items()
    },
    "sensitivity": lambda file, _: str(
        htp_export.sensitivity(file, data=feed(), precisions=["int8"]).ranking
    ),
    "partition": lambda file, out: [
        stage.modules for stage in htp_export.partition(file, 3, out.with_suffix("")).stages
    ],
    "lora.insert": lambda file, out: list(
        htp_export.lora.insert(file, "**", out, rank=2, alpha=4).modules
    ),
    "statistics": lambda file, _: (
        '"first.bias"' in htp_export.view(file, explorer=False, weights=True).html
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CALLS)
def test_the_same_weights_are_found_in_constants_and_initializers(name, files, tmp_path):
    stored, constants = (
        CALLS[name](file, tmp_path / f"{place}.onnx") for place, file in enumerate(files)
    )
    assert constants == stored
    assert constants


def test_stages_are_balanced_by_weights_in_nodes(files, tmp_path):
    stages = [htp_export.partition(file, 2, tmp_path / file.stem).stages for file in files]
    stored, constants = ([stage.parameter_bytes for stage in each] for each in stages)
    assert constants == pytest.approx(stored, rel=0.05)


def test_an_adapter_is_added_to_weights_in_nodes(files, tmp_path):
    folder = adapter(tmp_path, "tuned", factors(Mixed(), ["first", "head"], 4, 1), 8)
    outputs = []
    for place, file in enumerate(files):
        htp_export.lora.fuse(file, folder, tmp_path / f"{place}.onnx")
        outputs.append(run(tmp_path / f"{place}.onnx"))
    np.testing.assert_allclose(outputs[1], outputs[0], rtol=1e-4, atol=1e-5)
    assert np.abs(outputs[0] - run(files[0])).max() > 1e-3


def test_the_model_of_the_user_keeps_its_constants(files):
    model = onnx.load(files[1])
    before = copy.deepcopy(model)
    pruned = htp_export.prune(model, {"first": 0.5}).model
    assert model == before
    constants = [
        node.attributes["value"].as_tensor().numpy()
        for node in pruned.graph
        if node.op_type == "Constant"
    ]
    assert [np.count_nonzero(array) for array in constants if array.size == 32 * 16] == [
        256,
        32 * 16,
    ]
