"""Times of profile that contradict each other are measured again, and said; runs are injected, nothing is timed."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import htp_export
from htp_export.capabilities.profile import latency, measurements, onnxruntime_engine
from htp_export.capabilities.profile.measurements import Entry, Kernel, Measurement, consistent, entry_kernels
from htp_export.errors import InputError
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.traces import ProfiledSession
from tests.handmade import encoder


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


def test_it_is_measured_until_the_times_fit() -> None:
    assert measured(GOOD, BAD) == (GOOD, 1)
    assert measured(WORSE, BAD, GOOD, BAD) == (GOOD, 3)


def test_a_contradiction_that_stays_is_said_with_the_smallest() -> None:
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
def test_what_contradicts(times: Measurement, contradict: bool) -> None:
    assert bool(measured(times, times, times)[0].notes) is contradict


def test_profile_measures_again_in_a_new_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measurements, "_MOST", 0.0)
    opened: list[Any] = []
    monkeypatch.setattr(
        onnxruntime_engine, "ProfiledSession", lambda *given: opened.append(1) or ProfiledSession(*given)
    )
    assert "contradict each other in each of 3 measurements" in str(htp_export.profile(encoder(), runs=1))
    assert len(opened) == 3


def test_an_engine_of_another_package_says_what_it_ran(monkeypatch: pytest.MonkeyPatch) -> None:
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
