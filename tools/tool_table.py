#!/usr/bin/env python3
"""Module tags after other tools, and after `htp_export.carry`: the tables of docs/tool_tables.md.

    python tools/tool_table.py                             # all models, both exporters, all tools; about ten minutes
    python tools/tool_table.py --models bert --tools onnxslim onnxsim

For each exporter, tool and model: nodes of the result; the share of them that the tool itself left with tags; modules
that are exact after carry, of those that are exact in the exported file, checked against PyTorch by value; modules that
the tool fused; nodes that have no owner after carry, if any. Tools that change what is computed (quantizers, half
precision) have no check by value.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
sys.path.insert(0, str(Path(__file__).parents[1]))

import onnx
import torch

import htp_export
from htp_export import tools
from tests.truth import Judge, owners_of, tree_of

Inputs = dict[str, torch.Tensor]
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}


def text() -> Inputs:
    """One sentence with padding."""
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[:, -3:] = 0
    return {"input_ids": torch.randint(3, 1000, (2, 16)), "attention_mask": mask}


def bert() -> tuple[torch.nn.Module, Inputs]:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**SMALL, vocab_size=1000)), text()


def gpt2() -> tuple[torch.nn.Module, Inputs]:
    from transformers import GPT2Config, GPT2LMHeadModel

    size = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 1000}
    return GPT2LMHeadModel(
        GPT2Config(**size, use_cache=False, bos_token_id=0, eos_token_id=0)
    ), text()


def vit() -> tuple[torch.nn.Module, Inputs]:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(**SMALL, image_size=64)), {"pixel_values": torch.randn(2, 3, 64, 64)}


def resnet() -> tuple[torch.nn.Module, Inputs]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64], depths=[1, 2, 1], layer_type="basic"
    )
    return ResNetForImageClassification(config), {"pixel_values": torch.randn(2, 3, 64, 64)}


def whisper() -> tuple[torch.nn.Module, Inputs]:
    from transformers import WhisperConfig, WhisperModel

    heads = {
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
    }
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(
        d_model=64, encoder_layers=2, decoder_layers=1, vocab_size=1000, **heads, **tokens
    )
    return WhisperModel(config).encoder, {"input_features": torch.randn(2, 80, 3000)}


MODELS = {"bert": bert, "gpt2": gpt2, "vit": vit, "resnet": resnet, "whisper": whisper}


def feeds(path: Path, inputs: Inputs) -> dict[str, Any]:
    """The inputs under the names that they have in the file."""
    names = [entry.name for entry in onnx.load(str(path), load_external_data=False).graph.input]
    return dict(zip(names, (tensor.numpy() for tensor in inputs.values()), strict=True))


@dataclass(frozen=True)
class Row:
    """A tool: its options, given the file and the model's inputs, and whether it leaves what is computed alone."""

    tool: str
    options: Callable[[Path, Inputs], dict[str, Any]] = lambda _path, _inputs: {}
    exact: bool = True


ROWS = {
    "onnxslim": Row("onnxslim"),
    "onnxsim": Row("onnxsim"),
    "onnxoptimizer": Row("onnxoptimizer"),
    "onnxscript": Row("onnxscript"),
    "onnxscript, fusions": Row("onnxscript", lambda _path, _inputs: {"fusions": True}),
    **{
        f"onnxruntime {level}": Row(
            "onnxruntime", lambda _path, _inputs, level=level: {"level": level}
        )
        for level in ("basic", "extended", "all")
    },
    "onnxruntime_transformers": Row(
        "onnxruntime_transformers",
        lambda _path, _inputs: {"num_heads": 4, "hidden_size": 64, "opt_level": 0},
    ),
    "version_converter": Row("version_converter", lambda _path, _inputs: {"opset": 21}),
    "symbolic_shape_infer": Row(
        "symbolic_shape_infer", lambda _path, _inputs: {"auto_merge": True}
    ),
    "float16": Row("float16", lambda _path, _inputs: {"keep_io_types": True}, exact=False),
    "quantize_dynamic": Row("quantize_dynamic", exact=False),
    "quantize_static": Row(
        "quantize_static", lambda path, inputs: {"data": [feeds(path, inputs)]}, exact=False
    ),
    "matmul_nbits": Row("matmul_nbits", lambda _path, _inputs: {"block_size": 32}, exact=False),
}


def spread(model: torch.nn.Module) -> torch.nn.Module:
    """Parameters apart from each other, as after training: equal ones are merged, and hide faults."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def inexact(model: torch.nn.Module, inputs: Inputs, path: Path) -> set[str]:
    """The modules of a file that are not what PyTorch computed."""
    return {module for module, _ in Judge(model, inputs, path).faults()}


def kept_by_tool(row: Row, path: Path, inputs: Inputs) -> int:
    """Nodes that a tool leaves with tags, before carry sees them."""
    from unittest import mock

    seen: list[int] = []

    def count(_before: Any, after: Any) -> Any:
        seen.append(sum("htp.module" in node.metadata_props for node in after.graph))
        raise InterruptedError

    carry = "htp_export.capabilities.carry.adapting.carry_in_place"
    with mock.patch(carry, count), contextlib.suppress(InterruptedError):
        getattr(tools, row.tool)(path, **row.options(path, inputs))
    return seen[0]


def measure(row: Row, model: torch.nn.Module, inputs: Inputs, path: Path, wrong: set[str]) -> str:
    """One cell of the table."""
    out = path.with_name("out.onnx")
    try:
        kept = kept_by_tool(row, path, inputs)
        result = getattr(tools, row.tool)(path, out, **row.options(path, inputs))
    except htp_export.HtpExportError as error:
        return f"the tool fails: {str(error.__cause__ or error)[:60]!r}"
    nodes = onnx.load(str(out)).graph.node
    untagged = sum(not owners_of(node) for node in nodes)
    parts = [f"{len(nodes)}: {kept / len(nodes):.0%}"]
    if row.exact:
        ran = {module for module, entry in tree_of(onnx.load(str(out))).items() if entry["calls"]}
        try:
            parts.append(f"{len(ran - wrong - inexact(model, inputs, out))}/{len(ran - wrong)}")
        except Exception:  # onnxruntime has several kinds for models that it will not run
            parts.append("does not run")
    fused = sum(fate == "fused" for fate in result.fates.values())
    parts += [f"fused {fused}"] * bool(fused) + [f"{untagged} without owner"] * bool(untagged)
    return ", ".join(parts)


def header(models: Iterable[str]) -> str:
    """The first line of a table."""
    return f"| tool | {' | '.join(models)} |"


def title(exporter: str) -> str:
    """What stands above a table."""
    return f"**{exporter}**"


def cells(model_name: str, exporter: str, names: Iterable[str], folder: Path) -> Iterator[str]:
    """A column of a table: nodes of the exported file, then a cell for each tool."""
    torch.manual_seed(0)
    model, inputs = MODELS[model_name]()
    spread(model)
    path = folder / "model.onnx"
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        htp_export.export(
            model, (), path, kwargs=inputs, dynamo=exporter == "dynamo", verbose=False
        )
    wrong = inexact(model, inputs, path)
    yield str(len(onnx.load(str(path)).graph.node))
    for name in names:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            cell = measure(ROWS[name], model, inputs, path, wrong)
        yield cell


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--tools", nargs="+", choices=[*ROWS], default=[*ROWS])
    parser.add_argument("--exporter", choices=["dynamo", "torchscript", "both"], default="both")
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    exporters = ["dynamo", "torchscript"] if given.exporter == "both" else [given.exporter]
    for exporter in exporters:
        columns = []
        for model_name in given.models:
            with tempfile.TemporaryDirectory() as folder:
                columns.append(list(cells(model_name, exporter, given.tools, Path(folder))))
        print(f"\n{title(exporter)}\n\n{header(given.models)}\n{'|---' * (len(columns) + 1)}|")
        for name, *row in zip(["(exported)", *given.tools], *columns, strict=True):
            print(f"| {' | '.join([name, *row])} |")


if __name__ == "__main__":
    main()
