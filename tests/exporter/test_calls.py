"""Which call ran in which: modules whose calls differ, that call themselves, and that others call."""

import itertools
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator

import onnx
import pytest
import torch
from torch import nn

import htp_export
from htp_export.costs.result import tree_rows
from htp_export.errors import InputError
from htp_export.exporter import owners
from htp_export.exporter.capture.calls import NO_CALL, CallLog, Operation, Record
from htp_export.exporter.owners import Flow
from htp_export.format.call_tree import CallTree, Instance
from htp_export.format.hierarchy import Hierarchy, ModuleInfo
from htp_export.model.tagged import TaggedModel
from tests import handmade
from tests.exporting import BOTH, SharedFiles, exported, quick
from tests.extract.test_cutting import run_file
from tests.nets import EXPORTERS, NETS, Apply, Holding, spread, x
from tests.truth import Opened, equal, run_pytorch

# Each net with both exporters; where tools read what is in a file, each net with one of them.
NAMES = (
    "uneven_calls",
    "child_calls_itself",
    "child_of_two_parents",
    "called_from_outside",
    "two_parents_in_a_loop",
)
EVERY = pytest.mark.parametrize(("name", "exporter"), [*itertools.product(NAMES, EXPORTERS)])
EACH = pytest.mark.parametrize(
    ("name", "exporter"),
    quick(
        itertools.product(NAMES, EXPORTERS), *zip(NAMES, itertools.cycle(EXPORTERS), strict=False)
    ),
)


def made(name: str) -> nn.Module:
    return NETS[name].build()[0]


@pytest.fixture
def files(shared_files: SharedFiles) -> Callable[[str, str], onnx.ModelProto]:
    return shared_files.read


class RecordedRun:
    """One run of a model in PyTorch: the tensors of each call, and the call that made it."""

    def __init__(self, model: nn.Module) -> None:
        by_path = run_pytorch(model, {"x": x(2, 4)})[0]
        calls = {
            Instance(path, nth): call
            for path, each in by_path.items()
            for nth, call in enumerate(each)
        }
        self.given = {at: call.given[0] for at, call in calls.items()}
        self.returned = {at: call.returned[0] for at, call in calls.items()}
        self.caller = {at: call.caller and Instance(*call.caller) for at, call in calls.items()}

    @property
    def numbers(self) -> dict[str, int]:
        """How often each module ran."""
        return numbers_of(self.caller)

    def inside(self, call: Instance) -> Iterator[Instance]:
        """The calls that ran in a call, itself too."""
        for each in self.caller:
            around: Instance | None = each
            while around is not None and around != call:
                around = self.caller[around]
            if around is not None:
                yield each


def numbers_of(calls: Iterable[Instance]) -> dict[str, int]:
    return dict(Counter(call.path for call in calls))


def cut_apart(file: onnx.ModelProto) -> TaggedModel:
    """The model without what names its modules' tensors: then regions alone say what enters and leaves."""
    for entry in [each for each in file.metadata_props if each.key == "htp.signatures"]:
        file.metadata_props.remove(entry)
    return htp_export.load(file)


@EVERY
def test_the_file_says_in_which_call_every_call_ran(name, exporter, files):
    tagged, ran = htp_export.load(files(name, exporter)), RecordedRun(made(name))
    assert {
        path: info.calls for path, info in tagged.hierarchy.items() if info.calls
    } == ran.numbers
    assert {call: tagged.calls.caller(call) for call in ran.caller} == ran.caller


@EVERY
def test_the_region_of_a_call_takes_and_gives_what_the_call_did(name, exporter, files):
    file, ran = files(name, exporter), RecordedRun(made(name))
    values = Opened.of(file, [x(2, 4).numpy()]).values
    tagged = htp_export.load(file)
    for call in ran.caller:
        region = tagged[call.path].call(call.call)
        assert region.nodes, call
        assert all(equal(values[value.name], ran.given[call]) for value in region.inputs), call
        assert region.outputs, call
        assert all(equal(values[value.name], ran.returned[call]) for value in region.outputs), call


@EACH
def test_the_region_of_a_module_takes_and_gives_what_its_calls_did(name, exporter, files):
    file, ran = files(name, exporter), RecordedRun(made(name))
    values = Opened.of(file, [x(2, 4).numpy()]).values
    tagged = htp_export.load(file)
    for path in ran.numbers:
        known = [
            each
            for call in ran.caller
            if call.path == path
            for each in (ran.given[call], ran.returned[call])
        ]
        region = tagged[path]
        assert all(
            any(equal(values[v.name], each) for each in known)
            for v in (*region.inputs, *region.outputs)
        ), path
        by_call = {id(node) for number in range(region.calls) for node in region.call(number).nodes}
        assert by_call == {id(node) for node in region.nodes}, path
    assert htp_export.contamination(file).after == []


@pytest.mark.long
@EACH
@pytest.mark.parametrize("signed", [True, False])
def test_every_call_can_be_cut_out(name, exporter, signed, files, tmp_path):
    file, ran = files(name, exporter), RecordedRun(made(name))
    tagged = htp_export.load(file) if signed else cut_apart(file)
    for call in ran.caller:
        part = htp_export.extract(tagged, call.path, tmp_path / "part.onnx", call=call.call)
        (found,) = run_file(tmp_path / "part.onnx", dict.fromkeys(part.inputs, ran.given[call]))
        assert equal(found, ran.returned[call]), call
        cut = htp_export.load(tmp_path / "part.onnx")
        inside = list(ran.inside(call))
        assert {
            path: info.calls for path, info in cut.hierarchy.items() if info.calls
        } == numbers_of(inside), call
        for path in numbers_of(inside):
            mine = [each for each in inside if each.path == path]
            for number, each in enumerate(mine):
                assert len(cut[path].call(number).nodes) == len(
                    tagged[path].call(each.call).nodes
                ), each


@EACH
@pytest.mark.parametrize("isolated", [False, True])
def test_verify_compares_every_call(name, exporter, isolated, files):
    model, file = made(name), files(name, exporter)
    report = htp_export.verify(model, file, (x(2, 4, seed=3),), isolated=isolated)
    assert report.ok, report
    compared = {
        path: [call.number for call in module.calls]
        for path, module in report.modules.items()
        if module.calls
    }
    assert compared == {
        path: list(range(number)) for path, number in RecordedRun(model).numbers.items()
    }


@EACH
def test_every_call_is_a_call_of_a_function(name, exporter, files, tmp_path):
    file, ran = files(name, exporter), RecordedRun(made(name))
    nested = htp_export.functions(file, "**", tmp_path / "nested.onnx")
    assert set(nested.modules) == {call.path for call in ran.caller} - {""}
    assert dict(nested.outside) == {}
    (found,) = run_file(tmp_path / "nested.onnx", {file.graph.input[0].name: x(2, 4).numpy()})
    assert equal(found, ran.returned[Instance("")])
    calls: defaultdict[str, list[str]] = defaultdict(list)
    for node in nested.model.graph:
        if node.domain == "htp":
            calls[node.metadata_props["htp.module"]].append(
                node.metadata_props.get("htp.call", "0")
            )
    at_the_top = [call for call, caller in ran.caller.items() if caller == Instance("")]
    assert {path: list(map(int, numbers)) for path, numbers in calls.items()} == {
        path: [call.call for call in at_the_top if call.path == path]
        for path in {call.path for call in at_the_top}
    }
    flat = htp_export.load(htp_export.inline(tmp_path / "nested.onnx").model)
    told = ("htp.module", "htp.owners", "htp.call", "htp.calls")
    assert [[node.name, *map(node.metadata_props.get, told)] for node in flat.nodes] == [
        [node.name, *map(node.metadata_props.get, told)] for node in htp_export.load(file).nodes
    ]


@pytest.mark.long
@EACH
def test_every_call_can_be_replaced(name, exporter, files, tmp_path):
    """By itself: then everything runs as before, in the same calls."""
    file, ran = files(name, exporter), RecordedRun(made(name))
    for call in ran.caller:
        if not call.path:
            continue
        part = htp_export.extract(file, call.path, call=call.call)
        htp_export.splice(file, call.path, part.model, tmp_path / "whole.onnx", call=call.call)
        (found,) = run_file(tmp_path / "whole.onnx", {file.graph.input[0].name: x(2, 4).numpy()})
        assert equal(found, ran.returned[Instance("")]), call
        whole = htp_export.load(tmp_path / "whole.onnx")
        assert {each: whole.calls.caller(each) for each in ran.caller} == ran.caller, call
        before = htp_export.load(file)
        for each in ran.caller:
            count = len(before[each.path].call(each.call).nodes)
            assert len(whole[each.path].call(each.call).nodes) == count, (call, each)


@BOTH
def test_a_replacement_of_one_call_has_calls_of_its_own(exporter, files, tmp_path):
    other = spread(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), seed=5).eval()
    part = exported(other, {"input": x(2, 4)}, exporter, tmp_path)
    whole = htp_export.load(
        htp_export.splice(files("uneven_calls", exporter), "block", part, call=0).model
    )
    once = dict.fromkeys(
        ("", "block.0", "block.1", "block.extra", "block.extra.0", "block.extra.1"), 1
    )
    assert {path: info.calls for path, info in whole.hierarchy.items()} == {
        **once,
        "block": 2,
        "block.fc": 3,
    }
    assert [node.op_type for node in whole["block"].call(0).nodes] == ["Gemm", "Tanh"]
    assert [node.op_type for node in whole["block"].call(1).nodes] == ["Gemm", "Sin"] * 3 + [
        "Gemm",
        "Tanh",
        "Exp",
    ]
    assert [whole.calls.caller(Instance("block.fc", number)).call for number in range(3)] == [
        1,
        1,
        1,
    ]


@BOTH
def test_numbers_of_a_module_that_others_run_are_those_of_who_runs_it(exporter, files):
    file = files("called_from_outside", exporter)
    cost = htp_export.cost(file)
    rows = {row.path: row for row in tree_rows(htp_export.load(file), cost=cost).rows}
    gemm = 2 * 2 * 4 * 4
    expected = {
        "": 4,
        "owner": 1,
        "owner.extra": 2,
        "owner.extra.0": 2,
        "owner.fc": 1,
        "user": 2,
        "user.0": 2,
    }
    assert {path: cost.modules[path].flops // gemm for path in expected} == expected
    assert {path: rows[path].flops // gemm for path in expected} == expected
    nodes = {"owner": 2, "owner.extra": 4, "user.0": 5}
    assert {path: cost.modules[path].nodes for path in nodes} == nodes
    assert {path: rows[path].nodes for path in nodes} == nodes


@BOTH
def test_latency_of_a_module_that_others_run_counts_where_it_ran(exporter, files):
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    report = htp_export.profile(
        files("called_from_outside", exporter), runs=1, warmup=0, session_options=options
    )
    assert {path: report.modules[path].kernels for path in ("owner", "owner.extra", "user.0")} == {
        "owner": 2,
        "owner.extra": 4,
        "user.0": 5,
    }
    whole = sum(kernel.ms for kernel in report.kernels)
    assert sum(module.self_ms for module in report.modules.values()) == pytest.approx(whole)
    inside = [
        kernel.ms
        for kernel in report.kernels
        if any(path.startswith("user.0") for path in kernel.owners)
    ]
    assert report.modules["user.0"].total_ms == pytest.approx(sum(inside))


@pytest.mark.long
@EACH
def test_calls_outlive_a_tool_that_takes_all_tags_off(name, exporter, files):
    file, bare = files(name, exporter), files(name, exporter)
    for node in bare.graph.node:
        node.ClearField("metadata_props")
    bare.ClearField("metadata_props")
    before, after = htp_export.load(file), htp_export.load(htp_export.carry(file, bare).model)
    assert after.calls.to_json() == before.calls.to_json()
    for path in before:
        for number in range(before[path].calls):
            names = [node.name for node in before[path].call(number).nodes]
            assert [node.name for node in after[path].call(number).nodes] == names, (path, number)
    assert {path: info.fate for path, info in after.hierarchy.items()} == {
        path: info.fate for path, info in before.hierarchy.items()
    }


@EACH
def test_passes_keep_calls_apart(name, exporter, files):
    model, file = made(name), files(name, exporter)
    result = htp_export.optimize(file, passes=["eliminate_common_subexpressions", "fold_constants"])
    small = htp_export.load(result.model)
    assert small.calls.to_json() == htp_export.load(file).calls.to_json()
    assert {path: info.fate for path, info in small.hierarchy.items()} == {
        path: info.fate for path, info in htp_export.load(file).hierarchy.items()
    }
    assert htp_export.verify(model, small, (x(2, 4, seed=3),)).ok
    ran = RecordedRun(model)
    for call in ran.caller:
        assert small[call.path].call(call.call).nodes, call


class SameInTwoCalls(Holding, scale=Apply(lambda x, y: y * x.float())):
    """``scale`` does the same cast in two of its three calls: one node does the work of both."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers, others = x.to(torch.int64), x.mul(3).to(torch.int64)
        y = self.scale(numbers, x)
        return self.scale(numbers, self.scale(others, y).exp())


@BOTH
def test_work_that_two_of_three_calls_share_is_in_both(exporter, tmp_path):
    file = exported(SameInTwoCalls().eval(), {"x": x(2, 4)}, exporter, tmp_path)
    tagged = htp_export.load(
        htp_export.optimize(file, passes=["eliminate_common_subexpressions"]).model
    )
    region = tagged["scale"]
    assert [[node.op_type for node in region.call(number).nodes] for number in range(3)] == [
        ["Cast", "Mul"]
    ] * 3
    (both,) = [node for node in region.nodes if "htp.calls" in node.metadata_props]
    assert json.loads(both.metadata_props["htp.calls"]) == {"scale": [0, 2]}
    assert "htp.call" not in both.metadata_props
    assert [value.name for value in region.call(0).outputs] == [
        region.call(0).nodes[1].outputs[0].name
    ]


# --- what is written -----------------------------------------------------------------------------


@BOTH
def test_nothing_is_written_where_every_module_ran_once_in_its_parent(exporter, tmp_path):
    model = spread(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))).eval()
    file = exported(model, {"input": x(2, 4)}, exporter, tmp_path)
    said = {entry.key: entry.value for entry in file.metadata_props}
    assert said["htp.callers"] == "{}"
    assert not any(
        entry.key in ("htp.call", "htp.calls")
        for node in file.graph.node
        for entry in node.metadata_props
    )


@BOTH
def test_callers_are_written_where_they_do_not_follow(exporter, files):
    said = {
        name: {e.key: e.value for e in files(name, exporter).metadata_props}["htp.callers"]
        for name in NAMES
    }
    assert {name: json.loads(text) for name, text in said.items()} == {
        "uneven_calls": {"block.fc": [0, 1, 1, 1], "block.extra": [1]},
        "child_calls_itself": {
            "deeper": [0, 0, ["deeper", 1], ["deeper", 2]],
            "deeper.act": [0, 3, 2, 1],
        },
        "child_of_two_parents": {"first.act": [0, ["second", 0], ["second", 0], ["", 0], 1]},
        "called_from_outside": {"owner.extra": [["user.0", 0], ["", 0]]},
        "two_parents_in_a_loop": {"first.act": [0, ["second", 0], 1, 1, ["second", 1]]},
    }


# --- files that do not say it --------------------------------------------------------------------


def without_callers(file: onnx.ModelProto) -> TaggedModel:
    for entry in [each for each in file.metadata_props if each.key == "htp.callers"]:
        file.metadata_props.remove(entry)
    return htp_export.load(file)


@BOTH
def test_old_files_are_guessed_and_say_so(exporter, files, caplog):
    tagged = without_callers(files("uneven_calls", exporter))
    with caplog.at_level(logging.WARNING):
        assert tagged["block.extra"].call(0).nodes == tagged["block.extra"].nodes
        assert not caplog.messages
        assert len(tagged["block"].call(0).nodes) == 3  # two of fc, and what it takes
    assert caplog.messages == [
        "the file does not record in which calls of module 'block' these ran: 'block.fc'; each is assumed to have run "
        "equally often in every call. A new export of the model records it (htp.callers)",
        "the file does not record in which calls of module 'block' these ran: 'block.extra'; their nodes are in no "
        "call of it. A new export of the model records it (htp.callers)",
    ]


def test_what_is_certain_in_old_files_is_not_spoken_of(caplog):
    modules = [
        ModuleInfo("", "Net", 1),
        ModuleInfo("block", "Block", 1),
        ModuleInfo("block.fc", "Fc", 3),
    ]
    calls = CallTree(Hierarchy(modules))
    with caplog.at_level(logging.WARNING):
        assert calls.inside(Instance("block")) == {"block": (0,), "block.fc": (0, 1, 2)}
    assert not caplog.messages


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("[]", "is not a JSON object"),
        ("{", "is not JSON"),
        ('{"block.fc":3}', "is not a JSON object of modules and the callers of their calls"),
        ('{"block.fc":[0,0,0,-1]}', "module 'block.fc' has an invalid caller of a call: -1"),
        ('{"block.fc":[0,0,0,["block"]]}', "module 'block.fc' has an invalid caller of a call"),
        ('{"block.fc":[0,0,0,true]}', "module 'block.fc' has an invalid caller of a call: True"),
    ],
)
def test_callers_that_cannot_be_read_are_refused(written, message):
    model = handmade.called_twice()
    model.metadata_props["htp.callers"] = written
    with pytest.raises(InputError, match=r"htp\.callers") as error:
        assert htp_export.load(model)["block"].nodes
    assert message in str(error.value)


@pytest.mark.parametrize(
    "written", ['{"block":[["block.fc",0],["block.fc",1]],"block.fc":[0,0,1,1]}', '{"gone":[0]}']
)
def test_callers_that_go_in_circles_or_are_of_other_modules_do_no_harm(written):
    model = handmade.called_twice()
    model.metadata_props["htp.callers"] = written
    tagged = htp_export.load(model)
    assert len(tagged[""].nodes) == 9
    assert len(tagged["block"].call(0).nodes) >= 3


def test_calls_on_a_node_that_cannot_be_read_are_passed_over():
    model = handmade.called_twice()
    model.graph[0].metadata_props["htp.calls"] = '{"block.fc":"all"}'
    assert model.graph[0] in htp_export.load(model)["block"].call(1).nodes


def test_a_call_that_was_not_seen_is_taken_to_have_run_in_the_nearest_module_that_ran():
    log = CallLog()
    root, layer = log.enter(""), log.enter("layers.0")
    assert [log.near(path) for path in ("layers.0.fc", "layers.1.fc", "layers.0", "")] == [
        layer,
        root,
        root,
        NO_CALL,
    ]


@pytest.mark.parametrize(
    ("between", "is_reversed"), [(owners._LOOK_BACK, True), (owners._LOOK_BACK + 1, False)]
)
def test_an_operation_that_is_reversed_is_found_up_to_a_number_of_operations_before(
    between, is_reversed
):
    log = CallLog()
    root = log.enter("")
    first, last = log.add("first", root), log.add("last", root)
    names = ["begin", *(f"step_{k}" for k in range(between)), "back"]
    record = Record(log)
    record.inputs, record.outputs = {"x"}, ["back"]
    record.operations = [Operation(first, ("x",), ("begin",))]
    record.operations += [
        Operation(last, (before,), (after,)) for before, after in itertools.pairwise(names)
    ]
    record.final = {name: name for name in names} | {"begin": "tensor", "back": "tensor"}
    origins = owners.Origins(record, Flow.of(record))
    assert origins.computed_by["tensor"] == ({first} if is_reversed else {first, last})
