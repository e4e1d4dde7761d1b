#!/usr/bin/env python3
"""Record the owners, reasons, calls, fates and signatures after every kind of change, and print how two records differ.

    python tools/owner_golden.py record before.json.gz               # all nets of tests/nets.py, both exporters
    python tools/owner_golden.py record after.json.gz --only lstm    # nets whose name contains the word
    python tools/owner_golden.py compare before.json.gz after.json.gz --show 3
    python tools/owner_golden.py judge before.json.gz after.json.gz  # the oracle of tests/truth.py on what differs

Needed by a maintainer who changes how owners are decided: record before the change and after it. A record holds, for
each net, exporter and operation, the tags of every node and the modules of the model. Nothing is judged by ``compare``:
`judge` repeats the operations that differ, with the code at hand, and counts the modules that are not exact.
"""

from __future__ import annotations

import argparse
import gzip
import json
import logging
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

import htp_export

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.nets import EXPORTERS, NETS
from tests.truth import inexact

Operation = Callable[[Path, Path], object]
"""Writes a changed copy of a file."""


def _without_names(file: Path, output: Path) -> None:
    """Run ONNX Runtime, remove all tags and the names of nodes and tensors, and carry the tags back."""
    plain = output.with_name("plain.onnx")
    htp_export.tools.onnxruntime(file, plain, level="basic")
    model = ir.load(plain)
    ends = {*model.graph.inputs, *model.graph.outputs}
    for number, node in enumerate(model.graph.all_nodes()):
        node.name = f"n{number}"
        node.metadata_props.clear()
        for place, value in enumerate(node.outputs):
            if value not in ends:
                value.name = f"t{number}_{place}"
    model.metadata_props.clear()
    ir.save(model, plain)
    htp_export.carry(file, plain, output)


OPERATIONS: dict[str, Operation] = {
    "optimize exact": lambda file, out: htp_export.optimize(file, out, level="exact"),
    "optimize tolerant": lambda file, out: htp_export.optimize(file, out, level="tolerant"),
    "optimize fused": lambda file, out: htp_export.optimize(file, out, level="fused"),
    "onnxruntime basic": lambda file, out: htp_export.tools.onnxruntime(file, out, level="basic"),
    "onnxruntime extended": lambda file, out: htp_export.tools.onnxruntime(
        file, out, level="extended"
    ),
    "onnxslim": lambda file, out: htp_export.tools.onnxslim(file, out),
    "onnxsim": lambda file, out: htp_export.tools.onnxsim(file, out),
    "onnxoptimizer": lambda file, out: htp_export.tools.onnxoptimizer(file, out),
    "no names": _without_names,
    "quantize int8-weights": lambda file, out: htp_export.quantize(file, "int8-weights", out),
    "quantize int8-dynamic": lambda file, out: htp_export.quantize(file, "int8-dynamic", out),
    "quantize uint8": lambda file, out: htp_export.quantize(file, "uint8", out),
    "quantize fp16": lambda file, out: htp_export.quantize(file, "fp16", out),
    "lora": lambda file, out: htp_export.lora.insert(file, "**", rank=2, output=out),
    "tap": lambda file, out: htp_export.tap(file, "**:out", out),
    "functions": lambda file, out: htp_export.functions(file, ["**"], out),
    "prune": lambda file, out: htp_export.prune(file, {"**": 0.5}, out),
    "rename": lambda file, out: htp_export.rename(file, output=out),
}
_MODULE_FACTS = ("fate", "fused_with", "calls")
_NODE_KEYS = ("htp.owners", "htp.module", "htp.call", "htp.reason")


def record_of(file: Path) -> dict[str, Any]:
    """The tags of all nodes of a file, its modules and their signatures."""
    tagged = htp_export.load(file)
    graphs = [tagged.model.graph, *(function.graph for function in tagged.model.functions.values())]
    nodes = []
    for graph in graphs:
        for node in graph.all_nodes():
            metadata = node.metadata_props
            name = node.outputs[0].name if node.outputs else ""
            nodes.append([node.op_type, name, *(metadata.get(key, "") for key in _NODE_KEYS)])
    modules = {}
    for path in tagged.paths:
        info = tagged.hierarchy[path]
        modules[path] = [str(info.fate), list(info.fused_with), info.calls]
    signatures = {
        path: [[dict(call.inputs), list(call.outputs)] for call in calls]
        for path, calls in tagged.signatures.items()
    }
    return {"nodes": nodes, "modules": modules, "signatures": signatures}


def exports(words: list[str]) -> Iterator[tuple[str, str]]:
    """The nets and exporters whose name contains one of the words; all without words."""
    for name, net in NETS.items():
        for exporter in EXPORTERS:
            if exporter not in net.skip and (not words or any(word in name for word in words)):
                yield name, exporter


def export_to(folder: Path, name: str, exporter: str) -> Path:
    """The file of a net."""
    net = NETS[name]
    model, kwargs = net.build()
    file = folder / "model.onnx"
    options = net.export_options(exporter)
    htp_export.export(
        model, (), file, kwargs=kwargs, dynamo=exporter == "dynamo", verbose=False, **options
    )
    return file


def outcome(operation: Operation, file: Path, output: Path) -> dict[str, Any]:
    """The record of a changed file, or the error."""
    try:
        operation(file, output)
    except htp_export.HtpExportError as error:
        return {"error": f"{type(error).__name__}: {str(error)[:150]}"}
    except Exception:
        return {"error": traceback.format_exc()[-300:]}
    return record_of(output)


def record(target: Path, words: list[str], operations: list[str]) -> None:
    """Write a record of all nets and operations."""
    found: dict[str, Any] = {}
    for name, exporter in exports(words):
        with tempfile.TemporaryDirectory() as folder:
            file = export_to(Path(folder), name, exporter)
            found[f"{name} | {exporter} | export"] = record_of(file)
            for operation in operations:
                output = Path(folder) / "changed.onnx"
                found[f"{name} | {exporter} | {operation}"] = outcome(
                    OPERATIONS[operation], file, output
                )
        print(f"{name} | {exporter}", file=sys.stderr)
    with gzip.open(target, "wt") as stream:
        json.dump(found, stream)
    print(f"{len(found)} cases in {target}")


def read(file: str) -> dict[str, Any]:
    """A record that was written before."""
    with gzip.open(file, "rt") as stream:
        return json.load(stream)


def differences(old: dict[str, Any], new: dict[str, Any]) -> dict[str, list[str]]:
    """What differs in one case: aspect → a line for each difference."""
    if "error" in old or "error" in new:
        same = old.get("error") == new.get("error")
        return {} if same else {"error": [f"{old.get('error')} -> {new.get('error')}"]}
    lines: dict[str, list[str]] = {}
    if [node[0] for node in old["nodes"]] != [node[0] for node in new["nodes"]]:
        lines["graph"] = [f"{len(old['nodes'])} -> {len(new['nodes'])} nodes"]
    else:
        for before, after in zip(old["nodes"], new["nodes"], strict=True):
            for place, aspect in ((2, "owners"), (3, "owners"), (4, "calls"), (5, "reasons")):
                if before[place] != after[place]:
                    line = f"{before[0]} {before[1]!r}: {before[place]!r} -> {after[place]!r}"
                    lines.setdefault(aspect, []).append(line)
    for aspect in ("modules", "signatures"):
        for path in sorted({*old[aspect], *new[aspect]}):
            before, after = old[aspect].get(path), new[aspect].get(path)
            if before != after:
                lines.setdefault(aspect, []).append(f"{path!r}: {before} -> {after}")
    return lines


def compare(old: str, new: str, show: int) -> dict[str, dict[str, list[str]]]:
    """Print what differs between two records; the cases that differ."""
    before, after = read(old), read(new)
    changed: dict[str, dict[str, list[str]]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for case in sorted({*before, *after}):
        if case not in before or case not in after:
            print(f"only in {old if case in before else new}: {case}")
            continue
        lines = differences(before[case], after[case])
        if lines:
            changed[case] = lines
        for aspect in lines:
            counts[case.rpartition(" | ")[2], aspect] += 1
    for case, aspects in changed.items():
        for aspect, lines in aspects.items():
            for line in lines[:show]:
                print(f"{case}: {aspect}: {line}")
    print(f"{len(changed)} of {len(before)} cases differ")
    for (operation, aspect), count in sorted(counts.items()):
        print(f"  {operation}: {aspect} in {count} cases")
    return changed


def judge(changed: dict[str, Any]) -> None:
    """Print how many modules of the cases that differ are not exact with the code at hand."""
    for case in changed:
        name, exporter, operation = case.split(" | ")
        with tempfile.TemporaryDirectory() as folder:
            file = export_to(Path(folder), name, exporter)
            output = Path(folder) / "changed.onnx"
            if operation == "export":
                output = file
            else:
                OPERATIONS[operation](file, output)
            model, kwargs = NETS[name].build()
            faults = inexact(model, kwargs, onnx.load(output))
            print(f"{case}: {len(faults)} not exact {[str(fault) for fault in faults[:3]]}")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=("record", "compare", "judge"))
    parser.add_argument("files", nargs="+")
    parser.add_argument("--only", nargs="*", default=[], help="words in names of nets")
    parser.add_argument("--operations", nargs="*", default=[*OPERATIONS], choices=[*OPERATIONS])
    parser.add_argument(
        "--show", type=int, default=2, help="differences of each case that are printed"
    )
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    if options.action == "record":
        record(Path(options.files[0]), options.only, options.operations)
        return
    changed = compare(options.files[0], options.files[1], options.show)
    if options.action == "judge":
        judge(changed)


if __name__ == "__main__":
    main()
