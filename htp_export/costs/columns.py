"""The columns of ``tree`` and of ``cost``."""

from __future__ import annotations

from typing import Any

from htp_export.reporting.columns import CLASS_NAME, Column, chosen, names_of, si


def _error(value: float) -> str:
    return f"{value:.1e}" if value else "0"


TREE_COLUMNS: tuple[Column[Any], ...] = (
    CLASS_NAME,
    Column("calls", "calls"),
    Column("fate", "fate", style="yellow", right=False, keep=5),
    Column("nodes", "nodes", keep=4),
    Column("own_nodes", "own nodes"),
    Column("parameters", "parameters", keep=6),
    Column("trainable", "trainable"),
    Column("flops", "FLOPs", unit="FLOP", keep=7),
    Column("time_ms", "time", unit="ms", keep=8),
    Column("own_time_ms", "own time", unit="ms", keep=2),
    Column("error", "error", text=_error, keep=8),
    Column("status", "status", style="red", right=False, keep=3),
)
"""The columns of a module tree."""

_COUNTS: tuple[Column[Any], ...] = (
    CLASS_NAME,
    Column("calls", "calls"),
    Column("fate", "fate", right=False),
    Column("nodes", "nodes", keep=3),
    Column("parameters", "parameters", keep=8),
    Column("weight_bytes", "weights", unit="B", keep=4),
    Column("weight_bits", "weight bits", text=si, keep=3),
    Column("shared_weight_bytes", "shared weights", unit="B"),
    Column("macs", "multiply-adds", unit="FLOP"),
    Column("flops", "FLOPs", unit="FLOP", keep=9),
    Column("other_flops", "other", unit="FLOP", keep=6),
    Column("activation_bytes", "activations", unit="B", keep=2),
    Column("moved_bits", "moved bits", text=si, keep=3),
    Column("peak_bytes", "peak", unit="B", keep=7),
    Column("intensity", "ops/byte", text="{:.2f}".format, keep=5),
)
_FUSING: tuple[Column[Any], ...] = (
    Column("traffic_bytes", "traffic", unit="B", keep=7),
    Column("fused_traffic_bytes", "fused traffic", unit="B", keep=8),
    Column("saved_traffic_bytes", "saved", unit="B", keep=9),
    Column("fused_peak_bytes", "model's peak, fused", unit="B", keep=9),
)
_MOVED: tuple[Column[Any], ...] = (
    Column("read_bytes", "read", unit="B"),
    Column("written_bytes", "written", unit="B"),
)
SUMMED = (
    "macs",
    "flops",
    "other_flops",
    "activation_bytes",
    "moved_bits",
    "traffic_bytes",
    "read_bytes",
    "written_bytes",
)
"""The costs of a module that are sums over its nodes."""

_OWN = ("nodes", "parameters", "weight_bytes", *SUMMED)
_SELF: tuple[Column[Any], ...] = tuple(
    Column(f"self_{column.name}", f"self {column.title}", unit=column.unit, text=column.text)
    for column in chosen((*_COUNTS, *_FUSING, *_MOVED), _OWN)
)
UNCOUNTED: Column[Any] = Column(
    "uncounted",
    "not counted",
    lambda m: ", ".join(m.uncounted) or None,
    style="yellow",
    right=False,
    keep=9,
)
COST_COLUMNS = (*_COUNTS, UNCOUNTED, *_SELF, *_FUSING, *_MOVED)
"""The columns of the costs of a module."""

FUSED = ("class_name", "nodes", *names_of(_FUSING))
"""The columns about the effect of fusing."""
