"""JSON files that users give."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from htp_export.errors import FileError

__all__ = ["read_json"]


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file.

    Raises:
        FileError: If it cannot be read or is not JSON.
    """
    file = Path(path)
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        raise FileError(file, f"cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise FileError(file, "is not JSON: it is no text") from error
    except (ValueError, RecursionError) as error:
        raise FileError(file, f"is not JSON: {error}") from error
