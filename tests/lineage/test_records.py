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
from htp_export.editing.edit import Edit
from htp_export.editing.editing import add_constant, insert_behind, replace_with
from htp_export.errors import HtpExportError
from htp_export.format.call_tree import Instance
from htp_export.lineage.records import checked_changes, record_replacement
from htp_export.lineage.settling import Bookkeeping
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
