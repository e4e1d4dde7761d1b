"""Number of casts of mixed precision by module: ``quantize`` beside ModelOpt's AutoCast.

    pip install nvidia-modelopt onnx-graphsurgeon onnxconverter-common   # for the column of AutoCast
    python tools/casts.py

Both are told which nodes compute in fp16: those that ``quantize`` casts. AutoCast inserts a Cast at each border between
nodes of high and low precision, one for each tensor and direction. The models are built from configurations.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch

import htp_export
from htp_export.command.main import main

PLANS: Mapping[str, Sequence[Mapping[str, str]]] = {
    "BERT": (
        {".": "fp16"},
        {".": "fp16", "class:LayerNorm": "fp32"},
        {"encoder.layer.1": "fp16"},
        {".": "fp16", "encoder.layer.1": "fp32"},
    ),
    "ResNet": (
        {".": "fp16"},
        {".": "fp16", "class:ResNetShortCut": "fp32"},
        {"encoder.stages.1": "fp16"},
        {".": "fp16", "encoder.stages.1": "fp32"},
    ),
    "Llama": (
        {".": "fp16"},
        {".": "fp16", "class:LlamaRMSNorm": "fp32"},
        {"model.layers.*.self_attn": "fp16"},
        {"model.layers.*.mlp": "fp16"},
        {".": "fp16", "model.layers.1": "fp32", "lm_head": "fp32"},
    ),
}


def write_models(folder: Path) -> dict[str, Path]:
    """The files of a BERT of four layers, a ResNet of four stages, and a Llama of four layers with its cache."""
    from transformers import BertConfig, BertModel, ResNetConfig, ResNetModel

    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 128,
    }
    bert = BertModel(BertConfig(vocab_size=100, max_position_embeddings=64, **sizes))
    resnet = ResNetModel(
        ResNetConfig(embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[2, 2, 2, 2])
    )
    ids = torch.randint(0, 100, (1, 16))
    words = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs = {
        "BERT": (bert, words),
        "ResNet": (resnet, {"pixel_values": torch.randn(1, 3, 64, 64)}),
    }
    files = {name: folder / f"{name}.onnx" for name in PLANS}
    for name, (model, kwargs) in inputs.items():
        htp_export.export(model.eval(), (), files[name], kwargs=kwargs, verbose=False)
    settings = ["--set", "num_hidden_layers=4", "--set", "num_key_value_heads=2"]
    settings += [
        word
        for key, size in sizes.items()
        if "layers" not in key
        for word in ("--set", f"{key}={size}")
    ]
    task = ["--random-weights", "--task", "text-generation-with-past", "--quiet"]
    main(["export", "llama", *settings, *task, "-o", str(files["Llama"])])
    return files


def casts(model: onnx.ModelProto) -> int:
    """The Casts between floats."""
    floats = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16)
    return sum(n.op_type == "Cast" and n.attribute[0].i in floats for n in model.graph.node)


def in_fp16(file: Path) -> set[str]:
    """The nodes of a file that compute in fp16, without Casts."""
    tagged = htp_export.load(file)
    halves = {value.name for value in tagged.typed.values() if value.dtype == ir.DataType.FLOAT16}
    nodes = (node for node in tagged.model.graph if node.op_type != "Cast")
    return {
        str(node.name)
        for node in nodes
        if any(v is not None and v.name in halves for v in node.outputs)
    }


def by_autocast(file: Path, low: set[str]) -> int | None:
    """The Casts of AutoCast, if it is installed, for the same nodes."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            from modelopt.onnx.autocast.convert import convert_to_mixed_precision
    except ImportError:
        return None
    high = [
        f"^{re.escape(node.name)}$" for node in onnx.load(file).graph.node if node.name not in low
    ]
    logging.disable(logging.WARNING)
    limits: dict[str, Any] = {"data_max": np.inf, "init_max": np.inf, "keep_io_types": True}
    return casts(convert_to_mixed_precision(str(file), "fp16", nodes_to_exclude=high, **limits))


def tabulate() -> None:
    print(
        "model   plan                                               fp16  casts of quantize  casts of AutoCast"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, file in write_models(Path(folder)).items():
            before = casts(onnx.load(file))
            for plan in PLANS[name]:
                made = Path(folder) / "mixed.onnx"
                htp_export.quantize(file, plan, made)
                low = in_fp16(made)
                theirs = by_autocast(file, low)
                shown = "-" if theirs is None else str(theirs - before)
                rules = " ".join(map("=".join, plan.items()))
                count = casts(onnx.load(made)) - before
                print(f"{name:7} {rules:50} {len(low):4} {count:18} {shown:>18}")


if __name__ == "__main__":
    tabulate()
