"""Times of parts of a model: each is cut out, and runs alone in ONNX Runtime."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import onnx_ir as ir

from htp_export.editing.cut_models import edit_of_cut
from htp_export.files.filesystem import temporary_folder
from htp_export.model.cutting import Cut, Cutter
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.arrays import Array
from htp_export.runtime.runner import Runner
from htp_export.runtime.sessions import OptionChanges, RunnableModel, Session
from htp_export.runtime.settings import HOST, RunSettings

_WARMUP = 3
"""Runs: ONNX Runtime plans its memory in the first ones."""

_LEAST_SECONDS = 0.1
"""The least time of the measurement of a part: medians of short runs need more than `runs`."""

_MOST_ROUNDS = 1000
"""Runs of a part, at most: medians of more are not steadier."""

_FINEST = 1e-6
"""Seconds: a clock of processor time that is coarser does not measure short runs."""


class PartTimer:
    """Measures models on one thread, in turn.

    On the CPU, times are those of the processor in this thread, which other work of the machine
    hardly changes: a run that is interrupted takes no longer. Other providers, and systems without a
    fine clock of threads, have wall time.

    Args:
        settings: The providers, and the least number of timed runs.
    """

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        fine = time.get_clock_info("thread_time").resolution <= _FINEST
        is_host = settings.providers == (HOST,)
        self._clock = time.thread_time if fine and is_host else time.perf_counter

    def parts(
        self, tagged: TaggedModel, parts: Sequence[Sequence[ir.Node]], feed: Mapping[str, Array]
    ) -> list[float]:
        """The time of each part in ms: of nodes of the main graph, on tensors of one run.

        Nodes whose results nothing else uses take no time: a runtime removes them.
        """
        cutter = Cutter(tagged)
        cuts = [_cut(cutter, nodes) for nodes in parts]
        arrays = dict(feed)
        names = {name for cut in cuts if cut is not None for name in cut.inputs}
        inside = sorted(names - arrays.keys())
        if inside:
            runner = Runner(tagged.model, "the candidate", self._settings)
            arrays |= runner.run(feed, inside)
        models: list[ir.Model] = []
        for cut in cuts:
            if cut is not None:
                edit, _ = edit_of_cut(tagged, cut)
                models.append(edit.tagged.model)
        times = iter(self.models(models, arrays))
        return [0.0 if cut is None else next(times) for cut in cuts]

    def models(self, models: Sequence[ir.Model], arrays: Mapping[str, Array]) -> list[float]:
        """The median time of a run of each model in ms, without that of an empty model.

        They run in turn, so that none finds all its weights in the processor's cache, and the load
        of the machine is the same for all.
        """
        with temporary_folder() as folder:
            runs = [self._opened(_empty_model(), {}, folder)]
            runs += [self._opened(model, arrays, folder) for model in models]
            times: list[list[float]] = [[] for _ in runs]
            begun = time.perf_counter()
            least_seconds = _LEAST_SECONDS * len(runs)
            for number in range(_MOST_ROUNDS):
                has_time_left = time.perf_counter() - begun < least_seconds
                if number >= self._settings.runs + _WARMUP and not has_time_left:
                    break
                for run, seconds in zip(runs, times, strict=True):
                    start = self._clock()
                    run()
                    seconds.append(self._clock() - start)
        empty, *medians = [statistics.median(seconds[_WARMUP:]) for seconds in times]
        return [max(median - empty, 0.0) * 1000 for median in medians]

    def _opened(
        self, model: ir.Model, arrays: Mapping[str, Array], folder: Path
    ) -> Callable[[], None]:
        runnable = RunnableModel.of(model, "a part of the candidate", folder)
        session = Session(runnable, self._settings, OptionChanges({"intra_op_num_threads": 1}))
        return session.bound({name: arrays[name] for name in session.inputs})


def _cut(cutter: Cutter, nodes: Sequence[ir.Node]) -> Cut | None:
    """Cut nodes out of a model; None if nothing else uses their results."""
    members = frozenset(nodes)
    outputs: dict[str, ir.Value] = {}
    for node in nodes:
        for value in node.outputs:
            leaves = value.is_graph_output() or any(use.node not in members for use in value.uses())
            if leaves:
                outputs[str(value.name)] = value
    return cutter.cut_nodes(members, outputs) if outputs else None


def _empty_model() -> ir.Model:
    """A model that returns one number: its time is that of the call of ONNX Runtime itself."""
    number = ir.tensor([0.0], dtype=ir.DataType.FLOAT)
    node = ir.node("Constant", [], {"value": number})
    node.outputs[0].name = "number"
    node.outputs[0].dtype = ir.DataType.FLOAT
    node.outputs[0].shape = ir.Shape([1])
    graph = ir.Graph([], node.outputs, nodes=[node], opset_imports={"": 18}, name="empty")
    return ir.Model(graph, ir_version=10)
