"""Verify: which calls and tensors are compared: beside sizes, in branches, and where tags contradict the graph."""

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.verify.locating import contradictions
from htp_export.errors import InputError
from tests import faults
from tests.exporter.test_exactness import declare, retag
from tests.exporting import SharedFiles, exported, open_sizes
from tests.nets import EXPORTERS, NETS, Holding, spread, x

BOTH = pytest.mark.parametrize("exporter", EXPORTERS)
MODES = pytest.mark.parametrize("isolated", [False, True], ids=["whole", "isolated"])


class Sized(Holding, proj=nn.Conv2d(3, 4, 2, 2)):
    """Returns a tensor, one that nothing reads, and sizes."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Size]:
        y = self.proj(x)
        z = y * 2
        return z.flatten(2).transpose(1, 2), y + 1, z.shape[2:]


class ReturnsSizes(Holding, embed=Sized(), fc=nn.Linear(4, 5)):
    """A module whose sizes another one reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, _, (height, width) = self.embed(x)
        out: torch.Tensor = self.fc(tokens).transpose(1, 2).reshape(x.shape[0], -1, height, width)
        return out


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return spread(ReturnsSizes()).eval()


@pytest.fixture(scope="module")
def files(net: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> dict[str, onnx.ModelProto]:
    """Of each exporter, a file whose heights and widths are open."""

    def export(exporter: str) -> onnx.ModelProto:
        sizes = open_sizes(exporter, x={2: "height", 3: "width"})
        return exported(
            net, {"x": x(2, 3, 8, 6)}, exporter, tmp_path_factory.mktemp(exporter), **sizes
        )

    return {exporter: export(exporter) for exporter in EXPORTERS}


def stripped(file: onnx.ModelProto) -> onnx.ModelProto:
    """The file without the names of what modules return, and without types of tensors, as tools leave it."""
    bare = onnx.ModelProto()
    bare.CopyFrom(file)
    kept = [entry for entry in file.metadata_props if entry.key != "htp.signatures"]
    del bare.metadata_props[:]
    bare.metadata_props.extend(kept)
    del bare.graph.value_info[:]
    return bare


@BOTH
@MODES
def test_sizes_that_a_module_returns_are_taken_for_no_tensor(net, files, exporter, isolated):
    for file in (stripped(files[exporter]), files[exporter]):
        result = htp_export.verify(net, file, kwargs={"x": x(2, 3, 4, 10)}, isolated=isolated)
        assert result.ok, result
        (call,) = result.modules["embed"].calls
        assert [output.name for output in call.outputs] == ["0"]
        assert call.outputs[0].difference.max_abs < 1e-5
        assert call.missing == 1  # the second one is read by nobody, and is not in the file
    assert result.modules["embed"].reason == "1 of its outputs are not in the file"


@BOTH
def test_a_fault_in_a_module_that_returns_sizes_is_found(net, files, exporter):
    for file in (files[exporter], stripped(files[exporter])):
        tagged = htp_export.load(file)
        faults.weight_changed(tagged, "embed.proj")
        result = htp_export.verify(net, tagged, kwargs={"x": x(2, 3, 4, 10)})
        assert result.first_wrong == "embed.proj"
        assert result.modules["embed"].status == "inherits"


class Twins(nn.Module):
    """Returns two tensors of one shape, with a size between them."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int, torch.Tensor]:
        return x.exp(), x.shape[1], x.sigmoid()


class UsesTwins(Holding, twins=Twins()):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, size, other = self.twins(x)
        return one.reshape(size, -1) @ other


@BOTH
def test_each_tensor_beside_a_size_is_compared_with_its_own(tmp_path, exporter):
    model = spread(UsesTwins()).eval()
    result = htp_export.verify(
        model, exported(model, {"x": x(3, 3)}, exporter, tmp_path), kwargs={"x": x(3, 3)}
    )
    assert result.ok, result
    (call,) = result.modules["twins"].calls
    assert [output.name for output in call.outputs] == ["0", "1"]
    assert call.missing == 0
    assert result.modules["twins"].reason == ""


# --- ``verify`` and ``compare`` look into the branches that run ---


class Branching(Holding, a=nn.Linear(4, 4), b=nn.Sequential(nn.Linear(4, 4), nn.Tanh())):
    """Two choices, one after the other; a module runs in one branch of each, and twice in the second."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cond(x.sum() > 0, lambda x: self.b(x), lambda x: self.a(x).sin(), (x,))
        z = torch.cond(x.sum() > 5, lambda y: y.cos(), lambda y: self.b(self.b(y)).exp(), (y,))
        result: torch.Tensor = z + 1.0
        return result


@pytest.fixture(scope="module")
def branching(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """The model, and its file, which is not to be written to."""
    model, folder = spread(Branching()).eval(), tmp_path_factory.mktemp("branching")
    exported(model, {"x": x(2, 4)}, "dynamo", folder)
    return model, folder / "model.onnx"


def of_sum(total: float) -> torch.Tensor:
    given = x(2, 4)
    return given - given.mean() + total / given.numel()


@pytest.mark.long
@MODES
@pytest.mark.parametrize(
    ("total", "numbers", "not_taken"),
    [(3.0, [0, 1, 2], {"a"}), (-3.0, [1, 2], set()), (9.0, [0], {"a"})],
    ids=["both", "second_alone", "first_alone"],
)
def test_each_call_in_the_branches_that_run_is_compared_with_the_call_of_the_file(
    total, numbers, not_taken, isolated, branching
):
    model, path = branching
    result = htp_export.verify(model, path, (of_sum(total),), isolated=isolated)
    assert (result.ok, result.misplaced) == (True, ())
    assert [call.number for call in result.modules["b.0"].calls] == numbers
    assert {each.path for each in result.modules.values() if not each.compared} == not_taken
    assert {result.modules[each].reason for each in not_taken} <= {
        "the branch that it runs in was not taken"
    }


@MODES
@pytest.mark.parametrize(
    "fault", [faults.weight_changed, faults.matrix_transposed, faults.nan_planted]
)
def test_a_fault_in_a_branch_is_found_in_the_module_where_it_is(fault, isolated, branching):
    model, path = branching
    tagged = htp_export.load(path)
    fault(tagged, "a")
    assert htp_export.verify(model, tagged, (of_sum(3.0),), isolated=isolated).ok
    result = htp_export.verify(model, tagged, (of_sum(-3.0),), isolated=isolated)
    assert (result.ok, result.wrong[0]) == (False, "a")


def test_a_file_that_takes_the_other_branch_is_wrong_where_the_branches_are(branching):
    model, path = branching
    tagged = htp_export.load(path)
    choice = next(node for node in tagged.nodes if node.op_type == "If")
    then, other = (
        choice.attributes["then_branch"].as_graph(),
        choice.attributes["else_branch"].as_graph(),
    )
    choice.attributes["then_branch"], choice.attributes["else_branch"] = (
        ir.AttrGraph("then_branch", other),
        ir.AttrGraph("else_branch", then),
    )
    result = htp_export.verify(model, tagged, (of_sum(-3.0),))
    assert (result.ok, result.modules["a"].status) == (False, "not compared")
    assert (
        result.modules["a"].reason
        == "it runs in a branch that PyTorch took now, and the file did not"
    )


@pytest.mark.parametrize(
    "name",
    ["modules_in_branches", pytest.param("branches_inside_branches", marks=pytest.mark.slow)],
)
def test_two_files_are_compared_in_the_branches_that_run(name, shared_files):
    model, kwargs = NETS[name].build()
    path = shared_files.net(name, "dynamo")
    verified = htp_export.verify(model, path, (), kwargs)
    inputs = {key: value.numpy() for key, value in kwargs.items()}
    result = htp_export.compare(path, path, inputs)
    assert result.ok
    assert {each.path for each in result.modules.values() if each.compared} == {
        each.path for each in verified.modules.values() if each.compared
    }
    before = path.read_bytes()
    tagged = htp_export.load(path)
    inner = next(
        each.path
        for each in verified.modules.values()
        if each.compared and each.path.endswith("fc")
    )
    faults.weight_changed(tagged, inner)
    assert htp_export.compare(path, tagged, inputs).wrong == (inner,)
    assert path.read_bytes() == before


# --- tags that are wrong although every tensor of the file has the right values ---


NET = "view_after_a_change"  # a convolution, a change in place, a view, a linear layer


@pytest.fixture
def right(shared_files: SharedFiles) -> onnx.ModelProto:
    return shared_files.read(NET, "dynamo")


def wrong(
    right: onnx.ModelProto, op_type: str, owner: str, path: str = "", fate: str = ""
) -> onnx.ModelProto:
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
            "2": "it is tagged constant, but its output 'view_1' depends on the inputs",
            "3": "its input 'view_1' is computed by its own nodes",
        },
    ),
    "dead, and a result depends on it": (
        ("Reshape", "2", "2", "dead"),
        {"2": "it is tagged dead, but its output 'view_1' leads to a result"},
    ),
    "computed by the model itself": (
        ("Reshape", "", "", ""),
        {"2": "its output 'view_1' is computed by the model itself"},
    ),
    "computed by the module before": (
        ("Relu", "0", "", ""),
        {"1": "its output 'relu' is computed by '0'"},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("isolated", [False, True])
def test_verify_names_modules_whose_tags_contradict_the_graph(case, isolated, right):
    (op_type, owner, path, fate), expected = CASES[case]
    file = wrong(right, op_type, owner, path, fate)
    result = htp_export.verify(*model_and_file(file), isolated=isolated)
    assert not result.ok
    assert set(expected) <= set(result.wrong)
    if not isolated:  # alone, what has no nodes cannot run, which is said instead
        assert {
            path: each.reason for path, each in result.modules.items() if each.status == "differs"
        } == expected


def model_and_file(file: onnx.ModelProto) -> tuple[object, onnx.ModelProto, tuple[object, ...]]:
    model, kwargs = NETS[NET].build()
    return model, file, tuple(kwargs.values())


def test_right_tags_are_no_contradiction_and_selected_modules_alone_are_looked_at(right):
    assert contradictions(htp_export.load(right)) == {}
    file = wrong(right, "Reshape", "3", "2", "constant")
    assert htp_export.verify(*model_and_file(file), select=["0", "1"]).ok
    assert htp_export.verify(*model_and_file(file), select="2").wrong == ("2",)


def test_a_border_that_the_export_found_wrong_itself_is_excused(right):
    file = wrong(right, "Relu", "0")
    file.metadata_props.add(key="htp.contamination", value=json.dumps([["1", "relu", True]]))
    assert contradictions(htp_export.load(file)) == {}


def test_a_file_without_signatures_shows_nothing(right, tmp_path):
    file = wrong(right, "Reshape", "3", "2", "constant")
    kept = [entry for entry in file.metadata_props if entry.key != "htp.signatures"]
    del file.metadata_props[:]
    file.metadata_props.extend(kept)
    assert contradictions(htp_export.load(file)) == {}


@pytest.mark.long
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize(
    "name", ["zeros_of_the_same_size", "input_beside_something_new", "loop_of_three", "cells"]
)
def test_what_is_read_for_its_size_given_on_or_given_back_again_is_no_contradiction(
    name, exporter, shared_files
):
    assert contradictions(htp_export.load(shared_files.read(name, exporter))) == {}


# --- `verify` of what was just exported: its model and example inputs are known, and  ---


class Scaled(Holding, fc=nn.Linear(4, 3), drop=nn.Dropout(0.5)):
    """Takes one argument by position and two by keyword, and computes otherwise in training."""

    def forward(
        self, x: torch.Tensor, pair: list[torch.Tensor], *, factor: float = 1.0
    ) -> torch.Tensor:
        y: torch.Tensor = self.drop(self.fc(x)) * factor + pair[0] - pair[1]
        return y


def call() -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (torch.randn(2, 4), [torch.randn(3), torch.randn(3)]), {"factor": 2.0}


@pytest.mark.parametrize("names", [None, "path"])
def test_a_program_is_verified_with_the_call_that_it_was_exported_with_in_training_mode_too(names):
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
def test_temporary_inputs_are_those_of_the_exported_program(tmp_path):
    net, file = nn.Sequential(nn.Linear(4, 3)).eval(), tmp_path / "net.onnx"
    program = htp_export.export(net, (torch.randn(2, 4),), file, verbose=False)
    gc.collect()
    assert htp_export.verify(program).ok
    assert htp_export.verify(net, file).ok
    del program
    gc.collect()
    with pytest.raises(
        InputError, match=r"net\.onnx: the example inputs of its export are gone, .*; give args"
    ):
        htp_export.verify(net, file)
    assert htp_export.verify(net, file, (torch.randn(2, 4),)).ok


@pytest.mark.parametrize("dynamo", [True, False])
def test_a_file_is_verified_with_the_call_that_it_was_exported_with(dynamo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net, x = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval(), torch.randn(2, 4)
    htp_export.export(net, (x,), "net.onnx", dynamo=dynamo, verbose=False)
    assert htp_export.verify(net, tmp_path / "net.onnx").ok
    twin = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()
    with pytest.raises(InputError, match="takes 1 inputs, and the call has 0 tensors"):
        htp_export.verify(twin, "net.onnx")


@pytest.mark.usefixtures("collecting_own")
def test_neither_model_nor_inputs_are_kept_alive(tmp_path):
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


def test_what_is_not_known_is_an_error_that_says_what_to_give():
    net, x = nn.Sequential(nn.Linear(4, 3)).eval(), torch.randn(2, 4)
    with htp_export.tagging():
        theirs = torch.onnx.export(net, (x,), dynamo=True, verbose=False)
    assert theirs is not None
    with pytest.raises(
        InputError, match=r"cannot find the nn\.Module .* give verify\(model, program, args\)"
    ):
        htp_export.verify(theirs)
    with pytest.raises(
        InputError, match=r"a model and its file, or the program that htp_export\.export returned"
    ):
        htp_export.verify(net)
    with pytest.raises(InputError, match="a program includes its model"):
        htp_export.verify(theirs, theirs)
