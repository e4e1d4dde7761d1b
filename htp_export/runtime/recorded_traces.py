"""Traces of ONNX Runtime's profiler that were recorded elsewhere: untrusted files, checked before they are read."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from htp_export.errors import FileError
from htp_export.files.text_files import read_json
from htp_export.process.restoring import no_collection
from htp_export.runtime.traces import RUN, DeepTrace, Trace, trace_of_events

_MOST_BYTES = 1 << 30  # the profiler stops after a million events, which have about 300 MB
_MOST_EVENTS = 1 << 21  # twice as many
_LONGEST_NAME = 10_000  # characters of a kernel
_LATEST = 1 << 53  # microseconds: exact as a float, 285 years
_KINDS = ("Node", "Kernel", "Session")
"""The categories of events that times are read from; others are ignored."""


def read_recorded(path: str | os.PathLike[str]) -> list[Trace]:
    """Read a file of ``InferenceSession.end_profiling``, or several such lists merged into one.

    Returns a trace for each process in it. All runs count: `Trace.typical` ignores outliers, as the
    first run of a session.

    Raises:
        FileError: It cannot be read, is not such a file, or has no kernels.
    """
    try:
        size = Path(path).stat().st_size
    except OSError as error:
        raise FileError.unreadable(path, error) from error
    if size > _MOST_BYTES:
        raise FileError(path, f"has {size:,} bytes, more than the profiler writes: {_MOST_BYTES:,}")
    with no_collection():
        by_process = _events(path, read_json(path))
        traces = [_trace(path, events) for events in by_process.values()]
    traces = [trace for trace in traces if trace.times]
    if not traces:
        raise FileError(path, f"has no kernels, events of category 'Node'; {_ADVICE}")
    return traces


_ADVICE = "give what ONNX Runtime's profiler wrote: session_options.enable_profiling, session.end_profiling()"


def _trace(path: str | os.PathLike[str], events: Sequence[Mapping[str, Any]]) -> Trace:
    """The trace of the events of one process; without runs, all of it is one."""
    runs = sum(event["name"] == RUN for event in events)
    if not runs and events:
        start = min(event["ts"] for event in events)
        end = max(event["ts"] + event["dur"] for event in events)
        whole = {"name": RUN, "cat": "Session", "ts": start, "dur": end - start, "tid": -1}
        events = [*events, whole]
    try:
        return trace_of_events(events, max(runs, 1))
    except DeepTrace as error:
        raise FileError(path, str(error)) from error


def _events(path: str | os.PathLike[str], data: object) -> dict[int, list[dict[str, Any]]]:
    """Process → its events, in the order of the file, with the keys that are read, checked."""
    listed = data.get("traceEvents") if isinstance(data, dict) else data
    if not isinstance(listed, list):
        raise FileError(path, f"is no list of events; {_ADVICE}")
    if len(listed) > _MOST_EVENTS:
        raise FileError(path, f"has {len(listed):,} events, more than the profiler writes")
    by_process: dict[int, list[dict[str, Any]]] = {}
    for number, event in enumerate(listed):
        if not isinstance(event, dict):
            raise FileError(path, f"event {number} is no JSON object; {_ADVICE}")
        if event.get("cat") not in _KINDS:
            continue
        name = event.get("name")
        if not isinstance(name, str) or len(name) > _LONGEST_NAME:
            raise FileError(path, f"event {number}: 'name' is no name of an event")
        checked: dict[str, Any] = {"name": name, "cat": event["cat"]}
        for key in ("ts", "dur", "tid", "pid"):
            checked[key] = _whole(path, number, key, event.get(key, 0))
        checked["args"] = _arguments(path, number, event.get("args", {}))
        by_process.setdefault(checked.pop("pid"), []).append(checked)
    return by_process


def _whole(path: str | os.PathLike[str], number: int, key: str, value: object) -> int:
    """A time or a number of a process or thread."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not -_LATEST < value < _LATEST:  # type: ignore[operator] # it is a number
        raise FileError(path, f"event {number}: {key!r} is no number: {value!r}")
    return int(value)  # type: ignore[call-overload, no-any-return] # it is a number


def _arguments(path: str | os.PathLike[str], number: int, value: object) -> dict[str, Any]:
    """The arguments that are read: names, and the index of the node, which older versions lack."""
    if not isinstance(value, dict):
        raise FileError(path, f"event {number}: 'args' is no JSON object")
    arguments: dict[str, Any] = {}
    for key in ("op_name", "provider", "parent_name"):
        text = value.get(key, "")
        if not isinstance(text, str) or len(text) > _LONGEST_NAME:
            raise FileError(path, f"event {number}: {key!r} is no name")
        arguments[key] = text
    index = str(value.get("node_index", value.get("exec_plan_index", -1)))
    is_index = index.removeprefix("-").isdecimal() and len(index) < 10
    arguments["node_index"] = int(index) if is_index else -1
    return arguments
