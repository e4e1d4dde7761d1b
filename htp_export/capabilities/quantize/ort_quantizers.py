"""ONNX Runtime's quantizers: imported when they are needed, kept from printing and from configuring logging."""

from __future__ import annotations

import contextlib
import importlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from htp_export.editing.submodels import constant_of
from htp_export.files.filesystem import temporary_folder
from htp_export.process.progress import counted
from htp_export.process.quiet import quiet
from htp_export.runtime.arrays import Array

GROUP_BYTES = 32 << 20
"""Weights that are in memory at a time; a single one may be larger."""

_MOST_GROUPS = 256
"""Each group leaves an open file: systems allow 1024, or fewer, for a process. Groups of huge models are larger."""

_QUANTIZATION = "onnxruntime.quantization"


def quantizers(module: str = "") -> Any:
    """Import ``onnxruntime.quantization``, or a module of it.

    Some of its modules call ``logging.basicConfig`` on import, which would configure the logging of the program.
    """
    with quietly():
        return importlib.import_module(f"{_QUANTIZATION}.{module}" if module else _QUANTIZATION)


def quietly() -> contextlib.AbstractContextManager[None]:
    """Suppress what ONNX Runtime's quantizers say.

    It is advice that the caller cannot follow, such as to preprocess the model. They log to the root logger itself.
    """
    return quiet("")


class _Feed(dict[str, Any]):
    """The inputs of a run, which is one without inputs too: ONNX Runtime takes an empty mapping for the end of runs."""

    def __bool__(self) -> bool:
        return True


class OneRun:
    """A run as ONNX Runtime's calibrators read their data."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._left = [_Feed(arrays)]

    def get_next(self) -> Mapping[str, Array] | None:
        """The run; None after it."""
        return self._left.pop() if self._left else None


def groups_in_memory(nodes: Sequence[ir.Node]) -> Iterator[list[ir.Node]]:
    """Nodes in groups whose weights fit into memory; those that share a weight are in one, so that it is read once.

    Those of each graph are apart, and convolutions, which have other weights.
    """
    apart: dict[Any, list[ir.Node]] = {}
    for node in nodes:
        apart.setdefault((node.graph, node.op_type == "Conv"), []).append(node)
    yield from counted([group for alike in apart.values() for group in _groups(alike)], "groups of weights")


def _groups(nodes: Sequence[ir.Node]) -> list[list[ir.Node]]:
    by_weight: defaultdict[ir.Value | None, list[ir.Node]] = defaultdict(list)
    for node in nodes:
        by_weight[next(iter(_weights_of(node)), None)].append(node)
    sizes = {weight: sum(_weights_of(readers[0]).values()) for weight, readers in by_weight.items()}
    most = max(GROUP_BYTES, sum(sizes.values()) // _MOST_GROUPS)
    groups: list[list[ir.Node]] = []
    size = 0
    for weight, readers in by_weight.items():
        if not groups or size + sizes[weight] > most:
            groups.append([])
            size = 0
        groups[-1] += readers
        size += sizes[weight]
    order = {node: place for place, node in enumerate(nodes)}
    return [sorted(group, key=order.__getitem__) for group in groups]


def _weights_of(node: ir.Node) -> dict[ir.Value, int]:
    """The constants that a node reads as floats, with their bytes."""
    tensors = {value: tensor for value in node.inputs if value is not None and (tensor := constant_of(value))}
    return {value: tensor.nbytes for value, tensor in tensors.items() if tensor.dtype == ir.DataType.FLOAT}


@contextlib.contextmanager
def made_file() -> Iterator[Path]:
    """A place for what a quantizer makes.

    `read_model` leaves its large tensors there: they are read when they are used, also after the file is deleted.
    """
    with temporary_folder() as folder:
        yield folder / "made.onnx"
