"""Size, latency and error of compressed models: in one precision, by plan, and by NNCF.

A row is one way to make one model smaller. Every row is made, and then measured, in processes of their own, since a
quantizer or ONNX Runtime may crash, or need more memory than there is; a row that failed says why. Rows are appended
to a file as soon as they are there. The same command goes on after the last one; a search also goes on inside.

A time is a ratio of the original's processor time on one thread, as a median of pairs, in turn which of the two comes
first; its control is the original against another session of itself, in the same process and in the same turns.

    python tools/benchmark.py compress --models bert --trials 20 --results compress.jsonl
    python tools/benchmark.py compress --models encoder mlp --ways u8s8 int8-dynamic   # a kind of network each
    python tools/benchmark.py compress --results compress.jsonl --pairs 0   # bytes and errors alone
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch

import htp_export
from htp_export.capabilities.search.output_errors import OutputErrors

SPACE = ("int8", "int4", "fp16")
SEARCHED, NNCF = "searched", "NNCF int8"
WAYS = ("int8", "u8s8", "int8-dynamic", "int8-weights", "fp16", "int4", SEARCHED, NNCF)
WHOLE = "."
SAMPLES = 4
_SHORTEST_MS = 20  # of a half of a pair: small networks take microseconds

Built = tuple[torch.nn.Module, dict[str, torch.Tensor]]
Feed = dict[str, np.ndarray]
Row = dict[str, Any]


def encoder() -> Built:
    """A transformer encoder, BERT of 4 layers and width 512, length 64."""
    from transformers import BertConfig, BertModel

    size = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
    }
    ids = torch.randint(0, 1000, (1, 64))
    return BertModel(BertConfig(**size)), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def conv_net() -> Built:
    """ResNet-18, 224 x 224."""
    from transformers import ResNetConfig, ResNetForImageClassification

    size = {
        "depths": [2, 2, 2, 2],
        "hidden_sizes": [64, 128, 256, 512],
        "layer_type": "basic",
        "embedding_size": 64,
    }
    return ResNetForImageClassification(ResNetConfig(**size)), {
        "pixel_values": torch.randn(1, 3, 224, 224)
    }


def mobile_net() -> Built:
    """MobileNetV2, of convolutions by channel, 224 x 224."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    return MobileNetV2ForImageClassification(MobileNetV2Config()), {
        "pixel_values": torch.randn(1, 3, 224, 224)
    }


def small_conv_net() -> Built:
    """Two convolutions and two products, 28 x 28, as in PyTorch's MNIST example."""
    convolutions = [
        torch.nn.Conv2d(1, 32, 3),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3),
        torch.nn.ReLU(),
    ]
    head = [torch.nn.Linear(9216, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)]
    return torch.nn.Sequential(*convolutions, torch.nn.MaxPool2d(2), torch.nn.Flatten(), *head), {
        "input": torch.randn(1, 1, 28, 28)
    }


def tiny_conv_net() -> Built:
    """Three convolutions of 16 channels, 32 x 32."""
    layers = [
        torch.nn.Conv2d(3, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 16, 3, padding=1),
    ]
    layers += [torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3, padding=1), torch.nn.ReLU()]
    tail = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 10)]
    return torch.nn.Sequential(*layers, *tail), {"input": torch.randn(1, 3, 32, 32)}


def silu_conv_net() -> Built:
    """Five convolutions with SiLU and a sum around each, 64 x 64, as in small detectors."""

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.act = (
                torch.nn.Conv2d(32, 32, 3, padding=1),
                torch.nn.BatchNorm2d(32),
                torch.nn.SiLU(),
            )

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            """A residual."""
            return input + self.act(self.norm(self.conv(input)))

    tail = [torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 10)]
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, stride=2), *(Block() for _ in range(4)), *tail
    ), {"input": torch.randn(1, 3, 64, 64)}


def mlp() -> Built:
    """Four products of width 512, for 16 rows."""
    layers = [layer for _ in range(4) for layer in (torch.nn.Linear(512, 512), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers), {"input": torch.randn(16, 512)}


def lstm() -> Built:
    """An LSTM of two layers, width 256, for 32 steps, and a product."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = (
                torch.nn.LSTM(256, 256, 2, batch_first=True),
                torch.nn.Linear(256, 10),
            )

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            """The last step's scores."""
            return self.head(self.lstm(input)[0][:, -1])

    return Net(), {"input": torch.randn(1, 32, 256)}


KINDS: Mapping[str, Callable[[], Built]] = {
    "encoder": encoder,
    "conv": conv_net,
    "mobile": mobile_net,
    "small-conv": small_conv_net,
    "tiny-conv": tiny_conv_net,
    "silu-conv": silu_conv_net,
    "mlp": mlp,
    "lstm": lstm,
}
"""A network of each kind, with random weights."""


def samples_of(inputs: Mapping[str, torch.Tensor]) -> list[Feed]:
    """Inputs like the given ones: of floats other random numbers, of integers the same in other orders."""
    found = [{name: value.numpy() for name, value in inputs.items()}]
    random = np.random.default_rng(0)
    for _ in range(SAMPLES - 1):
        found.append(
            {
                name: random.standard_normal(value.shape).astype(value.dtype)
                if value.dtype.kind == "f"
                else random.permuted(value, axis=-1)
                for name, value in found[0].items()
            }
        )
    return found


def write_feeds(samples: list[Feed], file: Path) -> None:
    """Keep samples in a file for other processes."""
    np.savez(
        file,
        **{
            f"{number}:{key}": value
            for number, feed in enumerate(samples)
            for key, value in feed.items()
        },
    )


def read_feeds(file: Path) -> list[Feed]:
    """The samples of such a file."""
    samples: list[Feed] = [{} for _ in range(SAMPLES)]
    with np.load(file) as stored:
        for key in stored.files:
            number, _, name = key.partition(":")
            samples[int(number)][name] = stored[key]
    return samples


def searched_plan(
    file: Path, samples: list[Feed], trials: int, depth: int | None, storage: Path | None
) -> Mapping[str, object]:
    """The plan of the smallest error among those of a search that are no larger than int8 in the whole model."""
    found = htp_export.search(
        file,
        SPACE,
        objectives=("error", "size"),
        data=samples,
        depth=depth,
        trials=trials,
        first=max(1, trials // 2),
        storage=storage,
    )
    sizes = [trial.values["size"] for trial in found.trials if dict(trial.plan) == {WHOLE: "int8"}]
    limit = min(sizes, default=math.inf)
    small = [trial for trial in found.trials if trial.values["size"] <= limit]
    return min(small, key=lambda trial: trial.values["error"]).plan


def make(
    original: Path, way: str, output: Path, samples: list[Feed], given: argparse.Namespace
) -> None:
    """Write a model in one of the ways."""
    if way == NNCF:
        import nncf

        onnx.save(nncf.quantize(onnx.load(original), nncf.Dataset(samples)), output)
        return
    plan: Mapping[str, object] = {WHOLE: way}
    if way == SEARCHED:
        plan = searched_plan(original, samples, given.trials, given.depth, given.storage)
    htp_export.quantize(original, plan, output, data=samples)


def measure(original: Path, other: Path, samples: list[Feed], pairs: int, runs: int) -> Row:
    """The error of the outputs; and, with pairs, ratios of times and their control."""

    def session(file: Path) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def milliseconds(of: onnxruntime.InferenceSession) -> float:
        start = time.process_time()
        for _ in range(repeated):
            of.run(None, samples[0])
        return (time.process_time() - start) * 1000 / repeated

    first, changed = session(original), session(other)
    errors, names = OutputErrors(), [value.name for value in first.get_outputs()]
    for feed in samples:
        outputs = (dict(zip(names, each.run(None, feed), strict=True)) for each in (first, changed))
        errors.add(*outputs)
    found: Row = {"error": errors.result().error}
    if not pairs:
        return found
    same = session(original)
    same.run(None, samples[0])
    repeated = 1
    repeated = max(runs, math.ceil(_SHORTEST_MS / milliseconds(first)))
    ratios: dict[str, list[float]] = {"time": [], "A/A": []}
    for index in range(pairs):
        for what, against in (("time", changed), ("A/A", same)):
            order = (first, against) if index % 2 else (against, first)
            spent = {id(each): milliseconds(each) for each in order}
            ratios[what].append(spent[id(against)] / spent[id(first)])
    return {**found, "ratios": ratios}


def apart(step: str, *words: object, show: bool) -> Row:
    """A step in a process of its own; what it printed last, as data.

    Args:
        step: ``make`` or ``measure``.
        words: Its other arguments.
        show: Whether its progress goes to the terminal.

    Raises:
        RuntimeError: If that process failed.
    """
    command = [sys.executable, __file__, step, *map(str, words)]
    shown = show and sys.stderr.isatty()
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=None if shown else subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = (done.stderr or "").strip().splitlines()
        raise RuntimeError(
            f"{step} ended with status {done.returncode}: {lines[-1] if lines else 'no message'}"
        )
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def written_bytes(folder: Path) -> int:
    """Bytes of the files of a model."""
    return sum(path.stat().st_size for path in folder.iterdir())


def read_rows(results: Path | None) -> dict[tuple[str, str], Row]:
    """The rows of earlier runs, by model and way; a line that was cut off does not count."""
    found: dict[tuple[str, str], Row] = {}
    if results is None or not results.exists():
        return found
    for line in results.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError, KeyError):
            row = json.loads(line)
            found[row["model"], row["way"]] = row
    return found


def is_done(row: Row | None, pairs: int) -> bool:
    """Whether a row has what is asked for; one that failed is tried again."""
    return row is not None and "problem" not in row and (not pairs or "ratios" in row)


def run(
    models: Mapping[str, Callable[[], Built]],
    ways: Sequence[str],
    pairs: int,
    runs: int,
    trials: int,
    depth: int | None,
    describe: Callable[[str, list[float]], str],
    results: Path | None = None,
) -> None:
    """Make and print a row for each model and each way to make it smaller, as far as it is not there."""
    rows = read_rows(results)
    for name, build in models.items():
        left = [way for way in ways if not is_done(rows.get((name, way)), pairs)]
        for way in ways:
            if way not in left:
                show_row(rows[name, way], describe)
        if not left:
            continue
        with TemporaryDirectory() as folder:
            at = Path(folder)
            original, feeds = exported(build, at), at / "feeds.npz"
            storage = None if results is None else results.with_suffix(f".{name}.study")
            for way in left:
                print(f"{name} {way} ...", file=sys.stderr, flush=True)
                start = time.perf_counter()
                row = {"model": name, "way": way, "before": written_bytes(original.parent)}
                if way == SEARCHED:
                    row |= {"trials": trials, "depth": depth}
                options = [f"--pairs={pairs}", f"--runs={runs}", f"--trials={trials}"]
                options += [] if depth is None else [f"--depth={depth}"]
                options += [] if storage is None else [f"--storage={storage}"]
                (at / way).mkdir()
                other = at / way / "model.onnx"
                try:
                    apart("make", original, other, feeds, f"--way={way}", *options, show=True)
                    row["bytes"] = written_bytes(other.parent)
                    row |= apart("measure", original, other, feeds, *options, show=False)
                except (RuntimeError, ValueError) as error:
                    row["problem"] = str(error)
                row["seconds"] = round(time.perf_counter() - start, 1)
                for path in (at / way).iterdir():
                    path.unlink()
                if results is not None:
                    with results.open("a", encoding="utf-8") as stream:
                        stream.write(json.dumps(row) + "\n")
                show_row(row, describe)


def exported(build: Callable[[], Built], at: Path) -> Path:
    """Build a model, the same in every run, and write it and its samples into a folder."""
    torch.manual_seed(0)
    model, inputs = build()
    write_feeds(samples_of(inputs), at / "feeds.npz")
    (at / "original").mkdir()
    original = at / "original" / "model.onnx"
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        htp_export.export(model.eval(), (), original, kwargs=inputs, dynamo=True, verbose=False)
    return original


def show_row(row: Row, describe: Callable[[str, list[float]], str]) -> None:
    """Print a row."""
    start = f"{row['model']:10} {row['way']:10}"
    if "problem" in row:
        print(start, row["problem"], flush=True)
        return
    share = row["bytes"] / row["before"]
    print(
        f"{start} {row['bytes']:>12,} of {row['before']:,} bytes ({share:.1%})  error {row['error']:.2e}",
        flush=True,
    )
    for what, values in row.get("ratios", {}).items():
        print(f"{'':22}" + describe(f"{what:4}", values), flush=True)


def main() -> None:
    """Make or measure one model, and print what was found as JSON."""
    parser = argparse.ArgumentParser(
        description="one step of a row; `tools/benchmark.py compress` runs it"
    )
    parser.add_argument("step", choices=["make", "measure"])
    for file in ("original", "other", "feeds"):
        parser.add_argument(file, type=Path)
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--trials", type=int, required=True)
    parser.add_argument("--depth", type=int)
    parser.add_argument("--storage", type=Path)
    given = parser.parse_args()
    samples = read_feeds(given.feeds)
    if given.step == "measure":
        print(json.dumps(measure(given.original, given.other, samples, given.pairs, given.runs)))
        return
    with contextlib.redirect_stdout(io.StringIO()):
        make(given.original, given.way, given.other, samples, given)
    print("{}")


if __name__ == "__main__":
    main()
