"""Times and errors by module, from the JSON that ``profile``, ``verify`` and ``compare`` write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from htp_export.errors import FileError
from htp_export.files.json_file import read_json

if TYPE_CHECKING:
    from htp_export.capabilities.cost.module_tree import Measured

__all__ = ["read_measured"]

_WRONG = ("differs", "inherits")


def read_measured(profile: Path | None, verify: Path | None) -> dict[str, Measured]:
    """Module path → its measurements, from the JSON of ``profile``, and of ``verify`` or ``compare``.

    Raises:
        FileError: If a file cannot be read, or was written by something else.
    """
    from htp_export.capabilities.cost.module_tree import Measured

    measured: dict[str, Measured] = {}
    for path, entry in _modules(profile, "total_ms").items():
        measured[path] = Measured(_number(entry.get("total_ms")), _number(entry.get("self_ms")))
    for path, entry in _modules(verify, "max_abs").items():
        status = entry.get("status")
        wrong = status if isinstance(status, str) and status in _WRONG else None
        measured[path] = replace(measured.get(path, Measured()), error=_number(entry.get("max_abs")), status=wrong)
    return measured


def _modules(path: Path | None, needed: str) -> Mapping[str, Mapping[str, Any]]:
    if path is None:
        return {}
    data = read_json(path)
    modules = data.get("modules") if isinstance(data, dict) else None
    if not isinstance(modules, dict) or not all(isinstance(entry, dict) for entry in modules.values()):
        raise FileError(path, "has no results by module; write it with --json of profile, verify or compare")
    if modules and not any(needed in entry for entry in modules.values()):
        raise FileError(path, f"says {needed!r} of no module; is it the JSON of another command?")
    return modules


def _number(value: Any) -> float | None:
    """A number; NaN and infinity are written as words."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None
