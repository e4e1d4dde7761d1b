"""JSON files of others beside models: whatever a value is, the file is read or at fault, in a short time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import htp_export
from htp_export.capabilities.huggingface.packed.checkpoints import is_packed, read_packed
from htp_export.capabilities.partition.balancing import read_weights
from htp_export.errors import HtpExportError
from htp_export.files.checkpoint import read_checkpoint
from htp_export.plans.rules import read_plan
from tests.hostile import JSON, places, replaced, within
from tests.packed import gptq, written_checkpoint

Made = tuple[Path, Callable[[], Any]]
"""A file of JSON, and what reads it."""


def manifest(folder: Path) -> Made:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
    htp_export.partition(program, 2, folder / "stages")
    return folder / "stages" / "manifest.json", lambda: str(
        htp_export.load_partition(folder / "stages")
    )


def index(folder: Path) -> Made:
    save_file({"weight": torch.zeros(2)}, folder / "one.safetensors")
    written = folder / "model.safetensors.index.json"
    written.write_text(
        json.dumps({"metadata": {"total_size": 8}, "weight_map": {"weight": "one.safetensors"}})
    )
    return written, lambda: read_checkpoint(folder)


def quantization(folder: Path) -> Made:
    tensors, _ = gptq(np.random.default_rng(0), 32, 32, 16)
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 16,
        "checkpoint_format": "gptq",
        "version": "gemm",
    }
    written_checkpoint(folder, {f"fc.{name}": tensor for name, tensor in tensors.items()}, config)
    return folder / "config.json", lambda: is_packed(folder) and dict(read_packed(folder))


def weights(folder: Path) -> Made:
    written = folder / "balance.json"
    written.write_text(json.dumps({"modules": {"0": {"total_ms": 1.0}, "2": 2}}))
    return written, lambda: read_weights(written)


def plan(folder: Path) -> Made:
    written = folder / "plan.json"
    written.write_text(json.dumps({"0": "int8", "2": {"precision": "int4", "block_size": 32}}))
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
    return written, lambda: htp_export.quantize(program, read_plan(written))


@pytest.mark.long
@pytest.mark.parametrize("make", [manifest, index, quantization, weights, plan])
def test_whatever_a_json_file_has_it_is_read_or_at_fault(make, tmp_path):
    file, read = make(tmp_path)
    read()
    content = json.loads(file.read_bytes())
    values = [replaced(content, place, text) for place in places(content) for text in JSON]
    found = []
    for value in values[:: max(1, len(values) // 300)]:
        file.write_text(value, encoding="utf-8")
        try:
            with within(20):
                read()
        except HtpExportError:
            continue
        except Exception as error:
            found.append((value[:200], f"{type(error).__name__}: {error}"[:200]))
    assert found == []
