"""Quantized checkpoints as two things: packed weights by parameter, and a ``state_dict`` in float32.

Files of others are not trusted: no pickle is opened, and shapes are compared before anything is read.
"""

from __future__ import annotations

import functools
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from htp_export.capabilities.huggingface.packed.layouts import LAYOUTS
from htp_export.capabilities.huggingface.packed.weights import Array, Coded, Layer, Packed
from htp_export.errors import FileError
from htp_export.files.checkpoint import read_checkpoint
from htp_export.files.text_files import read_json
from htp_export.runtime.arrays import from_torch

__all__ = ["PackedCheckpoint", "is_gguf", "is_packed", "read_packed"]

_CONFIG, _GPTQ_CONFIG = "config.json", "quantize_config.json"


class PackedCheckpoint(Mapping[str, Array]):
    """A quantized checkpoint; as a mapping, its ``state_dict``: name → array, dequantized to float32 when it is read.

    Attributes:
        path: The folder or file.
        kind: What made it: ``gptq``, ``awq``, ...
        layers: Name of a parameter → its packed weight.
    """

    def __init__(self, path: Path, kind: str, layers: Mapping[str, Layer], others: Mapping[str, Any]) -> None:
        self.path, self.kind, self.layers, self._others = path, kind, layers, others

    def __getitem__(self, name: str) -> Array:
        """A parameter; a `KeyError` if the checkpoint has none of this name."""
        if name not in self._others:
            return self.packed(name).weight()
        array: Array = self._others[name]()
        return array if array.dtype.kind in "iub" else array.astype(np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter({**self.layers, **self._others})

    def __len__(self) -> int:
        return len({*self.layers, *self._others})

    def also(self, names: Mapping[str, str]) -> PackedCheckpoint:
        """The same with more names: name → the one that the checkpoint has."""
        layers = {name: self.layers[known] for name, known in names.items() if known in self.layers}
        others = {name: self._others[known] for name, known in names.items() if known in self._others}
        return PackedCheckpoint(self.path, self.kind, {**self.layers, **layers}, {**self._others, **others})

    def packed(self, name: str) -> Packed | Coded:
        """The packed weight of a parameter; a `FileError` if its tensors do not fit together."""
        try:
            return self.layers[name].read()
        except ValueError as error:
            raise FileError(self.path, f"module {_module(name)!r}: {error}") from error


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
        module = _module(name)
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


def _module(name: str) -> str:
    """The module of a tensor; bitsandbytes has ``<module>.weight.absmax``."""
    return name.rpartition(".weight.")[0] or name.rpartition(".")[0]


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
