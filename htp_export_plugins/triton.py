"""Stages as a model repository of NVIDIA Triton Inference Server: a model each, and an ensemble.

Triton reads ``config.pbtxt`` files, protobuf text of its ``ModelConfig``:
https://github.com/triton-inference-server/server/blob/main/docs/user_guide/model_configuration.md
and, for the requirements of an ensemble, ``ensemble_models.md`` beside it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from htp_export.capabilities.partition.partitions import Partition, Stage, StageTensor
from htp_export.errors import InputError
from htp_export.files.model_files import read_model, write_model
from htp_export.runtime.faulty_optimizers import DISABLED, INACCURATE

__all__ = ["write_stages"]

REPOSITORY = "triton"

_TYPES = {
    "FLOAT": "TYPE_FP32",
    "FLOAT16": "TYPE_FP16",
    "BFLOAT16": "TYPE_BF16",
    "DOUBLE": "TYPE_FP64",
    "BOOL": "TYPE_BOOL",
    "STRING": "TYPE_STRING",
    **{f"INT{bits}": f"TYPE_INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": f"TYPE_UINT{bits}" for bits in (8, 16, 32, 64)},
}


def write_stages(partition: Partition, folder: Path) -> Partition:
    """Write a model repository, ``triton/``, into the folder of written stages.

    A stage's data file is moved there, and the stage refers to it. It exists once, and not under
    two names, because onnx reads no data from a file with several hard links. An ONNX file without
    external data is linked.

    Shapes include the batch, ``max_batch_size`` is 0, and open sizes are -1.

    Returns:
        The stages with the new names of their files.

    Raises:
        InputError: A tensor has a type that Triton does not support, or an unknown rank.
    """
    name = re.sub(r"[^A-Za-z0-9_-]+", "_", partition.name) or "model"
    steps = [f"{name}_stage{number}" for number in range(len(partition.stages))]
    stages = []
    for step, stage in zip(steps, partition.stages, strict=True):
        version = folder / REPOSITORY / step / "1"
        version.mkdir(parents=True)
        stages.append(_share(stage, folder, version))
        ends = [_tensor("input", key, tensor, scalar=True) for key, tensor in stage.inputs.items()]
        ends += [
            _tensor("output", key, tensor, scalar=True) for key, tensor in stage.outputs.items()
        ]
        _write(version.parent, step, 'backend: "onnxruntime"', [*ends, *_level(stage)])
    version = folder / REPOSITORY / name / "1"
    version.mkdir(parents=True)
    (version / ".keep").touch()  # Triton requires a version, and that of an ensemble is empty
    used = set[str]()
    for stage in partition.stages:
        used.update(key for key, source in stage.sources.items() if source is None)
    ends = [
        _tensor("input", key, tensor) for key, tensor in partition.inputs.items() if key in used
    ]
    for key, (number, tensor_name) in partition.outputs.items():
        ends.append(_tensor("output", key, partition.stages[number].outputs[tensor_name]))
    _write(version.parent, name, 'platform: "ensemble"', [*ends, _scheduling(partition, steps)])
    return replace(partition, stages=tuple(stages))


def _level(stage: Stage) -> list[str]:
    """The optimization level without the optimizers that a stage must not use.

    Triton passes no session configuration entries. 1 is the second level, -1 the first:
    https://github.com/triton-inference-server/onnxruntime_backend#model-config-options.
    """
    if not stage.session_config:
        return []
    is_of_second_level = INACCURATE in stage.session_config.get(DISABLED, "").split(";")
    return [f"optimization {{ graph {{ level: {-1 if is_of_second_level else 1} }} }}"]


def _write(folder: Path, name: str, runs: str, parts: Iterable[str]) -> None:
    text = "\n".join((f"name: {_quoted(name)}", runs, "max_batch_size: 0", *parts))
    (folder / "config.pbtxt").write_text(text + "\n", encoding="utf-8", newline="\n")


def _tensor(kind: str, name: str, tensor: StageTensor, *, scalar: bool = False) -> str:
    """An input or output. Triton has no scalars: they are vectors of one number, and reshaped."""
    if tensor.type not in _TYPES or tensor.shape is None:
        raise InputError(
            f"tensor {name!r} is {tensor}: Triton needs its number of dimensions, and a type that it has"
        )
    sizes = [str(size) if isinstance(size, int) else "-1" for size in tensor.shape]
    reshape = "  reshape { shape: [ ] }\n" if scalar and not sizes else ""
    return (
        f"{kind} {{\n  name: {_quoted(name)}\n  data_type: {_TYPES[tensor.type]}\n"
        f"  dims: [ {', '.join(sizes or ['1'])} ]\n{reshape}}}"
    )


def _scheduling(partition: Partition, steps: Iterable[str]) -> str:
    """The steps of an ensemble. Tensors have their names in the stages; outputs, the model's."""
    named: dict[tuple[int | None, str], str] = {
        source: name for name, source in partition.outputs.items()
    }
    parts = ["ensemble_scheduling {"]
    for number, (step, stage) in enumerate(zip(steps, partition.stages, strict=True)):
        parts += ["  step {", f"    model_name: {_quoted(step)}", "    model_version: -1"]
        inputs = {key: named.get((stage.sources[key], key), key) for key in stage.inputs}
        outputs = {key: named.get((number, key), key) for key in _used(partition, number, stage)}
        parts += _mapping("input_map", inputs)
        parts += _mapping("output_map", outputs)
        parts.append("  }")
    return "\n".join((*parts, "}"))


def _used(partition: Partition, number: int, stage: Stage) -> list[str]:
    """The outputs of a stage that later stages or the model's outputs use."""
    used = {key for source, key in partition.outputs.values() if source == number}
    for later in partition.stages:
        used.update(key for key, source in later.sources.items() if source == number)
    return [key for key in stage.outputs if key in used]


def _mapping(kind: str, names: Mapping[str, str]) -> list[str]:
    return [
        f"    {kind} {{ key: {_quoted(key)} value: {_quoted(value)} }}"
        for key, value in names.items()
    ]


def _quoted(text: str) -> str:
    """A string of protobuf's text format: all but plain characters are octal bytes."""
    texts = []
    for byte in text.encode():
        is_plain = 32 <= byte < 127 and byte not in b'"\\'
        texts.append(chr(byte) if is_plain else f"\\{byte:03o}")
    return f'"{"".join(texts)}"'


def _share(stage: Stage, folder: Path, version: Path) -> Stage:
    """Move or link a stage into the repository; its data, if there is any, is only there."""
    name, *data = stage.files
    model = version / "model.onnx"
    if not data:
        try:
            os.link(folder / name, model)
        except OSError:  # the file system may not support links
            shutil.copyfile(folder / name, model)
        return stage
    (folder / name).rename(model)
    for file in data:
        (folder / file).rename(version / file)  # the name to which the model refers
    write_model(read_model(model), folder / name, share_weights=True)
    moved = [(version / file).relative_to(folder).as_posix() for file in data]
    return replace(stage, files=(name, *moved))
