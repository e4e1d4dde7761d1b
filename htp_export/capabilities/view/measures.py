"""Numbers by module from any result: columns of a table, sizes and colours of a drawing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

from htp_export.capabilities.view.inventory import Inventory
from htp_export.errors import InputError

__all__ = ["Measure", "measures_of", "spread"]


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


@dataclass(frozen=True)
class _Kind:
    title: str
    unit: str = ""
    additive: bool = True
    main: bool = False
    own: str = ""


_KINDS = {
    "total_ms": _Kind("time", "ms", main=True, own="self_ms"),
    "fused_ms": _Kind("time in fused kernels", "ms"),
    "kernels": _Kind("kernels"),
    "launches": _Kind("launches"),
    "flops": _Kind("FLOPs", main=True, own="self_flops"),
    "macs": _Kind("multiply-adds", own="self_macs"),
    "other_flops": _Kind("other FLOPs", own="self_other_flops"),
    "activation_bytes": _Kind("activations", "B", own="self_activation_bytes"),
    "traffic_bytes": _Kind("traffic", "B", own="self_traffic_bytes"),
    "peak_bytes": _Kind("peak memory", "B", additive=False),
    "fused_traffic_bytes": _Kind("traffic, fused", "B", additive=False),
    "fused_peak_bytes": _Kind("peak memory, fused", "B", additive=False),
    "intensity": _Kind("FLOPs per byte", additive=False),
    "max_abs": _Kind("max abs error", additive=False, main=True),
    "mean_abs": _Kind("mean abs error", additive=False),
    "max_rel": _Kind("max rel error", additive=False),
    "mean_rel": _Kind("mean rel error", additive=False),
    "cosine": _Kind("cosine", additive=False),
    "error": _Kind("error of the outputs", additive=False, main=True),
    "sparsity": _Kind("sparsity", additive=False, main=True),
    "bytes_before": _Kind("bytes before", "B", main=True),
    "bytes_after": _Kind("bytes after", "B", main=True),
}
_NAMED = ("precision", "device")
_WORK = ("macs", "flops", "other_flops")  # of nodes that are not counted, these are unknown, and written as 0
# These are in every drawing, or parts of other numbers.
_KNOWN_ANYWAY = frozenset(
    ("path", "class_name", "calls", "fate", "nodes", "own_nodes", "parameters", "weight_bytes", "share", "number")
)


def measures_of(result: object) -> list[Measure]:
    """The numbers by module of a result, the main ones first.

    Args:
        result: Anything with ``modules``, a mapping from module path to an object or a mapping with numbers in it: what
            ``profile``, ``cost``, ``verify``, ``compare``, ``quantize`` or ``prune`` returns, or what their commands
            write with ``--json``. A module may have several rows, by name, as each precision of ``sensitivity`` is one.

    Raises:
        InputError: If it has no such ``modules``.

    Examples:
        >>> [measure] = measures_of({"modules": {"": {"total_ms": 3.0, "self_ms": 1.0}, "fc": {"total_ms": 2.0}}})
        >>> measure.title, measure.total, measure.own
        ('time', {'': 3.0, 'fc': 2.0}, {'': 1.0})
        >>> [precision] = measures_of({"modules": {"fc": {"precision": "int8"}}})
        >>> precision.named, precision.words
        (True, {'fc': 'int8'})
    """
    modules = _get(result, "modules")
    if not isinstance(modules, Mapping) or not all(isinstance(path, str) for path in modules):
        raise InputError(
            f"{type(result).__name__} has no numbers by module; give what profile, cost or verify returns, "
            "or the JSON that their commands write"
        )
    if modules and all(_holds_rows(entry) for entry in modules.values()):
        names = dict.fromkeys(name for entry in modules.values() for name in entry)
        measures = [
            replace(measure, key=f"{measure.key}:{name}", title=f"{measure.title}, {name}", nodes={})
            for name in names
            for measure in _numbered(result, {path: rows[name] for path, rows in modules.items() if name in rows})
        ]
    else:
        measures = [*_named(modules), *_numbered(result, modules)]
    return sorted(measures, key=lambda measure: not measure.main)


def _holds_rows(entry: object) -> bool:
    """Whether the entry of a module has several rows, by name."""
    return isinstance(entry, Mapping) and bool(entry) and all(map(_is_row, entry.values()))


def _is_row(value: object) -> bool:
    return isinstance(value, Mapping) or is_dataclass(value)


def _named(modules: Mapping[str, object]) -> list[Measure]:
    """What the result has a word for."""
    found = []
    for name in _NAMED:
        words = {path: word for path, entry in modules.items() if isinstance(word := _get(entry, name), str) and word}
        if words:
            found.append(Measure(name, name, main=True, words=words, named=True))
    return found


def _numbered(result: object, modules: Mapping[str, object]) -> list[Measure]:
    """What the result has numbers for."""
    rows = {path: dict(_numbers(entry)) for path, entry in modules.items()}
    names = dict.fromkeys(name for row in rows.values() for name in row)
    words = {
        path: ": ".join(str(text) for name in ("status", "problem", "reason") if (text := _get(entry, name)))
        for path, entry in modules.items()
    }
    measures = []
    for name in names:
        kind = _KINDS.get(name, _Kind(name.replace("_", " "), additive=False))
        if name not in _KINDS and (name in _KNOWN_ANYWAY or name.startswith(("self_", "own_"))):
            continue
        measures.append(
            Measure(
                key=name,
                title=kind.title,
                unit=kind.unit,
                additive=kind.additive,
                main=kind.main,
                total={path: row[name] for path, row in rows.items() if name in row},
                own={path: row[kind.own] for path, row in rows.items() if kind.own in row},
                nodes=_by_node(result, name),
                words={path: text for path, text in words.items() if text} if kind.main else {},
            )
        )
    return measures


def spread(measure: Measure, inventory: Inventory) -> list[float | None]:
    """A value for each node, from the values of modules.

    Of a measure that adds up, a node has its own value where the result says it. What is left of a module's own value
    is divided among its other nodes in equal parts, so that the nodes of a module sum up to what the module has. Of
    any other measure, a node has the value of its owner.

    Returns:
        In the order of ``inventory.nodes``; None where nothing is known.
    """
    if not measure.additive:
        return [
            max((measure.total[owner] for owner in node.owners if owner in measure.total), default=None)
            for node in inventory.nodes
        ]
    known = [measure.nodes.get(node.name) if node.name else None for node in inventory.nodes]
    values = list(known)
    for path, module in inventory.modules.items():
        own_value = measure.own.get(path)
        if own_value is None or not module.own_nodes:
            continue
        known_sum = sum((known[k] or 0.0) / max(len(inventory.nodes[k].owners), 1) for k in module.own_nodes)
        open_nodes = [k for k in module.own_nodes if known[k] is None] or list(module.own_nodes)
        left = own_value - known_sum
        if left > 0:
            for k in open_nodes:
                values[k] = (values[k] or 0.0) + left / len(open_nodes)
    return values


def _get(thing: object, name: str) -> Any:
    return thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)


def _numbers(entry: object) -> Iterator[tuple[str, float]]:
    """The numbers of one module; None and words are passed over, but for numbers that JSON has no sign for."""
    if isinstance(entry, Mapping):
        fields: Mapping[str, Any] = entry
    elif hasattr(entry, "to_dict"):
        fields = entry.to_dict()
    elif is_dataclass(entry):
        declared = {name: getattr(entry, name) for name in entry.__dataclass_fields__}
        computed = {name: getattr(entry, name) for name in _KINDS if name not in declared and hasattr(entry, name)}
        fields = {**declared, **computed}
    else:
        fields = {name: getattr(entry, name) for name in dir(entry) if not name.startswith("_")}
    for name, value in fields.items():
        written = isinstance(value, str) and value.lower() in ("nan", "inf", "-inf")
        if written or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield name, float(value)


def _by_node(result: object, name: str) -> dict[str, float]:
    """Values of single nodes: the nodes of a cost, the kernels of a profile."""
    entries, field_name = (_get(result, "kernels"), "ms") if name == "total_ms" else (_get(result, "nodes"), name)
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        return {}
    values: dict[str, float] = {}
    for entry in entries:
        if name in _WORK and _get(entry, "counted") is False:
            continue
        key, value = _get(entry, "name"), _get(entry, field_name)
        if isinstance(key, str) and key and isinstance(value, int | float) and math.isfinite(value):
            values[key] = values.get(key, 0.0) + value
    return values
