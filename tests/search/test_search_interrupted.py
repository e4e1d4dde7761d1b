"""Ctrl-C in `search`: the front so far is written, and the same command goes on from a storage."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import htp_export
from htp_export.command.main import main

pytest.importorskip("optuna", reason="the extra compress is not installed")

_PATIENCE = 120  # seconds


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("search") / "net.onnx"
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]
    htp_export.export(nn.Sequential(*layers).eval(), (torch.randn(2, 64),), file, verbose=False)
    return file


def stopped(arguments: list[str], journal: Path, trials: int) -> tuple[int, str, str]:
    """Run a command until some trials are in its journal, and end it with Ctrl-C."""
    command = [sys.executable, "-m", "htp_export", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + _PATIENCE
        while process.poll() is None and time.monotonic() < until:
            if journal.exists() and journal.read_text(encoding="utf-8").count('"measured"') >= trials:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=_PATIENCE)
    return process.returncode, out, err


@pytest.mark.skipif(os.name != "posix", reason="Windows has no SIGINT for another process")
def test_the_front_so_far_is_written_and_the_same_command_goes_on(file: Path, tmp_path: Path) -> None:
    journal, folder = tmp_path / "study.journal", tmp_path / "found"
    words = ["search", str(file), "--choices", "int4,int8-weights,fp16", "--storage", str(journal), "-o", str(folder)]
    status, out, err = stopped([*words, "--trials", "700"], journal, 3)
    assert (status, out) == (130, "")
    assert "htp-export: error: interrupted" in err
    assert f"the same command goes on from there: all that was measured is in {journal}" in err
    front = json.loads((folder / "front.json").read_text(encoding="utf-8"))
    measured = len(front["trials"])
    assert f"{measured} of 700 trials are measured; their front is in " in err
    assert 2 <= measured < 700  # a trial is not finished when its measurement is kept
    assert len(list(folder.glob("plan*.json"))) == len(front["pareto"]) > 0
    assert main([*words, "--trials", str(measured + 1)]) == 0
    after = json.loads((folder / "front.json").read_text(encoding="utf-8"))
    kept = {json.dumps(trial, sort_keys=True) for trial in after["trials"]}
    assert {json.dumps({**trial, "origin": trial["origin"]}, sort_keys=True) for trial in front["trials"]} <= kept


def test_before_a_plan_is_measured_nothing_is_written(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from htp_export.capabilities.search.search_work import SearchWork

    monkeypatch.setattr(SearchWork, "measure_alone", lambda self: signal.raise_signal(signal.SIGINT))
    assert main(["search", str(file), "--choices", "int4", "-o", str(tmp_path / "found")]) == 130
    said = capsys.readouterr().err
    assert "0 of 50 trials are measured\n" in said
    assert "with --storage study.journal, the same command goes on" in said
    assert not list(tmp_path.iterdir())
