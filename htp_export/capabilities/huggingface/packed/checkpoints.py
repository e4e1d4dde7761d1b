"""Which checkpoints are quantized, and how each is read.

Files of others are not trusted: no pickle is opened, and shapes are compared before anything is read.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from htp_export.capabilities.huggingface.packed.layouts import LAYOUTS
from htp_export.capabilities.huggingface.packed.weights import Array, Layer, PackedCheckpoint, module_of
from htp_export.errors import FileError
from htp_export.files.checkpoint import read_checkpoint
from htp_export.files.text_files import read_json
from htp_export.runtime.arrays import from_torch

_CONFIG, _GPTQ_CONFIG = "config.json", "quantize_config.json"


def is_packed(source: str | os.PathLike[str]) -> bool:
    """Whether it is a GGUF file, or a folder with a quantized checkpoint that can be read, by its config."""
    return is_gguf(source) or (
        Path(source).is_dir() and str(_quantization(Path(source)).get("quant_method")) in LAYOUTS
    )


def is_gguf(source: str | os.PathLike[str]) -> bool:
    """Whether it is named as a GGUF file, and is a file."""
    return Path(source).suffix.lower() == ".gguf" and Path(source).is_file()


def read_packed(source: str | os.PathLike[str]) -> PackedCheckpoint:
    """Read a quantized checkpoint: a GGUF file, or a folder with safetensors files whose ``config.json`` says how.

    Only headers are read; weights are when they are used.

    Raises:
        FileError: If there is no such checkpoint, or its tensors do not have the shapes that the method needs.
    """
    path = Path(source)
    if is_gguf(path):
        from htp_export.capabilities.huggingface.packed.gguf_files import read_gguf

        return read_gguf(path)
    config = _quantization(path)
    method = str(config.get("quant_method", "gptq" if config else ""))
    if method not in LAYOUTS:
        problem = f"has quant_method {method!r}" if config else "names no quantization"
        raise FileError(path / _CONFIG, f"{problem}; {', '.join(LAYOUTS)} are read")
    checkpoint = read_checkpoint(path)
    by_module: defaultdict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, shape in checkpoint.shapes.items():
        module = module_of(name)
        by_module[module][name.removeprefix(f"{module}.")] = shape
    layers: dict[str, Layer] = {}
    others: dict[str, Any] = {}
    for module, shapes in by_module.items():
        prefix = f"{module}." if module else ""
        read = functools.partial(_tensor, checkpoint.files, prefix)
        try:
            layer = LAYOUTS[method](shapes, read, config)
        except (ValueError, KeyError) as error:
            problem = f"has no {error}" if isinstance(error, KeyError) else str(error)
            raise FileError(path, f"module {module!r}: {problem}") from error
        if layer is not None:
            layers[f"{prefix}weight"] = layer
        kept = shapes if layer is None else shapes.keys() & {"bias"}
        others |= {f"{prefix}{name}": functools.partial(read, name) for name in kept}
    if not layers:
        raise FileError(path, f"has no weights of {method}")
    return PackedCheckpoint(path, method, layers, others)


def _quantization(folder: Path) -> Mapping[str, Any]:
    """What the config of a folder says of quantization; nothing for other folders."""
    for name in (_CONFIG, _GPTQ_CONFIG):
        if (folder / name).is_file():
            content = read_json(folder / name)
            is_whole = name == _GPTQ_CONFIG or not isinstance(content, dict)
            found = content if is_whole else content.get("quantization_config")
            if isinstance(found, dict) and found:
                return found
    return {}


def _tensor(files: Mapping[str, Path], prefix: str, name: str) -> Array:
    from safetensors import SafetensorError, safe_open

    file = files[f"{prefix}{name}"]
    try:
        with safe_open(file, framework="pt") as opened:
            return from_torch(opened.get_tensor(f"{prefix}{name}"))
    except (OSError, SafetensorError) as error:
        raise FileError(file, f"cannot be read: {error}") from error
