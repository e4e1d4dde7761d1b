"""Devices that queue kernels: which times a trace has, modules that run alone, and which of them a profile takes.

No GPU is here: the traces are made by hand as ONNX Runtime's profiler of GPUs merges its events
(``gpu_profiler_common.h``), and modules run alone on the CPU."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import htp_export
from htp_export.capabilities.profile import latency, measurements, onnxruntime_engine
from htp_export.capabilities.profile.measurements import (
    Entry,
    Kernel,
    Measurement,
    consistent,
    entry_kernels,
)
from htp_export.command.main import main
from htp_export.errors import InputError
from htp_export.model.tagged import TaggedModel
from htp_export.runtime import traces
from htp_export.runtime.traces import KernelKey, ProfiledSession, Trace, read_trace
from tests.handmade import branching, encoder
from tests.nets import Holding, spread
from tests.plugins.test_tensorrt import NODES, model, times
from tests.profile.test_latency import assert_adds_up

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"


def node(
    name: str, start: int, duration: int, provider: str = CUDA, index: int = 0
) -> dict[str, Any]:
    arguments = {"op_name": name.partition("_")[0], "node_index": str(index), "provider": provider}
    return {
        "cat": "Node",
        "name": f"{name}_kernel_time",
        "ts": start,
        "dur": duration,
        "tid": 1,
        "args": arguments,
    }


def on_device(name: str, start: int, duration: int, parent: str | None) -> dict[str, Any]:
    """The event of a kernel on a device; without a parent where ONNX Runtime did not find it."""
    arguments = {"stream": "7"} | (
        {"op_name": "x", "parent_name": f"{parent}_kernel_time"} if parent else {}
    )
    return {
        "cat": "Kernel",
        "name": name,
        "ts": start,
        "dur": duration,
        "tid": -1,
        "args": arguments,
    }


def session(name: str, start: int, duration: int) -> dict[str, Any]:
    return {"cat": "Session", "name": name, "ts": start, "dur": duration, "tid": 1}


def run_of(start: int, factor: int, *, device: bool) -> list[dict[str, Any]]:
    """A run: two nodes on the GPU, the second of which launches two kernels, one on the CPU, and one view."""
    events = [
        node("MatMul_a", start + 1, 5),
        on_device("gemm", start + 40, 20 * factor, "MatMul_a"),
        node("Softmax_b", start + 10, 6, index=1),
        on_device("reduce", start + 60, 7 * factor, "Softmax_b"),
        on_device("scale", start + 70, 3 * factor, "Softmax_b"),
        node("Reshape_c", start + 20, 2, index=2),
        node("Shape_d", start + 25, 4, CPU, 3),
        on_device("memcpy", start + 80, 9 * factor, None),
        session("SequentialExecutor::Execute", start, 90),
        session("model_run", start, 95),
    ]
    return events if device else [event for event in events if event["cat"] != "Kernel"]


def read(folder, *runs: list[dict[str, Any]]) -> Trace:
    path = folder / "trace.json"
    path.write_text(json.dumps([event for events in runs for event in events]))
    return read_trace(path, len(runs))


class TestTraces:
    def test_kernels_on_the_device_are_the_times_of_the_nodes_that_launched_them(self, tmp_path):
        trace = read(tmp_path, run_of(0, 1, device=True), run_of(100, 2, device=True))
        assert trace.timing == "kernels"
        assert {key.label: list(times) for key, times in trace.times.items()} == {
            "MatMul_a": [0.020, 0.040],
            "Softmax_b": [0.010, 0.020],
            "Reshape_c": [0, 0],
            "Shape_d": [0.004, 0.004],
            "memcpy": [0.009, 0.018],
        }
        assert {key.label: launches for key, launches in trace.launches.items()} == dict.fromkeys(
            ("MatMul_a", "Softmax_b", "Reshape_c", "Shape_d", "memcpy"), 2
        )

    def test_without_those_of_known_nodes_the_times_are_those_of_launches_and_it_says_so(
        self, tmp_path
    ):
        unknown = [
            event
            for event in run_of(0, 1, device=True)
            if "parent_name" not in event.get("args", {})
        ]
        for events in (run_of(0, 1, device=False), unknown):
            trace = read(tmp_path, events)
            assert trace.timing == "launches"
            assert {key.label: list(times) for key, times in trace.times.items()} == {
                "MatMul_a": [0.005],
                "Softmax_b": [0.006],
                "Reshape_c": [0.002],
                "Shape_d": [0.004],
            }

    def test_a_node_in_a_loop_has_the_kernels_that_it_launched(self, tmp_path):
        inner = [
            node("MatMul_i", 12, 2),
            on_device("gemm", 50, 8, "MatMul_i"),
            session("SequentialExecutor::Execute", 11, 5),
            node("MatMul_i", 17, 2),
            on_device("gemm", 60, 16, "MatMul_i"),
            session("SequentialExecutor::Execute", 16, 5),
            node("Loop_l", 10, 15),
            session("SequentialExecutor::Execute", 5, 90),
            session("model_run", 0, 99),
        ]
        trace = read(tmp_path, inner)
        times = {
            key.label: (list(each), [holder.label for holder in key.holders])
            for key, each in trace.times.items()
        }
        assert times == {"Loop_l": ([0], []), "MatMul_i": ([0.024], ["Loop_l"])}

    def test_a_run_on_the_cpu_has_kernels(self, tmp_path):
        events = [
            {**event, "args": {**event["args"], "provider": CPU}} if "args" in event else event
            for event in run_of(0, 1, device=False)
        ]
        assert read(tmp_path, events).timing == "kernels"

    def test_each_kernel_has_its_own_time_in_measured_runs(self, tmp_path):
        execute = "SequentialExecutor::Execute"
        one = [
            node("Neg_a", 10, 0, CPU),
            node("Exp_b", 10, 4, CPU),
            session(execute, 9, 6),
            node("If_c", 8, 10, CPU),
            node("Neg_d", 18, 5, CPU),
            session(execute, 7, 20),
            session("model_run", 5, 25),
        ]
        later = [{**event, "ts": event["ts"] + 100, "dur": event["dur"] * 2} for event in one[:-1]]
        parallel = {**node("Abs_e", 111, 7, CPU), "tid": 2}
        whole = [*one, *later, parallel, session("model_run", 105, 60)]
        trace = read(tmp_path, whole)
        holder = KernelKey("If_c", "If", 0)
        assert trace.runs == 1
        assert {key.label: (key.holders, times) for key, times in trace.times.items()} == {
            "If_c": ((), [0.012]),
            "Neg_a": ((holder,), [0.0]),
            "Exp_b": ((holder,), [0.008]),
            "Abs_e": ((), [0.007]),
            "Neg_d": ((), [0.010]),
        }
        assert read_trace(tmp_path / "trace.json", 5).runs == 2
        cut_short = read(tmp_path, one, later)  # full: the second run is not complete
        assert next(iter(cut_short.times.values())) == [0.006]


class Net(
    Holding,
    small=nn.Linear(64, 64),
    wide=nn.Linear(64, 4096),
    back=nn.Linear(4096, 64),
    act=nn.ReLU(),
):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.small(self.act(self.back(self.wide(self.small(x)))))


@pytest.fixture(scope="module")
def program() -> Any:
    torch.manual_seed(0)
    return htp_export.export(spread(Net()).eval(), (torch.randn(64, 64),), verbose=False)


class TestModulesAlone:
    def test_every_module_with_nodes_of_its_own_runs_alone_and_says_so(self, program):
        report = htp_export.profile(program, runs=3, timing="modules")
        assert report.timing == "modules"
        assert {
            kernel.name: (kernel.op_type, kernel.owners, kernel.launches)
            for kernel in report.kernels
        } == {
            "small": ("module", ("small",), 2),
            "wide": ("module", ("wide",), 1),
            "back": ("module", ("back",), 1),
            "act": ("module", ("act",), 1),
        }
        assert_adds_up(report)
        order = sorted(
            (module for module in report.modules.values() if module.path),
            key=lambda each: -each.self_ms,
        )
        assert {module.path for module in order[:2]} == {"wide", "back"}
        assert "each module ran alone, with its inputs on the device" in str(report)
        assert "ms in modules alone" in report.summary

    def test_a_module_gets_the_tensors_that_it_gets_in_a_run_of_the_model(self):
        class Pick(Holding, table=nn.Parameter(torch.randn(4, 8))):
            def forward(self, index: torch.Tensor) -> torch.Tensor:
                return self.table[index]

        class Places(Holding, first=nn.Linear(4, 4), pick=Pick()):
            """Fails on other indices than those that the first module computes."""

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.pick(self.first(x).argmax(-1))

        made = htp_export.export(spread(Places()).eval(), (torch.randn(3, 4),), verbose=False)
        report = htp_export.profile(
            made, {"x": np.ones((3, 4), np.float32)}, runs=1, timing="modules"
        )
        assert {"first", "pick"} <= {kernel.name for kernel in report.kernels}

    def test_own_times_are_differences_and_at_least_0(self, monkeypatch):
        alone = {"layer.0": 5.0, "layer.0.fc": 2.0, "layer.1": 1.0, "layer.1.fc": 2.0, "": 9.0}
        monkeypatch.setattr(
            onnxruntime_engine, "_time", lambda tagged, part, *rest: alone[part.path]
        )
        report = htp_export.profile(encoder(), runs=1, timing="modules")
        own = {kernel.name: kernel.ms for kernel in report.kernels}
        assert own == {"(root)": 2, "layer.0": 3, "layer.0.fc": 2, "layer.1": 0, "layer.1.fc": 2}
        assert report.modules[""].total_ms == 9
        assert_adds_up(report)

    def test_modules_inside_branches_do_not_run_alone_and_are_listed(self):
        feed = {"x": np.ones((2, 4), np.float32), "condition": np.asarray(True)}
        report = htp_export.profile(branching(), feed, runs=1, timing="modules")
        assert "gate.yes" not in {kernel.name for kernel in report.kernels}
        assert any(line.startswith("gate.yes did not run alone: ") for line in report.notes)

    def test_the_command_takes_it_and_an_unknown_way_is_refused(
        self, tmp_path, monkeypatch, capsys
    ):
        monkeypatch.chdir(tmp_path)
        htp_export.load(encoder()).save("net.onnx")
        assert main(["profile", "net.onnx", "--runs", "1", "--timing", "modules", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["timing"] == "modules"
        with pytest.raises(InputError, match="no timing 'nvtx'; there are auto, kernels, modules"):
            htp_export.profile(encoder(), timing="nvtx")


class TestWhichTimesAProfileTakes:
    """The CPU stands for a device that queues kernels."""

    @pytest.fixture
    def queued(self, monkeypatch):
        monkeypatch.setattr(traces, "QUEUED", frozenset({CPU}))

    @pytest.mark.usefixtures("queued")
    def test_launches_that_explain_a_run_stay_and_are_said_to_be_launches(
        self, program, monkeypatch
    ):
        monkeypatch.setattr(onnxruntime_engine, "_explain", lambda kernels, run_ms: True)
        report = htp_export.profile(program, runs=2)
        assert report.timing == "launches"
        assert "this ONNX Runtime does not measure kernels on the device" in str(report)

    @pytest.mark.usefixtures("queued")
    def test_launches_that_do_not_give_way_to_modules_alone_unless_kernels_are_asked_for(
        self, program, monkeypatch
    ):
        monkeypatch.setattr(onnxruntime_engine, "_explain", lambda kernels, run_ms: False)
        assert htp_export.profile(program, runs=2).timing == "modules"
        assert htp_export.profile(program, runs=2, timing="kernels").timing == "launches"

    def test_they_explain_a_run_if_most_of_it_has_modules(self):
        known, lost = Kernel("a", "A", CUDA, 4.0, 1, ("a",)), Kernel("b", "B", CUDA, 9.0, 1, ())
        assert onnxruntime_engine._explain([known, lost], 8.0)
        assert not onnxruntime_engine._explain([known, lost], 8.1)

    def test_kernels_on_a_device_are_said_to_be_such(self, program):
        report = htp_export.profile(program, runs=1)
        assert "on the device" not in str(report)
        kernels = tuple(replace(kernel, provider=CUDA) for kernel in report.kernels)
        assert "times are those of kernels on the device" in replace(report, kernels=kernels).notes


# --- times that fit together, engines of other packages, and budgets for modules ---


def measurement(
    kernels: float, profiled: float, plain: float, launches: int = 1, **facts: Any
) -> Measurement:
    kernel = Kernel("k", "Gemm", "CPUExecutionProvider", kernels, launches)
    return Measurement([kernel], [profiled] * 3, [plain] * 3, **facts)


GOOD = measurement(0.9, 1.2, 1.0)
BAD, WORSE = measurement(30, 40, 1.0), measurement(59, 60, 1.0)


def measured(*runs: Measurement) -> tuple[Measurement, int]:
    """What is taken of several measurements, and how many were made."""
    left: Iterator[Measurement] = iter(runs)
    taken = consistent(lambda: next(left))
    return taken, len(runs) - len(list(left))


def test_it_is_measured_until_the_times_fit():
    assert measured(GOOD, BAD) == (GOOD, 1)
    assert measured(WORSE, BAD, GOOD, BAD) == (GOOD, 3)


def test_a_contradiction_that_stays_is_said_with_the_smallest():
    taken, count = measured(WORSE, BAD, WORSE, GOOD)
    (said,) = taken.notes
    assert (taken.kernels, count) == (BAD.kernels, 3)
    assert (
        "contradict each other in each of 3 measurements: 30.000 ms in kernels, 1.000 ms a run"
        in said
    )


@pytest.mark.parametrize(
    ("times", "contradict"),
    [
        (measurement(0.9, 1.2, 1.0), False),
        (measurement(59, 60, 1.0), True),
        (measurement(0.9, 1.2, 59), True),  # without the profiler, it takes longer than with it
        (measurement(0.4, 0.9, 0.1, launches=40), False),  # most of it is the profiler
        (measurement(3.5, 1.2, 1.0), True),
        (measurement(3.5, 1.2, 1.0, at_once=4), False),  # kernels run in parallel
    ],
)
def test_what_contradicts(times, contradict):
    assert bool(measured(times, times, times)[0].notes) is contradict


def test_profile_measures_again_in_a_new_session(monkeypatch):
    monkeypatch.setattr(measurements, "_MOST", 0.0)
    opened: list[Any] = []
    monkeypatch.setattr(
        onnxruntime_engine,
        "ProfiledSession",
        lambda *given: opened.append(1) or ProfiledSession(*given),
    )
    assert "contradict each other in each of 3 measurements" in str(
        htp_export.profile(encoder(), runs=1)
    )
    assert len(opened) == 3


def test_an_engine_of_another_package_says_what_it_ran(monkeypatch):
    def measure(
        tagged: TaggedModel, feed: Any, runs: int, warmup: int, **facts: Any
    ) -> Measurement:
        entries = [
            Entry(Kernel(str(node.name), node.op_type, "npu", 2.0, 1), [node])
            for node in tagged.nodes
        ]
        return Measurement(
            entry_kernels(entries, tagged),
            providers=("npu",),
            runs=runs,
            notes=(f"{facts['options']}",),
        )

    engine = SimpleNamespace(measure=measure)
    monkeypatch.setattr(latency, "plug_in", lambda capability, name: engine)
    report = htp_export.profile(encoder(), engine="mine", runs=7, engine_options={"cores": 2})
    assert (report.engine, report.runs, report.modules["layer.0.fc"].self_ms) == ("mine", 7, 4)
    assert (report.end_to_end_ms, report.kernels_ms, report.unattributed) == (14, 14, ())
    assert "{'cores': 2}" in report.notes
    with pytest.raises(InputError, match="mine runs models here, and reads no files"):
        htp_export.profile(encoder(), engine="mine", measured=["times.json"])


# --- budgets of modules: which hold, what is over, and the exit status ---


MS = dict(
    zip(
        (name for name, _ in NODES.values()),
        (4.0, 1.0, 1.0, 2.0, 1.0, 0.0, 6.0, 2.0, 3.0),
        strict=True,
    )
)
MEASURED = ["--engine", "tensorrt", "--measured", "layers.json", "--measured", "times.json"]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose modules take 20 ms: block 9 (conv1 4, act 2, conv2 2), fc 6, head 5."""
    monkeypatch.chdir(tmp_path)
    ir.save(model(), "net.onnx")
    Path("layers.json").write_text(
        json.dumps({"Layers": list(MS), "Bindings": ["x", "y"]}), encoding="utf-8"
    )
    Path("times.json").write_text(json.dumps(times(**MS)), encoding="utf-8")


def profile() -> htp_export.results.Profile:
    return htp_export.profile("net.onnx", engine="tensorrt", measured=("layers.json", "times.json"))


@pytest.mark.parametrize(
    ("budgets", "over"),
    [
        ({"**": 20}, {}),
        ({".": 19.5, "fc": "6 ms"}, {"": 19.5}),
        ({"block.*": "2ms"}, {"block.conv1": 2}),
        ({"fc": "25%", "head": "25%"}, {"fc": 5}),
        ({"block.*": 2, "block.conv1": 4}, {}),
        ({"block.conv1": 4, "block.*": 2}, {"block.conv1": 2}),
        ({"class:*,!block.*": 0, "fc,block": "100ms"}, {"": 0, "head": 0}),
        ({"fc": "1us", "head": "1 µs", "block": "10s"}, {"fc": 0.001, "head": 0.001}),
        ({}, {}),
    ],
)  # fmt: skip
def test_modules_that_take_longer_than_their_budget(budgets, over):
    assert profile().over(budgets) == over


@pytest.mark.parametrize("budget", ["5", "5 seconds", "-1ms", "100%", "", -1.0, float("nan")])
def test_a_budget_is_a_time_or_a_share(budget):
    with pytest.raises(
        InputError,
        match=r"budget .* of 'fc': write a time or a share below 100 %, such as 5ms or 20%",
    ):
        profile().over({"fc": budget})


def test_the_command_ends_with_status_1_if_a_module_is_over_and_names_it(capsys):
    assert (
        main(["profile", "net.onnx", *MEASURED, "--budget", "block.*=4ms", "--budget", "fc=30%"])
        == 0
    )
    assert (
        main(["profile", "net.onnx", *MEASURED, "--budget", "block.*=4ms", "--budget", "fc=29%"])
        == 1
    )
    shown = capsys.readouterr()
    assert shown.err.endswith("htp-export: error: over budget: fc takes 6.000 of 5.800 ms\n")
    assert "block" in shown.out


def test_json_has_what_is_over_if_there_are_budgets(capsys):
    assert main(["profile", "net.onnx", *MEASURED, "--json", "--budget", ".=1ms"]) == 1
    assert json.loads(capsys.readouterr().out)["over_budget"] == {"": 1}
    assert main(["profile", "net.onnx", *MEASURED, "--json"]) == 0
    assert "over_budget" not in json.loads(capsys.readouterr().out)
