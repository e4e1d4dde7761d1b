"""``verify`` and ``compare`` look into the branches that run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from tests import faults
from tests.exporting import exported
from tests.nets import NETS, spread, x

MODES = pytest.mark.parametrize("isolated", [False, True], ids=["whole", "isolated"])


class Branching(nn.Module):
    """Two choices, one after the other; a module runs in one branch of each, and twice in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

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


@MODES
@pytest.mark.parametrize(
    ("total", "numbers", "not_taken"),
    [(3.0, [0, 1, 2], {"a"}), (-3.0, [1, 2], set()), (9.0, [0], {"a"})],
    ids=["both", "second_alone", "first_alone"],
)
def test_each_call_in_the_branches_that_run_is_compared_with_the_call_of_the_file(
    total: float, numbers: list[int], not_taken: set[str], isolated: bool, branching: tuple[nn.Module, Path]
) -> None:
    model, path = branching
    result = htp_export.verify(model, path, (of_sum(total),), isolated=isolated)
    assert (result.ok, result.misplaced) == (True, ())
    assert [call.number for call in result.modules["b.0"].calls] == numbers
    assert {each.path for each in result.modules.values() if not each.compared} == not_taken
    assert {result.modules[each].reason for each in not_taken} <= {"the branch that it runs in was not taken"}


@MODES
@pytest.mark.parametrize("fault", [faults.weight_changed, faults.matrix_transposed, faults.nan_planted])
def test_a_fault_in_a_branch_is_found_in_the_module_where_it_is(
    fault: Callable[..., None], isolated: bool, branching: tuple[nn.Module, Path]
) -> None:
    model, path = branching
    tagged = htp_export.load(path)
    fault(tagged, "a")
    assert htp_export.verify(model, tagged, (of_sum(3.0),), isolated=isolated).ok
    result = htp_export.verify(model, tagged, (of_sum(-3.0),), isolated=isolated)
    assert (result.ok, result.wrong[0]) == (False, "a")


def test_a_file_that_takes_the_other_branch_is_wrong_where_the_branches_are(
    branching: tuple[nn.Module, Path],
) -> None:
    model, path = branching
    tagged = htp_export.load(path)
    choice = next(node for node in tagged.nodes if node.op_type == "If")
    then, other = choice.attributes["then_branch"].as_graph(), choice.attributes["else_branch"].as_graph()
    choice.attributes["then_branch"], choice.attributes["else_branch"] = (
        ir.AttrGraph("then_branch", other),
        ir.AttrGraph("else_branch", then),
    )
    result = htp_export.verify(model, tagged, (of_sum(-3.0),))
    assert (result.ok, result.modules["a"].status) == (False, "not compared")
    assert result.modules["a"].reason == "it runs in a branch that PyTorch took now, and the file did not"


@pytest.mark.parametrize(
    "name", ["modules_in_branches", pytest.param("branches_inside_branches", marks=pytest.mark.slow)]
)
def test_two_files_are_compared_in_the_branches_that_run(name: str, shared_files: Any) -> None:
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
    inner = next(each.path for each in verified.modules.values() if each.compared and each.path.endswith("fc"))
    faults.weight_changed(tagged, inner)
    assert htp_export.compare(path, tagged, inputs).wrong == (inner,)
    assert path.read_bytes() == before
