#!/usr/bin/env python3
"""Architecture search: predicted latencies of 30 candidates, beside those of whole candidates.

    python tools/architectures.py                    # BERTs (transformers); about six minutes
    python tools/architectures.py --net convolution  # residual networks of convolutions
    python tools/architectures.py --torchscript      # exported by TorchScript, which takes less time

Prints the rank correlation (Spearman) of both, the median and the largest relative error, the share of parts that were
measured, and the time of the search beside that of a measurement of each candidate as a whole. The whole candidates of
a control are measured twice. All times of runs are processor time of one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, os.fspath(Path(__file__).parent.parent))

import torch
from scipy.stats import spearmanr
from torch import nn

import htp_export
from htp_export.capabilities.search.architecture_space import ArchitectureSpace
from htp_export.capabilities.search.architectures import ArchitectureWork
from htp_export.runtime.settings import RunSettings

_CONTROLS = 8
"""Candidates that are measured twice."""


def bert(choice: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    """A BERT without its own vocabulary, on 64 tokens."""
    from transformers import BertConfig, BertModel

    config = BertConfig(**choice, vocab_size=1000, max_position_embeddings=64)
    return BertModel(config), {"input_ids": torch.arange(64).reshape(1, 64)}


class Block(nn.Module):
    """A residual block, with or without a layer that mixes its channels."""

    def __init__(self, width: int, kernel: int, mixer: str) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, kernel, padding=kernel // 2)
        self.norm = nn.BatchNorm2d(width)
        mixers = {"Conv2d": nn.Conv2d(width, width, 1), "Identity": nn.Identity()}
        self.mixer = mixers[mixer]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.mixer(torch.relu(self.norm(self.first(x)))))


class Residual(nn.Module):
    """A stem, blocks, and a head."""

    def __init__(self, width: int, depth: int, kernel: int, mixer: str) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*(Block(width, kernel, mixer) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def convolution(choice: Mapping[str, Any]) -> tuple[nn.Module, Any]:
    """A residual network on a picture of 64 x 64 pixels."""
    return Residual(**choice), torch.zeros(1, 3, 64, 64)


NETS: Mapping[str, tuple[Any, Mapping[str, list[Any]]]] = {
    "bert": (
        bert,
        {
            "num_hidden_layers": [1, 2, 4, 8],
            "hidden_size": [64, 128, 256],
            "num_attention_heads": [2, 4],
            "intermediate_size": [128, 512, 1024],
        },
    ),
    "convolution": (
        convolution,
        {
            "depth": [1, 2, 4, 8],
            "width": [16, 32, 64],
            "kernel": [3, 5],
            "mixer": ["Conv2d", "Identity"],
        },
    ),
}
"""Name → build function, and space."""


def compared(net: str, candidates: int, *, dynamo: bool) -> dict[str, Any]:
    """Search, measure the same candidates as a whole, and compare both."""
    build, space = NETS[net]
    module, example = build({name: choices[0] for name, choices in space.items()})
    arguments: Any = {"kwargs": example} if isinstance(example, Mapping) else {"args": example}
    # The first export of a process also imports what both ways need.
    htp_export.export(module.eval(), arguments.pop("args", ()), verbose=False, **arguments)
    settings = {"trials": candidates, "sampler": "random", "dynamo": dynamo}
    begun = time.perf_counter()
    found = htp_export.search(build, space, **settings)
    seconds = time.perf_counter() - begun
    print(found.summary, f"in {seconds:.0f} s", flush=True)
    work = ArchitectureWork(
        build, ArchitectureSpace(space), ("latency",), None, RunSettings(runs=20), dynamo=dynamo
    )
    begun = time.perf_counter()
    whole = [work.whole_ms(candidate.choice) for candidate in found.trials]
    whole_seconds = time.perf_counter() - begun
    predicted = [candidate.latency_ms for candidate in found.trials]
    errors = []
    for candidate, ms in zip(found.trials, whole, strict=True):
        errors.append(candidate.latency_ms / ms - 1)
        print(f"{candidate.latency_ms:9.3f} {ms:9.3f} ms  {errors[-1]:+.1%}  {candidate.counted}")
    controls = []
    for candidate, ms in zip(found.trials[:_CONTROLS], whole, strict=False):
        controls.append(abs(work.whole_ms(candidate.choice) / ms - 1))
    return {
        "net": net,
        "exporter": "dynamo" if dynamo else "TorchScript",
        "candidates": len(found.trials),
        "rank correlation": round(float(spearmanr(predicted, whole)[0]), 3),
        "median error": round(statistics.median(map(abs, errors)), 3),
        "median signed error": round(statistics.median(errors), 3),
        "largest error": round(max(map(abs, errors)), 3),
        "median difference of controls": round(statistics.median(controls), 3),
        "parts": found.all_parts,
        "measured parts": found.measured_parts,
        "seconds": round(seconds, 1),
        "seconds for whole candidates": round(whole_seconds, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--net", choices=NETS, default="bert")
    parser.add_argument("--candidates", type=int, default=30)
    parser.add_argument("--torchscript", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    result = compared(options.net, options.candidates, dynamo=not options.torchscript)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
