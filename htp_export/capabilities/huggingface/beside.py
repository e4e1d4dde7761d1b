"""Files beside an exported model: decide which existing files an export of this model may replace."""

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
    """Return a predicate: whether a file beside a model may be replaced, because an earlier export wrote it.

    ``genai_config.json`` and ``export.json`` name the model that they and the other files were
    written for.
    """
    is_earlier = model.name in (*_named_by_genai(model), *_named_by_transformers(model))
    return lambda file: is_earlier and is_plain_file(file)


def _named_by_genai(model: Path) -> list[Any]:
    """The name of the decoder in ``genai_config.json``."""
    try:
        return [_content_beside(model, GENAI_CONFIG)["model"]["decoder"]["filename"]]
    except (KeyError, TypeError):
        return []


def _named_by_transformers(model: Path) -> list[Any]:
    """The names of the models in ``export.json``."""
    try:
        components = _content_beside(model, EXPORT_JSON)["components"]
        return [component["file"] for component in components.values()]
    except (KeyError, TypeError, AttributeError):
        return []


def _content_beside(model: Path, name: str) -> Any:
    """The content of a JSON file beside a model; None without a readable one."""
    try:
        return read_json(model.with_name(name), plain=True)
    except FileError:  # there is none
        return None


def check_beside(
    file: Path, model: Any, names: Collection[str], companions: Path | None = None
) -> None:
    """Refuse the file of a model if its other files would replace files of another model.

    Args:
        file: The file.
        model: The model of transformers.
        names: Names of files that will be written besides the configs.
        companions: The folder of files that will be copied.
    """
    written = {*names, "config.json"}
    if getattr(model, "generation_config", None) is not None:
        written.add("generation_config.json")
    replaces = replaces_beside(file)
    for name in sorted(written | companion_names(companions)):
        target = file.with_name(name)
        if not os.path.lexists(target) or replaces(target):
            continue
        # A copy that exists already is not replaced.
        is_copied = companions is not None and name not in written and is_plain_file(target)
        if is_copied and filecmp.cmp(target, Path(companions or "", name), shallow=False):
            continue
        raise FileError(
            target,
            f"would be replaced, and is no file of {file.name}; export into another folder",
        )
