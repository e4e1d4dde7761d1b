"""The folder of a model for transformers.js: ``onnx/model.onnx``, smaller variants, configs and tokenizer.

Names of files and types are from ``src/utils/dtypes.js`` and ``src/models/session_config.js`` in
https://github.com/huggingface/transformers.js.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from htp_export.capabilities.huggingface.companions import (
    companion_names,
    copy_companions,
    is_companion,
    write_configs,
)
from htp_export.errors import FileError, InputError
from htp_export.extras import required
from htp_export.files.filesystem import is_plain_file
from htp_export.files.folders import check_whole_folder, whole_folder
from htp_export.files.model_files import read_model, write_model
from htp_export.files.own_data import FileHeader
from htp_export.files.text_files import named_if_unwritable, read_json, write_json
from htp_export.files.written_check import made_from
from htp_export.format import tags


def _with_tool(adapter: str, weight_type: str = "", **options: Any) -> Callable[[Path], ir.Model]:
    """Return a function that converts a file with an adapter of `htp_export.tools`."""

    def variant(file: Path) -> ir.Model:
        from htp_export.capabilities.carry import adapters

        types: dict[str, Any] = {}
        if weight_type:
            quantization = required("onnxruntime.quantization", "a quantized variant")
            types["weight_type"] = getattr(quantization.QuantType, weight_type)
        model: ir.Model = getattr(adapters, adapter)(file, **options, **types).model
        return model

    return variant


_VARIANTS: dict[str, tuple[str, Callable[[Path], ir.Model]]] = {
    "fp32": ("", read_model),
    "fp16": ("_fp16", _with_tool("float16", keep_io_types=True)),
    "q8": ("_quantized", _with_tool("quantize_dynamic", weight_type="QUInt8")),
    "int8": ("_int8", _with_tool("quantize_dynamic", weight_type="QInt8")),
    "uint8": ("_uint8", _with_tool("quantize_dynamic", weight_type="QUInt8")),
    "q4": ("_q4", _with_tool("matmul_nbits", bits=4, block_size=32, is_symmetric=True)),
}
"""Type in transformers.js → suffix of its files, and the conversion of the exported model; fp32 is that model."""

DTYPES = tuple(_VARIANTS)

_CONFIG, _SETTINGS, _EXTERNAL = "config.json", "transformers.js_config", "use_external_data_format"

_CACHE_SIZES = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "head_dim",
)


def write_transformers_js(
    files: Mapping[str, str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    model: Any,
    *,
    companions: Path | None = None,
    dtypes: Sequence[str] = ("fp32", "q4"),
) -> Path:
    """Write a folder for transformers.js, completely or not at all.

    Weights are in files of their own, ``onnx/model.onnx_data`` and so on, which ``config.json``
    names. Nodes keep their tags in all variants. An earlier folder is replaced.

    Args:
        files: Name in the folder → exported file, ``{"model": "decoder.onnx"}``.
        folder: The folder.
        model: The model of transformers that was exported.
        companions: The folder with its tokenizer and preprocessor.
        dtypes: A subset of ``DTYPES``.

    Returns:
        The folder.
    """
    target, copied = Path(folder), companion_names(companions)
    check_transformers_js(target, dtypes, copied)
    earlier = functools.partial(_files_of_earlier, companions=copied)
    with named_if_unwritable(target), whole_folder(target, earlier, _CONFIG) as new:
        (new / "onnx").mkdir()
        external: list[str] = []
        for name, file in files.items():
            external += _variants(name, Path(file), new, dtypes)
        config, *_ = write_configs(model, new)
        # A browser does not find files of weights by itself: 1 is their number for each model.
        settings = {_EXTERNAL: dict.fromkeys(external, 1)}
        write_json(config, {**_with_cache_sizes(read_json(config)), _SETTINGS: settings})
        if companions is not None:
            copy_companions(companions, new)
    return target


def _with_cache_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """A config with the sizes of the cache at its top level, where transformers.js needs them for Qwen2-VL."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    sizes = {key: text[key] for key in _CACHE_SIZES if key in text}
    return sizes | config


def check_transformers_js(
    folder: Path, dtypes: Sequence[str], companions: Collection[str] | None = None
) -> None:
    """Refuse unknown variants, and a folder with other files; the error names one of them.

    ``companions``: the names of files that will be copied; None if they are not known yet.
    """
    unknown = [dtype for dtype in dtypes if dtype not in _VARIANTS]
    if unknown or not dtypes:
        problem = f"has no type {unknown[0]!r} here" if unknown else "needs a type"
        raise InputError(f"a model for transformers.js {problem}; there are {', '.join(DTYPES)}")
    if companions is None:
        companions = {file.name for file in folder.glob("*") if is_companion(file.name)}
    check_whole_folder(folder, "a model for transformers.js", _files_of_earlier(folder, companions))


def _files_of_earlier(folder: Path, companions: Collection[str]) -> set[str]:
    """The files in a folder, by relative path, that an earlier call wrote.

    Its ``config.json`` has settings for transformers.js. Models have tags, or are named there. Other
    files have no mark of their origin: ``companions``, which will be replaced by files of the same
    name, are accepted.
    """
    try:
        config = read_json(folder / _CONFIG, plain=True)
    except FileError:
        return set()
    settings = config.get(_SETTINGS) if isinstance(config, dict) else None
    if not isinstance(settings, dict):
        return set()
    listed = settings.get(_EXTERNAL)
    earlier = {_CONFIG, "generation_config.json", *companions}
    for file in (folder / "onnx").glob("*.onnx"):
        header = FileHeader.of(file) if is_plain_file(file) else None
        is_listed = isinstance(listed, dict) and file.name in listed
        if header is not None and (is_listed or tags.FORMAT in header.metadata):
            earlier |= {f"onnx/{file.name}", f"onnx/{file.name}_data"}
    return earlier


def _variants(name: str, file: Path, folder: Path, dtypes: Sequence[str]) -> list[str]:
    """Write the variants of one file; return the names of variants with a file of weights."""
    external = []
    for dtype in dict.fromkeys(dtypes):
        suffix, variant = _VARIANTS[dtype]
        target = folder / "onnx" / f"{name}{suffix}.onnx"
        data = target.with_name(f"{target.name}_data")
        with made_from(lambda: [read_model(file)]):
            write_model(variant(file), target, external_data=data.name)
        if data.exists():
            external.append(target.name)
    return external
