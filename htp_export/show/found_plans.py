"""The folder of a search: its front as JSON and as a picture, and a plan for ``quantize`` for each point of it."""

from __future__ import annotations

import json
from pathlib import Path

from htp_export.compress.trade_offs.search_results import Search
from htp_export.errors import FileError
from htp_export.files.filesystem import why_not_writable
from htp_export.files.replacing import Move, work_folder
from htp_export.show.fronts import front_svg

__all__ = ["check_plans", "write_plans"]

_FRONT, _PICTURE, _PLAN = "front.json", "front.svg", "plan"


def check_plans(folder: Path) -> None:
    """Refuse a folder that cannot be written, or that holds other files.

    Raises:
        FileError: If it is such a folder.
    """
    if folder.exists() and not folder.is_dir():
        raise FileError(folder, "is a file; name a folder")
    others = [] if not folder.exists() else sorted(path.name for path in folder.iterdir() if not _is_ours(path.name))
    if others:
        raise FileError(folder, f"holds other files, such as {others[0]}; name an empty or a new folder")
    parent = folder.absolute().parent
    error = why_not_writable(parent)
    if error is not None:
        raise FileError(folder, f"cannot be written in {parent}: {error.strerror or error}")


def write_plans(search: Search, folder: Path) -> None:
    """Write ``front.json``, ``front.svg`` (with two objectives or more) and ``plan0.json``, ``plan1.json``, ...

    The plans are those of ``Search.pareto``, in its order. Files of an earlier search in the folder are replaced.

    Raises:
        FileError: If they cannot be written, or the folder holds other files.
    """
    check_plans(folder)
    texts = {_FRONT: json.dumps(search.to_dict(), indent=2) + "\n"}
    if len(search.objectives) > 1 and search.trials:
        texts[_PICTURE] = front_svg(search)
    for number, trial in enumerate(search.pareto):
        texts[f"{_PLAN}{number}.json"] = json.dumps(dict(trial.plan), indent=2) + "\n"
    try:
        folder.mkdir(exist_ok=True)
        old = [path for path in folder.iterdir() if path.name not in texts and _is_ours(path.name)]
        with work_folder(folder / _FRONT) as work:
            for name, text in texts.items():
                (work.new / name).write_text(text, encoding="utf-8")
            work.commit([Move(work.new / name, folder / name) for name in texts], old)
    except OSError as error:
        raise FileError(folder, f"cannot be written: {error.strerror or error}") from error


def _is_ours(name: str) -> bool:
    number = name.removeprefix(_PLAN).removesuffix(".json")
    return name in (_FRONT, _PICTURE) or (name == f"{_PLAN}{number}.json" and number.isdecimal())
