"""FLOPs and parameters of ten architectures, against PyTorch's own counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import htp_export

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
VOCAB = {"vocab_size": 100}
WORDS = {**SIZES, **VOCAB}
WHISPER = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "max_source_positions": 50, **VOCAB,
}  # fmt: skip


def text() -> dict[str, torch.Tensor]:
    mask = torch.ones(1, 16, dtype=torch.long)
    mask[:, -3:] = 0
    return {"input_ids": torch.randint(3, 100, (1, 16)), "attention_mask": mask}


def image() -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(1, 3, 32, 32)}


def sound() -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(1, 80, 100)}


ARCHITECTURES: dict[str, tuple[str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "bert": ("BertModel", WORDS, text),
    "roberta": ("RobertaForSequenceClassification", WORDS, text),
    "distilbert": ("DistilBertModel", {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, **VOCAB}, text),
    "gpt2": (  # its head is tied to its embeddings
        "GPT2LMHeadModel",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "use_cache": False,
            "bos_token_id": 0,
            "eos_token_id": 0,
            **VOCAB,
        },
        text,
    ),
    "llama": ("LlamaForCausalLM", {**WORDS, "num_key_value_heads": 1, "use_cache": False}, text),
    "t5_encoder": (
        "T5EncoderModel",
        {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, **VOCAB},
        text,
    ),
    "vit": ("ViTModel", {**SIZES, "image_size": 32, "patch_size": 8}, image),
    "resnet": (
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"},
        image,
    ),
    "mobilenet_v2": ("MobileNetV2Model", {"image_size": 32, "depth_multiplier": 0.25}, image),
    "whisper_encoder": ("WhisperModel", WHISPER, sound),
}
FAST = ("llama", "t5_encoder", "resnet")


def flops_of(model: nn.Module, kwargs: dict[str, Any]) -> int:
    """Torch's count, attention unfused: fused, it is left out."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**kwargs)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("name", "dynamo"),
    [
        pytest.param(name, dynamo, marks=() if name in FAST and not dynamo else pytest.mark.slow)
        for name in ARCHITECTURES
        for dynamo in (False, True)
        if name != "t5_encoder" or not dynamo  # with sdpa attention, torch's own dynamo exporter cannot take it
    ],
)
def test_flops_and_parameters_are_those_of_pytorch(name: str, dynamo: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    class_name, settings, inputs = ARCHITECTURES[name]
    made = getattr(transformers, class_name)
    model, kwargs = made(made.config_class(**settings)).eval(), inputs()
    model = model.encoder if name == "whisper_encoder" else model
    file = tmp_path / "model.onnx"
    htp_export.export(model, (), file, kwargs=kwargs, dynamo=dynamo, verbose=False)
    report = htp_export.cost(file)
    assert report.modules[""].flops == pytest.approx(flops_of(model, kwargs), rel=1e-3)
    assert report.uncounted == {}
    counts = {path: sum(p.numel() for p in module.parameters()) for path, module in model.named_modules()}
    assert {path: module.parameters for path, module in report.modules.items()} == counts


@pytest.mark.slow
def test_bert_base_at_length_16_is_2_7285_gflops(tmp_path: Path) -> None:
    model = transformers.BertModel(transformers.BertConfig()).eval()
    file = tmp_path / "model.onnx"
    htp_export.export(model, (), file, kwargs=text(), verbose=False)
    whole = htp_export.cost(file).modules[""]
    assert round(whole.flops / 1e9, 4) == 2.7285
    assert whole.parameters == 109_482_240
