"""The folder of a model for transformers.js: ``onnx/model.onnx``, its smaller variants, configs and tokenizer.

Names of files and types are those of ``src/utils/dtypes.js`` and ``src/models/session_config.js`` in
https://github.com/huggingface/transformers.js.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from htp_export.capabilities.huggingface.companions import copy_companions, is_companion, write_configs
from htp_export.errors import InputError
from htp_export.files.model_files import read_model, write_model
from htp_export.files.replacing import Move, work_folder
from htp_export.files.targets import check_folder
from htp_export.files.text_files import named_if_unwritable, read_json, write_json
from htp_export.files.written_check import made_from


def _made_by(adapter: str, weight_type: str = "", **options: Any) -> Callable[[Path], ir.Model]:
    """What an adapter of `htp_export.tools` makes of a file."""

    def variant(file: Path) -> ir.Model:
        from onnxruntime.quantization import QuantType

        from htp_export.capabilities.carry import adapters

        types = {"weight_type": getattr(QuantType, weight_type)} if weight_type else {}
        model: ir.Model = getattr(adapters, adapter)(file, **options, **types).model
        return model

    return variant


_VARIANTS: dict[str, tuple[str, Callable[[Path], ir.Model]]] = {
    "fp32": ("", read_model),
    "fp16": ("_fp16", _made_by("float16", keep_io_types=True)),
    "q8": ("_quantized", _made_by("quantize_dynamic", weight_type="QUInt8")),
    "int8": ("_int8", _made_by("quantize_dynamic", weight_type="QInt8")),
    "uint8": ("_uint8", _made_by("quantize_dynamic", weight_type="QUInt8")),
    "q4": ("_q4", _made_by("matmul_nbits", bits=4, block_size=32, is_symmetric=True)),
}
"""Type in transformers.js → what its files end with, and what makes the model; the first is the exported model."""

DTYPES = tuple(_VARIANTS)

_CACHE_SIZES = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim")


def write_transformers_js(
    files: Mapping[str, str | os.PathLike[str]],
    folder: str | os.PathLike[str],
    model: Any,
    *,
    companions: Path | None = None,
    dtypes: Sequence[str] = ("fp32", "q4"),
) -> Path:
    """Write a folder that transformers.js loads; it is written completely or not at all.

    Weights lie beside each model, in ``onnx/model.onnx_data`` and so on, and ``config.json`` says so. Nodes keep their
    tags in all variants. An earlier folder is replaced. ``files``: name in the folder → exported file, ``{"model":
    "decoder.onnx"}``. The model is the one of transformers that was exported; the companions are the folder with its
    tokenizer and preprocessor. ``dtypes`` are some of ``DTYPES``.
    """
    target = Path(folder)
    check_transformers_js(target, dtypes)
    with named_if_unwritable(target):
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        with work_folder(target) as work:
            new = work.new / target.absolute().name
            (new / "onnx").mkdir(parents=True)
            external = [made for name, file in files.items() for made in _variants(name, Path(file), new, dtypes)]
            config, *_ = write_configs(model, new)
            settings = {"use_external_data_format": dict.fromkeys(external, 1)}  # a browser has to fetch their weights
            write_json(config, {**_with_cache_sizes(read_json(config)), "transformers.js_config": settings})
            if companions is not None:
                copy_companions(companions, new)
            work.commit([Move(new, target)])
    return target


def _with_cache_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """A config with the sizes of the cache in it, where transformers.js looks for those of some types (Qwen2-VL)."""
    text = config.get("text_config")
    return {**{key: text[key] for key in _CACHE_SIZES if key in text}, **config} if isinstance(text, dict) else config


def check_transformers_js(folder: Path, dtypes: Sequence[str]) -> None:
    """Refuse variants that there are not, and a folder that holds anything else; the error names one of its files."""
    unknown = [dtype for dtype in dtypes if dtype not in _VARIANTS]
    if unknown or not dtypes:
        problem = f"has no type {unknown[0]!r} here" if unknown else "needs a type"
        raise InputError(f"a model for transformers.js {problem}; there are {', '.join(DTYPES)}")
    check_folder(folder, "a model for transformers.js", _is_part)


def _is_part(name: str) -> bool:
    """Whether a file with this path in the folder is one that this module writes."""
    inner, _, file = name.rpartition("/")
    return is_companion(file) if not inner else inner == "onnx" and file.endswith((".onnx", ".onnx_data"))


def _variants(name: str, file: Path, folder: Path, dtypes: Sequence[str]) -> list[str]:
    """Write the variants of one file; the names of those whose weights lie beside them."""
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
