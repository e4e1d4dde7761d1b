"""The module tree and its JSON."""

import json

import pytest
from torch import nn

from htp_export.format.hierarchy import Hierarchy, ModuleInfo


@pytest.fixture
def tree() -> Hierarchy:
    return Hierarchy(
        [
            ModuleInfo("", "net.Net", 1, "computed"),
            ModuleInfo("conv", "torch.nn.modules.conv.Conv2d", 1, "computed"),
            ModuleInfo("bn", "torch.nn.modules.batchnorm.BatchNorm2d", 1, "fused", ("conv",)),
            ModuleInfo("head", "net.Head", 2, "computed"),
            ModuleInfo("head.fc", "torch.nn.modules.linear.Linear", 4, "computed"),
            ModuleInfo("unused", "net.Head"),
        ]
    )


def test_every_module_is_listed_once_in_order_under_its_first_name():
    embed = nn.Linear(2, 2)
    tree = Hierarchy.from_module(nn.Sequential(embed, nn.ModuleList([nn.Linear(2, 2)]), embed))
    classes = {path: name.removeprefix("torch.nn.modules.") for path, name in tree.classes.items()}
    linear = "linear.Linear"
    assert list(classes) == ["", "0", "1", "1.0"]
    assert [*classes.values()] == ["container.Sequential", linear, "container.ModuleList", linear]
    assert {(module.calls, module.fate) for module in tree.values()} == {(0, "uncalled")}


def test_parents_and_children_are_the_nearest_modules(tree):
    assert tree.children("") == ("conv", "bn", "head", "unused")
    assert tree.children("head") == ("head.fc",)
    assert tree.parent("head.fc") == "head"
    assert tree.parent("head.gone.deep") == "head"
    assert tree.parent("") is None
    with pytest.raises(KeyError):
        tree.children("nowhere")


def test_json_is_the_file_format_and_comes_back_the_same(tree):
    text = tree.to_json()
    assert json.loads(text)["bn"] == {
        "class": "torch.nn.modules.batchnorm.BatchNorm2d",
        "calls": 1,
        "fate": "fused",
        "with": ["conv"],
    }
    assert "with" not in json.loads(text)["conv"]
    assert " " not in text
    assert list(Hierarchy.from_json(text).items()) == list(tree.items())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "no root module"),
        ('{"": 3}', "module '' is not a JSON object"),
        ('{"": {"calls": 1, "fate": "computed"}}', "'class' is not a string"),
        ('{"": {"class": "a", "calls": -1, "fate": "computed"}}', "'calls' is not a count: -1"),
        ('{"": {"class": "a", "calls": true, "fate": "computed"}}', "'calls' is not a count: True"),
        ('{"": {"class": "a", "calls": 1, "fate": "eaten"}}', "'fate' is none of computed"),
        ('{"": {"class": "a", "calls": 1, "fate": ["computed"]}}', "'fate' is none of computed"),
        ('{"": {"class": "a", "calls": 1, "fate": "fused", "with": [1]}}', "'with' is not a list"),
        (
            '{"": {"class": "a", "calls": 1, "fate": "computed", "name": 3}}',
            "'name' is not a string: 3",
        ),
    ],
)
def test_malformed_json_is_refused_with_what_is_wrong(text, message):
    with pytest.raises(ValueError, match=message):
        Hierarchy.from_json(text)


def test_results_make_a_new_tree_and_leave_the_old_one(tree):
    new = tree.with_results(
        calls={"unused": 3},
        fates={"unused": "fused", "bn": "computed"},
        fused_with={"unused": ["conv", "head"]},
    )
    assert new["unused"] == ModuleInfo("unused", "net.Head", 3, "fused", ("conv", "head"))
    assert new["bn"].fused_with == ()
    assert tree["unused"].calls == 0
    assert list(new) == list(tree)


def test_a_tree_has_one_root_and_every_path_once():
    with pytest.raises(ValueError, match="no root"):
        Hierarchy([ModuleInfo("a", "net.A")])
    with pytest.raises(ValueError, match="repeated"):
        Hierarchy([ModuleInfo("", "net.A"), ModuleInfo("", "net.B")])


def test_modules_that_only_nodes_name_are_added_below_what_is_known(tree):
    new = tree.including({"conv": 7, "tail.0.fc": 2}, {"tail.0.fc": "net.Fc"})
    assert new["conv"].calls == 1
    assert new["tail.0.fc"] == ModuleInfo("tail.0.fc", "net.Fc", 2, "computed")
    assert new["tail"] == ModuleInfo("tail", "", 0, "uncalled")
    assert new.children("tail") == ("tail.0",)
