#!/usr/bin/env python3
"""Differences of outputs after a model is rewritten: the table of docs/accuracy.md.

    python tools/accuracy.py            # all rows, as a table
    python tools/accuracy.py --only fp16 int8

Each row holds a changed model against the unchanged one, on the same inputs, in ONNX Runtime on the CPU with its own
optimisations off (but for the rows about these), in one thread (but for the row about these). What is said is the
largest difference of any element, and the same divided by the standard deviation of the unchanged output.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from torch import nn

import htp_export
from htp_export.capabilities.huggingface.models import spread_parameters
from htp_export.huggingface import example_inputs, load_model

Inputs = dict[str, np.ndarray]


@dataclass(frozen=True)
class Net:
    """A model with inputs, and where its files go."""

    model: nn.Module
    inputs: dict[str, Any]
    folder: Path
    files: dict[tuple[Any, ...], Path] = field(default_factory=dict)

    def file(self, **options: Any) -> Path:
        """The exported file; one for each set of options."""
        key = tuple(sorted(options.items()))
        if key not in self.files:
            path = self.folder / f"{type(self.model).__name__}{len(self.files)}.onnx"
            htp_export.export(self.model, (), path, kwargs=self.inputs, verbose=False, **options)
            self.files[key] = path
        return self.files[key]


class Convolutions(nn.Sequential):
    """Eight convolutions, each with batch normalisation and ReLU."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for width in (3, *[32] * 7):
            layers += [nn.Conv2d(width, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
        super().__init__(*layers)


class Perceptron(nn.Module):
    """Two layers with GELU between, on matrices."""

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.up, self.act, self.down = (
            nn.Linear(256, 1024),
            nn.GELU(approximate),
            nn.Linear(1024, 256),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The result, of the shape of the input."""
        return self.down(self.act(self.up(x)))


def bert(folder: Path) -> Net:
    """BERT of four layers, width 256."""
    small = {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    }
    model = load_model("bert", random_weights=True, overrides={**small, "vocab_size": 1000})
    return Net(model, dict(example_inputs(model)), folder)


def convolutions(folder: Path) -> Net:
    """The convolutions, with running statistics that normalise: activations keep their size."""
    torch.manual_seed(0)
    model = Convolutions()
    spread_parameters(model, torch.Generator().manual_seed(0))
    model.train()
    with torch.no_grad():
        for _ in range(20):
            model(torch.randn(8, 3, 32, 32))
    return Net(model.eval(), {"input": torch.randn(1, 3, 32, 32)}, folder)


def perceptron(folder: Path) -> Net:
    """The perceptron."""
    torch.manual_seed(0)
    return Net(Perceptron().eval(), {"x": torch.randn(16, 256)}, folder)


def run(
    path: Path, inputs: dict[str, Any], level: str = "DISABLE_ALL", threads: int = 1
) -> np.ndarray:
    """The first output, in double precision."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, f"ORT_{level}")
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    if not set(names) <= set(inputs):  # TorchScript's exporter names them itself
        inputs = dict(zip(names, inputs.values(), strict=True))
    feeds = {name: inputs[name].numpy() for name in names}
    return np.asarray(session.run(None, feeds)[0], np.float64)


def rewritten(path: Path, change: Callable[[ir.Model], Any]) -> Path:
    """A copy of a file, changed by onnx_ir."""
    model = htp_export.load(path).model
    result = change(model)
    target = path.with_name(f"{path.stem}.changed.onnx")
    ir.save(getattr(result, "model", None) or model, target)
    return target


def without_tags(model: ir.Model) -> None:
    """Take all metadata off."""
    model.metadata_props.clear()
    for node in model.graph.all_nodes():
        node.metadata_props.clear()


def equal_work_once(model: ir.Model) -> None:
    """Common subexpressions and equal initializers."""
    from onnx_ir.passes.common import (
        CommonSubexpressionEliminationPass,
        DeduplicateInitializersPass,
    )

    CommonSubexpressionEliminationPass()(model)
    DeduplicateInitializersPass()(model)


def folded(model: ir.Model) -> None:
    """Constants, by onnxscript."""
    from onnxscript.optimizer import fold_constants

    fold_constants(model)


def without_gemm(model: ir.Model) -> None:
    """Every ``Gemm`` as ``MatMul`` and ``Add``."""
    for node in list(model.graph):
        if node.op_type == "Gemm":
            turned = node.attributes.get_int("transB", 0)
            first = [ir.node("Transpose", [node.inputs[1]], {"perm": [1, 0]})] if turned else []
            product = ir.node(
                "MatMul", [node.inputs[0], first[0].outputs[0] if first else node.inputs[1]]
            )
            add = ir.node("Add", [product.outputs[0], node.inputs[2]])
            ir.convenience.replace_nodes_and_values(
                model.graph,
                node,
                [node],
                [*first, product, add],
                [node.outputs[0]],
                [add.outputs[0]],
            )


def converted(path: Path, opset: int) -> Path:
    """The file at another opset, by onnx's converter."""
    target = path.with_name(f"{path.stem}.opset{opset}.onnx")
    onnx.save(onnx.version_converter.convert_version(onnx.load(path), opset), target)
    return target


def half(path: Path) -> Path:
    """The file in float16, with inputs and outputs as they are."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    target = path.with_name(f"{path.stem}.fp16.onnx")
    onnx.save(convert_float_to_float16(onnx.load(path), keep_io_types=True), target)
    return target


def int8(path: Path) -> Path:
    """The file with int8 weights, activations quantized as they come."""
    from onnxruntime.quantization import quantize_dynamic

    target = path.with_name(f"{path.stem}.int8.onnx")
    quantize_dynamic(path, target)
    return target


def sums() -> tuple[np.ndarray, np.ndarray]:
    """Sums of 4,096 numbers, forwards one by one and in pairs."""
    numbers = np.random.default_rng(0).standard_normal((64, 4096)).astype(np.float32)
    return np.cumsum(numbers, axis=1)[:, -1].astype(np.float64), numbers.sum(axis=1).astype(
        np.float64
    )


def bn_folded(net: Net) -> Net:
    """The convolutions with batch normalisation in their weights."""
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    layers = list(net.model)
    fused = [
        fuse_conv_bn_eval(conv, norm) for conv, norm in zip(layers[::3], layers[1::3], strict=True)
    ]
    model = nn.Sequential(*(layer for conv in fused for layer in (conv, nn.ReLU()))).eval()
    return Net(model, net.inputs, net.folder)


Pair = tuple[np.ndarray, np.ndarray]


def rows(folder: Path) -> dict[str, tuple[str, str, Callable[[], Pair]]]:
    """Key → model, what was done, and the outputs without and with it."""
    text, conv, layers = bert(folder), convolutions(folder), perceptron(folder)

    def against(net: Net, change: Callable[[Path], Path], **options: Any) -> Pair:
        path = net.file(**options)
        return run(path, net.inputs), run(change(path), net.inputs)

    def level(net: Net, name: str) -> Pair:
        return run(net.file(), net.inputs), run(net.file(), net.inputs, name)

    def normed() -> Net:
        kept = conv.file(
            dynamo=False, training=torch.onnx.TrainingMode.PRESERVE, do_constant_folding=False
        )
        return Net(conv.model, conv.inputs, folder, {(): kept})

    tanh = Perceptron("tanh").eval()
    tanh.load_state_dict(layers.model.state_dict())
    old = {"dynamo": False, "opset_version": 16}
    new = {"dynamo": False, "opset_version": 17}
    return {
        "again": ("BERT", "run again", lambda: against(text, lambda path: path)),
        "tags": (
            "BERT",
            "tags taken off",
            lambda: against(text, lambda path: rewritten(path, without_tags)),
        ),
        "cse": (
            "BERT",
            "equal work and equal weights once",
            lambda: against(text, lambda path: rewritten(path, equal_work_once)),
        ),
        "fold": (
            "BERT",
            "constants folded (onnxscript), from a file without",
            lambda: against(
                text, lambda path: rewritten(path, folded), dynamo=False, do_constant_folding=False
            ),
        ),
        "threads": (
            "BERT",
            "four threads",
            lambda: (run(text.file(), text.inputs), run(text.file(), text.inputs, threads=4)),
        ),
        "exporter": (
            "BERT",
            "TorchScript's exporter for dynamo's",
            lambda: (run(text.file(), text.inputs), run(text.file(dynamo=False), text.inputs)),
        ),
        "opset": (
            "BERT",
            "opset 18 converted to 21",
            lambda: against(text, lambda path: converted(path, 21), opset_version=18),
        ),
        "sum": ("4,096 numbers", "added one by one, for in pairs", sums),
        "gemm": (
            "perceptron",
            "MatMul + Add for Gemm",
            lambda: against(layers, lambda path: rewritten(path, without_gemm)),
        ),
        "layernorm": (
            "BERT",
            "LayerNormalization for its single steps",
            lambda: (run(text.file(**old), text.inputs), run(text.file(**new), text.inputs)),
        ),
        "batchnorm": (
            "8 Conv + BatchNorm",
            "BatchNorm folded into the weights",
            lambda: (run(normed().file(), conv.inputs), run(bn_folded(conv).file(), conv.inputs)),
        ),
        "basic": ("BERT", "ONNX Runtime, basic", lambda: level(text, "ENABLE_BASIC")),
        "extended": (
            "BERT",
            "ONNX Runtime, extended: fused operators",
            lambda: level(text, "ENABLE_EXTENDED"),
        ),
        "all": ("BERT", "ONNX Runtime, all", lambda: level(text, "ENABLE_ALL")),
        "conv-all": (
            "8 Conv + BatchNorm",
            "ONNX Runtime, all: blocked layout",
            lambda: level(conv, "ENABLE_ALL"),
        ),
        "pytorch": (
            "BERT",
            "ONNX Runtime for PyTorch",
            lambda: (
                text.model(**text.inputs)[0].detach().numpy().astype(np.float64),
                run(text.file(), text.inputs),
            ),
        ),
        "gelu": (
            "perceptron",
            "GELU by tanh for GELU by erf",
            lambda: (
                run(layers.file(), layers.inputs),
                run(Net(tanh, layers.inputs, folder / "tanh").file(), layers.inputs),
            ),
        ),
        "fp16": ("BERT", "float16", lambda: against(text, half)),
        "fp16-conv": ("8 Conv + BatchNorm", "float16", lambda: against(conv, half)),
        "int8": ("BERT", "int8 weights, dynamic quantization", lambda: against(text, int8)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="keys of rows")
    chosen = parser.parse_args().only
    warnings.simplefilter("ignore")
    print(
        "| model | what was done | largest difference | of a standard deviation |\n|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tanh").mkdir()
        for key, (model, what, outputs) in rows(Path(folder)).items():
            if chosen and key not in chosen:
                continue
            before, after = outputs()
            largest = float(np.abs(after - before).max())
            print(
                f"| {model} | {what} | {largest:.1e} | {largest / before.std():.1e} |".replace(
                    "0.0e+00", "0"
                ),
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
