"""Tags that are wrong although every tensor of the file has the right values: verify says so."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest

import htp_export
from htp_export.capabilities.verify.locating import contradictions
from tests.exporter.test_exactness import declare, retag
from tests.exporting import SharedFiles
from tests.nets import NETS

NET = "view_after_a_change"  # a convolution, a change in place, a view, a linear layer


@pytest.fixture
def right(shared_files: SharedFiles) -> onnx.ModelProto:
    return shared_files.read(NET, "dynamo")


def wrong(right: onnx.ModelProto, op_type: str, owner: str, path: str = "", fate: str = "") -> onnx.ModelProto:
    """The file with a node of another owner, and a module of another fate."""
    file = onnx.ModelProto()
    file.CopyFrom(right)
    retag(file, op_type, owner)
    if fate:
        declare(file, path, fate)
    return file


CASES = {
    "a constant whose node is the reader's": (
        ("Reshape", "3", "2", "constant"),
        {
            "2": "it is said to be constant, but 'view_1', which it gives back, depends on the inputs",
            "3": "'view_1', which it is given, is computed by its own nodes",
        },
    ),
    "dead, and a result depends on it": (
        ("Reshape", "2", "2", "dead"),
        {"2": "it is said to be dead, but 'view_1', which it gives back, leads to a result"},
    ),
    "computed by the model itself": (
        ("Reshape", "", "", ""),
        {"2": "'view_1', which it gives back, is computed by the model itself"},
    ),
    "computed by the module before": (
        ("Relu", "0", "", ""),
        {"1": "'relu', which it gives back, is computed by '0'"},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("isolated", [False, True])
def test_verify_names_modules_whose_tags_contradict_the_graph(
    case: str, isolated: bool, right: onnx.ModelProto
) -> None:
    (op_type, owner, path, fate), expected = CASES[case]
    file = wrong(right, op_type, owner, path, fate)
    result = htp_export.verify(*model_and_file(file), isolated=isolated)
    assert not result.ok
    assert set(expected) <= set(result.wrong)
    if not isolated:  # alone, what has no nodes cannot run, which is said instead
        assert {path: each.reason for path, each in result.modules.items() if each.status == "differs"} == expected


def model_and_file(file: onnx.ModelProto) -> tuple[object, onnx.ModelProto, tuple[object, ...]]:
    model, kwargs = NETS[NET].build()
    return model, file, tuple(kwargs.values())


def test_right_tags_are_no_contradiction_and_selected_modules_alone_are_looked_at(right: onnx.ModelProto) -> None:
    assert contradictions(htp_export.load(right)) == {}
    file = wrong(right, "Reshape", "3", "2", "constant")
    assert htp_export.verify(*model_and_file(file), select=["0", "1"]).ok
    assert htp_export.verify(*model_and_file(file), select="2").wrong == ("2",)


def test_a_border_that_the_export_found_wrong_itself_is_excused(right: onnx.ModelProto) -> None:
    file = wrong(right, "Relu", "0")
    file.metadata_props.add(key="htp.contamination", value=json.dumps([["1", "relu", True]]))
    assert contradictions(htp_export.load(file)) == {}


def test_a_file_without_signatures_shows_nothing(right: onnx.ModelProto, tmp_path: Path) -> None:
    file = wrong(right, "Reshape", "3", "2", "constant")
    kept = [entry for entry in file.metadata_props if entry.key != "htp.signatures"]
    del file.metadata_props[:]
    file.metadata_props.extend(kept)
    assert contradictions(htp_export.load(file)) == {}


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("name", ["zeros_of_the_same_size", "input_beside_something_new", "loop_of_three", "cells"])
def test_what_is_read_for_its_size_given_on_or_given_back_again_is_no_contradiction(
    name: str, exporter: str, shared_files: SharedFiles
) -> None:
    assert contradictions(htp_export.load(shared_files.read(name, exporter))) == {}
