"""The models that fingerprints are measured on: architectures of transformers with small configs and random weights.

``TUNED`` are those that rules were made with: whoever looks into the graph of a model to make a rule better moves it
here, and puts one that nobody has looked at in its place. ``HELD_OUT`` are the others; what is right of them is what
the rules are worth.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Model:
    """A model to recognise.

    Attributes:
        family: What it is.
        overrides: Changes to its config that make it small; those of `smaller`, where there are none.
        build: For what no Auto class of transformers makes.
        smaller: Whether the changes of `smaller` are made as well.
    """

    family: str
    overrides: Mapping[str, object] = field(default_factory=dict)
    build: Callable[[], tuple[torch.nn.Module, dict[str, Any]]] | None = None
    smaller: bool = False


def dit() -> tuple[torch.nn.Module, dict[str, Any]]:
    """The diffusion transformer of Qwen2.5-Omni, which turns codes into mel spectrograms."""
    made = importlib.import_module("transformers.models.qwen2_5_omni.modeling_qwen2_5_omni")
    configs = importlib.import_module("transformers.models.qwen2_5_omni.configuration_qwen2_5_omni")
    config = configs.Qwen2_5OmniDiTConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16, num_embeds=50, emb_dim=32,
        look_ahead_layers=[1], look_backward_layers=[0], enc_dim=16, enc_emb_dim=12, enc_channels=[16, 16, 16, 16, 48],
        enc_attention_channels=16, enc_se_channels=16,
    )  # fmt: skip
    model = made.Qwen2_5OmniToken2WavDiTModel(config)
    return model, {
        "hidden_states": torch.randn(1, 32, 80),
        "condition_vector": torch.randn(1, 24, 80),
        "speaker_embedding": torch.randn(1, 32, 12),
        "quantized_code": torch.randint(0, 50, (1, 16)),
        "time_step": torch.tensor([0.3]),
        "apply_cfg": False,
    }


def diffusion_head() -> tuple[torch.nn.Module, dict[str, Any]]:
    """The diffusion head of VibeVoice."""
    made = importlib.import_module("transformers.models.vibevoice.modeling_vibevoice")
    configs = importlib.import_module("transformers.models.vibevoice.configuration_vibevoice")
    config = configs.VibeVoiceDiffusionHeadConfig(
        hidden_size=64, num_hidden_layers=2, intermediate_size=96
    )
    kinds = [kind for name, kind in vars(made).items() if name.endswith("DiffusionHead")]
    latent = getattr(config, "latent_size", None) or getattr(config, "acoustic_hidden_size", 64)
    return kinds[0](config), {
        "noisy_images": torch.randn(2, latent),
        "timesteps": torch.tensor([3.0, 5.0]),
        "condition": torch.randn(2, 64),
    }


def flow_head() -> tuple[torch.nn.Module, dict[str, Any]]:
    """The flow head of Pocket TTS, told where a step begins and ends."""
    made = importlib.import_module("transformers.models.pocket_tts.modeling_pocket_tts")
    configs = importlib.import_module("transformers.models.pocket_tts.configuration_pocket_tts")
    config = configs.PocketTTSFlowHeadConfig(hidden_size=64, num_hidden_layers=2)
    return made.PocketTTSFlowHead(config), {
        "latents": torch.randn(2, config.latent_dim),
        "condition": torch.randn(2, config.condition_dim),
        "times": [torch.tensor([[0.2], [0.4]]), torch.tensor([[0.3], [0.5]])],
    }


_SMALL_SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embedding_size", "dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "d_inner"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_key_value_heads": 2, "head_dim": 16, "d_kv": 16, "moe_intermediate_size": 32, "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32, "vocab_size": 1000, "image_size": 64, "max_position_embeddings": 512,
}  # fmt: skip
_TOKENS = {"pad": 0, "bos": 1, "cls": 1, "decoder_start": 1, "eos": 2, "sep": 2}


def smaller(config: Any) -> dict[str, object]:
    """Changes that make a config small: two layers, a few heads, a vocabulary of a thousand."""
    found: dict[str, object] = {}
    for name, size in _SMALL_SIZES.items():
        given = getattr(config, name, None)
        if isinstance(given, int) and not isinstance(given, bool) and given > size:
            found[name] = size
    for name, number in _TOKENS.items():
        given = getattr(config, f"{name}_token_id", None)
        if isinstance(given, int) and given >= 1000:
            found[f"{name}_token_id"] = number
    return found


_HEADS: dict[str, object] = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
_SMALL: dict[str, object] = {**_HEADS, "intermediate_size": 128}
_TEXT: dict[str, object] = {**_SMALL, "vocab_size": 1000}
_DECODER: dict[str, object] = {**_TEXT, "num_key_value_heads": 2, "pad_token_id": 0}
_BART: dict[str, object] = {
    **{f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in
       (("layers", 2), ("attention_heads", 4), ("ffn_dim", 128))},
    "d_model": 64, "vocab_size": 1000,
}  # fmt: skip

TUNED: dict[str, Model] = {
    "mobilenet_v1": Model("CNN", {"depth_multiplier": 0.5}),
    "convnext": Model("CNN", {"depths": [1, 2, 2, 1], "hidden_sizes": [16, 32, 48, 64]}),
    "mobilenet_v2": Model("CNN", {"depth_multiplier": 0.35}),
    "electra": Model("encoder", _TEXT),
    "bert": Model("encoder", _TEXT),
    "distilbert": Model(
        "encoder", {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "vocab_size": 1000}
    ),
    "qwen2": Model("decoder", _DECODER),
    "opt": Model(
        "decoder",
        {
            **_HEADS,
            "ffn_dim": 128,
            "vocab_size": 1000,
            "word_embed_proj_dim": 64,
            "pad_token_id": 1,
        },
    ),
    "gpt2": Model(
        "decoder",
        {
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 1000,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
    ),
    "blenderbot": Model("encoder-decoder", _BART),
    "t5": Model(
        "encoder-decoder",
        {
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 128,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "vocab_size": 1000,
        },
    ),
    "marian": Model(
        "encoder-decoder",
        {**_BART, "decoder_vocab_size": 1000, "pad_token_id": 999, "decoder_start_token_id": 999},
    ),
    "deit": Model("vision transformer", {**_SMALL, "image_size": 64}),
    "beit": Model(
        "vision transformer", {**_SMALL, "image_size": 64, "use_relative_position_bias": True}
    ),
    "swin": Model(
        "vision transformer",
        {
            "image_size": 64,
            "embed_dim": 32,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
        },
    ),
    "wav2vec2": Model("speech", {**_SMALL, "conv_dim": [32] * 7}),
    "speech_to_text": Model("speech", {**_BART, "conv_channels": 64}),
    "rwkv": Model(
        "recurrent",
        {
            "hidden_size": 64,
            "attention_hidden_size": 64,
            "num_hidden_layers": 2,
            "vocab_size": 1000,
            "intermediate_size": 128,
        },
    ),
    "mixtral": Model("mixture", {**_DECODER, "num_local_experts": 4}),
    "qwen2_5_omni_dit": Model("diffusion-like", build=dit),
    "mamba2": Model(
        "recurrent",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8},
        smaller=True,
    ),
    "bamba": Model(
        "recurrent",
        {
            "num_hidden_layers": 3,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_chunk_size": 8,
        },
        smaller=True,
    ),
    "xlstm": Model("recurrent", {"num_heads": 2, "chunk_size": 8}, smaller=True),
    "kimi_linear": Model("mixture"),
    "glm4_moe": Model("mixture"),
    "phimoe": Model("mixture"),
    "switch_transformers": Model(
        "mixture", {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}, smaller=True
    ),
    "nllb-moe": Model(
        "mixture", {"encoder_sparse_step": 1, "decoder_sparse_step": 1}, smaller=True
    ),
    "mobilevitv2": Model("vision transformer"),
    "radio": Model("vision transformer"),
    "swiftformer": Model("vision transformer"),
}
"""Those that rules were made with. The last eleven were wrong when they were drawn, and rules were amended for them."""

HELD_OUT: dict[str, Model] = {
    "resnet": Model("CNN", {"embedding_size": 16, "hidden_sizes": [32, 64, 96, 128], "depths": [2, 2, 2, 2]}),
    "efficientnet": Model(
        "CNN", {"image_size": 96, "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}
    ),
    "regnet": Model("CNN", {"hidden_sizes": [32, 48, 64, 96], "depths": [1, 2, 2, 1], "groups_width": 16}),
    "modernbert": Model(
        "encoder",
        {**_TEXT, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "deberta-v2": Model("encoder", {**_TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "roberta": Model("encoder", _TEXT),
    "bloom": Model("decoder", {"vocab_size": 1000, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "llama": Model("decoder", {**_DECODER, "head_dim": 16}),
    "gpt_neox": Model("decoder", _TEXT),
    "bart": Model("encoder-decoder", _BART),
    "pegasus": Model("encoder-decoder", _BART),
    "m2m_100": Model("encoder-decoder", _BART),
    "segformer": Model("vision transformer", {"depths": [1, 1, 1, 1]}),
    "vit": Model("vision transformer", {**_SMALL, "image_size": 64}),
    "dinov2": Model("vision transformer", {**_HEADS, "image_size": 56}),
    "whisper": Model(
        "speech",
        {**_BART, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    ),
    "hubert": Model("speech", {**_SMALL, "conv_dim": [32] * 7}),
    "mamba": Model("recurrent", {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 1000}),
    "olmoe": Model("mixture", {**_DECODER, "num_experts": 8, "num_experts_per_tok": 2, "eos_token_id": 2}),
    "vibevoice_diffusion": Model("diffusion-like", build=diffusion_head),
    "focalnet": Model("CNN"),
    "bit": Model("CNN"),
    "eurobert": Model("encoder"),
    "fnet": Model("encoder"),
    "xlnet": Model("encoder"),
    "smollm3": Model("decoder"),
    "cohere2": Model("decoder"),
    "mpt": Model("decoder"),
    "mbart": Model("encoder-decoder"),
    "t5gemma": Model(
        "encoder-decoder",
        {f"{side}.{name}": size for side in ("encoder", "decoder") for name, size in
         (("hidden_size", 64), ("num_hidden_layers", 2), ("num_attention_heads", 4), ("num_key_value_heads", 2),
          ("head_dim", 16), ("intermediate_size", 128), ("vocab_size", 1000))},
    ),
    "longt5": Model("encoder-decoder"),
    "dinov3_vit": Model("vision transformer"),
    "pvt_v2": Model("vision transformer", {"depths": [1, 1, 1, 1]}, smaller=True),
    "videomae": Model("vision transformer"),
    "wavlm": Model("speech"),
    "moonshine": Model("speech"),
    "audio-spectrogram-transformer": Model("speech"),
    "falcon_mamba": Model("recurrent"),
    "recurrent_gemma": Model("recurrent"),
    "gpt_oss": Model("mixture"),
    "granitemoe": Model("mixture"),
    "ernie4_5_moe": Model("mixture"),
    "flex_olmo": Model("mixture"),
    "minimax_m2": Model("mixture"),
    "convbert": Model("encoder"),
    "qwen2_moe": Model("mixture"),
    "pocket_tts_flow": Model("diffusion-like", build=flow_head),
}  # fmt: skip

_DRAWN = {
    "vision transformer": """pvt yolos dpt ijepa glpn smolvlm_vision vivit swinv2 aimv2_vision_model
        dinov2_with_registers levit hiera vitdet vit_msn mobilevit mlcd vit_mae sam_vision_model""",
    "CNN": "poolformer",
    "encoder": """mra ibert rembert jina_embeddings_v3 roformer dpr bert-generation xlm-roberta xlm canine luke splinter
        squeezebert nystromformer data2vec-text layoutlm""",
    "decoder": """phi olmo3 jais2 apertus qwen3 exaone4 diffllama phi3 starcoder2 gpt_neox_japanese seed_oss
        granite_docling_text persimmon mistral openai-gpt stablelm gemma3_text gpt_bigcode cohere granite_swa
        hyperclovax vaultgemma gemma helium olmo ernie4_5 arcee iquestcoder""",
    "encoder-decoder": "blenderbot-small mvp bigbird_pegasus pegasus_x mt5 fsmt",
    "speech": """unispeech-sat sew-d unispeech qwen2_audio_encoder wav2vec2-bert wav2vec2-conformer
        voxtral_encoder""",
    "recurrent": "olmo_hybrid",
    "mixture": """cohere2_moe openai_privacy_filter zaya aria_text qwen3_5_moe_text jetmoe granitemoe_swa minimax
        granitemoeshared afmoe jamba""",
}
HELD_OUT.update({name: Model(family) for family, names in _DRAWN.items() for name in names.split()})
"""Those that nobody looked into. The last 88 were drawn by lot from the types of transformers that were left, and had
their families before they were exported."""
