#!/usr/bin/env python3
"""Profiles of BERT by module on a GPU, in fp32 and fp16, memory, and placement; as Markdown for docs/profile.md.

    python tools/gpu.py                            # BERT-base on CUDA; needs onnxruntime-gpu
    python tools/gpu.py --provider dml --length 128
    python tools/gpu.py --provider cpu --layers 2  # the same steps without a GPU, to try them

Status 0 if all steps ran, 1 if one failed, and 2 if this ONNX Runtime does not have the execution provider.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnxruntime

import htp_export
from htp_export.results import Profile

NAMES = {
    "cuda": "CUDAExecutionProvider",
    "dml": "DmlExecutionProvider",
    "cpu": "CPUExecutionProvider",
}
FACTS = {
    "kernels": "kernels; on a GPU, this build of ONNX Runtime measures their times there",
    "launches": "launches alone: this build of ONNX Runtime does not measure kernels on the device",
    "modules": "modules that ran alone: launches said too little",
}


@dataclass(frozen=True)
class Case:
    """What every step works on.

    Attributes:
        file: The exported model.
        providers: Execution providers, the device's first.
        runs: Number of measured runs.
    """

    file: Path
    providers: Sequence[str]
    runs: int

    def profile(
        self, file: Path | None = None, timing: str = "auto", *, memory: bool = False
    ) -> Profile:
        """A profile of the model, or of another file."""
        return htp_export.profile(
            file or self.file,
            runs=self.runs,
            providers=self.providers,
            timing=timing,
            memory=memory,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--provider", default="cuda", help=f"{', '.join(NAMES)}, or a whole name")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--length", type=int, default=128, help="tokens")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", nargs="*", choices=list(STEPS), default=list(STEPS))
    given = parser.parse_args(arguments)
    provider = NAMES.get(given.provider.lower(), given.provider)
    available = onnxruntime.get_available_providers()
    if provider not in available:
        print(
            f"gpu.py: this ONNX Runtime has no {provider}, only {', '.join(available)}",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "bert.onnx"
        export_bert(file, given.layers, given.width, given.length)
        providers = list(dict.fromkeys((provider, "CPUExecutionProvider")))
        return report(Case(file, providers, given.runs), given.steps)


def export_bert(file: Path, layers: int, width: int, length: int) -> None:
    """Export a BERT with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        num_hidden_layers=layers,
        hidden_size=width,
        num_attention_heads=width // 64 or 1,
        intermediate_size=4 * width,
    )
    ids = torch.ones(1, length, dtype=torch.int64)
    kwargs = {"input_ids": ids, "attention_mask": ids, "token_type_ids": torch.zeros_like(ids)}
    htp_export.export(transformers.BertModel(config).eval(), (), file, kwargs=kwargs, verbose=False)


def report(case: Case, steps: Sequence[str]) -> int:
    """Print each step as Markdown; return 1 if one failed."""
    print(
        f"ONNX Runtime {onnxruntime.__version__}, {', '.join(case.providers)}, {os.cpu_count()} cores\n"
    )
    failed = 0
    for name in steps:
        print(f"### {name}\n")
        try:
            for line in STEPS[name](case):
                print(line)
        except Exception as error:
            failed = 1
            print(f"failed: {type(error).__name__}: {error}")
            traceback.print_exc()
        print(flush=True)
    return failed


def profile_step(case: Case) -> list[str]:
    """The profile as it comes: what was timed, and the modules."""
    result = case.profile()
    return [f"Timed: {FACTS[result.timing]}.", "", *table(result), "", *lines_of(result)]


def alone_step(case: Case) -> list[str]:
    """Shares of modules by kernels or launches beside those of modules that ran alone."""
    kernels, alone = case.profile(timing="kernels"), case.profile(timing="modules")
    rows = [f"| module | {kernels.timing} | alone |", "|---|---:|---:|"]
    rows += [
        f"| `{path or '(root)'}` | {kernels.modules[path].share:.1%} | {alone.modules[path].share:.1%} |"
        for path in shown(kernels)
    ]
    return [*rows, "", *lines_of(alone)]


def fp16_step(case: Case) -> list[str]:
    """The whole model in fp16 against fp32: time of a run, and of each module."""
    half = case.file.with_name("half.onnx")
    htp_export.quantize(case.file, "fp16", half)
    before, after = case.profile(), case.profile(half)
    rows = ["| module | fp32 ms | fp16 ms |", "|---|---:|---:|"]
    rows += [
        f"| `{path or '(root)'}` | {before.modules[path].total_ms:.3f} | {after.modules[path].total_ms:.3f} |"
        for path in shown(before)
    ]
    speedup = before.end_to_end_ms / after.end_to_end_ms
    return [
        *rows,
        "",
        f"A run: {before.end_to_end_ms:.3f} ms, in fp16 {after.end_to_end_ms:.3f} ms ({speedup:.2f} times).",
    ]


def memory_step(case: Case) -> list[str]:
    """What was allocated, beside the estimate of ``cost``."""
    result = case.profile(memory=True)
    assert result.memory is not None
    return [f"- {line}" for line in result.memory.notes]


def placement_step(case: Case) -> list[str]:
    """The encoder on the device and the embeddings on the CPU, as ONNX Runtime placed them."""
    if not hasattr(htp_export, "place"):
        return ["not run: this htp_export has no `place`"]
    placed = case.file.with_name("placed.onnx")
    device = "cpu" if case.providers[0] == NAMES["cpu"] else "gpu"
    htp_export.place(case.file, {"encoder": device, "embeddings": "cpu"}, placed)
    return ["```", str(htp_export.placement(placed, providers=case.providers)), "```"]


def shown(result: Profile) -> list[str]:
    """The modules of the tables: two levels, and the first layer whole."""
    return [
        path
        for path, module in result.modules.items()
        if module.kernels and (path.count(".") <= 1 or path.startswith("encoder.layer.0."))
    ]


def table(result: Profile) -> list[str]:
    """A profile as a Markdown table."""
    rows = ["| module | total ms | self ms | share | kernels |", "|---|---:|---:|---:|---:|"]
    for path in shown(result):
        module = result.modules[path]
        times = (
            f"{module.total_ms:.3f} | {module.self_ms:.3f} | {module.share:.1%} | {module.kernels}"
        )
        rows.append(f"| `{path or '(root)'}` | {times} |")
    return rows


def lines_of(result: Profile) -> list[str]:
    """The lines below a profile."""
    return [f"- {line}" for line in (result.summary, *result.notes)]


STEPS: dict[str, Callable[[Case], list[str]]] = {
    "Profile": profile_step,
    "Modules alone": alone_step,
    "fp16": fp16_step,
    "Memory": memory_step,
    "Placement": placement_step,
}


if __name__ == "__main__":
    sys.exit(main())
