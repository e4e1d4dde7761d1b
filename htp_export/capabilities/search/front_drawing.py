"""The plans of a search as a picture: every plan a point, the Pareto front a line."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from htp_export.capabilities.search.fronts import pareto
from htp_export.capabilities.search.search_results import LARGER_IS_BETTER, Search, Trial, trial_columns
from htp_export.errors import InputError

__all__ = ["front_svg"]

_WIDTH, _HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 40, 40, 60
_COLOURS = {"front": "#1f77b4", "uniform": "#d62728", "sampler": "#999999"}
_STYLE = "font-family:sans-serif;font-size:12px"


def front_svg(search: Search) -> str:
    """A search with several objectives as an SVG file: the first objective over the second.

    The line is the front in these two; points of the front in all objectives are larger. Each point shows its values
    and how many modules become what when the pointer is on it. Errors of more than two orders of magnitude have a
    logarithmic axis; an error of 0 is drawn at its lower end. Plans with values that are not finite are left out.
    ``data-trial`` of a point is its place among the trials.

    Args:
        search: The search.

    Raises:
        InputError: If it has one objective, or no plan was measured.

    Examples:
        >>> trial = Trial(0, {"fc": "int8"}, {"error": 0.01, "size": 100.0}, "front", {})
        >>> drawn = front_svg(Search(("error", "size"), (trial,), 0, {"fc": ("int8",)}))
        >>> drawn.count("<title>trial"), "100 B" in drawn
        (1, True)
    """
    if len(search.objectives) < 2:
        raise InputError("a front has two objectives; the search has one")
    upward, across = search.objectives[0], search.objectives[1]
    drawn = {
        place: trial
        for place, trial in enumerate(search.trials)
        if math.isfinite(trial.values[upward]) and math.isfinite(trial.values[across])
    }
    if not drawn:
        raise InputError("there is nothing to draw: no plan was measured")
    x = _Axis.of([trial.values[across] for trial in drawn.values()], _LEFT, _WIDTH - _RIGHT)
    y = _Axis.of([trial.values[upward] for trial in drawn.values()], _HEIGHT - _BOTTOM, _TOP)
    texts = {column.name: column.text or str for column in trial_columns(search.objectives)}
    best = search.pareto
    line = " ".join(
        f"{x.place(right):.1f},{y.place(high):.1f}" for right, high in _line(list(drawn.values()), across, upward)
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" style="{_STYLE}">',
        f"<title>{html.escape(search.summary)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        *(_grid_x(x, texts[across])),
        *(_grid_y(y, texts[upward])),
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">{across}</text>',
        f'<text x="16" y="{_TOP - 16}">{upward}</text>',
        f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>',
        *(_point(place, trial, search, x, y, texts, trial in best) for place, trial in drawn.items()),
        *_legend(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _line(trials: Sequence[Trial], across: str, upward: str) -> list[tuple[float, float]]:
    """The front in the two objectives that are drawn; with a third one, the whole front has further points."""
    points = [(trial.values[across], trial.values[upward]) for trial in trials]
    signs = [-1 if name in LARGER_IS_BETTER else 1 for name in (across, upward)]
    return sorted(points[place] for place in pareto([(one * signs[0], other * signs[1]) for one, other in points]))


@dataclass(frozen=True)
class _Axis:
    """An axis from the smallest to the largest value, between two places of the picture."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool

    @classmethod
    def of(cls, values: Sequence[float], start: float, end: float) -> _Axis:
        positive = [value for value in values if value > 0]
        if positive and max(positive) > 100 * min(positive):
            return cls(min(positive) / 2, max(positive) * 1.5, start, end, True)
        low, high = min(values), max(values)
        margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
        return cls(max(low - margin, 0.0) if low >= 0 else low - margin, high + margin, start, end, False)

    def place(self, value: float) -> float:
        share = (
            math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
            if self.logarithmic
            else (value - self.low) / (self.high - self.low)
        )
        return self.start + share * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        if self.logarithmic:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            step = max(1, (last - first) // 6)
            return [10.0**power for power in range(first, last + 1, step)]
        return [self.low + (self.high - self.low) * share / 5 for share in range(6)]


def _grid_x(axis: _Axis, text: Callable[[float], str]) -> list[str]:
    bottom = _HEIGHT - _BOTTOM
    return [
        f'<line x1="{axis.place(tick):.1f}" y1="{_TOP}" x2="{axis.place(tick):.1f}" y2="{bottom}" stroke="#e5e5e5"/>'
        f'<text x="{axis.place(tick):.1f}" y="{bottom + 18}" text-anchor="middle">{html.escape(text(tick))}</text>'
        for tick in axis.ticks
    ]


def _grid_y(axis: _Axis, text: Callable[[float], str]) -> list[str]:
    right = _WIDTH - _RIGHT
    return [
        f'<line x1="{_LEFT}" y1="{axis.place(tick):.1f}" x2="{right}" y2="{axis.place(tick):.1f}" stroke="#e5e5e5"/>'
        f'<text x="{_LEFT - 8}" y="{axis.place(tick) + 4:.1f}" text-anchor="end">{html.escape(text(tick))}</text>'
        for tick in axis.ticks
    ]


def _point(
    number: int,
    trial: Trial,
    search: Search,
    x: _Axis,
    y: _Axis,
    texts: dict[str, Callable[[float], str]],
    on_front: bool,
) -> str:
    upward, across = search.objectives[0], search.objectives[1]
    values = ", ".join(f"{name} {texts[name](trial.values[name])}" for name in search.objectives)
    title = html.escape(f"{trial.name}: {values}; {trial.counted}")
    place = f'cx="{x.place(trial.values[across]):.1f}" cy="{y.place(trial.values[upward]):.1f}"'
    opacity = 1 if on_front else 0.5
    radius = 5 if on_front else 3.5
    colour = _COLOURS[trial.origin]
    looks = f'r="{radius}" fill="{colour}" opacity="{opacity}"'
    return f'<circle data-trial="{number}" {place} {looks}><title>{title}</title></circle>'


def _legend() -> list[str]:
    words = {"front": "front of the sums", "uniform": "one choice", "sampler": "sampler"}
    return [
        f'<circle cx="{_LEFT + 130 + 150 * k}" cy="{_TOP - 20}" r="4" fill="{_COLOURS[name]}"/>'
        f'<text x="{_LEFT + 140 + 150 * k}" y="{_TOP - 16}">{word}</text>'
        for k, (name, word) in enumerate(words.items())
    ]
