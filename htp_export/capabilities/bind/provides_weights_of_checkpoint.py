"""Files of an export that refer to the weights of a checkpoint, for ``weights`` of `htp_export.export`."""

from __future__ import annotations

import os

from htp_export.capabilities.bind.binding import bind
from htp_export.capabilities.bind.referring_files import check_referring
from htp_export.model.tagged import ModelSource
from htp_export.weights.state_entries import read_entries


def check(weights: str | os.PathLike[str]) -> None:
    """Refuse weights that are no safetensors files, before a model is exported."""
    check_referring("", read_entries(weights).tensors, in_place_data=False)


def write(
    model: ModelSource, weights: str | os.PathLike[str], output: str | os.PathLike[str]
) -> tuple[str, ...]:
    """Write a model that refers to a checkpoint for its weights; return notes on it."""
    return bind(model, weights, output, share_weights=True).notes
