"""Stages of a decoder for ONNX Runtime GenAI: ``genai_config.json`` with a stage for each file.

GenAI's model type ``decoder-pipeline`` runs the stages one after another, hands tensors on by name, and gives the
cache to the stages that name it: ``src/models/decoder_only_pipeline.cpp`` in
https://github.com/microsoft/onnxruntime-genai.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from htp_export.capabilities.partition.partitions import Partition
from htp_export.errors import FileError, InputError
from htp_export.files.json_file import read_json, write_json

__all__ = ["GenaiPipeline"]

_TENSORS = ("inputs", "outputs")


class GenaiPipeline:
    """Writes the configuration of a pipeline into the folder of its stages.

    Token ids, sizes and the way to choose tokens are those of the whole model's ``genai_config.json``. Only numbers and
    the names of tensors are taken from it, no paths; the tokenizer beside it is copied.

    Args:
        file: The ``genai_config.json`` of the whole model.

    Raises:
        FileError: If it is missing, or is no configuration of a decoder.
    """

    def __init__(self, file: str | os.PathLike[str]) -> None:
        self._file = Path(file)
        if not self._file.is_file():
            problem = "is missing; export the model with --genai, or give its genai_config.json"
            raise FileError(self._file, problem)
        data = read_json(self._file)
        model = data.get("model") if isinstance(data, dict) else None
        decoder = model.get("decoder") if isinstance(model, dict) else None
        if not isinstance(model, dict) or not isinstance(decoder, dict):
            raise FileError(self._file, "is no configuration of a decoder for ONNX Runtime GenAI")
        if not all(_is_names(decoder.get(key)) for key in _TENSORS):
            raise FileError(self._file, "does not name the inputs and outputs of a decoder")
        search = data.get("search")
        self._model, self._decoder = _numbers(model), _numbers(decoder) | {key: decoder[key] for key in _TENSORS}
        self._search = _numbers(search) if isinstance(search, dict) else {}

    def __call__(self, partition: Partition, folder: Path) -> Partition:
        """Write ``genai_config.json`` and the files of the tokenizer.

        Args:
            partition: The stages, written.
            folder: Their folder.

        Returns:
            The stages as they are.

        Raises:
            InputError: If an output of the model has another name in its stage.
        """
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
        decoder = {**self._decoder, "session_options": options, "pipeline": stages}
        config = {"model": {"type": "decoder-pipeline", **self._model, "decoder": decoder}, "search": self._search}
        write_json(folder / GENAI_CONFIG, config)
        copy_companions(self._file.parent, folder)
        return partition


def _is_names(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(name, str) for name in value.values())


def _numbers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that are finite numbers, flags, or lists of these."""
    return {
        name: value
        for name, value in settings.items()
        if all(isinstance(each, int | float) and math.isfinite(each) for each in _listed(value))
    }


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
