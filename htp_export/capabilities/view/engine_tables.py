"""Times in tables that profilers of other engines write: OpenVINO's ``benchmark_app`` and ExecuTorch's Inspector.

- OpenVINO's ``benchmark_app -report_type average_counters`` or ``detailed_counters`` (without
  ``-json_stats``): ``layerName;execStatus;layerType;execType;realTime (ms);cpuTime (ms)``, and the
  same once more for each request.
- ExecuTorch's ``inspector.to_dataframe().to_csv(...)``: a row for each event, with the columns
  ``event_name``, ``avg (ms)`` and ``module_hierarchy``: name of an operator → its modules, the
  innermost last, as ``devtools/inspector/_inspector.py`` describes it. The file of
  ``save_data_to_tsv`` does not have the last one.
"""

from __future__ import annotations

import ast
import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from htp_export.errors import FileError

_OPENVINO = ("layerName", "execStatus", "layerType", "execType", "realTime (ms)", "cpuTime (ms)")
_EXECUTORCH = "event_block_name"
_MOST_BYTES = 1 << 28  # 4 kB an event for a model of 65,000 operators
_DELIMITERS = ";\t,"

_FRAMEWORK = frozenset(("Method::init", "Program::load_method", "Method::execute", "OPERATOR_CALL"))
"""Events around those of operators; the time of ``OPERATOR_CALL`` contains that of its operator."""
_DELEGATE = "DELEGATE_CALL"
_CLASS = re.compile(r"<class '([^']*)'>")
_CALL = re.compile(r"@\d+$")
"""The number of a further call of a module, behind its path."""


def is_openvino_table(beginning: str) -> bool:
    """Whether a file with this beginning is a table of OpenVINO's counters."""
    return beginning.startswith(";".join(_OPENVINO))


def is_executorch_table(beginning: str) -> bool:
    """Whether a file with this beginning is a table of ExecuTorch's Inspector."""
    first_line = beginning.partition("\n")[0]
    return _EXECUTORCH in re.split(f"[{_DELIMITERS}]", first_line)[:2]


def openvino_times(path: Path) -> dict[str, float]:
    """Layer → milliseconds of a run; of several requests, the mean.

    Raises:
        FileError: The file cannot be read, or is no such table.
    """
    times: dict[str, float] = {}
    requests = 0
    for number, row in _rows(path, ";"):
        if tuple(row[: len(_OPENVINO)]) == _OPENVINO:
            requests += 1
        elif len(row) >= len(_OPENVINO) and row[0] != "Total":
            times[row[0]] = times.get(row[0], 0.0) + _ms(path, number, row[4])
    return {name: ms / requests for name, ms in times.items()}


@dataclass(frozen=True)
class _Event:
    """An event of ExecuTorch: its time in a run, and the innermost module of each of its operators."""

    name: str
    ms: float
    modules: Sequence[str]
    is_delegated: bool


def executorch_times(path: Path) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds of a run by module, and by name of an event without modules.

    An event of several operators is divided equally among them.

    Raises:
        FileError: The file cannot be read, is no such table, or has no modules.
    """
    events = _events(path)
    of_modules: dict[str, float] = {}
    others: dict[str, float] = {}
    for event in _each_once(events):
        if not event.modules:
            others[event.name] = others.get(event.name, 0.0) + event.ms
        for module in event.modules:
            share = event.ms / len(event.modules)
            of_modules[module] = of_modules.get(module, 0.0) + share
    if not of_modules:
        raise FileError(path, f"no event of {len(events)} has a module; {_ADVICE}")
    return of_modules, others


def _events(path: Path) -> list[_Event]:
    """The events of operators that have a time, in execution order."""
    rows = _rows(path, _delimiter(path))
    _, names = next(rows)
    times = _columns(path, names)
    events = []
    for number, row in rows:
        cells = dict(zip(names, row, strict=False))
        name, time = cells.get("event_name", ""), cells.get(times, "")
        if name in _FRAMEWORK or not time:
            continue
        modules = _innermost(path, number, cells.get("module_hierarchy", ""))
        is_delegated = cells.get("is_delegated_op") == "True"
        events.append(_Event(name, _ms(path, number, time), modules, is_delegated))
    return events


def _each_once(events: Sequence[_Event]) -> Iterator[_Event]:
    """The events without those that are measured in another one.

    A call of a delegate follows the events in it, and contains their time: these count if they have
    modules of their own, else the call.
    """
    inside: list[_Event] = []
    for event in events:
        if event.is_delegated:
            inside.append(event)
            continue
        if event.name == _DELEGATE and any(each.modules for each in inside):
            yield from inside
        else:
            yield event
            if event.name != _DELEGATE:
                yield from inside
        inside = []
    yield from inside


_ADVICE = (
    "give what Inspector(etdump_path=..., etrecord=...).to_dataframe().to_csv(...) writes: the modules of "
    "events are in the ETRecord, and save_data_to_tsv leaves them out"
)


def _columns(path: Path, names: Sequence[str]) -> str:
    """The column of times; an error if the table lacks what is read."""
    if "module_hierarchy" not in names or "event_name" not in names:
        raise FileError(path, f"has no column module_hierarchy; {_ADVICE}")
    means = [name for name in names if name in ("avg", "avg (ms)")]
    if not means:
        others = ", ".join(name for name in names if name.startswith("avg")) or "none"
        raise FileError(path, f"has no column 'avg (ms)', but {others}; times are in milliseconds")
    return means[0]


def _innermost(path: Path, number: int, text: str) -> list[str]:
    """The path of the innermost module of each operator of an event."""
    if not text.startswith("{"):  # an event of the framework
        return []
    try:
        stacks = ast.literal_eval(_CLASS.sub(r"'\1'", text))
        found = []
        for stack in stacks.values():
            if stack:
                innermost = list(stack.values())[-1][0]
                found.append(".".join(_CALL.sub("", part) for part in innermost.split(".")))
    except (ValueError, SyntaxError, AttributeError, LookupError, TypeError, RecursionError,
            MemoryError) as error:  # fmt: skip
        raise FileError(path, f"line {number}: module_hierarchy cannot be read") from error
    return found


def _delimiter(path: Path) -> str:
    with path.open(encoding="utf-8", errors="replace") as file:
        first_line = file.readline()
    return "\t" if "\t" in first_line else ","


def _rows(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """The rows of a table that are not empty, with the numbers of their lines."""
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise FileError(path, f"has {size:,} bytes, more than {_MOST_BYTES:,}")
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter)
            for row in reader:
                if row:
                    yield reader.line_num, row
    except OSError as error:
        raise FileError.unreadable(path, error) from error
    except (csv.Error, UnicodeDecodeError) as error:
        advice = "; leave out the columns stack_traces, raw and debug_data"
        is_long = "field larger" in str(error)
        raise FileError(path, f"is no table: {error}{advice * is_long}") from error


def _ms(path: Path, number: int, text: str) -> float:
    """A time of a table."""
    try:
        ms = float(text)
    except ValueError:
        ms = math.nan
    if not 0 <= ms < math.inf:
        raise FileError(path, f"line {number}: {text!r} is no time in milliseconds")
    return ms
