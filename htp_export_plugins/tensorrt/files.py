"""The files of ``trtexec --exportLayerInfo`` and ``--exportProfile``: the layers of an engine, and their times.

The first is ``{"Layers": [...]}``, of names, or with ``--profilingVerbosity=detailed`` of objects with ``Name``,
``LayerType``, ``Inputs``, ``Outputs`` and ``Metadata``. The second is a list: ``{"count": runs}``, then
``{"name", "timeMs", "averageMs", "medianMs", "percentage"}`` for each layer, in which ``timeMs`` is of all runs.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict, deque
from dataclasses import dataclass, replace
from typing import Any

from htp_export.errors import FileError
from htp_export.files.text_files import read_json

__all__ = ["Layer", "TensorRTEngine", "read_engine"]


@dataclass(frozen=True)
class Layer:
    """A layer of an engine.

    Attributes:
        name: Its name.
        kind: What TensorRT calls it, ``CaskConvolution``; empty if the file has names only.
        metadata: The ONNX nodes that it was made of, ``[ONNX Layer: name]`` each; empty if the file does not say.
        inputs: The tensors that it reads.
        outputs: The tensors that it produces.
        ms: Mean time in one run; None if the profile does not have it.
    """

    name: str
    kind: str = ""
    metadata: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    ms: float | None = None


@dataclass(frozen=True)
class TensorRTEngine:
    """The layers of an engine, in the order of execution.

    Attributes:
        file: The file of the layers.
        layers: The layers; those that only the profile has are the last.
        runs: Number of runs of the profile; 0 if it does not say.
    """

    file: str
    layers: tuple[Layer, ...]
    runs: int


def read_engine(layers: str | os.PathLike[str], times: str | os.PathLike[str]) -> TensorRTEngine:
    """Read what ``--exportLayerInfo`` and what ``--exportProfile`` wrote.

    Raises:
        FileError: If one cannot be read, is not such a file, or they are not of the same engine.
    """
    listed = _layers(layers)
    timed, runs = _times(times)
    given: defaultdict[str, deque[float]] = defaultdict(deque)
    for name, ms in timed:
        given[name].append(ms)
    found = [replace(layer, ms=given[layer.name].popleft() if given[layer.name] else None) for layer in listed]
    if all(layer.ms is None for layer in found):
        raise FileError(
            os.fspath(times),
            f"has no time for any layer of {os.fspath(layers)}: the first layer is {listed[0].name!r}, the first time "
            f"{timed[0][0]!r}; both files have to be of the same engine",
        )
    rest = [Layer(name, ms=ms) for name, left in given.items() for ms in left]
    return TensorRTEngine(os.fspath(layers), (*found, *rest), runs)


def _layers(path: str | os.PathLike[str]) -> list[Layer]:
    content, file = read_json(path), os.fspath(path)
    listed = content.get("Layers") if isinstance(content, dict) else None
    if not isinstance(listed, list):
        raise FileError(file, "has no list 'Layers', which trtexec --exportLayerInfo writes")
    if not listed:
        raise FileError(file, "has no layers in 'Layers'")
    return [_layer(layer, f"Layers[{index}]", file) for index, layer in enumerate(listed)]


def _layer(layer: object, where: str, file: str) -> Layer:
    if isinstance(layer, str):
        return Layer(layer)
    if not isinstance(layer, dict) or not isinstance(layer.get("Name"), str):
        raise FileError(file, f"{where} is neither a name nor an object with 'Name'")
    return Layer(
        layer["Name"],
        str(layer.get("LayerType", "")),
        str(layer.get("Metadata", "")),
        _tensors(layer.get("Inputs", []), f"{where}.Inputs", file),
        _tensors(layer.get("Outputs", []), f"{where}.Outputs", file),
    )


def _tensors(listed: object, where: str, file: str) -> tuple[str, ...]:
    if not isinstance(listed, list) or not all(isinstance(each, dict) and "Name" in each for each in listed):
        raise FileError(file, f"{where} is no list of objects with 'Name'")
    return tuple(str(each["Name"]) for each in listed)


def _times(path: str | os.PathLike[str]) -> tuple[list[tuple[str, float]], int]:
    content, file = read_json(path), os.fspath(path)
    if not isinstance(content, list) or not all(isinstance(entry, dict) for entry in content):
        raise FileError(file, "is no list of objects, which trtexec --exportProfile writes")
    runs = next((int(entry["count"]) for entry in content if _is_number(entry.get("count"))), 0)
    timed = []
    for index, entry in enumerate(content):
        if "count" in entry and "name" not in entry:
            continue
        if not isinstance(entry.get("name"), str):
            raise FileError(file, f"[{index}] has no 'name'")
        timed.append((entry["name"], _average(entry, runs, f"[{index}] ({entry['name']!r})", file)))
    if not timed:
        raise FileError(file, "has no times of layers")
    return timed, runs


def _average(entry: dict[str, Any], runs: int, where: str, file: str) -> float:
    if _is_number(entry.get("averageMs")):
        return float(entry["averageMs"])
    if _is_number(entry.get("timeMs")) and runs:
        return float(entry["timeMs"]) / runs
    raise FileError(file, f"{where} has no number 'averageMs'")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
