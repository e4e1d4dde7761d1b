"""quantize on architectures: each in every precision, whole and in part, from both exporters where torch has both."""

from __future__ import annotations

import itertools
import platform
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest

import htp_export
from htp_export.command.main import main
from htp_export.runtime.inputs import Inputs
from tests.decoders import DECODERS
from tests.exporting import of_type
from tests.nets import spread
from tests.quantized import IDS, assert_others_are_the_same, assert_tagged, outputs

Feed = dict[str, npt.NDArray[Any]]
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
PRECISIONS = ["int8", "u8s8", "uint8", "int8-dynamic", "int4", "int8-weights", "fp16"]
MOST = {"int8": 0.25, "u8s8": 0.25, "uint8": 0.25, "int8-dynamic": 0.1, "int4": 0.3, "int8-weights": 0.05, "fp16": 0.01}


SOUND = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "vocab_size": 64}
SOUND |= {"decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 48, "max_source_positions": 20}
SOUND |= {"num_mel_bins": 8, "decoder_start_token_id": 3, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "bert": ({**SMALL, "vocab_size": 64, "max_position_embeddings": 32}, "encoder.layer.1.attention"),
    "gpt2": (DECODERS["gpt2"], "h.0.mlp"),
    "vit": ({**SMALL, "image_size": 32, "patch_size": 8}, "layers.1"),
    "resnet": (
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"},
        "encoder.stages.1",
    ),
    "whisper": (SOUND, "layers.0.self_attn"),
}
QUICK = {("bert", "torchscript"), ("resnet", "dynamo")}
FILES = [
    pytest.param(case, id="-".join(case), marks=() if case in QUICK else pytest.mark.slow)
    for case in itertools.product(MODELS, ("dynamo", "torchscript"))
]


@pytest.fixture(scope="module", params=FILES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Feed, str]:
    name, exporter = request.param
    settings, part = MODELS[name]
    model, inputs = of_type(name, **settings)
    if name == "whisper":  # its encoder alone
        model, inputs = model.encoder, {"input_features": inputs["input_features"]}
    file = tmp_path_factory.mktemp(name) / f"{name}.onnx"
    names = {} if exporter == "dynamo" else {"input_names": list(inputs)}
    model = spread(model.eval())
    htp_export.export(model, (), file, kwargs=inputs, dynamo=exporter == "dynamo", verbose=False, **names)
    known = {each.name for each in Inputs.of(htp_export.load(file).model)}
    return file, {key: value.numpy() for key, value in inputs.items() if key in known}, part


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Feed]:
    """A llama with its cache; torch exports it with dynamo alone."""
    pytest.importorskip("transformers.exporters", reason="transformers older than 5.23 has no exporters")
    file = tmp_path_factory.mktemp("llama") / "llama.onnx"
    settings = [word for key, value in DECODERS["llama"].items() for word in ("--set", f"{key}={value}")]
    task = ["--task", "text-generation-with-past", "--quiet"]
    assert main(["export", "llama", "--random-weights", *settings, *task, "-o", str(file)]) == 0
    generator = np.random.default_rng(0)
    shapes = {"input_ids": (2, 3), "attention_mask": (2, 7), "position_ids": (2, 3)}
    inputs = Inputs.of(htp_export.load(file).model)
    shapes = {key: shape for key, shape in shapes.items() if key in inputs}
    feed = inputs.random({"past_sequence_length": 4}, shapes).arrays
    feed |= {"input_ids": generator.integers(0, 60, (2, 3)), "attention_mask": np.ones((2, 7), np.int64)}
    if "position_ids" in inputs:
        feed["position_ids"] = np.broadcast_to(np.arange(4, 7), (2, 3)).copy()
    return file, feed


def assert_holds(file: Path, plan: dict[str, str], data: Feed, target: Path) -> None:
    """Quantize, and check tags, what stayed, predicted bytes, and that it runs and is near."""
    [(chosen, precision)] = plan.items()
    result = htp_export.quantize(file, plan, target, data=[data, data])
    assert_tagged(file, target, chosen)
    assert_others_are_the_same(file, target, chosen)
    predicted = htp_export.quantize(file, plan, dry_run=True)
    sizes = {path: module.bytes_after for path, module in result.modules.items()}
    expected_sizes = {path: module.bytes_after for path, module in predicted.modules.items()}
    if any("fill masks" in note for note in result.notes):  # nodes stay as they are, which only the data tell
        assert all(expected_sizes[path] <= size for path, size in sizes.items())
    else:
        assert sizes == expected_sizes
    assert sizes[""] < result.modules[""].bytes_before
    for expected, found in zip(outputs(file, data), outputs(target, data), strict=True):
        assert found.dtype == expected.dtype
        assert np.abs(found - expected).max() <= MOST[precision] * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_models_in_every_precision(exported: tuple[Path, Feed, str], precision: str, tmp_path: Path) -> None:
    file, feed, part = exported
    if "resnet" in file.name and precision in ("int4", "int8-weights"):
        with pytest.raises(htp_export.InputError, match=f"no operator of .* takes {precision}"):
            htp_export.quantize(file, {".": precision}, tmp_path / "quantized.onnx")
        return
    for chosen in (".", part):
        assert_holds(file, {chosen: precision}, feed, tmp_path / "quantized.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_decoder_with_its_cache(decoder: tuple[Path, Feed], precision: str, tmp_path: Path) -> None:
    file, feed = decoder
    for chosen in (".", "model.layers.*.self_attn", "lm_head"):
        assert_holds(file, {chosen: precision}, feed, tmp_path / "quantized.onnx")


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="elsewhere, int8 is fused, too")
def test_onnx_runtime_fuses_u8s8_where_it_does_not_fuse_int8(net: Path, tmp_path: Path) -> None:
    """It leaves many operators with int8 activations between DequantizeLinear and QuantizeLinear."""
    optimised, left = tmp_path / "optimised.onnx", {}
    for precision in ("int8", "u8s8"):
        htp_export.quantize(net, {"class:Linear": precision}, tmp_path / "quantized.onnx", data={"ids": IDS})
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath, options.log_severity_level = str(optimised), 3
        onnxruntime.InferenceSession(tmp_path / "quantized.onnx", options, providers=["CPUExecutionProvider"])
        left[precision] = Counter(node.op_type for node in onnx.load(optimised).graph.node)["DequantizeLinear"]
    assert left["u8s8"] < left["int8"]


def test_mixed_precision_by_layer(exported: tuple[Path, Feed, str], tmp_path: Path) -> None:
    file, feed, part = exported
    target = tmp_path / "mixed.onnx"
    result = htp_export.quantize(file, {".": "fp16", part: "int8-dynamic"}, target, data=feed)
    assert not result.tagged.untagged
    kinds = {node.op_type for node in htp_export.load(target)[part].nodes}
    assert kinds & {"MatMulInteger", "ConvInteger"}
    assert (result.modules[part].precision, result.modules[""].precision) == ("int8-dynamic", "mixed")
    assert_tagged(file, target, ".")
    [expected, *_], [found, *_] = outputs(file, feed), outputs(target, feed)
    assert 0 < np.abs(found - expected).max() < 0.2 * np.abs(expected).max()
    assert htp_export.compare(file, target, feed, tolerances={".": (10.0, 10.0)}).modules
