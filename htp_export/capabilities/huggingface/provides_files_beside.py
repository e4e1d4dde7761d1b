"""Update files beside a model that describe its graph, after the model was changed and written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import onnx_ir as ir

from htp_export.capabilities.huggingface.genai import GENAI_CONFIG, shares_cache
from htp_export.errors import InputError
from htp_export.files.targets import Kind
from htp_export.files.text_files import read_json, write_text


def renew(graph: ir.Graph, file: str | os.PathLike[str]) -> None:
    """Update the ``genai_config.json`` of a file: whether the caches of the decoder can be one buffer.

    Nothing is written if there is none, or if it belongs to another file.
    """
    path = Path(file)
    config = path.with_name(GENAI_CONFIG)
    content: Any = read_json(config, plain=True) if config.is_file() else None
    try:
        named, search = content["model"]["decoder"]["filename"], content["search"]
        if named == path.name and search["past_present_share_buffer"] != shares_cache(graph):
            content["search"] = {**search, "past_present_share_buffer": shares_cache(graph)}
            write_text(config, json.dumps(content, indent=2, ensure_ascii=False) + "\n", Kind.JSON)
    except (
        KeyError,
        TypeError,
        InputError,
    ):  # The file is for stages, or GenAI cannot run the model.
        return
