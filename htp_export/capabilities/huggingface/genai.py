"""``genai_config.json``: settings of ONNX Runtime GenAI for a decoder with a key-value cache; see ``src/config.h``.

Names of tensors and sizes of the cache come from the graph, other values from the configs of
transformers. ``type`` is ``"decoder"``: GenAI's types of architectures run the same way, and some
expect other caches. With ``inputs_embeds``, it is a type of Qwen's: only these get positions in
three dimensions (``IsQwenVLFamily`` in ``src/models/model_type.h``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
"""Defaults of ``Qwen2VLImageProcessor`` of transformers for settings that a file lacks."""


def vision_processor(folder: Path) -> dict[str, Any] | None:
    """The content of ``vision_processor.json``: the operators with which GenAI converts images to patches.

    It lists operators of onnxruntime-extensions, which GenAI contains
    (``shared/api/image_processor.cc`` and ``image_transforms.hpp`` in
    https://github.com/microsoft/onnxruntime-extensions). GenAI's usual name for it is
    ``processor_config.json``, which is the name of a file of transformers.

    None if the folder has no image processor, or if onnxruntime-extensions lacks an operator for
    it: a warning names the setting.
    """

    def find_file(name: str) -> Path | None:
        file = folder / name
        return file if file.is_file() else None

    problem = "the folder of the model has no preprocessor_config.json with a patch_size"
    try:
        for settings in image_settings(find_file):
            if "patch_size" in settings:
                operators = image_operators(settings)
                return {"processor": {"name": "image_processor", "transforms": operators}}
    except HtpExportError as error:
        problem = str(error)
    _log.warning(
        "GenAI's own image processor is not configured: %s; give it pixels that transformers made",
        problem,
    )
    return None


def image_operators(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Operators that do the work of an image processor with these settings, on the bytes of an image file.

    Raises:
        InputError: If the value of a setting is invalid, or there is no operator for it.

    Examples:
        >>> [entry["operation"]["type"] for entry in image_operators({"patch_size": 14})]
        ['DecodeImage', 'Resize', 'Rescale', 'Normalize', 'PatchImage']
    """
    processor = _ImageProcessor(settings)
    number = processor.number
    patches = {"patch_size": number("patch_size"), "merge_size": number("merge_size")}
    operators: dict[str, dict[str, Any]] = {"DecodeImage": {"color_space": "RGB"}}
    if processor.setting("do_resize", bool):
        resample = number("resample")
        if resample not in _FILTERS:
            raise InputError(f"onnxruntime-extensions has no filter for its resample, {resample}")
        operators["Resize"] = {
            "interpolation": _FILTERS[resample],
            "smart_resize": 1,
            "min_pixels": number("min_pixels"),
            "max_pixels": number("max_pixels"),
            **patches,
        }
    is_rescaled = processor.setting("do_rescale", bool)
    factor = processor.setting("rescale_factor", float) if is_rescaled else 1
    # Without a factor, too: Rescale converts bytes to floats.
    operators["Rescale"] = {"rescale_factor": float(factor)}
    if processor.setting("do_normalize", bool):
        deviations = processor.by_channel("image_std")
        if 0 in deviations:
            raise InputError(f"its image_std is {deviations}")
        operators["Normalize"] = {"mean": processor.by_channel("image_mean"), "std": deviations}
    operators["PatchImage"] = {**patches, "temporal_patch_size": number("temporal_patch_size")}
    return [
        {"operation": {"name": name, "type": name, "attrs": attributes}}
        for name, attributes in operators.items()
    ]


class _ImageProcessor:
    """The settings of an image processor, with the defaults of transformers, each checked when it is used."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        size = settings.get("size")
        sizes = size if isinstance(size, Mapping) else {}
        # Newer files name the limits as edges.
        edges = {"min_pixels": sizes.get("shortest_edge"), "max_pixels": sizes.get("longest_edge")}
        self._levels = (settings, sizes, edges)

    def setting(self, name: str, kind: type) -> Any:
        """A setting of a kind; an `InputError` for other values."""
        value = _DEFAULTS[name]
        for level in self._levels:
            if level.get(name) is not None:
                value = level[name]
                break
        if not is_setting(kind, value):
            raise InputError(f"its {name} is {value!r}")
        return value

    def number(self, name: str) -> int:
        """An integer; ``resample``, the number of a filter, alone may be 0."""
        value: int = self.setting(name, int)
        if value == 0 and name != "resample":
            raise InputError(f"its {name} is {value!r}")
        return value

    def by_channel(self, name: str) -> list[float]:
        """Three numbers, one for each colour."""
        values = self._settings.get(name, _DEFAULTS[name])
        is_list = isinstance(values, list) and len(values) == 3
        if not is_list or not all(is_setting(float, value) for value in values):
            raise InputError(f"its {name} is {values!r}, and not three numbers")
        return [float(value) for value in values]


GENAI_CONFIG = "genai_config.json"

_log = logging.getLogger(__name__)

_TOKENS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
"""Inputs of a decoder that GenAI provides, besides the cache."""

_IMAGE_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id")
_VISION = "vision_encoder.onnx"
_EMBEDDING = "embed_tokens.onnx"

_UNLIMITED = 2048
"""The context length of a model whose config has no limit, as with ALiBi: GenAI requires one."""

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
"""Setting of GenAI, with the same name in a generation config → its type and default."""


@dataclass(frozen=True)
class _CacheTensors:
    """The tensors of a key-value cache among the inputs, or among the outputs, of a graph.

    Attributes:
        keys: The name of a layer's keys, with ``%d`` for its number.
        values: The same for values.
        layers: The numbers of the layers.
        heads: The number of heads; None if the graph has no record of it.
        head_size: The size of a head; None if the graph has no record of it.
    """

    keys: str
    values: str
    layers: tuple[int, ...]
    heads: int | None
    head_size: int | None

    def names(self) -> set[str]:
        """The names of all tensors."""
        names = set()
        for layer in self.layers:
            names |= {pattern.replace("%d", str(layer)) for pattern in (self.keys, self.values)}
        return names


def _cache_among(tensors: Iterable[ir.Value]) -> _CacheTensors | None:
    """The cache among the inputs or the outputs of a graph; None if there is none.

    Its names have to follow one pattern, with keys and values for every layer.
    """
    keys: dict[str, dict[int, ir.Value]] = {}  # pattern of names → layer → tensor
    values: dict[str, dict[int, ir.Value]] = {}
    for tensor in tensors:
        match = CACHE.fullmatch(str(tensor.name))
        if match is not None:
            pattern = f"{match['before']}%d.{match['kind']}{match['after']}"
            patterns = keys if match["kind"] == "key" else values
            patterns.setdefault(pattern, {})[int(match["layer"])] = tensor
    names = [*keys, *values]
    if not names:
        return None
    # GenAI inserts the number of the layer with printf: another % is refused.
    is_pattern = all(name.count("%") == 1 for name in names)
    if len(keys) != 1 or len(values) != 1 or not is_pattern:
        raise InputError(
            f"the cache has no keys and values of one name each, with a number: {', '.join(names)}"
        )
    [(keys_pattern, keys_by_layer)] = keys.items()
    [(values_pattern, values_by_layer)] = values.items()
    layers = tuple(sorted(keys_by_layer))
    if keys_by_layer.keys() != values_by_layer.keys():
        raise InputError(
            f"the cache has keys of layers {[*layers]}, and values of layers {sorted(values_by_layer)}"
        )
    shape = list(keys_by_layer[layers[0]].shape or ())
    if len(shape) != 4:
        return _CacheTensors(keys_pattern, values_pattern, layers, None, None)
    _, heads, _, head_size = (size if isinstance(size, int) else None for size in shape)
    return _CacheTensors(keys_pattern, values_pattern, layers, heads, head_size)


def genai_config(
    model: ir.Model, config: Any, generation_config: Any = None, *, filename: str = "model.onnx"
) -> dict[str, Any]:
    """The content of ``genai_config.json`` for a decoder with a key-value cache as input and output.

    The decoder has the inputs ``input_ids``, or ``inputs_embeds`` and positions in three
    dimensions; a cache with batch, heads, length and head size; and optionally ``attention_mask``
    and ``position_ids``. It returns ``logits`` and the cache. Settings of the generation config
    come before those of the config.

    Args:
        model: The decoder.
        config: The config of transformers.
        generation_config: The generation config of transformers, if there is one.
        filename: The file of the decoder, in the folder of ``genai_config.json``.

    Raises:
        InputError: The decoder has other inputs or outputs; the error names one.
    """
    graph = model.graph
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    decoder = _decoder(graph, text, filename)
    logits = next(value.shape for value in graph.outputs if value.name == "logits")
    context = _context_length(text)
    has_embeddings = "inputs_embeds" in decoder["inputs"]
    parts = _three_files(graph, config) if has_embeddings else {"type": "decoder"}
    return {
        "model": {
            **parts,
            **_token_ids(config, generation_config),
            "context_length": context,
            "vocab_size": _last_size(logits) or _count(text, "vocab_size"),
            "decoder": decoder,
        },
        "search": {
            **_search(generation_config),
            "max_length": context,
            "past_present_share_buffer": shares_cache(graph),
        },
    }


def _decoder(graph: ir.Graph, text: Any, filename: str) -> dict[str, Any]:
    """The section for the decoder; ``text`` is the config of the text model. Unknown numbers are left out."""
    past, present = _caches(graph)
    shapes = {value.name: value.shape for value in graph.inputs}
    inputs = {name: name for name in _TOKENS if name in shapes}
    heads, hidden_size = _count(text, "num_attention_heads"), _count(text, "hidden_size")
    head_size = past.head_size or _count(text, "head_dim")
    if head_size is None and heads and hidden_size:
        head_size = hidden_size // heads
    if "inputs_embeds" in inputs:
        # With images for several layers (DeepStack), a row is wider than a hidden state.
        hidden_size = _last_size(shapes["inputs_embeds"]) or hidden_size
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
    return {key: value for key, value in decoder.items() if value is not None}


def _last_size(shape: ir.Shape | None) -> int | None:
    """The last size of a shape; None if it is open, or there is no shape."""
    size = shape[-1] if shape else None
    return size if isinstance(size, int) else None


def shares_cache(graph: ir.Graph) -> bool:
    """Whether the cache inputs and outputs of a decoder can be one buffer, allocated for the longest length.

    They can if only ``GroupQueryAttention`` of ONNX Runtime consumes and produces them: it has an
    input for the used part of the buffer.
    """
    past, present = _caches(graph)
    past_names, present_names = past.names(), present.names()
    for value in graph.inputs:
        if value.name not in past_names:
            continue
        for node, position in value.uses():
            # Inputs 3 and 4 are past_key and past_value.
            if not _is_grouped(node) or position not in (3, 4):
                return False
    results = [value for value in graph.outputs if value.name in present_names]
    return all(_is_grouped(value.producer()) for value in results)


def _is_grouped(node: ir.Node | None) -> bool:
    """Whether a node is a GroupQueryAttention."""
    if node is None:
        return False
    return (node.domain, node.op_type) == ("com.microsoft", "GroupQueryAttention")


def _three_files(graph: ir.Graph, config: Any) -> dict[str, Any]:
    """The type, the tokens and the other files of a model whose decoder consumes the result of ``embed_tokens``."""
    positions = next((value.shape for value in graph.inputs if value.name == "position_ids"), None)
    tokens = {name: _count(config, name) for name in _IMAGE_TOKENS}
    if positions is None or len(positions) != 3 or tokens["vision_start_token_id"] is None:
        raise InputError(
            "ONNX Runtime GenAI runs a model for images only with position_ids of 3 dimensions (M-RoPE) and a "
            "vision_start_token_id in its config; leave --genai away"
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


def _caches(graph: ir.Graph) -> tuple[_CacheTensors, _CacheTensors]:
    """The cache among the inputs of a decoder, and the one among its outputs; `InputError` if GenAI cannot run it."""
    inputs = [value for value in graph.inputs if not value.is_initializer()]
    past, present = _cache_among(inputs), _cache_among(graph.outputs)
    if past is None or present is None:
        raise InputError(
            "ONNX Runtime GenAI runs decoders with a key-value cache, and the model "
            f"{'takes' if past is None else 'returns'} none; export it for the task text-generation-with-past"
        )
    if past.layers != present.layers:
        raise InputError(
            f"the model takes a cache of layers {past.layers}, and returns one of layers {present.layers}"
        )
    others = {str(value.name) for value in inputs} - past.names()
    unknown = sorted(others - set(_TOKENS))
    if unknown or others.isdisjoint({"input_ids", "inputs_embeds"}):
        problem = f"has no input {unknown[0]!r}" if unknown else "needs an input 'input_ids'"
        raise InputError(
            f"ONNX Runtime GenAI {problem}; the model takes {', '.join(sorted(others))}"
        )
    if all(value.name != "logits" for value in graph.outputs):
        raise InputError(
            "ONNX Runtime GenAI needs an output 'logits', which the model does not return"
        )
    return past, present


def _context_length(config: Any) -> int:
    """The longest context of a model, by its config; a default, with a warning, without one."""
    length = _count(
        config, "max_position_embeddings", "max_seq_len", "seq_length", "max_sequence_length"
    )
    if length is None:
        _log.warning(
            "the config has no longest context; genai_config.json has %d tokens", _UNLIMITED
        )
        return _UNLIMITED
    return length


def _token_ids(config: Any, generation_config: Any) -> dict[str, Any]:
    """Ids of special tokens, as far as the configs have them; GenAI ends a text at any ``eos_token_id``."""
    ids: dict[str, list[int]] = {}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for source in (generation_config, config):
            setting = find(source, name)
            tokens: Any = setting if isinstance(setting, list | tuple) else [setting]
            valid: list[int] = [token for token in tokens if is_setting(int, token)]
            if valid:
                ids.setdefault(name, valid)
    if "eos_token_id" not in ids:
        _log.warning("the configs name no eos_token_id; ONNX Runtime GenAI ends a text at token 0")
    elif "pad_token_id" not in ids:
        ids["pad_token_id"] = ids["eos_token_id"]
    single: dict[str, Any] = {name: tokens[0] for name, tokens in ids.items()}
    # GenAI accepts a list for this token alone.
    if len(ids.get("eos_token_id", ())) > 1:
        single["eos_token_id"] = ids["eos_token_id"]
    return single


def _search(generation_config: Any) -> dict[str, Any]:
    """GenAI's settings of the search for tokens, from a generation config, if their values are valid."""
    search = {}
    for name, (kind, default) in _SEARCH.items():
        setting = getattr(generation_config, name, None)
        search[name] = kind(setting) if is_setting(kind, setting) else default
    return search


def _count(config: Any, *names: str) -> int | None:
    """The first positive integer among these settings; values of files are not trusted."""
    for name in names:
        value = find(config, name)
        if is_setting(int, value) and value > 0:
            return int(value)
    return None


def write_genai(
    file: str | os.PathLike[str], model: Any, *, companions: Path | None = None
) -> tuple[Path, ...]:
    """Write ``genai_config.json``, the configs and the tokenizer into the folder of an exported decoder.

    Args:
        file: The decoder.
        model: The model of transformers that was exported.
        companions: The folder with its tokenizer and, for a model for images, its image processor;
            see `vision_processor`.

    Returns:
        The written files.

    Raises:
        InputError: ONNX Runtime GenAI cannot run the decoder; the error names the tensor.
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
    """Refuse a folder with a ``config.json`` and no ``genai_config.json``: it belongs to another model."""
    config = folder / "config.json"
    if config.exists() and not (folder / GENAI_CONFIG).exists():
        raise FileError(
            config, "would be replaced, and is of another model; export into another folder"
        )
