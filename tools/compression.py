"""What precisions cost and save: bytes of files, latency and error of a model in one precision, by plan, and by NNCF.

Every model is timed in a process of its own beside the original, since ONNX Runtime may crash on one. A row is a
ratio of the original's time, as a median of pairs, in turn which of the two comes first; the control of a row is the
original against another session of itself, in the same process and in the same turns.

    python tools/benchmark.py compress --models bert --trials 20
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import onnx
import onnxruntime
import torch

import htp_export
from htp_export.compress.trade_offs.output_errors import OutputErrors
from htp_export.errors import HtpExportError

UNIFORM = ("int8", "fp16", "int4")
SPACE = ("int8", "int4", "fp16")
WHOLE = "."
SAMPLES = 4

Built = tuple[torch.nn.Module, dict[str, torch.Tensor]]
Feed = dict[str, np.ndarray]


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


def searched_plan(file: Path, samples: list[Feed], trials: int, depth: int | None) -> Mapping[str, object]:
    """The plan of the smallest error among those of a search that are no larger than int8 in the whole model."""
    found = htp_export.search(
        file, SPACE, ("error", "size"), samples, depth=depth, trials=trials, first=max(1, trials // 2)
    )
    sizes = [trial.values["size"] for trial in found.trials if dict(trial.plan) == {WHOLE: "int8"}]
    limit = min(sizes, default=math.inf)
    small = [trial for trial in found.trials if trial.values["size"] <= limit]
    return min(small, key=lambda trial: trial.values["error"]).plan


def by_nncf(file: Path, samples: list[Feed], output: Path) -> None:
    """NNCF's post-training quantization with its defaults, int8."""
    import nncf

    onnx.save(nncf.quantize(onnx.load(file), nncf.Dataset(samples)), output)


def measure(original: Path, other: Path, feeds: Path, pairs: int, runs: int) -> dict[str, object]:
    """Ratios of times, their control, and the error of the outputs."""
    with np.load(feeds) as stored:
        samples: list[Feed] = [{} for _ in range(SAMPLES)]
        for key in stored.files:
            number, _, name = key.partition(":")
            samples[int(number)][name] = stored[key]

    def session(file: Path) -> onnxruntime.InferenceSession:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    def milliseconds(of: onnxruntime.InferenceSession) -> float:
        times = []
        for _ in range(runs):
            start = time.perf_counter()
            of.run(None, samples[0])
            times.append((time.perf_counter() - start) * 1000)
        return statistics.median(times)

    first, same, changed = session(original), session(original), session(other)
    errors, names = OutputErrors(), [value.name for value in first.get_outputs()]
    for feed in samples:
        outputs = (dict(zip(names, each.run(None, feed), strict=True)) for each in (first, changed))
        errors.add(*outputs)
    same.run(None, samples[0])
    ratios: dict[str, list[float]] = {"time": [], "A/A": []}
    for index in range(pairs):
        for what, against in (("time", changed), ("A/A", same)):
            order = (first, against) if index % 2 else (against, first)
            spent = {id(each): milliseconds(each) for each in order}
            ratios[what].append(spent[id(against)] / spent[id(first)])
    return {"ratios": ratios, "error": errors.result().error}


def measured_apart(original: Path, other: Path, feeds: Path, pairs: int, runs: int) -> dict[str, object]:
    """The same in a process of its own.

    Raises:
        RuntimeError: If that process failed.
    """
    command = [sys.executable, __file__, original, other, feeds, "--pairs", str(pairs), "--runs", str(runs)]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(f"ended with status {done.returncode}: {lines[-1] if lines else 'no message'}")
    measured: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return measured


def written_bytes(folder: Path) -> int:
    """Bytes of the files of a model."""
    return sum(path.stat().st_size for path in folder.iterdir())


def run(
    models: Mapping[str, Callable[[], Built]],
    pairs: int,
    runs: int,
    trials: int,
    depth: int | None,
    describe: Callable[[str, list[float]], str],
) -> None:
    """Print a row for each model and each way to make it smaller."""
    for name, make in models.items():
        torch.manual_seed(0)
        model, inputs = make()
        samples = samples_of(inputs)
        with TemporaryDirectory() as folder:
            at = Path(folder)
            feeds = at / "feeds.npz"
            np.savez(
                feeds,
                **{f"{number}:{key}": value for number, feed in enumerate(samples) for key, value in feed.items()},
            )
            original = _folder(at, "fp32") / "model.onnx"
            with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
                htp_export.export(model.eval(), (), original, kwargs=inputs, dynamo=True, verbose=False)
            before = written_bytes(original.parent)
            print(f"{name:10} {'fp32':10} {before:>12,} bytes", flush=True)
            for what, write in _ways(original, samples, trials, depth):
                other = _folder(at, what) / "model.onnx"
                try:
                    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                        write(other)
                    size = written_bytes(other.parent)
                    found = measured_apart(original, other, feeds, pairs, runs)
                except (HtpExportError, ImportError, RuntimeError) as error:
                    print(f"{'':10} {what:10} {str(error).splitlines()[0]}", flush=True)
                    continue
                ratios = found["ratios"]
                assert isinstance(ratios, dict)
                print(f"{'':10} {what:10} {size:>12,} bytes ({size / before:.1%})  error {found['error']:.2e}")
                print(f"{'':22}" + describe("time", ratios["time"]))
                print(f"{'':22}" + describe("A/A ", ratios["A/A"]), flush=True)


def _folder(at: Path, name: str) -> Path:
    (at / name).mkdir()
    return at / name


def _ways(
    original: Path, samples: list[Feed], trials: int, depth: int | None
) -> Iterable[tuple[str, Callable[[Path], object]]]:
    for precision in UNIFORM:
        yield precision, lambda file, plan={WHOLE: precision}: htp_export.quantize(original, plan, file, data=samples)

    def searched(file: Path) -> None:
        htp_export.quantize(original, searched_plan(original, samples, trials, depth), file, data=samples)

    yield "searched", searched
    yield "NNCF int8", lambda file: by_nncf(original, samples, file)


def main() -> None:
    """Measure one model, and print what was found as JSON."""
    parser = argparse.ArgumentParser(
        description="measure one file against another; `tools/benchmark.py compress` runs it"
    )
    for file in ("original", "other", "feeds"):
        parser.add_argument(file, type=Path)
    parser.add_argument("--pairs", type=int, required=True)
    parser.add_argument("--runs", type=int, required=True)
    given = parser.parse_args()
    print(json.dumps(measure(given.original, given.other, given.feeds, given.pairs, given.runs)))


if __name__ == "__main__":
    main()
