"""Entries of a checkpoint under the names of the model in memory, as transformers converts them when it loads it.

The files of a mixture of experts have each matrix of each expert; since transformers 5, the model has
one parameter for all experts of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from htp_export.errors import HtpExportError
from htp_export.extras import is_installed


def convert(name: str) -> Mapping[str, Any] | None:
    """Load the model of a folder by transformers; None if it is no folder of a model that transformers knows.

    Weights stay in their files; converted ones are in a temporary file.
    """
    if not (Path(name) / "config.json").is_file() or not is_installed("transformers"):
        return None
    from htp_export.capabilities.huggingface.models import load_model

    try:
        return load_model(name, stream_weights=True).state_dict()
    except HtpExportError:  # the names of the files are what there is
        return None
