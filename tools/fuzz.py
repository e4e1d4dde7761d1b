"""Run the commands on files with faults.

    python -m tools.fuzz [--files 3000] [--seed 0] [--commands 4] [--only tree,cost] [--limit SECONDS] [--keep FOLDER]

The models are made here, by both exporters, and `tools/fuzz_mutations.py` puts faults into them: the same seed gives
the same files. Each file is loaded, and some commands, drawn from the seed, are run on it, in a process with bounds on
time and memory. A command has to do its work or end in an error of htp_export. Anything else is listed, the same causes
together: another exception, a process that dies, one that takes longer or more memory than it may, a control character
that reaches the terminal. The exit status is 1 if there is any.

`--keep FOLDER` writes the files at fault, to be looked at with `htp-export COMMAND FILE --debug`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import multiprocessing
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import onnx
import torch
from torch import nn

import htp_export
from htp_export.command.main import main as run_command
from tools.fuzz_mutations import BOMB, mutated

__all__ = ["COMMANDS", "Fault", "branching", "make_models", "run"]

COMMANDS: dict[str, str] = {
    "info": "info F",
    "tree": "tree F",
    "tree --json": "tree F --json",
    "tree --csv": "tree F --csv",
    "cost": "cost F",
    "cost --csv": "cost F --csv --nodes",
    "forensics": "forensics F --list",
    "fingerprint": "fingerprint F",
    "optimize": "optimize F -o out.onnx",
    "optimize --level tolerant": "optimize F -o out.onnx --level tolerant",
    "optimize --level fused": "optimize F -o out.onnx --level fused --attribution",
    "extract": "extract F block.0 -o out.onnx",
    "functions": "functions F class:Block -o out.onnx",
    "functions --undo": "functions F --undo -o out.onnx",
    "splice": "splice F block.0 PART -o out.onnx",
    "partition": "partition F 2 -o stages",
    "carry": "carry WHOLE F -o out.onnx",
    "carry from it": "carry F WHOLE -o out.onnx",
    "diff": "diff F WHOLE",
    "view": "view F -o out.html",
    "view --netron": "view F -o out.json --netron",
    "compare": "compare F WHOLE",
    "compare with it": "compare WHOLE F",
    "profile": "profile F --runs 1 --warmup 0 --threads 1",
}
"""What is run; F is the file, WHOLE the model that it was made from, PART a module of it."""

_SECONDS = 20
_MEMORY = 2 << 30
"""Bytes that a process may take beyond what it has when it begins."""
_RAW = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What a terminal may act on."""
_INTERNAL = 3
_RUNNING = ("compare", "compare with it", "profile")
"""These run a model as it is, however long that takes."""


@dataclass
class Fault:
    """What went wrong in one way.

    Attributes:
        cause: What it was.
        seen: For each file and command, what was said of it.
    """

    cause: str
    seen: list[str] = field(default_factory=list)


# --- models ---------------------------------------------------------------------------------------------------


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + torch.nn.functional.gelu(self.fc(self.norm(x))) * mask.reshape(1, -1)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4))
        self.block = nn.ModuleList(_Block(4) for _ in range(3))
        self.embed = nn.Embedding(5, 4)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.stem(x).transpose(1, 2) + self.embed(ids).mean(1, keepdim=True)
        mask = torch.arange(4).remainder(2).to(h.dtype)
        for block in self.block:
            h = block(h, mask)
        return h, h.flatten(1).softmax(-1)


def make_models(folder: Path) -> list[Path]:
    """Write the models that faults are put into."""
    torch.manual_seed(1)
    net, inputs = _Net().eval(), (torch.randn(2, 2, 6), torch.tensor([[0, 1], [2, 4]]))
    files = {
        name: folder / f"{name}.onnx"
        for name in ("dynamo", "torchscript", "nested", "outside", "quantized")
    }
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        htp_export.export(
            net, inputs, files["dynamo"], dynamo=True, external_data=False, verbose=False
        )
        htp_export.export(
            net, inputs, files["torchscript"], dynamo=False, do_constant_folding=False
        )
        htp_export.functions(files["torchscript"], "class:_Block", files["nested"])
        htp_export.load(files["dynamo"]).save(files["outside"], external_data="weights.data")
        htp_export.tools.quantize_dynamic(files["torchscript"], files["quantized"])
        htp_export.extract(files["dynamo"], "block.0", folder / "part.onnx")
    branches = folder / "branches.onnx"
    onnx.save(branching(), branches)
    return [*files.values(), branches]


def branching() -> onnx.ModelProto:
    """A model with a function, a branch and a loop."""
    text = """
    <ir_version: 10, opset_import: ["" : 20, "pkg" : 1]>
    branches (float[n, 4] x, bool c, int64 trips) => (float[n, 4] y, float[n, 4] z, float[m] w) {
        s = Shape (x)
        f = pkg.Act (x)
        y = If (c) <
            then_branch = g1 () => (float[n, 4] a) { half = Constant <value_float = 0.5> () a = Mul (f, half) },
            else_branch = g2 () => (float[n, 4] b) { b = Identity (x) }
        >
        on = Constant <value = bool {1}> ()
        z, w = Loop (trips, on, y) <
            body = g3 (int64 i, bool p, float[n, 4] h) => (bool q, float[n, 4] k, float r) {
                q = Identity (p)
                k = Add (h, x)
                r = ReduceSum <keepdims = 0> (k)
            }
        >
    }
    <domain: "pkg", opset_import: ["" : 20]>
    Act (u) => (v) { v = Relu (u) }
    """
    model = onnx.parser.parse_model(text)
    for number, node in enumerate(model.graph.node):
        node.name = f"n{number}"
        node.metadata_props.add(key="htp.module", value="block.0" if number % 2 else "block")
    model.metadata_props.add(key="htp.version", value="1")
    return model


# --- one process -----------------------------------------------------------------------------------------------


def _work(pipe: Connection, folder: Path, memory: int) -> None:
    """Run what comes through the pipe, command by command, and answer with what went wrong; empty where nothing did."""
    os.chdir(folder)
    os.environ["COLUMNS"] = "120"
    for handler in list(logging.root.handlers):
        logging.root.removeHandler(handler)
    logging.root.addHandler(logging.NullHandler())
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        words = pipe.recv()
        if words is None:
            return
        pipe.send(_run_one(words))


def _run_one(words: list[str]) -> str:
    if words[0] == "load":
        return _load_and_look(words[1])
    status, said = _said(words)
    raw = _RAW.search(said)
    if raw:
        return f"control character reaches the terminal: {said[max(0, raw.start() - 40) : raw.end() + 10]!r}"
    if "there is not enough memory" in said:
        return "more memory than it may have"
    if status != _INTERNAL:
        return ""
    _, said = _said([*words, "--debug"])
    return _cause(said)


def _said(words: list[str]) -> tuple[int, str]:
    """The exit status of a command, and what it prints."""
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        status = run_command(words)
    return status, stream.getvalue()


def _cause(trace: str) -> str:
    """Where an exception was raised, and what kind it is, of a traceback."""
    frames = re.findall(r'File ".*?(htp_export/[^"]*)", line (\d+), in (\S+)', trace)
    lines = [line for line in trace.splitlines() if re.match(r"[\w.]+(:|$)", line)]
    last = (
        lines[-2]
        if len(lines) > 1 and lines[-1].startswith("htp-export")
        else lines[-1]
        if lines
        else "?"
    )
    place = "{0} {2}:{1}".format(*frames[-1]) if frames else ""
    return f"{place} {last[:160]}"


def _load_and_look(file: str) -> str:
    """Load a file and ask for what is known of its modules, as a program does."""
    import traceback

    try:
        tagged = htp_export.load(file)
        for path in list(tagged)[:50]:
            if tagged.source != "none":
                region = tagged[path]
                _ = (region.nodes, region.inputs, region.outputs, region.parameters)
        _ = (repr(tagged), tagged._repr_html_(), tagged.signatures, tagged.parameters, tagged.typed)
        tagged.save("saved.onnx")
    except htp_export.HtpExportError:
        return ""
    except MemoryError:
        return "more memory than it may have"
    except Exception:
        return _cause(traceback.format_exc())
    return ""


class _Process:
    """A process that runs commands; after one that does not come back, another."""

    def __init__(self, folder: Path, seconds: float, memory: int) -> None:
        self._folder, self._seconds, self._memory = folder, seconds, memory
        self._context = multiprocessing.get_context("fork")
        self._child: multiprocessing.process.BaseProcess | None = None
        self._runs = 0

    def ask(self, words: list[str]) -> str:
        """What went wrong with a command; empty where nothing did."""
        if self._child is None or self._runs >= 400:  # the libraries keep what they learn of names
            self.end()
            self._pipe, theirs = self._context.Pipe()
            self._child = self._context.Process(
                target=_work, args=(theirs, self._folder, self._memory), daemon=True
            )
            self._child.start()
            theirs.close()
            self._runs = 0
        self._runs += 1
        self._pipe.send(words)
        try:
            if self._pipe.poll(self._seconds):
                return str(self._pipe.recv())
            found = f"takes more than {self._seconds:.0f} seconds"
        except EOFError:
            self._child.join()
            found = f"the process died: {self._child.exitcode}"
        self._child.kill()
        self._child = None
        return found

    def end(self) -> None:
        """Let the process end."""
        if self._child is not None:
            self._pipe.send(None)
            self._child.join(5)
            self._child.kill()
            self._child = None


# --- all of it -------------------------------------------------------------------------------------------------


def run(
    folder: Path,
    files: int,
    *,
    models: Sequence[Path] | None = None,
    seed: int = 0,
    commands: Sequence[str] = tuple(COMMANDS),
    each: int = 4,
    limit: float | None = None,
    seconds: float = _SECONDS,
    keep: Path | None = None,
) -> tuple[int, int, list[Fault]]:
    """Make files with faults, and run commands on them.

    Args:
        folder: Where to work; empty.
        files: How many files.
        models: The models that faults are put into, in that folder; those of `make_models` where it is None.
        seed: What is drawn from it: the faults, and which commands.
        commands: Which of ``COMMANDS``.
        each: How many of them are run on each file.
        limit: Seconds after which no further file is begun.
        seconds: How long a command may take.
        keep: Where files at fault go.

    Returns:
        How many files were run, how many of them are at fault, and the faults, the most frequent first.
    """
    models = make_models(folder) if models is None else models
    whole = {file: onnx.load(file, load_external_data=False) for file in models}
    (folder / "folder").mkdir()
    os.mkfifo(folder / "pipe")
    process = _Process(folder, seconds, _MEMORY)
    faults: dict[str, Fault] = {}
    at_fault, done, began = 0, 0, time.monotonic()
    for number in range(files):
        if limit is not None and time.monotonic() - began > limit:
            break
        chance = random.Random(f"{seed}/{number}")
        model = models[number % len(models)]
        data = mutated(whole[model], chance)
        (folder / "F.onnx").write_bytes(data)
        drawn, failed = chance.sample(list(commands), min(each, len(commands))), False
        for name in ("load", *(name for name in drawn if BOMB not in data or name not in _RUNNING)):
            said = process.ask(_words(name, model.name))
            if said:
                failed = True
                key = re.sub(r"0x[0-9a-f]+|'[^']*'|\d+(?!:)", "…", said)
                faults.setdefault(key, Fault(said)).seen.append(
                    f"{number} ({model.stem}), {name}: {said}"
                )
        done, at_fault = done + 1, at_fault + failed
        if failed and keep is not None:
            shutil.copy(folder / "F.onnx", keep / f"{number}.onnx")
    process.end()
    return done, at_fault, sorted(faults.values(), key=lambda fault: -len(fault.seen))


def _words(name: str, model: str) -> list[str]:
    if name == "load":
        return ["load", "F.onnx"]
    places = {"F": "F.onnx", "WHOLE": model, "PART": "part.onnx"}
    return [places.get(word, word) for word in COMMANDS[name].split()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", type=int, default=4, help="commands run on each file")
    parser.add_argument("--only", help="these commands, by comma")
    parser.add_argument("--limit", type=float, help="seconds after which no further file is begun")
    parser.add_argument("--keep", type=Path, help="a folder for the files at fault")
    given = parser.parse_args(arguments)
    commands = given.only.split(",") if given.only else list(COMMANDS)
    if given.keep is not None:
        given.keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        done, at_fault, faults = run(
            Path(folder),
            given.files,
            seed=given.seed,
            commands=commands,
            each=given.commands,
            limit=given.limit,
            keep=given.keep,
        )
    for fault in faults:
        print(f"{len(fault.seen):5} x {fault.cause}\n        {'; '.join(fault.seen[:3])}")
    print(f"{at_fault} of {done} files, {len(faults)} causes")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
