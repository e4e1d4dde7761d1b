"""Faults planted in ONNX files: each edits a model so that one module computes something else."""

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from htp_export.model.tagged import TaggedModel

Plant = Callable[[TaggedModel, str], None]


def weights(tagged: TaggedModel, path: str) -> list[ir.Value]:
    """The weights that the module's nodes read, the largest first."""
    read = [
        value
        for value in tagged[path].parameters
        if value.dtype.is_floating_point() and value.const_value.size > 1
    ]
    return sorted(read, key=lambda value: -value.const_value.size)


def change(tagged: TaggedModel, weight: ir.Value, edit: Callable[[np.ndarray], np.ndarray]) -> None:
    """Give a weight other values; other readers of it keep the old one."""
    array = edit(weight.const_value.numpy().copy())
    weight.const_value = ir.tensor(np.ascontiguousarray(array), name=weight.name)


def weight_changed(tagged: TaggedModel, path: str) -> None:
    change(
        tagged,
        weights(tagged, path)[0],
        lambda array: (
            array + 0.1 * np.cos(np.arange(array.size, dtype=array.dtype)).reshape(array.shape)
        ),
    )


def matrix_transposed(tagged: TaggedModel, path: str) -> None:
    change(
        tagged,
        next(w for w in weights(tagged, path) if len(set(w.const_value.shape)) == 1),
        np.transpose,
    )


def bias_dropped(tagged: TaggedModel, path: str) -> None:
    change(tagged, weights(tagged, path)[-1], np.zeros_like)


def nan_planted(tagged: TaggedModel, path: str) -> None:
    def plant(array: np.ndarray) -> np.ndarray:
        array.flat[array.size // 2] = np.nan
        return array

    change(tagged, weights(tagged, path)[0], plant)


def epsilon_changed(tagged: TaggedModel, path: str) -> None:
    node = next(node for node in tagged[path].nodes if "epsilon" in node.attributes)
    node.attributes["epsilon"] = ir.AttrFloat32("epsilon", 0.1)


def residual_swapped(tagged: TaggedModel, path: str) -> None:
    """The sum that the module computes itself subtracts."""
    node = next(node for node in reversed(tagged[path].own_nodes) if node.op_type == "Add")
    node.op_type = "Sub"
