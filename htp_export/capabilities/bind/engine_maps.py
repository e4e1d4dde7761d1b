"""Maps of stored tensors in the formats of engines that load weights themselves."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.format.recipes import Recipe, parameters_in
from htp_export.model.tagged import load


def shared_initializers(file: Path | None, names: Collection[str]) -> dict[str, Any]:
    """Return ``shared_initializers`` of a section of ``genai_config.json`` of ONNX Runtime GenAI 0.18.

    A session takes an initializer of this name from the bytes of the data file, which are in memory
    once for all sessions with the same entry. GenAI's own builder writes the same fields
    (``models/builders/mtp.py``); offset and length are texts there. GenAI refuses scalars
    (``AddSharedInitializers`` in ``src/models/model.cpp``), which are left out.

    Args:
        file: The file that was written.
        names: Initializers to list.

    Raises:
        InputError: The model was not written, or no initializer is in a data file.
    """
    if file is None:
        raise InputError("genai: entries name places in a data file: give bind an output")
    entries: list[dict[str, Any]] = []
    for name, value in load(file).model.graph.initializers.items():
        tensor = value.const_value
        if name not in names or not isinstance(tensor, ir.ExternalTensor):
            continue
        if not tensor.shape.dims:
            continue
        entries.append(
            {
                "name": name,
                "data_file": os.fspath(tensor.location),
                "offset": str(tensor.offset or 0),
                "length": str(tensor.length or tensor.nbytes),
                "data_type": int(tensor.dtype),
                "shape": [int(size) for size in tensor.shape.numpy()],
            }
        )
    if not entries:
        raise InputError(
            f"genai: no bound initializer of {file} is in a data file, which sessions could share; "
            "export with external data"
        )
    return {"shared_initializers": entries}


def updatable_tensors(recipes: Mapping[str, Recipe], adapted: Collection[str]) -> dict[str, Any]:
    """Return the names of tensors that Qualcomm's converter keeps updatable.

    ``qairt-converter --lora_weight_list`` reads them from a text file, one in a line, and
    ``qairt-lora-importer`` reads their values from a safetensors file with these keys
    (https://docs.qualcomm.com/doc/80-63442-10/topic/lora_v2_0_overview.html).

    Args:
        recipes: Initializer → its recipe.
        adapted: Entries that adapters changed; if there are none, all tensors are updatable.
    """
    names: list[str] = []
    for name, recipe in recipes.items():
        if not adapted or not frozenset(adapted).isdisjoint(parameters_in(recipe)):
            names.append(name)
    return {"lora_weight_list": names}
