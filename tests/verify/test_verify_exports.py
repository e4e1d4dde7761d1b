"""`verify` of what was just exported: its model and example inputs are known, and not kept alive."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import htp_export
from htp_export.errors import InputError


class Scaled(nn.Module):
    """Takes one argument by position and two by keyword, and computes otherwise in training."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(4, 3), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, pair: list[torch.Tensor], *, factor: float = 1.0) -> torch.Tensor:
        y: torch.Tensor = self.drop(self.fc(x)) * factor + pair[0] - pair[1]
        return y


def call() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(2, 4), [torch.randn(3), torch.randn(3)]), {"factor": 2.0}


@pytest.mark.parametrize("names", [None, "path"])
def test_a_program_is_verified_with_the_call_that_it_was_exported_with_in_training_mode_too(names: str | None) -> None:
    net, (args, kwargs) = Scaled().eval(), call()
    program = htp_export.export(net, args, kwargs=kwargs, names=names, verbose=False)
    result = htp_export.verify(program)
    assert result.ok
    assert result.modules["fc"].status == "agrees"
    assert htp_export.verify(net.train(), program).ok  # dropout would change the result
    assert net.training
    net.fc.weight = nn.Parameter(net.fc.weight * 2)
    assert htp_export.verify(program).first_wrong == "fc"


@pytest.mark.usefixtures("collecting_own")
def test_temporary_inputs_are_those_of_the_exported_program(tmp_path: Path) -> None:
    net, file = nn.Sequential(nn.Linear(4, 3)).eval(), tmp_path / "net.onnx"
    program = htp_export.export(net, (torch.randn(2, 4),), file, verbose=False)
    gc.collect()
    assert htp_export.verify(program).ok
    assert htp_export.verify(net, file).ok
    del program
    gc.collect()
    with pytest.raises(InputError, match=r"net\.onnx: the example inputs of its export are gone, .*; give args"):
        htp_export.verify(net, file)
    assert htp_export.verify(net, file, (torch.randn(2, 4),)).ok


@pytest.mark.parametrize("dynamo", [True, False])
def test_a_file_is_verified_with_the_call_that_it_was_exported_with(
    dynamo: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    net, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval(), torch.randn(2, 4)
    htp_export.export(net, (x,), "net.onnx", dynamo=dynamo, verbose=False)
    assert htp_export.verify(net, tmp_path / "net.onnx").ok
    twin = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()
    with pytest.raises(InputError, match="takes 1 inputs, and the call has 0 tensors"):
        htp_export.verify(twin, "net.onnx")


@pytest.mark.usefixtures("collecting_own")
def test_neither_model_nor_inputs_are_kept_alive(tmp_path: Path) -> None:
    net, x = nn.Sequential(nn.Linear(4, 3)).eval(), torch.randn(2, 4)
    held = weakref.ref(net), weakref.ref(x)
    program = htp_export.export(net, (x,), tmp_path / "net.onnx", verbose=False)
    assert htp_export.verify(program).ok
    file = weakref.ref(program)
    del net
    gc.collect()
    assert held[0]() is None
    with pytest.raises(InputError, match="the model that this program was exported from is gone"):
        htp_export.verify(program)
    del program, x
    gc.collect()
    assert [each() for each in (*held, file)] == [None] * 3


def test_what_is_not_known_is_an_error_that_says_what_to_give() -> None:
    net, x = nn.Sequential(nn.Linear(4, 3)).eval(), torch.randn(2, 4)
    with htp_export.tagging():
        theirs = torch.onnx.export(net, (x,), dynamo=True, verbose=False)
    assert theirs is not None
    with pytest.raises(InputError, match=r"not known of which model .* give verify\(model, program, args\)"):
        htp_export.verify(theirs)
    with pytest.raises(InputError, match=r"a model and its file, or what htp_export\.export returned"):
        htp_export.verify(net)
    with pytest.raises(InputError, match="a program knows the model"):
        htp_export.verify(theirs, theirs)
