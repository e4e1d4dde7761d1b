"""Files of LoRA adapters: folders of PEFT, and ONNX Runtime's adapter format.

Tensors are named as in a PEFT checkpoint, ``<module path>.lora_A.weight``, without the prefix of
PEFT's wrapper.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from htp_export.errors import FileError, InputError
from htp_export.extras import required
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
"""Copies that PEFT keeps of a module in ``modules_to_save``: with ``bias="all"``, their biases are saved, too."""

_ONLY_FUSED = "which no run can switch; lora.fuse takes it"

_STARTS = ("pissa", "olora")
"""Values of ``init_lora_weights`` with which PEFT subtracts initial factors, computed from the weights alone."""

_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the weights unchanged."""

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
"""Settings of PEFT's config with which an adapter is more than the product of its factors."""


@dataclass(frozen=True, eq=False)
class LowRank:
    """Low-rank change of the weight of one layer: ``scaling * b @ a``, in the layout of ``kind``.

    Attributes:
        a: (rank, inputs); for a convolution (rank, inputs, size of its kernel, ...).
        b: (outputs, rank); for a convolution (outputs, rank, 1, ...).
        scaling: None if the model's own scaling applies, as for files of ONNX Runtime.
        kind: ``"linear"``, ``"embedding"`` or ``"convolution"``.
        magnitude: The norms of the new weight, of DoRA.
        start: ``init_lora_weights`` of PEFT, if initial factors were subtracted from the weight.
    """

    a: Array
    b: Array
    scaling: float | None = None
    kind: str = "linear"
    magnitude: Array | None = None
    start: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the layer is linear, and changed by the product of the factors alone."""
        return self.kind == "linear" and self.magnitude is None and self.start is None


@dataclass(frozen=True)
class Adapter:
    """The contents of an adapter folder or file.

    Attributes:
        source: The folder or file.
        layers: Module path → factors.
        parameters: Name → values of parameters that were trained as a whole: biases, and
            ``modules_to_save``.
    """

    source: Path
    layers: Mapping[str, LowRank]
    parameters: Mapping[str, Array] = field(default_factory=dict)


def read_adapter(adapter: str | os.PathLike[str]) -> Adapter:
    """Read a folder of PEFT, with ``adapter_config.json``, or a file of ONNX Runtime's adapter format.

    Raises:
        FileError: The adapter is a pickle, contains values that are not finite, or is a variant of
            LoRA that is not supported.
    """
    path = Path(adapter)
    if path.is_dir():
        return _of_peft(path)
    if not path.is_file():
        raise FileError(path, "there is no such adapter")
    if path.suffix in (".bin", ".pt", ".safetensors", ".json"):
        raise FileError(path, f"give the folder with {_CONFIG} and {_WEIGHTS}")
    onnxruntime = required("onnxruntime")

    try:
        adapter_file = onnxruntime.AdapterFormat.read_adapter(os.fspath(path))
        parameters = adapter_file.get_parameters()  # views into the memory of `adapter_file`
    except Exception as error:  # onnxruntime's own classes
        raise FileError(
            path, f"is no adapter file of ONNX Runtime: {str(error).splitlines()[0]}"
        ) from error
    tensors = {name: from_ort(value) for name, value in parameters.items()}
    read = _layers(path, tensors, lambda *_: None)
    require_switchable(read)
    return read


def require_switchable(adapter: Adapter) -> None:
    """Refuse (`FileError`) an adapter that is more than products of two factors for linear layers."""
    for path, layer in adapter.layers.items():
        if layer.is_plain:
            continue
        if layer.kind != "linear":
            part = f"factors of the {layer.kind}"
        elif layer.magnitude is not None:
            part = "a DoRA magnitude for"
        else:
            part = f"init_lora_weights={layer.start!r} for"
        raise FileError(adapter.source, f"has {part} {path!r}, {_ONLY_FUSED}")
    for name in adapter.parameters:
        raise FileError(
            adapter.source,
            f"has {name!r}, which is no LoRA factor of a linear layer, {_ONLY_FUSED}",
        )


def arrays_of(layers: Mapping[str, LowRank]) -> dict[str, Array]:
    """Name of a factor, as in a PEFT checkpoint → its values."""
    arrays = {factor_name(path, "A"): layer.a for path, layer in layers.items()}
    return arrays | {factor_name(path, "B"): layer.b for path, layer in layers.items()}


def write_adapter(layers: Mapping[str, LowRank], file: Path) -> None:
    """Write factors into a file of ONNX Runtime's adapter format, whole or not at all (`FileError`)."""
    onnxruntime = required("onnxruntime")

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
    """Map the entries of an adapter to module paths of a model.

    A path of the adapter matches an equal path of the model. Otherwise one of the two has to end
    with the other: the adapter was trained on a submodel, or on a model around this one.

    Args:
        source: The adapter, for errors.
        entries: Path in the adapter → entry.
        paths: Paths of the model that may have an entry.
        what: Describes ``paths`` in errors: "linear layers of the model".
        entry: Describes one path in errors.

    Raises:
        InputError: A path matches none of ``paths``, or several.
    """
    by_path: dict[str, _Entry] = {}
    for path, contents in entries.items():
        if path in paths:
            matches = [path]
        else:
            matches = [candidate for candidate in paths if _same_end(candidate, path)]
        if len(matches) == 1:
            by_path[matches[0]] = contents
            continue
        if matches:
            problem = f"may be {' or '.join(map(repr, matches[:3]))}"
        else:
            first_paths = ", ".join(map(repr, list(paths)[:3]))
            problem = f"is none of the {what}: {first_paths}"
            problem += ", ..." if len(paths) > 3 else ""
        raise InputError(f"{source}: {entry} {path!r} of the adapter {problem}")
    return by_path


def _same_end(one: str, other: str) -> bool:
    """Whether one of two paths ends with the other."""
    return bool(one and other) and (one.endswith(f".{other}") or other.endswith(f".{one}"))


def _of_peft(folder: Path) -> Adapter:
    """Read a folder of PEFT."""
    config = _peft_config(folder / _CONFIG)
    weights = folder / _WEIGHTS
    if not weights.is_file():
        pickles = [name for name in _PICKLES if (folder / name).exists()]
        raise FileError(
            folder / (pickles or [_WEIGHTS])[0], f"is needed as {_WEIGHTS}; pickles are not read"
        )
    alphas = _alphas(folder / _CONFIG, config)
    read = _layers(weights, _tensors(weights), alphas.scaling)
    for path, layer in read.layers.items():
        if bool(config.get("use_dora")) != (layer.magnitude is not None):
            how_many = "no" if layer.magnitude is None else "a"
            raise FileError(
                weights, f"has {how_many} DoRA magnitude for module {path!r}, unlike {_CONFIG}"
            )
    start = config.get("init_lora_weights", True)
    if start not in _STARTS:
        return replace(read, source=folder)
    layers = {path: replace(layer, start=start) for path, layer in read.layers.items()}
    return replace(read, source=folder, layers=layers)


def _peft_config(file: Path) -> dict[str, Any]:
    """Read ``adapter_config.json``, and refuse variants of LoRA that are not supported."""
    config = read_json(file, plain=True)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise FileError(file, "is no LoRA adapter of PEFT: peft_type is not 'LORA'")
    for setting in _OTHER_VARIANTS:
        if config.get(setting):
            raise FileError(
                file, f"has {setting}={config[setting]!r}, a variant of LoRA that is not read"
            )
    start = config.get("init_lora_weights", True)
    if start not in (*_STARTS, *_PLAIN_STARTS):
        raise FileError(
            file,
            f"has init_lora_weights={start!r}, which changed the weights of the model; convert the adapter with "
            "save_pretrained(path_initial_model_for_weight_conversion=...) of PEFT",
        )
    return config


def _tensors(file: Path) -> dict[str, Array]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return {name: from_torch(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise FileError(file, f"cannot be read: {error}") from error


def _layers(
    file: Path, tensors: Mapping[str, Array], scaling: Callable[[str, int], float | None]
) -> Adapter:
    """Group the tensors of an adapter by module; ``scaling`` maps a module path and a rank to the scaling."""
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
    if not factors:
        raise FileError(file, "has no LoRA factors")
    layers = {}
    for path in sorted(factors, key=tags.path_order):
        a, b, magnitude = _checked_factors(file, path, factors[path])
        if path in embeddings:
            kind = "embedding"
        else:
            kind = "linear" if a.ndim == 2 else "convolution"
        layers[path] = LowRank(a, b, scaling(path, a.shape[0]), kind, magnitude)
    return Adapter(file, layers, parameters)


def _checked_factors(
    file: Path, path: str, parts: Mapping[str, Array]
) -> tuple[Array, Array, Array | None]:
    """Factors A and B of a module and its DoRA magnitude; `FileError` if their shapes do not fit."""
    a, b, magnitude = parts.get("A"), parts.get("B"), parts.get("magnitude")
    if a is None or b is None or not _fit(a, b):
        raise FileError(file, f"has no two factors of one rank for module {path!r}")
    if magnitude is not None and magnitude.size != b.shape[0]:
        raise FileError(
            file,
            f"has {magnitude.size} DoRA magnitudes for module {path!r}, of {b.shape[0]} outputs",
        )
    return a, b, magnitude


def _fit(a: Array, b: Array) -> bool:
    """Whether two factors belong to one layer: linear, or a convolution of up to three dimensions."""
    return (
        2 <= a.ndim == b.ndim <= 5
        and a.shape[0] == b.shape[1]
        and all(size == 1 for size in b.shape[2:])
    )


@dataclass(frozen=True)
class _Alphas:
    """``lora_alpha`` by module, from PEFT's config.

    ``patterns`` are regular expressions for ends of module paths, each with its alpha. The first
    one that matches applies, and ``common`` to other modules.
    """

    file: Path
    patterns: Sequence[tuple[Pattern, Any]]
    common: Any
    uses_root: bool

    def scaling(self, path: str, rank: int) -> float:
        """``lora_alpha`` over the rank, or over its square root with ``use_rslora``, as in PEFT."""
        try:
            matching = (alpha for pattern, alpha in self.patterns if pattern.match(path))
            alpha = next(matching, self.common)
        except ValueError as error:
            raise FileError(
                self.file, f"cannot be used for module {path!r}: alpha_pattern: {error}"
            ) from error
        if not isinstance(alpha, int | float) or not math.isfinite(alpha) or rank < 1:
            raise FileError(self.file, f"has no lora_alpha for module {path!r}")
        return float(alpha) / (math.sqrt(rank) if self.uses_root else rank)


def _alphas(file: Path, config: Mapping[str, Any]) -> _Alphas:
    """Read ``lora_alpha``, ``alpha_pattern`` and ``use_rslora`` of a config."""
    alpha_pattern, patterns = config.get("alpha_pattern") or {}, list[tuple[Pattern, Any]]()
    if not isinstance(alpha_pattern, dict):
        raise FileError(file, "has an alpha_pattern that is no JSON object of patterns and numbers")
    for key, alpha in alpha_pattern.items():
        try:
            # The expression of peft.utils.other.get_pattern_key.
            patterns.append((Pattern(rf"(.*\.)?({key})$"), alpha))
        except ValueError as error:
            raise FileError(
                file, f"has an alpha_pattern {key!r} that cannot be read: {error}"
            ) from error
    return _Alphas(file, patterns, config.get("lora_alpha"), bool(config.get("use_rslora")))
