#!/usr/bin/env python3
"""Peak memory and time of an export whose weights are streamed from a checkpoint of several gigabytes.

    python tools/stream_weights.py                           # a random Llama of 6 GB in shards of 500 MB
    python tools/stream_weights.py --gigabytes 2 --folder /scratch -- --dtype float16
    python tools/stream_weights.py --in-memory               # without --stream-weights

The folder needs room for the checkpoint and for the exported file; both are removed at the end. Options after ``--`` go
to ``htp-export export``. The peak is that of the whole process, pages of mapped files included.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tools.peak_memory import own_peak, peak_of

SHARD_BYTES = 500_000_000
WIDTH = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
VOCABULARY = 32000


def write_checkpoint(
    folder: Path, gigabytes: float, shard_bytes: int = SHARD_BYTES, **changes: Any
) -> int:
    """Write a Llama with random weights, never holding more than one shard, and return the bytes of its weights.

    Args:
        folder: The folder to write; created.
        gigabytes: The size to reach; the number of layers follows from it.
        shard_bytes: The size of a shard at which the next one begins.
        changes: Other values for its config.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {**WIDTH, "vocab_size": VOCABULARY, "max_position_embeddings": 512, **changes}
    with torch.device("meta"):
        one = _bytes(LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)))
        layer = _bytes(LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2))) - one
        layers = max(1, round(1 + (gigabytes * 1e9 - one) / layer))
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers))
    folder.mkdir(parents=True, exist_ok=True)
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    files: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def flush() -> None:
        if shard:
            name = f"model-{len(set(files.values())) + 1:05}.safetensors"
            save_file(shard, folder / name)
            files.update(dict.fromkeys(shard, name))
            shard.clear()

    for name, tensor in model.state_dict().items():
        values = torch.randn(tensor.shape, generator=generator) * 0.02
        shard[name] = values + 1 if tensor.ndim == 1 else values
        if sum(each.nbytes for each in shard.values()) > shard_bytes:
            flush()
    flush()
    index = {"metadata": {"total_size": _bytes(model)}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return _bytes(model)


def export(
    source: Path, output: Path, options: Sequence[str] = ("--stream-weights",)
) -> tuple[float, int]:
    """Export a folder in a process of its own, and return the seconds, and the bytes of its peak."""
    command = [
        sys.executable,
        "-m",
        "htp_export",
        "export",
        str(source),
        "-o",
        str(output),
        "--quiet",
        *options,
    ]
    start = time.perf_counter()
    peak = peak_of(command)
    return time.perf_counter() - start, peak


def _bytes(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def main() -> None:
    """Write the checkpoint, export it, and print what it took."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=6.0)
    parser.add_argument("--folder", type=Path, help="where the files go for the time being")
    parser.add_argument("--in-memory", action="store_true", help="export without --stream-weights")
    parser.add_argument("options", nargs="*", help="further options for htp-export export")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="stream_weights_", dir=chosen.folder))
    try:
        size = write_checkpoint(folder / "model", chosen.gigabytes)
        shards = len(list((folder / "model").glob("*.safetensors")))
        options = [*([] if chosen.in_memory else ["--stream-weights"]), *chosen.options]
        seconds, peak = export(folder / "model", folder / "model.onnx", options)
        print(
            f"checkpoint {size / 1e9:.2f} GB in {shards} shards; writing it took {own_peak() / 1e9:.2f} GB of memory"
        )
        print(f"export {seconds:.0f} s, peak {peak / 1e9:.2f} GB")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
