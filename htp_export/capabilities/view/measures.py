"""Numbers by module from any result: columns of tables, sizes and colours of drawings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from htp_export.capabilities.view.inventory import Inventory, NodeEntry
from htp_export.errors import InputError
from htp_export.reporting.result import plain


@dataclass(frozen=True)
class Measure:
    """One number for each module; or one word, such as its precision or its device.

    Attributes:
        key: Its name in the result: ``total_ms``.
        title: The title of its column: ``time``.
        unit: ``ms``, ``B`` for bytes, or ``""``.
        additive: Whether a module's value is the sum of its own and its children's.
        main: Whether it is shown by default.
        total: Module path → value, with all descendants.
        own: Module path → value of the module itself; empty if unknown.
        nodes: Node name → value, if known.
        words: Module path → text of the result, such as ``differs``.
        named: Whether the values are words, such as ``int8``, and there are no numbers.
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
"""The measures of known results, without values."""
_OWN = {"total_ms": "self_ms"}
"""Measure → name of the module's own value, if it is not called ``self_…``."""
_NAMED = ("precision", "device")
# 0 in the result also for nodes that are not counted, whose work is unknown.
_WORK = ("macs", "flops", "other_flops")
# Contained in every drawing, or parts of other numbers.
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
    """The numbers by module of a result, or of its JSON; the main ones first.

    A module may have several rows with names, such as one for each precision of ``sensitivity``.

    Raises:
        InputError: The result has no ``modules``.
    """
    data = plain(result)
    modules = data.get("modules") if isinstance(data, Mapping) else None
    if not isinstance(modules, Mapping) or not all(isinstance(path, str) for path in modules):
        raise InputError(
            f"{type(result).__name__} has no numbers by module; give what profile, cost or verify returns, "
            "or the JSON that their commands write"
        )
    rows = {path: row for path, row in modules.items() if isinstance(row, Mapping)}
    if rows and all(map(_holds_rows, rows.values())):
        measures = _measures_by_name(data, rows)
    else:
        measures = [*_named(rows), *_numbered(data, rows)]
    return sorted(measures, key=lambda measure: not measure.main)


def _holds_rows(row: Mapping[str, Any]) -> bool:
    """Whether a row consists of several rows, by name."""
    return bool(row) and all(isinstance(value, Mapping) for value in row.values())


def _measures_by_name(
    data: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]
) -> list[Measure]:
    """The measures of modules with several rows, once for each name of a row."""
    names: dict[str, None] = {}
    for row in rows.values():
        names.update(dict.fromkeys(row))
    measures = []
    for name in names:
        rows_of_name = {path: row[name] for path, row in rows.items() if name in row}
        for measure in _numbered(data, rows_of_name):
            key = f"{measure.key}:{name}"
            title = f"{measure.title}, {name}"
            measures.append(replace(measure, key=key, title=title, nodes={}))
    return measures


def _named(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[Measure]:
    """The measures whose values are words."""
    for name in _NAMED:
        words = {}
        for path, row in rows.items():
            word = row.get(name)
            if isinstance(word, str) and word:
                words[path] = word
        if words:
            yield Measure(name, name, main=True, words=words, named=True)


def _numbered(data: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]) -> Iterator[Measure]:
    """The measures whose values are numbers."""
    numbers = {path: dict(_numbers(row)) for path, row in rows.items()}
    words = _remarks(rows)
    for name in dict.fromkeys(itertools.chain.from_iterable(numbers.values())):
        if name not in _KINDS and (name in _KNOWN_ANYWAY or name.startswith(("self_", "own_"))):
            continue
        kind = _KINDS.get(name, Measure(name, name.replace("_", " ")))
        own = _OWN.get(name, f"self_{name}") if kind.additive else ""
        yield replace(
            kind,
            title=_title(kind, data),
            total={path: values[name] for path, values in numbers.items() if name in values},
            own={path: values[own] for path, values in numbers.items() if own in values},
            nodes=_by_node(data, name),
            words=words if kind.main else {},
        )


def _title(kind: Measure, data: Mapping[str, Any]) -> str:
    """The title of a column; times of another engine than ONNX Runtime have its name."""
    from htp_export.capabilities.profile.latency_results import OWN_ENGINE

    engine = data.get("engine")
    if kind.unit != "ms" or not isinstance(engine, str) or engine == OWN_ENGINE:
        return kind.title
    return f"{kind.title}, {engine}"


def _remarks(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Module path → status, problem and reason of its row, if there are any."""
    remarks = {}
    for path, row in rows.items():
        texts = [str(row[name]) for name in ("status", "problem", "reason") if row.get(name)]
        if texts:
            remarks[path] = ": ".join(texts)
    return remarks


def _numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of one module, and words for numbers that JSON cannot express."""
    for name, value in row.items():
        is_word = isinstance(value, str) and value.lower() in ("nan", "inf", "-inf")
        if is_word or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield name, float(value)


def _by_node(data: Mapping[str, Any], name: str) -> dict[str, float]:
    """Values of single nodes: the nodes of a cost, the kernels of a profile."""
    if name == "total_ms":
        entries = data.get("kernels")
        field_name = "ms"
    else:
        entries = data.get("nodes")
        field_name = name
    values: dict[str, float] = {}
    for entry in entries if isinstance(entries, list) else ():
        if not isinstance(entry, Mapping) or (name in _WORK and entry.get("counted") is False):
            continue
        key = entry.get("name")
        value = entry.get(field_name)
        if isinstance(key, str) and key and isinstance(value, int | float) and math.isfinite(value):
            values[key] = values.get(key, 0.0) + value
    return values


def spread(measure: Measure, inventory: Inventory) -> list[float | None]:
    """Distribute the values of modules to ``inventory.nodes``; None for nodes without a value.

    Nodes of an additive measure add up to the values of their modules: some have values in the
    result, and the rest is divided equally. For other measures, a node has the value of its owner.
    """
    if not measure.additive:
        return [_largest_of_owners(measure, node) for node in inventory.nodes]
    known = [measure.nodes.get(node.name) if node.name else None for node in inventory.nodes]
    values = list(known)
    for path, module in inventory.modules.items():
        own_value = measure.own.get(path)
        if own_value is None or not module.own_nodes:
            continue
        open_nodes, shares = [], []
        for k in module.own_nodes:
            known_value = known[k]
            if known_value is None:
                open_nodes.append(k)
            else:
                shares.append(known_value / max(len(inventory.nodes[k].owners), 1))
        left = own_value - sum(shares)
        if left > 0:
            receivers = open_nodes or module.own_nodes
            for k in receivers:
                values[k] = (values[k] or 0.0) + left / len(receivers)
    return values


def _largest_of_owners(measure: Measure, node: NodeEntry) -> float | None:
    owners = [owner for owner in node.owners if owner in measure.total]
    return max((measure.total[owner] for owner in owners), default=None)
