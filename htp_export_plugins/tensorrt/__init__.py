"""TensorRT as an engine of ``profile``: what ``trtexec`` measured, by the names that it made of the nodes'."""

from __future__ import annotations

import os
from collections.abc import Sequence

from htp_export.capabilities.profile.measurements import Measurement
from htp_export.errors import InputError
from htp_export.model.tagged import TaggedModel
from htp_export_plugins.tensorrt.files import read_engine
from htp_export_plugins.tensorrt.layers import layer_kernels

__all__ = ["read"]


def read(tagged: TaggedModel, files: Sequence[str | os.PathLike[str]], *, name: str) -> Measurement:
    """Read what trtexec measured of an engine that TensorRT built of a model without functions.

    ``files``: what ``--exportLayerInfo`` wrote, then what ``--exportProfile`` wrote; a `FileError` if one is not so, or
    not of this model.
    """
    if isinstance(files, str | os.PathLike) or len(files) != 2:
        raise InputError("tensorrt reads two files of trtexec: that of --exportLayerInfo, then that of --exportProfile")
    engine = read_engine(*files)
    untimed = [layer.name for layer in engine.layers if layer.ms is None]
    notes = (f"{len(untimed)} layers have no time in the profile, {untimed[0]!r} first",) if untimed else ()
    kernels = layer_kernels(engine, tagged, name)
    return Measurement(kernels, providers=("TensorRT",), timing="layers", runs=engine.runs, notes=notes)
