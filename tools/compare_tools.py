#!/usr/bin/env python3
"""What optimisers make of the same files: nodes, time, memory, tags, exactness; and latency.

    python tools/compare_tools.py                      # every model, both exporters, every tool
    python tools/compare_tools.py --size narrow BERT-base    # the same nodes, small weights
    python tools/compare_tools.py --latency --tools tolerant onnxslim

One file is exported for each model and exporter. Each tool reads it and writes its own, in a process of its own; time
is that of the call from file to file, once everything is imported, and memory is by how much the process grew.
"exact" is what ``tests/truth.py`` says of the written file: modules whose regions compute what PyTorch computed.
Latency is paired with the file as it was exported, in turn which of them runs first, beside an A/A control.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import resource
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

from tools.compare_models import MODELS, SIZES, build, export

LEVELS = ("exact", "tolerant", "fused")


def ours(level: str) -> Callable[[str, str], None]:
    from htp_export.passes import available
    from htp_export.passes.optimizing import optimize

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
    return lambda source, target: onnx.save(onnxoptimizer.optimize(onnx.load(source), passes, fixed_point=True), target)


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


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def one(tool: str, source: str, target: str) -> dict[str, Any]:
    """Run one tool in this process."""
    import onnxruntime  # noqa: F401 - most tools need it: its import is nobody's time

    run = TOOLS[tool]()
    before, began = peak(), time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        run(source, target)
    return {"seconds": time.perf_counter() - began, "bytes": peak() - before}


def nodes_of(path: str) -> list[onnx.NodeProto]:
    def every(nodes: Any) -> Any:
        for node in nodes:
            yield node
            for attribute in node.attribute:
                for body in (attribute.g, *attribute.graphs):
                    yield from every(body.node)

    return list(every(onnx.load(path, load_external_data=False).graph.node))


def tagged(path: str) -> float:
    found = [any(entry.key == "htp.module" for entry in node.metadata_props) for node in nodes_of(path)]
    return sum(found) / len(found)


def runs(path: str, inputs: dict[str, Any]) -> bool:
    import onnxruntime as ort

    try:
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
        session.run(None, dict(zip([i.name for i in session.get_inputs()], inputs.values(), strict=False)))
    except Exception:
        return False
    return True


def compare(name: str, exporter: str, tools: list[str], size: str, check: bool, folder: Path) -> dict[str, Any]:
    """One model from one exporter through every tool."""
    source = os.fspath(folder / "model.onnx")
    command = [sys.executable, __file__, "--export", source, "--exporter", exporter, name]
    subprocess.run([*command, "--size", size], check=True, capture_output=True)
    written = sum(path.stat().st_size for path in folder.iterdir())
    row: dict[str, Any] = {"model": name, "exporter": exporter, "nodes": len(nodes_of(source)), "bytes": written}
    for tool in tools:
        target = os.fspath(folder / f"{tool}.onnx")
        done = subprocess.run(
            [sys.executable, __file__, "--one", tool, source, target], check=False, capture_output=True, text=True
        )
        if done.returncode:
            row[tool] = {"failed": done.stderr.strip().splitlines()[-1][:100]}
            continue
        row[tool] = {**json.loads(done.stdout.splitlines()[-1]), "nodes": len(nodes_of(target))}
        if check:
            model, inputs = build(name, size)
            row[tool]["runs"] = runs(target, {key: value.numpy() for key, value in inputs.items()})
            if tool in LEVELS:
                from tests.truth import inexact

                row[tool]["tagged"] = tagged(target)
                row[tool]["inexact"] = [list(fault) for fault in inexact(model, inputs, target)]
        for path in folder.glob(f"{tool}.onnx*"):
            path.unlink()
    return row


def latency(name: str, exporter: str, tools: list[str], size: str, pairs: int, folder: Path) -> dict[str, Any]:
    """Median ratios to the exported file, with ONNX Runtime's own optimisations on and off."""
    import onnxruntime as ort

    source = os.fspath(folder / "model.onnx")
    _, inputs = export(name, exporter, size, source)
    feeds = {key: value.numpy() for key, value in inputs.items()}

    def timed(session: Any) -> float:
        began = time.perf_counter()
        session.run(None, feeds)
        return time.perf_counter() - began

    row: dict[str, Any] = {"model": name, "exporter": exporter}
    for how, setting in (
        ("on", ort.GraphOptimizationLevel.ORT_ENABLE_ALL),
        ("off", ort.GraphOptimizationLevel.ORT_DISABLE_ALL),
    ):

        def session(path: str, setting: Any = setting) -> Any:
            options = ort.SessionOptions()
            options.graph_optimization_level, options.intra_op_num_threads, options.log_severity_level = setting, 1, 4
            return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])

        base = session(source)
        for tool in ["control", *tools]:
            target = os.fspath(folder / f"{tool}.onnx")
            if tool != "control" and not Path(target).exists():
                one(tool, source, target)
            other = session(source if tool == "control" else target)
            ratios = []
            for pair in range(pairs + 2):
                order = (base, other) if pair % 2 else (other, base)
                spent = {id(each): timed(each) for each in order}
                ratios.append(spent[id(other)] / spent[id(base)])
            kept = sorted(ratios[2:])
            spread = (kept[len(kept) // 10], kept[-1 - len(kept) // 10])
            entry = row.setdefault(tool, {"nodes": len(nodes_of(source if tool == "control" else target))})
            entry[how] = {"median": statistics.median(kept), "spread": spread}
    return row


def shown(entry: dict[str, Any]) -> str:
    if "failed" in entry:
        return "failed"
    text = str(entry["nodes"]) + ("" if entry.get("runs", True) else " (does not run)")
    if "inexact" in entry:
        text += f" ({entry['tagged']:.0%} tagged, {len(entry['inexact'])} inexact)"
    return f"{text}, {entry['seconds']:.2f} s, {entry['bytes'] / 1e6:.0f} MB"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=[], help=", ".join(MODELS))
    parser.add_argument("--exporter", choices=["torchscript", "dynamo"])
    parser.add_argument("--tools", nargs="*", default=list(TOOLS))
    parser.add_argument(
        "--size", choices=SIZES, default="real", help="narrow: as deep, small weights; small: two layers"
    )
    parser.add_argument("--no-check", action="store_true", help="do not hold the written files against PyTorch")
    parser.add_argument("--latency", action="store_true")
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--json", type=Path, help="write everything there, one line for each model and exporter")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--export", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    if args.one:
        print(json.dumps(one(args.one, *args.models)))
        return 0
    if args.export:
        export(args.models[0], args.exporter, args.size, args.export)
        return 0
    for name in args.models or MODELS:
        for exporter in [args.exporter] if args.exporter else ["torchscript", "dynamo"]:
            with tempfile.TemporaryDirectory() as folder:
                if args.latency:
                    tools = [tool for tool in args.tools if tool in TOOLS]
                    row = latency(name, exporter, tools, args.size, args.pairs, Path(folder))
                    print(json.dumps(row), flush=True)
                else:
                    row = compare(name, exporter, args.tools, args.size, not args.no_check, Path(folder))
                    print(f"{name}, {exporter}: {row['nodes']} nodes, {row['bytes'] / 1e6:.0f} MB", flush=True)
                    for tool in args.tools:
                        print(f"    {tool:20} {shown(row[tool])}", flush=True)
            if args.json:
                with args.json.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
