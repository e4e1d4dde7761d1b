"""The files beside a model: configs, tokenizer, preprocessor, and ``export.json`` of transformers.

``transformers.exporters`` records facts about a file in ``export.json``, and loads the file with
them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from htp_export.capabilities.huggingface.sources import Source
from htp_export.errors import FileError, InputError
from htp_export.files.model_files import read_model
from htp_export.files.text_files import named_if_unwritable, write_json

_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Suffixes of tokenizers, their vocabularies and templates, and of configs; weights have others."""

EXPORT_JSON = "export.json"

_NOT_OURS = (".index.json", "genai_config.json", EXPORT_JSON, "manifest.json")
"""Ends of names of files that describe weights or an earlier export: they are no companions."""


def is_companion(name: str) -> bool:
    """Whether a file of this name belongs to a tokenizer, a preprocessor or a config."""
    return name.endswith(_SUFFIXES) and not name.endswith(_NOT_OURS)


def companion_names(folder: Path | None) -> set[str]:
    """The names of the files of a folder that `copy_companions` copies."""
    return set() if folder is None else {file.name for file in _companions_in(folder)}


def _companions_in(folder: Path) -> list[Path]:
    """The companions in a folder, by name."""
    return sorted(file for file in folder.iterdir() if is_companion(file.name) and file.is_file())


def copy_companions(folder: Path, target: Path) -> list[Path]:
    """Copy the files of a model's tokenizer, preprocessor and configs; existing files of the target are kept.

    The folder is not trusted: links to files outside of it, and of the hub's cache around it, are
    refused.
    """
    home = folder.resolve()
    if home.parent.name == "snapshots":  # the hub's cache has links to ../../blobs
        home = home.parent.parent
    companions = _companions_in(folder)
    for file in companions:
        if not file.resolve().is_relative_to(home):
            raise FileError(file, "is a link out of its folder; it will not be copied")
    targets = [target / file.name for file in companions]
    copies = [copy for copy in targets if not copy.exists()]
    for copy in copies:
        shutil.copyfile(folder / copy.name, copy)
    return copies


def write_configs(model: Any, target: Path) -> list[Path]:
    """Write ``config.json`` and, for a model that generates, ``generation_config.json`` into an existing folder.

    They include every setting that was changed since the model was loaded.
    """
    config = {**json.loads(model.config.to_json_string()), "architectures": [type(model).__name__]}
    written = [write_json(target / "config.json", config)]
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        settings = json.loads(generation.to_json_string())
        written.append(write_json(target / "generation_config.json", settings))
    return written


def source_folder(source: str, revision: str | None = None) -> Path | None:
    """The folder with the companions of a model, local or in the hub's cache; None for a model type."""
    return Source(source, revision=revision).folder(_SUFFIXES, _NOT_OURS)


def write_export_metadata(
    file: str | os.PathLike[str], model: Any, kwargs: Mapping[str, Any], exported_program: Any
) -> tuple[Path, ...]:
    """Write ``export.json`` and the configs into the folder of an exported model.

    ``transformers.exporters.ExportedModel.from_pretrained`` then loads the folder. It finds inputs
    by transformers' names (``cache_names="transformers"``), and weights in ``<file>.data``.

    Args:
        file: The exported model.
        model: The model of transformers.
        kwargs: The arguments of the exported call.
        exported_program: ``ONNXProgram.exported_program`` of the export.
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
        raise InputError(
            f"transformers reads the weights of {path.name} from {path.name}.data: keep external data on"
        )
    leaves = get_leaf_tensors(dict(kwargs))
    for value in read_model(path).graph.inputs:
        if str(value.name).removeprefix("input.") not in leaves:
            raise InputError(
                f"transformers has no name {value.name!r}; export with --cache-names transformers"
            )
    metadata = build_export_metadata(
        model, kwargs, exported_program, ("torch", "onnx", "onnxscript")
    )
    components = {path.stem: {"file": path.name, "metadata": dataclasses.asdict(metadata)}}
    content = {
        "schema_version": EXPORT_SCHEMA_VERSION,
        "export_format": "onnx",
        "components": components,
    }
    with named_if_unwritable(path.parent):
        return (
            write_json(path.with_name(EXPORT_JSON), content),
            *write_configs(model, path.parent),
        )
