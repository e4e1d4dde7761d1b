"""``export.json``: what ``transformers.exporters`` records about a file, from which it runs the file again."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from htp_export.capabilities.huggingface.companions import named_if_unwritable, write_configs
from htp_export.errors import InputError
from htp_export.files.json_file import write_json
from htp_export.files.model_files import read_model

__all__ = ["write_export_metadata"]

_PACKAGES = ("torch", "onnx", "onnxscript")


def write_export_metadata(
    file: str | os.PathLike[str], model: Any, kwargs: Mapping[str, Any], exported_program: Any
) -> tuple[Path, ...]:
    """Write ``export.json`` and the configs into the folder of an exported model.

    ``transformers.exporters.ExportedModel.from_pretrained`` then loads the folder. It finds inputs by transformers'
    names (``cache_names="transformers"``), and weights in ``<file>.data``. The program is
    ``ONNXProgram.exported_program``, what torch made of the call with ``kwargs``.

    Raises:
        InputError: If transformers is too old, if there is no ``ExportedProgram``, or if transformers could not load
            the file.
        FileError: If a file cannot be written.
    """
    try:
        from transformers.exporters.base import EXPORT_SCHEMA_VERSION
        from transformers.exporters.metadata import build_export_metadata
        from transformers.exporters.utils import get_leaf_tensors
    except ImportError as error:
        problem = "export.json needs transformers 5.23 or later, with transformers.exporters"
        raise InputError(f"{problem}: {error}") from error
    path = Path(file)
    if exported_program is None:
        raise InputError("export.json needs an ExportedProgram, which only the dynamo exporter has")
    if not path.with_name(f"{path.name}.data").is_file():
        raise InputError(f"transformers reads the weights of {path.name} from {path.name}.data: keep external data on")
    leaves = get_leaf_tensors(dict(kwargs))
    for value in read_model(path).graph.inputs:
        if str(value.name).removeprefix("input.") not in leaves:
            raise InputError(f"transformers has no name {value.name!r}; export with --cache-names transformers")
    metadata = build_export_metadata(model, kwargs, exported_program, _PACKAGES)
    components = {path.stem: {"file": path.name, "metadata": dataclasses.asdict(metadata)}}
    content = {"schema_version": EXPORT_SCHEMA_VERSION, "export_format": "onnx", "components": components}
    with named_if_unwritable(path.parent):
        return (write_json(path.with_name("export.json"), content), *write_configs(model, path.parent))
