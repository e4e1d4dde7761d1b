"""The values of stored tensors, for a page that is served: a part of them, and a histogram."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.view.page.document import json_number
from htp_export.files.data_files import DataTensor
from htp_export.model.module_facts import dtype_name
from htp_export.model.tagged import TaggedModel

MOST_VALUES = 64
"""Values of a tensor that an answer contains, from its beginning."""

MOST_BYTES = 1 << 30
"""Size of a tensor that is read, at most: reading it takes seconds."""

MOST_COUNTED = 1 << 22
"""Elements in a histogram, at most; of a larger tensor, equally spaced ones."""

_BARS = 48  # as many as are told apart beside a graph: 350 pixels
_NOT_NUMBERS = (ir.DataType.STRING, ir.DataType.COMPLEX64, ir.DataType.COMPLEX128)


class TensorValues:
    """Answers with the values of the tensors that a model stores, and with no others.

    Tensors are found by name in the model that was loaded; a name is never a path. One tensor is
    read at a time.

    Args:
        tagged: The model.
    """

    def __init__(self, tagged: TaggedModel) -> None:
        self._tensors: Mapping[str, ir.TensorProtocol] = {
            str(value.name): value.const_value
            for graph in tagged.model.graphs()
            for value in graph.initializers.values()
            if value.const_value is not None
        }
        self._lock = threading.Lock()

    def __call__(self, name: str) -> dict[str, Any] | None:
        """Plain data about a tensor; ``problem`` instead of values; None if there is no tensor."""
        tensor = self._tensors.get(name)
        if tensor is None:
            return None
        shape = [int(size) for size in tensor.shape.numpy()]
        head = {"name": name, "type": dtype_name(tensor.dtype), "shape": shape}
        if tensor.dtype in _NOT_NUMBERS:
            return {**head, "problem": "its elements are not real numbers"}
        if tensor.nbytes > MOST_BYTES:
            return {**head, "problem": f"it has more than {MOST_BYTES:,} bytes"}
        with self._lock:
            try:
                return {**head, **_described(np.asarray(tensor.numpy()).reshape(-1))}
            except (OSError, ValueError) as error:  # the data file is gone, or too short
                return {**head, "problem": f"it cannot be read: {error}"}
            finally:
                if isinstance(tensor, DataTensor):
                    tensor.release()


def _described(values: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The first values, and a histogram of the finite ones."""
    step = -(-values.size // MOST_COUNTED) or 1
    counted = values[::step].astype(np.float64)
    finite = counted[np.isfinite(counted)]
    counts, edges = np.zeros(0, np.int64), np.zeros(0)
    if finite.size:
        counts, edges = np.histogram(finite, bins=_BARS)
    return {
        "values": [json_number(float(value)) for value in values[:MOST_VALUES].astype(np.float64)],
        "counts": [int(count) for count in counts],
        "edges": [float(f"{edge:.6g}") for edge in edges],
        "counted": int(counted.size),
        "not_finite": int(counted.size - finite.size),
    }
