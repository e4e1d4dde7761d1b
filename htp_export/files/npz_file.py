"""Files of arrays that users give."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from htp_export.errors import FileError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["read_npz"]


def read_npz(path: str | os.PathLike[str]) -> dict[str, np.ndarray[Any, Any]]:
    """Read the arrays of an ``.npz`` file. Pickles in it are not loaded, because they may run code.

    Raises:
        FileError: If it cannot be read, or has other contents.
    """
    import numpy as np

    file = Path(path)
    try:
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            inputs = {name: arrays[name] for name in arrays.files}
    except OSError as error:
        raise FileError(file, f"cannot be read: {error.strerror or error}") from error
    except (ValueError, AttributeError, zipfile.BadZipFile, EOFError) as error:  # numpy advises to load pickles
        raise FileError(file, "is no .npz file of plain arrays; write one with numpy.savez") from error
    if not inputs:
        raise FileError(file, "holds no arrays")
    return inputs
