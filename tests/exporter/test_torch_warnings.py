"""A user sees the warnings that torch shows, and one more if torch writes another opset than was asked for."""

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import htp_export
from tests.exporting import BOTH, exported_net, quick
from tests.nets import EXPORTERS, NETS, x


def seen(export: Callable[..., Any], exporter: str, name: str, folder: Path) -> list[tuple[type[Warning], str]]:
    """Category and text of every warning that an export shows, in order."""
    model, kwargs = NETS[name].build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        export(model, (), folder / "model.onnx", kwargs=kwargs, dynamo=exporter == "dynamo", verbose=False)
    return [(warning.category, str(warning.message)) for warning in caught]


NAMES = ("siblings", "conv_bn_relu", "other_names_of_operators", "lstm")


@pytest.mark.parametrize(
    ("name", "exporter"),
    quick(itertools.product(NAMES, EXPORTERS), *((name, "torchscript") for name in NAMES), ("conv_bn_relu", "dynamo")),
)
def test_an_export_shows_the_warnings_of_torch_alone(name, exporter, tmp_path):
    torchs = seen(torch.onnx.export, exporter, name, tmp_path)
    assert seen(htp_export.export, exporter, name, tmp_path) == torchs
    # From 2.14 on, torch.jit.trace warns. torch's exporter does not call it for models like these.
    assert FutureWarning not in {category for category, _ in torchs if exporter == "torchscript"}


def test_a_trace_warns_where_the_user_makes_it_and_not_again_in_the_export(tmp_path):
    model, _ = NETS["nested_sequentials"].build()
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        traced = torch.jit.trace(model, x(2, 4))

    def shown(export: Callable[..., Any]) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            export(traced, (x(2, 4),), tmp_path / "model.onnx", dynamo=False)
        return [str(warning.message) for warning in caught]

    assert shown(htp_export.export) == shown(torch.onnx.export)


class NeverExported(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("the export has begun")


@BOTH
@pytest.mark.parametrize("opset", [0, 5, 999])
def test_an_opset_that_torch_cannot_write_is_refused_before_the_export(exporter, opset, tmp_path):
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
def test_nothing_is_said_of_an_opset_that_is_written(exporter, opset, tmp_path):
    file = exported_net("siblings", exporter, tmp_path, opset_version=opset)  # warnings are errors in tests
    assert opset in (None, file.opset_import[0].version)
