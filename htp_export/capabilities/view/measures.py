"""Numbers by module from any result: columns of a table, sizes and colours of a drawing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from htp_export.capabilities.view.inventory import Inventory
from htp_export.errors import InputError
from htp_export.reporting.result import plain


@dataclass(frozen=True)
class Measure:
    """One number for each module, or one word, such as its precision or its device.

    Attributes:
        key: Its name in the result: ``total_ms``.
        title: The title of its column: ``time``.
        unit: ``ms``, ``B`` for bytes, or ``""``.
        additive: Whether a module's value is the sum of its own and those of the modules below it.
        main: Whether it is shown at first.
        total: Module path → value, with everything below the module.
        own: Module path → value of the module itself; empty if unknown.
        nodes: Name of a node → value, if known.
        words: Module path → text of the result, such as ``differs``.
        named: Whether the words are its values, and there are no numbers: ``int8``.
    """

    key: str
    title: str
    unit: str = ""
    additive: bool = False
    main: bool = False
    total: Mapping[str, float] = field(default_factory=dict)
    own: Mapping[str, float] = field(default_factory=dict)
    nodes: Mapping[str, float] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    named: bool = False


_KINDS = {
    kind.key: kind
    for kind in (
        Measure("total_ms", "time", "ms", additive=True, main=True),
        Measure("fused_ms", "time in fused kernels", "ms", additive=True),
        Measure("kernels", "kernels", additive=True),
        Measure("launches", "launches", additive=True),
        Measure("flops", "FLOPs", additive=True, main=True),
        Measure("macs", "multiply-adds", additive=True),
        Measure("other_flops", "other FLOPs", additive=True),
        Measure("activation_bytes", "activations", "B", additive=True),
        Measure("traffic_bytes", "traffic", "B", additive=True),
        Measure("peak_bytes", "peak memory", "B"),
        Measure("fused_traffic_bytes", "traffic, fused", "B"),
        Measure("fused_peak_bytes", "peak memory, fused", "B"),
        Measure("intensity", "FLOPs per byte"),
        Measure("max_abs", "max abs error", main=True),
        Measure("mean_abs", "mean abs error"),
        Measure("max_rel", "max rel error"),
        Measure("mean_rel", "mean rel error"),
        Measure("cosine", "cosine"),
        Measure("error", "error of the outputs", main=True),
        Measure("sparsity", "sparsity", main=True),
        Measure("bytes_before", "bytes before", "B", additive=True, main=True),
        Measure("bytes_after", "bytes after", "B", additive=True, main=True),
    )
}
"""What is known of the measures of results, without values."""
_OWN = {"total_ms": "self_ms"}
"""What the module itself has, where that is not called ``self_…``."""
_NAMED = ("precision", "device")
# of nodes that are not counted, these are unknown, and written as 0
_WORK = ("macs", "flops", "other_flops")
# These are in every drawing, or parts of other numbers.
_KNOWN_ANYWAY = frozenset(
    (
        "path",
        "class_name",
        "calls",
        "fate",
        "nodes",
        "own_nodes",
        "parameters",
        "weight_bytes",
        "share",
        "number",
    )
)


def measures_of(result: object) -> list[Measure]:
    """The numbers by module of a result, or of what its command writes with ``--json``; the main ones first.

    A module may have several rows, by name, as each precision of ``sensitivity`` is one. Without
    ``modules``: `InputError`.
    """
    data = plain(result)
    modules = data.get("modules") if isinstance(data, Mapping) else None
    if not isinstance(modules, Mapping) or not all(isinstance(path, str) for path in modules):
        raise InputError(
            f"{type(result).__name__} has no numbers by module; give what profile, cost or verify returns, "
            "or the JSON that their commands write"
        )
    rows = {path: row for path, row in modules.items() if isinstance(row, Mapping)}
    if rows and all(
        row and all(isinstance(value, Mapping) for value in row.values()) for row in rows.values()
    ):
        names = dict.fromkeys(name for row in rows.values() for name in row)
        measures = [
            replace(
                measure, key=f"{measure.key}:{name}", title=f"{measure.title}, {name}", nodes={}
            )
            for name in names
            for measure in _numbered(
                data, {path: row[name] for path, row in rows.items() if name in row}
            )
        ]
    else:
        measures = [*_named(rows), *_numbered(data, rows)]
    return sorted(measures, key=lambda measure: not measure.main)


def _named(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[Measure]:
    for name in _NAMED:
        words = {
            path: word
            for path, row in rows.items()
            if isinstance(word := row.get(name), str) and word
        }
        if words:
            yield Measure(name, name, main=True, words=words, named=True)


def _numbered(data: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> Iterator[Measure]:
    numbers = {path: dict(_numbers(row)) for path, row in rows.items()}
    words = {
        path: ": ".join(
            str(text) for name in ("status", "problem", "reason") if (text := row.get(name))
        )
        for path, row in rows.items()
    }
    for name in dict.fromkeys(name for values in numbers.values() for name in values):
        if name not in _KINDS and (name in _KNOWN_ANYWAY or name.startswith(("self_", "own_"))):
            continue
        kind = _KINDS.get(name, Measure(name, name.replace("_", " ")))
        own = _OWN.get(name, f"self_{name}") if kind.additive else ""
        yield replace(
            kind,
            total={path: values[name] for path, values in numbers.items() if name in values},
            own={path: values[own] for path, values in numbers.items() if own in values},
            nodes=_by_node(data, name),
            words={path: text for path, text in words.items() if text} if kind.main else {},
        )


def _numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of one module; words are passed over, but for numbers that JSON has no sign for."""
    for name, value in row.items():
        written = isinstance(value, str) and value.lower() in ("nan", "inf", "-inf")
        if written or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield name, float(value)


def _by_node(data: Mapping[str, Any], name: str) -> dict[str, float]:
    """Values of single nodes: the nodes of a cost, the kernels of a profile."""
    entries, field_name = (
        (data.get("kernels"), "ms") if name == "total_ms" else (data.get("nodes"), name)
    )
    values: dict[str, float] = {}
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, Mapping) or (name in _WORK and entry.get("counted") is False):
            continue
        key, value = entry.get("name"), entry.get(field_name)
        if isinstance(key, str) and key and isinstance(value, int | float) and math.isfinite(value):
            values[key] = values.get(key, 0.0) + value
    return values


def spread(measure: Measure, inventory: Inventory) -> list[float | None]:
    """A value for each node of ``inventory.nodes``, from the values of modules; None where nothing is known.

    Of a measure that adds up, nodes sum up to what their module has: what the result says of single
    nodes, and the rest in equal parts. Of any other measure, a node has the value of its owner.
    """
    if not measure.additive:
        return [
            max(
                (measure.total[owner] for owner in node.owners if owner in measure.total),
                default=None,
            )
            for node in inventory.nodes
        ]
    known = [measure.nodes.get(node.name) if node.name else None for node in inventory.nodes]
    values = list(known)
    for path, module in inventory.modules.items():
        own_value = measure.own.get(path)
        if own_value is None or not module.own_nodes:
            continue
        known_sum = sum(
            (known[k] or 0.0) / max(len(inventory.nodes[k].owners), 1) for k in module.own_nodes
        )
        open_nodes = [k for k in module.own_nodes if known[k] is None] or list(module.own_nodes)
        left = own_value - known_sum
        if left > 0:
            for k in open_nodes:
                values[k] = (values[k] or 0.0) + left / len(open_nodes)
    return values
