"""A short run of tools/fuzz.py; the whole of it is `python -m tools.fuzz`."""

import os
import random
import time

import onnx
import pytest

from htp_export.files.model_files import write_model
from tests.handmade import encoder
from tools import fuzz
from tools.fuzz_mutations import mutated

QUICK = ("tree --csv", "cost", "functions --undo", "diff", "view --netron", "optimize")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_commands_do_their_work_on_files_with_faults_or_end_in_an_error_of_ours(tmp_path):
    models = [tmp_path / "branches.onnx", tmp_path / "encoder.onnx"]
    onnx.save(fuzz.branching(), models[0])
    write_model(encoder(), models[1])
    files, at_fault, faults = fuzz.run(
        tmp_path, 24, models=models, seed=5, commands=QUICK, each=1, seconds=120
    )
    assert (files, at_fault) == (24, 0), [fault.seen[0] for fault in faults]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_every_command_does_on_files_of_both_exporters(tmp_path):
    files, at_fault, faults = fuzz.run(tmp_path, 60, seed=6, seconds=120)
    assert (files, at_fault) == (60, 0), [fault.seen[0] for fault in faults]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_faults_are_found(tmp_path, monkeypatch):
    def fails(words: list[str]) -> int:
        print("\x1b[31m" if "diff" in words else "")
        if "cost" in words:
            os._exit(7)
        while "view" in words:
            time.sleep(1)
        return 2

    models = [tmp_path / "branches.onnx"]
    onnx.save(fuzz.branching(), models[0])
    monkeypatch.setattr(fuzz, "run_command", fails)
    commands = ["diff", "cost", "view", "tree"]
    _, at_fault, faults = fuzz.run(tmp_path, 1, models=models, commands=commands, seconds=1.5)
    assert at_fault == 1
    assert sorted(fault.cause.partition(":")[0] for fault in faults) == [
        "control character reaches the terminal",
        "takes more than 2 seconds",
        "the process died",
    ]


def test_the_same_seed_gives_the_same_faults():
    model = fuzz.branching()
    first, again, other = (mutated(model, random.Random(seed)) for seed in (3, 3, 4))
    assert first == again != other
    assert model == fuzz.branching()
    assert isinstance(model, onnx.ModelProto)
