"""Times that fit together, engines of other packages, and budgets for modules."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx_ir as ir
import pytest

import htp_export
from htp_export.capabilities.profile import latency, measurements, onnxruntime_engine
from htp_export.capabilities.profile.measurements import Entry, Kernel, Measurement, consistent, entry_kernels
from htp_export.command.main import main
from htp_export.errors import InputError
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.traces import ProfiledSession
from tests.handmade import encoder
from tests.plugins.test_tensorrt import NODES, model, times


def measurement(kernels: float, profiled: float, plain: float, launches: int = 1, **facts: Any) -> Measurement:
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
    assert "contradict each other in each of 3 measurements: 30.000 ms in kernels, 1.000 ms a run" in said


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
        onnxruntime_engine, "ProfiledSession", lambda *given: opened.append(1) or ProfiledSession(*given)
    )
    assert "contradict each other in each of 3 measurements" in str(htp_export.profile(encoder(), runs=1))
    assert len(opened) == 3


def test_an_engine_of_another_package_says_what_it_ran(monkeypatch):
    def measure(tagged: TaggedModel, feed: Any, runs: int, warmup: int, **facts: Any) -> Measurement:
        entries = [Entry(Kernel(str(node.name), node.op_type, "npu", 2.0, 1), [node]) for node in tagged.nodes]
        return Measurement(
            entry_kernels(entries, tagged), providers=("npu",), runs=runs, notes=(f"{facts['options']}",)
        )

    engine = SimpleNamespace(measure=measure)
    monkeypatch.setattr(latency, "plug_in", lambda capability, name: engine)
    report = htp_export.profile(encoder(), engine="mine", runs=7, engine_options={"cores": 2})
    assert (report.engine, report.runs, report.modules["layer.0.fc"].self_ms) == ("mine", 7, 4)
    assert (report.end_to_end_ms, report.kernels_ms, report.unattributed) == (14, 14, ())
    assert "{'cores': 2}" in report.notes
    with pytest.raises(InputError, match="mine runs models here, and reads no files"):
        htp_export.profile(encoder(), engine="mine", measured=["times.json"])


# --- Budgets of modules: which hold, what is over, and the exit status; times are tho ---


MS = dict(zip((name for name, _ in NODES.values()), (4.0, 1.0, 1.0, 2.0, 1.0, 0.0, 6.0, 2.0, 3.0), strict=True))
MEASURED = ["--engine", "tensorrt", "--measured", "layers.json", "--measured", "times.json"]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose modules take 20 ms: block 9 (conv1 4, act 2, conv2 2), fc 6, head 5."""
    monkeypatch.chdir(tmp_path)
    ir.save(model(), "net.onnx")
    Path("layers.json").write_text(json.dumps({"Layers": list(MS), "Bindings": ["x", "y"]}), encoding="utf-8")
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
    with pytest.raises(InputError, match=r"budget .* of 'fc': write a time or a share below 100 %, such as 5ms or 20%"):
        profile().over({"fc": budget})


def test_the_command_ends_with_status_1_if_a_module_is_over_and_names_it(capsys):
    assert main(["profile", "net.onnx", *MEASURED, "--budget", "block.*=4ms", "--budget", "fc=30%"]) == 0
    assert main(["profile", "net.onnx", *MEASURED, "--budget", "block.*=4ms", "--budget", "fc=29%"]) == 1
    shown = capsys.readouterr()
    assert shown.err.endswith("htp-export: error: over budget: fc takes 6.000 of 5.800 ms\n")
    assert "block" in shown.out


def test_json_has_what_is_over_if_there_are_budgets(capsys):
    assert main(["profile", "net.onnx", *MEASURED, "--json", "--budget", ".=1ms"]) == 1
    assert json.loads(capsys.readouterr().out)["over_budget"] == {"": 1}
    assert main(["profile", "net.onnx", *MEASURED, "--json"]) == 0
    assert "over_budget" not in json.loads(capsys.readouterr().out)
