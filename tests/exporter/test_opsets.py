"""The opset that was asked for is written, or a warning names both, or nothing is exported."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import onnx
import pytest
import torch
from torch import nn

import htp_export
from tests.exporting import BOTH, exported_net
from tests.nets import NETS


class NeverExported(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the export has begun")


@BOTH
@pytest.mark.parametrize("opset", [0, 5, 999])
def test_an_opset_that_torch_cannot_write_is_refused_before_the_export(exporter, opset, tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    message = rf"opset {opset}: torch's (?i:{exporter}) exporter writes opsets \d+ to \d+"
    with pytest.raises(htp_export.InputError, match=message):
        htp_export.export(
            NeverExported(), (torch.randn(2),), file, opset_version=opset, dynamo=exporter == "dynamo", verbose=False
        )
    assert not file.exists()


def test_a_warning_names_both_opsets_if_torch_writes_another_one(tmp_path: Path) -> None:
    # torch's converter cannot go down to 7, and only logs that.
    model, kwargs = NETS["siblings"].build()
    with pytest.warns(UserWarning, match="opset 7 was asked for, and torch wrote opset 18") as warned:
        program = htp_export.export(model, (), tmp_path / "model.onnx", kwargs=kwargs, opset_version=7, verbose=False)
    assert program.model.opset_imports[""] == 18
    assert onnx.load(tmp_path / "model.onnx").opset_import[0].version == 18
    assert next(each for each in warned if "opset 7" in str(each.message)).filename == __file__


@pytest.mark.parametrize(("exporter", "opset"), [("dynamo", 18), ("dynamo", 20), ("torchscript", 11), ("dynamo", None)])
def test_nothing_is_said_of_an_opset_that_is_written(exporter, opset, tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        file = exported_net("siblings", exporter, tmp_path, opset_version=opset)
    assert not [each for each in warned if re.search(r"opset \d+ was asked for", str(each.message))]
    assert opset in (None, file.opset_import[0].version)
