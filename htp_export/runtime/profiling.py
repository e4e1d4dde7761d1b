"""An ONNX Runtime session under its profiler, and the optimised graph that the session runs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import onnx
import onnx_ir as ir

from htp_export.errors import OnnxRuntimeError
from htp_export.process.progress import counted
from htp_export.runtime.inputs import Feed
from htp_export.runtime.sessions import LARGE_BYTES, Changes, RunnableModel, Session, SessionSettings
from htp_export.runtime.traces import Trace, read_trace

__all__ = ["ProfiledSession", "open_with_graph"]

_EXTERNAL_FILE = "session.optimized_model_external_initializers_file_name"
_EXTERNAL_SIZE = "session.optimized_model_external_initializers_min_size_in_bytes"


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
        attributes = {"enable_profiling": True, "profile_file_prefix": os.fspath(temporary / "profile")}
        self._session, self.optimized = open_with_graph(model, settings, temporary, Changes(attributes))

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


def open_with_graph(
    model: RunnableModel, settings: SessionSettings, folder: Path, changes: Changes
) -> tuple[Session, ir.Model | None]:
    """Open a session, and return its optimised graph too, without the values of weights; None if it cannot be written.

    ONNX Runtime writes weights that are not in a file into the graph, or, which takes longer, into a file beside it if
    they are too large for a protobuf message.

    Args:
        model: The model.
        settings: Execution providers and options.
        folder: A folder for the graph.
        changes: Further changes of the options.

    Raises:
        OnnxRuntimeError: If ONNX Runtime cannot load the model.
    """
    attempts: Sequence[str] = ["within", "beside", "none"] if model.size < LARGE_BYTES else ["beside", "none"]
    first: OnnxRuntimeError | None = None
    for attempt in attempts:
        written = folder / f"{attempt}.onnx"
        entries = {_EXTERNAL_FILE: f"{written.name}.data", _EXTERNAL_SIZE: "1024"} if attempt == "beside" else {}
        attributes = {"optimized_model_filepath": os.fspath(written) if attempt != "none" else ""}
        try:
            session = Session(
                model, settings, Changes({**changes.attributes, **attributes}, {**changes.entries, **entries})
            )
        except OnnxRuntimeError as error:
            first = first or error
        else:
            if attempt == "none":
                return session, None
            return session, ir.from_proto(onnx.load(written, load_external_data=False))
    assert first is not None
    raise first
