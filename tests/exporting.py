"""Exports for tests: files of nets, with the two exporters named by a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import torch

import htp_export
from tests.nets import NETS


def exported(
    model: torch.nn.Module, kwargs: dict[str, Any], exporter: str, folder: Path, **options: Any
) -> onnx.ModelProto:
    """The tagged file of a model, read by onnx."""
    path = folder / "model.onnx"
    htp_export.export(model, (), path, kwargs=kwargs, dynamo=exporter == "dynamo", verbose=False, **options)
    return onnx.load(str(path))


def exported_net(name: str, exporter: str, folder: Path, **options: Any) -> onnx.ModelProto:
    """The tagged file of a net of the registry."""
    model, kwargs = NETS[name].build()
    return exported(model, kwargs, exporter, folder, **NETS[name].export_options(exporter), **options)


def metadata(node: onnx.NodeProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in node.metadata_props}
