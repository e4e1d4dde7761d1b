"""Small configs: a walk through the settings of a config that gives each a small value by what its name says.

No architecture is named here. Widths become one number, so that settings that have to be equal, or multiples of each
other, stay so; whatever counts layers becomes 2. What this cannot guess stands as data in ``sweep_models.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

WIDTH, HEADS, LAYERS, HEAD, TOKENS = 64, 4, 2, 16, 1000

# The first rule that matches a name decides; what no rule matches stays. Numbers are only made smaller.
_NUMBERS: tuple[tuple[str, int | None], ...] = (
    (r"(_token_id|_token_index|_idx|_id|_ids)$", None),  # see _token
    (
        r"(drop|rate|prob|eps|std|theta|init|scale|factor|ratio|alpha|beta|bias|type_vocab_size)",
        None,
    ),
    # see _image
    (r"(image|pixel|crop|input|img|video)_(size|height|width)$|^size$|resolution", None),
    (r"(patch|kernel|stride|window|pool|dilation|tubelet|chunk|downsampl|upsampl|merge)", None),
    (
        r"(key_value|kv)_(attention_)?heads|num_kv_heads|_kv_heads|multi_query_group_num|n_head_kv",
        2,
    ),
    (r"(heads?|n_head|num_head)$|(attention|num)_heads|^n_heads?$", HEADS),
    (
        r"experts_per_tok|num_selected_experts|top_k_experts|moe_top_?k|^moe_k$|^num_experts_per_token$",
        2,
    ),
    (r"n_group$|topk_group|n_groups$|expert_groups", 1),
    (r"n_shared_experts|num_shared_expert", 1),
    (r"experts$|moe_num_experts|^num_local_experts", 4),
    (r"(^|_)(first_k_dense_replace|n_dense|num_dense_layers)$", 1),
    (r"(layers?|n_layers?|num_blocks|n_blocks|depth|_layers_count|num_stages_layers)$", LAYERS),
    (
        r"codebook_(dim|size)|num_mel_bins|n_mels|n_fft|num_channels|in_channels|in_chans|num_codebooks|n_q$",
        None,
    ),
    (r"queries$|num_query_tokens|num_latents|n_latents", 10),
    (r"vocab_size$|vocab_size_per_layer|num_embeddings|vocabulary_map", TOKENS),
    (
        r"max_(\w+_)?position|max_source_pos|max_target_pos|n_positions|max_seq|context_length|seq_length|n_ctx",
        None,
    ),
    (r"lora_rank|_rank$|bottleneck", 32),
    (r"head_dim|d_kv|_head_size|head_size|d_head|key_dim|value_dim|qkv_channels", HEAD),
    (r"state_size|d_state|ssm_state", HEAD),
    (
        r"intermediate|ffn|d_ff|feed_?forward|mlp_dim|inner_dim|n_inner|d_inner|ff_dim|mlp_hidden|dim_ff",
        2 * WIDTH,
    ),
    (
        r"hidden|embed|d_model|n_embd|^dim$|_dim$|width|channels|hidden_dim|projection|feature_size|filters",
        WIDTH,
    ),
)
_LISTS: tuple[tuple[str, tuple[int, ...]], ...] = (
    (r"depths?$|layers$|blocks$|layer_nums", (1, 2)),
    (r"heads$|num_heads", (2,)),
    (r"sizes$|dims?$|channels$|widths$|hidden|embed", (32, 64, 96, 128)),
)
_KEPT_LISTS = re.compile(
    r"kernel|stride|patch|pool|image|dilation|layers_idx|indices|ratio|window|section|rope|std|mean"
)


def smaller(config: Any, level: str = "small") -> dict[str, object]:
    """Changes that make a config small, by dotted key, for ``htp_export.huggingface.load_model``.

    Args:
        config: The config.
        level: ``"small"``, or ``"shallow"``: only what counts layers, experts and tokens becomes smaller.
    """
    return dict(_walk(config, "", level))


def _walk(config: Any, above: str, level: str) -> Iterator[tuple[str, object]]:
    settings: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    lengths = {len(value) for value in settings.values() if _is_list(value)}
    inner = {
        name
        for name in getattr(config, "sub_configs", None) or {}
        if getattr(config, name, None) is not None
    }
    for name, value in settings.items():
        if name in inner:
            nested = getattr(config, name)
            if hasattr(nested, "to_dict") or isinstance(nested, Mapping):
                yield from _walk(nested, f"{above}{name}.", level)
        elif isinstance(value, Mapping):
            yield from _of_rotation(value, f"{above}{name}.", level)
        elif (new := _changed(name, value, level)) not in (None, value) and not (
            new == LAYERS and value in lengths
        ):
            yield above + name, new  # a number of layers stays where a list has an entry for each


def _of_rotation(
    settings: Mapping[str, Any], above: str, level: str
) -> Iterator[tuple[str, object]]:
    """The sections of a rotary embedding, which share half of a head."""
    for name, value in settings.items():
        if str(name).endswith("section") and _is_list(value) and level == "small":
            share = [max(1, each * HEAD // 2 // sum(value)) for each in value]
            yield above + name, [HEAD // 2 - sum(share[1:]), *share[1:]]


def _changed(name: str, value: Any, level: str) -> object | None:
    """The small value of a setting; None where it stays."""
    if type(value) is int:
        return _number(name, value, level)
    if _is_list(value):
        return _list(name, list(value), level)
    return None


def _is_list(value: Any) -> bool:
    return (
        isinstance(value, list | tuple) and bool(value) and all(type(each) is int for each in value)
    )


def _number(name: str, value: int, level: str) -> int | None:
    if name.endswith(("_token_id", "_token_index", "_idx")):
        return _token(name, value)
    for pattern, size in _NUMBERS:
        if re.search(pattern, name):
            kept = (
                size is None
                or value <= size
                or (level == "shallow" and size not in (LAYERS, TOKENS, HEADS))
            )
            if level == "shallow" and re.search("head", name):
                kept = True
            return None if kept else size
    return None


def _list(name: str, value: list[int], level: str) -> list[int] | None:
    if _KEPT_LISTS.search(name):
        return None
    for pattern, sizes in _LISTS:
        if re.search(pattern, name):
            if level == "shallow" and sizes != (1, 2):
                return None
            new = [min(old, sizes[min(place, len(sizes) - 1)]) for place, old in enumerate(value)]
            return new if new != value else None
    return None


_TOKENS = {
    "pad": 0,
    "bos": 1,
    "cls": 1,
    "decoder_start": 1,
    "eos": 2,
    "sep": 2,
    "mask": 3,
    "unk": 4,
}


def _token(name: str, value: int) -> int | None:
    """A token within the small vocabulary; each kind has a number of its own."""
    if value < TOKENS:
        return None
    kind = re.sub(r"_token_(id|index)$|_idx$|_id$", "", name)
    return _TOKENS.get(kind, 900 + sum(map(ord, kind)) % 90)
