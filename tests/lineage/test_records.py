"""What is recorded of a change is what the graph says: passes and commands, and a pass that lies."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export import passes
from htp_export.capabilities.optimize import registry
from htp_export.capabilities.optimize.optimizing import Pipeline
from htp_export.editing.edit import Edit
from htp_export.editing.editing import add_constant, insert_behind, replace_with
from htp_export.errors import HtpExportError
from htp_export.format.call_tree import Instance
from htp_export.lineage.records import checked_changes, record_replacement
from htp_export.lineage.settling import Bookkeeping
from htp_export.shapes.symbolic import Symbolic
from tests.nets import EXPORTERS, NETS
from tools.owner_golden import OPERATIONS, export_to

QUICK = ["multihead_attention", "lstm", "siblings"]


@pytest.fixture
def tagged():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU()).eval()
    return htp_export.load(htp_export.export(net, (torch.randn(2, 4),), verbose=False)).clone()


def relus(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "Relu"]


def test_a_pass_that_says_something_else_than_it_did_is_found(tagged):
    first, second = relus(tagged.model)
    with checked_changes():
        books = Bookkeeping(tagged)
        assert replace_with(first.outputs[0], first.inputs[0])
        record_replacement(first.outputs[0], second.outputs[0])
        with pytest.raises(
            HtpExportError, match="reads 'linear' in place of 'relu', and 'relu_1' was recorded"
        ):
            books.settle()


def test_without_the_switch_nothing_is_compared(tagged):
    first, second = relus(tagged.model)
    books = Bookkeeping(tagged)
    assert replace_with(first.outputs[0], first.inputs[0])
    record_replacement(first.outputs[0], second.outputs[0])
    books.settle()


def test_the_recorded_value_replaces_a_tensor_of_which_another_consumer_reads_a_constant(tagged):
    """The last consumer that differs decides only without a record."""
    first, second = relus(tagged.model)
    [relu] = first.outputs
    shown = ir.node("Sigmoid", [relu], name="shown", metadata_props=dict(second.metadata_props))
    insert_behind(tagged.model.graph, tagged.model.graph.outputs[0], shown)
    shown.outputs[0].name = "shown"
    tagged.model.graph.outputs.append(shown.outputs[0])
    tagged = tagged.refresh()

    books = Bookkeeping(tagged)
    new = ir.node("Elu", [first.inputs[0]], name="elu")
    new.outputs[0].name = "elu"
    insert_behind(tagged.model.graph, first.inputs[0], new)
    record_replacement(relu, new.outputs[0])
    constant = add_constant(tagged.model.graph, np.zeros((2, 4), np.float32), "zeros")
    readers = {use.node for use in relu.uses()}
    for reader in readers:
        reader.replace_input_with(0, constant if reader is shown else new.outputs[0])
    tagged.model.graph.remove(first)
    books.settle()
    assert new.metadata_props["htp.module"] == "1"
    assert new.metadata_props["htp.reason"] == first.metadata_props["htp.reason"]


@pytest.mark.long
@pytest.mark.parametrize("rewired", [False, True])
def test_a_pass_that_changes_the_model_and_reports_no_change_is_found(tagged, monkeypatch, rewired):
    def lie(_: object, model: ir.Model) -> ir.passes.PassResult:
        first, _ = relus(model)
        if rewired:
            first.outputs[0].replace_all_uses_with(first.inputs[0])
        else:
            insert_behind(
                model.graph, first.outputs[0], ir.node("Neg", first.outputs, name="added")
            )
        return ir.passes.PassResult(model, modified=False)

    info = registry.find("inline_branches")
    monkeypatch.setattr(type(info.make()), "call", lie)
    with (
        checked_changes(),
        pytest.raises(HtpExportError, match="no change was reported, and there"),
    ):
        Pipeline([info]).run(tagged)


def test_a_weight_that_a_pass_removes_without_a_report_does_not_end_a_run_that_may_be_undone(
    tagged, monkeypatch
):
    """The copy to which a pass may be undone is paired with the model by values, not by their order."""

    def remove(_: object, model: ir.Model) -> ir.passes.PassResult:
        del model.graph.initializers["unread"]
        return ir.passes.PassResult(model, modified=False)

    add_constant(tagged.model.graph, np.zeros(2, np.float32), "unread")
    removing, other = registry.find("inline_branches"), registry.find("eliminate_dead_nodes")
    monkeypatch.setattr(type(removing.make()), "call", remove)
    assert len(Pipeline([removing, other], keep_exact=True).run(tagged).nodes) == 4


def test_shapes_are_inferred_again_only_after_a_pass_that_changed_the_model(monkeypatch):
    inferred = []

    class Counting(Symbolic):
        def __init__(self, graph: ir.Graph, *args: object) -> None:
            inferred.append(graph)
            super().__init__(graph, *args)

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x.transpose(1, 2)).transpose(1, 2) + x

    monkeypatch.setattr(registry, "Symbolic", Counting)
    chosen = ["eliminate_identity_ops", "simplify_shape_chains", "merge_layout_ops"]
    exported = htp_export.export(Net().eval(), (torch.randn(2, 3, 4),), verbose=False)
    again = htp_export.optimize(exported, passes=chosen)
    assert again.nodes_after == again.nodes_before
    assert len(inferred) == 1
    identity = ir.node("Identity", [exported.model.graph.inputs[0]], name="copy")
    identity.metadata_props["htp.module"] = ""
    first = exported.model.graph[0]
    exported.model.graph.insert_before(first, identity)
    first.replace_input_with(0, identity.outputs[0])
    inferred.clear()
    assert htp_export.optimize(exported, passes=chosen).nodes_after == again.nodes_after
    assert len(inferred) == 2


def test_an_edit_that_records_something_else_is_found(tagged):
    value = tagged.values["linear"]
    edit = None
    with checked_changes():
        edit = Edit(tagged)
        node = edit.node("Neg", [value], Instance("0"), "negated")
        insert_behind(edit.graph, value, node)
        edit.replace_uses(value, node.outputs[0], [(relus(tagged.model)[0], 0)], rest="before")
        record_replacement(value, tagged.model.graph.outputs[0])
        with pytest.raises(HtpExportError, match="was recorded to replace it"):
            edit.finish()


def tried(
    name: str, exporter: str, folder: Path, operations: dict[str, Callable[[Path, Path], object]]
) -> None:
    file = export_to(folder, name, exporter)
    with checked_changes():
        for operation in operations.values():
            try:
                operation(file, folder / "changed.onnx")
            except htp_export.InputError:  # the net has nothing that the command is for
                continue


@pytest.mark.long
@pytest.mark.parametrize("name", QUICK)
def test_passes_and_commands_do_what_they_record(name, tmp_path):
    tried(name, "dynamo", tmp_path, OPERATIONS)


@pytest.mark.slow
@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("name", NETS)
def test_passes_and_commands_do_what_they_record_on_all_nets(name, exporter, tmp_path):
    if exporter in NETS[name].skip:
        pytest.skip("the exporter cannot export the net")
    each: dict[str, Callable[[Path, Path], object]] = {
        known: lambda file, out, known=known: htp_export.optimize(
            file, out, passes=[known], level="fused"
        )
        for known in passes.available()
    }
    tried(name, exporter, tmp_path, {**OPERATIONS, **each})
