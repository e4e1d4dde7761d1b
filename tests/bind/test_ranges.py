"""bind with data: ranges of activations are measured again, as `quantize` of a new export measures them."""

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.errors import FileError, InputError
from tests.bind.test_bind import files_of_two, of_seed, same, stored

FACTORS = torch.linspace(0.3, 1.7, 8).reshape(8, 1, 1)


class Net(nn.Module):
    """Convolutions with normalizations, an operator that keeps the scale of its input, a constant, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.other, self.pool = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.MaxPool2d(2)
        self.fc = nn.Linear(8 * 9, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.conv(x)).relu()
        x = self.pool(self.other(x) + FACTORS * x)
        return self.fc(x.flatten(1)).softmax(-1)


X = torch.linspace(-1, 1, 216).reshape(2, 3, 6, 6)


def net(seed: int, make: Callable[[], nn.Module] = Net) -> nn.Module:
    return of_seed(make, seed, 0.3)  # type: ignore[no-any-return]


@pytest.fixture(
    scope="module", params=["torchscript", pytest.param("dynamo", marks=pytest.mark.slow)]
)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return files_of_two(net, X, request.param, tmp_path_factory.mktemp(request.param))


def runs(file: Path) -> list[dict[str, np.ndarray]]:
    """Two runs of the only input of a file."""
    [entry] = htp_export.load(file).model.graph.inputs
    random = np.random.default_rng(0)
    shape = tuple(entry.shape.numpy())
    return [{str(entry.name): random.normal(size=shape).astype(np.float32)} for _ in range(2)]


def read_by_nodes(file: Any) -> dict[tuple[str, int], np.ndarray]:
    """Node and position of its input → the stored tensor that it reads: two equal tensors may be merged into one."""
    arrays = stored(file)
    tagged = htp_export.load(file)
    found = {}
    for graph in tagged.model.graphs():
        for node in graph:
            for place, value in enumerate(node.inputs):
                if value is not None and value.name in arrays:
                    found[str(node.name), place] = arrays[value.name]
    return found


def different(model: Any, expected: Any) -> list[tuple[str, int]]:
    found, wanted = read_by_nodes(model), read_by_nodes(expected)
    assert found.keys() == wanted.keys()
    return [place for place in wanted if not same(found[place], wanted[place])]


PLANS: dict[str, Any] = {
    "uint8": "uint8",
    "int8 by channel, entropy": {"precision": "int8", "calibration": "entropy"},
    "int16": "int16",
    "three precisions": {"conv": "uint8", "other": "int8", "fc": "u8s8"},
    "a part": {"other": "uint8"},
}


@pytest.mark.long
@pytest.mark.parametrize("plan", PLANS)
def test_the_ranges_are_those_of_a_new_export_that_is_quantized(files, plan):
    data = runs(files[0])
    old, expected = (htp_export.quantize(file, PLANS[plan], data=data).model for file in files)
    bound = htp_export.bind(old, net(2), data=data)
    assert different(bound.model, expected) == []
    assert (bound.unbound, bound.unmeasured, bound.notes) == ({}, {}, ())
    assert bound.measured == sum(node.op_type == "QuantizeLinear" for node in expected.graph)
    assert f"{bound.measured} ranges of activations measured again" in bound.summary
    # without data, ranges are those of the old weights
    assert different(htp_export.bind(old, net(2)).model, expected) != []


def test_the_range_of_a_format_is_none_of_the_old_weights(files, tmp_path):
    data = runs(files[0])
    fixed, renamed = tmp_path / "fixed.onnx", tmp_path / "renamed.onnx"
    htp_export.quantize(files[0], "fixed:8.4", fixed)
    htp_export.rename(fixed, output=renamed)
    for file in (fixed, renamed):
        assert htp_export.bind(file, net(2)).notes == ()
    expected = htp_export.quantize(files[1], "fixed:8.4").model
    assert different(htp_export.bind(fixed, net(2)).model, expected) == []
    with pytest.raises(InputError, match="with a range to measure: leave data out"):
        htp_export.bind(fixed, net(2), data=data)
    # beside a format, the other ranges are measured, and none is missed
    mixed = htp_export.quantize(files[0], {"conv": "fixed:8.4", "fc": "int8"}, data=data).model
    assert htp_export.bind(mixed, net(2), data=data).unmeasured == {}


def test_back_and_forth_is_the_first_file(files, tmp_path):
    data = runs(files[0])
    first, second, third = (tmp_path / f"{name}.onnx" for name in "abc")
    htp_export.quantize(files[0], "int8", first, data=data)
    htp_export.bind(first, net(2), second, data=data)
    htp_export.bind(second, net(1), third, data=data)
    assert different(third, first) == []
    assert different(second, first) != []


def later(name: str, file: Path, output: Path) -> None:
    """One step on a quantized file."""
    if name == "rename":
        htp_export.rename(file, output=output)
    elif name == "functions":
        htp_export.functions(file, ["conv", "fc"], output)
    elif name == "optimize":
        htp_export.optimize(file, output)
    elif name == "tap":
        htp_export.tap(file, "fc:in", output)
    else:
        htp_export.quantize(file, {"fc": "int8"}, output, data=runs(file))


@pytest.mark.long
@pytest.mark.parametrize("step", ["rename", "functions", "optimize", "tap", "quantize again"])
def test_the_ranges_are_measured_again_after_another_step(files, step, tmp_path):
    plan = {"conv": "uint8", "other": "uint8"} if step == "quantize again" else "uint8"
    made = []
    for number, file in enumerate(files):
        quantized, after = tmp_path / f"{number}.onnx", tmp_path / f"{number}_{step}.onnx"
        htp_export.quantize(file, plan, quantized, data=runs(files[0]))
        later(step, quantized, after)
        made.append(after)
    bound = htp_export.bind(made[0], net(2), tmp_path / "bound.onnx", data=runs(made[0]))
    assert different(tmp_path / "bound.onnx", made[1]) == []
    assert bound.unmeasured == {}
    assert bound.measured > 0


def test_the_floats_of_a_constant_are_recorded_as_no_entry_has_them(files):
    model = htp_export.quantize(files[0], "uint8", data=runs(files[0])).model
    kept = [
        base64.b85decode(value.const_value.metadata_props["htp.floats"])
        for value in model.graph.initializers.values()
        if "htp.floats" in value.const_value.metadata_props
    ]
    assert kept == [FACTORS.numpy().tobytes()]


def test_the_range_of_the_input_of_a_part_is_that_of_its_data(files, tmp_path):
    whole, part = tmp_path / "whole.onnx", tmp_path / "part.onnx"
    htp_export.quantize(files[0], "uint8", whole, data=runs(files[0]))
    htp_export.extract(whole, "other", part)
    data = runs(part)
    bound = htp_export.bind(part, net(2), data=data)
    assert bound.unmeasured == {}
    [entry] = htp_export.load(part).model.graph.inputs
    arrays = np.concatenate([run[str(entry.name)] for run in data])
    [node] = [use.node for use in entry.uses() if use.node.op_type == "QuantizeLinear"]
    scale = stored(bound.model)[str(node.inputs[1].name)]
    np.testing.assert_allclose(scale, (arrays.max() - arrays.min()) / 255, rtol=1e-6)


def test_modules_in_another_precision_are_noted(files):
    plan, data = {".": "int8", "fc": "int8-weights"}, runs(files[0])
    old, expected = (htp_export.quantize(file, plan, data=data).model for file in files)
    bound = htp_export.bind(old, net(2), data=data)
    assert any("modules in int8-weights as they are in the file" in note for note in bound.notes)
    found, wanted = read_by_nodes(bound.model), read_by_nodes(expected)
    for place in different(bound.model, expected):  # the range of the result of fc
        np.testing.assert_allclose(found[place], wanted[place], rtol=0.02)


def without_records(file: Path) -> ir.Model:
    """A file as an earlier version, or another quantizer, wrote it."""
    model = htp_export.load(file).clone().model
    model.metadata_props.pop("htp.calibrations")
    for node in model.graph:
        node.metadata_props.pop("htp.calibration", None)
    return model


def test_ranges_without_a_record_stay_and_are_named(files, tmp_path):
    file, data = tmp_path / "int8.onnx", runs(files[0])
    htp_export.quantize(files[0], "int8", file, data=data)
    bound = htp_export.bind(without_records(file), net(2), data=data)
    assert bound.measured == 0
    assert set(bound.unmeasured.values()) == {"the file does not record how its range was measured"}
    scales = {
        str(node.inputs[1].name)
        for node in htp_export.load(file).model.graph
        if node.op_type == "QuantizeLinear"
    }
    assert bound.unmeasured.keys() == scales
    assert any(f"{len(scales)} ranges" in note for note in bound.notes)
    old = stored(file)
    assert all(same(stored(bound.model)[name], old[name]) for name in scales)


def test_a_node_that_a_new_quantization_leaves_keeps_its_ranges_with_the_reason(files, tmp_path):
    file, data = tmp_path / "uint8.onnx", runs(files[0])
    htp_export.quantize(files[0], "uint8", file, data=data)
    state = net(2).state_dict()
    state["fc.bias"] = state["fc.bias"] + 1e30  # it does not fit in 32 bits
    bound = htp_export.bind(file, state, data=data)
    assert bound.unmeasured
    assert bound.measured > len(bound.unmeasured)
    assert all("fc" in why or "Gemm" in why for why in bound.unmeasured.values())


def test_ranges_of_a_part_of_another_file_stay(files, tmp_path):
    """The records of a part that is put into another model are those of its own file."""
    host, other = tmp_path / "host.onnx", tmp_path / "other.onnx"
    htp_export.quantize(files[0], {"fc": "int8"}, host, data=runs(files[0]))
    htp_export.quantize(files[0], {"other": "uint8"}, other, data=runs(files[0]))
    htp_export.extract(other, "other", tmp_path / "part.onnx")
    htp_export.splice(host, "other", tmp_path / "part.onnx", tmp_path / "both.onnx")
    data = runs(host)
    bound = htp_export.bind(tmp_path / "both.onnx", net(2), data=data)
    assert bound.measured > 0
    assert set(bound.unmeasured.values()) == {"the file does not record how its range was measured"}


def test_data_without_effect_or_of_other_sizes_are_refused(files, tmp_path):
    data = runs(files[0])
    with pytest.raises(InputError, match="no QuantizeLinear"):
        htp_export.bind(files[0], net(2), data=data)
    file, output = tmp_path / "int8.onnx", tmp_path / "bound.onnx"
    htp_export.quantize(files[0], "int8", file, data=data)
    wrong = [{name: array[:, :1] for name, array in data[0].items()}]
    with pytest.raises(InputError, match="data, run 0"):
        htp_export.bind(file, net(2), output, data=wrong)
    nan = [{name: np.full_like(array, np.nan) for name, array in data[0].items()}]
    with pytest.raises(InputError, match="has NaN"):
        htp_export.bind(file, net(2), output, data=nan)
    for option in ({"in_place_data": True}, {"only": "fc"}):
        with pytest.raises(InputError, match="leaves it as it is"):
            htp_export.bind(file, net(2), output, data=data, **option)
    with pytest.raises(FileError):
        htp_export.bind(file, net(2), output, data=tmp_path / "missing.npz")
    assert not output.exists()


@pytest.mark.long
@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", '{"version": 1}', '{"version": 1, "calibrations": [3]}',
        '{"version": 1, "calibrations": [{"call": -1, "method": "static"}]}',
        '{"version": 1, "calibrations": [{"call": 0, "name": "x", "method": "weights", "weight": "int4"}]}',
        '{"version": 1, "calibrations": [{"call": 0, "name": "x", "method": "static", "engine": "nncf"}]}',
        '{"version": 1, "calibrations": [{"call": 0, "name": "x", "method": "static", "weight": "x"}]}',
        '{"version": 1, "calibrations": [{"call": 0, "name": 3, "method": "static", "per_channel": "yes"}]}',
    ],
)  # fmt: skip
def test_invalid_records_are_refused(files, text, tmp_path):
    file, data = tmp_path / "int8.onnx", runs(files[0])
    htp_export.quantize(files[0], "int8", file, data=data)
    model = htp_export.load(file).clone().model
    model.metadata_props["htp.calibrations"] = text
    with pytest.raises(InputError, match=r"htp\.calibrations is not valid"):
        htp_export.bind(model, net(2), data=data)


def test_records_of_a_later_version_are_none(files, tmp_path):
    file, data = tmp_path / "int8.onnx", runs(files[0])
    htp_export.quantize(files[0], "int8", file, data=data)
    model = htp_export.load(file).clone().model
    written = json.loads(model.metadata_props["htp.calibrations"])
    model.metadata_props["htp.calibrations"] = json.dumps({**written, "version": 2})
    bound = htp_export.bind(model, net(2), data=data)
    assert bound.measured == 0
    assert bound.unmeasured


def test_the_command_measures_ranges(files, tmp_path, capsys):
    data = runs(files[0])
    np.savez(tmp_path / "data.npz", **data[0])
    for number, each in enumerate(files):
        htp_export.quantize(each, "int8", tmp_path / f"{number}.onnx", data=data[:1])
    save_file(net(2).state_dict(), tmp_path / "tuned.safetensors")
    file, output = tmp_path / "0.onnx", tmp_path / "bound.onnx"
    given = [file, tmp_path / "tuned.safetensors", "-o", output, "--data", tmp_path / "data.npz"]
    assert main(["bind", *map(str, given)]) == 0
    assert "ranges of activations measured again" in capsys.readouterr().out
    assert different(output, tmp_path / "1.onnx") == []


@pytest.mark.long
@pytest.mark.parametrize("dynamo", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_ranges_of_a_transformer(dynamo, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BertModel(config, add_pooling_layer=False)
    tokens = {"input_ids": torch.arange(16).reshape(2, 8)}
    made = []
    for seed in (1, 2):
        file, output = tmp_path / f"{seed}.onnx", tmp_path / f"{seed}_int8.onnx"
        htp_export.export(
            net(seed, lambda: model), (), file, kwargs=tokens, dynamo=dynamo, verbose=False
        )
        [name] = [str(value.name) for value in htp_export.load(file).model.graph.inputs]
        data = {name: tokens["input_ids"].numpy()}
        htp_export.quantize(file, "int8", output, data=data)
        made.append(output)
    bound = htp_export.bind(made[0], model, data=data)
    assert different(bound.model, made[1]) == []
    assert bound.unmeasured == {}
    assert bound.measured > 50
