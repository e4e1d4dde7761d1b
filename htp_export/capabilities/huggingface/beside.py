"""Files beside an exported model: which of those that exist an export of this model may replace."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from htp_export.capabilities.huggingface.companions import EXPORT_JSON, companion_names
from htp_export.capabilities.huggingface.genai import GENAI_CONFIG, VISION_PROCESSOR
from htp_export.errors import FileError
from htp_export.files.filesystem import is_plain_file
from htp_export.files.text_files import read_json

OF_GENAI = frozenset((GENAI_CONFIG, VISION_PROCESSOR))
OF_TRANSFORMERS = frozenset((EXPORT_JSON,))


def replaces_beside(model: Path) -> Callable[[Path], bool]:
    """Return a function that tells whether a file beside a model may be replaced: one of an earlier export of it.

    ``genai_config.json`` and ``export.json`` name the model beside which they were written with the
    other files.
    """
    is_earlier = model.name in (*_named_by_genai(model), *_named_by_transformers(model))
    return lambda file: is_earlier and is_plain_file(file)


def _named_by_genai(model: Path) -> list[Any]:
    try:
        return [_content_beside(model, GENAI_CONFIG)["model"]["decoder"]["filename"]]
    except (KeyError, TypeError):
        return []


def _named_by_transformers(model: Path) -> list[Any]:
    try:
        return [each["file"] for each in _content_beside(model, EXPORT_JSON)["components"].values()]
    except (KeyError, TypeError, AttributeError):
        return []


def _content_beside(model: Path, name: str) -> Any:
    try:
        return read_json(model.with_name(name), plain=True)
    except FileError:  # there is none
        return None


def check_beside(
    file: Path, model: Any, names: Collection[str], companions: Path | None = None
) -> None:
    """Refuse the file of a model of transformers beside which files of others would be replaced.

    ``names`` of the files that will be written besides the configs; ``companions``: the folder of
    those that will be copied.
    """
    configs = {
        "config.json",
        *["generation_config.json"] * (getattr(model, "generation_config", None) is not None),
    }
    written = {*names, *configs}
    replaces = replaces_beside(file)
    for name in sorted(written | companion_names(companions)):
        place = file.with_name(name)
        if not os.path.lexists(place) or replaces(place):
            continue
        is_same = companions is not None and name not in written and is_plain_file(place)
        if not (is_same and filecmp.cmp(place, Path(companions or "", name), shallow=False)):
            raise FileError(
                place,
                f"would be replaced, and is no file of {file.name}; export into another folder",
            )
