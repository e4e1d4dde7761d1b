#!/usr/bin/env python3
"""Comparison of optimisers on the same files: nodes, time, memory, tags, exactness and latency.

    python tools/compare_tools.py                      # every model, both exporters, every tool
    python tools/compare_tools.py --size narrow BERT-base    # the same nodes, small weights
    python tools/compare_tools.py --size small --defaults    # fixed sizes, exported as torch does without arguments
    python tools/compare_tools.py --no-check --tools tolerant onnxslim        # time and memory
    python tools/compare_tools.py --latency --tools tolerant onnxslim

One file is exported for each model and exporter. Each tool reads it and writes its own, in a process of its own; time
is that of the call from file to file, once everything is imported, on the clock and on the processor; memory is by how
much the process grew, as a part of the file. Where OnnxSlim is among the tools, their times are told as parts of its.
"exact" is what ``tests/truth.py`` says of the written file: modules whose regions compute what PyTorch computed.
Latency is paired with the file as it was exported, in turn which of them runs first, beside an A/A control: the same
file twice. Each of a pair is the least of five runs. A latency within the control's spread is no difference.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, os.fspath(Path(__file__).parent.parent))

import onnx

from tools.compare_models import FURTHER, MODELS, SIZES, build, export
from tools.latency import difference, paired, session, timed
from tools.latency import shown as shown_ratio
from tools.peak_memory import own_peak

LEVELS = ("exact", "tolerant", "fused")


def ours(level: str) -> Callable[[str, str], None]:
    from htp_export.capabilities.optimize.optimizing import optimize
    from htp_export.passes import available

    available()

    def run(source: str, target: str) -> None:
        optimize(source, target, level=level)  # type: ignore[arg-type]

    return run


def onnxslim() -> Callable[[str, str], None]:
    import onnxslim

    def run(source: str, target: str) -> None:
        onnx.save(onnxslim.slim(source), target)

    return run


def onnxsim() -> Callable[[str, str], None]:
    import onnxsim

    return lambda source, target: onnx.save(onnxsim.simplify(onnx.load(source))[0], target)


def onnxoptimizer() -> Callable[[str, str], None]:
    import onnxoptimizer

    passes = onnxoptimizer.get_fuse_and_elimination_passes()
    return lambda source, target: onnx.save(
        onnxoptimizer.optimize(onnx.load(source), passes, fixed_point=True), target
    )


def onnxscript() -> Callable[[str, str], None]:
    import onnx_ir as ir
    import onnxscript.optimizer
    import onnxscript.rewriter

    def run(source: str, target: str) -> None:
        model = ir.load(source)
        onnxscript.optimizer.optimize(model)
        ir.save(onnxscript.rewriter.rewrite(model), target)

    return run


def onnxscript_onnxslim() -> Callable[[str, str], None]:
    first, second = onnxscript(), onnxslim()

    def run(source: str, target: str) -> None:
        first(source, target)
        second(target, target)

    return run


def onnxscript_ort() -> Callable[[str, str], None]:
    import onnx_ir as ir
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    return lambda source, target: ir.save(optimize_for_ort(ir.load(source))[0], target)


TOOLS: dict[str, Callable[[], Callable[[str, str], None]]] = {
    **{level: lambda level=level: ours(level) for level in LEVELS},  # type: ignore[misc]
    "onnxslim": onnxslim,
    "onnxsim": onnxsim,
    "onnxoptimizer": onnxoptimizer,
    "onnxscript": onnxscript,
    "onnxscript+onnxslim": onnxscript_onnxslim,
    "onnxscript ORT": onnxscript_ort,
}


def one(tool: str, source: str, target: str) -> dict[str, Any]:
    """Run one tool in this process."""
    import onnxruntime  # noqa: F401 - most tools need it: its import is nobody's time

    run = TOOLS[tool]()
    before, began, worked = own_peak(), time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        run(source, target)
    times = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - worked}
    return {**times, "bytes": own_peak() - before}


def written_by(tool: str, source: str, target: str) -> dict[str, Any]:
    """Run one tool in a process of its own: what it took, and how many nodes it left."""
    command = [sys.executable, __file__, "--one", tool, source, target]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["killed"])[-1][:100]}
    return {**json.loads(done.stdout.splitlines()[-1]), "nodes": len(nodes_of(target))}


def nodes_of(path: str) -> list[onnx.NodeProto]:
    def every(nodes: Any) -> Any:
        for node in nodes:
            yield node
            for attribute in node.attribute:
                for body in (attribute.g, *attribute.graphs):
                    yield from every(body.node)

    return list(every(onnx.load(path, load_external_data=False).graph.node))


def tagged(path: str) -> float:
    found = [
        any(entry.key == "htp.module" for entry in node.metadata_props) for node in nodes_of(path)
    ]
    return sum(found) / len(found)


def runs(path: str, inputs: dict[str, Any]) -> bool:
    import onnxruntime as ort

    try:
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        session.run(
            None, dict(zip([i.name for i in session.get_inputs()], inputs.values(), strict=False))
        )
    except Exception:
        return False
    return True


def compare(
    name: str, exporter: str, tools: list[str], size: str, check: bool, defaults: bool, folder: Path
) -> dict[str, Any]:
    """One model from one exporter through every tool."""
    source = os.fspath(folder / "model.onnx")
    command = [
        sys.executable,
        __file__,
        "--export",
        source,
        "--exporter",
        exporter,
        name,
        "--size",
        size,
    ]
    subprocess.run(
        [*command, *(["--defaults"] if defaults else [])], check=True, capture_output=True
    )
    written = sum(path.stat().st_size for path in folder.iterdir())
    row: dict[str, Any] = {
        "model": name,
        "exporter": exporter,
        "nodes": len(nodes_of(source)),
        "bytes": written,
    }
    for tool in tools:
        target = os.fspath(folder / f"{tool}.onnx")
        row[tool] = written_by(tool, source, target)
        if check and "failed" not in row[tool]:
            model, inputs = build(name, size)
            row[tool]["runs"] = runs(target, {key: value.numpy() for key, value in inputs.items()})
            if tool in LEVELS:
                from tests.truth import inexact

                row[tool]["tagged"] = tagged(target)
                row[tool]["inexact"] = [list(fault) for fault in inexact(model, inputs, target)]
        for path in folder.glob(f"{tool}.onnx*"):
            path.unlink()
    return row


def latency(
    name: str, exporter: str, tools: list[str], size: str, pairs: int, folder: Path
) -> dict[str, Any]:
    """Ratios of processor time to the exported file, with ONNX Runtime's own optimisations on and off."""
    source = os.fspath(folder / "model.onnx")
    _, inputs = export(name, exporter, size, source)
    run = timed({key: value.numpy() for key, value in inputs.items()})
    row: dict[str, Any] = {"model": name, "exporter": exporter, "nodes": len(nodes_of(source))}
    files = {"control": source}
    row["control"] = {"nodes": row["nodes"]}
    for tool in tools:
        target = os.fspath(folder / f"{tool}.onnx")
        row[tool] = written_by(tool, source, target)
        if "failed" not in row[tool]:
            files[tool] = target
    for how in ("on", "off"):
        base = session(source, how == "on")
        for tool, path in files.items():
            try:
                row[tool][how] = paired(run, base, session(path, how == "on"), pairs)
            except Exception as error:  # ONNX Runtime's errors share no base but this
                row[tool]["failed"] = str(error).splitlines()[0][:100]
    return row


def shown_latency(row: dict[str, Any], tools: list[str]) -> str:
    """Lines for a terminal; what lies within the control's spread is said to be no difference."""
    lines = [f"{row['model']}, {row['exporter']}: {row['nodes']} nodes"]
    for tool in ["control", *tools]:
        entry, texts = row[tool], []
        if "failed" in entry:
            lines.append(f"    {tool:20} failed: {entry['failed']}")
            continue
        for how in ("off", "on"):
            said = "" if tool == "control" else difference(entry[how], row["control"][how])
            texts.append(f"{how} {shown_ratio(entry[how])}{said and f'  {said}'}")
        lines.append(f"    {tool:20} {entry['nodes']:>5} nodes, {', '.join(texts)}")
    return "\n".join(lines)


def shown(entry: dict[str, Any], row: dict[str, Any]) -> str:
    if "failed" in entry:
        return f"failed: {entry['failed']}"
    text = str(entry["nodes"]) + ("" if entry.get("runs", True) else " (does not run)")
    if "inexact" in entry:
        text += f" ({entry['tagged']:.0%} tagged, {len(entry['inexact'])} inexact)"
    text += f", {entry['seconds']:.2f} s, {entry['cpu_seconds']:.2f} s of processor"
    if other := times_of(entry, row):
        text += f" ({other[0]:.2f} and {other[1]:.2f} of {_TIMED_BY}'s)"
    return (
        f"{text}, {entry['bytes'] / 1e6:.0f} MB ({entry['bytes'] / row['bytes']:.2f} of the file)"
    )


_TIMED_BY = "onnxslim"


def times_of(entry: dict[str, Any], row: dict[str, Any]) -> tuple[float, float] | None:
    """Time on the clock and on the processor, as parts of OnnxSlim's; None where it did not run."""
    other = row.get(_TIMED_BY, {})
    if entry is other or "seconds" not in entry or "seconds" not in other:
        return None
    return entry["seconds"] / other["seconds"], entry["cpu_seconds"] / other["cpu_seconds"]


def median_times(rows: list[dict[str, Any]], tools: list[str]) -> str:
    """For each tool the median over all files."""
    lines = []
    for tool in tools:
        found = [times for row in rows if (times := times_of(row[tool], row)) is not None]
        if found:
            clock, processor = (statistics.median(column) for column in zip(*found, strict=True))
            lines.append(f"    {tool:20} {clock:.2f}, on the processor {processor:.2f}")
    return (
        "\n".join([f"median time over {len(rows)} files, of {_TIMED_BY}'s:", *lines])
        if lines
        else ""
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=[], help=", ".join((*MODELS, *FURTHER)))
    parser.add_argument("--exporter", choices=["torchscript", "dynamo"])
    parser.add_argument("--tools", nargs="*", default=list(TOOLS))
    parser.add_argument(
        "--size",
        choices=SIZES,
        default="real",
        help="narrow: as deep, small weights; small: two layers",
    )
    parser.add_argument(
        "--defaults",
        action="store_true",
        help="export with fixed sizes, and torch's opset and folding",
    )
    parser.add_argument(
        "--no-check", action="store_true", help="do not hold the written files against PyTorch"
    )
    parser.add_argument("--latency", action="store_true")
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument(
        "--json", type=Path, help="write everything there, one line for each model and exporter"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--export", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    if args.one:
        print(json.dumps(one(args.one, *args.models)))
        return 0
    if args.export:
        export(args.models[0], args.exporter, args.size, args.export, defaults=args.defaults)
        return 0
    tools, rows = [tool for tool in args.tools if tool in TOOLS], list[dict[str, Any]]()
    for name in args.models or MODELS:
        for exporter in [args.exporter] if args.exporter else ["torchscript", "dynamo"]:
            with tempfile.TemporaryDirectory() as folder:
                if args.latency:
                    row = latency(name, exporter, tools, args.size, args.pairs, Path(folder))
                    print(shown_latency(row, tools), flush=True)
                else:
                    row = compare(
                        name,
                        exporter,
                        tools,
                        args.size,
                        not args.no_check,
                        args.defaults,
                        Path(folder),
                    )
                    print(
                        f"{name}, {exporter}: {row['nodes']} nodes, {row['bytes'] / 1e6:.0f} MB",
                        flush=True,
                    )
                    for tool in tools:
                        print(f"    {tool:20} {shown(row[tool], row)}", flush=True)
            rows.append(row)
            if args.json:
                with args.json.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(row) + "\n")
    if not args.latency:
        print(median_times(rows, tools))
    return 0


if __name__ == "__main__":
    sys.exit(main())
