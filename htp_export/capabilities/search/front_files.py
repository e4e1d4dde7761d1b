"""The folder of a search: its front, a picture, and a plan or a pipeline for each point."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from htp_export.capabilities.search.architecture_results import Candidate, are_architectures
from htp_export.capabilities.search.fronts import pareto
from htp_export.capabilities.search.search_results import (
    LARGER_IS_BETTER,
    OF_DECODERS,
    Front,
    Search,
    Trial,
    search_from,
    value_column,
)
from htp_export.errors import FileError, InputError
from htp_export.files.filesystem import is_plain_file
from htp_export.files.folders import check_folder
from htp_export.files.text_files import named_if_unwritable, read_json
from htp_export.files.write_file import Move, work_folder

_FRONT, _PICTURE, _PLAN, _STEPS, _PROMPTS = "front.json", "front.svg", "plan", "steps", "prompts"
_CHOICE = "choice"

_WIDTH, _HEIGHT = 720, 440
"""The size of the picture in pixels, which fits into the column of a page of text."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 40, 40, 60
"""Its margins, for the numbers and titles of the axes, and the legend."""

_DECADES_DRAWN = 6
"""Numbers along a logarithmic axis: more would overlap."""
_COLOURS = {"front": "#1f77b4", "uniform": "#d62728", "sampler": "#999999"}
_STYLE = "font-family:sans-serif;font-size:12px"


def check_plans(folder: Path) -> None:
    """Raise an error for a folder that cannot be written, contains other files, or has the name of a model."""
    if folder.suffix == ".onnx":
        problem = "is the name of a model, and a search writes a folder of plans; name a folder"
        raise FileError(folder, f"{problem}, and quantize writes the model of a plan")
    check_folder(folder, "a search", _files_of_earlier(folder).__contains__)


def plan_file(number: int, trial: Trial | Candidate) -> str:
    """The file of a point: ``plan0.json`` for ``quantize``, ``steps0.json`` for ``pipeline``.

    ``choice0.json`` has the choices of a candidate.
    """
    if isinstance(trial, Candidate):
        return f"{_CHOICE}{number}.json"
    return f"{_STEPS if trial.prune else _PLAN}{number}.json"


def write_plans(
    search: Front[Any], folder: Path, inputs: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Write ``front.json``, ``front.svg`` (for several objectives) and a file for each point.

    Files of an earlier search in the folder are replaced.

    Args:
        search: The search.
        folder: The folder. `plan_file` names the files of points, in the order of
            ``Search.pareto``.
        inputs: The options ``data``, ``dims``, ``shapes`` and ``seed`` with which the step
            ``quantize`` of a pipeline calibrates. Random prompts are written, and replace ``data``.
    """
    check_plans(folder)
    earlier = _files_of_earlier(folder)
    random_prompts = search.prompts if isinstance(search, Search) else ()
    prompts: dict[str, Mapping[str, Any]] = {
        f"{_PROMPTS}{number}.npz": run for number, run in enumerate(random_prompts)
    }
    if prompts:
        inputs = {**inputs, "data": [str(folder / name) for name in prompts]}
    texts = {_FRONT: _as_json(search.to_dict())}
    if len(search.objectives) > 1 and search.trials:
        texts[_PICTURE] = front_svg(search)
    for number, trial in enumerate(search.pareto):
        texts[plan_file(number, trial)] = _as_json(_content(trial, inputs))
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


def _content(trial: Trial | Candidate, inputs: Mapping[str, Any]) -> object:
    """The content of the file of a point."""
    if isinstance(trial, Candidate):
        return dict(trial.choice)
    return _steps_with(inputs, trial) if trial.prune else dict(trial.plan)


def _as_json(content: object) -> str:
    return json.dumps(content, indent=2) + "\n"


def _steps_with(inputs: Mapping[str, Any], trial: Trial) -> list[dict[str, Any]]:
    """The steps of a pipeline, with the inputs that calibrate as options of ``quantize``."""
    given = {key: value for key, value in inputs.items() if value}
    steps: list[dict[str, Any]] = []
    for step in trial.steps:
        if "quantize" in step:
            step = {**step, "quantize": {**step["quantize"], **given}}
        steps.append(step)
    return steps


def _files_of_earlier(folder: Path) -> set[str]:
    """The files that an earlier search wrote into a folder, according to ``front.json``.

    Files that were changed since are not among them.
    """
    try:
        front = read_json(folder / _FRONT, plain=True)
        is_search = are_architectures(front) or search_from(front) is not None
    except InputError:  # there is none, or it is another file
        return set()
    if not is_search:
        return set()
    known = {_FRONT, _PICTURE}
    present = {path.name for path in folder.iterdir() if is_plain_file(path)}
    if not {*front["objectives"]}.isdisjoint(OF_DECODERS):
        known |= {name for name in present if re.fullmatch(rf"{_PROMPTS}\d+\.npz", name)}
    for number, point in enumerate(front["pareto"]):
        for name in (f"{file}{number}.json" for file in (_PLAN, _STEPS, _CHOICE)):
            if name in present and _has_plans_of(folder / name, point):
                known.add(name)
    return known & present


def _has_plans_of(file: Path, point: Any) -> bool:
    """Whether a file contains the plans of a point of a front."""
    try:
        content = read_json(file, plain=True)
        if isinstance(content, dict):
            return bool(content == point.get("choice", point.get("plan")))
        plans: dict[str, Any] = {}
        for step in content:
            for name, options in step.items():
                plans[name] = options["plan"]
        has_plan = plans.get("quantize", point["plan"]) == point["plan"]
        return bool(has_plan and plans.get("prune") == point["prune"])
    except (InputError, TypeError, KeyError, AttributeError):
        return False


def front_svg(search: Front[Any]) -> str:
    """A search with several objectives as SVG: the first objective over the second.

    The line is the front in these two; points of the front in all objectives are larger. The tooltip
    of a point shows its values, and the number of modules of each choice. Values of more than two
    orders of magnitude have a logarithmic axis, with 0 at its lower end. Plans with values that are
    not finite are left out. The attribute ``data-trial`` of a point is its place among the trials.

    Raises:
        InputError: The search has one objective, or no measured plan.

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
        if math.isfinite(trial.values[upward] + trial.values[across])
    }
    if not drawn:
        raise InputError("there is nothing to draw: no plan was measured")
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    points = [(trial.values[across], trial.values[upward]) for trial in drawn.values()]
    x = _Axis.of([far for far, _ in points], _LEFT, right)
    y = _Axis.of([high for _, high in points], bottom, _TOP)
    columns = map(value_column, search.objectives)
    texts = {column.name: column.text or str for column in columns}
    line = " ".join(
        f"{x.place(far):.1f},{y.place(high):.1f}" for far, high in _front_of(points, across, upward)
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" style="{_STYLE}">',
        f"<title>{html.escape(search.summary)}</title>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for tick, at in x.ticks:
        text = texts[across](tick)
        parts.append(_tick((at, _TOP, at, bottom), text, at, bottom + 18, "middle"))
    for tick, at in y.ticks:
        text = texts[upward](tick)
        parts.append(_tick((_LEFT, at, right, at), text, _LEFT - 8, at + 4, "end"))
    parts += [
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 12}" text-anchor="middle">{across}</text>',
        f'<text x="16" y="{_TOP - 16}">{upward}</text>',
        f'<polyline points="{line}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>',
    ]
    front = search.front_places
    for place, trial in drawn.items():
        center = x.place(trial.values[across]), y.place(trial.values[upward])
        values = ", ".join(
            f"{name} {texts[name](trial.values[name])}" for name in search.objectives
        )
        parts.append(_point(place, trial, center, values, on_front=place in front))
    parts += [*_legend(), "</svg>"]
    return "\n".join(parts) + "\n"


def _front_of(
    points: Sequence[tuple[float, float]], across: str, upward: str
) -> list[tuple[float, float]]:
    """The points of the front in two objectives, from left to right.

    With a third objective, the front of the search has further points.
    """
    sign_x = -1 if across in LARGER_IS_BETTER else 1
    sign_y = -1 if upward in LARGER_IS_BETTER else 1
    places = pareto([(far * sign_x, high * sign_y) for far, high in points])
    return sorted(points[place] for place in places)


@dataclass(frozen=True)
class _Axis:
    """An axis of the picture.

    Attributes:
        low: The smallest value.
        high: The largest value.
        start: The coordinate of the smallest value, in pixels.
        end: The coordinate of the largest value.
        logarithmic: Whether distances are proportional to logarithms.
    """

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool

    @classmethod
    def of(cls, values: Sequence[float], start: float, end: float) -> _Axis:
        positive = [value for value in values if value > 0]
        if positive and max(positive) > 100 * min(positive):
            # room for the points at both ends
            return cls(min(positive) / 2, max(positive) * 1.5, start, end, True)
        low, high = min(values), max(values)
        margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
        # an axis of sizes, times or shares does not begin below 0
        least = max(low - margin, 0.0) if low >= 0 else low - margin
        return cls(least, high + margin, start, end, False)

    def place(self, value: float) -> float:
        """The coordinate of a value, in pixels."""
        if self.logarithmic:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    @property
    def ticks(self) -> list[tuple[float, float]]:
        """Numbers along the axis, and their coordinates."""
        if self.logarithmic:
            first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
            step = max(1, (last - first) // _DECADES_DRAWN)
            numbers = [10.0**power for power in range(first, last + 1, step)]
        else:
            numbers = [self.low + (self.high - self.low) * share / 5 for share in range(6)]
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
    number: int, trial: Trial | Candidate, at: tuple[float, float], values: str, *, on_front: bool
) -> str:
    """A trial as a circle, with a tooltip."""
    title = html.escape(f"{trial.name}: {values}; {trial.counted}")
    place = f'cx="{at[0]:.1f}" cy="{at[1]:.1f}"'
    radius, opacity = (5, 1) if on_front else (3.5, 0.5)
    looks = f'r="{radius}" fill="{_COLOURS[trial.origin]}" opacity="{opacity}"'
    return f'<circle data-trial="{number}" {place} {looks}><title>{title}</title></circle>'


def _legend() -> list[str]:
    words = {"front": "front of the sums", "uniform": "one choice", "sampler": "sampler"}
    return [
        f'<circle cx="{_LEFT + 130 + 150 * k}" cy="{_TOP - 20}" r="4" fill="{_COLOURS[name]}"/>'
        f'<text x="{_LEFT + 140 + 150 * k}" y="{_TOP - 16}">{word}</text>'
        for k, (name, word) in enumerate(words.items())
    ]
