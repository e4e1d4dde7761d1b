"""``check``: the worst module, the bytes and the time of a quantized model beside the original."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.errors import InputError

X = np.random.default_rng(0).standard_normal((2, 64), dtype=np.float32)


class Unlike(nn.Module):
    """Two layers, the second of which loses more in blocks of integers: each block has one large weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fine, self.coarse = nn.Linear(64, 64), nn.Linear(64, 64)
        with torch.no_grad():
            self.coarse.weight[:, ::16] = 40

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.coarse(torch.tanh(self.fine(x)))
        return y


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("check") / "net.onnx"
    htp_export.export(Unlike().eval(), (torch.from_numpy(X),), file, verbose=False)
    return file


def runs(count: int) -> list[Mapping[str, Any]]:
    return [{"x": X * k} for k in range(1, count + 1)]


def test_the_worst_module_is_that_of_compare_over_the_runs_of_the_data(file: Path) -> None:
    result = htp_export.quantize(file, {".": "int4"}, data=iter(runs(3)), check=True)
    check = result.check
    assert check is not None
    largest = [htp_export.compare(file, result, run) for run in runs(3)]
    expected = max(
        (each.modules[each.worst] for each in largest if each.worst is not None), key=lambda row: row.max_abs or 0
    )
    assert (check.worst, check.compared) == (expected.path, 3)
    assert check.worst in ("", "coarse")  # the output is that of the whole, too
    assert check.max_abs == expected.max_abs
    assert (check.bytes_before, check.bytes_after) == (result.modules[""].bytes_before, result.modules[""].bytes_after)
    assert check.ms_before > 0
    assert check.ms_after > 0
    assert result.to_dict()["check"]["worst"] == check.worst
    assert "worst module on 3 runs of the data" in str(result)
    assert f"medians of {check.runs} runs each, in turn, on this machine" in str(result)


@pytest.mark.parametrize(("given", "compared"), [(runs(9), 4), (None, 4), (runs(1)[0], 1)])
def test_at_most_four_runs_are_compared_also_of_random_inputs(file: Path, given: Any, compared: int) -> None:
    check = htp_export.quantize(file, {"fine": "int8"}, data=given, check=True).check
    assert check is not None
    assert check.compared == compared


def test_precisions_that_change_types_are_checked(file: Path) -> None:
    assert htp_export.quantize(file, "fp16", data=runs(1), check=True).check is not None
    same = htp_export.quantize(file, {"fine": "fp32"}, data=runs(1), check=True).check
    assert same is not None
    assert same.max_abs == 0


def test_without_it_nothing_is_said_and_a_dry_run_cannot_have_it(file: Path) -> None:
    result = htp_export.quantize(file, {".": "int4"})
    assert result.check is None
    assert "check" not in result.to_dict()
    with pytest.raises(InputError, match="check runs the quantized model, and dry_run makes none"):
        htp_export.quantize(file, {".": "int4"}, dry_run=True, check=True)


def test_the_command_shows_it(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["quantize", str(file), "--rule", "**=int4", "-o", str(tmp_path / "int4.onnx"), "--check"]
    assert main(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"worst module on 4 runs of random inputs: \S+, max difference [\d.e-]+, cosine [\d.]+", shown)
    assert re.search(r"[\d.]+ ms a run before, [\d.]+ ms after \([\d.]+ times as fast\)", shown)
    assert main([*words, "--json", "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["check"]["runs"] == 20
    assert main([*words[:4], "--dry-run", "--check"]) == 2
    assert "--dry-run" in capsys.readouterr().err
