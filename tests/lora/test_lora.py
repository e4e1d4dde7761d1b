"""LoRA adapters: inserted, switched at run time, converted from PEFT, fused."""

import contextlib
import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import htp_export
from htp_export.capabilities.lora.adapters import read_adapter
from htp_export.command.main import main
from htp_export.errors import FileError, InputError
from tests.exporting import BOTH, exported_once
from tests.extract.test_cutting import exported_to
from tests.hostile import JSON
from tests.nets import composed, spread, x
from tests.quantized import matrix_of
from tests.truth import inexact, untagged


def net() -> nn.Module:
    """Products of two and three dimensions, with and without bias; one layer runs twice; one is followed by a ReLU."""
    return composed(
        lambda self, x: self.head(
            self.down(torch.relu(self.twice(torch.tanh(self.twice(self.up(x)))))).mean(1)
        ),
        up=nn.Linear(6, 8),
        twice=nn.Linear(8, 8, bias=False),
        down=nn.Linear(8, 4),
        head=nn.Linear(4, 3),
    )


def feeds() -> dict[str, torch.Tensor]:
    return {"x": x(2, 5, 6)}


def made(exporter: str, folder: Path) -> tuple[nn.Module, Path]:
    return exported_once(net, feeds, exporter, folder)


def factors(
    model: nn.Module, paths: list[str], rank: int, seed: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    layers = {path: model.get_submodule(path) for path in paths}
    return {
        path: (x(rank, layer.in_features, seed=seed), x(layer.out_features, rank, seed=seed + 1))
        for path, layer in layers.items()
    }


def arrays_of(layers: dict[str, Any]) -> dict[str, Any]:
    """Name of an input of the model → factor."""
    return {
        f"{path}.lora_{letter}.weight": factor.numpy()
        for path, pair in layers.items()
        for letter, factor in zip("AB", pair, strict=True)
    }


def adapter(folder: Path, name: str, layers: dict[str, Any], alpha: float, **config: Any) -> Path:
    """A folder as PEFT writes it."""
    made_at = folder / name
    made_at.mkdir()
    tensors = {}
    for path, (a, b) in layers.items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = a
        tensors[f"base_model.model.{path}.lora_B.weight"] = b
    save_file(tensors, made_at / "adapter_model.safetensors")
    written = {"peft_type": "LORA", "lora_alpha": alpha, "r": 4, **config}
    (made_at / "adapter_config.json").write_text(json.dumps(written))
    return made_at


def merged(model: nn.Module, layers: dict[str, Any], scaling: float) -> nn.Module:
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for path, (a, b) in layers.items():
            changed.get_submodule(path).weight += scaling * b @ a
    return changed


def run(
    file: Path, arrays: dict[str, Any] | None = None, adapter_file: Path | None = None
) -> np.ndarray[Any, Any]:
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    run_options = ort.RunOptions()
    if adapter_file is not None:
        active = ort.LoraAdapter()
        active.Load(str(adapter_file))
        run_options.add_active_adapter(active)
    name = session.get_inputs()[0].name
    given = arrays or {}
    return session.run(
        None, given if name in given else {name: feeds()["x"].numpy(), **given}, run_options
    )[0]


def close(one: Any, other: Any) -> bool:
    return np.allclose(one, other, rtol=1e-4, atol=1e-5)


@BOTH
def test_without_an_adapter_the_model_computes_what_it_did_before(exporter, tmp_path):
    model, file = made(exporter, tmp_path)
    result = htp_export.lora.insert(file, "**", rank=4, alpha=8, output=tmp_path / "lora.onnx")
    assert list(result.modules) == ["up", "twice", "down", "head"]
    assert [(layer.inputs, layer.outputs, layer.calls) for layer in result.modules.values()] == [
        (6, 8, 1), (8, 8, 2), (8, 4, 1), (4, 3, 1),
    ]  # fmt: skip
    assert np.array_equal(run(file), run(tmp_path / "lora.onnx"))
    written = onnx.load(tmp_path / "lora.onnx")
    onnx.checker.check_model(str(tmp_path / "lora.onnx"), full_check=True)
    assert untagged(written) == []
    assert [fault for fault in inexact(model, feeds(), written) if ".lora_" not in fault[0]] == []
    assert [each.name for each in written.graph.input][1:3] == [
        "up.lora_A.weight",
        "up.lora_B.weight",
    ]
    assert htp_export.verify(model, tmp_path / "lora.onnx", (), feeds()).ok


def test_an_adapter_has_its_effect_after_the_file_is_optimised(tmp_path):
    model, file = made("dynamo", tmp_path)
    inserted = htp_export.lora.insert(file, "**", rank=4, alpha=8)
    htp_export.optimize(inserted, tmp_path / "optimised.onnx", level="fused")
    layers = factors(model, ["up", "twice", "down", "head"], 4, seed=3)
    arrays = arrays_of(layers)
    with torch.no_grad():
        assert close(run(tmp_path / "optimised.onnx"), model(**feeds()))
        assert close(run(tmp_path / "optimised.onnx", arrays), merged(model, layers, 2)(**feeds()))


@BOTH
def test_nodes_and_names_that_were_there_stay(exporter, tmp_path):
    _, file = made(exporter, tmp_path)
    before, after = (
        htp_export.load(file),
        htp_export.lora.insert(file, "down", rank=4, alpha=8).tagged,
    )
    kept = {node.name: node for node in after.nodes}
    assert all(kept[node.name].op_type == node.op_type for node in before.nodes)
    names = {node.name for node in before.nodes}
    assert before.signatures["down"] == after.signatures["down"]
    added = [node for node in after["down"].nodes if node.name not in names]
    assert [node.op_type for node in added] == [
        "Transpose",
        "MatMul",
        "Transpose",
        "MatMul",
        "Mul",
        "Add",
    ]
    assert {node.metadata_props["htp.reason"] for node in added} == {"inserted"}
    assert {path: len(after[path].nodes) for path in ("down.lora_A", "down.lora_B")} == {
        "down.lora_A": 2,
        "down.lora_B": 2,
    }
    assert after.paths == ["", "up", "twice", "down", "down.lora_A", "down.lora_B", "head"]
    assert after.hierarchy["down.lora_A"].synthetic
    [call] = after.signatures["down.lora_A"]
    assert call.inputs["x"] in before.values
    assert htp_export.cost(after).modules[""].flops > 0


@BOTH
def test_adapters_of_other_ranks_are_switched_at_run_time(exporter, tmp_path):
    model, file = made(exporter, tmp_path)
    htp_export.lora.insert(file, "**", rank=4, alpha=8, output=tmp_path / "lora.onnx")
    for name, rank, alpha, paths in (
        ("a", 4, 8, ["up", "twice", "head"]),
        ("b", 2, 10, ["down", "twice"]),
    ):
        layers = factors(model, paths, rank, seed=ord(name))
        folder = adapter(tmp_path, name, layers, alpha)
        converted = htp_export.lora.adapter(
            tmp_path / "lora.onnx", folder, tmp_path / f"{name}.onnx_adapter"
        )
        wanted = merged(model, layers, alpha / rank)(**feeds()).detach().numpy()
        assert not close(wanted, run(file))
        assert close(
            wanted, run(tmp_path / "lora.onnx", adapter_file=tmp_path / f"{name}.onnx_adapter")
        )
        assert close(wanted, run(tmp_path / "lora.onnx", dict(converted.arrays)))
        assert converted.ranks == dict.fromkeys(sorted(paths), rank)
        again = read_adapter(tmp_path / f"{name}.onnx_adapter")
        assert sorted(again.layers) == sorted(paths)
    a = htp_export.lora.adapter(tmp_path / "lora.onnx", tmp_path / "a")
    assert np.array_equal(
        a.arrays["up.lora_A.weight"], factors(model, ["up"], 4, ord("a"))["up"][0].numpy()
    )


@BOTH
@pytest.mark.parametrize("inserted", [False, True])
def test_a_fused_adapter_is_in_the_weights(inserted, exporter, tmp_path):
    model, file = made(exporter, tmp_path)
    layers = factors(model, ["up", "twice", "head"], 4, seed=3)
    folder = adapter(tmp_path, "a", layers, 6)
    source = tmp_path / "lora.onnx" if inserted else file
    if inserted:
        htp_export.lora.insert(file, "**", rank=4, alpha=8, output=source)
        htp_export.lora.adapter(source, folder, tmp_path / "a.onnx_adapter")
    result = htp_export.lora.fuse(source, folder, tmp_path / "fused.onnx")
    wanted = merged(model, layers, 6 / 4)
    assert close(run(tmp_path / "fused.onnx"), wanted(**feeds()).detach().numpy())
    assert htp_export.verify(wanted, tmp_path / "fused.onnx", (), feeds()).ok
    assert result.ranks == {"head": 4, "twice": 4, "up": 4}
    before, after = htp_export.load(file), htp_export.load(tmp_path / "fused.onnx")
    assert [node.name for node in after.nodes] == [node.name for node in before.nodes]
    assert list(after.values) == list(before.values)
    assert after.model.metadata_props.get("htp.lora") is None
    assert after.paths == before.paths
    assert after.signatures == before.signatures
    if inserted:
        fused = htp_export.lora.fuse(source, tmp_path / "a.onnx_adapter")
        weight = "up.weight" if "up.weight" in fused.model.graph.initializers else None
        if weight:
            arrays = [
                m.graph.initializers[weight].const_value.numpy() for m in (fused.model, after.model)
            ]
            assert close(*arrays)


def test_merged_projections_take_adapters_but_no_fusing(tmp_path):
    def attend(self: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.q(x) @ self.k(x).transpose(1, 2), -1) @ self.v(x)

    torch.manual_seed(0)
    model = spread(composed(attend, **{name: nn.Linear(6, 4) for name in "qkv"})).eval()
    file = exported_to(tmp_path / "net.onnx", model, feeds(), "dynamo")
    htp_export.optimize(
        file, tmp_path / "merged.onnx", passes=["merge_parallel_projections"], level="tolerant"
    )
    assert "Slice" in {node.op_type for node in htp_export.load(tmp_path / "merged.onnx").nodes}
    htp_export.lora.insert(
        tmp_path / "merged.onnx", "q, v", rank=2, alpha=4, output=tmp_path / "lora.onnx"
    )
    layers = factors(model, ["q", "v"], 2, seed=5)
    folder = adapter(tmp_path, "a", layers, 4)
    htp_export.lora.adapter(tmp_path / "lora.onnx", folder, tmp_path / "a.onnx_adapter")
    wanted = merged(model, layers, 2)(**feeds()).detach().numpy()
    assert close(wanted, run(tmp_path / "lora.onnx", adapter_file=tmp_path / "a.onnx_adapter"))
    with pytest.raises(InputError, match=r"module 'q': its weight .* is also that of 'k', 'v'"):
        htp_export.lora.fuse(tmp_path / "merged.onnx", folder)


@BOTH
def test_a_model_in_blocks_of_four_bits_takes_adapters_of_floats_and_no_fusing(exporter, tmp_path):
    """As QLoRA has it: the base quantized, the factors in floating point; weights have several blocks of 32."""
    torch.manual_seed(0)
    parts = {
        "up": nn.Linear(6, 64),
        "down": nn.Linear(64, 96, bias=False),
        "head": nn.Linear(96, 3),
    }
    wide = composed(
        lambda self, x: self.head(torch.tanh(self.down(torch.relu(self.up(x))))), **parts
    )
    model = spread(wide).eval()
    file = exported_to(tmp_path / "net.onnx", model, feeds(), exporter)
    quantized = htp_export.quantize(
        file, {"**": "int4:accuracy_level=0", "head": "fp32"}, tmp_path / "int4.onnx"
    ).tagged
    base = copy.deepcopy(model)
    for path in ("up", "down"):
        [product] = [node for node in quantized[path].nodes if node.op_type == "MatMulNBits"]
        base.get_submodule(path).weight.data = torch.from_numpy(matrix_of(product))
    result = htp_export.lora.insert(
        tmp_path / "int4.onnx", "**", rank=4, alpha=8, output=tmp_path / "lora.onnx"
    )
    assert list(result.modules) == ["up", "down", "head"]
    assert np.array_equal(run(tmp_path / "lora.onnx"), run(tmp_path / "int4.onnx"))
    assert np.allclose(
        run(tmp_path / "int4.onnx"), base(**feeds()).detach().numpy(), rtol=1e-3, atol=1e-4
    )
    layers = {
        path: (a / 4, b / 4)
        for path, (a, b) in factors(model, ["up", "down", "head"], 4, seed=3).items()
    }
    folder = adapter(tmp_path, "a", layers, 8)
    htp_export.lora.adapter(tmp_path / "lora.onnx", folder, tmp_path / "a.onnx_adapter")
    adapted = run(tmp_path / "lora.onnx", adapter_file=tmp_path / "a.onnx_adapter")
    assert np.allclose(
        adapted, merged(base, layers, 2)(**feeds()).detach().numpy(), rtol=1e-3, atol=1e-3
    )
    assert not np.allclose(adapted, run(tmp_path / "int4.onnx"), rtol=1e-2, atol=1e-2)
    sizes = {node.op_type for node in htp_export.load(tmp_path / "lora.onnx")["up"].nodes}
    assert "MatMulNBits" in sizes
    for source in ("lora.onnx", "int4.onnx"):
        with pytest.raises(
            InputError, match=r"module 'down': its weight is quantized \(com.microsoft::MatMulNBits"
        ):
            htp_export.lora.fuse(tmp_path / source, folder, tmp_path / "out.onnx")
    assert not (tmp_path / "out.onnx").exists()


def test_weights_of_eight_bits_are_refused_with_what_to_do(tmp_path):
    model, file = made("dynamo", tmp_path)
    quantized = htp_export.quantize(file, {"up": "int8"}, data=[{"x": feeds()["x"].numpy()}]).tagged
    folder = adapter(tmp_path, "a", factors(model, ["up"], 4, seed=3), 8)
    with pytest.raises(
        InputError, match=r"module 'up': its weight is quantized .*; fuse the adapter before"
    ):
        htp_export.lora.fuse(quantized, folder)


@pytest.mark.parametrize("config", [{"use_rslora": True}, {"alpha_pattern": {"up": 12.0}}])
def test_the_scaling_is_that_of_the_config(config, tmp_path):
    model, _ = made("torchscript", tmp_path)
    folder = adapter(tmp_path, "a", factors(model, ["up", "down"], 4, seed=3), 6, **config)
    layers = read_adapter(folder).layers
    scalings = {path: layer.scaling for path, layer in layers.items()}
    assert scalings == (
        {"up": 3.0, "down": 3.0} if "use_rslora" in config else {"up": 3.0, "down": 1.5}
    )


@pytest.mark.parametrize(
    "pattern",
    [
        "up",
        "^up",
        "^block.up",
        "u.",
        r"(?:up|down)",
        "(?!down).*",
        "p",
        "up$|down",
        "UP",
        "(?i)UP",
        "block.*",
    ],
)
def test_patterns_of_the_config_match_what_they_match_in_peft(pattern, tmp_path):
    model, _ = made("torchscript", tmp_path)
    folder = adapter(
        tmp_path, "a", factors(model, ["up", "down"], 4, seed=3), 8, alpha_pattern={pattern: 12}
    )
    try:
        found = {path: layer.scaling for path, layer in read_adapter(folder).layers.items()}
    except FileError:
        found = None
    try:  # peft.utils.other.get_pattern_key
        known = {
            path: 3 if re.match(rf"(.*\.)?({pattern})$", path) else 2 for path in ("down", "up")
        }
    except re.error:
        known = None
    assert found == known


@pytest.mark.parametrize(
    ("patterns", "problem"),
    [
        ({"(": 1}, r"has an alpha_pattern '\(' that cannot be read: missing \)"),
        (
            {"(u)\\3": 1},
            "has an alpha_pattern .* that cannot be read: the regular expression contains groupref",
        ),
        ({"a{99999999999}{99999999999}": 1}, "cannot be read"),
        (["up"], "has an alpha_pattern that is no JSON object"),
        ({"up": "1"}, "has no lora_alpha for module 'm"),
        ({"up": float("nan")}, "has no lora_alpha for module 'm"),
        ({"(.|.|.|.|.|.|.|.)*!": 1, "(.*.*)*=": 1}, ""),
    ],
)
def test_patterns_that_are_none_are_refused_and_slow_ones_end(patterns, problem, tmp_path):
    long = "m." * 500 + "up"
    layers = {long: (x(4, 3), x(5, 4)), "up": (x(4, 3), x(5, 4))}
    folder = adapter(tmp_path, "a", layers, 8, alpha_pattern=patterns)
    if not problem:
        assert {layer.scaling for layer in read_adapter(folder).layers.values()} == {2}
        return
    with pytest.raises(FileError, match=f"adapter_config.json: .*{problem}"):
        read_adapter(folder)


@pytest.mark.parametrize(
    "setting",
    ["lora_alpha", "alpha_pattern", "init_lora_weights", "use_dora", "use_rslora", "peft_type"],
)
def test_whatever_a_setting_of_the_config_is_the_adapter_is_read_or_at_fault(setting, tmp_path):
    folder = adapter(tmp_path, "a", {"up": (x(4, 3), x(5, 4))}, 8)
    config = json.loads((folder / "adapter_config.json").read_text())
    for text in JSON:
        written = json.dumps({**config, setting: "here"}).replace('"here"', text)
        (folder / "adapter_config.json").write_text(written, encoding="utf-8")
        with contextlib.suppress(InputError):
            assert all(np.isfinite(layer.scaling) for layer in read_adapter(folder).layers.values())


def test_adapters_that_do_not_fit_are_refused(tmp_path):
    model, file = made("torchscript", tmp_path)
    htp_export.lora.insert(file, "**", output=tmp_path / "lora.onnx")
    up = a, b = factors(model, ["up"], 4, seed=3)["up"]
    named = "base_model.model.up"
    folders = {
        name: adapter(tmp_path, name, {"up": up}, 6)
        for name in ("bias", "magnitude", "pickle", "cut")
    }
    factored = {f"{named}.lora_A.weight": a, f"{named}.lora_B.weight": b}
    save_file({**factored, f"{named}.bias": x(7)}, folders["bias"] / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "lora_alpha": 6, "use_dora": True}
    (folders["magnitude"] / "adapter_config.json").write_text(json.dumps(config))
    save_file(
        {**factored, "up.lora_magnitude_vector": x(7)},
        folders["magnitude"] / "adapter_model.safetensors",
    )
    (folders["pickle"] / "adapter_model.safetensors").rename(
        folders["pickle"] / "adapter_model.bin"
    )
    whole = (folders["cut"] / "adapter_model.safetensors").read_bytes()
    (folders["cut"] / "adapter_model.safetensors").write_bytes(whole[:-8])
    (tmp_path / "empty").mkdir()
    refused = {
        "has no DoRA magnitude for module 'up'": adapter(
            tmp_path, "dora", {"up": up}, 6, use_dora=True
        ),
        "peft_type is not 'LORA'": adapter(tmp_path, "other", {"up": up}, 6, peft_type="IA3"),
        "module 'nowhere' of the adapter is none of the": adapter(
            tmp_path, "elsewhere", {"nowhere": up}, 6
        ),
        "'down' maps 6 numbers to 8, and that of the model 8 to 4": adapter(
            tmp_path, "large", {"down": up}, 6
        ),
        "has no two factors of one rank for module 'up'": adapter(
            tmp_path, "ranks", {"up": (a, x(8, 3))}, 6
        ),
        "parameter 'up.bias' has the shape|has 'up.bias', which is no LoRA factor": folders["bias"],
        "has 7 DoRA magnitudes for module 'up', of 8 outputs": folders["magnitude"],
        r"has layer_replication=\[\[0, 2\]\], a variant of LoRA that is not read": adapter(
            tmp_path, "variant", {"up": up}, 6, layer_replication=[[0, 2]]
        ),
        "pickles are not read": folders["pickle"],
        "cannot be read": folders["cut"],
        "has no lora_alpha for module 'up'": adapter(
            tmp_path, "alpha", {"up": up}, 6, lora_alpha=None
        ),
        "adapter_config.json: cannot be read": tmp_path / "empty",
        rf"'{named}\.lora_A\.weight' that are not finite": adapter(
            tmp_path, "nan", {"up": (a * np.nan, b)}, 6
        ),
        rf"'{named}\.lora_B\.weight' that are not finite": adapter(
            tmp_path, "infinite", {"up": (a, b / 0)}, 6
        ),
    }
    for message, folder in refused.items():
        for function, source in (
            (htp_export.lora.adapter, "lora.onnx"),
            (htp_export.lora.fuse, "model.onnx"),
        ):
            with pytest.raises(InputError, match=message):
                function(tmp_path / source, folder, tmp_path / "out.onnx")
    with pytest.raises(FileError, match="is no adapter file of ONNX Runtime"):
        htp_export.lora.fuse(file, file)
    with pytest.raises(InputError, match="the model takes no adapters"):
        htp_export.lora.adapter(file, tmp_path / "large")
    assert not (tmp_path / "out.onnx").exists()


def test_paths_of_a_model_inside_another_are_found_by_their_end(tmp_path):
    model, file = made("torchscript", tmp_path)
    layers = factors(model, ["up"], 4, seed=3)
    folder = adapter(tmp_path, "a", {"encoder.up": layers["up"]}, 6)
    assert htp_export.lora.fuse(file, folder).ranks == {"up": 4}


def test_modules_that_cannot_take_adapters_are_refused(tmp_path):
    _, file = made("torchscript", tmp_path)
    with pytest.raises(InputError, match=r"at or below the modules of 'up\.lora_A'"):
        htp_export.lora.insert(htp_export.lora.insert(file, "up").tagged, "up.lora_A")
    with pytest.raises(InputError, match="module 'up' takes adapters already"):
        htp_export.lora.insert(htp_export.lora.insert(file, "up").tagged, "**")
    for rank, alpha, message in (
        (0, 1, "rank 0"),
        (True, 1, "rank True"),
        (4, 0, "alpha 0"),
        (4, float("nan"), "alpha"),
    ):
        with pytest.raises(InputError, match=message):
            htp_export.lora.insert(file, "up", rank=rank, alpha=alpha)
    net = nn.Sequential(nn.Embedding(4, 3), nn.ReLU()).eval()
    exported = htp_export.export(net, (torch.tensor([[1, 2]]),), verbose=False)
    with pytest.raises(InputError, match="there is no linear layer"):
        htp_export.lora.insert(exported, "**")


@BOTH
def test_modules_that_multiply_in_other_ways_are_left_out(exporter, tmp_path):
    weights = {"first": nn.Parameter(x(6, 6)), "second": nn.Parameter(x(6, 6, seed=1))}
    mix = composed(lambda self, x: x @ self.first + (x @ self.second).tanh(), **weights)
    weights = {"vector": nn.Parameter(x(6)), "shift": nn.Parameter(x(2, 6, seed=1))}
    gate = composed(lambda self, x: x * (x @ self.vector)[..., None] + self.shift, **weights)
    net = composed(
        lambda self, x: self.layer(self.gate(self.mix(x))),
        mix=mix,
        gate=gate,
        layer=nn.Linear(6, 6),
    )
    file = exported_to(tmp_path / "net.onnx", spread(net).eval(), {"x": x(2, 6)}, exporter)
    assert list(htp_export.lora.insert(file, "**").modules) == ["layer"]
    with pytest.raises(
        InputError,
        match="module 'mix' is no linear layer: it has 2 products with constant matrices",
    ):
        htp_export.lora.insert(file, "mix")


@pytest.mark.long
@BOTH
def test_attention_that_is_one_module_is_verified_beside_adapters(exporter, tmp_path):
    layer = spread(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)).eval()
    file = exported_to(tmp_path / "net.onnx", layer, {"src": x(1, 5, 8)}, exporter)
    assert list(htp_export.lora.insert(file, "**", tmp_path / "lora.onnx").modules) == [
        "linear1",
        "linear2",
    ]
    verified = htp_export.verify(layer, tmp_path / "lora.onnx", (), {"src": x(1, 5, 8)})
    assert verified.ok, verified.summary


@BOTH
def test_calls_that_compute_nothing_take_no_adapter(exporter, tmp_path):
    model = spread(
        composed(
            lambda self, x: (self.layer(x * 2), self.layer(x))[1], layer=nn.Linear(6, 6)
        ).eval()
    )
    file = exported_to(tmp_path / "net.onnx", model, {"x": x(2, 6)}, exporter)
    result = htp_export.lora.insert(file, "layer", rank=4, output=tmp_path / "lora.onnx")
    assert result.modules["layer"].calls == 1
    assert htp_export.verify(model, tmp_path / "lora.onnx", (), {"x": x(2, 6)}).ok


@BOTH
def test_adapters_that_are_not_given_are_calibrated_as_the_model_has_them(exporter, tmp_path):
    model, file = made(exporter, tmp_path)
    htp_export.lora.insert(file, "**", rank=4, output=tmp_path / "lora.onnx")
    data = [{onnx.load(file).graph.input[0].name: feeds()["x"]}]
    htp_export.quantize(tmp_path / "lora.onnx", "u8s8", tmp_path / "u8s8.onnx", data=data)
    with torch.no_grad():
        assert np.allclose(run(tmp_path / "u8s8.onnx"), model(**feeds()), atol=0.1)


def test_layers_can_be_added_later(tmp_path):
    _, file = made("torchscript", tmp_path)
    first = htp_export.lora.insert(file, "up", rank=4, alpha=8)
    both = htp_export.lora.insert(first.tagged, "down", rank=4, alpha=4)
    assert json.loads(both.model.metadata_props["htp.lora"]) == {
        "up": {"scaling": 2.0},
        "down": {"scaling": 1.0},
    }
    assert first.tagged.paths != both.tagged.paths


def test_half_precision(tmp_path):
    model = nn.Sequential(nn.Linear(6, 4)).half().eval()
    file = exported_to(tmp_path / "net.onnx", model, {"input": x(2, 6).half()}, "dynamo")
    result = htp_export.lora.insert(file, "0", rank=4, alpha=8)
    graph = result.model.graph
    assert {str(value.dtype) for value in graph.inputs} == {"FLOAT16"}
    folder = adapter(tmp_path, "a", {"0": (x(4, 6).bfloat16(), x(4, 4).bfloat16())}, 8)
    assert (
        htp_export.lora.adapter(result.tagged, folder).arrays["0.lora_A.weight"].dtype == np.float16
    )


@pytest.mark.parametrize(
    "exporter", ["torchscript", pytest.param("dynamo", marks=pytest.mark.slow)]
)
def test_outputs_with_an_adapter_that_peft_wrote_are_those_of_peft(exporter, tmp_path):
    """The matrices of GPT-2 are stored the other way round."""
    peft = pytest.importorskip("peft")
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    sizes = GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=30, n_positions=16)
    base, targets = spread(GPT2Model(sizes)).eval(), ["c_attn", "c_proj"]
    ids = torch.tensor([[3, 7, 1, 9, 2]])
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "use_cache": False,
        "return_dict": False,
    }
    file = exported_to(tmp_path / "net.onnx", base, dict(inputs), exporter)
    config = peft.LoraConfig(
        r=4, lora_alpha=10, target_modules=targets, bias="none", fan_in_fan_out=True
    )
    wrapped = peft.get_peft_model(copy.deepcopy(base), config).eval()
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data = x(*parameter.shape, seed=len(name)) * 0.2
    wrapped.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        wanted, plain = wrapped(**inputs)[0], base(**inputs)[0]
    assert not close(wanted, plain)
    htp_export.lora.insert(
        file, [f"**.{name}" for name in targets], rank=4, alpha=10, output=tmp_path / "lora.onnx"
    )
    converted = htp_export.lora.adapter(
        tmp_path / "lora.onnx", tmp_path / "adapter", tmp_path / "a.onnx_adapter"
    )
    named = zip(onnx.load(file).graph.input, inputs.values(), strict=False)
    arrays = {given.name: value.numpy() for given, value in named}
    assert close(run(tmp_path / "lora.onnx", arrays, tmp_path / "a.onnx_adapter"), wanted)
    saved = (
        name.replace(".default", "").removeprefix("base_model.model.")
        for name in wrapped.state_dict()
    )
    assert set(converted.arrays) == {name for name in saved if "lora_" in name}


class TestCommands:
    def test_insert_convert_fuse(self, tmp_path, monkeypatch, capsys):
        model, _ = made("torchscript", tmp_path)
        adapter(tmp_path, "tuned", factors(model, ["up"], 4, seed=3), 8)
        monkeypatch.chdir(tmp_path)
        insert = [
            "lora",
            "insert",
            "model.onnx",
            "up,down",
            "--rank",
            "4",
            "--alpha",
            "8",
            "-o",
            "lora.onnx",
        ]
        assert main(insert) == 0
        assert "wrote lora.onnx" in capsys.readouterr().out
        assert main([*insert, "--json"]) == 0
        written = json.loads(capsys.readouterr().out)
        assert written["modules"]["up"]["names"] == ["up.lora_A.weight", "up.lora_B.weight"]
        assert main(["lora", "adapter", "lora.onnx", "tuned", "-o", "tuned.onnx_adapter"]) == 0
        assert "1 linear layers, rank 4 -> tuned.onnx_adapter" in capsys.readouterr().out
        assert (
            main(["lora", "adapter", "lora.onnx", "tuned", "-o", "tuned.onnx_adapter", "--json"])
            == 0
        )
        assert json.loads(capsys.readouterr().out)["ranks"] == {"up": 4}
        assert main(["lora", "fuse", "model.onnx", "tuned", "-o", "fused.onnx", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["ranks"] == {"up": 4}


@pytest.mark.parametrize(
    "exporter", ["dynamo", pytest.param("torchscript", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("chosen", ["**", "class:Linear"])
def test_what_adapters_change_in_eight_bits_is_not_clipped_to_ranges_without_one(
    chosen, exporter, tmp_path
):
    """An error as without an adapter; with the ranges, it was 0.2 to 0.9 where an inner layer has one."""
    model, file = made(exporter, tmp_path)
    name = onnx.load(file).graph.input[0].name
    quantized = tmp_path / "int8.onnx"
    htp_export.quantize(file, {chosen: "int8"}, quantized, data={name: feeds()["x"].numpy()})
    without = model(**feeds()).detach().numpy()
    pairs = sum(node.op_type == "QuantizeLinear" for node in htp_export.load(quantized).nodes)
    for path in ("up", "twice", "down", "head"):
        layers = {
            path: (0.8 * a, 0.8 * b) for path, (a, b) in factors(model, [path], 4, seed=5).items()
        }
        arrays = arrays_of(layers)
        wanted = merged(model, layers, 1.0)(**feeds()).detach().numpy()
        errors = {}
        for each in (file, quantized):
            result = htp_export.lora.insert(
                each, path, rank=4, alpha=4, output=tmp_path / "lora.onnx"
            )
            errors[each.stem] = (
                np.abs(run(tmp_path / "lora.onnx", arrays) - wanted).max() / np.abs(wanted).max()
            )
        assert np.abs(without - wanted).max() / np.abs(wanted).max() > 0.2
        assert errors["model"] < 1e-5
        assert errors["int8"] < 0.03
        assert np.abs(run(tmp_path / "lora.onnx") - without).max() / np.abs(without).max() < 0.03
        left = htp_export.load(tmp_path / "lora.onnx")
        assert sum(node.op_type == "QuantizeLinear" for node in left.nodes) == pairs - result.ranges
        assert result.ranges > 0 or path == "head"  # nothing is quantized behind the last layer
        assert untagged(onnx.load(tmp_path / "lora.onnx")) == []
        assert [name for name in left.signatures[path][0].outputs if name not in left.values] == []


def test_inputs_without_defaults_are_required(tmp_path):
    model, file = made("torchscript", tmp_path)
    htp_export.lora.insert(file, "up", tmp_path / "lora.onnx", rank=4, alpha=8, required=True)
    layers = factors(model, ["up"], 4, seed=3)
    folder = adapter(tmp_path, "a", layers, 8)
    arrays = dict(htp_export.lora.adapter(tmp_path / "lora.onnx", folder).arrays)
    assert close(
        run(tmp_path / "lora.onnx", arrays), merged(model, layers, 2)(**feeds()).detach().numpy()
    )
    nothing = {
        name: array[:0] if "lora_A" in name else array[:, :0] for name, array in arrays.items()
    }
    assert np.array_equal(run(tmp_path / "lora.onnx", nothing), run(file))
    with pytest.raises(ValueError, match=r"up\.lora_A\.weight"):
        run(tmp_path / "lora.onnx")
    htp_export.lora.fuse(tmp_path / "lora.onnx", folder, tmp_path / "fused.onnx")
    assert close(run(tmp_path / "fused.onnx"), merged(model, layers, 2)(**feeds()).detach().numpy())
