"""Precisions by selectors by nets: what a plan does not name stays bit for bit, and bytes are what was predicted."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import htp_export
from htp_export.model.tagged import TaggedModel
from htp_export.plans.rules import assigned
from tests.exporting import of_type
from tests.nets import spread
from tests.quantize.test_quantize_models import MODELS
from tests.quantized import IDS, Net, node_bytes

PRECISIONS: Mapping[str, Any] = {
    **{
        name: name
        for name in ("int8", "u8s8", "uint8", "int16", "int8-dynamic", "int8-weights", "int4", "fp16", "bf16")
    },
    "int8 by tensor": {"precision": "int8", "per_channel": False},
    "u8s8 symmetric": {"precision": "u8s8", "symmetric": True},
    "int8-dynamic, 7 bits": {"precision": "int8-dynamic", "reduce_range": True},
    "int8-dynamic by tensor": {"precision": "int8-dynamic", "per_channel": False},
    "int4 symmetric": {"precision": "int4", "symmetric": True},
    "int4 of 16": {"precision": "int4", "block_size": 16},
    "int4 rtn": {"precision": "int4", "algorithm": "rtn", "block_size": 16},
    "int8-weights symmetric": {"precision": "int8-weights", "symmetric": True, "block_size": 64},
}


class Sizes(nn.Module):
    """Sizes of a tensor of one module, read in others; a weight that two modules read, and one in another layout."""

    class Inner(nn.Module):
        def __init__(self, linear: nn.Linear | None = None) -> None:
            super().__init__()
            self.linear = linear or nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.linear(x)).reshape(x.shape[0], -1, x.shape[-1])

    def __init__(self, *, recurrent: bool = True) -> None:
        super().__init__()
        self.first, self.norm = self.Inner(), nn.LayerNorm(32)
        self.second = self.Inner(self.first.linear)
        self.lstm = nn.LSTM(32, 32, batch_first=True) if recurrent else None
        self.scale, self.head = nn.Parameter(torch.rand(32)), nn.Linear(32, 64, bias=False)
        self.table = nn.Embedding(64, 32)
        self.table.weight = self.head.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        y = self.norm(self.first(x)) * self.scale
        y = self.second(y.reshape(-1, y.shape[1], 32)).expand(x.shape[0], x.shape[1], -1)
        y = y if self.lstm is None else self.lstm(y)[0]
        return self.head(y.reshape(x.shape[0], x.shape[1], -1))


NETS = ["net", "sizes", "conv", *MODELS]


@pytest.fixture(scope="module", params=itertools.product(NETS, ("dynamo", "torchscript")), ids="-".join)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    name, exporter = request.param
    words = {"ids": torch.from_numpy(IDS)}
    conv = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.Flatten())
    sizes = functools.partial(Sizes, recurrent=exporter == "torchscript")  # dynamo has no LSTM of open sizes here
    built: dict[str, Any] = {
        "net": (Net, words),
        "sizes": (sizes, words),
        "conv": (lambda: conv, {"input": torch.rand(2, 2, 8, 8)}),
    }
    if name in built:
        model, inputs = built[name][0](), built[name][1]
    else:
        model, inputs = of_type(name, **MODELS[name][0])
        if name == "whisper":
            model, inputs = model.encoder, {"input_features": inputs["input_features"]}
    file = tmp_path_factory.mktemp(name) / "net.onnx"
    options: dict[str, Any] = {"dynamo": exporter == "dynamo", "kwargs": inputs, "verbose": False}
    if name in ("net", "sizes"):
        size = {0: "batch", 1: "length"}
        if exporter == "dynamo":
            options["dynamic_shapes"] = {"ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}}
        else:
            options |= {"input_names": ["ids"], "dynamic_axes": {"ids": size}}
    elif exporter == "torchscript":
        options["input_names"] = list(inputs)
    htp_export.export(spread(model.eval()), (), file, **options)
    known = {value.name for value in htp_export.load(file).model.graph.inputs}
    return file, {key: value.numpy() for key, value in inputs.items() if key in known}


@pytest.fixture(scope="module")
def shared_linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("sizes") / "net.onnx"
    net, options = spread(Sizes().eval()), {"dynamo": False, "input_names": ["ids"], "verbose": False}
    htp_export.export(net, (torch.from_numpy(IDS),), file, **options)
    return file


def plans_of(tagged: TaggedModel, precision: Any) -> Iterator[dict[str, Any]]:
    """The whole, single modules of several levels and classes, and the whole but one of them."""
    inner = [path for path in tagged if path]
    chosen = list(dict.fromkeys(inner[:2] + inner[:: max(1, len(inner) // 4)] + ["class:Linear", "class:LayerNorm"]))
    yield {".": precision}
    for selector in chosen:
        yield {selector: precision}
        yield {".": precision, selector: "fp32"}


def deviations(file: Path, plan: Mapping[str, Any], feed: Any) -> Iterator[str]:
    """What a plan changes of nodes that it leaves in fp32, and bytes that are not as predicted."""
    predicted = htp_export.quantize(file, plan, dry_run=True)
    result = htp_export.quantize(file, plan, data=feed)
    before = htp_export.load(file)
    values = {key: value for key, value in plan.items() if value != "fp32"}
    named = assigned(before, {**dict.fromkeys(plan, 1), **dict.fromkeys(values, 2)})
    stays = [node for node in before.nodes if named.nodes.get(node, 1) == 1 and node not in named.disputed]
    was = node_bytes(onnx.load(file))
    after = htp_export.load(result.model)
    now = node_bytes(onnx.ModelProto.FromString(_bytes_of(after)))
    for node in stays:
        name = str(node.outputs[0].name)
        if name in was and now.get(name) != was[name]:
            yield f"{node.op_type} {name} of {before.owners_of(node)} changed"
    if any("fill masks" in note for note in result.notes):
        return
    for path, module in result.modules.items():
        if module.bytes_after != predicted.modules[path].bytes_after:
            yield f"{path!r}: {predicted.modules[path].bytes_after} bytes predicted, {module.bytes_after} made"


def _bytes_of(tagged: TaggedModel) -> bytes:
    import onnx_ir as ir

    return ir.to_proto(tagged.model).SerializeToString()


@pytest.mark.parametrize("plan", [{"first": "fp16"}, {".": "int4", "second": "fp32"}, {"first": "int8-dynamic"}])
def test_bytes_of_a_module_that_two_others_call_are_as_predicted(plan: dict[str, str], shared_linear: Path) -> None:
    """``first.linear`` is called in ``second``, too: the file has both of its forms, and ``first`` has both."""
    assert not list(deviations(shared_linear, plan, {"ids": IDS}))


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_a_plan_leaves_stays_and_bytes_are_as_predicted(exported: tuple[Path, Any], precision: str) -> None:
    file, feed = exported
    found, ran = [], 0
    for plan in plans_of(htp_export.load(file), PRECISIONS[precision]):
        try:
            found += [f"{plan}: {problem}" for problem in deviations(file, plan, feed)]
            ran += 1
        except htp_export.InputError as error:
            if "no operator of" not in str(error) and "matches no" not in str(error):
                raise
    assert not found, "\n".join(found)
    if not ran:
        pytest.skip("no operator of the net takes the precision")
