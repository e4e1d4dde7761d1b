"""Overflows of float16 that do not occur where ONNX Runtime computes float16 in float32.

ONNX Runtime's kernels for CPUs lack most operators in float16. It computes these in float32, and
removes the casts between two of them: a sum beyond 65,504 stays finite here, and is infinite on a
GPU. A tensor that is an output of the graph is in float16 on each processor.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.verify.file_run import FileRun
from htp_export.capabilities.verify.locating import computing_module, line_of_tensor
from htp_export.capabilities.verify.results import NotFinite
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import is_standard

_MOST = 256
"""Infinite tensors that are compared with the reference: after an overflow, most tensors are infinite."""

_WIDER = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.BFLOAT16)


def first_overflow(reference: FileRun, compared: FileRun) -> NotFinite | None:
    """The first tensor of the main graph that overflows in float16, and is finite in the reference.

    Tensors that the reference has in float16, or not at all, are not looked at.
    """
    name_in_reference = _narrowed(reference.tagged, compared.tagged)
    infinite: dict[str, Array] = {}  # tensor → where it is infinite

    def keep_infinite(name: str, array: Array) -> None:
        is_infinite = np.isinf(array)
        if is_infinite.any() and len(infinite) < _MOST:
            infinite[name] = is_infinite

    compared.fetch(dict.fromkeys(name_in_reference, 0), keep_infinite)
    finite: dict[str, Array] = {}  # tensor of the reference → where it is finite

    def keep_finite(name: str, array: Array) -> None:
        finite[name] = np.isfinite(array)

    reference.fetch({name_in_reference[name]: 0 for name in infinite}, keep_finite)
    for name, is_infinite in infinite.items():
        is_finite = finite[name_in_reference[name]]
        if is_finite.shape != is_infinite.shape:
            continue
        elements = int((is_infinite & is_finite).sum())
        if elements:
            return _described(compared.tagged, name, elements, is_infinite.size)
    return None


def _narrowed(reference: TaggedModel, compared: TaggedModel) -> dict[str, str]:
    """Computed tensor in float16 → the tensor of a wider type in the reference, in graph order."""
    wider = {name for name, value in reference.typed.items() if value.dtype in _WIDER}
    types = compared.typed
    narrowed: dict[str, str] = {}
    for node in compared.model.graph:
        for value in node.outputs:
            name = str(value.name)
            if name not in types or types[name].dtype != ir.DataType.FLOAT16:
                continue
            same = next((each for each in _same_through_casts(value) if each in wider), None)
            if same is not None:
                narrowed[name] = same
    return narrowed


def _same_through_casts(value: ir.Value) -> Iterator[str]:
    """The names of a tensor and of those that are cast from it, or from which it is cast."""
    yield str(value.name)
    for node in value.consumers():
        if is_standard(node, "Cast"):
            yield str(node.outputs[0].name)
    producer = value.producer()
    if producer is not None and is_standard(producer, "Cast") and producer.inputs[0] is not None:
        yield str(producer.inputs[0].name)


def _described(tagged: TaggedModel, name: str, elements: int, size: int) -> NotFinite:
    module = computing_module(tagged, tagged.values[name])
    line = line_of_tensor(tagged, name)
    return NotFinite(
        module, name, "infinite", "compared", elements, size, line, in_float16_only=True
    )
