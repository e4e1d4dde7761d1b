"""What an export does for each module call and node, in counts: the notes of the capture, and readings of JIT graphs.

Times vary by machine and load; a step more for every call shows here.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import htp_export
from htp_export.exporter.capture import torchscript
from htp_export.exporter.capture.running import Guarded

_PAIRS = 40
_CALLS = 1 + 3 * _PAIRS  # of the root, and of each Sequential with its Linear and its ReLU
_OPERATORS = 2 * _PAIRS
_ONCE = 20  # steps for a graph as a whole, at most


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Name of a step of a capture → how often it ran."""
    counts = Counter[str]()
    original = Guarded.step

    def step(self: Guarded, name: str, do: Callable[..., Any], *args: Any) -> Any:
        counts[name] += 1
        return original(self, name, do, *args)

    monkeypatch.setattr(Guarded, "step", step)
    return counts


def _export(folder: Path, *, dynamo: bool) -> None:
    layers = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(_PAIRS)]
    model = nn.Sequential(*layers).eval()
    file = folder / "model.onnx"
    htp_export.export(model, (torch.zeros(1, 4),), file, dynamo=dynamo, verbose=False)


@pytest.mark.slow
def test_torchscript_notes_each_call_three_times_and_each_operator_once(
    tmp_path: Path, steps: Counter[str]
) -> None:
    _export(tmp_path, dynamo=False)
    several = {name: count for name, count in steps.items() if count > 3}
    assert several == {
        "recording that a module is called": _CALLS,
        "recording the arguments of a module": _CALLS,
        "recording that a module returns": _CALLS,
        "following the translation of an operator": _OPERATORS,
    }
    assert steps.total() - sum(several.values()) <= _ONCE


@pytest.mark.slow
def test_torchscript_reads_the_graph_five_times_and_a_copy_by_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counter[str]()

    def counted(name: str, owner: Any) -> None:
        original = getattr(owner, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, count)

    counted("read", torchscript)
    counted("read_copy", torchscript)
    _export(tmp_path, dynamo=False)
    # traced, rewritten, translated, rewritten, named
    assert counts == {"read": 5, "read_copy": 1}


@pytest.mark.slow
def test_dynamo_notes_each_call_twice_and_each_node_of_a_program_five_times(
    tmp_path: Path, steps: Counter[str]
) -> None:
    _export(tmp_path, dynamo=True)
    calls = [steps.pop("recording that a module is called")]
    calls.append(steps.pop("recording that a module returns"))
    assert max(calls) <= _CALLS + 3  # and the modules that torch wraps around the model
    inputs_and_result = 2
    nodes = _OPERATORS + 2 * _PAIRS + inputs_and_result  # with weights and biases
    # three runs of each node, two of which are traced
    looking = steps.pop("looking for the FX trace that runs")
    following = steps.pop("following a node of the exported program through its decomposition")
    assert looking <= 3 * nodes + inputs_and_result
    assert following <= 2 * nodes + inputs_and_result
    assert steps.total() <= _ONCE
