"""The folder of a search: its front as JSON and as a picture, and for each point of it a file that makes the model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from htp_export.capabilities.search.front_drawing import front_svg
from htp_export.capabilities.search.search_results import Search, Trial
from htp_export.errors import FileError
from htp_export.files.replacing import Move, work_folder
from htp_export.files.targets import check_folder

__all__ = ["check_plans", "plan_file", "write_plans"]

_FRONT, _PICTURE, _PLAN, _STEPS = "front.json", "front.svg", "plan", "steps"


def check_plans(folder: Path) -> None:
    """Refuse a folder that cannot be written, or that holds other files."""
    check_folder(folder, "a search", _is_ours)


def plan_file(number: int, trial: Trial) -> str:
    """The file of a point of a front: ``plan0.json`` for ``quantize``, or ``steps0.json`` for ``pipeline``."""
    return f"{_STEPS if trial.prune else _PLAN}{number}.json"


def write_plans(search: Search, folder: Path, data: Sequence[Path] = ()) -> None:
    """Write ``front.json``, ``front.svg`` (with two objectives or more) and a file for each point of the front.

    The files are those of `plan_file`, in the order of ``Search.pareto``. Files of an earlier search in the folder are
    replaced. ``data``: ``.npz`` files with which the steps of a pipeline calibrate.
    """
    check_plans(folder)
    texts = {_FRONT: json.dumps(search.to_dict(), indent=2) + "\n"}
    if len(search.objectives) > 1 and search.trials:
        texts[_PICTURE] = front_svg(search)
    for number, trial in enumerate(search.pareto):
        content = _with_data(trial.steps, data) if trial.prune else dict(trial.plan)
        texts[plan_file(number, trial)] = json.dumps(content, indent=2) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        old = [path for path in folder.iterdir() if path.name not in texts and _is_ours(path.name)]
        with work_folder(folder / _FRONT) as work:
            for name, text in texts.items():
                (work.new / name).write_text(text, encoding="utf-8")
            work.commit([Move(work.new / name, folder / name) for name in texts], lambda: old)
    except OSError as error:
        raise FileError(folder, f"cannot be written: {error.strerror or error}") from error


def _with_data(steps: list[dict[str, Any]], data: Sequence[Path]) -> list[dict[str, Any]]:
    """The steps, in which quantizing has data."""
    for step in steps:
        if data and "quantize" in step:
            step["quantize"]["data"] = [str(file) for file in data]
    return steps


def _is_ours(name: str) -> bool:
    return name in (_FRONT, _PICTURE) or re.fullmatch(rf"({_PLAN}|{_STEPS})\d+\.json", name) is not None
