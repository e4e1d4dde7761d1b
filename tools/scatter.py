"""Node counts against latency, as a plain SVG: one panel beside the other, a dot for each file that a tool wrote."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_SIDE, _LEFT, _TOP, _GAP = 300, 60, 60, 50
_COLORS = (
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#ff7f0e",
    "#9467bd",
    "#8c564b",
    "#e377c2",
    "#7f7f7f",
    "#17becf",
)


@dataclass(frozen=True)
class Dot:
    """One file beside the one that it was made of.

    Attributes:
        label: What it is, shown where the pointer rests.
        group: Whose it is; dots of a group have one colour.
        x: Its nodes, as a part of the nodes before.
        y: Its latency in the same way: the median of pairs.
        spread: Between which values eight of ten pairs lie.
    """

    label: str
    group: str
    x: float
    y: float
    spread: tuple[float, float]


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Pearson's r; not a number where one of them does not vary.

    Example:
        >>> round(correlation([1, 2, 3], [2, 4, 6]), 3), round(correlation([1, 2, 3], [3, 1, 3]), 3)
        (1.0, 0.0)
    """
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    both = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    apart = math.sqrt(sum((x - mean_x) ** 2 for x in xs) * sum((y - mean_y) ** 2 for y in ys))
    return both / apart if apart else math.nan


def scatter(
    panels: Mapping[str, Sequence[Dot]], bands: Mapping[str, tuple[float, float]], note: str
) -> str:
    """Draw panels.

    Args:
        panels: Title → dots.
        bands: Title → between which latencies files lie that are the same; a grey band.
        note: A line below.
    """
    dots = [dot for found in panels.values() for dot in found]
    groups = list(dict.fromkeys(dot.group for dot in dots))
    colors = {group: _COLORS[place % len(_COLORS)] for place, group in enumerate(groups)}
    ends = [value for dot in dots for value in dot.spread] + [
        value for band in bands.values() for value in band
    ]
    low, high = math.floor(min(*ends, 1.0) * 10) / 10, math.ceil(max(*ends, 1.0) * 10) / 10
    width, height = (
        _LEFT + len(panels) * (_SIDE + _GAP),
        _TOP + _SIDE + 70 + 16 * math.ceil(len(groups) / 3),
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    for place, (title, found) in enumerate(panels.items()):
        parts += _panel(
            title, found, bands[title], _LEFT + place * (_SIDE + _GAP), (low, high), colors
        )
    for place, group in enumerate(groups):
        x, y = _LEFT + place % 3 * 210, _TOP + _SIDE + 50 + 16 * (place // 3)
        parts.append(f'<circle cx="{x}" cy="{y - 4}" r="4" fill="{colors[group]}"/>')
        parts.append(f'<text x="{x + 8}" y="{y}">{escape(group)}</text>')
    parts.append(f'<text x="{_LEFT}" y="{height - 8}" fill="#555">{escape(note)}</text></svg>')
    return "\n".join(parts) + "\n"


def _panel(
    title: str,
    dots: Sequence[Dot],
    band: tuple[float, float],
    left: int,
    ends: tuple[float, float],
    colors: Mapping[str, str],
) -> list[str]:
    def across(x: float) -> float:
        return round(left + x * _SIDE / 1.1, 1)

    def down(y: float) -> float:
        return round(_TOP + (ends[1] - y) / (ends[1] - ends[0]) * _SIDE, 1)

    r = correlation([dot.x for dot in dots], [dot.y for dot in dots])
    parts = [
        f'<text x="{left}" y="{_TOP - 28}" font-size="13">{escape(title)}</text>',
        f'<text x="{left}" y="{_TOP - 12}" fill="#555">r = {r:.2f} over {len(dots)} files</text>',
        f'<rect x="{left}" y="{down(band[1])}" width="{_SIDE}" height="{round(down(band[0]) - down(band[1]), 1)}" '
        f'fill="#ddd"><title>the same file twice: {band[0]:.2f} to {band[1]:.2f}</title></rect>',
        f'<rect x="{left}" y="{_TOP}" width="{_SIDE}" height="{_SIDE}" fill="none" stroke="#555"/>',
        f'<text x="{left + _SIDE / 2}" y="{_TOP + _SIDE + 30}" text-anchor="middle">nodes, of those before</text>',
    ]
    ticks, under = (0.25, 0.5, 0.75, 1.0), _TOP + _SIDE + 15
    parts += (f'<text x="{across(x)}" y="{under}" text-anchor="middle">{x:g}</text>' for x in ticks)
    sides = (ends[0], 1.0, ends[1])
    parts += (
        f'<text x="{left - 4}" y="{down(y) + 4}" text-anchor="end">{y:.1f}</text>' for y in sides
    )
    for dot in dots:
        x, color = across(dot.x), colors[dot.group]
        parts.append(
            f'<path d="M{x} {down(dot.spread[0])}V{down(dot.spread[1])}" stroke="{color}" opacity="0.35"/>'
            f'<circle cx="{x}" cy="{down(dot.y)}" r="3.5" fill="{color}" opacity="0.8">'
            f"<title>{escape(dot.label)}: nodes × {dot.x:.2f}, latency × {dot.y:.2f}</title></circle>"  # noqa: RUF001 - "times"
        )
    return parts
