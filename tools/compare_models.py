"""The models that optimisers are compared on: real architectures, with random weights that are spread apart.

In three sizes: ``real``; ``narrow``, as deep as the real one, with the same nodes and small weights; ``small``, which
is narrow and has two layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Built = tuple[torch.nn.Module, dict[str, torch.Tensor]]

SIZES = ("real", "narrow", "small")
_NARROW = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}


def _sizes(
    size: str, real: dict[str, Any], narrow: dict[str, Any], small: dict[str, Any]
) -> dict[str, Any]:
    return real if size == "real" else {**narrow, **small} if size == "small" else narrow


def _text(vocabulary: int = 1000, length: int = 16) -> dict[str, torch.Tensor]:
    mask = torch.ones(1, length, dtype=torch.long)
    mask[:, -3:] = 0  # padding: without it a model may look at the mask and pass none on
    return {"input_ids": torch.randint(3, vocabulary, (1, length)), "attention_mask": mask}


def _image(size: str) -> dict[str, torch.Tensor]:
    side = 224 if size == "real" else 64
    return {"pixel_values": torch.randn(1, 3, side, side)}


def bert(size: str) -> Built:
    from transformers import BertConfig, BertModel

    return BertModel(
        BertConfig(**_sizes(size, {}, {**_NARROW, "vocab_size": 1000}, {"num_hidden_layers": 2}))
    ), _text()


def distilbert(size: str) -> Built:
    from transformers import DistilBertConfig, DistilBertModel

    narrow = {"dim": 64, "n_heads": 4, "hidden_dim": 128, "vocab_size": 1000}
    return DistilBertModel(DistilBertConfig(**_sizes(size, {}, narrow, {"n_layers": 2}))), _text()


def roberta(size: str) -> Built:
    from transformers import RobertaConfig, RobertaModel

    narrow = {**_NARROW, "vocab_size": 1000}
    return RobertaModel(
        RobertaConfig(**_sizes(size, {}, narrow, {"num_hidden_layers": 2}))
    ), _text()


def vit(size: str) -> Built:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = _sizes(size, {}, {**_NARROW, "image_size": 64}, {"num_hidden_layers": 2})
    return ViTForImageClassification(ViTConfig(**sizes)), _image(size)


def deit(size: str) -> Built:
    from transformers import DeiTConfig, DeiTForImageClassification

    real = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536}
    sizes = _sizes(size, real, {**_NARROW, "image_size": 64}, {"num_hidden_layers": 2})
    return DeiTForImageClassification(DeiTConfig(**sizes)), _image(size)


def whisper(size: str, layers: int = 4, width: int = 384, narrow_heads: int = 4) -> Built:
    """The encoder of Whisper: tiny by default."""
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    def of(width: int, heads: int, inner: int) -> dict[str, int]:
        return {
            "encoder_layers": layers,
            "max_source_positions": frames // 2,
            "num_mel_bins": 80,
            "d_model": width,
            "encoder_attention_heads": heads,
            "encoder_ffn_dim": inner,
        }

    frames = 3000 if size == "real" else 100
    real, narrow = of(width, width // 64, 4 * width), of(64, narrow_heads, 128)
    config = WhisperConfig(**_sizes(size, real, narrow, {"encoder_layers": 2}))
    return WhisperEncoder(config), {"input_features": torch.randn(1, 80, frames)}


def whisper_base(size: str) -> Built:
    return whisper(size, layers=6, width=512, narrow_heads=8)


def efficientnet(size: str) -> Built:
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    # transformers' defaults are those of B7
    b0 = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "image_size": 224, "hidden_dim": 1280}
    b0 |= {"dropout_rate": 0.2, "num_labels": 1000}
    narrow = {**b0, "width_coefficient": 0.25, "hidden_dim": 320, "image_size": 64}
    small = {"depth_coefficient": 0.5}
    return EfficientNetForImageClassification(
        EfficientNetConfig(**_sizes(size, b0, narrow, small))
    ), _image(size)


def mobilenet_v3(size: str) -> Built:
    from tools.compare_nets import MobileNetV3Small

    return MobileNetV3Small(**_sizes(size, {}, {}, {"depth": 4})), _image(size)


def yolov8(size: str) -> Built:
    from tools.compare_nets import Yolov8n

    side = 640 if size == "real" else 64
    return Yolov8n(side), {"pixel_values": torch.randn(1, 3, side, side)}


def resnet(size: str) -> Built:
    from transformers import ResNetConfig, ResNetForImageClassification

    narrow = {"embedding_size": 8, "hidden_sizes": [16, 32, 48, 64]}
    return ResNetForImageClassification(
        ResNetConfig(**_sizes(size, {}, narrow, {"depths": [1, 2, 1, 1]}))
    ), _image(size)


def mobilenet(size: str) -> Built:
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(**_sizes(size, {}, {"image_size": 64, "depth_multiplier": 0.25}, {}))
    return MobileNetV2ForImageClassification(config), _image(size)


def gpt2(size: str) -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    common = {"use_cache": False, "bos_token_id": 0, "eos_token_id": 0}
    narrow = {**common, "n_embd": 64, "n_head": 4, "vocab_size": 1000}
    return GPT2LMHeadModel(GPT2Config(**_sizes(size, common, narrow, {"n_layer": 2}))), _text()


def llama(size: str) -> Built:
    from transformers import LlamaConfig, LlamaForCausalLM

    common = {
        "use_cache": False,
        "num_key_value_heads": 2,
        "num_hidden_layers": 8,
        "vocab_size": 8000,
    }
    real = {**common, "hidden_size": 256, "num_attention_heads": 8, "intermediate_size": 704}
    config = LlamaConfig(**_sizes(size, real, {**common, **_NARROW}, {"num_hidden_layers": 2}))
    return LlamaForCausalLM(config), _text()


def yolos(size: str) -> Built:
    from transformers import YolosConfig, YolosForObjectDetection

    real = {
        "image_size": [800, 1333],
        "hidden_size": 192,
        "num_attention_heads": 3,
        "intermediate_size": 768,
    }
    real["num_detection_tokens"] = 100
    narrow = {**_NARROW, "image_size": [48, 64], "num_detection_tokens": 10, "num_labels": 5}
    sizes = _sizes(size, real, narrow, {"num_hidden_layers": 2})
    # positions are interpolated to the size of the image
    sides = (512, 672) if size == "real" else (64, 80)
    return YolosForObjectDetection(YolosConfig(**sizes)), {
        "pixel_values": torch.randn(1, 3, *sides)
    }


def detr(size: str) -> Built:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    stages = _sizes(
        size, {}, {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32]}, {"depths": [1, 1, 1, 1]}
    )
    narrow = {"d_model": 64, "num_queries": 10, "num_labels": 5}
    narrow |= {
        f"{side}_{what}": n
        for side in ("encoder", "decoder")
        for what, n in (("ffn_dim", 128), ("attention_heads", 4))
    }
    sizes = _sizes(size, {}, narrow, {"encoder_layers": 2, "decoder_layers": 2})
    backbone = ResNetConfig(**stages, out_features=["stage4"])
    config = DetrConfig(backbone_config=backbone, use_timm_backbone=False, backbone=None, **sizes)
    return DetrForObjectDetection(config), _image(size)


def swin(size: str) -> Built:
    from transformers import SwinConfig, SwinForImageClassification

    narrow = {
        "image_size": 64,
        "patch_size": 2,
        "embed_dim": 16,
        "num_heads": [1, 2, 4, 8],
        "window_size": 4,
    }
    small = {"depths": [2, 2], "num_heads": [2, 4]}
    config = SwinConfig(**_sizes(size, {}, narrow, small), attn_implementation="eager")
    return SwinForImageClassification(config), _image(size)


def wav2vec2(size: str) -> Built:
    from transformers import Wav2Vec2Config, Wav2Vec2Model

    narrow = {
        **_NARROW,
        "conv_dim": [32] * 7,
        "num_conv_pos_embeddings": 16,
        "num_conv_pos_embedding_groups": 4,
    }
    sizes = _sizes(size, {}, narrow, {"num_hidden_layers": 2})
    samples = 16000 if size == "real" else 4000
    return Wav2Vec2Model(Wav2Vec2Config(**sizes)), {"input_values": torch.randn(1, samples)}


def clip(size: str) -> Built:
    from transformers import CLIPConfig, CLIPModel

    text = _sizes(
        size, {}, {**_NARROW, "vocab_size": 1000, "eos_token_id": 2}, {"num_hidden_layers": 2}
    )
    vision = _sizes(size, {}, {**_NARROW, "image_size": 64}, {"num_hidden_layers": 2})
    inputs = {**_text(), **_image(size)}
    order = ("input_ids", "pixel_values", "attention_mask")  # that of forward's parameters
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision)), {
        key: inputs[key] for key in order
    }


def segformer(size: str) -> Built:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    narrow = {"hidden_sizes": [16, 32, 40, 64], "decoder_hidden_size": 64, "num_labels": 5}
    config = SegformerConfig(**_sizes(size, {}, narrow, {"depths": [1, 1, 1, 1]}))
    return SegformerForSemanticSegmentation(config), _image(size)


def t5(size: str) -> Built:
    from transformers import T5Config, T5EncoderModel

    narrow = {"d_model": 64, "d_kv": 16, "num_heads": 4, "d_ff": 128, "vocab_size": 1000}
    config = T5Config(**_sizes(size, {}, narrow, {"num_layers": 2}), attn_implementation="eager")
    return T5EncoderModel(config), _text()


MODELS: dict[str, Callable[[str], Built]] = {
    "BERT-base": bert,
    "DistilBERT": distilbert,
    "RoBERTa": roberta,
    "ViT-B": vit,
    "DeiT-S": deit,
    "Whisper-tiny encoder": whisper,
    "ResNet-50": resnet,
    "MobileNetV2": mobilenet,
    "GPT-2": gpt2,
    "Llama": llama,
    "YOLOS-tiny": yolos,
    "DETR": detr,
    "Swin-T": swin,
    "Wav2Vec2-base": wav2vec2,
    "CLIP": clip,
    "SegFormer-B0": segformer,
    "T5-small encoder": t5,
}

FURTHER: dict[str, Callable[[str], Built]] = {
    "EfficientNet-B0": efficientnet,
    "MobileNetV3-S": mobilenet_v3,
    "Whisper-base encoder": whisper_base,
    "YOLOv8n": yolov8,
}
"""Models that are compared if they are named; of the tables of docs/passes.md, that of nodes has rows for them."""


def build(name: str, size: str) -> Built:
    """A model in eval mode and its inputs; every parameter and running statistic has values of its own."""
    torch.manual_seed(0)
    model, inputs = {**MODELS, **FURTHER}[name](size)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
        for key, buffer in model.named_buffers():
            if key.endswith("running_var"):
                # with less, values grow from layer to layer, and rounding with them
                buffer.uniform_(1.0, 3.0)
            elif key.endswith("running_mean"):
                buffer.uniform_(-0.5, 0.5)
    return model.eval(), inputs


def export(name: str, exporter: str, size: str, path: str, *, defaults: bool = False) -> Built:
    """Export one with tags; from TorchScript with opset 14, nothing folded and sizes of batch and text left free.

    With ``defaults`` it is exported as torch does without arguments: fixed sizes, torch's opset and folding.
    """
    import htp_export

    model, inputs = build(name, size)
    if exporter == "dynamo" or defaults:
        names: dict[str, Any] = {} if exporter == "dynamo" else {"input_names": list(inputs)}
        htp_export.export(
            model, (), path, kwargs=inputs, dynamo=exporter == "dynamo", verbose=False, **names
        )
    else:
        axes = {
            key: {0: "batch", 1: "length"} if value.ndim == 2 else {0: "batch"}
            for key, value in inputs.items()
        }
        options: dict[str, Any] = {"opset_version": 14, "do_constant_folding": False}
        options |= {"input_names": list(inputs), "dynamic_axes": axes}
        htp_export.export(model, (), path, kwargs=inputs, dynamo=False, verbose=False, **options)
    return model, inputs
