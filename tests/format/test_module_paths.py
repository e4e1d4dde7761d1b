"""Modules that have one name in ``named_modules()``: each has a path of its own, and the file says its name."""

from typing import Any

import onnx
import torch
from torch import nn

import htp_export
from htp_export.format.hierarchy import Hierarchy, ModuleInfo, module_paths
from htp_export.format.parameters import parameters_of
from tests.exporting import BOTH, exported
from tests.nets import composed, spread, x
from tests.truth import nodes_of, owners_of, tree_of


class EmptyName(nn.Module):
    """Holds a module under the empty name, which has the name of the root, and one inside it."""

    def __init__(self) -> None:
        super().__init__()
        self._modules[""] = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: Any = self._modules[""]
        return self.fc(first(x).sin())


class NameWithADot(nn.Module):
    """Holds ``a``, with ``b`` inside, beside a module without parameters that is called ``a.b``."""

    def __init__(self) -> None:
        super().__init__()
        self.a = composed(lambda self, x: self.b(x).sin(), b=nn.Linear(4, 4))
        self._modules["a.b"] = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other: Any = self._modules["a.b"]
        return other(self.a(x)).cos()


def built(kind: type[nn.Module]) -> nn.Module:
    return spread(kind()).eval()


def owners_by_type(file: onnx.ModelProto) -> list[tuple[str, tuple[str, ...]]]:
    return [
        (node.op_type, owners_of(node)) for node in nodes_of(file) if node.op_type != "Constant"
    ]


def agrees_everywhere(model: nn.Module, file: onnx.ModelProto) -> None:
    report = htp_export.verify(model, file, (x(2, 4),))
    every = {path: "agrees" for path, _, _ in module_paths(model)}
    assert {path: result.status for path, result in report.modules.items()} == every
    assert report.misplaced == ()


@BOTH
def test_a_module_with_the_name_of_the_root_has_a_path_of_its_own(exporter, tmp_path):
    model = built(EmptyName)
    file = exported(model, {"x": x(2, 4)}, exporter, tmp_path)
    assert owners_by_type(file) == [
        ("Gemm", ("#2.0",)),
        ("Sigmoid", ("#2.1",)),
        ("Sin", ("",)),
        ("Gemm", ("fc",)),
    ]
    tree = tree_of(file)
    assert {path: entry["fate"] for path, entry in tree.items()} == dict.fromkeys(tree, "computed")
    names = {"": None, "#2": "", "#2.0": "0", "#2.1": "1", "fc": None}
    assert {path: entry.get("name") for path, entry in tree.items()} == names
    agrees_everywhere(model, file)


@BOTH
def test_a_name_with_a_dot_beside_the_same_name_in_two_steps_has_a_path_of_its_own(
    exporter, tmp_path
):
    model = built(NameWithADot)
    file = exported(model, {"x": x(2, 4)}, exporter, tmp_path)
    assert owners_by_type(file) == [
        ("Gemm", ("a.b",)),
        ("Sin", ("a",)),
        ("Tanh", ("a.b#2",)),
        ("Cos", ("",)),
    ]
    tagged = htp_export.load(file)
    assert tagged.hierarchy["a.b#2"] == ModuleInfo(
        "a.b#2", "torch.nn.modules.activation.Tanh", 1, "computed", torch_name="a.b"
    )
    # the root called the other one
    assert [node.op_type for node in tagged["a"].nodes] == ["Gemm", "Sin"]
    assert Hierarchy.from_json(tagged.hierarchy.to_json()) == tagged.hierarchy
    agrees_everywhere(model, file)


def test_parameters_are_listed_under_the_path_of_the_module_that_holds_them():
    assert {path: dict(held.shapes) for path, held in parameters_of(EmptyName()).items()} == {
        "#2.0": {"weight": (4, 4), "bias": (4,)},
        "fc": {"weight": (4, 4), "bias": (4,)},
    }


def test_the_paths_of_modules_that_have_several_names_are_the_first_of_them():
    model, shared = nn.Module(), nn.Sequential(nn.ReLU())
    model.one, model.two = shared, shared
    model._modules["one.0"] = nn.ReLU()
    model._modules["one.0#2"] = nn.ReLU()
    paths = [
        ("", ""),
        ("one", "one"),
        ("one.0", "one.0"),
        ("one.0#2", "one.0"),
        ("one.0#2#2", "one.0#2"),
    ]
    assert [(path, name) for path, name, _ in module_paths(model)] == paths
