"""An ONNX Runtime session under its profiler, and the optimised graph that the session runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

from htp_export.process.progress import counted
from htp_export.runtime.inputs import Feed
from htp_export.runtime.saved_graphs import session_and_graph
from htp_export.runtime.sessions import OptionChanges, RunnableModel, SessionSettings
from htp_export.runtime.traces import Trace, read_trace

__all__ = ["ProfiledSession"]


class ProfiledSession:
    """A session under ONNX Runtime's profiler.

    Args:
        model: The model.
        settings: Execution providers and options.
        temporary: A folder for the files that ONNX Runtime writes.

    Attributes:
        optimized: The optimised graph, without the values of weights; None if ONNX Runtime cannot write it, because an
            execution provider compiles parts of it.

    Raises:
        OnnxRuntimeError: If ONNX Runtime cannot load the model.
    """

    def __init__(self, model: RunnableModel, settings: SessionSettings, temporary: Path) -> None:
        profiling = {"enable_profiling": True, "profile_file_prefix": os.fspath(temporary / "profile")}
        self._session, self.optimized = session_and_graph(model, settings, temporary, OptionChanges(profiling))

    @property
    def providers(self) -> tuple[str, ...]:
        """The execution providers in use."""
        return self._session.providers

    def run(self, feed: Feed, runs: int) -> list[float]:
        """Run the model several times.

        Returns:
            The time of each run, in ms.

        Raises:
            OnnxRuntimeError: If ONNX Runtime cannot run the model on these inputs.
        """
        values = self._session.values(feed.arrays, feed.types)
        times = []
        for _ in counted(range(runs), "runs"):
            start = time.perf_counter()
            self._session.run_values(values)
            times.append((time.perf_counter() - start) * 1000)
        return times

    def end_profiling(self, runs: int) -> Trace:
        """Stop the profiler, and read its trace of the last runs."""
        return read_trace(self._session.end_profiling(), runs)
