"""Stages of a decoder for ONNX Runtime GenAI: ``genai_config.json`` with a stage for each file.

GenAI's model type ``decoder-pipeline`` runs the stages one after another, hands tensors on by name, and gives the
cache to the stages that name it: ``src/models/decoder_only_pipeline.cpp`` in
https://github.com/microsoft/onnxruntime-genai.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from htp_export.capabilities.partition.partitions import Partition
from htp_export.errors import FileError, InputError
from htp_export.files.text_files import read_json, write_json


def genai_pipeline(file: Path) -> Callable[[Partition, Path], Partition]:
    """What writes the configuration of a pipeline into the folder of its stages.

    Token ids, sizes and the way to choose tokens are those of the whole model's ``genai_config.json``. Only numbers and
    the names of tensors are taken from it, no paths; the tokenizer beside it is copied. A `FileError` if the file is
    missing, or is no configuration of a decoder.
    """
    if not file.is_file():
        raise FileError(file, "is missing; export the model with --genai, or give its genai_config.json")
    whole = read_json(file)
    model = whole.get("model") if isinstance(whole, dict) else None
    decoder = model.get("decoder") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(decoder, dict):
        raise FileError(file, "is no configuration of a decoder for ONNX Runtime GenAI")
    tensors = {key: decoder.get(key) for key in ("inputs", "outputs")}
    if not all(isinstance(named, dict) and {*map(type, named.values())} <= {str} for named in tensors.values()):
        raise FileError(file, "does not name the inputs and outputs of a decoder")
    model_settings = {"type": "decoder-pipeline", **_numbers(model)}
    decoder_settings, search = {**_numbers(decoder), **tensors}, _numbers(whole.get("search"))

    def write(partition: Partition, folder: Path) -> Partition:
        from htp_export.capabilities.huggingface.companions import copy_companions
        from htp_export.capabilities.huggingface.genai import GENAI_CONFIG

        for name, (number, made) in partition.outputs.items():
            if made != name:
                problem = f"output {name!r} of the model is no result of stage {number}"
                raise InputError(f"{problem}: ONNX Runtime GenAI cannot take it from there")
        stages = [
            {f"stage{number}": {"filename": stage.files[0], "inputs": [*stage.inputs], "outputs": [*stage.outputs]}}
            for number, stage in enumerate(partition.stages)
        ]
        options: dict[str, Any] = {"log_id": "onnxruntime-genai", "provider_options": list[Any]()}
        for stage in partition.stages:
            options |= stage.session_config
        pipeline = {**decoder_settings, "session_options": options, "pipeline": stages}
        unshared = {"past_present_share_buffer": False}  # stages of such files are not tried
        settings = search | {name: unshared[name] for name in search.keys() & unshared.keys()}
        write_json(folder / GENAI_CONFIG, {"model": {**model_settings, "decoder": pipeline}, "search": settings})
        copy_companions(file.parent, folder)
        return partition

    return write


def _numbers(settings: Any) -> dict[str, Any]:
    """The settings that are finite numbers, flags, or lists of these."""
    return {
        name: value
        for name, value in (settings.items() if isinstance(settings, dict) else ())
        if all(
            isinstance(number, int | float) and math.isfinite(number)
            for number in (value if isinstance(value, list) else [value])
        )
    }
