"""An export prints nothing, and a notebook shows its module tree."""

import logging
import subprocess
import sys
import warnings

import pytest
import torch

import htp_export
from tests.nets import EXPORTERS, x

PROGRAM = """
import torch, htp_export
net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
htp_export.export(net, (torch.randn(2, 4),), "net.onnx", dynamo={dynamo}{options})
"""


def exported_in_a_process(folder, dynamo, options=""):
    text = PROGRAM.format(dynamo=dynamo, options=options)
    return subprocess.run(
        [sys.executable, "-c", text], cwd=folder, capture_output=True, text=True, check=True
    )


@pytest.mark.long
@pytest.mark.parametrize("exporter", EXPORTERS)
def test_an_export_prints_nothing(tmp_path, exporter):
    # torch alone prints a line for each step, four about torchvision, and a warning about itself
    process = exported_in_a_process(tmp_path, exporter == "dynamo")
    assert process.stdout + process.stderr == ""


@pytest.mark.long
def test_progress_is_printed_if_it_is_asked_for(tmp_path):
    process = exported_in_a_process(tmp_path, True, ", verbose=True")
    assert "Translate the graph into ONNX" in process.stdout


def test_warnings_of_the_model_are_shown_and_the_filters_are_those_of_before():
    class Warns(torch.nn.Module):
        def forward(self, y):
            warnings.warn("this model rounds", UserWarning, stacklevel=2)
            return y.round()

    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    before = list(warnings.filters), list(logger.filters)
    with pytest.warns(UserWarning, match="this model rounds"):
        htp_export.export(Warns().eval(), (x(2),))
    assert (list(warnings.filters), list(logger.filters)) == before


def test_a_notebook_shows_the_tree_of_a_program():
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
    program = htp_export.export(net, (x(2, 4),))
    shown = program._repr_mimebundle_(include=None, exclude=None)
    assert shown["text/plain"] == "<TaggedModel Sequential: 3 modules, tags: htp>"
    assert "Linear" in shown["text/html"]
