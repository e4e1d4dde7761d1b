#!/usr/bin/env python3
"""Time and memory of exports with tags, of repair on a large graph, and of the other capabilities.

    python tools/benchmark.py export           # paired against torch.onnx.export, in one process
    python tools/benchmark.py export --models bert --exporter torchscript --pairs 9
    python tools/benchmark.py export --models linear modules vit resnet llama swin t5 --pairs 3   # many small modules
    python tools/benchmark.py export --models modules100 modules modules5000   # how the ratio grows
    python tools/benchmark.py export --fresh --models modules --exporter torchscript   # a process for each export
    python tools/benchmark.py repair           # owners and fates of a synthetic graph of 50,000 nodes
    python tools/benchmark.py run              # verify, extract and profile, against PyTorch and ONNX Runtime alone
    python tools/benchmark.py bind             # new weights in the file of BERT-base, against an export of them
    python tools/benchmark.py fused --pairs 21 # files after `optimize --level fused`, against those before
    python tools/benchmark.py functions        # files with modules as functions, against flat ones
    python tools/benchmark.py compress --models bert --trials 20   # bytes, time and error of precisions and of a search
    python tools/benchmark.py scale --sizes 2000 10000 --levels 330   # how each command grows with the graph

Decoders in ONNX Runtime GenAI: tools/decoder_speed.py.

Every ratio is a median of pairs that ran one after the other in one process, in turn which of the two comes first,
and stands beside an A/A control: torch's exporter against itself, paired in the same way. A ratio inside the
control's spread says nothing. `export` compares processor time, so that other programs of a busy machine do not count,
and says in which steps of ours the time goes.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import itertools
import json
import logging
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import compare_models
import compression
import export_models
import function_files
import fused_level
import large_model
import onnx
import scale
import torch
from peak_memory import own_peak

import htp_export
from htp_export.format import tags


def bert() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """BERT-base, length 16."""
    from transformers import BertConfig, BertModel

    ids = torch.randint(0, 1000, (1, 16))
    return BertModel(BertConfig()), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def resnet() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """ResNet-50, 224 x 224."""
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig()), {
        "pixel_values": torch.randn(1, 3, 224, 224)
    }


def decoder() -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    """A decoder of 24 layers, width 256, length 16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
    }
    config = LlamaConfig(**size, vocab_size=8000, use_cache=False)
    ids = torch.randint(0, 1000, (1, 16))
    return LlamaForCausalLM(config), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


MODELS = {"bert": bert, "resnet": resnet, "decoder": decoder}
EXPORTED = {**MODELS, **export_models.MODELS}
_STEPS = 6  # steps of ours that are printed, the longest ones


class KeywordTensors(torch.nn.Module):
    """Calls a model by keyword, as plain TorchScript export of transformers models needs; both sides export this."""

    def __init__(self, model: torch.nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The model's output tensors."""
        return tuple(self.model(**dict(zip(self.names, tensors, strict=True))).values())


Inputs = dict[str, torch.Tensor]


def once(
    export: Callable[..., object], model: torch.nn.Module, inputs: Inputs, exporter: str
) -> float:
    """Processor seconds of one export into a fresh folder."""
    with tempfile.TemporaryDirectory() as folder:
        gc.collect()
        start = time.process_time()
        write(export, model, inputs, exporter, f"{folder}/model.onnx")
        return time.process_time() - start


def write(
    export: Callable[..., object], model: torch.nn.Module, inputs: Inputs, exporter: str, file: str
) -> None:
    """Export into a file."""
    if exporter == "dynamo":
        export(model, (), file, kwargs=inputs, dynamo=True, verbose=False)
    else:
        export(model, tuple(inputs.values()), file, dynamo=False)


def exported(name: str, exporter: str) -> tuple[torch.nn.Module, Inputs]:
    """A model with random weights and its inputs, as both sides export it."""
    torch.manual_seed(0)
    model, inputs = EXPORTED[name]()
    # modules of torch itself have positional arguments, and results that are tensors
    if exporter == "torchscript" and hasattr(model, "config"):
        model = KeywordTensors(model, list(inputs))
    return model.eval(), inputs


def steps_of(model: torch.nn.Module, inputs: Inputs, exporter: str) -> str:
    """One line: processor time of our steps in one export, the longest ones by name, with how often each runs."""
    with export_models.measured_steps() as spent:
        whole = once(htp_export.export, model, inputs, exporter)
    ours = sum(seconds for seconds, _ in spent.values())
    longest = sorted(spent.items(), key=lambda item: -item[1].seconds)[:_STEPS]
    texts = [f"{name} {step.seconds:.3f} s ({step.times:,})" for name, step in longest]
    return f"own steps {ours:.3f} of {whole:.2f} s: {'; '.join(texts)}"


def ratios(
    first: Callable[..., object], second: Callable[..., object], pairs: int, **what: object
) -> list[float]:
    """Time of ``first`` over time of ``second``, pair by pair."""
    found = []
    for index in range(pairs):
        order = (first, second) if index % 2 else (second, first)
        seconds = (
            {export: once(export, **what) for export in order} if first is not second else None
        )  # type: ignore[arg-type]
        if seconds is None:
            pair = [once(first, **what), once(first, **what)]  # type: ignore[arg-type]
            found.append(pair[index % 2] / pair[1 - index % 2])
        else:
            found.append(seconds[first] / seconds[second])
    return found


def describe(name: str, values: list[float]) -> str:
    """One line: median and spread."""
    return f"{name} median {statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def metadata(model: torch.nn.Module, inputs: Inputs, exporter: str) -> tuple[float, float]:
    """Bytes of metadata that we write, per node: on the nodes, and on the model."""
    with tempfile.TemporaryDirectory() as folder:
        write(htp_export.export, model, inputs, exporter, f"{folder}/model.onnx")
        written = onnx.load(f"{folder}/model.onnx", load_external_data=False)
    ours = [
        sum(
            entry.ByteSize()
            for entry in entries
            if entry.key in (*tags.NODE_KEYS, tags.SOURCE, *tags.MODEL_KEYS)
        )
        for entries in (
            *(node.metadata_props for node in written.graph.node),
            written.metadata_props,
        )
    ]
    nodes = len(written.graph.node)
    return sum(ours[:-1]) / nodes, ours[-1] / nodes


def alone(what: str, side: str, name: str, exporter: str) -> float:
    """One number of an export in a process of its own: its peak ``memory`` in bytes, or its ``seconds``."""
    options = ["--models", name, "--exporter", exporter, "--side", side]
    command = [sys.executable, __file__, what, *options]
    return float(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
    )


def run_fresh(names: list[str], exporters: list[str], pairs: int) -> None:
    """Processor time of exports in processes of their own, each after one to warm up, and an A/A control."""
    sides = {"ours": "ours", "torch": "torch", "again": "torch"}
    for name, exporter in itertools.product(names, exporters):
        ours, control, theirs = list[float](), list[float](), list[float]()
        for index in range(pairs):
            order = [*sides] if index % 2 else [*reversed(sides)]
            spent = {key: alone("seconds", sides[key], name, exporter) for key in order}
            ours.append(spent["ours"] / spent["torch"])
            control.append(spent["again"] / spent["torch"])
            theirs.append(spent["torch"])
        row = f"{name:11} {exporter:12} torch {statistics.median(theirs):.3f} s  "
        print(row + describe("time", ours), describe("  A/A", control), flush=True)


def run_export(names: list[str], exporters: list[str], pairs: int, runs_for_memory: int) -> None:
    """Time and memory, paired."""
    for name in names:
        for exporter in exporters:
            model, inputs = exported(name, exporter)
            what = {"model": model, "inputs": inputs, "exporter": exporter}
            with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
                once(torch.onnx.export, **what)  # type: ignore[arg-type]
                once(htp_export.export, **what)  # type: ignore[arg-type]
                ours = ratios(htp_export.export, torch.onnx.export, pairs, **what)
                control = ratios(torch.onnx.export, torch.onnx.export, pairs, **what)
                seconds = once(torch.onnx.export, **what)  # type: ignore[arg-type]
                on_nodes, on_model = metadata(model, inputs, exporter)
                steps = steps_of(model, inputs, exporter)
            used = [
                alone("memory", "ours", name, exporter) / alone("memory", "torch", name, exporter)
                for _ in range(runs_for_memory)
            ]
            print(
                f"{name:11} {exporter:12} torch {seconds:5.2f} s  " + describe("time", ours),
                flush=True,
            )
            print(f"{'':40}" + describe("A/A ", control))
            if used:
                print(f"{'':40}" + describe("peak memory", used))
            print(f"{'':40}metadata {on_nodes:.0f} bytes a node, and {on_model:.0f} on the model")
            print(f"{'':40}{steps}", flush=True)


def run_seconds(name: str, exporter: str, side: str) -> None:
    """Processor seconds of an export, after one to warm up."""
    model, inputs = exported(name, exporter)
    export = htp_export.export if side == "ours" else torch.onnx.export
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        once(export, model, inputs, exporter)
        seconds = once(export, model, inputs, exporter)
    print(seconds)


def run_memory(name: str, exporter: str, side: str) -> None:
    """Peak resident memory of this process, in bytes, after one export."""
    model, inputs = exported(name, exporter)
    export = htp_export.export if side == "ours" else torch.onnx.export
    tiny = torch.nn.Linear(2, 2).eval()
    with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
        once(export, tiny, {"input": torch.randn(1, 2)}, exporter)
        once(export, model, inputs, exporter)
    print(own_peak())


def run_repair(size: int) -> None:
    """Owners and fates of a synthetic graph: layers that share work and are fused at their borders."""
    from htp_export.exporter.capture.calls import CallLog, Node, Operation, Record
    from htp_export.exporter.write_tags import make_tags
    from htp_export.format.hierarchy import Hierarchy, ModuleInfo

    log = CallLog()
    root = log.enter("")
    record, infos, last = (
        Record(log, inputs={"x", "mask"}, graph_inputs={"x", "mask"}),
        [ModuleInfo("", "Net")],
        "x",
    )
    record.final.update(x="x", mask="mask")
    for layer in range(size // 50):
        outer = log.add(f"layers.{layer}", root)
        infos.append(ModuleInfo(f"layers.{layer}", "Layer"))
        for step in range(50):
            if step % 10 == 0:
                call = log.add(f"layers.{layer}.part{step // 10}", outer)
                infos.append(ModuleInfo(f"layers.{layer}.part{step // 10}", "Part"))
            made = f"v{layer}_{step}"
            record.operations.append(
                Operation(call, (last, "shared") if step == 5 else (last,), (made,))
            )
            if step == 9:  # absorbed by the next
                last, kept = made, last
                continue
            record.final[made] = made
            record.nodes.append(Node((kept if step == 10 else last,), (made,)))
            last = made
    record.outputs, record.graph_outputs = [last], {last}
    start = time.perf_counter()
    tags = make_tags(record, Hierarchy(infos))
    of_nodes = list(tags.of_nodes())
    spent = time.perf_counter() - start
    written = sum(
        len(key) + len(value) for entry in of_nodes for key, value in entry.items()
    ) / len(of_nodes)
    print(
        f"{len(record.nodes)} nodes, {len(infos)} modules: {spent:.2f} s; {written:.0f} bytes of metadata a node"
    )


def profile_alone(file: str, feed: dict[str, object], runs: int) -> tuple[float, float]:
    """Seconds of ONNX Runtime's own profiler: load, warm up, run, read its trace, and run without it; and of a run."""
    import onnxruntime

    start, times = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.enable_profiling, options.profile_file_prefix = True, f"{folder}/profile"
        session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        for _ in range(3 + runs):
            began = time.perf_counter()
            session.run(None, feed)
            times.append(time.perf_counter() - began)
        json.loads(Path(session.end_profiling()).read_text())
        for _ in range(runs):
            session.run(None, feed)
    return time.perf_counter() - start, statistics.median(times[3:])


def profile_by_module(file: str, feed: dict[str, object], runs: int) -> tuple[float, float]:
    """The same of ``htp_export.profile``, which does the same and says which module it was."""
    start = time.perf_counter()
    result = htp_export.profile(file, feed, runs=runs)
    return time.perf_counter() - start, result.profiled_ms / 1000


def run_profile(name: str, pairs: int, runs: int = 20) -> None:
    """``profile`` against ONNX Runtime's profiler, paired, and against itself."""
    model, inputs = MODELS[name]()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        file = f"{folder}/model.onnx"
        with contextlib.redirect_stdout(io.StringIO()):
            htp_export.export(model.eval(), (), file, kwargs=inputs, dynamo=True, verbose=False)
        feed: dict[str, object] = {key: value.numpy() for key, value in inputs.items()}
        profile_by_module(file, feed, 1)
        ours: list[tuple[float, float]] = []
        control: list[tuple[float, float]] = []
        seconds = []
        for index in range(pairs):
            order = (
                (profile_alone, profile_by_module)
                if index % 2
                else (profile_by_module, profile_alone)
            )
            spent = {measure: measure(file, feed, runs) for measure in order}
            seconds.append(spent[profile_alone][0])
            ours.append(quotients(spent[profile_by_module], spent[profile_alone]))
            pair = [profile_alone(file, feed, runs), profile_alone(file, feed, runs)]
            control.append(quotients(pair[index % 2], pair[1 - index % 2]))
    print(f"{name:8} profile      ONNX Runtime {statistics.median(seconds):5.2f} s")
    for place, what in enumerate(("the whole", "a run under the profiler")):
        print(f"{'':21}{what:24} " + describe("time", [each[place] for each in ours]))
        print(f"{'':46}" + describe("A/A ", [each[place] for each in control]), flush=True)


def quotients(some: tuple[float, float], others: tuple[float, float]) -> tuple[float, float]:
    """Each number as a part of the other's."""
    return some[0] / others[0], some[1] / others[1]


def unit_of_verify(model: torch.nn.Module, inputs: Inputs, file: str) -> float:
    """Seconds of one PyTorch forward, and of one ONNX Runtime session that is made and run."""
    import onnxruntime

    gc.collect()
    start = time.perf_counter()
    with torch.no_grad():
        model(**inputs)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    session.run(None, {name: value.numpy() for name, value in inputs.items()})
    return time.perf_counter() - start


def run_verify(name: str, pairs: int) -> None:
    """``verify`` in units of one forward and one session, paired; the control is the unit against itself."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.eval()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        file = f"{folder}/model.onnx"
        with contextlib.redirect_stdout(io.StringIO()):
            htp_export.export(model, (), file, kwargs=inputs, dynamo=True, verbose=False)

        def unit() -> float:
            return unit_of_verify(model, inputs, file)

        def whole(isolated: bool = False) -> float:
            gc.collect()
            start = time.perf_counter()
            result = htp_export.verify(model, file, kwargs=inputs, isolated=isolated)
            if not result.ok:
                raise SystemExit(f"{name}: {result.summary}")
            return time.perf_counter() - start

        unit(), whole()  # warm
        found: dict[str, list[float]] = {"whole": [], "isolated": [], "A/A": []}
        units = []
        for _ in range(pairs):
            for what, measure in (
                ("whole", whole),
                ("isolated", lambda: whole(isolated=True)),
                ("A/A", unit),
            ):
                units.append(unit())
                found[what].append(measure() / units[-1])
    print(f"{name:8} verify       unit {statistics.median(units):5.2f} s")
    for what, values in found.items():
        print(f"{'':21}" + describe(what, values), flush=True)


class BindFiles:
    """The files of one model for `run_bind`: its export, and two checkpoints of other weights.

    Each call binds other weights than those of the file that it replaces.
    """

    def __init__(self, name: str, exporter: str, folder: str) -> None:
        from safetensors.torch import save_file

        self.exporter, self.folder = exporter, folder
        self.model, self.inputs = exported(name, exporter)
        self.file, self.ready = f"{folder}/model.onnx", f"{folder}/ready.onnx"
        write(htp_export.export, self.model, self.inputs, exporter, self.file)
        self.checkpoints: list[str] = []
        for number in range(2):
            for parameter in self.model.parameters():
                parameter.mul_(1.01)
            state = {key: value.clone() for key, value in self.model.state_dict().items()}
            self.checkpoints.append(f"{folder}/{number}.safetensors")
            save_file(state, self.checkpoints[-1])
        htp_export.bind(self.file, self.checkpoints[0], self.ready, in_place_data=True)
        self._next = {what: itertools.cycle(self.checkpoints) for what in ("bind", "in place")}

    def export(self) -> None:
        """Export the model."""
        write(
            htp_export.export,
            self.model,
            self.inputs,
            self.exporter,
            f"{self.folder}/exported.onnx",
        )

    def bind(self) -> None:
        """Write a whole file."""
        htp_export.bind(self.file, next(self._next["bind"]), f"{self.folder}/bound.onnx")

    def in_place(self) -> None:
        """Replace the data file alone."""
        htp_export.bind(self.ready, next(self._next["in place"]), in_place_data=True)

    def copy(self) -> None:
        """Copy as many bytes."""
        shutil.copyfile(self.checkpoints[0], f"{self.folder}/copy.data")


def clocks(action: Callable[[], object]) -> tuple[float, float]:
    """Seconds of an action on the wall, and of processor time."""
    gc.collect()
    start = time.perf_counter(), time.process_time()
    with contextlib.redirect_stdout(io.StringIO()):
        action()
    return time.perf_counter() - start[0], time.process_time() - start[1]


_BINDS = 3  # for each export, which takes ten times as long


def run_bind(name: str, exporter: str, pairs: int) -> None:
    """``bind`` of the weights of another checkpoint, against an export of the model that has them.

    Both write a file, from a warm cache. The control is ``bind`` against itself. A plain copy of the checkpoint
    says what of the time is spent on writing so many bytes; it is measured before the pairs, because the next
    writer pays for the memory that it leaves in small pages. On a busy machine, the processor time of this process
    says more: the time on the wall depends on the disk and on other processes.
    """
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        with contextlib.redirect_stdout(io.StringIO()):
            files = BindFiles(name, exporter, folder)
        copies = [clocks(files.copy) for _ in range(_BINDS)]
        short = (files.bind, files.in_place)
        for action in (*short, files.export):
            clocks(action)  # warm
        for index in range(pairs):
            exports = [clocks(files.export)] if index % 2 else []
            spent = [[clocks(action) for action in short] for _ in range(_BINDS)]
            exports = exports or [clocks(files.export)]
            for clock, name_of_clock in enumerate(("wall", "processor")):
                export = exports[0][clock]
                bind, in_place = (
                    statistics.median(both[place][clock] for both in spent)
                    for place in range(len(short))
                )
                row = {
                    "export s": export,
                    "bind s": bind,
                    "in place s": in_place,
                    "export / bind": export / bind,
                    "export / in place": export / in_place,
                    "A/A": spent[1][0][clock] / spent[2][0][clock],
                }
                for label, value in row.items():
                    found.setdefault(f"{name_of_clock}: {label}", []).append(value)
    for clock, name_of_clock in enumerate(("wall", "processor")):
        found[f"{name_of_clock}: copy s"] = [each[clock] for each in copies]
    print(f"{name:8} {exporter}")
    for label in sorted(found):
        print(f"{'':9}" + describe(label, found[label]), flush=True)


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what",
        choices=[
            "export",
            "repair",
            "run",
            "bind",
            "memory",
            "seconds",
            "functions",
            "fused",
            "scale",
            "compress",
        ],
    )
    parser.add_argument(
        "--models", nargs="+", default=[], help="by default, those of the benchmark"
    )
    parser.add_argument("--exporter", choices=["dynamo", "torchscript", "both"], default="both")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument(
        "--memory", type=int, default=3, help="export: pairs of processes for peak memory; 0: none"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="export: time alone, each export in a new process"
    )
    parser.add_argument("--nodes", type=int, default=50_000)
    parser.add_argument("--side", choices=["ours", "torch"], default="ours", help=argparse.SUPPRESS)
    parser.add_argument(
        "--sizes", nargs="*", type=int, default=scale.SIZES, help="scale: nodes of wide models"
    )
    parser.add_argument(
        "--levels", nargs="*", type=int, default=scale.LEVELS, help="scale: levels of deep models"
    )
    parser.add_argument("--commands", nargs="+", default=[], help="scale: these commands alone")
    parser.add_argument(
        "--runs", type=int, default=20, help="compress: timed runs of each half of a pair"
    )
    parser.add_argument(
        "--trials", type=int, default=20, help="compress: plans that the search measures"
    )
    parser.add_argument(
        "--depth", type=int, help="compress: the level of the modules that the search chooses for"
    )
    parser.add_argument(
        "--ways", nargs="+", choices=compression.WAYS, help="compress: these rows alone"
    )
    parser.add_argument(
        "--small", action="store_true", help="compress, fused: small models, to try it"
    )
    parser.add_argument(
        "--results",
        type=Path,
        help="compress: a file to which rows are appended; those in it are not made again",
    )
    given = parser.parse_args()
    own = {
        "fused": fused_level.MODELS,
        "compress": (*MODELS, *compression.KINDS),
        "export": EXPORTED,
        "memory": EXPORTED,
        "seconds": EXPORTED,
    }.get(given.what, (*MODELS,))
    for name in set(given.models) - set(own):
        parser.error(f"no model {name!r} in {given.what}; there are {', '.join(own)}")
    usual = {"fused": [*fused_level.MODELS], "bind": ["bert"]}.get(given.what, [*MODELS])
    given.models = given.models or usual
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    if given.what == "repair":
        run_repair(given.nodes)
    elif given.what == "bind":
        exporters = ["dynamo", "torchscript"] if given.exporter == "both" else [given.exporter]
        for name in given.models:
            for exporter in exporters:
                run_bind(name, exporter, given.pairs)
    elif given.what == "functions":
        exporters = ["dynamo", "torchscript"] if given.exporter == "both" else [given.exporter]
        function_files.run({name: MODELS[name] for name in given.models}, exporters, given.pairs)
    elif given.what == "fused":
        fused_level.run(given.models, given.pairs, given.small)
    elif given.what == "compress":
        small = {
            "bert": compare_models.bert,
            "resnet": compare_models.resnet,
            "decoder": compare_models.llama,
        }
        models = {
            f"{name}-small" if given.small else name: (lambda name=name: small[name]("small"))
            if given.small
            else {**MODELS, **compression.KINDS}[name]
            for name in given.models
        }
        compression.run(
            models,
            given.ways or compression.WAYS,
            given.pairs,
            given.runs,
            given.trials,
            given.depth,
            describe,
            given.results,
        )
    elif given.what == "scale":
        scale.run(given.sizes, given.levels, given.commands)
    elif given.what == "memory":
        run_memory(given.models[0], given.exporter, given.side)
    elif given.what == "seconds":
        run_seconds(given.models[0], given.exporter, given.side)
    elif given.what == "run":
        for name in given.models:
            run_verify(name, given.pairs)
            run_profile(name, given.pairs)
        large_model.run(["extract"])
    else:
        exporters = ["dynamo", "torchscript"] if given.exporter == "both" else [given.exporter]
        if given.fresh:
            run_fresh(given.models, exporters, given.pairs)
        else:
            run_export(given.models, exporters, given.pairs, given.memory)


if __name__ == "__main__":
    main()
