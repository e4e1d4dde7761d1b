#!/usr/bin/env python3
"""Export many architectures with torch, transformers.exporters and htp_export: the table of docs/models.md.

    python tools/sweep.py --results sweep.jsonl                       # the whole sweep; started again, it resumes
    python tools/sweep.py --results sweep.jsonl --only gpt2 timm/     # these alone, if they are not done
    python tools/sweep.py --results sweep.jsonl --only gpt2 --again   # these once more; their last rows count
    python tools/sweep.py --results sweep.jsonl --table docs/models.md

Models are small, by ``shrinking.py``, and have random parameters that are spread apart. Each runs in a process of its
own, with a limit of time and of memory; what was found so far is kept when a limit ends it. The packages that are not
installed are left out: transformers is needed; timm, diffusers, x-transformers, vit-pytorch, monai and
segmentation-models-pytorch (with torchvision) are used where they are.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

import htp_export
from tools.sweep_checks import Row, Subject, examine
from tools.sweep_models import subjects, torchvision_without_operators
from tools.sweep_table import page

BUSY = 8  # times its processor time an architecture may take, on a machine that does other things


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True, help="JSON lines; rows are added")
    parser.add_argument(
        "--only",
        nargs="*",
        default=[],
        help="names, with or without the library, or libraries: timm/",
    )
    parser.add_argument("--again", action="store_true", help="also those that are done")
    parser.add_argument(
        "--seconds", type=int, default=150, help="of processor time, for one architecture"
    )
    parser.add_argument(
        "--gigabytes", type=float, default=12, help="of address space, for one architecture"
    )
    parser.add_argument(
        "--table", type=Path, help="write this page from the results, and export nothing"
    )
    options = parser.parse_args()
    if options.table:
        options.table.write_text(
            page(results(options.results).values(), len(subjects())), encoding="utf-8"
        )
        return 0
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    warm_up()
    done = results(options.results)
    for name, subject in subjects().items():
        if (options.again or name not in done) and (not options.only or chosen(name, options.only)):
            row = run_alone(subject, options.seconds, options.gigabytes)
            with options.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(f"{name}: {row['stage']} {row.get('error', '')}", flush=True)
    return 0


def chosen(name: str, only: Iterable[str]) -> bool:
    return any(
        name == each or name.endswith("/" + each) or (each.endswith("/") and name.startswith(each))
        for each in only
    )


def results(path: Path) -> dict[str, Row]:
    """The last row of each architecture."""
    if not path.exists():
        return {}
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return {row["name"]: row for row in rows}


def warm_up() -> None:
    """Import what every architecture needs, once: each process is a fork of this one."""
    with contextlib.suppress(Exception):  # without it, the models that need it say so
        torchvision_without_operators()
    for name in (
        "transformers",
        "transformers.exporters",
        "transformers.exporters.exporter_onnx",
        "timm",
        "diffusers",
    ):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        for dynamo in (True, False):
            path = Path(folder) / "model.onnx"
            htp_export.export(
                torch.nn.Linear(2, 2), (torch.ones(1, 2),), path, dynamo=dynamo, verbose=False
            )


def run_alone(subject: Subject, seconds: int, gigabytes: float) -> Row:
    """Examine one architecture in a process of its own; a process that is ended leaves what it noted last."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        noted = folder / "row.json"
        began = time.monotonic()
        child = os.fork()
        if not child:
            _in_child(subject, folder, noted, seconds, gigabytes)
        ended = ""
        while not (status := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() - began > BUSY * seconds:
                os.kill(child, signal.SIGKILL)
                ended = f"stopped after {BUSY * seconds} s"
                os.waitpid(child, 0)
                break
            time.sleep(0.05)
        if not ended and status[1]:
            code = os.waitstatus_to_exitcode(status[1])
            ended = (
                f"stopped after {seconds} s"
                if -code == signal.SIGXCPU
                else f"process ended with {code}"
            )
            if (error := noted.with_suffix(".error")).exists():
                ended = error.read_text(encoding="utf-8").splitlines()[-1]
        row: Row = (
            json.loads(noted.read_text(encoding="utf-8"))
            if noted.exists()
            else {"name": subject.name, "stage": ""}
        )
        row["seconds"] = round(time.monotonic() - began, 1)
        return {**row, "ended": f"{ended} ({row['stage']})"} if ended else row


def _in_child(subject: Subject, folder: Path, noted: Path, seconds: int, gigabytes: float) -> None:
    """Never returns."""
    code = 1
    try:
        with contextlib.suppress(ImportError):  # Windows has none
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (int(gigabytes * 2**30),) * 2)
            spent = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
            resource.setrlimit(resource.RLIMIT_CPU, (spent + seconds, spent + seconds + 5))

        def note(row: Row) -> None:
            whole = noted.with_suffix(".part")
            whole.write_text(json.dumps(row), encoding="utf-8")
            whole.replace(noted)

        for stream in (1, 2):  # torch prints whole graphs, from C++ too
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        note(examine(subject, folder / "files", note))
        code = 0
    except BaseException:
        noted.with_suffix(".error").write_text(traceback.format_exc(), encoding="utf-8")
    finally:
        os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
