"""GGUF files: blocks of ggml, under the names and in the order of rows that transformers gives them.

The layouts of blocks are those of ``gguf.quants``
(https://github.com/ggml-org/llama.cpp/tree/master/gguf-py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from htp_export.capabilities.huggingface.packed.gguf_header import check_gguf_header
from htp_export.capabilities.huggingface.packed.weights import (
    Array,
    Layer,
    Packed,
    PackedCheckpoint,
    integers_in,
)
from htp_export.errors import FileError, InputError, described

_Parts = tuple[Array, Array, "Array | None"]
"""The levels of each block, and its scale and zero point in the last axis."""


def gguf_config(file: Path) -> Any:
    """The config of transformers that a file describes; its class is that of a causal language model.

    Raises:
        FileError: If it is no GGUF file.
    """
    check_gguf_header(file)
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        config.architectures = [model_class.__name__]
    return config


def read_gguf(file: Path) -> PackedCheckpoint:
    """Read the header of a GGUF file; its tensors are mapped.

    Blocks of the types `_TYPES` stay packed where they are rows of a matrix; other tensors are
    dequantized by ``gguf``.

    Raises:
        FileError: If it is no GGUF file, or transformers has no names for its architecture.
        InputError: If the package ``gguf`` is not installed.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise InputError(
            f'{file}: GGUF files need gguf; install it with: pip install "htp-export[gguf]"'
        ) from error
    check_gguf_header(file)
    try:
        reader = GGUFReader(file)
        names, process = _names(file, reader)
    except FileError:
        raise
    except Exception as error:
        # of gguf and transformers, which raise what the numbers of a file lead to
        raise FileError(file, f"cannot be read as GGUF: {described(error)}") from error
    layers: dict[str, Layer] = {}
    others: dict[str, Callable[[], Array]] = {}
    for tensor in reader.tensors:
        name, shape = names.get(tensor.name), tuple(int(size) for size in tensor.shape[::-1])
        if name is None:
            continue
        others[name] = functools.partial(_dequantized, tensor, process)
        parts = _TYPES.get(tensor.tensor_type.name)
        rows = (
            _rows(process, tensor.name, shape[0]) if parts is not None and len(shape) == 2 else None
        )
        if parts is not None and rows is not None:
            layers[name] = Layer(
                (shape[0], shape[1]), functools.partial(_packed, tensor.data, parts, rows)
            )
    if not layers:
        raise FileError(file, f"has no matrices of the types {', '.join(_TYPES)}")
    return PackedCheckpoint(file, "gguf", layers, others)


def _dequantized(tensor: Any, process: Callable[[Array, str], Array]) -> Array:
    from gguf import dequantize

    return process(dequantize(tensor.data, tensor.tensor_type), tensor.name)


def _names(file: Path, reader: Any) -> tuple[Mapping[str, str], Callable[[Array, str], Array]]:
    """Name in the file → name in transformers' model, and what transformers does to the numbers of a tensor."""
    import torch
    import transformers
    from transformers import modeling_gguf_pytorch_utils as gguf_loading

    loading: Any = gguf_loading
    models: Any = transformers.AutoModelForCausalLM
    architecture = reader.get_field("general.architecture").contents()
    if architecture not in loading.GGUF_SUPPORTED_ARCHITECTURES:
        raise FileError(
            file, f"is of the architecture {architecture!r}, whose names transformers does not tell"
        )
    config = gguf_config(file)
    with torch.device("meta"):
        model = models.from_config(config)
    processor = loading.TENSOR_PROCESSORS.get(architecture, loading.TensorProcessor)(
        config=config.to_dict()
    )
    names = loading.get_gguf_hf_weights_map(model, processor)

    def process(array: Array, name: str) -> Array:
        made = processor.process(
            weights=array, name=name, tensor_key_mapping=names, parsed_parameters={"tensors": {}}
        )
        return np.ascontiguousarray(made.weights)

    return names, process


def _rows(process: Callable[[Array, str], Array], name: str, count: int) -> Array | None:
    """The row of the file for each row of the parameter; None where more than the order of rows is changed."""
    numbers = np.arange(count, dtype=np.float64)[:, None]
    try:
        rows = process(numbers.copy(), name)
    except Exception:  # of a reshape that needs all columns
        return None
    is_order = rows.shape == numbers.shape and np.array_equal(np.sort(rows, axis=0), numbers)
    return rows[:, 0].astype(np.int64) if is_order else None


def _packed(data: Array, parts: Callable[[Array], _Parts], rows: Array) -> Packed:
    blocks = np.ascontiguousarray(data)[rows]
    levels, scales, points = parts(blocks)
    count = len(rows)
    flat = scales.astype(np.float32).reshape(count, -1)
    return Packed(
        levels.reshape(count, -1),
        8 if parts in (_q8_0, _q6_k) else 4,
        flat,
        None if points is None else points.reshape(count, -1),
        levels.reshape(count, -1).shape[1] // flat.shape[1],
    )


def _half(array: Array) -> Array:
    return np.ascontiguousarray(array).view(np.float16).astype(np.float32)


def _nibbles(array: Array) -> Array:
    """All low halves of the bytes of the last axis, then all high ones."""
    return np.concatenate([array & np.uint8(15), array >> np.uint8(4)], -1)


def _with_minimum(levels: Array, scales: Array, minimum: Array) -> _Parts:
    """``scale * level - minimum`` as ``(level - point) * scale``; without a scale, all elements are the minimum."""
    flat = scales == 0
    points = np.divide(minimum, scales, out=np.ones_like(minimum), where=~flat)
    return np.where(flat[..., None], np.uint8(0), levels), np.where(flat, minimum, scales), points


def _q4_0(data: Array) -> _Parts:
    blocks = data.reshape(len(data), -1, 18)
    return _nibbles(blocks[..., 2:]), _half(blocks[..., :2]), None


def _q4_1(data: Array) -> _Parts:
    blocks = data.reshape(len(data), -1, 20)
    return _with_minimum(
        _nibbles(blocks[..., 4:]), _half(blocks[..., :2])[..., 0], -_half(blocks[..., 2:4])[..., 0]
    )


def _q8_0(data: Array) -> _Parts:
    blocks = data.reshape(len(data), -1, 34)
    return blocks[..., 2:] ^ np.uint8(128), _half(blocks[..., :2]), None


def _q4_k(data: Array) -> _Parts:
    from gguf.quants import Q4_K

    blocks = data.reshape(len(data), -1, 144)
    scales, minima = Q4_K.get_scale_min(np.ascontiguousarray(blocks[..., 4:16]).reshape(-1, 12))
    shape = (*blocks.shape[:2], 8)
    levels = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)).reshape(*shape, 32)
    factor, least = _half(blocks[..., :2]), _half(blocks[..., 2:4])
    return _with_minimum(levels, factor * scales.reshape(shape), least * minima.reshape(shape))


def _q6_k(data: Array) -> _Parts:
    blocks = data.reshape(len(data), -1, 210)
    low = _nibbles(blocks[..., :128].reshape(*blocks.shape[:2], 2, 64)).reshape(
        *blocks.shape[:2], 256
    )
    held = integers_in(blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 32, 1), 2)
    high = held.swapaxes(-1, -2).reshape(*blocks.shape[:2], 256)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    return (low | high << np.uint8(4)) + np.uint8(128 - 32), _half(blocks[..., 208:]) * scales, None


_TYPES: Mapping[str, Callable[[Array], _Parts]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q6_K": _q6_k,
}  # fmt: skip
"""Types of ggml that are affine in blocks. Q6_K has 8 bits afterwards."""
