"""JSON files: those that users give, and those that lie beside models."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from htp_export.errors import FileError

__all__ = ["read_json", "write_json"]


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file; a `FileError` if it cannot be read or is not JSON."""
    file = Path(path)
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        raise FileError(file, f"cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise FileError(file, "is not JSON: it is no text") from error
    except (ValueError, RecursionError) as error:
        raise FileError(file, f"is not JSON: {error}") from error


def write_json(file: Path, content: Any) -> Path:
    """Write a JSON file into a folder that is written whole, and return it; an `OSError` if that fails."""
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return file
