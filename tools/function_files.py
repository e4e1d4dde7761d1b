"""Files whose modules are functions against flat ones: size, and processor time to read them and create a session."""

from __future__ import annotations

import contextlib
import gc
import io
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import onnx
import onnxruntime
import torch

import htp_export

LAYERS = {
    "bert": "class:BertLayer",
    "resnet": "class:ResNetBottleNeckLayer",
    "decoder": "class:LlamaDecoderLayer",
}

Make = Callable[[], tuple[torch.nn.Module, dict[str, torch.Tensor]]]


def session(level: onnxruntime.GraphOptimizationLevel) -> Callable[[Path], object]:
    """What creates a session at one level of optimisation."""

    def create(file: Path) -> object:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level, options.log_severity_level = level, 4
        return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    return create


READERS: Mapping[str, Callable[[Path], object]] = {
    "onnx.load": lambda file: onnx.load(file, load_external_data=False),
    "htp_export.load": htp_export.load,
    "session": session(onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL),
    "session, not optimised": session(onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL),
}


def seconds(read: Callable[[Path], object], file: Path) -> float:
    """Processor time of one reading."""
    gc.collect()
    start = time.process_time()
    read(file)
    return time.process_time() - start


def run(models: Mapping[str, Make], exporters: Sequence[str], pairs: int) -> None:
    """Print a table: a line for each file, with times as the median of its ratios to the flat file."""
    print(
        "| model | exporter | functions | nodes | file without weights | "
        + " | ".join(READERS)
        + " |"
    )
    print("|---" * (5 + len(READERS)) + "|")
    for name, make in models.items():
        model, inputs = make()
        for exporter in exporters:
            with tempfile.TemporaryDirectory() as folder:
                _measure(
                    f"{name} | {exporter}",
                    model.eval(),
                    inputs,
                    exporter,
                    LAYERS[name],
                    Path(folder),
                    pairs,
                )


def _measure(
    title: str,
    model: torch.nn.Module,
    inputs: dict[str, torch.Tensor],
    exporter: str,
    layers: str,
    folder: Path,
    pairs: int,
) -> None:
    exported = folder / "exported.onnx"
    with contextlib.redirect_stdout(io.StringIO()):
        htp_export.export(
            model, (), exported, kwargs=inputs, dynamo=exporter == "dynamo", verbose=False
        )
    made = {"none": None, "none, again": None, "layers": layers, "every module": "**"}
    files = {what: folder / f"{what}.onnx" for what in made}
    for what, select in made.items():
        written = (
            htp_export.load(exported)
            if select is None
            else htp_export.functions(exported, select).tagged
        )
        written.save(files[what], external_data=f"{what}.weights")
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for pair in range(pairs + 1):
        for reader, read in READERS.items():
            order = [*files] if pair % 2 else [*reversed(files)]
            times = {what: seconds(read, files[what]) for what in order}
            for what in files if pair else ():  # the first round warms up
                found.setdefault((what, reader), []).append((times[what], times["none"]))
    for what, file in files.items():
        proto = onnx.load(file, load_external_data=False)
        nodes = len(proto.graph.node) + sum(len(function.node) for function in proto.functions)
        cells = [_cell(found[what, reader], alone=what == "none") for reader in READERS]
        size = f"{file.stat().st_size / 1000:,.0f} kB"
        print(
            f"| {title} | {what}: {len(proto.functions)} | {nodes:,} | {size} | "
            + " | ".join(cells)
            + " |",
            flush=True,
        )


def _cell(pairs: list[tuple[float, float]], *, alone: bool) -> str:
    if alone:
        return f"{1000 * statistics.median(mine for mine, _ in pairs):.0f} ms"
    ratios = [mine / flat for mine, flat in pairs]
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
