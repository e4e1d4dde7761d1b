"""LoRA adapters in files: those of PEFT, and those that ONNX Runtime switches between.

A tensor is called as in a PEFT checkpoint, ``<module path>.lora_A.weight``, without the prefix of
PEFT's wrapper.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from htp_export.errors import FileError, InputError
from htp_export.files.text_files import read_json
from htp_export.files.write_file import replace_file
from htp_export.format import tags
from htp_export.format.model_metadata import factor_name
from htp_export.format.patterns import Pattern
from htp_export.runtime.arrays import Array, from_ort, from_torch, to_ort

_Entry = TypeVar("_Entry")

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLES = ("adapter_model.bin", "adapter_model.pt")
_WRAPPER = "base_model.model."
_FACTOR = re.compile(r"(?:(.*)\.)?lora_(?:(embedding_)?([AB])|(magnitude)_vector)(?:\.weight)?")
_COPIES = re.compile(r"\.(modules_to_save|original_module)\.")
"""What PEFT keeps beside a module that is trained as a whole: with ``bias="all"`` it saves the biases of these, too."""

_ONLY_FUSED = "which no run can switch; lora.fuse takes it"

_STARTS = ("pissa", "olora")
"""Values of ``init_lora_weights`` with which PEFT takes the first factors off the weights, from the weights alone."""

_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Those with which the weights stay."""

_OTHER_VARIANTS = (
    *(
        "alora_invocation_tokens",
        "arrow_config",
        "kasa_config",
        "layer_replication",
        "lora_bias",
        "monteclora_config",
    ),
    *("target_parameters", "trainable_token_indices", "use_bdlora", "use_qalora", "velora_config"),
)
"""Settings of PEFT's config with which an adapter is not what its factors say."""


@dataclass(frozen=True, eq=False)
class LowRank:
    """What an adapter adds to the weight of one layer: ``scaling * b @ a``, in the layout of ``kind``.

    Attributes:
        a: (rank, inputs); for a convolution (rank, inputs, size of its kernel, ...).
        b: (outputs, rank); for a convolution (outputs, rank, 1, ...).
        scaling: None for factors to which the model's own one applies, as in files of ONNX Runtime.
        kind: ``"linear"``, ``"embedding"`` or ``"convolution"``.
        magnitude: The norms of the new weight, of DoRA.
        start: ``init_lora_weights`` of PEFT, if the first factors were taken off the weight.
    """

    a: Array
    b: Array
    scaling: float | None = None
    kind: str = "linear"
    magnitude: Array | None = None
    start: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the product of the factors is all that a linear layer gets."""
        return self.kind == "linear" and self.magnitude is None and self.start is None


@dataclass(frozen=True)
class Adapter:
    """What a folder or file holds.

    Attributes:
        source: The folder or file.
        layers: Module path → the factors.
        parameters: Name → contents, of parameters that were trained as a whole: biases, and
            ``modules_to_save``.
    """

    source: Path
    layers: Mapping[str, LowRank]
    parameters: Mapping[str, Array] = field(default_factory=dict)


def read_adapter(adapter: str | os.PathLike[str]) -> Adapter:
    """Read a folder of PEFT, with ``adapter_config.json``, or a file of ONNX Runtime's adapter format.

    Refused are pickles, values that are not finite, and variants of LoRA that are not known here.
    """
    path = Path(adapter)
    if path.is_dir():
        return _of_peft(path)
    if not path.is_file():
        raise FileError(path, "there is no such adapter")
    if path.suffix in (".bin", ".pt", ".safetensors", ".json"):
        raise FileError(path, f"give the folder with {_CONFIG} and {_WEIGHTS}")
    import onnxruntime

    try:
        adapter_file = onnxruntime.AdapterFormat.read_adapter(os.fspath(path))
        parameters = adapter_file.get_parameters()  # they lie in the memory of the adapter file
    except Exception as error:  # onnxruntime's own classes
        raise FileError(
            path, f"is no adapter file of ONNX Runtime: {str(error).splitlines()[0]}"
        ) from error
    found = _layers(
        path, {name: from_ort(value) for name, value in parameters.items()}, lambda *_: None
    )
    require_switchable(found)
    return found


def require_switchable(adapter: Adapter) -> None:
    """Refuse (`FileError`) an adapter that is more than products of two factors for linear layers."""
    for path, layer in adapter.layers.items():
        if not layer.is_plain:
            what = (
                "a DoRA magnitude for"
                if layer.magnitude is not None
                else f"init_lora_weights={layer.start!r} for"
            )
            what = what if layer.kind == "linear" else f"factors of the {layer.kind}"
            raise FileError(adapter.source, f"has {what} {path!r}, {_ONLY_FUSED}")
    for name in adapter.parameters:
        raise FileError(
            adapter.source,
            f"has {name!r}, which is no LoRA factor of a linear layer, {_ONLY_FUSED}",
        )


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
    # The adapter refers to the memory of these values without keeping it alive.
    values = {name: to_ort(array) for name, array in arrays_of(layers).items()}
    adapter.set_parameters(values)
    try:
        with replace_file(file) as new:
            adapter.export_adapter(os.fspath(new))
    except (OSError, RuntimeError) as error:
        raise FileError(file, f"cannot be written: {error}") from error


def placed(
    source: Path,
    entries: Mapping[str, _Entry],
    paths: Collection[str],
    what: str,
    entry: str = "module",
) -> dict[str, _Entry]:
    """The entries of an adapter under those paths of a model that can have them; ``what`` says which these are.

    A path of the adapter is that of the model; or one of them ends with the other, where the
    adapter was trained on a model inside another one. One that is none of them, or may be several,
    is refused.
    """
    found: dict[str, _Entry] = {}
    for path, contents in entries.items():
        known = [path] if path in paths else [each for each in paths if _same_end(each, path)]
        if len(known) != 1:
            problem = (
                f"may be {' or '.join(map(repr, known[:3]))}" if known else f"is none of the {what}"
            )
            nearest = (
                ""
                if known
                else f": {', '.join(map(repr, list(paths)[:3]))}{', ...' if len(paths) > 3 else ''}"
            )
            raise InputError(f"{source}: {entry} {path!r} of the adapter {problem}{nearest}")
        found[known[0]] = contents
    return found


def _same_end(one: str, other: str) -> bool:
    return bool(one and other) and (one.endswith(f".{other}") or other.endswith(f".{one}"))


def _of_peft(folder: Path) -> Adapter:
    config = read_json(folder / _CONFIG, plain=True)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise FileError(folder / _CONFIG, "is no LoRA adapter of PEFT: peft_type is not 'LORA'")
    for setting in _OTHER_VARIANTS:
        if config.get(setting):
            raise FileError(
                folder / _CONFIG,
                f"has {setting}={config[setting]!r}, a variant of LoRA that is not read",
            )
    start = config.get("init_lora_weights", True)
    if start not in (*_STARTS, *_PLAIN_STARTS):
        raise FileError(
            folder / _CONFIG,
            f"has init_lora_weights={start!r}, which changed the weights of the model; convert the adapter with "
            "save_pretrained(path_initial_model_for_weight_conversion=...) of PEFT",
        )
    weights = folder / _WEIGHTS
    if not weights.is_file():
        pickles = [name for name in _PICKLES if (folder / name).exists()]
        raise FileError(
            folder / (pickles or [_WEIGHTS])[0], f"is needed as {_WEIGHTS}; pickles are not read"
        )
    alphas = _alphas(folder / _CONFIG, config)
    read = _layers(weights, _tensors(weights), lambda path, rank: alphas.scaling(path, rank))
    for path, layer in read.layers.items():
        if bool(config.get("use_dora")) != (layer.magnitude is not None):
            what = "no" if layer.magnitude is None else "a"
            raise FileError(
                weights, f"has {what} DoRA magnitude for module {path!r}, unlike {_CONFIG}"
            )
    layers = {
        path: replace(layer, start=start if start in _STARTS else None)
        for path, layer in read.layers.items()
    }
    return replace(read, source=folder, layers=layers)


def _tensors(file: Path) -> dict[str, Array]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return {name: from_torch(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise FileError(file, f"cannot be read: {error}") from error


def _layers(file: Path, tensors: Mapping[str, Array], scaling: Any) -> Adapter:
    factors: dict[str, dict[str, Array]] = {}
    embeddings, parameters = set[str](), {}
    for name, array in tensors.items():
        if array.dtype.kind not in "iu" and not np.isfinite(array.astype(np.float32)).all():
            raise FileError(file, f"has values in {name!r} that are not finite")
        plain = name.removeprefix(_WRAPPER)
        if match := _FACTOR.fullmatch(plain):
            path = match[1] or ""
            factors.setdefault(path, {})[match[3] or match[4]] = array
            embeddings |= {path} if match[2] else set()
        elif not _COPIES.search(plain):
            parameters[plain.replace(".base_layer.", ".")] = array
    layers = {}
    for path, parts in sorted(factors.items(), key=lambda item: tags.path_order(item[0])):
        a, b, magnitude = parts.get("A"), parts.get("B"), parts.get("magnitude")
        if a is None or b is None or not _fit(a, b):
            raise FileError(file, f"has no two factors of one rank for module {path!r}")
        if magnitude is not None and magnitude.size != b.shape[0]:
            raise FileError(
                file,
                f"has {magnitude.size} DoRA magnitudes for module {path!r}, of {b.shape[0]} outputs",
            )
        kind = "embedding" if path in embeddings else "linear" if a.ndim == 2 else "convolution"
        layers[path] = LowRank(a, b, scaling(path, a.shape[0]), kind, magnitude)
    if not layers:
        raise FileError(file, "has no LoRA factors")
    return Adapter(file, layers, parameters)


def _fit(a: Array, b: Array) -> bool:
    """Whether two factors are those of one layer: linear, or a convolution of up to three dimensions."""
    return (
        2 <= a.ndim == b.ndim <= 5
        and a.shape[0] == b.shape[1]
        and all(size == 1 for size in b.shape[2:])
    )


@dataclass(frozen=True)
class _Alphas:
    """The factors of products by module, as PEFT's config has them.

    ``patterns`` are expressions for ends of module paths and their factors; the first one that
    matches holds, and ``common`` for other modules.
    """

    file: Path
    patterns: Sequence[tuple[Pattern, Any]]
    common: Any
    uses_root: bool

    def scaling(self, path: str, rank: int) -> float:
        """``lora_alpha`` over the rank, or over its root with ``use_rslora``; as PEFT computes it for a module."""
        try:
            found = next(
                (alpha for pattern, alpha in self.patterns if pattern.match(path)), self.common
            )
        except ValueError as error:
            raise FileError(
                self.file, f"cannot be used for module {path!r}: alpha_pattern: {error}"
            ) from error
        if not isinstance(found, int | float) or not math.isfinite(found) or rank < 1:
            raise FileError(self.file, f"has no lora_alpha for module {path!r}")
        return float(found) / (math.sqrt(rank) if self.uses_root else rank)


def _alphas(file: Path, config: Mapping[str, Any]) -> _Alphas:
    written, patterns = config.get("alpha_pattern") or {}, list[tuple[Pattern, Any]]()
    if not isinstance(written, dict):
        raise FileError(file, "has an alpha_pattern that is no JSON object of patterns and numbers")
    for key, alpha in written.items():
        try:
            # as peft.utils.other.get_pattern_key has it
            patterns.append((Pattern(rf"(.*\.)?({key})$"), alpha))
        except ValueError as error:
            raise FileError(
                file, f"has an alpha_pattern {key!r} that cannot be read: {error}"
            ) from error
    return _Alphas(file, patterns, config.get("lora_alpha"), bool(config.get("use_rslora")))
