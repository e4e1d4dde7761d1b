"""``genai_config.json``: how ONNX Runtime GenAI runs a decoder with a key-value cache; keys as in ``src/config.h``.

Names of tensors and sizes of the cache are read from the graph, the rest from the configs of
transformers. ``type`` is ``"decoder"``: GenAI's types of architectures run the same way, and some
expect other caches. With ``inputs_embeds``, it is one of Qwen's: these alone get positions in three
dimensions (``IsQwenVLFamily`` in ``src/models/model_type.h``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import onnx_ir as ir

from htp_export.capabilities.huggingface.companions import copy_companions, write_configs
from htp_export.capabilities.huggingface.configs import find, is_setting
from htp_export.capabilities.huggingface.sources import image_settings
from htp_export.errors import FileError, HtpExportError, InputError
from htp_export.files.model_files import read_model
from htp_export.files.text_files import named_if_unwritable, write_json
from htp_export.runtime.generating import CACHE

VISION_PROCESSOR = "vision_processor.json"


_FILTERS = {0: "NEAREST", 1: "LANCZOS", 2: "LINEAR", 3: "CUBIC"}
"""Filter of Pillow → its name in onnxruntime-extensions."""

_DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True),
    "resample": 3,
    "rescale_factor": 1 / 255,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 56 * 56,
    "max_pixels": 28 * 28 * 1280,
}
"""What ``Qwen2VLImageProcessor`` of transformers has for settings that a file does not name."""


def vision_processor(folder: Path) -> dict[str, Any] | None:
    """The content of ``vision_processor.json`` for the image processor of a folder: how GenAI makes patches of images.

    It lists operators of onnxruntime-extensions, which GenAI contains
    (``shared/api/image_processor.cc`` and ``image_transforms.hpp`` in
    https://github.com/microsoft/onnxruntime-extensions). Its usual name is
    ``processor_config.json``, which transformers has for a file of its own.

    None if the folder has none, or one whose work onnxruntime-extensions has no operators for: a
    warning says which setting it is.
    """
    problem = "the folder of the model has no preprocessor_config.json with a patch_size"
    try:
        for settings in image_settings(
            lambda name: file if (file := folder / name).is_file() else None
        ):
            if "patch_size" in settings:
                return {
                    "processor": {
                        "name": "image_processor",
                        "transforms": image_operators(settings),
                    }
                }
    except HtpExportError as error:
        problem = str(error)
    _log.warning(
        "GenAI's own image processor is not configured: %s; give it pixels that transformers made",
        problem,
    )
    return None


def image_operators(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The operators that make what an image processor with these settings makes, from the bytes of a file.

    Raises:
        InputError: If a setting is no number that it can be, or there is no operator for it.

    Examples:
        >>> [each["operation"]["type"] for each in image_operators({"patch_size": 14})]
        ['DecodeImage', 'Resize', 'Rescale', 'Normalize', 'PatchImage']
    """
    size = settings.get("size")
    sizes = size if isinstance(size, Mapping) else {}
    edges = {"min_pixels": sizes.get("shortest_edge"), "max_pixels": sizes.get("longest_edge")}
    layers = (settings, sizes, edges)

    def setting(name: str, kind: type) -> Any:
        found = next(
            (layer[name] for layer in layers if layer.get(name) is not None), _DEFAULTS[name]
        )
        if not is_setting(kind, found) or (kind is int and found == 0 and name != "resample"):
            raise InputError(f"its {name} is {found!r}")
        return found

    def of_channels(name: str) -> list[float]:
        found = settings.get(name, _DEFAULTS[name])
        if (
            not isinstance(found, list)
            or len(found) != 3
            or not all(is_setting(float, each) for each in found)
        ):
            raise InputError(f"its {name} is {found!r}, and not three numbers")
        return [float(each) for each in found]

    patches = {"patch_size": setting("patch_size", int), "merge_size": setting("merge_size", int)}
    steps: dict[str, dict[str, Any]] = {"DecodeImage": {"color_space": "RGB"}}
    if setting("do_resize", bool):
        resample = setting("resample", int)
        if resample not in _FILTERS:
            raise InputError(f"onnxruntime-extensions has no filter for its resample, {resample}")
        pixels = {name: setting(name, int) for name in ("min_pixels", "max_pixels")}
        steps["Resize"] = {
            "interpolation": _FILTERS[resample],
            "smart_resize": 1,
            **pixels,
            **patches,
        }
    steps["Rescale"] = {
        "rescale_factor": float(
            setting("rescale_factor", float) if setting("do_rescale", bool) else 1
        )
    }
    if setting("do_normalize", bool):
        deviations = of_channels("image_std")
        if 0 in deviations:
            raise InputError(f"its image_std is {deviations}")
        steps["Normalize"] = {"mean": of_channels("image_mean"), "std": deviations}
    steps["PatchImage"] = {**patches, "temporal_patch_size": setting("temporal_patch_size", int)}
    return [
        {"operation": {"name": name, "type": name, "attrs": attrs}} for name, attrs in steps.items()
    ]


GENAI_CONFIG = "genai_config.json"

_log = logging.getLogger(__name__)

_TOKENS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
"""What GenAI gives a decoder besides its cache."""

_IMAGE_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id")
_VISION = "vision_encoder.onnx"
_EMBEDDING = "embed_tokens.onnx"

_UNLIMITED = 2048
"""The context length of a model whose config has no limit, as with ALiBi; GenAI wants a number."""

_SEARCH: dict[str, tuple[type, Any]] = {
    "do_sample": (bool, False),
    "early_stopping": (bool, True),
    "min_length": (int, 0),
    "num_beams": (int, 1),
    "num_return_sequences": (int, 1),
    "no_repeat_ngram_size": (int, 0),
    "top_k": (int, 50),
    "top_p": (float, 1.0),
    "temperature": (float, 1.0),
    "repetition_penalty": (float, 1.0),
    "length_penalty": (float, 1.0),
    "diversity_penalty": (float, 0.0),
}
"""Setting of GenAI, with the same name in a generation config → its type, and what it is without one."""


class _Caches(NamedTuple):
    """The tensors of a key-value cache among the inputs, or among the outputs, of a graph."""

    keys: str  # the name of a layer's keys, with %d for its number
    values: str
    layers: tuple[int, ...]
    heads: int | None  # None where the graph does not say it
    head_size: int | None

    def names(self) -> set[str]:
        return {
            pattern.replace("%d", str(layer))
            for pattern in (self.keys, self.values)
            for layer in self.layers
        }


def _cache_among(tensors: Iterable[ir.Value]) -> _Caches | None:
    """The cache among the inputs or the outputs of a graph; None if there is none.

    Its names have to follow one pattern, with keys and values for every layer.
    """
    found: dict[str, dict[str, dict[int, ir.Value]]] = {"key": {}, "value": {}}
    for tensor in tensors:
        match = CACHE.fullmatch(str(tensor.name))
        if match is not None:
            pattern = f"{match['before']}%d.{match['kind']}{match['after']}"
            found[match["kind"]].setdefault(pattern, {})[int(match["layer"])] = tensor
    names = [pattern for patterns in found.values() for pattern in patterns]
    if not names:
        return None
    if (
        len(found["key"]) != 1
        or len(found["value"]) != 1
        or any(name.count("%") != 1 for name in names)
    ):
        raise InputError(
            f"the cache has no keys and values of one name each, with a number: {', '.join(names)}"
        )
    [(keys, by_layer)], [(values, others)] = found["key"].items(), found["value"].items()
    if by_layer.keys() != others.keys():
        raise InputError(
            f"the cache has keys of layers {sorted(by_layer)}, and values of layers {sorted(others)}"
        )
    layers = tuple(sorted(by_layer))
    sizes = [size if isinstance(size, int) else None for size in by_layer[layers[0]].shape or ()]
    heads, head_size = (sizes[1], sizes[3]) if len(sizes) == 4 else (None, None)
    return _Caches(keys, values, layers, heads, head_size)


def genai_config(
    model: ir.Model, config: Any, generation_config: Any = None, *, filename: str = "model.onnx"
) -> dict[str, Any]:
    """The content of ``genai_config.json`` for a decoder that takes a key-value cache and returns one.

    The decoder takes ``input_ids``, or ``inputs_embeds`` and positions in three dimensions, a cache
    with batch, heads, length and head size, and maybe ``attention_mask`` and ``position_ids``; it
    returns ``logits`` and the cache. An InputError names the tensor that is otherwise. Settings of
    the generation config come before those of the config. The file name is that of the decoder in
    the folder of ``genai_config.json``.
    """
    past, present = _caches(model.graph)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    inputs = {
        name: name for name in _TOKENS if any(value.name == name for value in model.graph.inputs)
    }
    heads, hidden_size = _count(text, "num_attention_heads"), _count(text, "hidden_size")
    head_size = past.head_size or _count(text, "head_dim")
    if head_size is None and heads and hidden_size:
        head_size = hidden_size // heads
    logits = next(value.shape for value in model.graph.outputs if value.name == "logits")
    vocabulary = (
        logits[-1] if logits and isinstance(logits[-1], int) else _count(text, "vocab_size")
    )
    context = _context_length(text)
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": filename,
        "head_size": head_size,
        "hidden_size": hidden_size,
        "inputs": {**inputs, "past_key_names": past.keys, "past_value_names": past.values},
        "outputs": {
            "logits": "logits",
            "present_key_names": present.keys,
            "present_value_names": present.values,
        },
        "num_attention_heads": heads,
        "num_hidden_layers": len(past.layers),
        "num_key_value_heads": past.heads or _count(text, "num_key_value_heads") or heads,
    }
    parts: dict[str, Any] = {"type": "decoder"}
    if "inputs_embeds" in inputs:
        parts = _three_files(model.graph, config)
        [rows] = [value.shape for value in model.graph.inputs if value.name == "inputs_embeds"]
        decoder["hidden_size"] = rows[-1] if rows and isinstance(rows[-1], int) else hidden_size
    return {
        "model": {
            **parts,
            **_token_ids(config, generation_config),
            "context_length": context,
            "vocab_size": vocabulary,
            "decoder": {key: value for key, value in decoder.items() if value is not None},
        },
        "search": {
            **_search(generation_config),
            "max_length": context,
            "past_present_share_buffer": shares_cache(model.graph),
        },
    }


def shares_cache(graph: ir.Graph) -> bool:
    """Whether the cache that a decoder takes and the one that it returns can be one buffer, of the longest length.

    They can if nothing but ``GroupQueryAttention`` of ONNX Runtime reads and writes them: it is
    told how much of the buffer is used.
    """
    past, present = _caches(graph)
    taken, given = past.names(), present.names()
    places = [
        (use.node, use.idx) for value in graph.inputs if value.name in taken for use in value.uses()
    ]
    read = all(_is_grouped(node) and place in (3, 4) for node, place in places)
    return read and all(
        _is_grouped(value.producer()) for value in graph.outputs if value.name in given
    )


def _is_grouped(node: ir.Node | None) -> bool:
    return node is not None and (node.domain, node.op_type) == (
        "com.microsoft",
        "GroupQueryAttention",
    )


def _three_files(graph: ir.Graph, config: Any) -> dict[str, Any]:
    """The type, the tokens and the other files of a model whose decoder takes what ``embed_tokens`` returns."""
    positions = next((value.shape for value in graph.inputs if value.name == "position_ids"), None)
    tokens = {name: _count(config, name) for name in _IMAGE_TOKENS}
    if positions is None or len(positions) != 3 or tokens["vision_start_token_id"] is None:
        raise InputError(
            "of models that see images, ONNX Runtime GenAI runs those with position_ids of 3 dimensions (M-RoPE) and a "
            "vision_start_token_id in their config; leave --genai away"
        )
    grids = {
        "spatial_merge_size": _count(config, "spatial_merge_size"),
        "patch_size": _count(config, "patch_size"),
    }
    vision = {
        "filename": _VISION,
        **grids,
        "inputs": {"pixel_values": "pixel_values", "image_grid_thw": "image_grid_thw"},
        "outputs": {"image_features": "image_features"},
    }
    embedding = {
        "filename": _EMBEDDING,
        "inputs": {"input_ids": "input_ids", "image_features": "image_features"},
        "outputs": {"inputs_embeds": "inputs_embeds"},
    }
    known = {name: token for name, token in tokens.items() if token is not None}
    return {"type": "qwen2_5_vl", **known, "vision": vision, "embedding": embedding}


def _caches(graph: ir.Graph) -> tuple[_Caches, _Caches]:
    """The cache that a decoder takes, and the one that it returns."""
    given = [value for value in graph.inputs if not value.is_initializer()]
    past, present = _cache_among(given), _cache_among(graph.outputs)
    if past is None or present is None:
        raise InputError(
            "ONNX Runtime GenAI runs decoders with a key-value cache, and the model "
            f"{'takes' if past is None else 'returns'} none; export it for the task text-generation-with-past"
        )
    if past.layers != present.layers:
        raise InputError(
            f"the model takes a cache of layers {past.layers}, and returns one of layers {present.layers}"
        )
    names = {str(value.name) for value in given}
    unknown = sorted(names - past.names() - set(_TOKENS))
    if unknown or not names & {"input_ids", "inputs_embeds"}:
        problem = f"gives no input {unknown[0]!r}" if unknown else "needs an input 'input_ids'"
        raise InputError(
            f"ONNX Runtime GenAI {problem}; the model takes {', '.join(sorted(names - past.names()))}"
        )
    if all(value.name != "logits" for value in graph.outputs):
        raise InputError(
            "ONNX Runtime GenAI needs an output 'logits', which the model does not return"
        )
    return past, present


def _context_length(config: Any) -> int:
    length = _count(
        config, "max_position_embeddings", "max_seq_len", "seq_length", "max_sequence_length"
    )
    if length is None:
        _log.warning(
            "the config names no longest context; genai_config.json says %d tokens", _UNLIMITED
        )
        return _UNLIMITED
    return length


def _token_ids(config: Any, generation_config: Any) -> dict[str, Any]:
    """The ids of special tokens, as far as they are known; GenAI ends a text at each ``eos_token_id``."""
    ids: dict[str, list[int]] = {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for source in (generation_config, config):
            setting = find(source, name)
            listed: Any = setting if isinstance(setting, list | tuple) else [setting]
            known: list[int] = [token for token in listed if is_setting(int, token)]
            if known:
                ids.setdefault(name, known)
    if "eos_token_id" not in ids:
        _log.warning("the configs name no eos_token_id; ONNX Runtime GenAI ends a text at token 0")
    elif "pad_token_id" not in ids:
        ids["pad_token_id"] = ids["eos_token_id"]
    several = (
        {"eos_token_id": ids.get("eos_token_id", [])}
        if len(ids.get("eos_token_id", [])) > 1
        else {}
    )
    return {name: tokens[0] for name, tokens in ids.items()} | several


def _search(generation_config: Any) -> dict[str, Any]:
    settings = {name: getattr(generation_config, name, None) for name in _SEARCH}
    return {
        name: kind(settings[name]) if is_setting(kind, settings[name]) else usual
        for name, (kind, usual) in _SEARCH.items()
    }


def _count(config: Any, *names: str) -> int | None:
    """The first positive number of these settings; configs may come from anywhere and hold anything."""
    return next(
        (value for name in names if is_setting(int, value := find(config, name)) and value > 0),
        None,
    )


def write_genai(
    file: str | os.PathLike[str], model: Any, *, companions: Path | None = None
) -> tuple[Path, ...]:
    """Write ``genai_config.json``, the configs and the tokenizer into the folder of an exported decoder.

    The model is the one of transformers that was exported; the companions are the folder with its
    tokenizer and, of a model that sees images, its image processor: `vision_processor`. An
    InputError names the tensor for which ONNX Runtime GenAI cannot run the decoder.
    """
    path = Path(file)
    generation = getattr(model, "generation_config", None)
    content = genai_config(read_model(path), model.config, generation, filename=path.name)
    vision = content["model"].get("vision")
    images = None if vision is None or companions is None else vision_processor(companions)
    with named_if_unwritable(path.parent):
        written = []
        if images is not None:
            vision["config_filename"] = VISION_PROCESSOR
            written.append(write_json(path.with_name(VISION_PROCESSOR), images))
        written += [
            write_json(path.with_name(GENAI_CONFIG), content),
            *write_configs(model, path.parent),
        ]
        if companions is not None:
            written += copy_companions(companions, path.parent)
    return tuple(written)


def check_genai(folder: Path) -> None:
    """Refuse a folder with a ``config.json`` and no ``genai_config.json``: files of another model would be replaced."""
    config = folder / "config.json"
    if config.exists() and not (folder / GENAI_CONFIG).exists():
        raise FileError(
            config, "would be replaced, and is of another model; export into another folder"
        )
