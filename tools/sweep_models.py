"""The architectures of the sweep, and settings that the general shrinker cannot guess."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tools.shrinking import TOKENS, smaller
from tools.sweep_checks import Inputs, Subject

Built = tuple[torch.nn.Module, Inputs]

# parameters; of two ways to shrink a config, the one that stays below it is taken
LARGEST = 40_000_000

# By family, the most used first; families are mixed when the sweep runs, so that a part of it says something of each.
TRANSFORMERS = {
    "encoders": """bert distilbert modernbert roberta albert electra deberta-v2 mpnet mobilebert convbert fnet big_bird
        canine funnel xlnet roformer squeezebert longformer nystromformer layoutlm layoutlmv3 esm ibert luke rembert
        eurobert nomic_bert splinter tapas yoso""",
    "decoders": """gpt2 llama mistral qwen2 qwen3 gemma gemma2 gemma3_text gemma3n_text phi phi3 opt bloom falcon mpt
        gpt_neo gpt_neox gptj gpt_bigcode olmo olmo2 cohere cohere2 granite starcoder2 stablelm smollm3 exaone4 glm4
        helium nemotron persimmon diffllama minicpm3 ernie4_5 apertus biogpt codegen ctrl openai-gpt xglm doge""",
    "mixture of experts": """mixtral qwen2_moe qwen3_moe gpt_oss olmoe deepseek_v2 deepseek_v3 dbrx granitemoe jetmoe
        phimoe glm4_moe ernie4_5_moe switch_transformers lfm2_moe""",
    "state space and recurrent": """mamba mamba2 falcon_mamba rwkv recurrent_gemma jamba bamba zamba zamba2 xlstm
        falcon_h1 granitemoehybrid nemotron_h lfm2 qwen3_next""",
    "encoder-decoder": """t5 bart pegasus mbart marian m2m_100 mt5 longt5 led blenderbot prophetnet t5gemma fsmt""",
    "audio": """whisper wav2vec2 hubert wavlm unispeech-sat sew data2vec-audio wav2vec2-conformer wav2vec2-bert
        speech_to_text moonshine audio-spectrogram-transformer clap encodec dac mimi vits speecht5 parakeet_encoder
        univnet fastspeech2_conformer musicgen""",
    "vision": """vit resnet deit beit swin convnext dinov2 dinov3_vit mobilevit mobilenet_v2 efficientnet segformer
        regnet levit pvt_v2 poolformer focalnet swinv2 convnextv2 bit cvt hiera swiftformer dpt glpn vit_mae vivit
        videomae timesformer vjepa2 siglip_vision_model swin2sr superpoint textnet hgnet_v2 imagegpt perceiver upernet
        depth_anything mobilenet_v1 pvt""",
    "detection and segmentation": """detr yolos conditional_detr deformable_detr rt_detr d_fine table-transformer
        owlvit maskformer mask2former eomt sam lw_detr""",
    "multimodal": """clip siglip blip llava qwen2_vl git vilt align altclip bridgetower chinese_clip clipseg flava
        groupvit lxmert visual_bert qwen2_5_vl gemma3 paligemma idefics3 smolvlm internvl mllama florence2 blip-2
        kosmos-2 pix2struct tvp udop""",
    "time series": """patchtst patchtsmixer time_series_transformer informer autoformer timesfm decision_transformer""",
}

_BACKBONE = {
    "model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1],
    "layer_type": "basic",
}  # fmt: skip
_FORECAST = {"prediction_length": 4, "num_time_features": 1}
_SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
_DINO = {
    "model_type": "dinov2", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "image_size": 56,
    "out_indices": [1, 2, 3, 4], "reshape_hidden_states": False,
}  # fmt: skip
_WINDOWED = {
    "model_type": "lw_detr_vit", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_windows": 4,
    "window_block_indices": [0], "out_indices": [1, 3],
}  # fmt: skip
_LAST = {"backbone_config": {**_BACKBONE, "out_features": ["stage4"]}}
_LAST_THREE = {"backbone_config": {**_BACKBONE, "out_features": ["stage2", "stage3", "stage4"]}}

# What a config has to have besides, for reasons that its numbers do not tell.
OVERRIDES: Mapping[str, Mapping[str, object]] = {
    **dict.fromkeys(("detr", "conditional_detr", "table-transformer", "dab-detr"), _LAST),
    "deformable_detr": _LAST_THREE,
    # Of scores that are nearly equal, rounding decides which are the largest.
    "d_fine": {"num_queries": 5},
    "depth_anything": {"backbone_config": _DINO},
    "efficientnet": {"hidden_dim": 2560},
    "esm": {"vocab_size": 33, "pad_token_id": 1},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128},
    "funnel": {"block_sizes": [1, 1], "block_repeats": [1, 1], "architectures": ["FunnelModel"]},
    "gemma3n_text": {
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.5, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 16},
    "lw_detr": {"backbone_config": _WINDOWED, "projector_scale_factors": [1.0]},
    "mimi": {"upsample_groups": 64, "codebook_dim": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "minicpm3": {"num_key_value_heads": 4},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    **dict.fromkeys(("time_series_transformer", "informer"), _FORECAST),
    "autoformer": {**_FORECAST, "label_length": 2},
    **{name: {"text_config.rope_parameters": _SECTIONS} for name in ("qwen2_vl", "qwen2_5_vl")},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "n_mamba_heads": 8,
    },
    "zamba": {
        "num_hidden_layers": 5,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "align": {"projection_dim": 256},
    # so that padding is left: without any, masks are made in traces alone
    "canine": {"downsampling_rate": 2},
    "codegen": {"rotary_dim": 8},
    "cvt": {"num_heads": [1, 2, 2], "embed_dim": [32, 32, 32], "depth": [1, 2, 3]},
    "deepseek_v2": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {"num_key_value_heads": 4},
    "bamba": {
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
    },
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8},
    "wav2vec2": {"num_conv_pos_embedding_groups": 4, "conv_dim": [32] * 7},
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
}

# Of those without a base model.
TASKS: Mapping[str, str] = {
    "depth_anything": "depth-estimation",
    "upernet": "semantic-segmentation",
}

# Shapes of inputs that a config does not describe.
_SERIES = {
    "past_values": [1, 11], "past_time_features": [1, 11, 1], "past_observed_mask": [1, 11],
    "future_values": [1, 4], "future_time_features": [1, 4, 1],
}  # fmt: skip
SHAPES: Mapping[str, Mapping[str, object]] = {
    **dict.fromkeys(("time_series_transformer", "informer", "autoformer"), _SERIES),
    "timesfm": {
        "past_values": [1, 64],
        "past_values_padding": {"shape": [1, 64], "dtype": "int64"},
        "freq": {"shape": [1, 1], "dtype": "int64"},
    },
    "dac": {"input_values": [1, 1, 16_000]},
    "lxmert": {"visual_feats": [1, 4, 64], "visual_pos": [1, 4, 4]},
    "parakeet_encoder": {"input_features": [1, 64, 80]},
    "speecht5": {"input_values": [1, 8, 64], "decoder_input_values": [1, 6, 64]},
    "udop": {"bbox": {"shape": [1, 8, 4], "dtype": "float32"}},
    "univnet": {"input_features": [1, 16, 100]},
    "vjepa2": {"pixel_values_videos": [1, 4, 3, 256, 256]},
    "decision_transformer": {
        "states": [1, 3, 17],
        "actions": [1, 3, 4],
        "rewards": [1, 3, 1],
        "returns_to_go": [1, 3, 1],
        "timesteps": [1, 3],
        "attention_mask": [1, 3],
    },
}

TIMM = """test_vit test_resnet test_efficientnet test_convnext test_byobnet test_mambaout test_nfnet
    mobilenetv3_small_050 ghostnet_050 efficientvit_b0 repvit_m0_9 levit_128s mixer_s32_224 lcnet_050"""

_UNET = {
    "sample_size": 16, "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 32, "attention_head_dim": 8,
}  # fmt: skip
_DIT = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "sample_size": 8}


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


# Class of diffusers → the arguments of its constructor, and the inputs.
DIFFUSERS: dict[str, tuple[Mapping[str, Any], Callable[[], Inputs]]] = {
    "UNet2DConditionModel": (
        _UNET,
        lambda: {
            "sample": _noise(1, 4, 16, 16), "timestep": torch.tensor([3]), "encoder_hidden_states": _noise(1, 5, 32),
        },
    ),
    "UNet2DModel": (
        {
            "sample_size": 16, "block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        lambda: {"sample": _noise(1, 3, 16, 16), "timestep": torch.tensor([3])},
    ),
    "AutoencoderKL": (
        {"block_out_channels": (16,), "norm_num_groups": 8, "sample_size": 16},
        lambda: {"sample": _noise(1, 3, 16, 16)},
    ),
    "AutoencoderTiny": (
        {
            "encoder_block_out_channels": (16, 16), "decoder_block_out_channels": (16, 16),
            "num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1),
        },
        lambda: {"sample": _noise(1, 3, 16, 16)},
    ),
    "DiTTransformer2DModel": (
        {**_DIT, "in_channels": 4, "out_channels": 4, "num_embeds_ada_norm": 10, "norm_num_groups": 8},
        lambda: {"hidden_states": _noise(1, 4, 8, 8), "timestep": torch.tensor([3]), "class_labels": torch.tensor([1])},
    ),
    "SD3Transformer2DModel": (
        {
            **_DIT, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 32, "caption_projection_dim": 32,
            "pooled_projection_dim": 16, "pos_embed_max_size": 8,
        },
        lambda: {
            "hidden_states": _noise(1, 4, 8, 8), "encoder_hidden_states": _noise(1, 5, 32),
            "pooled_projections": _noise(1, 16), "timestep": torch.tensor([3]),
        },
    ),
    "FluxTransformer2DModel": (
        {
            "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
            "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 16,
            "axes_dims_rope": (4, 4, 8),
        },
        lambda: {
            "hidden_states": _noise(1, 16, 4), "encoder_hidden_states": _noise(1, 5, 32),
            "pooled_projections": _noise(1, 16), "timestep": torch.tensor([0.3]),
            "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(5, 3),
        },
    ),
}  # fmt: skip


def transformers_model(name: str) -> Built:
    """A model of transformers by its type, as small as it gets."""
    from transformers import AutoConfig

    from htp_export.huggingface import example_inputs, load_model

    problem: Exception | None = None
    for level in ("small", "shallow"):
        overrides = overridden(smaller(AutoConfig.for_model(name), level), OVERRIDES.get(name, {}))
        try:
            model = load_model(name, task=TASKS.get(name), random_weights=True, overrides=overrides)
            if sum(each.numel() for each in model.parameters()) > LARGEST:
                raise ValueError("no way to shrink its config was found")
            inputs = dict(
                example_inputs(model, shapes={**text_shape(model), **SHAPES.get(name, {})})
            )
            if "decoder_input_ids" in inputs:
                # the config of a decoder keeps its usual first token
                inputs["decoder_input_ids"] %= TOKENS
            with torch.no_grad():
                model(**inputs)
        except Exception as error:  # of all kinds: numbers that do not fit together
            problem = problem or error
        else:
            return model, inputs
    raise problem or ValueError(name)


def overridden(small: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """The settings of both; those below one that is given as a whole are left out."""
    kept = {
        key: value
        for key, value in small.items()
        if not any(key.startswith(given + ".") for given in own)
    }
    return {**kept, **own}


def text_shape(model: torch.nn.Module) -> dict[str, object]:
    """Texts of eight tokens: exporters unroll a recurrence, token by token."""
    from htp_export.capabilities.huggingface.inputs import named_parameters

    return {"input_ids": [1, 8]} if "input_ids" in named_parameters(model) else {}


def timm_model(name: str) -> Built:
    import timm

    model = timm.create_model(name, pretrained=False)
    return _spread(model), {"x": _noise(1, *model.default_cfg["input_size"])}


def diffusers_model(name: str) -> Built:
    arguments, inputs = DIFFUSERS[name]
    model = getattr(importlib.import_module("diffusers"), name)(**arguments)
    return _spread(model), {**inputs(), "return_dict": False}


def x_decoder() -> Built:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(dim=64, depth=2, heads=4, rotary_pos_emb=True, attn_dim_head=16)
    return _spread(TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=layers)), {
        "x": _tokens()
    }


def x_encoder() -> Built:
    from x_transformers import Encoder, TransformerWrapper

    layers = Encoder(dim=64, depth=2, heads=4, use_rmsnorm=True, ff_glu=True, attn_dim_head=16)
    return _spread(TransformerWrapper(num_tokens=100, max_seq_len=32, attn_layers=layers)), {
        "x": _tokens()
    }


def simple_vit() -> Built:
    from vit_pytorch import SimpleViT

    made = SimpleViT(
        image_size=32, patch_size=8, num_classes=10, dim=64, depth=2, heads=4, mlp_dim=128
    )
    return _spread(made), {"img": _noise(1, 3, 32, 32)}


def cct() -> Built:
    from vit_pytorch.cct import CCT

    made = CCT(
        img_size=32,
        embedding_dim=64,
        n_conv_layers=1,
        kernel_size=3,
        num_layers=2,
        num_heads=4,
        num_classes=10,
    )
    return _spread(made), {"x": _noise(1, 3, 32, 32)}


def monai_unet() -> Built:
    from monai.networks.nets import UNet

    made = UNet(
        spatial_dims=2,
        in_channels=1,
        out_channels=2,
        channels=(8, 16, 32),
        strides=(2, 2),
        num_res_units=1,
    )
    return _spread(made), {"x": _noise(1, 1, 32, 32)}


def monai_unetr() -> Built:
    from monai.networks.nets import UNETR

    sizes = {"hidden_size": 48, "mlp_dim": 96, "num_heads": 4, "feature_size": 8}
    made = UNETR(in_channels=1, out_channels=2, img_size=(32, 32), spatial_dims=2, **sizes)
    return _spread(made), {"x_in": _noise(1, 1, 32, 32)}


def smp_unet() -> Built:
    from segmentation_models_pytorch import Unet

    made = Unet("timm-mobilenetv3_small_minimal_100", encoder_weights=None)
    return _spread(made), {"x": _noise(1, 3, 64, 64)}


def torch_transformer() -> Built:
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return _spread(torch.nn.TransformerEncoder(layer, 2)), {"src": _noise(1, 10, 32)}


OTHERS: dict[str, Callable[[], Built]] = {
    "x-transformers/decoder": x_decoder,
    "x-transformers/encoder": x_encoder,
    "vit-pytorch/SimpleViT": simple_vit,
    "vit-pytorch/CCT": cct,
    "monai/UNet": monai_unet,
    "monai/UNETR": monai_unetr,
    "segmentation-models-pytorch/Unet": smp_unet,
    "torch/TransformerEncoder": torch_transformer,
}


def subjects() -> dict[str, Subject]:
    """Every architecture by its name, families mixed."""
    made: dict[str, Callable[[], Built]] = {}
    families = [names.split() for names in TRANSFORMERS.values()]
    for place in range(max(map(len, families))):
        for name in (names[place] for names in families if place < len(names)):
            made[f"transformers/{name}"] = _of(transformers_model, name)
        if place == 2:
            made.update({f"timm/{name}": _of(timm_model, name) for name in TIMM.split()[:4]})
            made.update(
                {f"diffusers/{name}": _of(diffusers_model, name) for name in list(DIFFUSERS)[:2]}
            )
            made.update(OTHERS)
    made.update({f"diffusers/{name}": _of(diffusers_model, name) for name in DIFFUSERS})
    made.update({f"timm/{name}": _of(timm_model, name) for name in TIMM.split()})
    return {name: Subject(name, build) for name, build in made.items()}


def torchvision_without_operators() -> None:
    """Let torchvision be imported where its compiled operators do not fit torch's build: they are declared, no more."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(library)  # it takes its operators with it
        importlib.import_module("torchvision")


_DECLARED: list[Any] = []


def _of(build: Callable[[str], Built], name: str) -> Callable[[], Built]:
    return lambda: build(name)


def _tokens() -> torch.Tensor:
    return torch.randint(0, 100, (1, 12))


def _spread(model: torch.nn.Module) -> torch.nn.Module:
    from htp_export.capabilities.huggingface.models import spread_parameters

    spread_parameters(model, torch.Generator().manual_seed(0))
    return model.eval()
