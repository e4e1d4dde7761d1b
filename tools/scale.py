"""Processor time of every command by size of the graph: synthetic tagged models, wide and deep."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import onnx

import htp_export
from htp_export.format import tags

FEATURES = 8
SIZES = (2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
LEVELS = (330, 1_000)
_STEPS = ("MatMul", "Add", "Relu", "Identity", "Transpose", "Transpose", "Sigmoid", "Mul", "Neg")


class _Builder:
    """Makes a tagged model, node by node."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.modules: dict[str, dict[str, object]] = {}
        self._tags: dict[str, dict[str, str]] = {}

    def module(self, path: str, kind: str) -> None:
        self.modules[path] = {"class": f"net.{kind}", "calls": 1, "fate": "computed"}

    def weight(self, name: str, shape: Sequence[int]) -> str:
        values = [float(len(self.weights) % 7 + place) for place in range(math.prod(shape))]
        self.weights.append(onnx.helper.make_tensor(name, onnx.TensorProto.FLOAT, shape, values))
        return name

    def node(self, op: str, inputs: Sequence[str], path: str) -> str:
        name = f"v{len(self.nodes)}"
        node = onnx.helper.make_node(op, inputs, [name], f"node_{name}")
        if op == "Transpose":
            node.attribute.append(onnx.helper.make_attribute("perm", [0, 2, 1]))
        if path not in self._tags:  # the modules above it are there already
            self._tags[path] = tags.node_tags([path], "scope", self.modules)
        onnx.helper.set_metadata_props(node, self._tags[path])
        self.nodes.append(node)
        return name

    def model(self, last: str) -> onnx.ModelProto:
        shape = ["batch", 16, FEATURES]
        ends = [
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
            for name in ("x", last)
        ]
        graph = onnx.helper.make_graph(self.nodes, "Net", ends[:1], ends[1:], self.weights)
        model = onnx.helper.make_model(
            graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10
        )
        onnx.helper.set_model_props(
            model, {"htp.version": "1", "htp.modules": json.dumps(self.modules)}
        )
        return model


def wide(size: int) -> onnx.ModelProto:
    """Layers of 20 nodes one after another, each with two modules in it and work that optimisers take out."""
    built = _Builder()
    built.module("", "Net")
    built.module("model", "Model")
    last = "x"
    for layer in range(size // 20):
        path, skip = f"model.layers.{layer}", last
        built.module(path, "Layer")
        for name in ("first", "second"):
            inside = f"{path}.{name}"
            built.module(inside, "Block")
            matrix = built.weight(f"{inside}.weight", [FEATURES, FEATURES])
            bias = built.weight(f"{inside}.bias", [FEATURES])
            for op in _STEPS:
                given = {"MatMul": [last, matrix], "Add": [last, bias], "Mul": [last, skip]}.get(
                    op, [last]
                )
                last = built.node(op, given, inside)
        last = built.node("Neg", [built.node("Add", [last, skip], path)], path)
    return built.model(last)


def deep(levels: int) -> onnx.ModelProto:
    """Two towers of modules nested in one another; each computes something before and after the one in it."""
    built = _Builder()
    built.module("", "Net")
    last = "x"
    for tower in ("a", "b"):
        paths = [".".join([tower, *["m"] * level]) for level in range(levels)]
        skips = []
        for path in paths:
            built.module(path, "Level")
            skips.append(last)
            last = built.node("Add", [last, built.weight(f"{path}.bias", [FEATURES])], path)
        for path, skip in zip(reversed(paths), reversed(skips), strict=True):
            last = built.node("Add", [built.node("Tanh", [last], path), skip], path)
    return built.model(last)


def commands(folder: Path, module: str) -> dict[str, Callable[[], object]]:
    """Name of a command → what runs it on ``model.onnx`` of a folder; later ones read what earlier ones wrote."""
    file, made = folder / "model.onnx", folder / "made.onnx"
    steps: dict[str, Callable[[], object]] = {
        "load": lambda: htp_export.load(file),
        "tree": lambda: _command("tree", file),
        "tree --json": lambda: _command("tree", file, "--json"),
        "cost": lambda: _command("cost", file, "--dims", "batch=1"),
        "forensics": lambda: _command("forensics", file),
        "fingerprint": lambda: _command("fingerprint", file),
        "diff": lambda: _command("diff", file, file),
        "extract": lambda: _command("extract", file, module, "-o", folder / "part.onnx"),
        "splice": lambda: _command("splice", file, module, folder / "part.onnx", "-o", made),
        "functions": lambda: _command("functions", file, "**", "-o", folder / "nested.onnx"),
        "functions --undo": lambda: _command(
            "functions", folder / "nested.onnx", "--undo", "-o", made
        ),
        "partition": lambda: _command("partition", file, "2", "-o", folder / "stages"),
        "carry": lambda: _command("carry", file, folder / "untagged.onnx", "-o", made),
        "view": lambda: _command("view", file, "-o", folder / "page.html"),
    }
    for precision in ("fp16", "int4", "int8-weights", "int8-dynamic"):
        steps[f"quantize {precision}"] = lambda precision=precision: _command(
            "quantize", file, precision, "-o", made
        )
    for level in ("exact", "tolerant", "fused"):
        steps[f"optimize --level {level}"] = lambda level=level: _command(
            "optimize", file, "-o", made, "--level", level
        )
    return steps


def _command(*arguments: object) -> None:
    """Run a command of the command line here, without what it prints."""
    from htp_export.command.main import main

    with tempfile.TemporaryFile("w") as said, contextlib.redirect_stdout(said):
        status = main([*map(str, arguments), "--debug"])
    if status:
        raise RuntimeError(f"{arguments[0]} ended with status {status}")


def measure(shape: str, size: int, only: Sequence[str]) -> dict[str, float | str]:
    """Seconds of the processor that each command takes on one model; its error where it fails.

    Each runs in a fork of its own: where the objects of an earlier command lay, those of a later one lie scattered, and
    it took 1.5 to 1.7 times as long.
    """
    import onnxruntime  # noqa: F401
    import onnxscript.rewriter.ort_fusions  # noqa: F401 - commands that use them would each import them

    import htp_export.command.main  # noqa: F401

    found: dict[str, float | str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = wide(size) if shape == "wide" else deep(size)
        module = "model.layers.1" if shape == "wide" else ".".join(["a", *["m"] * (size // 2)])
        onnx.save(model, folder / "model.onnx")
        for node in model.graph.node:
            del node.metadata_props[:]
        onnx.save(model, folder / "untagged.onnx")
        del model
        gc.collect()
        gc.freeze()
        for command, run in commands(folder, module).items():
            if not only or command in only:
                found[command] = _measured(run)
                print(f"{shape} {size:,}: {command}: {found[command]}", file=sys.stderr, flush=True)
    return found


def _measured(run: Callable[[], object]) -> float | str:
    """Seconds of the processor, or the error."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        began, said = time.process_time(), ""
        try:
            run()
        except BaseException as error:  # a line of the table
            said = f"{type(error).__name__}: {error}"
        os.write(writing, json.dumps(said[:500] or time.process_time() - began).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    result: float | str = json.loads(
        said or json.dumps(f"ended with {os.waitstatus_to_exitcode(status)}")
    )
    return result


def exponent(seconds: Mapping[int, float]) -> float:
    """The slope of log time over log size, by least squares.

    >>> round(exponent({10: 2.0, 100: 20.0}), 6)
    1.0
    """
    points = [(math.log(size), math.log(max(spent, 1e-4))) for size, spent in seconds.items()]
    mean_x, mean_y = (sum(point[axis] for point in points) / len(points) for axis in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def run(sizes: Sequence[int], levels: Sequence[int], only: Sequence[str]) -> None:
    """Print the tables, a process for each model."""
    for shape, counts in (("wide", sizes), ("deep", levels)):
        found: dict[int, dict[str, float | str]] = {}
        for count in counts:
            command = [sys.executable, str(Path(__file__).resolve()), shape, str(count), *only]
            found[count] = json.loads(
                subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
            )
        if not found:
            continue
        print(f"{shape}: " + ", ".join(f"{count:,}" for count in found))
        for command in next(iter(found.values())):
            cells = {
                count: spent
                for count, each in found.items()
                if isinstance(spent := each[command], float)
            }
            faults = [
                f"{count}: {each[command]}"
                for count, each in found.items()
                if isinstance(each[command], str)
            ]
            times = "  ".join(f"{spent:7.2f}" for spent in cells.values())
            slope = f"n^{exponent(cells):.2f}" if len(cells) > 1 else ""
            print(f"  {command:24} {times}  {slope} {'; '.join(faults)[:200]}", flush=True)


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), sys.argv[3:])))
