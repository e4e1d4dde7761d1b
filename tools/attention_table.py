#!/usr/bin/env python3
"""Attention as one operation and in steps: the table of ``docs/attention.md``, beside a count that is not ours.

    python tools/attention_table.py             # all seven models, some minutes
    python tools/attention_table.py GPT-2       # some of them
    python tools/attention_table.py --full ViT-B/16    # without extrapolation

The models have their real sizes and random weights; an image or a text of 128 tokens, and for encoder-decoders a second
one of 16 tokens. The layers of a ViT are all alike, so the numbers of one layer and of two give those of any depth.

The last column compares the operations of ``attention_report`` with those that ``torch.onnx.export`` alone translates:
they are counted by the classes in torch's own ``nn_module_stack``, without the tags of this package. Models that
``torch.fx.symbolic_trace`` can trace are counted by it, too, with attention as one operation: a second number.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, os.fspath(Path(__file__).parent.parent))

import torch

import htp_export
from tools.compare_nets import Vision

Built = tuple[torch.nn.Module, dict[str, torch.Tensor]]
Counts = tuple[int, int]
"""All operations, and those in attention."""


class Numbers(NamedTuple):
    """The numbers of a model.

    ``operations`` of ``attention_report`` are all and those in attention, with attention as one operation, and then
    in steps; ``translated`` are the same as torch alone has them, and ``traced`` the first two of a symbolic trace, if
    there is one. ``traffic`` is what fusing saves, and all of it, in the same two ways.
    """

    operations: list[int]
    traffic: list[int]
    translated: list[int]
    traced: list[int]


def _ids(name: str, length: int) -> dict[str, torch.Tensor]:
    return {name: torch.randint(3, 1000, (1, length))}


def vit(patch: int, width: int, heads: int, layers: int) -> Built:
    return Vision(224, patch, width, heads, layers), {"x": torch.randn(1, 3, 224, 224)}


def bert() -> Built:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig()), _ids("input_ids", 128)


def gpt2() -> Built:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False)), _ids("input_ids", 128)


def t5() -> Built:
    from transformers import T5Config, T5ForConditionalGeneration

    # with "sdpa", torch.onnx.export fails on a reshape of T5's, with and without this package
    config = T5Config(use_cache=False, attn_implementation="eager")
    model = T5ForConditionalGeneration(config)
    return model, {**_ids("input_ids", 128), **_ids("decoder_input_ids", 16)}


def bart() -> Built:
    from transformers import BartConfig, BartModel

    sizes: dict[str, Any] = {"d_model": 768, "use_cache": False}
    for side in ("encoder", "decoder"):
        sizes[f"{side}_layers"] = 6
        sizes[f"{side}_attention_heads"] = 12
        sizes[f"{side}_ffn_dim"] = 3072
    model = BartModel(BartConfig(**sizes))
    return model, {**_ids("input_ids", 128), **_ids("decoder_input_ids", 16)}


MODELS: dict[str, tuple[str, Callable[..., Built]]] = {
    "ViT-B/16": ("MultiheadAttention", partial(vit, 16, 768, 12)),
    "ViT-L/16": ("MultiheadAttention", partial(vit, 16, 1024, 16)),
    "ViT-H/14": ("MultiheadAttention", partial(vit, 14, 1280, 16)),
    "BERT-base": ("BertSelfAttention", bert),
    "GPT-2": ("GPT2Attention", gpt2),
    "T5-small": ("T5Attention", t5),
    "BART-base": ("BartAttention", bart),
}
"""Name of a model → the class of its attention, and the model with its inputs."""

# the models that are built with a number of layers
DEPTHS = {"ViT-B/16": 12, "ViT-L/16": 24, "ViT-H/14": 32}


def traced(model: torch.nn.Module, class_name: str) -> Counts | None:
    """The operations in a symbolic trace, with attention as one operation; None if it cannot be traced.

    Its nodes for the outputs of an attention and for sizes are no operations.
    """
    try:
        graph = torch.fx.symbolic_trace(model).graph
    except Exception:  # a trace fails with the error of the code that it meets
        return None
    calls = [node for node in graph.nodes if node.op.startswith("call_")]
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    attention = [
        node for node in calls if node.op == "call_module" and kinds[str(node.target)] == class_name
    ]
    others = [node for node in calls if node.target == "size"]
    others += [node for node in calls if node.args and node.args[0] in attention]
    return len(calls) - len(others), len(attention)


def translated(model: torch.nn.Module, inputs: dict[str, torch.Tensor], class_name: str) -> Counts:
    """The operations that ``torch.onnx.export`` translates, by the classes of torch's own scopes."""
    program = torch.onnx.export(model, (), kwargs=inputs, dynamo=True, verbose=False)
    total, in_attention = 0, 0
    for node in program.exported_program.graph.nodes:
        if node.op != "call_function":
            continue
        total += 1
        classes = [scope[1] for scope in node.meta.get("nn_module_stack", {}).values()]
        names = [kind if isinstance(kind, str) else kind.__name__ for kind in classes]
        in_attention += any(name.rpartition(".")[2] == class_name for name in names)
    return total, in_attention


def measured(name: str, *layers: int) -> Numbers:
    """The numbers of a model, of some layers."""
    class_name, build = MODELS[name]
    torch.manual_seed(0)
    model, inputs = build(*layers)
    model.eval()
    report = htp_export.attention_report(model, kwargs=inputs)
    one, steps = report.opaque, report.exposed
    ours = [one.operations, one.attention_operations]
    ours += [steps.operations, steps.attention_operations]
    traffic = [one.fusible_bytes, one.traffic_bytes, steps.fusible_bytes, steps.traffic_bytes]
    calls = sum(type(module).__name__ == class_name for module in model.modules())
    total, in_attention = translated(model, inputs, class_name)
    with htp_export.decomposed_attention(model):
        exposed = translated(model, inputs, class_name)
    theirs = [total - in_attention + calls, calls, *exposed]
    return Numbers(ours, traffic, theirs, [*(traced(model, class_name) or ())])


def extrapolated(name: str, layers: int) -> Numbers:
    """The numbers of a model of many layers that are alike, from those of one and of two."""
    lists = []
    for one, two in zip(measured(name, 1), measured(name, 2), strict=True):
        lists.append([a + (layers - 1) * (b - a) for a, b in zip(one, two, strict=True)])
    return Numbers(*lists)


def row(name: str, full: bool = False) -> list[str]:
    """A row of the table."""
    if name not in DEPTHS:
        numbers = measured(name)
    elif full:
        numbers = measured(name, DEPTHS[name])
    else:
        numbers = extrapolated(name, DEPTHS[name])
    one, one_attention, steps, steps_attention = numbers.operations
    fusible, traffic, steps_fusible, steps_traffic = numbers.traffic
    differences = [distance(numbers.operations, numbers.translated)]
    if numbers.traced:
        differences.append(distance(numbers.operations[:2], numbers.traced))
    return [
        name,
        f"{one} → {steps}",
        f"{steps / one:.2f}",
        f"{one_attention} → {steps_attention}",
        f"{steps_attention / one_attention:.1f}",
        f"{fusible / traffic:.1%} → {steps_fusible / steps_traffic:.1%}",
        ", ".join(map(str, differences)),
    ]


def distance(counts: Sequence[int], others: Sequence[int]) -> int:
    """The sum of all differences."""
    return sum(abs(a - b) for a, b in zip(counts, others, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--full", action="store_true", help="export every layer of each ViT")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    for name in args.models or MODELS:
        print(f"| {' | '.join(row(name, args.full))} |", flush=True)
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
