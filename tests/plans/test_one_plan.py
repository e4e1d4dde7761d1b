"""One meaning of a plan: every capability that takes one covers the nodes of ``load(file)[path]``, by calls."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.search.measuring import Measurer
from htp_export.errors import InputError
from htp_export.plans.rules import assigned
from htp_export.runtime.samples import Samples
from htp_export.runtime.settings import RunSettings
from tests.nets import spread

Array = np.ndarray[Any, Any]


class Caller(nn.Module):
    """It calls a module that the root holds, which is in none of its attributes."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.called = lambda x: shared(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.called(torch.relu(self.lin(x))) + x


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.a, self.b = Caller(self.shared), Caller(self.shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


def randoms(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(
    scope="module", params=["dynamo", pytest.param("torchscript", marks=pytest.mark.slow)]
)
def exporter(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def file(exporter: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "net.onnx"
    torch.manual_seed(0)
    htp_export.export(
        Root().eval(), (randoms(2, 8, seed=1),), path, dynamo=exporter == "dynamo", verbose=False
    )
    return path


@pytest.fixture(scope="module")
def merged(exporter: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two convolutions, each merged with a BatchNorm."""
    path = tmp_path_factory.mktemp("merged") / "net.onnx"
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)
    )
    spread(net)
    args = (randoms(2, 3, 12, 12, seed=1),)
    htp_export.export(net.eval(), args, path, dynamo=exporter == "dynamo", verbose=False)
    return path


def values(file: Path, plan: dict[str, Any]) -> dict[str, Any]:
    return {
        str(node.name): value for node, value in assigned(htp_export.load(file), plan).nodes.items()
    }


def named(file: Path, path: str) -> set[str]:
    return {str(node.name) for node in htp_export.load(file)[path].nodes}


@pytest.mark.parametrize(
    "plan", [{"a": "int8"}, {"a": "int8", "b": "fp32"}, {".": "fp32", "a": "int8"}], ids=str
)
def test_all_capabilities_cover_the_same_nodes(plan, file):
    tagged = htp_export.load(file)
    region = named(file, "a")
    assert {tagged[path].class_name.rpartition(".")[2] for path in ("a", "shared")} == {
        "Caller",
        "Sequential",
    }
    assert {name for name, value in values(file, plan).items() if value == "int8"} == region

    devices = {"int8": "gpu", "fp32": "cpu"}
    placed = htp_export.place(
        file, {selector: devices[value] for selector, value in plan.items()}
    ).tagged
    assert {
        str(node.name) for node in placed.nodes if node.metadata_props.get("layer_ann") == "gpu"
    } == region

    planned: Any = htp_export.export_plan(file, plan, to="ort").content
    assert set(planned["steps"][0]["arguments"]["nodes_to_quantize"]) == region

    casts = {selector: "fp16" if value == "int8" else value for selector, value in plan.items()}
    quantized = htp_export.quantize(file, casts)
    computing = [node for node in tagged["a"].nodes if node.op_type != "Constant"]
    assert quantized.modules["a"].changed >= len(computing)
    assert quantized.modules["b"].changed == 0
    assert quantized.modules[""].changed == quantized.modules["a"].changed
    assert not [note for note in quantized.notes if "different" in note]

    modules = {
        path
        for node in tagged["a"].nodes
        if node.op_type == "Gemm"
        for path in tagged.index.works[node].doing
    }
    assert modules == {"a.lin", "shared.0"}
    pruned = htp_export.prune(file, {"a": 0.5}).modules
    assert {path for path in (*modules, "b.lin") if pruned[path].zeros_after} == modules
    assert set(htp_export.lora.insert(file, "a").modules) == modules

    function = htp_export.functions(file, "a").model.functions
    assert [len(list(body)) for body in function.values()] == [len(region)]


def test_sensitivity_and_search_measure_the_region(file):
    pytest.importorskip("optuna")
    data = _data(file)
    whole = htp_export.sensitivity(file, ["fp16"], data=data, select="a", all_but=False).modules[
        "a"
    ]["fp16"]
    made = htp_export.quantize(file, {"a": "fp16"}).tagged
    assert whole.alone == _measured(file, made, data)
    found = htp_export.search(file, {"a": ["fp16", "fp32"]}, data=data, trials=2)
    assert {tuple(trial.plan.items()) for trial in found.trials} >= {
        (("a", "fp16"),),
        (("a", "fp32"),),
    }


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ({"shared": 1, "a": 2}, {"a": 2, "shared in a": 1, "shared in b": 1}),
        ({"a": 2, "shared": 1}, {"a": 2, "shared in a": 1, "shared in b": 1}),
        ({"a": 2, ".": 1}, {"a": 1, "shared in a": 1, "shared in b": 1}),
        ({"**": 1, "a": 2}, {"a": 2, "shared in a": 2, "shared in b": 1}),
        ({"shared": 1, ".": 3, "a": 2}, {"a": 2, "shared in a": 2, "shared in b": 3}),
        ({"b,!shared": 2}, {"a": None, "shared in a": None, "shared in b": None}),
        ({".,!a": 2}, {"a": None, "shared in a": None, "shared in b": 2}),
    ],
    ids=str,
)
def test_a_module_that_is_called_has_the_value_of_its_caller_unless_a_rule_names_it(
    plan, expected, file
):
    tagged = htp_export.load(file)
    found = assigned(tagged, plan).nodes
    nodes = {
        "a": tagged["a.lin"].nodes[0],
        "shared in a": tagged["shared.0"].call(0).nodes[0],
        "shared in b": tagged["shared.0"].call(1).nodes[0],
    }
    assert {name: found.get(node) for name, node in nodes.items()} == expected


def test_modules_have_values_where_all_their_calls_have_them(file):
    tagged = htp_export.load(file)
    assert assigned(tagged, {"a": 2}).modules == {"a": 2, "a.lin": 2}
    both = assigned(tagged, {"a": 2, "b": 2})
    assert both.modules == dict.fromkeys(
        ["shared", "shared.0", "shared.1", "a", "a.lin", "b", "b.lin"], 2
    )
    assert "shared.0" in assigned(tagged, {"a": 2}).named["a"]


@pytest.mark.parametrize(
    "net", ["two_parents", "child_of_two_parents", "called_from_outside", "conv_bn_relu"]
)
def test_a_rule_for_one_module_covers_its_region(net, exporter, shared_files):
    tagged = htp_export.load(shared_files.net(net, exporter))
    for path in tagged:
        selector = f"re:{path.replace('.', '[.]')}" if path else "."
        assert set(assigned(tagged, {selector: 8}).nodes) == set(tagged[path].nodes), path


def test_a_merged_batch_norm_is_one_decision_with_its_conv(merged):
    [first, _, second] = [str(node.name) for node in htp_export.load(merged).nodes]
    assert values(merged, {"0": 8}) == values(merged, {"1": 8}) == {first: 8}
    assert set(values(merged, {"**": 8, "class:BatchNorm2d": 4}).values()) == {8}
    assert values(merged, {"3": 8, "4": 4}) == {second: 8}
    assert values(merged, {"4": 4, "3": 8}) == {second: 8}
    with pytest.raises(InputError, match=r"rule '4'.*Conv.*does the work of '3', '4'"):
        htp_export.quantize(merged, {"**": "fp32", "4": "fp16"})
    with pytest.raises(InputError, match=r"rule '3'.* there are: 1 Conv$"):
        htp_export.quantize(merged, {"3": "int4"})


def test_sensitivity_lists_a_merged_batch_norm_once(merged):
    found = htp_export.sensitivity(merged, ["int8"], data=_data(merged))
    assert list(found.modules) == ["0", "3"]
    assert not found.notes
    assert all(row["int8"].alone and row["int8"].all_but for row in found.modules.values())


@pytest.mark.long
@pytest.mark.parametrize(
    ("which", "space", "options"),
    [
        ("merged", ["int8", "fp16", "fp32"], {}),
        pytest.param("file", ["int8", "fp16", "fp32"], {}, marks=pytest.mark.slow),
        pytest.param("file", ["int8", "fp16", "fp32"], {"depth": 1}, marks=pytest.mark.slow),
        ("file", {"a": ["int8", "fp32"], "shared": ["fp16", "fp32"]}, {}),
    ],
    ids=["merged", "innermost", "depth", "space"],
)
def test_what_search_returns_was_measured(which, space, options, file, merged):
    pytest.importorskip("optuna")
    model = {"file": file, "merged": merged}[which]
    data = _data(model)
    found = htp_export.search(model, space, data=data, trials=8, **options)
    assert found.failed == 0
    assert all("plans are measured, and not 8" in note for note in found.notes)
    assert len(found.pareto) > 1
    for trial in found.trials:
        made = htp_export.quantize(model, dict(trial.plan), data=data).tagged
        again = _measured(model, made, data)
        assert {"error": again.error, "size": again.bytes} == pytest.approx(
            dict(trial.values), rel=1e-6
        ), trial.plan


def _data(file: Path) -> list[dict[str, Array]]:
    [value] = htp_export.load(file).model.graph.inputs
    assert value.shape is not None
    sizes = value.shape.numpy()
    return [{str(value.name): randoms(*sizes, seed=seed).numpy()} for seed in range(3)]


def _measured(file: Path, made: Any, data: Any) -> Any:
    tagged = htp_export.load(file)
    measurer = Measurer(tagged, Samples.of(RunSettings(data), tagged.model))
    return measurer._measured(made, measurer.original.nonzeros)
