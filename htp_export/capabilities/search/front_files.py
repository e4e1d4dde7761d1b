"""What a search leaves: a folder with its front, a picture of it, and for each point a file that makes the model."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from htp_export.capabilities.search.fronts import pareto
from htp_export.capabilities.search.search_results import (
    LARGER_IS_BETTER,
    OF_DECODERS,
    Search,
    Trial,
    search_from,
    trial_columns,
)
from htp_export.errors import InputError
from htp_export.files.filesystem import is_plain_file
from htp_export.files.folders import check_folder
from htp_export.files.text_files import named_if_unwritable, read_json
from htp_export.files.write_file import Move, work_folder

_FRONT, _PICTURE, _PLAN, _STEPS, _PROMPTS = "front.json", "front.svg", "plan", "steps", "prompts"

_WIDTH, _HEIGHT = 720, 440  # of the picture, in pixels
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 40, 40, 60  # margins, for the numbers and words of the axes
_COLOURS = {"front": "#1f77b4", "uniform": "#d62728", "sampler": "#999999"}
_STYLE = "font-family:sans-serif;font-size:12px"


def check_plans(folder: Path) -> None:
    """Refuse a folder that cannot be written, or that holds other files than those of an earlier search."""
    check_folder(folder, "a search", _files_of_earlier(folder).__contains__)


def plan_file(number: int, trial: Trial) -> str:
    """The file of a point of a front: ``plan0.json`` for ``quantize``, or ``steps0.json`` for ``pipeline``."""
    return f"{_STEPS if trial.prune else _PLAN}{number}.json"


def write_plans(
    search: Search, folder: Path, inputs: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Write ``front.json``, ``front.svg`` (with two objectives or more) and a file for each point of the front.

    The files are those of `plan_file`, in the order of ``Search.pareto``. Files of an earlier
    search in the folder are replaced. ``inputs``: the options ``data``, ``dims``, ``shapes`` and
    ``seed``, with which a pipeline calibrates; random prompts are written, too.
    """
    check_plans(folder)
    earlier = _files_of_earlier(folder)
    prompts: dict[str, Mapping[str, Any]] = {
        f"{_PROMPTS}{number}.npz": run for number, run in enumerate(search.prompts)
    }
    if prompts:
        inputs = {**inputs, "data": [str(folder / name) for name in prompts]}
    given = {key: value for key, value in inputs.items() if value}
    texts = {_FRONT: json.dumps(search.to_dict(), indent=2) + "\n"}
    if len(search.objectives) > 1 and search.trials:
        texts[_PICTURE] = front_svg(search)
    for number, trial in enumerate(search.pareto):
        steps = [  # in which quantizing has inputs
            {
                name: {**options, **given} if name == "quantize" else options
                for name, options in step.items()
            }
            for step in trial.steps
        ]
        texts[plan_file(number, trial)] = (
            json.dumps(steps if trial.prune else dict(trial.plan), indent=2) + "\n"
        )
    with named_if_unwritable(folder):
        folder.mkdir(parents=True, exist_ok=True)
        names = [*texts, *prompts]
        old = [folder / name for name in earlier if name not in names]
        with work_folder(folder / _FRONT) as work:
            for name, text in texts.items():
                (work.new / name).write_text(text, encoding="utf-8", newline="\n")
            for name, run in prompts.items():
                np.savez(work.new / name, **run)
            moves = [
                Move(work.new / name, folder / name, may_replace=lambda path: path.name in earlier)
                for name in names
            ]
            work.commit(moves, lambda: old)


def _files_of_earlier(folder: Path) -> set[str]:
    """The names of the files that an earlier search has written into a folder, as its ``front.json`` tells them.

    A plan or steps that were changed since are not among them.
    """
    try:
        front = read_json(folder / _FRONT, plain=True)
        search = search_from(front)
    except InputError:  # there is none, or it is another file
        return set()
    if search is None:
        return set()
    known = {_FRONT, _PICTURE}
    there = {path.name for path in folder.iterdir() if is_plain_file(path)}
    if not {*search.objectives}.isdisjoint(OF_DECODERS):
        known |= {name for name in there if re.fullmatch(rf"{_PROMPTS}\d+\.npz", name)}
    for number, point in enumerate(front["pareto"]):
        names = {f"{kind}{number}.json" for kind in (_PLAN, _STEPS)} & there
        known |= {name for name in names if _makes(folder / name, point)}
    return known & there


def _makes(file: Path, point: Any) -> bool:
    """Whether a file has the plans of a point of a front."""
    try:
        content = read_json(file, plain=True)
        if isinstance(content, dict):
            return bool(content == point["plan"])
        plans = {name: options["plan"] for step in content for name, options in step.items()}
        return bool(
            plans.get("prune") == point["prune"]
            and plans.get("quantize", point["plan"]) == point["plan"]
        )
    except (InputError, TypeError, KeyError, AttributeError):
        return False


def front_svg(search: Search) -> str:
    """A search with several objectives as an SVG file: the first objective over the second.

    The line is the front in these two; points of the front in all objectives are larger. Each point
    shows its values and how many modules become what when the pointer is on it. Errors of more than
    two orders of magnitude have a logarithmic axis; an error of 0 is drawn at its lower end. Plans
    with values that are not finite are left out. ``data-trial`` of a point is its place among the
    trials. With one objective, or no measured plan, there is none.

    Examples:
        >>> trial = Trial(0, {"fc": "int8"}, {"error": 0.01, "size": 100.0}, "front", {})
        >>> drawn = front_svg(Search(("error", "size"), (trial,), 0, {"fc": ("int8",)}))
        >>> drawn.count("<title>trial"), "100 B" in drawn
        (1, True)
    """
    if len(search.objectives) < 2:
        raise InputError("a front has two objectives; the search has one")
    upward, across = search.objectives[0], search.objectives[1]
    trials = enumerate(search.trials)
    drawn = {
        place: each
        for place, each in trials
        if math.isfinite(each.values[upward] + each.values[across])
    }
    if not drawn:
        raise InputError("there is nothing to draw: no plan was measured")
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    x = _Axis.of([trial.values[across] for trial in drawn.values()], _LEFT, right)
    y = _Axis.of([trial.values[upward] for trial in drawn.values()], bottom, _TOP)
    texts = {column.name: column.text or str for column in trial_columns(search.objectives)}
    points = [(trial.values[across], trial.values[upward]) for trial in drawn.values()]
    signs = [-1 if name in LARGER_IS_BETTER else 1 for name in (across, upward)]
    # Of the two objectives that are drawn; with a third one, the whole front has further points.
    front = sorted(
        points[place]
        for place in pareto([(one * signs[0], other * signs[1]) for one, other in points])
    )
    line = " ".join(f"{x.place(far):.1f},{y.place(high):.1f}" for far, high in front)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" style="{_STYLE}">',
        f"<title>{html.escape(search.summary)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        *(
            _tick((at, _TOP, at, bottom), texts[across](tick), at, bottom + 18, "middle")
            for tick, at in x.ticks
        ),
        *(
            _tick((_LEFT, at, right, at), texts[upward](tick), _LEFT - 8, at + 4, "end")
            for tick, at in y.ticks
        ),
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">{across}</text>',
        f'<text x="16" y="{_TOP - 16}">{upward}</text>',
        f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>',
        *(_point(place, trial, search, x, y, texts) for place, trial in drawn.items()),
        *_legend(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


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
        return cls(
            max(low - margin, 0.0) if low >= 0 else low - margin, high + margin, start, end, False
        )

    def place(self, value: float) -> float:
        share = (
            math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
            if self.logarithmic
            else (value - self.low) / (self.high - self.low)
        )
        return self.start + share * (self.end - self.start)

    @property
    def ticks(self) -> list[tuple[float, float]]:
        """Numbers along the axis, and their places."""
        numbers = [self.low + (self.high - self.low) * share / 5 for share in range(6)]
        if self.logarithmic:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            numbers = [10.0**power for power in range(first, last + 1, max(1, (last - first) // 6))]
        return [(number, self.place(number)) for number in numbers]


def _tick(
    line: tuple[float, float, float, float], text: str, x: float, y: float, anchor: str
) -> str:
    """A line of the grid, and the number beside it."""
    x1, y1, x2, y2 = line
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#e5e5e5"/>'
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
    )


def _point(
    number: int,
    trial: Trial,
    search: Search,
    x: _Axis,
    y: _Axis,
    texts: dict[str, Callable[[float], str]],
) -> str:
    upward, across = search.objectives[0], search.objectives[1]
    values = ", ".join(f"{name} {texts[name](trial.values[name])}" for name in search.objectives)
    title = html.escape(f"{trial.name}: {values}; {trial.counted}")
    place = f'cx="{x.place(trial.values[across]):.1f}" cy="{y.place(trial.values[upward]):.1f}"'
    radius, opacity = (5, 1) if trial in search.pareto else (3.5, 0.5)
    looks = f'r="{radius}" fill="{_COLOURS[trial.origin]}" opacity="{opacity}"'
    return f'<circle data-trial="{number}" {place} {looks}><title>{title}</title></circle>'


def _legend() -> list[str]:
    words = {"front": "front of the sums", "uniform": "one choice", "sampler": "sampler"}
    return [
        f'<circle cx="{_LEFT + 130 + 150 * k}" cy="{_TOP - 20}" r="4" fill="{_COLOURS[name]}"/>'
        f'<text x="{_LEFT + 140 + 150 * k}" y="{_TOP - 16}">{word}</text>'
        for k, (name, word) in enumerate(words.items())
    ]
