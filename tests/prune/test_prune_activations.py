"""prune: zeros in the outputs of modules, as the same masks in forward hooks of PyTorch."""

import functools
import itertools
import json
import zlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

import htp_export
from htp_export.command.main import main
from htp_export.errors import InputError, RuleError
from tests.exporting import BOTH, exported, open_sizes
from tests.nets import composed
from tests.quantized import outputs


def exact(net: nn.Module, most: int) -> nn.Module:
    """The net with parameters of few bits: sums of products do not depend on their order."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in net.parameters():
            # Sizes are distinct if there are as many as elements.
            sizes = torch.randperm(parameter.numel(), generator=generator) % most + 1
            signs = torch.randint(0, 2, sizes.shape, generator=generator) * 2 - 1
            parameter.copy_((sizes * signs / 16).reshape(parameter.shape))
    return net.eval()


def network(most: int = 3) -> nn.Module:
    """A convolution and a linear layer, a ReLU that runs twice, and a block around a layer."""
    parts = {
        "conv": nn.Conv1d(3, 6, 3, padding=1),
        "act": nn.ReLU(),
        "block": nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(0.25)),
        "head": nn.Linear(8, 4),
    }
    net = composed(lambda self, x: self.head(self.act(self.block(self.act(self.conv(x))))), **parts)
    return exact(net, most)


def runs(count: int = 3) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    return [{"x": torch.randint(-8, 9, (2, 3, 8), generator=generator) / 4} for _ in range(count)]


@functools.cache
def file_of(exporter: str, most: int, folder: Path) -> Path:
    exported(network(most), runs(1)[0], exporter, folder, **names(exporter, "x"))
    return folder / "model.onnx"


def names(exporter: str, *inputs: str) -> dict[str, Any]:
    """Options of an export with these names of inputs, which dynamo has from ``forward``."""
    return {} if exporter == "dynamo" else {"input_names": [*inputs]}


def made(exporter: str, folder: Path, most: int = 3) -> tuple[nn.Module, Path]:
    """The net, and its file, which is exported once."""
    common = folder.parent / f"activations_{exporter}_{most}"
    common.mkdir(exist_ok=True)
    return network(most), file_of(exporter, most, common)


def seen(model: nn.Module, paths: list[str]) -> dict[str, list[torch.Tensor]]:
    """The outputs of modules in all calls in all runs, by hooks."""
    found: dict[str, list[torch.Tensor]] = {path: [] for path in paths}
    hooks = [
        model.get_submodule(path).register_forward_hook(
            lambda module, args, out, path=path: found[path].append(out.detach().clone())
        )
        for path in paths
    ]
    for run in runs():
        model(**run)
    for hook in hooks:
        hook.remove()
    return found


def masked(model: nn.Module, bounds: Mapping[str, torch.Tensor]) -> nn.Module:
    """The model in which absolute values up to a bound become zero in the outputs of modules."""

    def zeros(module: nn.Module, args: Any, out: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
        return torch.where(out.abs() <= bound, 0, out)

    for path, bound in bounds.items():
        model.get_submodule(path).register_forward_hook(partial(zeros, bound=bound))
    return model


def smallest(tensors: list[torch.Tensor], share: float) -> torch.Tensor:
    """The largest of the smallest absolute values that are a share of all."""
    sizes = torch.cat([tensor.abs().flatten() for tensor in tensors])
    return sizes.kthvalue(round(share * sizes.numel())).values


def zeros_in(tensors: list[torch.Tensor]) -> float:
    return sum(int((each == 0).sum()) for each in tensors) / sum(each.numel() for each in tensors)


def assert_same(file: Path, model: nn.Module) -> None:
    """The file computes what the model does, bit for bit."""
    for run in runs():
        [found] = outputs(file, {name: each.numpy() for name, each in run.items()})
        with torch.no_grad():
            assert np.array_equal(found, model(**run).numpy())


PLAN = {"class:ReLU": "activations:0.7", "block": "activations:0.4", "conv": "activations:0.25"}
PATHS = {"conv": 0.25, "act": 0.7, "block": 0.4}


@BOTH
def test_each_module_has_the_threshold_and_the_zeros_of_hooks_in_pytorch(exporter, tmp_path):
    model, file = made(exporter, tmp_path)
    result = htp_export.prune(file, PLAN, out := tmp_path / "pruned.onnx", data=runs())
    onnx.checker.check_model(str(out), full_check=True)
    before = seen(model, [*PATHS])
    bounds = {path: smallest(before[path], share) for path, share in PATHS.items()}
    assert result.thresholds == {path: float(bound) for path, bound in bounds.items()}
    hooked = masked(model, bounds)
    assert_same(out, hooked)
    after = seen(hooked, [*PATHS])
    for path in PATHS:
        module = result.modules[path]
        assert module.activation_sparsity_before == zeros_in(before[path])
        assert module.activation_sparsity == zeros_in(after[path])
        assert module.activations == sum(each.numel() for each in before[path])
    assert result.modules[""].activations == sum(result.modules[p].activations for p in PATHS)
    assert not result.tagged.untagged
    assert {node.op_type for node in htp_export.load(out)["block"].nodes} >= {"Abs", "Where"}


@BOTH
def test_modules_together_have_one_threshold(exporter, tmp_path):
    model, file = made(exporter, tmp_path)
    plan = {"conv": "activations:0.5", "block": "activations:0.5", "act": "activations:0.8"}
    out = tmp_path / "pruned.onnx"
    result = htp_export.prune(file, plan, out, data=runs(), scope="global")
    before = seen(model, ["conv", "block", "act"])
    both = smallest([*before["conv"], *before["block"]], 0.5)
    bounds = {"conv": both, "block": both, "act": smallest(before["act"], 0.8)}
    assert result.thresholds == {path: float(bound) for path, bound in bounds.items()}
    assert_same(out, masked(model, bounds))


def random_masks(
    places: Mapping[str, tuple[int, ...]], share: float, seed: int
) -> dict[str, torch.Tensor]:
    """The masks of the page: the smallest random numbers of all places together."""
    numbers = {
        place: np.random.default_rng([seed, zlib.crc32(place.encode())]).random(shape, np.float32)
        for place, shape in places.items()
    }
    joined = np.sort(np.concatenate([each.ravel() for each in numbers.values()]))
    bound = joined[round(share * joined.size) - 1]
    return {place: torch.from_numpy(each <= bound) for place, each in numbers.items()}


@BOTH
@pytest.mark.parametrize("scope", ["local", "global"])
def test_random_masks_are_those_of_the_seed(scope, exporter, tmp_path):
    model, file = made(exporter, tmp_path)
    plan = {"conv": "activations:0.5", "block": "activations:0.5"}
    out = tmp_path / "pruned.onnx"
    result = htp_export.prune(file, plan, out, data=runs(), method="random", seed=3, scope=scope)
    shapes = {"conv:out": (2, 6, 8), "block:out": (2, 6, 8)}
    if scope == "global":
        masks = random_masks(shapes, 0.5, 3)
    else:
        masks = {}
        for place, shape in shapes.items():
            masks |= random_masks({place: shape}, 0.5, 3)
    for place, mask in masks.items():
        model.get_submodule(place.partition(":")[0]).register_forward_hook(
            lambda module, args, out, mask=mask: out.masked_fill(mask, 0)
        )
    assert_same(out, model)
    assert result.thresholds == {}
    zeros = seen(model, ["conv"])["conv"]
    assert result.modules["conv"].activation_sparsity == zeros_in(zeros)


def test_a_random_mask_has_one_element_along_an_open_axis(tmp_path):
    model = network()
    exported(model, runs(1)[0], "dynamo", tmp_path, **open_sizes("dynamo", x={0: "batch"}))
    plan = {"conv": "activations:0.5"}
    out = tmp_path / "pruned.onnx"
    htp_export.prune(tmp_path / "model.onnx", plan, out, data=runs(), method="random")
    mask = random_masks({"conv:out": (1, 6, 8)}, 0.5, 0)["conv:out"]
    model.conv.register_forward_hook(lambda module, args, out: out.masked_fill(mask, 0))
    assert_same(out, model)
    [found] = outputs(out, {"x": np.ones((5, 3, 8), np.float32)})
    assert len(found) == 5


def test_a_random_mask_of_each_call_has_a_part_of_the_share_of_the_module(tmp_path):
    model, file = made("dynamo", tmp_path)
    out = tmp_path / "pruned.onnx"
    htp_export.prune(file, {"act": "activations:0.5"}, out, data=runs(), method="random", seed=9)
    masks = [*random_masks(dict.fromkeys(("act#0:out", "act#1:out"), (2, 6, 8)), 0.5, 9).values()]
    calls = itertools.count()
    model.act.register_forward_hook(
        lambda module, args, out: out.masked_fill(masks[next(calls) % 2], 0)
    )
    assert_same(out, model)


@BOTH
def test_weights_and_activations_are_one_plan(exporter, tmp_path):
    model, file = made(exporter, tmp_path, 64)
    plan = {"class:ReLU": "activations:0.6", "**": 0.5, "head": "2:4+activations:0.5"}
    out = tmp_path / "pruned.onnx"
    result = htp_export.prune(file, plan, out, data=runs())
    for layer in (model.conv, model.block[0]):
        torch_prune.l1_unstructured(layer, "weight", 0.5)
    with torch.no_grad():
        rows = model.head.weight.reshape(-1, 4)
        rows.scatter_(1, rows.abs().argsort(dim=1, stable=True)[:, :2], 0.0)
    # The outputs are measured with the weights that stay.
    before = seen(model, ["act", "head"])
    bounds = {"act": smallest(before["act"], 0.6), "head": smallest(before["head"], 0.5)}
    assert_same(out, masked(model, bounds))
    assert result.plan["head"] == "2:4+activations:0.5"
    assert result.plan["act"] == "0.5+activations:0.6"
    assert result.modules["head"].sparsity == 0.5


def test_a_module_and_one_in_it_act_as_two_hooks(tmp_path):
    """The output of the block is that of its last module; both have a mask of their own."""
    model, file = made("dynamo", tmp_path)
    plan = {"block": "activations:0.5", "block.1": "activations:0.5"}
    out = tmp_path / "pruned.onnx"
    htp_export.prune(file, plan, out, data=runs(), method="random")
    for place in ("block.1:out", "block:out"):
        mask = random_masks({place: (2, 6, 8)}, 0.5, 0)[place]
        model.get_submodule(place.partition(":")[0]).register_forward_hook(
            lambda module, args, out, mask=mask: out.masked_fill(mask, 0)
        )
    assert_same(out, model)


def test_a_decoder_block_of_pytorch_agrees_within_rounding(tmp_path):
    """A model in no other test, with normalisation, attention and GELU."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    file = tmp_path / "model.onnx"
    htp_export.export(model, (x,), file, verbose=False)
    plan = {"linear1": "activations:0.5", "norm*": "activations:0.25"}
    out = tmp_path / "pruned.onnx"
    result = htp_export.prune(file, plan, out, data={"src": x})
    bounds = {path: torch.tensor(bound) for path, bound in result.thresholds.items()}
    [found] = outputs(out, {"src": x.numpy()})
    with torch.no_grad():
        expected = masked(model, bounds)(x).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)
    # The mask of the norm before it changes what the layer returns.
    assert 0.4 < result.modules["linear1"].activation_sparsity < 0.6


def test_nan_stays(tmp_path):
    _, file = made("dynamo", tmp_path)
    out = tmp_path / "pruned.onnx"
    htp_export.prune(file, {"head": "activations:0.5"}, out, data=runs())
    [found] = outputs(out, {"x": np.full((2, 3, 8), np.nan, np.float32)})
    assert np.isnan(found).all()


def test_a_threshold_of_zero_adds_no_nodes(tmp_path):
    _, file = made("dynamo", tmp_path)
    result = htp_export.prune(file, {"act": "activations:0.1"}, data=runs())
    assert result.thresholds == {"act": 0.0}
    assert result.modules["act"].activation_sparsity > 0.1
    assert len(result.tagged.nodes) == len(htp_export.load(file).nodes)


def test_the_last_rule_that_names_a_module_decides(tmp_path):
    _, file = made("dynamo", tmp_path)
    plan = {"conv,act": "activations:0.5", "class:ReLU": "activations:0"}
    result = htp_export.prune(file, plan, data=runs())
    assert list(result.thresholds) == ["conv"]


def lstm_and_linear() -> nn.Module:
    return composed(
        lambda self, x: self.drop(self.fc(self.lstm(x)[0])),
        lstm=nn.LSTM(8, 4, batch_first=True),
        fc=nn.Linear(4, 4),
        drop=nn.Dropout(),
    ).eval()


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recurrent")
    torch.manual_seed(0)
    exported(
        lstm_and_linear(), {"x": torch.randn(2, 3, 8)}, "torchscript", folder, input_names=["x"]
    )
    return folder / "model.onnx"


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("lstm", r"module 'lstm': it returns several tensors, also lstm:out\[1\]"),
        ("drop", "module 'drop': drop:out: .*same tensor"),
    ],
)
def test_an_output_that_cannot_be_masked_stays_with_a_reason(path, problem, recurrent):
    data = {"x": torch.ones(2, 3, 8)}
    with pytest.raises(RuleError, match=problem):
        htp_export.prune(recurrent, {path: "activations:0.5"}, data=data)
    result = htp_export.prune(recurrent, {f"{path},fc": "activations:0.5"}, data=data)
    assert list(result.unmasked) == [path]
    assert f"the output of {path} stays as it is: {result.unmasked[path]}" in result.notes
    with pytest.raises(RuleError, match=problem):
        htp_export.prune(recurrent, {f"{path},fc": "activations:0.5"}, data=data, strict=True)


@pytest.mark.parametrize(
    ("value", "data", "problem"),
    [
        ("activations:0.5", None, "is measured on data: give data"),
        ("activations:1.5", {"x": 0}, "a share is from 0 to 1"),
        ("activations:abc", {"x": 0}, "write a share such as 0.5"),
        ("activations:0.5+activations:0.1", {"x": 0}, "one value of weights and one of activ"),
        ("0.5+2:4", {"x": 0}, "write one value of weights and one of activations"),
        ("activations:0.0001", {"x": np.ones((2, 3, 8), np.float32)}, "of 48 elements is none"),
        ("0.5", {"x": 0}, "data are for rules of activations"),
    ],
)
def test_what_cannot_be_done_is_an_error(value, data, problem, tmp_path):
    _, file = made("dynamo", tmp_path)
    with pytest.raises(InputError, match=problem):
        htp_export.prune(file, {"head": value}, tmp_path / "out.onnx", data=data)
    assert not (tmp_path / "out.onnx").exists()


def test_data_with_nan_in_an_output_name_run_and_module(tmp_path):
    _, file = made("dynamo", tmp_path)
    data = [runs(1)[0], {"x": np.full((2, 3, 8), np.nan, np.float32)}]
    with pytest.raises(InputError, match="data, run 1: conv:out has NaN"):
        htp_export.prune(file, {"conv": "activations:0.5"}, data=data)


def test_the_command_and_a_pipeline_do_the_same(tmp_path, capsys, monkeypatch):
    _, file = made("torchscript", tmp_path)
    monkeypatch.chdir(tmp_path)
    for number, run in enumerate(runs()):
        (tmp_path / "data").mkdir(exist_ok=True)
        np.savez(f"data/{number}.npz", x=run["x"].numpy())
    words = ["prune", str(file), "--rule", "class:ReLU=activations:0.7", "--data", "data"]
    assert main([*words, "-o", "a.onnx", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    expected = htp_export.prune(file, {"act": "activations:0.7"}, data=runs())
    assert printed["thresholds"] == expected.thresholds
    zeros = printed["modules"]["act"]["activation_sparsity"]
    assert zeros == expected.modules["act"].activation_sparsity
    assert printed["modules"]["conv"]["activation_sparsity"] is None
    step = {"prune": {"plan": {"class:ReLU": "activations:0.7"}, "data": "data"}}
    htp_export.pipeline([step], file, "b.onnx")
    run = {"x": runs()[0]["x"].numpy()}
    assert np.array_equal(outputs("a.onnx", run)[0], outputs("b.onnx", run)[0])
    assert main(["prune", str(file), "--rule", "class:ReLU=activations:0.7", "-o", "c.onnx"]) == 2
    assert "--data" in capsys.readouterr().err
    assert not Path("c.onnx").exists()


def test_cost_and_view_know_the_nodes(tmp_path):
    _, file = made("dynamo", tmp_path)
    out = tmp_path / "pruned.onnx"
    htp_export.prune(file, {"conv": "activations:0.5"}, out, data=runs())
    report = htp_export.cost(out)
    assert report.uncounted == {}
    # Abs, LessOrEqual and Where are an operation for each of 96 elements.
    added = report.modules["conv"].other_flops - htp_export.cost(file).modules["conv"].other_flops
    assert added == 3 * 96
    htp_export.view(out, tmp_path / "page.html")
