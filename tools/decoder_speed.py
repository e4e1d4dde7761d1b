#!/usr/bin/env python3
"""Decoders in ONNX Runtime GenAI: tokens per second of our files, beside those of GenAI's own builder.

    python tools/decoder_speed.py                            # a Llama and a Qwen3 of 100 M parameters
    python tools/decoder_speed.py --size small --rounds 3    # a minute
    python tools/decoder_speed.py --folder decoders --sides fp32 fused   # keeps the files, and takes those there are
    python tools/decoder_speed.py --shapes outliers --size 4x512 --tokens 64 --sides "int4, searched"

The weights are random and spread apart. Each measurement is a fresh process with one thread, which loads a folder,
reads a prompt and generates tokens, ``--repeats`` times; the medians count, in tokens per second of processor time. The
first token comes with the prompt. In each round every side runs once, in another order, and so does a second run of
the two files of the builder: the control. Ratios are medians of the rounds, each of two runs of one round.

``outliers`` is a Llama that has learned what follows each of 64 tokens, with channels before an MLP and before the
logits that are far larger than the others: int4 with `accuracy_level` 4 everywhere changes its tokens. The searched
side has the plan of a search with the objectives tokens and time: of those that change no token, the one with the most
modules at level 4. It is compared with level 4 everywhere, whose second run is the control, and its tokens with those
of fp32.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, os.fspath(Path(__file__).parent.parent))

import onnx

import htp_export

SHAPES: Mapping[str, Mapping[str, Any]] = {"llama": {}, "qwen3": {"head_dim": 64}}
"""Model type → what its config has besides the size."""

OUTLIERS, KNOWN = "outliers", 64
"""A Llama with large channels, and the tokens that it has learned."""

SIZES: Mapping[str, Mapping[str, int]] = {
    "100m": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 16000,
    },
    "4x512": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 2000,
    },
    "small": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2000,
    },
}

INT4: Mapping[str, Any] = {"precision": "int4", "symmetric": True}
"""As the builder's: blocks of 32 without zero points; the table of tokens stays in fp32."""

CONTROL = " again"


@dataclass(frozen=True)
class Side:
    """A folder that is measured.

    Attributes:
        reference: The side that it is compared with.
        make: Writes the folder, from the folder of the model and the folders of other sides.
        tokens: The side that should generate the same tokens; None for the reference.
    """

    reference: str
    make: Callable[[Path, Path], None]
    tokens: str | None = None


@dataclass(frozen=True)
class Speed:
    """Tokens per second of processor time, and the tokens."""

    prefill: float
    decode: float
    tokens: tuple[int, ...]


def export(source: Path, target: Path) -> None:
    """Our file, as it is exported."""
    options = [
        "--task",
        "text-generation-with-past",
        "--genai",
        "--quiet",
        "-o",
        str(target / "model.onnx"),
    ]
    subprocess.run(
        [sys.executable, "-m", "htp_export", "export", str(source), *options], check=True
    )


def build(precision: str) -> Callable[[Path, Path], None]:
    """The file of GenAI's builder."""

    def make(source: Path, target: Path) -> None:
        options = ["-i", str(source), "-o", str(target), "-p", precision, "-e", "cpu"]
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"GenAI's builder failed: {done.stderr[-2000:]}")

    return make


def fused(_: Path, target: Path) -> None:
    """Our file after ``optimize --level fused``."""
    changed(
        target,
        "fp32",
        lambda file, new: htp_export.optimize(file, new, level="fused", external_data=DATA),
    )


def int4(base: str, **fields: Any) -> Callable[[Path, Path], None]:
    """Our file in int4, with these fields of its precision."""

    def make(_: Path, target: Path) -> None:
        plan = {".": {**INT4, **fields}, "**.embed_tokens": "fp32"}
        changed(
            target, base, lambda file, new: htp_export.quantize(file, plan, new, external_data=DATA)
        )

    return make


def searched(_: Path, target: Path) -> None:
    """Our fused file in int4, with the `accuracy_level` of each layer that a search finds."""
    import numpy as np

    prompts = {"input_ids": np.random.default_rng(1).integers(3, KNOWN, (8, 6))}
    fast, exact = (f"int4:symmetric=true:accuracy_level={level}" for level in (4, 0))

    def change(file: Path, new: Path) -> None:
        space = {
            "model.layers.*": [fast, exact],
            "lm_head": [fast, exact],
            "**.embed_tokens": ["fp32"],
        }
        found = htp_export.search(
            file, space, objectives=["tokens", "time"], data=prompts, trials=40
        )
        same = [
            trial
            for trial in found.trials
            if trial.number is not None and trial.values["tokens"] == 1
        ]
        if not same:
            raise SystemExit("no plan of the search has the tokens of fp32; give it more trials")
        fastest = max(same, key=lambda trial: list(trial.choices.values()).count(fast))
        exactly = [path for path, choice in fastest.choices.items() if choice == exact]
        print(
            f"{len(same)} of {len(found.trials)} plans have the tokens of fp32; at level 0: {', '.join(exactly)}"
        )
        htp_export.quantize(file, fastest.plan, new, external_data=DATA)

    changed(target, "fused", change)


DATA = "model.onnx.data"


def changed(target: Path, base: str, change: Callable[[Path, Path], object]) -> None:
    """The folder of another side, with its model changed."""
    shutil.copytree(target.parent / base, target, ignore=shutil.ignore_patterns("model.onnx*"))
    change(target.parent / base / "model.onnx", target / "model.onnx")


SIDES: Mapping[str, Side] = {
    "builder fp32": Side("builder fp32", build("fp32")),
    "builder int4": Side("builder int4", build("int4")),
    "fp32": Side("builder fp32", export),
    "fused": Side("builder fp32", fused),
    "int4, in fp32": Side("builder int4", int4("fp32", accuracy_level=1)),
    "int4": Side("builder int4", int4("fp32", accuracy_level=4)),
    "int4, fused": Side("builder int4", int4("fused", accuracy_level=4)),
    "int4, level 4": Side("int4, level 4", int4("fused", accuracy_level=4), "fused"),
    "int4, searched": Side("int4, level 4", searched, "fused"),
}
"""Name → a side; those that others are made of come first."""


def write_model(kind: str, size: str, folder: Path) -> None:
    """A folder of transformers: a random model, and a tokenizer, which the builder asks for."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from htp_export.huggingface import load_model

    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = {
        **SIZES[size],
        **SHAPES.get(kind, {}),
        **special,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    architecture = "llama" if kind == OUTLIERS else kind
    model = load_model(
        architecture, task="text-generation-with-past", random_weights=True, overrides=config
    )
    if kind == OUTLIERS:
        from tests.decoders import teach_with_outliers

        teach_with_outliers(model, KNOWN, scale=2000.0, head=True)
    model.save_pretrained(folder)
    words = models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>")
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **named).save_pretrained(folder)


def run_once(folder: str, prompt: int, tokens: int, repeats: int, known: int) -> Speed:
    """Load a folder in this process, and generate."""
    import numpy as np
    import onnxruntime_genai as genai

    config = genai.Config(folder)
    config.overlay(
        json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": 1}}}})
    )
    model = genai.Model(config)
    ids = np.random.default_rng(0).integers(3, known, prompt).astype(np.int32)
    found: list[tuple[float, float]] = []
    text: tuple[int, ...] = ()
    for repeat in range(repeats + 1):  # the first one warms up
        settings = genai.GeneratorParams(model)
        settings.set_search_options(
            max_length=prompt + tokens + 1, min_length=prompt + tokens + 1, do_sample=False
        )
        generator = genai.Generator(model, settings)
        start = time.process_time()
        generator.append_tokens(ids)
        generator.generate_next_token()
        between = time.process_time()
        for _ in range(tokens):
            generator.generate_next_token()
        end = time.process_time()
        text = tuple(int(token) for token in generator.get_sequence(0)[prompt:])
        if repeat:
            found.append((prompt / (between - start), tokens / (end - between)))
    prefill, decode = zip(*found, strict=True)
    return Speed(statistics.median(prefill), statistics.median(decode), text)


def measured(folder: Path, given: argparse.Namespace, known: int) -> Speed:
    """The same in a process of its own."""
    numbers = [str(number) for number in (given.prompt, given.tokens, given.repeats, known)]
    command = [sys.executable, __file__, "--once", str(folder), *numbers]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{folder}: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Speed(found["prefill"], found["decode"], tuple(found["tokens"]))


def compare(kind: str, folder: Path, given: argparse.Namespace) -> None:
    """Make what is missing of the sides, run all of them, and print a table."""
    source = folder / "transformers"
    if not source.exists():
        write_model(kind, given.size, source)
    needs = {
        name for side in given.sides for name in (side, SIDES[side].reference, SIDES[side].tokens)
    }
    wanted, known = [name for name in SIDES if name in needs], KNOWN if kind == OUTLIERS else 2000
    for name, side in SIDES.items():
        needed = name in wanted or (
            name in ("fp32", "fused") and any("int4" in each for each in given.sides)
        )
        if needed and not (folder / name / "model.onnx").exists():
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).parent.mkdir(exist_ok=True)
            side.make(source, folder / name)
    runs = [*wanted, *(name + CONTROL for name in wanted if SIDES[name].reference == name)]
    rounds: list[dict[str, Speed]] = []
    for number in range(given.rounds):
        order = runs[number % len(runs) :] + runs[: number % len(runs)]
        rounds.append(
            {name: measured(folder / name.removesuffix(CONTROL), given, known) for name in order}
        )
    print(
        f"\n| {kind} | nodes | prefill | decode | prefill beside the reference | decode | tokens equal |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|")
    for name in runs:
        print(row(name, rounds, folder), flush=True)


def row(name: str, rounds: Sequence[Mapping[str, Speed]], folder: Path) -> str:
    """A line of the table."""
    plain = name.removesuffix(CONTROL)
    reference = SIDES[plain].reference
    if reference not in rounds[0]:  # a side that is there for its tokens
        reference = plain
    nodes = len(onnx.load(folder / plain / "model.onnx", load_external_data=False).graph.node)
    cells = [name, str(nodes)]
    cells += [
        f"{statistics.median(getattr(each[name], what) for each in rounds):.1f}"
        for what in ("prefill", "decode")
    ]
    for what in ("prefill", "decode"):
        ratios = [getattr(each[name], what) / getattr(each[reference], what) for each in rounds]
        one = plain == name == reference
        cells.append(
            "1"
            if one
            else f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    same = zip(
        rounds[0][name].tokens, rounds[0][SIDES[plain].tokens or reference].tokens, strict=True
    )
    cells.append(f"{sum(a == b for a, b in same)} of {len(rounds[0][name].tokens)}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=[*SHAPES, OUTLIERS], default=[*SHAPES])
    parser.add_argument("--size", choices=[*SIZES], default="100m")
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=[*SIDES],
        default=[name for name in SIDES if not SIDES[name].tokens],
    )
    parser.add_argument("--prompt", type=int, default=128, help="tokens that are read")
    parser.add_argument("--tokens", type=int, default=48, help="tokens that are generated")
    parser.add_argument("--rounds", type=int, default=5, help="fresh processes of each side")
    parser.add_argument("--repeats", type=int, default=3, help="measured runs in each process")
    parser.add_argument(
        "--folder", type=Path, help="where the files stay; those there are not made again"
    )
    parser.add_argument("--once", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once:
        folder, *numbers = given.once
        speed = run_once(folder, *map(int, numbers))
        print(
            json.dumps({"prefill": speed.prefill, "decode": speed.decode, "tokens": speed.tokens})
        )
        return
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as temporary:
        for kind in given.shapes:
            folder = (given.folder or Path(temporary)) / f"{kind}-{given.size}"
            folder.mkdir(parents=True, exist_ok=True)
            compare(kind, folder, given)


if __name__ == "__main__":
    main()
