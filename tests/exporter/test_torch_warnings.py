"""A user of htp_export sees the warnings that torch shows, and no others."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import htp_export
from tests.exporting import quick
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
def test_an_export_shows_the_warnings_of_torch_alone(name: str, exporter: str, tmp_path: Path) -> None:
    torchs = seen(torch.onnx.export, exporter, name, tmp_path)
    assert seen(htp_export.export, exporter, name, tmp_path) == torchs
    # From 2.14 on, torch.jit.trace warns. torch's exporter does not call it for models like these.
    assert FutureWarning not in {category for category, _ in torchs if exporter == "torchscript"}


def test_a_trace_warns_where_the_user_makes_it_and_not_again_in_the_export(tmp_path: Path) -> None:
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
