"""Checkpoints that are no plain safetensors files: quantized ones, and those of the hub."""

from __future__ import annotations

import re
from pathlib import Path

from htp_export.capabilities.huggingface.packed.checkpoints import is_packed, read_packed
from htp_export.errors import FileError
from htp_export.files.checkpoint import Checkpoint
from htp_export.weights.packed import PackedCheckpoint

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""``owner/name``; ``finetuned/`` is a folder, and huggingface_hub would raise an error about its name."""

_FILES = (".safetensors", ".json", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
"""Ends of files: a name with one of them is no hub id. Pickles are refused when they are read."""


def find(name: str) -> PackedCheckpoint | Checkpoint | None:
    """Find a quantized checkpoint, or one of the hub, which is downloaded; None for plain safetensors files.

    Raises:
        FileError: There is no such checkpoint, or it is broken.
    """
    path = Path(name)
    if is_packed(path):
        return read_packed(path)
    if path.exists() or path.suffix in _FILES:
        return None
    if not _HUB_ID.fullmatch(name):
        raise FileError(path, "is missing")
    from htp_export.capabilities.huggingface.sources import Source
    from htp_export.capabilities.huggingface.streaming import find_checkpoint

    return find_checkpoint(Source(name), None)
