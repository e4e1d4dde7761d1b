"""``tools/gpu.py`` with the CPU in place of a GPU: steps run and write Markdown; without a device it says so."""

from __future__ import annotations

import onnxruntime
import pytest

from tools import gpu

SMALL = ["--layers", "1", "--width", "64", "--length", "8", "--runs", "2"]


def test_without_the_provider_it_says_which_there_are_and_ends_with_status_2(capsys):
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        pytest.skip("there is a GPU here")
    assert gpu.main(SMALL) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert "gpu.py: this ONNX Runtime has no CUDAExecutionProvider, only" in output.err
    assert "CPUExecutionProvider" in output.err
    assert gpu.main(["--provider", "NoSuchExecutionProvider"]) == 2


def test_every_step_runs_and_writes_markdown(capsys):
    assert gpu.main(["--provider", "cpu", *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[4:] for line in lines if line.startswith("### ")] == list(gpu.STEPS)
    assert "Timed: kernels; on a GPU, this build of ONNX Runtime measures their times there." in lines
    for head in ("| module | total ms | self ms | share | kernels |", "| module | kernels | alone |"):
        row = lines[lines.index(head) + 2]
        assert row.startswith("| `(root)` | ")
        assert row.count("|") == head.count("|")
    assert any(line.startswith("A run: ") and " in fp16 " in line for line in lines)
    assert any("allocated for the outputs of kernels" in line for line in lines)


def test_a_step_that_fails_is_said_the_others_run_and_the_status_is_1(capsys, monkeypatch):
    def broken(case: gpu.Case) -> list[str]:
        raise RuntimeError("the device is gone")

    monkeypatch.setitem(gpu.STEPS, "fp16", broken)
    assert gpu.main(["--provider", "cpu", *SMALL, "--steps", "fp16", "Memory"]) == 1
    output = capsys.readouterr()
    assert "failed: RuntimeError: the device is gone" in output.out
    assert "allocated for the outputs of kernels" in output.out
