"""The files beside an exported decoder from which ONNX Runtime GenAI runs it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from htp_export.capabilities.huggingface.companions import copy_companions, write_configs
from htp_export.capabilities.huggingface.genai import GENAI_CONFIG, genai_config
from htp_export.capabilities.huggingface.unwritable import named_if_unwritable
from htp_export.errors import FileError
from htp_export.files.json_file import write_json
from htp_export.files.model_files import read_model

__all__ = ["check_genai", "write_genai"]


def write_genai(file: str | os.PathLike[str], model: Any, *, companions: Path | None = None) -> tuple[Path, ...]:
    """Write ``genai_config.json``, the configs and the tokenizer into the folder of an exported decoder.

    Args:
        file: The exported decoder; it takes a key-value cache and returns one.
        model: The model of transformers that was exported.
        companions: The folder with its tokenizer; None if there is none.

    Returns:
        The files.

    Raises:
        InputError: If ONNX Runtime GenAI cannot run the decoder; the message names the tensor.
        FileError: If a file cannot be read or written.
    """
    path = Path(file)
    generation = getattr(model, "generation_config", None)
    content = genai_config(read_model(path), model.config, generation, filename=path.name)
    with named_if_unwritable(path.parent):
        written = [write_json(path.with_name(GENAI_CONFIG), content), *write_configs(model, path.parent)]
        if companions is not None:
            written += copy_companions(companions, path.parent)
    return tuple(written)


def check_genai(folder: Path) -> None:
    """Refuse a folder in which the files of another model lie: they would be replaced.

    Raises:
        FileError: If there is a ``config.json`` without a ``genai_config.json``.
    """
    config = folder / "config.json"
    if config.exists() and not (folder / GENAI_CONFIG).exists():
        raise FileError(config, "would be replaced, and is of another model; export into another folder")
