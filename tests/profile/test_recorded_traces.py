"""Traces of ONNX Runtime that somebody else recorded: matched by name, counted where they match nothing, untrusted."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import htp_export
from htp_export.command.main import main
from htp_export.errors import FileError, InputError
from tests.exporting import BOTH
from tests.extract.test_cutting import exported_to
from tests.nets import Holding, spread, x


class Net(Holding, up=nn.Linear(8, 16), act=nn.GELU(), down=nn.Linear(16, 8), norm=nn.LayerNorm(8)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(self.act(self.up(x))))


def recorded(file: Path, level: str, runs: int = 4) -> Path:
    """The trace of ONNX Runtime alone."""
    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(file.with_suffix("")) + level
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    [given] = session.get_inputs()
    for _ in range(runs):
        session.run(None, {given.name: np.ones((2, 5, 8), np.float32)})
    return Path(session.end_profiling())


@pytest.fixture
def file(exporter, tmp_path):
    return exported_to(tmp_path / "net.onnx", spread(Net()).eval(), {"x": x(2, 5, 8)}, exporter)


def kernel_ms(trace: Path, run: int) -> float:
    """The time of all kernels of one run, summed up from the file."""
    events = json.loads(trace.read_text())
    runs = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["name"] == "model_run"
    )
    begin, end = runs[run]
    return (
        sum(
            event["dur"]
            for event in events
            if event["name"].endswith("_kernel_time") and begin <= event["ts"] <= end
        )
        / 1000
    )


@BOTH
class TestRecorded:
    @pytest.mark.long
    @pytest.mark.parametrize("level", ["ORT_ENABLE_ALL", "ORT_ENABLE_BASIC", "ORT_DISABLE_ALL"])
    def test_every_kernel_of_every_level_has_its_module(self, file, level, exporter):
        trace = recorded(file, level)
        found = htp_export.profile(file, measured=[trace])
        assert not found.unattributed
        assert (found.runs, found.recorded, found.providers) == (4, True, ("CPUExecutionProvider",))
        for path in ("up", "act", "down", "norm"):
            assert found.modules[path].kernels, path
        assert found.modules[""].total_ms == pytest.approx(found.kernels_ms)
        possible = [kernel_ms(trace, run) for run in range(4)]
        assert min(possible) - 1e-9 <= found.kernels_ms <= max(possible) + 1e-9

    def test_several_sessions_are_their_mean(self, file, exporter):
        traces = [recorded(file, level) for level in ("ORT_ENABLE_ALL", "ORT_DISABLE_ALL")]
        alone = [htp_export.profile(file, measured=[trace]) for trace in traces]
        together = htp_export.profile(file, measured=traces)
        assert together.runs == 8
        assert together.kernels_ms == pytest.approx(sum(each.kernels_ms for each in alone) / 2)
        assert not together.unattributed

    def test_two_sessions_in_one_file_are_told_apart_by_their_process(
        self, file, tmp_path, exporter
    ):
        events = []
        for number, level in enumerate(("ORT_ENABLE_ALL", "ORT_DISABLE_ALL")):
            listed = json.loads(recorded(file, level).read_text())
            events += [{**event, "pid": number} for event in listed]
        merged = tmp_path / "merged.json"
        merged.write_text(json.dumps({"traceEvents": events}))
        assert htp_export.profile(file, measured=[merged]).runs == 8

    def test_what_matches_nothing_is_counted_and_named(self, file, tmp_path, exporter):
        events = json.loads(recorded(file, "ORT_ENABLE_ALL").read_text())
        kernels = [event for event in events if event["name"].endswith("_kernel_time")]
        first = kernels[0]["name"]
        for event in kernels:
            if event["name"] == first:
                event["name"] = "vendor_blob_7_kernel_time"
        changed = tmp_path / "changed.json"
        changed.write_text(json.dumps(events))
        found = htp_export.profile(file, measured=[changed])
        assert [kernel.name for kernel in found.unattributed] == ["vendor_blob_7"]
        assert any(
            note.startswith(f"1 of {len(found.kernels)} kernels match no node")
            and "vendor_blob_7" in note
            for note in found.notes
        )

    @pytest.mark.long
    def test_commands_and_the_page_read_it(self, file, tmp_path, capsys, exporter):
        trace = recorded(file, "ORT_ENABLE_ALL")
        assert main(["profile", str(file), "--measured", str(trace), "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert data["modules"]["up"]["total_ms"] > 0
        assert main(["profile", str(file), "--measured", str(trace)]) == 0
        assert "ms a run under the profiler, median of 4" in capsys.readouterr().out
        page = tmp_path / "page.html"
        assert main(["view", str(file), "--profile", str(trace), "-o", str(page)]) == 0
        assert "total_ms" in page.read_text(encoding="utf-8")


@pytest.fixture
def plain(tmp_path):
    return exported_to(tmp_path / "net.onnx", spread(Net()).eval(), {"x": x(2, 5, 8)}, "dynamo")


GOOD = {
    "cat": "Node",
    "name": "a_kernel_time",
    "ts": 1,
    "dur": 1,
    "tid": 1,
    "args": {"op_name": "Add"},
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not JSON"),
        ("3", "is no list of events"),
        ('{"modules": {}}', "is no list of events"),
        ("[]", "has no kernels"),
        ("[3]", "event 0 is no JSON object"),
        (json.dumps([{**GOOD, "ts": "1"}]), "event 0: 'ts' is no number"),
        (json.dumps([{**GOOD, "dur": 1e300}]), "event 0: 'dur' is no number"),
        (json.dumps([{**GOOD, "name": 4}]), "event 0: 'name' is no name"),
        (json.dumps([{**GOOD, "args": []}]), "event 0: 'args' is no JSON object"),
        (json.dumps([{**GOOD, "args": {"op_name": {}}}]), "event 0: 'op_name' is no name"),
        (json.dumps([GOOD]), "1 of its 1 kernel match no node of the model"),
        (json.dumps([{**GOOD, "name": "x" * 10**6}]), "event 0: 'name' is no name"),
    ],
)
def test_what_is_no_trace_of_the_model_is_refused(content, problem, plain, tmp_path, capsys):
    trace = tmp_path / "trace.json"
    trace.write_text(content)
    with pytest.raises(FileError, match=f"trace.json: {problem}"):
        htp_export.profile(plain, measured=[trace])
    assert main(["profile", str(plain), "--measured", str(trace)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_kernels_that_are_nested_without_end_are_refused(plain, tmp_path):
    events = []
    for level in range(1000):
        name = "SequentialExecutor::Execute" if level % 2 else "a_kernel_time"
        events.append({**GOOD, "name": name, "ts": 2000 - level, "dur": 2 * level + 1})
    (tmp_path / "trace.json").write_text(json.dumps(events))
    with pytest.raises(FileError, match="nested deeper than 100 levels"):
        htp_export.profile(plain, measured=[tmp_path / "trace.json"])


def test_options_of_a_run_have_no_effect_and_are_refused(plain):
    with pytest.raises(InputError, match="data, sizes and options have no effect"):
        htp_export.profile(plain, {"x": 1}, measured=["trace.json"])
    with pytest.raises(InputError, match="memory and timing have no effect"):
        htp_export.profile(plain, memory=True, measured=["trace.json"])
    with pytest.raises(InputError, match="measured has no files"):
        htp_export.profile(plain, measured=[])


def test_a_trace_without_runs_is_one_run(plain, tmp_path):
    [name, *_] = [node.name for node in onnx.load(plain).graph.node]
    event = {**GOOD, "name": f"{name}_kernel_time", "dur": 2000}
    event["args"] = {"op_name": onnx.load(plain).graph.node[0].op_type}
    (tmp_path / "trace.json").write_text(json.dumps([event]))
    found = htp_export.profile(plain, measured=[tmp_path / "trace.json"])
    assert (found.runs, found.kernels_ms) == (1, 2.0)


def test_a_trace_of_another_model_is_refused_although_a_name_is_found(plain, tmp_path):
    """torch names nodes alike in all models."""
    [node, *_] = onnx.load(plain).graph.node
    event = {**GOOD, "name": f"{node.name}_kernel_time", "args": {"op_name": node.op_type}}
    others = [{**GOOD, "name": f"node_of_another_{number}_kernel_time"} for number in range(3)]
    (tmp_path / "trace.json").write_text(json.dumps([event, *others]))
    with pytest.raises(FileError, match="3 of its 4 kernels match no node of the model"):
        htp_export.profile(plain, measured=[tmp_path / "trace.json"])
