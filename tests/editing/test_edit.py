"""An edit of a tagged model: owners, signatures and modules follow what is changed through it."""

import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.editing.edit import Edit
from htp_export.editing.editing import insert_behind
from htp_export.errors import HtpExportError
from htp_export.format.call_tree import CallTree, Instance
from htp_export.format.fates import Fate
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.format.model_metadata import read_contamination
from htp_export.format.parameters import ModuleParameters
from htp_export.lineage.tagging import Owned
from htp_export.model.tagged import TaggedModel


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.fc(x).relu())


@pytest.fixture
def tagged() -> TaggedModel:
    program = htp_export.export(Twice().eval(), (torch.randn(2, 4),), verbose=False)
    return htp_export.load(program).clone()


def test_a_node_has_the_call_for_which_it_works(tagged):
    value = tagged.values[tagged.signature("fc", 1).outputs[0]]
    with Edit(tagged) as edit:
        node = edit.node("Neg", [value], Instance("fc", 1), "negated")
        insert_behind(edit.graph, value, node)
        edit.replace_uses(value, node.outputs[0], [], rest="before")
    [negated] = [node for node in tagged["fc"].nodes if node.op_type == "Neg"]
    assert tagged.work_of(negated).calls == (Instance("fc", 1),)
    assert [(change.kind, change.by) for change in edit.changes] == [
        ("node", "fc"),
        ("replaced", negated.outputs[0].name),
    ]
    assert tagged.signature("fc", 1).outputs == (negated.outputs[0].name,)
    assert [value.name for value in tagged.model.graph.outputs] == [negated.outputs[0].name]


def test_a_node_without_an_owner_is_refused(tagged):
    value = tagged.values[tagged.signature("fc").outputs[0]]
    with (
        pytest.raises(HtpExportError, match="Neg 'stray' was added and has no owner"),
        Edit(tagged) as edit,
    ):
        insert_behind(edit.graph, value, ir.node("Neg", [value], name="stray"))


def test_modules_stand_behind_those_below_their_path_and_go_with_their_signatures(tagged):
    with Edit(tagged) as edit:
        edit.add_modules(
            {"": [ModuleInfo("last", "Last", 1)], "fc": [ModuleInfo("fc.inner", "Inner", 2)]}
        )
        edit.signatures["fc.inner"] = edit.signatures["fc"]
        edit.set_fates({"fc": Fate.FUSED})
    assert tagged.paths == ["", "fc", "fc.inner", "last"]
    again = htp_export.load(ir.to_proto(tagged.model))
    assert again.paths == tagged.paths
    assert again.hierarchy["fc"].fate == "fused"
    assert again.signature("fc.inner", 1) == again.signature("fc", 1)
    with Edit(tagged) as edit:
        edit.remove_modules(["fc.inner", "last"])
    assert htp_export.load(ir.to_proto(tagged.model)).paths == ["", "fc"]
    assert "fc.inner" not in tagged.signatures


def test_an_edit_that_changes_no_module_leaves_the_metadata_of_the_model_but_the_map(tagged):
    mapped = htp_export.load(htp_export.embed_map(tagged.model)).clone()
    before = dict(tagged.model.metadata_props)
    with Edit(mapped) as edit:
        edit.graph.append(edit.node("Identity", [edit.graph.inputs[0]], Instance(""), "copy"))
    assert dict(mapped.model.metadata_props) == before
    with Edit(mapped) as edit:
        edit.rename(lambda name: f"new.{name}")
    assert mapped.signature("fc").outputs[0].startswith("new.")


def test_an_error_inside_writes_nothing(tagged):
    before = dict(tagged.model.metadata_props)
    with pytest.raises(KeyError, match="nowhere"), Edit(tagged) as edit:
        edit.remove_modules([tagged.signatures["nowhere"]])
    assert dict(tagged.model.metadata_props) == before


def test_a_node_that_divides_the_work_of_another_has_its_owners(tagged):
    value = tagged.values[tagged.signature("fc", 1).outputs[0]]
    gemm = value.producer()
    with Edit(tagged) as edit:
        half = ir.node("Neg", [value], name="half")
        edit.own_as(half, gemm)
        both = ir.node("Neg", half.outputs, name="both")
        edit.set_owners(both, Owned(("", "fc"), "fused"))
        edit.graph.extend([half, both])
    assert dict(half.metadata_props) == dict(gemm.metadata_props)
    assert tagged.owners_of(both) == ("", "fc")
    assert [str(change) for change in edit.changes] == ["node half: fc", "node both: (root), fc"]


def test_boundary_tensors_that_pytorch_lacks_are_renamed_and_go_with_their_modules(tagged):
    props = tagged.model.metadata_props
    props["htp.contamination"] = '[["fc","a",true],["fc","gone",false],["","b",false]]'
    with Edit(tagged) as edit:
        edit.rename({"a": "new"}.get, ["fc"])
    assert read_contamination(props) == {("fc", "new", True), ("", "b", False)}
    with Edit(tagged) as edit:
        edit.remove_modules(["fc"])
    assert read_contamination(props) == {("", "b", False)}


def test_all_modules_can_be_set_with_calls_and_parameters(tagged):
    root = ModuleInfo("", "Other", 1)
    tree = Hierarchy([root, ModuleInfo("fc", "Linear", 1)])
    with Edit(tagged) as edit:
        edit.set_modules(tree, CallTree(tree))
        edit.signatures = {"fc": edit.signatures["fc"][:1]}
        edit.set_parameters({"fc": ModuleParameters({"weight": (4, 4)})})
    read = htp_export.load(tagged.model)
    assert (read.hierarchy.root.class_name, read["fc"].calls) == ("Other", 1)
    assert list(read.signatures) == ["fc"]
    assert dict(read.parameters["fc"].shapes) == {"weight": (4, 4)}
