"""Read quantized checkpoints of GPTQ, AWQ and bitsandbytes; detect GGUF files.

Files are not trusted: pickles are not opened, and shapes are compared before tensors are read.
"""

from __future__ import annotations

import functools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from htp_export.errors import FileError
from htp_export.files.checkpoint import read_checkpoint
from htp_export.files.text_files import read_json
from htp_export.format.json_text import parse_json
from htp_export.runtime.arrays import from_torch
from htp_export.weights.packed import (
    Array,
    Coded,
    Layer,
    Packed,
    PackedCheckpoint,
    blocks_of_groups,
    integers_in,
    module_of,
)

Tensors = Callable[[str], Array]
"""Function that reads a tensor of a module by its name within the module."""

Layout = Callable[[Mapping[str, tuple[int, ...]], Tensors, Mapping[str, Any]], Layer | None]
"""Function from shapes, `Tensors` and config of a module to its packed weight; None if it has none."""

_WORD = 32
"""Bits of an integer that contains several numbers."""

_WIDTHS = (2, 4, 8)
"""Bits of a number that divide a word: GPTQ packs numbers of 3 bits across two words."""

_VERSIONS = ("gptq", "gptq_v2")
_STATE = "weight.quant_state.bitsandbytes__"

_LONGEST_STATE = 1 << 12
"""Bytes of a state: bitsandbytes writes a few hundred, as JSON."""

_LARGEST_BLOCK = 1 << 16
"""Numbers with one scale: bitsandbytes has up to 4096."""

_CODES = ("fp4", "nf4")
"""The types of codes, in the order of ``quant_type`` of MatMulBnb4."""

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position in a word of each of eight columns."""


def _gptq(
    shapes: Mapping[str, tuple[int, ...]], read: Tensors, config: Mapping[str, Any]
) -> Layer | None:
    """GPTQ: ``qweight`` int32 (inputs / per word, outputs), ``qzeros`` (groups, outputs / per word), ``g_idx``.

    Zero points are stored less one, modulo their bits, in all formats but ``gptq_v2``
    (https://github.com/ModelCloud/GPTQModel, ``gptqmodel/nn_modules/qlinear``, and AutoGPTQ's
    ``qlinear_cuda_old.py``).
    """
    if "qweight" not in shapes:
        return None
    version = config.get("checkpoint_format") or config.get("format") or _VERSIONS[0]
    if version not in _VERSIONS:
        raise ValueError(
            f"GPTQ of the format {version!r} is not supported; {' and '.join(_VERSIONS)} are"
        )
    (words, outputs), (groups, zeros) = _sizes(shapes, "qweight", "qzeros")
    bits = zeros * _WORD // max(outputs, 1)
    if bits not in _WIDTHS or zeros * _WORD != bits * outputs:
        raise ValueError(f"weights of {bits} bits are not supported; 2, 4 and 8 bits are")
    inputs = words * _WORD // bits
    group = _group(config, inputs, groups)
    _require(shapes, scales=(groups, outputs))
    has_order = "g_idx" in shapes
    if has_order:
        _require(shapes, g_idx=(inputs,))

    def packed() -> Packed:
        in_order = np.arange(inputs) // group
        index = read("g_idx").astype(np.int64) if has_order else in_order
        order = np.argsort(index, kind="stable")
        if (index[order] != in_order).any():
            raise ValueError(f"g_idx does not assign {group} inputs to each group")
        levels = integers_in(_words(read("qweight")).T, bits)
        points = integers_in(_words(read("qzeros")), bits).T
        if version == _VERSIONS[0]:
            points = (points + np.uint8(1)) & np.uint8((1 << bits) - 1)
        if (order == np.arange(inputs)).all():
            return _in_blocks(levels, bits, read("scales").T, points, group)
        return _in_blocks(levels[:, order], bits, read("scales").T, points, group, order)

    return Layer((outputs, inputs), packed)


def _awq(
    shapes: Mapping[str, tuple[int, ...]], read: Tensors, config: Mapping[str, Any]
) -> Layer | None:
    """AWQ: ``qweight`` int32 (inputs, outputs / 8), ``qzeros`` (groups, outputs / 8), ``scales`` (groups, outputs).

    The columns of a word are in the order 0, 2, 4, 6, 1, 3, 5, 7
    (https://github.com/casper-hansen/AutoAWQ, ``awq/utils/packing_utils.py``).
    """
    if "qweight" not in shapes:
        return None
    version = str(config.get("version", config.get("format", "gemm"))).lower()
    bits = config.get("bits", config.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise ValueError(
            f"AWQ of version {version!r} with {bits} bits is not supported; 'gemm' with 4 bits is"
        )
    (inputs, words), (groups, _) = _sizes(shapes, "qweight", "qzeros")
    outputs = words * _WORD // bits
    group = _group(config, inputs, groups)
    _require(shapes, qzeros=(groups, words), scales=(groups, outputs))

    def columns(name: str) -> Array:
        numbers = integers_in(_words(read(name)), bits)
        count = len(numbers)
        by_word = numbers.reshape(count, -1, len(_AWQ_ORDER))
        return by_word[:, :, _AWQ_ORDER].reshape(count, -1).T

    def packed() -> Packed:
        return _in_blocks(columns("qweight"), bits, read("scales").T, columns("qzeros"), group)

    return Layer((outputs, inputs), packed)


def _bitsandbytes(
    shapes: Mapping[str, tuple[int, ...]], read: Tensors, config: Mapping[str, Any]
) -> Layer | None:
    """bitsandbytes: nf4 and fp4, whose scales may be quantized, too, and LLM.int8 with a scale for each row.

    (https://github.com/bitsandbytes-foundation/bitsandbytes, ``bitsandbytes/functional.py``:
    ``QuantState``.)
    """
    if "SCB" in shapes:
        [(outputs, inputs)] = _sizes(shapes, "weight")
        _require(shapes, SCB=(outputs,))
        return Layer((outputs, inputs), lambda: _int8(read("weight"), read("SCB")))
    kinds = [kind for kind in _CODES if f"{_STATE}{kind}" in shapes]
    if not kinds:
        return None
    [kind] = kinds
    if math.prod(shapes[f"{_STATE}{kind}"]) > _LONGEST_STATE:
        raise ValueError(f"{_STATE}{kind!r} is too long")
    state = parse_json(read(f"{_STATE}{kind}").tobytes())
    outputs, inputs, block = _state_sizes(state)
    count = -(-outputs * inputs // block)  # of blocks; the last one may be shorter
    _require(shapes, **{"weight.absmax": (count,), "weight.quant_map": (16,)})
    nested = _nested(state, count) if "weight.nested_absmax" in shapes else None
    if nested is not None:
        outer_count = -(-count // nested.block)
        _require(shapes, **{"weight.nested_absmax": (outer_count,)})
        _require(shapes, **{"weight.nested_quant_map": (256,)})
    # Two codes of four bits in a byte.
    if math.prod(shapes["weight"]) * 2 != outputs * inputs:
        raise ValueError(
            f"'weight' has shape {list(shapes['weight'])}, and {[outputs, inputs]} was packed"
        )

    def coded() -> Coded:
        scales = read("weight.absmax")
        if nested is not None:
            outer = np.repeat(read("weight.nested_absmax"), nested.block)[:count]
            indices = _integers(scales, np.uint8)
            scales = read("weight.nested_quant_map")[indices] * outer + np.float32(nested.offset)
        codes = _integers(read("weight"), np.uint8).reshape(-1)
        table = read("weight.quant_map")
        return Coded(
            codes, scales.astype(np.float32), table, block, (outputs, inputs), _CODES.index(kind)
        )

    return Layer((outputs, inputs), coded)


class _Nested(NamedTuple):
    """Quantization of scales in bitsandbytes: the scales of ``block`` blocks share one scale."""

    block: int
    offset: float


def _state_sizes(state: Any) -> tuple[int, int, int]:
    """The outputs and inputs of a matrix, and the size of a block, in the state of a quantized weight."""
    match state:
        case {"shape": [int(outputs), int(inputs)], "blocksize": int(block)}:
            # The limit bounds the memory: each scale is repeated for a block.
            if outputs > 0 and inputs > 0 and 0 < block <= _LARGEST_BLOCK:
                return outputs, inputs, block
    raise ValueError("the state of 'weight' has no shape of a matrix and no blocksize")


def _nested(state: Mapping[str, Any], count: int) -> _Nested:
    """The quantization of ``count`` scales, in the state of a quantized weight."""
    match state:
        case {"nested_blocksize": int(block), "nested_offset": int(offset) | float(offset)}:
            if block > 0:
                return _Nested(min(block, count), float(offset))
    raise ValueError("the state of 'weight' has no nested_blocksize and no nested_offset")


def _int8(weight: Array, bounds: Array) -> Packed:
    """Signed integers with one scale for each row: ``bounds`` / 127."""
    block, groups = blocks_of_groups(weight.shape[1], weight.shape[1])
    scales = np.repeat(bounds.astype(np.float32)[:, None] / np.float32(127), len(groups), axis=1)
    return Packed(weight.view(np.uint8) ^ np.uint8(128), 8, scales, None, block)


LAYOUTS: Mapping[str, Layout] = {"gptq": _gptq, "awq": _awq, "bitsandbytes": _bitsandbytes}
"""``quant_method`` of a config → its layout."""


def _in_blocks(
    levels: Array, bits: int, scales: Array, points: Array, group: int, order: Array | None = None
) -> Packed:
    """Convert levels with a scale and a zero point for each group to the blocks of ONNX Runtime."""
    block, groups = blocks_of_groups(group, levels.shape[1])
    block_scales = np.ascontiguousarray(scales.astype(np.float32)[:, groups])
    block_points = np.ascontiguousarray(points[:, groups])
    # Levels of fewer bits are written with four.
    return Packed(levels, max(bits, 4), block_scales, block_points, block, order)


def _group(config: Mapping[str, Any], inputs: int, groups: int) -> int:
    """The number of inputs in a group: from the config or, if it does not fit, from the number of groups."""
    size = config.get("group_size", config.get("q_group_size", 0))
    if not isinstance(size, int) or size <= 0 or -(-inputs // size) != groups:
        size = inputs // max(groups, 1)
    if size < 1 or -(-inputs // size) != groups:
        raise ValueError(f"{groups} groups do not divide {inputs} inputs")
    return size


def _require(shapes: Mapping[str, tuple[int, ...]], **needed: tuple[int, ...]) -> None:
    """Raise a `ValueError` if a tensor is missing or has another shape."""
    for name, shape in needed.items():
        if shapes.get(name) != shape:
            problem = "is missing" if name not in shapes else f"has shape {list(shapes[name])}"
            raise ValueError(f"{name!r} {problem}, and {list(shape)} is needed")


def _words(array: Array) -> Array:
    """An array of 32-bit words; a `ValueError` for another type."""
    return _integers(array, np.int32)


def _integers(array: Array, kind: type[np.integer[Any]]) -> Array:
    """An array of packed integers; a `ValueError` if it is not of a type."""
    if array.dtype != kind:
        raise ValueError(f"integers are packed into {array.dtype}, not into {np.dtype(kind)}")
    return array


def _sizes(shapes: Mapping[str, tuple[int, ...]], *names: str) -> list[tuple[int, ...]]:
    """The shapes of matrices; a `ValueError` if one is missing or has another rank."""
    for name in names:
        if len(shapes.get(name, ())) != 2:
            raise ValueError(f"{name!r} is missing or is no matrix")
    return [shapes[name] for name in names]


_CONFIG, _GPTQ_CONFIG = "config.json", "quantize_config.json"


def is_packed(source: str | os.PathLike[str]) -> bool:
    """Whether a source is a GGUF file, or a folder whose config names a supported quantization."""
    if is_gguf(source):
        return True
    path = Path(source)
    return path.is_dir() and str(_quantization(path).get("quant_method")) in LAYOUTS


def is_gguf(source: str | os.PathLike[str]) -> bool:
    """Whether a source is a file with the suffix ``.gguf``."""
    return Path(source).suffix.lower() == ".gguf" and Path(source).is_file()


def read_packed(source: str | os.PathLike[str]) -> PackedCheckpoint:
    """Read a quantized checkpoint: a GGUF file, or a folder with safetensors files and a quantization config.

    Only headers are read; weights are read when they are used.

    Raises:
        FileError: If there is no such checkpoint, or its tensors do not have the shapes that the
            method needs.
    """
    path = Path(source)
    if is_gguf(path):
        from htp_export.capabilities.huggingface.packed.gguf_files import read_gguf

        return read_gguf(path)
    config = _quantization(path)
    method = str(config.get("quant_method", "gptq" if config else ""))
    if method not in LAYOUTS:
        problem = f"has quant_method {method!r}" if config else "names no quantization"
        raise FileError(path / _CONFIG, f"{problem}; supported are {', '.join(LAYOUTS)}")
    checkpoint = read_checkpoint(path)
    by_module: defaultdict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, shape in checkpoint.shapes.items():
        module = module_of(name)
        by_module[module][name.removeprefix(f"{module}.")] = shape
    layers: dict[str, Layer] = {}
    others: dict[str, Callable[[], Array]] = {}
    large: dict[str, tuple[int, ...]] = {}
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
        # Of a packed module, tensors other than the bias are parts of the weight.
        names = shapes.keys() if layer is None else shapes.keys() & {"bias"}
        for name in names:
            others[f"{prefix}{name}"] = functools.partial(read, name)
            # Tables and heads are not read before they are needed; counters and masks are smaller.
            if name == "weight":
                large[f"{prefix}{name}"] = shapes[name]
    if not layers:
        raise FileError(path, f"has no weights of {method}")
    return PackedCheckpoint(path, method, layers, others, large)


def _quantization(folder: Path) -> Mapping[str, Any]:
    """The quantization config of a folder; empty if it has none."""
    for name in (_CONFIG, _GPTQ_CONFIG):
        if not (folder / name).is_file():
            continue
        config = read_json(folder / name, plain=True)
        if name == _CONFIG and isinstance(config, dict):
            config = config.get("quantization_config")
        if isinstance(config, dict) and config:
            return config
    return {}


def _tensor(files: Mapping[str, Path], prefix: str, name: str) -> Array:
    """Read one tensor of a module."""
    from safetensors import SafetensorError, safe_open

    file = files[f"{prefix}{name}"]
    try:
        with safe_open(file, framework="pt") as opened:
            return from_torch(opened.get_tensor(f"{prefix}{name}"))
    except (OSError, SafetensorError) as error:
        raise FileError(file, f"cannot be read: {error}") from error
