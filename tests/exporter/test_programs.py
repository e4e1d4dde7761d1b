"""Programs that `torch.export` makes while tags are wanted: their files say what files of the models say."""

import copy
import gc
import pickle
import weakref
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import htp_export
from htp_export.exporter.watched import captured_with
from tests.exporting import exported, metadata
from tests.nets import NETS
from tests.truth import Judge, nodes_of, tree_of


def made(model: nn.Module, kwargs: dict[str, Any], **options: Any) -> Any:
    """The program of a model, as a library makes it under `tagging`."""
    with htp_export.tagging():
        return torch.export.export(model, (), kwargs, strict=False, **options)


def told(file: onnx.ModelProto) -> tuple[Any, ...]:
    """All that a file says of modules."""
    nodes = [(node.op_type, metadata(node)) for node in nodes_of(file)]
    for _, entries in nodes:
        for key in [key for key in entries if not key.startswith("htp.") and key != "namespace"]:
            del entries[key]
    return nodes, metadata(file), file.graph.name


FEW = (
    "mask_made_in_every_layer", "dead_branch_and_unused_module", "no_grad_inside", "cond", "graph_module_as_the_model",
)  # fmt: skip
OTHERS = sorted(name for name, net in NETS.items() if "dynamo" not in net.skip and name not in FEW)


@pytest.mark.parametrize("name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_the_file_of_a_program_says_what_the_file_of_its_model_says(name, shared_files, tmp_path):
    model, kwargs = NETS[name].build()
    program = made(model, kwargs, **NETS[name].export_options("dynamo"))
    assert told(exported(program, {}, "dynamo", tmp_path)) == told(shared_files.read(name, "dynamo"))


def test_a_program_made_elsewhere_has_neither_signatures_nor_parameters(tmp_path):
    model, kwargs = NETS["siblings"].build()
    file = exported(torch.export.export(model, (), kwargs, strict=False), {}, "dynamo", tmp_path)
    keys = set(metadata(file))
    assert "htp.modules" in keys
    assert not {"htp.signatures", "htp.parameters"} & keys


@pytest.mark.slow
@pytest.mark.usefixtures("collecting_own")
def test_every_export_of_one_program_says_the_same_also_once_the_model_is_gone(shared_files, tmp_path):
    model, kwargs = NETS["siblings"].build()  # with branches, torch itself holds the model
    program = made(model, kwargs)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    whole = told(shared_files.read("siblings", "dynamo"))
    assert told(exported(program, {}, "dynamo", tmp_path)) == told(exported(program, {}, "dynamo", tmp_path)) == whole


def test_copies_of_a_program_are_as_exact_as_the_program(shared_files, tmp_path):
    model, kwargs = NETS["siblings"].build()
    program = made(model, kwargs)
    whole = told(shared_files.read("siblings", "dynamo"))
    assert told(exported(copy.copy(program), {}, "dynamo", tmp_path)) == whole
    module = copy.deepcopy(program.graph_module)
    again = torch.export.ExportedProgram(
        module,
        module.graph,
        program.graph_signature,
        program.state_dict,
        program.range_constraints,
        program.module_call_graph,
        program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )
    assert told(exported(again, {}, "dynamo", tmp_path)) == whole


def test_a_decomposed_program_keeps_module_tree_parameters_and_exact_tags(tmp_path):
    model, kwargs = NETS["called_twice"].build()
    with htp_export.tagging():
        program = torch.export.export(model, (), kwargs, strict=False).run_decompositions()
    file = exported(program, {}, "dynamo", tmp_path)
    assert Judge(model, kwargs, file).faults() == []
    assert "htp.parameters" in set(metadata(file))


def test_what_was_captured_is_for_this_process_alone():
    model, kwargs = NETS["siblings"].build()
    captured = captured_with(made(model, kwargs))
    assert captured is not None
    assert pickle.loads(pickle.dumps(captured)) is None


def test_programs_of_two_models_are_told_apart(shared_files, tmp_path):
    wanted, programs = [], []
    for name in ("siblings", "called_twice"):
        model, kwargs = NETS[name].build()
        wanted.append(told(shared_files.read(name, "dynamo")))
        programs.append(made(model, kwargs))
    assert [told(exported(program, {}, "dynamo", tmp_path)) for program in programs] == wanted


def test_an_exported_module_that_is_exported_again_keeps_the_modules_of_its_stacks(tmp_path):
    model, kwargs = NETS["siblings"].build()
    with htp_export.tagging():
        again = torch.export.export(made(model, kwargs).module(), (), kwargs, strict=False)
    tree = tree_of(exported(again, {}, "dynamo", tmp_path))
    assert {path for path, entry in tree.items() if entry["calls"]} >= {"first", "second"}


def test_a_program_made_in_strict_mode_has_parameters(shared_files, tmp_path):
    model, kwargs = NETS["siblings"].build()
    with htp_export.tagging():
        program = torch.export.export(model, (), kwargs, strict=True)
    said, whole = metadata(exported(program, {}, "dynamo", tmp_path)), metadata(shared_files.read("siblings", "dynamo"))
    assert said["htp.parameters"] == whole["htp.parameters"]
    assert said["htp.modules"] == whole["htp.modules"]
