"""The work of torch that an export under dynamo saves changes nothing but time, and its work is counted."""

import collections
import copy
import gc
import inspect
import re
import weakref
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import htp_export
from htp_export.exporter.capture import faster_dynamo, patches, running
from htp_export.exporter.capture.patching import Patch
from htp_export.process.restoring import Changes, keep_objects, restored, set_variable
from tests.exporting import every
from tests.nets import NETS

PAIRS = 10
GROUPS = (patches.FASTER_START, patches.FASTER_DYNAMO)
SAVED = [patch for group in GROUPS for patch in group.patches]


def small_modules(pairs: int = PAIRS) -> nn.Module:
    """Pairs of a Linear and a ReLU: modules that compute next to nothing."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(pairs)]
    return nn.Sequential(*layers).eval()


def exported(model: nn.Module, args: Any, *, hurries: bool, **options: Any) -> Any:
    def make(changes: Any) -> None:
        set_variable(changes, running.hurries, hurries)

    with restored(make):
        return htp_export.export(model, args, dynamo=True, **options)


def content(program: Any, file: Path) -> onnx.ModelProto:
    """The saved model, without the numbers of code that FX generates, which are others each time."""
    program.save(file)
    model = onnx.load(file)
    drop_numbers(model.graph.node)
    return model


def drop_numbers(nodes: Any) -> None:
    for node in nodes:
        for entry in node.metadata_props:
            entry.value = re.sub(r"<eval_with_key>\.\d+", "<eval_with_key>", entry.value)
        for attribute in node.attribute:
            drop_numbers(attribute.g.node)


@pytest.mark.parametrize("name", every(8, sorted(NETS)))
def test_a_model_is_the_same_without_what_is_saved(name, tmp_path):
    net = NETS[name]
    if "dynamo" in net.skip:
        pytest.skip("torch does not export it")
    model, kwargs = net.build()
    options = net.export_options("dynamo")
    models = []
    for hurries in (True, False):
        inputs = copy.deepcopy(kwargs)
        program = exported(model, (), hurries=hurries, kwargs=inputs, **options)
        models.append(content(program, tmp_path / "model.onnx"))
    assert models[0] == models[1]
