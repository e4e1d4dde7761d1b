"""Quantized checkpoints, packed integer by integer as each tool's documentation of its format says."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def words(rows: list[list[int]], bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Integers of each row in words of 32 bits, the first one lowest; ``order``: which column comes next in a word."""
    count = 32 // bits
    order = order or tuple(range(count))
    made = [
        [
            sum(row[start + order[k]] << (bits * k) for k in range(count))
            for start in range(0, len(row), count)
        ]
        for row in rows
    ]
    return torch.from_numpy(np.array(made, np.uint32).view(np.int32))


def gptq(
    generator: np.random.Generator,
    outputs: int,
    inputs: int,
    group: int,
    *,
    bits: int = 4,
    act_order: bool = False,
    v2: bool = False,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a module in GPTQ's format, and its weight: (level - zero) * scale of the group in ``g_idx``."""
    most, groups = 1 << bits, -(-inputs // group)
    levels = generator.integers(0, most, (outputs, inputs))
    zeros = generator.integers(0, most, (groups, outputs))
    scales = generator.uniform(0.01, 0.1, (groups, outputs)).astype(np.float16)
    index = np.arange(inputs) // group
    if act_order:
        index = generator.permutation(index)
    stored = zeros if v2 else (zeros - 1) % most
    tensors = {
        "qweight": words(levels.tolist(), bits).T.contiguous(),
        "qzeros": words(stored.tolist(), bits),
        "scales": torch.from_numpy(scales),
        "g_idx": torch.from_numpy(index.astype(np.int32)),
    }
    weight = (levels - zeros[index].T).astype(np.float32) * scales[index].T.astype(np.float32)
    return tensors, torch.from_numpy(weight)


def awq(
    generator: np.random.Generator, outputs: int, inputs: int, group: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a module in AWQ's format (gemm), and its weight."""
    levels = generator.integers(0, 16, (inputs, outputs))
    zeros = generator.integers(0, 16, (inputs // group, outputs))
    scales = generator.uniform(0.01, 0.1, zeros.shape).astype(np.float16)
    tensors = {
        "qweight": words(levels.tolist(), 4, AWQ_ORDER),
        "qzeros": words(zeros.tolist(), 4, AWQ_ORDER),
        "scales": torch.from_numpy(scales),
    }
    index = np.arange(inputs) // group
    return tensors, torch.from_numpy(
        ((levels - zeros[index]).astype(np.float32) * scales[index].astype(np.float32)).T
    )


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The numbers of nf4 (https://arxiv.org/abs/2305.14314, appendix E)."""


def nf4(
    generator: np.random.Generator, outputs: int, inputs: int, group: int, *, nested: bool = False
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a module in bitsandbytes' format, and its weight."""
    codes = generator.integers(0, 16, outputs * inputs)
    count = codes.size // group
    scales = generator.uniform(0.1, 1, count).astype(np.float32)
    state: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": group,
        "dtype": "float16",
        "shape": [outputs, inputs],
    }
    tensors = {
        "weight": torch.from_numpy((codes[::2] << 4 | codes[1::2]).astype(np.uint8))[:, None],
        "weight.absmax": torch.from_numpy(scales),
        "weight.quant_map": torch.tensor(NF4),
    }
    if nested:
        short, table = (
            generator.integers(0, 256, count).astype(np.uint8),
            np.linspace(-1, 1, 256, dtype=np.float32),
        )
        outer = generator.uniform(0.1, 0.2, -(-count // 256)).astype(np.float32)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}
        scales = table[short] * outer[np.arange(count) // 256] + np.float32(0.5)
        tensors |= {
            "weight.absmax": torch.from_numpy(short),
            "weight.nested_absmax": torch.from_numpy(outer),
        }
        tensors["weight.nested_quant_map"] = torch.from_numpy(table)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8).copy()
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.from_numpy(text)
    weight = np.float32(NF4)[codes] * np.repeat(scales, group)
    return tensors, torch.from_numpy(weight.reshape(outputs, inputs))


def int8(
    generator: np.random.Generator, outputs: int, inputs: int, group: int = 0
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of a module in the format of LLM.int8, and its weight; a row is a group."""
    levels = generator.integers(-127, 128, (outputs, inputs)).astype(np.int8)
    bounds = generator.uniform(0.1, 1, outputs).astype(np.float32)
    tensors = {"weight": torch.from_numpy(levels), "SCB": torch.from_numpy(bounds)}
    tensors["weight_format"] = torch.tensor(0, dtype=torch.uint8)
    return tensors, torch.from_numpy(
        levels.astype(np.float32) * (bounds / np.float32(127))[:, None]
    )


def written_checkpoint(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    quantization: Mapping[str, Any],
    config: Any = None,
) -> Path:
    """A folder with the tensors, and the quantization in its config."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    content = {**(config or {}), "quantization_config": dict(quantization)}
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


TYPES = {
    "attn_q": "Q4_0", "attn_k": "Q8_0", "attn_v": "Q4_1", "attn_output": "Q4_K",
    "ffn_gate": "Q6_K", "ffn_up": "Q5_0", "ffn_down": "Q8_0",
}  # fmt: skip
"""A type of ggml for each matrix of a layer; Q5_0 has no counterpart in ONNX Runtime."""


def blocks(
    generator: np.random.Generator, kind: str, shape: tuple[int, int]
) -> np.ndarray[Any, Any]:
    """Blocks of random bytes, whose scales are small numbers."""
    gguf = pytest.importorskip("gguf")
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    made = generator.integers(0, 256, (shape[0], shape[1] // elements, size), dtype=np.uint8)
    places = {"Q4_1": (0, 2), "Q4_K": (0, 2), "Q6_K": (208,)}.get(kind, (0,))
    for place in places:
        factors = generator.uniform(0.001, 0.01, made.shape[:2]).astype(np.float16)
        factors[0, 0] = 0  # a block of equal elements
        made[..., place : place + 2] = factors[..., None].view(np.uint8)
    return made.reshape(shape[0], -1)


def written_gguf(file: Path, kinds: Mapping[str, str] = TYPES, *, tied: bool = False) -> Path:
    """A Llama of one layer of width 256, 4 heads and 2 for keys; ``tied``: its table, in blocks, is its head."""
    gguf = pytest.importorskip("gguf")
    generator, width, writer = np.random.default_rng(0), 256, gguf.GGUFWriter(file, "llama")
    for key, value in {
        "vocab_size": 32, "context_length": 64, "embedding_length": width, "block_count": 1,
        "feed_forward_length": width, "head_count": 4, "head_count_kv": 2, "layer_norm_rms_eps": 1e-6,
        "rope_freq_base": 10000.0,
    }.items():  # fmt: skip
        getattr(writer, f"add_{key}")(value)
    rows = {"attn_k": width // 2, "attn_v": width // 2}
    for name, kind in kinds.items():
        made = blocks(generator, kind, (rows.get(name, width), width))
        writer.add_tensor(f"blk.0.{name}.weight", made, raw_dtype=gguf.GGMLQuantizationType[kind])
    if tied:
        made = blocks(generator, "Q8_0", (32, width))
        writer.add_tensor("token_embd.weight", made, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name, shape in {
        **({} if tied else {"token_embd": (32, width), "output": (32, width)}), "output_norm": (width,),
        "blk.0.attn_norm": (width,), "blk.0.ffn_norm": (width,),
    }.items():  # fmt: skip
        writer.add_tensor(f"{name}.weight", generator.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
