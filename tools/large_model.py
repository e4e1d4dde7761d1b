#!/usr/bin/env python3
"""Time and peak memory of extract, splice and partition on a model of more than 2 GB.

    python tools/large_model.py                  # 2.4 GB of weights in 12 layers, in 4 stages
    python tools/large_model.py extract splice   # these alone
    python tools/large_model.py --gigabytes 4 --stages 8 --folder /scratch

Two peaks of memory are told. *Resident* has the pages of mapped files in it, which the system takes back whenever it
needs them. *Own* is what the process itself holds; it must not grow with the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from peak_memory import PeakOfOwn, own_peak, status

import htp_export
from htp_export.format.hierarchy import Hierarchy, ModuleInfo

LAYERS = 12
LAYER = "layers.5"
STEPS = ("extract", "splice", "functions", "cut", "write", "run")


def write_model(file: Path, gigabytes: float) -> None:
    """A tagged chain of layers, each a square matrix in external data that is written layer by layer."""
    width = int((gigabytes * 1e9 / 4 / LAYERS) ** 0.5)
    nodes, infos, last = (
        [],
        [ModuleInfo("", "net.Net", 1, "computed")],
        ir.val("x", ir.DataType.FLOAT, [1, width]),
    )
    weights, start, offset = [], last, 0
    data = file.with_name(f"{file.name}.data")
    with data.open("wb") as stream:
        for layer in range(LAYERS):
            matrix = np.full((width, width), 1e-3 * (layer + 1) / width, dtype=np.float32)
            stream.write(matrix.data)
            place = {
                "shape": ir.Shape([width, width]),
                "name": f"layers.{layer}.weight",
                "base_dir": file.parent,
            }
            tensor = ir.ExternalTensor(data.name, offset, matrix.nbytes, ir.DataType.FLOAT, **place)
            offset += matrix.nbytes
            weights.append(
                ir.Value(name=tensor.name, const_value=tensor, type=ir.TensorType(tensor.dtype))
            )
            weights[-1].shape = place["shape"]
            said = {"htp.module": f"layers.{layer}", "htp.reason": "scope"}
            result = ir.val(f"h{layer}", ir.DataType.FLOAT, [1, width])
            nodes.append(
                ir.node("MatMul", [last, weights[-1]], outputs=[result], metadata_props=said)
            )
            infos.append(
                ModuleInfo(f"layers.{layer}", "torch.nn.modules.linear.Linear", 1, "computed")
            )
            last = result
    graph = ir.Graph(
        [start], [last], nodes=nodes, initializers=weights, opset_imports={"": 20}, name="Net"
    )
    model = ir.Model(graph, ir_version=10)
    model.metadata_props.update({"htp.version": "1", "htp.modules": Hierarchy(infos).to_json()})
    onnx.save(ir.to_proto(model), file)


def measure(what: str, file: Path, stages: int) -> dict[str, float]:
    """Do one thing in this process; seconds, and peaks in MB above what the process held before."""
    import onnxruntime  # noqa: F401 - loaded before, so that it does not count

    folder = file.parent / "stages"
    before = status("RssAnon")
    with PeakOfOwn() as peak:
        start = time.perf_counter()
        if what == "extract":
            htp_export.extract(file, LAYER, output=folder.with_name("part.onnx"))
        elif what == "splice":
            part = folder.with_name("part.onnx")
            htp_export.splice(
                file, LAYER, part if part.exists() else htp_export.extract(file, LAYER)
            )
        elif what == "functions":
            htp_export.functions(file, "layers.*")
        elif what == "cut":
            htp_export.partition(file, stages)
        elif what == "write":
            htp_export.partition(file, stages, folder)
        else:
            width = htp_export.load_partition(folder).inputs["x"].shape[1]
            htp_export.load_partition(folder).run({"x": np.ones((1, width), np.float32)})
        seconds = time.perf_counter() - start
    return {"seconds": seconds, "own": (peak.own - before) / 1e6, "resident": own_peak() / 1e6}


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", metavar="STEP", default=STEPS, help=", ".join(STEPS))
    parser.add_argument("--gigabytes", type=float, default=2.4)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument(
        "--folder", help="where to write; two and a half times the model has to fit there"
    )
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure(given.measure[0], Path(given.measure[1]), given.stages)))
        return
    if unknown := set(given.what) - set(STEPS):
        parser.error(f"no steps: {', '.join(sorted(unknown))}; there are {', '.join(STEPS)}")
    run(given.what, given.gigabytes, given.stages, given.folder)


def run(
    steps: Sequence[str], gigabytes: float = 2.4, stages: int = 4, place: str | None = None
) -> None:
    """Write the model, and measure each step in a process of its own."""
    folder = Path(tempfile.mkdtemp(dir=place))
    try:
        file = folder / "model.onnx"
        write_model(file, gigabytes)
        size = sum(each.stat().st_size for each in folder.iterdir())
        print(f"{size / 1e9:.2f} GB in {LAYERS} layers, {stages} stages")
        for what in steps:
            command = [
                sys.executable,
                __file__,
                "--stages",
                str(stages),
                "--measure",
                what,
                os.fspath(file),
            ]
            told = json.loads(
                subprocess.run(command, capture_output=True, text=True, check=True).stdout
            )
            print(
                f"{what:9} {told['seconds']:6.2f} s   own {told['own']:7.0f} MB   resident {told['resident']:7.0f} MB"
            )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
