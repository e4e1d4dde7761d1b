"""LoRA adapters in files: those of PEFT, and those that ONNX Runtime switches between.

A tensor is called as in a PEFT checkpoint, ``<module path>.lora_A.weight``, without the prefix of PEFT's wrapper.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from htp_export.errors import FileError, InputError
from htp_export.files.replacing import replace_file
from htp_export.files.text_files import read_json
from htp_export.format import tags
from htp_export.runtime.arrays import Array, from_ort, from_torch, to_ort

__all__ = ["Adapter", "LowRank", "arrays_of", "factor_name", "files_of", "placed", "read_adapter", "write_adapter"]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt")
_WRAPPER = "base_model.model."
_FACTOR = re.compile(r"(?:(.*)\.)?lora_([AB])\.weight")


def factor_name(path: str, factor: str) -> str:
    """The name of a factor of a module.

    Examples:
        >>> factor_name("encoder.fc", "A")
        'encoder.fc.lora_A.weight'
    """
    return f"{path}.lora_{factor}.weight" if path else f"lora_{factor}.weight"


@dataclass(frozen=True, eq=False)
class LowRank:
    """What an adapter adds to one linear layer: ``scaling * b @ a``; ``a``: (rank, inputs), ``b``: (outputs, rank).

    ``scaling`` is None for factors to which the model's own one applies, as in files of ONNX Runtime.
    """

    a: Array
    b: Array
    scaling: float | None = None


@dataclass(frozen=True)
class Adapter:
    """The factors of a folder or file by module path."""

    source: Path
    layers: Mapping[str, LowRank]


def read_adapter(adapter: str | os.PathLike[str]) -> Adapter:
    """Read a folder of PEFT, with ``adapter_config.json``, or a file of ONNX Runtime's adapter format.

    Refused are pickles, values that are not finite, and anything besides LoRA factors of linear layers, such as DoRA
    magnitudes, biases or whole modules.
    """
    path = Path(adapter)
    if path.is_dir():
        return Adapter(path, _peft_layers(path))
    if not path.is_file():
        raise FileError(path, "there is no such adapter")
    if path.suffix in (".bin", ".pt", ".safetensors", ".json"):
        raise FileError(path, f"give the folder with {_CONFIG} and {_WEIGHTS}")
    import onnxruntime

    try:
        parameters = onnxruntime.AdapterFormat.read_adapter(os.fspath(path)).get_parameters()
    except Exception as error:  # onnxruntime's own classes
        raise FileError(path, f"is no adapter file of ONNX Runtime: {str(error).splitlines()[0]}") from error
    return Adapter(path, _layers(path, {name: from_ort(value) for name, value in parameters.items()}, lambda *_: None))


def files_of(source: str | os.PathLike[str]) -> list[Path]:
    """The files of an adapter: those of its folder, or the file itself."""
    path = Path(source)
    return sorted(path.glob("*")) if path.is_dir() else [path]


def arrays_of(layers: Mapping[str, LowRank]) -> dict[str, Array]:
    """Name of a factor, as in a PEFT checkpoint → its numbers, for the factors of modules."""
    arrays = {factor_name(path, "A"): layer.a for path, layer in layers.items()}
    return arrays | {factor_name(path, "B"): layer.b for path, layer in layers.items()}


def write_adapter(layers: Mapping[str, LowRank], file: Path) -> None:
    """Write factors into a file of ONNX Runtime's adapter format, whole or not at all (`FileError`)."""
    import onnxruntime

    adapter = onnxruntime.AdapterFormat()
    adapter.set_adapter_version(1)
    adapter.set_model_version(1)
    adapter.set_parameters({name: to_ort(array) for name, array in arrays_of(layers).items()})
    try:
        with replace_file(file) as new:
            adapter.export_adapter(os.fspath(new))
    except (OSError, RuntimeError) as error:
        raise FileError(file, f"cannot be written: {error}") from error


def placed(adapter: Adapter, paths: Collection[str], what: str) -> dict[str, LowRank]:
    """The factors of an adapter under those paths of a model that can have factors; ``what`` says which these are.

    A path of the adapter is that of a module; or one of them ends with the other, where the adapter was trained on a
    model inside another one. One that is of no module, or of several, is refused.
    """
    found: dict[str, LowRank] = {}
    for path, layer in adapter.layers.items():
        known = [path] if path in paths else [each for each in paths if _same_end(each, path)]
        if len(known) != 1:
            problem = f"may be {' or '.join(map(repr, known[:3]))}" if known else f"is none of the {what}"
            nearest = "" if known else f": {', '.join(map(repr, list(paths)[:3]))}{', ...' if len(paths) > 3 else ''}"
            raise InputError(f"{adapter.source}: module {path!r} of the adapter {problem}{nearest}")
        found[known[0]] = layer
    return found


def _same_end(one: str, other: str) -> bool:
    return bool(one and other) and (one.endswith(f".{other}") or other.endswith(f".{one}"))


def _peft_layers(folder: Path) -> dict[str, LowRank]:
    config = read_json(folder / _CONFIG)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise FileError(folder / _CONFIG, "is no LoRA adapter of PEFT: peft_type is not 'LORA'")
    if config.get("use_dora"):
        raise FileError(folder / _CONFIG, "is a DoRA adapter, whose magnitudes cannot be added to a linear layer")
    weights = folder / _WEIGHTS
    if not weights.is_file():
        pickles = [name for name in _PICKLES if (folder / name).exists()]
        raise FileError(folder / (pickles or [_WEIGHTS])[0], f"is needed as {_WEIGHTS}; pickles are not read")
    return _layers(weights, _tensors(weights), lambda path, rank: _scaling(folder, config, path, rank))


def _tensors(file: Path) -> dict[str, Array]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return {name: from_torch(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise FileError(file, f"cannot be read: {error}") from error


def _layers(file: Path, tensors: Mapping[str, Array], scaling: Any) -> dict[str, LowRank]:
    factors: dict[str, dict[str, Array]] = {}
    for name, array in tensors.items():
        match = _FACTOR.fullmatch(name.removeprefix(_WRAPPER))
        if match is None:
            raise FileError(file, f"has {name!r}, which is no LoRA factor of a linear layer")
        if array.ndim != 2:
            raise FileError(file, f"has {name!r} of the shape {array.shape}; only linear layers have two dimensions")
        if not np.isfinite(array.astype(np.float32)).all():
            raise FileError(file, f"has values in {name!r} that are not finite")
        factors.setdefault(match[1] or "", {})[match[2]] = array
    layers = {}
    for path, pair in sorted(factors.items(), key=lambda item: tags.path_order(item[0])):
        if len(pair) != 2 or pair["A"].shape[0] != pair["B"].shape[1]:
            raise FileError(file, f"has no two factors of one rank for module {path!r}")
        layers[path] = LowRank(pair["A"], pair["B"], scaling(path, pair["A"].shape[0]))
    if not layers:
        raise FileError(file, "has no LoRA factors")
    return layers


def _scaling(folder: Path, config: Mapping[str, Any], path: str, rank: int) -> float:
    """``lora_alpha`` over the rank, or over its root with ``use_rslora``; as PEFT computes it for a module."""
    patterns = config.get("alpha_pattern") or {}
    keys = [key for key in patterns if re.match(rf"(.*\.)?({key})$", path)]
    alpha = patterns[keys[0]] if keys else config.get("lora_alpha")
    if not isinstance(alpha, int | float) or rank < 1:
        raise FileError(folder / _CONFIG, f"has no lora_alpha for module {path!r}")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)
