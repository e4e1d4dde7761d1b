"""Owners in branches and loop bodies, and of ``autograd.Function``s that have an ONNX translation of their own."""

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
from htp_export.errors import CaptureError, UntaggedExportWarning
from htp_export.exporter.capture.fx_calls import FxCalls
from htp_export.exporter.capture_session import captured_with
from tests.exporting import converts_loops, exported, exported_once, metadata, quick
from tests.nets import NETS, Apply, Holding, ready, x
from tests.truth import Judge, fates_of, nodes_of, owners_by_type, owners_of, tree_of


class Holder(Holding, a=nn.Linear(4, 4), b=nn.Linear(4, 4, bias=False), act=nn.Tanh()):
    """Its subclasses run these parts in branches and in bodies of loops."""


def inputs() -> dict[str, Any]:
    return {"x": x(2, 4)}


class Branches(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def high(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.act(self.a(x.sin()))
            return y.exp()

        def low(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.b(x.unsqueeze(0))
            return y.squeeze(0)

        return torch.cond(x.sum() > 0, high, low, (x,))  # type: ignore[no-any-return]


class Loops(Holder, limit=nn.Sequential(nn.Sigmoid())):
    """Its condition runs a module, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def again(step: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return (step < 3) & (self.limit(x).sum() < 100)

        def body(step: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return step + 1, self.act(self.b(x.unsqueeze(0)).squeeze(0).sin())

        from torch._higher_order_ops import while_loop

        return while_loop(again, body, (torch.tensor(0), x))[1]


BRANCHES = {
    "Gemm": [("a",)],
    "MatMul": [("b",)],
    "Tanh": [("act",)],
    "Sin": [("",)],
    "Exp": [("",)],
}
LOOPS = {
    "MatMul": [("b",)],
    "Tanh": [("act",)],
    "Sigmoid": [("limit.0",)] * 2,
    "Sin": [("",)],
    "Add": [("",)],
}
WITH_LOOPS = pytest.mark.parametrize(
    ("make", "owners"), [(Branches, BRANCHES), pytest.param(Loops, LOOPS, marks=converts_loops)]
)
MAKES = pytest.mark.parametrize(
    ("make", "owners"),
    [(Branches, BRANCHES), pytest.param(Loops, LOOPS, marks=(converts_loops, pytest.mark.slow))],
)


# Below opset 18 the graph is read back from bytes, without metadata.
@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {},
        *(
            pytest.param(options, marks=pytest.mark.slow)
            for options in ({"opset_version": 16}, {"optimize": False})
        ),
    ],
    ids=["as_is", "opset_16", "raw"],
)
@WITH_LOOPS
def test_modules_with_and_without_parameters_own_their_nodes_in_bodies(
    make, owners, options, tmp_path
):
    if options:
        file = exported(ready(make()), inputs(), "dynamo", tmp_path, **options)
    else:
        file = onnx.load(exported_once(make, inputs, "dynamo", tmp_path)[1])
    assert owners_by_type(file, *owners) == owners
    ran = {
        path: entry
        for path, entry in tree_of(file).items()
        if path in ("", "b", "act", "limit", "limit.0")
    }
    assert {(entry["fate"], entry["calls"]) for entry in ran.values()} == {("computed", 1)}


class ReadsNoResult(Holding, branches=Branches(), fc=nn.Linear(4, 4)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.branches(x)
        return self.fc(x)


@pytest.mark.long
def test_modules_in_branches_whose_result_nothing_reads_are_dead(tmp_path):
    model = ready(ReadsNoResult())
    file = exported(model, inputs(), "dynamo", tmp_path)
    assert {fate for path, fate in fates_of(file).items() if path.startswith("branches")} == {
        "dead"
    }
    assert Judge(model, inputs(), file).faults() == []


class ReadsWithoutACall(Holder):
    """The root itself computes with the weights of a module that never runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def high(x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.a.weight, self.a.bias)

        return torch.cond(x.sum() > 0, high, lambda x: x.sin(), (x,))  # type: ignore[no-any-return]


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "path"),
    [
        (Branches, "a"),
        pytest.param(Branches, "b", marks=pytest.mark.slow),
        pytest.param(Loops, "b", marks=(converts_loops, pytest.mark.slow)),
        (ReadsWithoutACall, None),
    ],
)
def test_verify_notices_a_parameter_in_a_body_that_another_module_reads(make, path, tmp_path):
    model, path_of_file = exported_once(make, inputs, "dynamo", tmp_path)
    file = onnx.load(path_of_file)
    right = htp_export.verify(model, file, (x(2, 4),))
    assert (right.ok, right.misplaced) == (True, ())
    moved = [
        entry for node in nodes_of(file) for entry in node.metadata_props if entry.value == path
    ]
    for entry in moved:
        entry.value = ""
    wrong = htp_export.verify(model, file, (x(2, 4),))
    held = {None: set(), "a": {"a.weight", "a.bias"}, "b": {"b.weight"}}
    assert ({line.split()[0] for line in wrong.misplaced}, wrong.ok) == (held[path], path is None)


@pytest.mark.long
@MAKES
def test_the_bodies_of_a_program_exported_in_strict_mode_have_the_paths_of_the_model(
    make, owners, tmp_path
):
    program = torch.export.export(ready(make()), (x(2, 4),), strict=True)
    file = exported(program, {}, "dynamo", tmp_path)
    assert owners_by_type(file, *owners) == owners
    assert "_export_root" not in tree_of(file)


@pytest.mark.long
@MAKES
def test_in_bodies_of_other_programs_parameters_tell_their_module_and_all_else_is_the_holders(
    make, owners, tmp_path
):
    program = torch.export.export(ready(make()), (x(2, 4),))
    file = exported(program, {}, "dynamo", tmp_path)
    without_parameters = {
        kind: [("",)] * len(owners[kind]) for kind in ("Tanh", "Sigmoid") if kind in owners
    }
    # torch keeps no record of what runs there
    assert owners_by_type(file, *owners) == {**owners, **without_parameters}
    read = [
        metadata(node)["htp.reason"]
        for node in nodes_of(file)
        if node.op_type in ("Gemm", "MatMul")
    ]
    assert set(read) == {"parameters"}


def nodes_with_owners(file: onnx.ModelProto) -> list[tuple[str, tuple[str, ...], str]]:
    return [
        (node.op_type, owners_of(node), metadata(node).get("htp.call", ""))
        for node in nodes_of(file)
    ]


# torch 2.10 reads a saved program from a buffer that cannot be written to.
@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("Loops", marks=(converts_loops, pytest.mark.slow)),
        *quick(
            (
                "outside_and_in_a_branch",
                "cond_over_self",
                "modules_in_branches",
                "branches_inside_branches",
            ),
            "outside_and_in_a_branch",
        ),
    ],
)
def test_the_bodies_of_a_program_made_while_tags_are_wanted_have_the_modules_of_the_model(
    name, tmp_path, shared_files
):
    model, kwargs = (ready(Loops()), inputs()) if name == "Loops" else NETS[name].build()
    with htp_export.tagging():
        program = torch.export.export(model, (), kwargs, strict=False)
    torch.export.save(program, tmp_path / "program.pt2")
    loops = name == "Loops"
    whole = (
        exported(model, kwargs, "dynamo", tmp_path) if loops else shared_files.read(name, "dynamo")
    )
    ran = {path: entry["calls"] for path, entry in tree_of(whole).items() if entry["calls"]}
    for given in (program, torch.export.load(tmp_path / "program.pt2")):
        file = exported(given, {}, "dynamo", tmp_path)
        assert nodes_with_owners(file) == nodes_with_owners(whole)
        assert {
            path: entry["calls"] for path, entry in tree_of(file).items() if entry["calls"]
        } == ran
        assert htp_export.verify(model, file, (), kwargs).ok


def test_a_fault_while_the_modules_of_bodies_are_written_is_no_error_of_the_program(monkeypatch):
    def fails(*_: Any) -> None:
        raise ValueError("not so")

    monkeypatch.setattr(FxCalls, "write_stacks", fails)
    model = ready(Apply(torch.sin))
    with htp_export.tagging(), pytest.raises(CaptureError, match="writing the modules of bodies"):
        torch.export.export(model, (x(2, 4),))
    with htp_export.tagging(strict=False), pytest.warns(UntaggedExportWarning, match="not so"):
        program = torch.export.export(model, (x(2, 4),))
    assert torch.equal(program.module()(x(2, 4)), x(2, 4).sin())


class Scripted(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.a(x)) if bool(x.sum() > 0) else self.b(x.sin())
        for _ in range(x.size(0)):
            y = self.act(self.b(y)).exp()
        return y


def test_the_modules_of_a_scripted_model_own_their_nodes_in_branches_and_loops(tmp_path):
    model = torch.jit.script(ready(Scripted()))
    file = exported(model, {"x": x(2, 4)}, "torchscript", tmp_path)
    assert owners_by_type(file, "Gemm", "MatMul", "Tanh", "Sin", "Exp", "If", "Loop") == {
        "Gemm": [("a",)],
        "MatMul": [("b",), ("b",)],
        "Tanh": [("act",), ("act",)],
        "Sin": [("",)],
        "Exp": [("",)],
        "If": [("",)],
        "Loop": [("",)],
    }
    assert set(fates_of(file).values()) == {"computed"}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2.0

    @staticmethod
    def symbolic(graph: Any, x: Any) -> Any:
        return graph.op("Mul", graph.op("Sin", x), graph.op("Constant", value_t=torch.tensor(2.0)))


class Waves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), x.cos()

    @staticmethod
    def symbolic(graph: Any, x: Any) -> Any:
        return graph.op("Sin", x), graph.op("Cos", x)


class AppliesFunctions(
    Holding,
    **{name: nn.Linear(4, 4) for name in "abc"},
    function=Apply(Doubled.apply),
    again=Apply(Doubled.apply),
):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = Waves.apply(self.again(self.b(self.function(self.a(x)))))  # type: ignore[no-untyped-call]
        return self.c(one).tanh() + other


def test_a_function_with_a_translation_of_its_own_belongs_to_the_module_that_applies_it(tmp_path):
    file = exported(ready(AppliesFunctions()), {"x": x(2, 4)}, "torchscript", tmp_path)
    assert owners_by_type(file, "Gemm", "Sin", "Mul", "Cos", "Tanh") == {
        "Gemm": [("a",), ("b",), ("c",)],
        "Sin": [("function",), ("again",), ("",)],
        "Mul": [("function",), ("again",)],
        "Cos": [("",)],
        "Tanh": [("",)],
    }
    assert set(fates_of(file).values()) == {"computed"}


# --- programs that torch.export makes while tags are wanted: their files say what files of the models say ---


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


FEW = ("mask_made_in_every_layer", "cond", "graph_module_as_the_model")
OTHERS = sorted(name for name, net in NETS.items() if "dynamo" not in net.skip and name not in FEW)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_the_file_of_a_program_says_what_the_file_of_its_model_says(name, shared_files, tmp_path):
    model, kwargs = NETS[name].build()
    program = made(model, kwargs, **NETS[name].export_options("dynamo"))
    assert told(exported(program, {}, "dynamo", tmp_path)) == told(
        shared_files.read(name, "dynamo")
    )


def test_a_program_made_elsewhere_has_neither_signatures_nor_parameters(tmp_path):
    model, kwargs = NETS["siblings"].build()
    file = exported(torch.export.export(model, (), kwargs, strict=False), {}, "dynamo", tmp_path)
    keys = set(metadata(file))
    assert "htp.modules" in keys
    assert not {"htp.signatures", "htp.parameters", "htp.frozen"} & keys


@pytest.mark.slow
@pytest.mark.usefixtures("collecting_own")
def test_every_export_of_one_program_says_the_same_also_once_the_model_is_gone(
    shared_files, tmp_path
):
    model, kwargs = NETS["siblings"].build()  # with branches, torch itself holds the model
    program = made(model, kwargs)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    whole = told(shared_files.read("siblings", "dynamo"))
    assert (
        told(exported(program, {}, "dynamo", tmp_path))
        == told(exported(program, {}, "dynamo", tmp_path))
        == whole
    )


@pytest.mark.long
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


@pytest.mark.long
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
    said, whole = (
        metadata(exported(program, {}, "dynamo", tmp_path)),
        metadata(shared_files.read("siblings", "dynamo")),
    )
    assert said["htp.parameters"] == whole["htp.parameters"]
    assert said["htp.modules"] == whole["htp.modules"]
