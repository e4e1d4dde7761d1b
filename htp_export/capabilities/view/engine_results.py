"""Times by name, as engines report them that cannot run here, as numbers by module.

A name is a module path, the name of a node, or the name of a tensor that a node computes.

- ``{"encoder.layer.0": 1.2, "node_MatMul_3": 0.4}``, or ``{"title": "Hexagon", "unit": "ms",
  "values": {...}}``: the form for any engine; ``docs/view.md`` describes it.
- OpenVINO's ``benchmark_app -report_type average_counters`` or ``detailed_counters`` with
  ``-json_stats``: ``samples/cpp/benchmark_app/statistics_report.cpp`` writes
  ``{"report_type": "average", "avg_performance": {"nodes": [{"name", "real_time", ...}]}}`` and
  ``{"report_type": "detailed", "detailed_performance": [{"nodes": [...]}, ...]}``; milliseconds.
- Tables of OpenVINO and ExecuTorch: `engine_tables`.

Layers of TensorRT stand for several nodes: `profile` reads its files.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from htp_export.capabilities.view.engine_tables import (
    executorch_times,
    is_executorch_table,
    is_openvino_table,
    openvino_times,
)
from htp_export.capabilities.view.inventory import Inventory
from htp_export.capabilities.view.measures import Measure
from htp_export.errors import FileError, InputError
from htp_export.files.text_files import beginning_of
from htp_export.format import tags

_FIELDS = {"title", "unit", "values"}
_SHOWN = 3
"""Names without a counterpart in the model that a note lists."""


@dataclass(frozen=True)
class NamedNumbers:
    """Numbers by name, which are not yet matched with a model.

    Attributes:
        title: The title of the column.
        unit: ``ms``, ``B`` for bytes, or ``""``.
        values: Name of a module, node or tensor → number; that of a module is with all descendants.
        own: Module path → number of the module itself, which counts in all modules above it.
    """

    title: str
    unit: str
    values: Mapping[str, float]
    own: Mapping[str, float] = field(default_factory=dict)

    def of_model(self, inventory: Inventory) -> tuple[Measure, str]:
        """The numbers by module and node, and a note on names that the model does not have.

        The number of a node counts in all modules above it; that of a module is as it is reported.
        """
        by_module: dict[str, float] = {}
        by_node: dict[int, float] = {}
        unknown = []
        places = _node_places(inventory)
        for name, value in self.values.items():
            if name in inventory.modules:
                by_module[name] = value
            elif name in places:
                by_node[places[name]] = by_node.get(places[name], 0.0) + value
            else:
                unknown.append(name)
        own = {path: value for path, value in self.own.items() if path in inventory.modules}
        unknown += [path for path in self.own if path not in own]
        if not by_module and not by_node and not own:
            raise InputError(
                f"{self.title}: none of its {len(unknown)} names is a module, node or tensor of "
                f"{inventory.name}, {unknown[0]!r} first"
            )
        sums = defaultdict[str, float](float)
        counted = [(inventory.nodes[place].module, value) for place, value in by_node.items()]
        for module, value in (*counted, *own.items()):
            for path in tags.ancestors(module):
                sums[path] += value
        named = {inventory.nodes[place].name: value for place, value in by_node.items()}
        measure = Measure(
            key=f"engine:{self.title}",
            title=self.title,
            unit=self.unit,
            additive=True,
            main=True,
            total={**sums, **by_module},
            own=own,
            nodes={name: value for name, value in named.items() if name},
        )
        return measure, self._note(unknown, inventory)

    def _note(self, unknown: Sequence[str], inventory: Inventory) -> str:
        if not unknown:
            return ""
        listed = ", ".join(unknown[:_SHOWN])
        more = f" and {len(unknown) - _SHOWN:,} more" if len(unknown) > _SHOWN else ""
        numbers = {**self.values, **self.own}
        lost = sum(numbers[name] for name in unknown)
        return (
            f"{self.title}: {len(unknown):,} of {len(numbers):,} names are not in "
            f"{inventory.name} ({lost:.4g} {self.unit}".rstrip()
            + f"): {listed}{more}."
        )


def _node_places(inventory: Inventory) -> dict[str, int]:
    """Name of a node, or of a tensor that it computes → position of the node; names of nodes first."""
    places: dict[str, int] = {}
    for place, node in enumerate(inventory.nodes):
        places.setdefault(node.name, place)
    for place, node in enumerate(inventory.nodes):
        for output in node.outputs:
            places.setdefault(output.name, place)
    places.pop("", None)
    return places


def named_numbers(data: Any, file: str) -> NamedNumbers | None:
    """Read numbers by name; None for data in another form.

    Args:
        data: The content of a JSON file.
        file: The name of the file, the title of the numbers if they have none.

    Raises:
        InputError: The data has one of the forms above, and other contents.
    """
    if not isinstance(data, Mapping) or "modules" in data:
        return None
    if data.get("report_type") in ("average", "detailed"):
        return NamedNumbers("OpenVINO time", "ms", _openvino_times(data))
    if isinstance(data.get("values"), Mapping) and set(data) <= _FIELDS:
        title, unit = data.get("title", file), data.get("unit", "")
        if not isinstance(title, str) or not isinstance(unit, str):
            raise InputError("title and unit are texts")
        return NamedNumbers(title or file, unit, _checked(data["values"]))
    if data and all(_is_number(value) for value in data.values()):
        return NamedNumbers(file, "", _checked(data))
    return None


def is_measured(path: Path) -> bool:
    """Whether a file contains measurements of an engine."""
    from htp_export.capabilities.profile.measured_files import engine_of

    beginning = beginning_of(path)
    is_table = is_openvino_table(beginning) or is_executorch_table(beginning)
    return is_table or engine_of(path) is not None


def numbers_in_table(path: Path) -> NamedNumbers | None:
    """Read the table of another engine; None for a file in another form.

    Raises:
        FileError: The file has one of the forms of `engine_tables`, and other contents.
    """
    beginning = beginning_of(path)
    if is_openvino_table(beginning):
        times = openvino_times(path)
        if not times:
            raise FileError(path, "OpenVINO's report has no counters")
        return NamedNumbers("OpenVINO time", "ms", times)
    if is_executorch_table(beginning):
        of_modules, others = executorch_times(path)
        return NamedNumbers("ExecuTorch time", "ms", others, own=of_modules)
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _checked(values: Mapping[Any, Any]) -> dict[str, float]:
    """Numbers by name, all of them finite."""
    for name, value in values.items():
        if not isinstance(name, str) or not _is_number(value) or not math.isfinite(value):
            raise InputError(f"the value of {name!r} is {value!r}, and not a finite number")
    if not values:
        raise InputError("there are no values")
    return {name: float(value) for name, value in values.items()}


def _openvino_times(data: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds by layer; of several requests, the mean."""
    if data["report_type"] == "average":
        requests: Any = [data.get("avg_performance")]
    else:
        requests = data.get("detailed_performance")
    if not isinstance(requests, list) or not requests:
        raise InputError("OpenVINO's report has no counters")
    times: dict[str, float] = {}
    for request in requests:
        for name, ms in _openvino_layers(request):
            times[name] = times.get(name, 0.0) + ms / len(requests)
    return _checked(times)


def _openvino_layers(request: Any) -> Iterable[tuple[str, float]]:
    nodes = request.get("nodes") if isinstance(request, Mapping) else None
    if not isinstance(nodes, list):
        raise InputError("OpenVINO's report has no list of nodes")
    for entry in nodes:
        name = entry.get("name") if isinstance(entry, Mapping) else None
        ms = _milliseconds(entry.get("real_time")) if isinstance(entry, Mapping) else None
        if not isinstance(name, str) or ms is None:
            raise InputError("a node of OpenVINO's report has no name or no real_time")
        yield name, ms


def _milliseconds(value: object) -> float | None:
    """A time of OpenVINO's report: a number as the C++ tool writes it, or a text as the Python tool does."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    return float(value) if _is_number(value) else None  # type: ignore[arg-type] # it is a number
