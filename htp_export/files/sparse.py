"""Conversion of sparse initializers, which onnx_ir does not read, to dense ones."""

from __future__ import annotations

import math

import numpy as np
import onnx

__all__ = ["with_dense_initializers"]

_MOST_BYTES = 1 << 30
"""Larger ones are refused: a few bytes can stand for any size."""


def with_dense_initializers(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with dense instead of sparse initializers in its main graph; the same model if it has none.

    Raises:
        ValueError: If a sparse initializer is invalid, or too large.

    Examples:
        >>> values, indices = (onnx.numpy_helper.from_array(np.array(data), "w") for data in ([7.0], [2]))
        >>> sparse = onnx.SparseTensorProto(values=values, indices=indices, dims=[4])
        >>> model = with_dense_initializers(onnx.ModelProto(graph=onnx.GraphProto(sparse_initializer=[sparse])))
        >>> onnx.numpy_helper.to_array(model.graph.initializer[0]).tolist()
        [0.0, 0.0, 7.0, 0.0]
    """
    if not proto.graph.sparse_initializer:
        return proto
    dense = onnx.ModelProto()
    dense.CopyFrom(proto)
    del dense.graph.sparse_initializer[:]
    dense.graph.initializer.extend(map(_dense, proto.graph.sparse_initializer))
    return dense


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    name, dims = sparse.values.name, tuple(sparse.dims)
    values, indices = onnx.numpy_helper.to_array(sparse.values), onnx.numpy_helper.to_array(sparse.indices)
    if any(dim < 0 for dim in dims) or math.prod(dims) * values.itemsize > _MOST_BYTES:
        raise ValueError(f"the sparse initializer {name!r} is of size {list(dims)}")
    array = np.zeros(dims, values.dtype)
    try:
        array[tuple(indices.T) if indices.ndim > 1 else np.unravel_index(indices, dims)] = values
    except (IndexError, ValueError) as error:
        raise ValueError(f"the sparse initializer {name!r}: {error}") from error
    return onnx.numpy_helper.from_array(array, name)
