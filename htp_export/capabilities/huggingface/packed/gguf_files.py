"""GGUF files: blocks of ggml, with transformers' names and order of rows.

The layouts of blocks are from ``gguf.quants``
(https://github.com/ggml-org/llama.cpp/tree/master/gguf-py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from htp_export.capabilities.huggingface.packed.gguf_header import check_gguf_header
from htp_export.errors import FileError, described
from htp_export.extras import required
from htp_export.weights.packed import (
    Array,
    Layer,
    Packed,
    PackedCheckpoint,
    integers_in,
)

_Parts = tuple[Array, Array, "Array | None"]
"""The levels of blocks, their scales, and their zero points, None for the middle of the levels."""


def gguf_config(file: Path) -> Any:
    """The config of transformers for a file, with the class of a causal language model.

    Raises:
        FileError: If the file is not valid GGUF.
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

    Matrices with blocks of the types `_TYPES` stay packed; ``gguf`` dequantizes other tensors.

    Raises:
        FileError: If the file is not valid GGUF, or transformers does not support its architecture.
        InputError: If the package ``gguf`` is not installed.
    """
    gguf = required("gguf", f"{file}: a GGUF file")
    check_gguf_header(file)
    try:
        reader = gguf.GGUFReader(file)
        names, process = _names(file, reader)
    except FileError:
        raise
    except Exception as error:
        # gguf and transformers raise errors of any type for invalid numbers.
        raise FileError(file, f"cannot be read as GGUF: {described(error)}") from error
    layers: dict[str, Layer] = {}
    others: dict[str, Callable[[], Array]] = {}
    for tensor in reader.tensors:
        name = names.get(tensor.name)
        if name is None:
            continue
        others[name] = functools.partial(_dequantized, tensor, process)
        parts = _TYPES.get(tensor.tensor_type.name)
        # ggml lists the sizes of a tensor from the last one to the first.
        shape = [int(size) for size in tensor.shape[::-1]]
        if parts is None or len(shape) != 2:
            continue
        rows = _rows(process, tensor.name, shape[0])
        if rows is not None:
            read = functools.partial(_packed, tensor.data, parts, rows)
            layers[name] = Layer((shape[0], shape[1]), read)
    if not layers:
        raise FileError(file, f"has no matrices of the types {', '.join(_TYPES)}")
    return PackedCheckpoint(file, "gguf", layers, others)


def _dequantized(tensor: Any, process: Callable[[Array, str], Array]) -> Array:
    """The values of a tensor, in transformers' order."""
    from gguf import dequantize

    return process(dequantize(tensor.data, tensor.tensor_type), tensor.name)


def _names(file: Path, reader: Any) -> tuple[Mapping[str, str], Callable[[Array, str], Array]]:
    """Name in the file → name in transformers' model; and a function that reorders a tensor as transformers does."""
    import torch

    transformers = required("transformers")
    from transformers import modeling_gguf_pytorch_utils as gguf_loading

    loading: Any = gguf_loading
    models: Any = transformers.AutoModelForCausalLM
    architecture = reader.get_field("general.architecture").contents()
    if architecture not in loading.GGUF_SUPPORTED_ARCHITECTURES:
        raise FileError(
            file, f"is of the architecture {architecture!r}, which transformers does not support"
        )
    config = gguf_config(file)
    with torch.device("meta"):
        model = models.from_config(config)
    processor = loading.TENSOR_PROCESSORS.get(architecture, loading.TensorProcessor)(
        config=config.to_dict()
    )
    names = loading.get_gguf_hf_weights_map(model, processor)

    def process(array: Array, name: str) -> Array:
        processed = processor.process(
            weights=array, name=name, tensor_key_mapping=names, parsed_parameters={"tensors": {}}
        )
        return np.ascontiguousarray(processed.weights)

    return names, process


def _rows(process: Callable[[Array, str], Array], name: str, count: int) -> Array | None:
    """The row of the file for each row of the parameter; None if transformers changes more than the order of rows.

    It is found with a matrix of one column, whose values are the numbers of the rows.
    """
    numbers = np.arange(count, dtype=np.float64)[:, None]
    try:
        rows = process(numbers.copy(), name)
    except Exception:  # from a reshape that needs all columns
        return None
    if rows.shape != numbers.shape or not np.array_equal(np.sort(rows, axis=0), numbers):
        return None
    return rows[:, 0].astype(np.int64)


def _packed(data: Array, parts: Callable[[Array], _Parts], rows: Array) -> Packed:
    """The packed weight of a tensor, with its rows in transformers' order."""
    blocks = np.ascontiguousarray(data)[rows]
    levels, scales, points = parts(blocks)
    count = len(rows)
    levels = levels.reshape(count, -1)
    scales = scales.astype(np.float32).reshape(count, -1)
    if points is not None:
        points = points.reshape(count, -1)
    bits = 8 if parts in (_q8_0, _q6_k) else 4
    return Packed(levels, bits, scales, points, block=levels.shape[1] // scales.shape[1])


def _half(array: Array) -> Array:
    """Bytes as numbers of half precision."""
    return np.ascontiguousarray(array).view(np.float16).astype(np.float32)


def _nibbles(array: Array) -> Array:
    """All low halves of the bytes of the last axis, then all high ones."""
    return np.concatenate([array & np.uint8(15), array >> np.uint8(4)], -1)


def _with_minimum(levels: Array, scales: Array, minimum: Array) -> _Parts:
    """Convert ``scale * level - minimum`` to ``(level - point) * scale``.

    A block with the scale 0 contains the minimum alone: it gets this as scale, levels 0 and point 1.
    """
    is_constant = scales == 0
    points = np.divide(minimum, scales, out=np.ones_like(minimum), where=~is_constant)
    levels = np.where(is_constant[..., None], np.uint8(0), levels)
    return levels, np.where(is_constant, minimum, scales), points


def _q4_0(data: Array) -> _Parts:
    """A block of 32: scale, 16 bytes."""
    blocks = data.reshape(len(data), -1, 18)
    return _nibbles(blocks[..., 2:]), _half(blocks[..., :2]), None


def _q4_1(data: Array) -> _Parts:
    """A block of 32: scale, minimum, 16 bytes."""
    blocks = data.reshape(len(data), -1, 20)
    scales, minima = _half(blocks[..., :2])[..., 0], _half(blocks[..., 2:4])[..., 0]
    return _with_minimum(_nibbles(blocks[..., 4:]), scales, -minima)


def _q8_0(data: Array) -> _Parts:
    """A block of 32: scale, 32 signed bytes."""
    blocks = data.reshape(len(data), -1, 34)
    return blocks[..., 2:] ^ np.uint8(128), _half(blocks[..., :2]), None


def _q4_k(data: Array) -> _Parts:
    """A block of 256: scale and minimum, 8 factors of 6 bits for each of these, 128 bytes."""
    from gguf.quants import Q4_K

    blocks = data.reshape(len(data), -1, 144)
    scales, minima = Q4_K.get_scale_min(np.ascontiguousarray(blocks[..., 4:16]).reshape(-1, 12))
    shape = (*blocks.shape[:2], 8)
    levels = _nibbles(blocks[..., 16:].reshape(*blocks.shape[:2], 4, 32)).reshape(*shape, 32)
    factor, least = _half(blocks[..., :2]), _half(blocks[..., 2:4])
    return _with_minimum(levels, factor * scales.reshape(shape), least * minima.reshape(shape))


def _q6_k(data: Array) -> _Parts:
    """A block of 256: 128 bytes of low bits, 64 of high bits, 16 signed factors, scale."""
    blocks = data.reshape(len(data), -1, 210)
    leading = blocks.shape[:2]
    low = _nibbles(blocks[..., :128].reshape(*leading, 2, 64)).reshape(*leading, 256)
    pairs = integers_in(blocks[..., 128:192].reshape(*leading, 2, 32, 1), 2)
    high = pairs.swapaxes(-1, -2).reshape(*leading, 256)
    factors = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    # The middle of ggml's levels is 32, that of eight bits 128.
    levels = (low | high << np.uint8(4)) + np.uint8(128 - 32)
    return levels, _half(blocks[..., 208:]) * factors, None


_TYPES: Mapping[str, Callable[[Array], _Parts]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q6_K": _q6_k,
}  # fmt: skip
"""Types of ggml with a scale and a zero point for each block. Q6_K is converted to 8 bits."""
