"""Key-value caches in 8-bit integers, for ONNX Runtime's ``GroupQueryAttention``.

The operator quantizes the keys and values that it appends, with measured scales:
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.GroupQueryAttention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.quantize.method import Method
from htp_export.capabilities.quantize.work import Facts, Left, Work, activations
from htp_export.editing.editing import add_initializer
from htp_export.format.recipes import step
from htp_export.runtime.arrays import Array
from htp_export.shapes.operator_kinds import SIZES_ONLY, is_standard, operator_of

_OPERATOR = "com.microsoft::GroupQueryAttention"
_CACHES = {"k": (3, 1, 12), "v": (4, 2, 13)}
"""Keys and values → places of the past (input), the present (output) and the scales (input)."""

_LARGEST = 127.0
"""The largest integer of int8 with a symmetric range."""


class Cache(Method):
    """Stores keys and values as integers, and changes nothing else."""

    activations = ("float32",)
    weights = ("int8",)
    calibrated = True
    order = 4

    def takes(self, node: ir.Node, facts: Facts) -> bool:
        """Whether it is attention whose caches are inputs and outputs without other consumers."""
        if operator_of(node) != _OPERATOR or "kv_cache_bit_width" in node.attributes:
            return False
        for past, present in _caches_of(node).values():
            if past is None or facts.dtypes.get(past) != ir.DataType.FLOAT:
                return False
            if not past.is_graph_input() or not present.is_graph_output():
                return False
            if not _has_no_consumers_but(past, node) or not _has_no_consumers_but(present, node):
                return False
        return True

    def apply(self, nodes: Sequence[ir.Node], work: Work) -> Iterator[Left]:
        names = [str(present.name) for node in nodes for _, present in _caches_of(node).values()]
        largest: dict[str, Array] = {}
        with activations(work.original.model, work.name, work.samples, names) as runs:
            for arrays in runs:
                for name in names:
                    # axes: batch, heads, length, features
                    bound = np.abs(arrays[name]).max((0, 2), initial=0)
                    largest[name] = np.maximum(largest.get(name, bound), bound)
        for node in nodes:
            self._quantize(node, work, largest)
        return iter(())

    def _quantize(self, node: ir.Node, work: Work, largest: dict[str, Array]) -> None:
        last_place = max(scales for _, _, scales in _CACHES.values())
        node.resize_inputs(max(len(node.inputs), 1 + last_place))
        for which, (past, present) in _caches_of(node).items():
            # The operator has a vector of scales, one for each feature of each head.
            bound = largest[str(present.name)].reshape(-1)
            if not self.precision.per_channel:
                bound = bound.max(keepdims=True)
            scale = np.where(bound > 0, bound / _LARGEST, 1).astype(np.float32)
            name = work.names.tensors.unused(f"{present.name}_scale")
            scales = add_initializer(
                work.model.graph, ir.Tensor(scale), name, step("computed", "quantized")
            )
            node.replace_input_with(_CACHES[which][2], scales)
            kind = "PER_CHANNEL" if self.precision.per_channel else "PER_TENSOR"
            node.attributes[f"{which}_quant_type"] = ir.AttrString(f"{which}_quant_type", kind)
            for value in (past, present):
                assert value is not None
                value.type = ir.TensorType(ir.DataType.INT8)
        node.attributes["kv_cache_bit_width"] = ir.AttrInt64(
            "kv_cache_bit_width", self.precision.bits
        )


METHOD = Cache


def _caches_of(node: ir.Node) -> dict[str, tuple[ir.Value | None, ir.Value]]:
    """Keys and values → the past, an input of a node, and the present, its output."""
    return {
        which: (node.inputs[past], node.outputs[present])
        for which, (past, present, _) in _CACHES.items()
    }


def _has_no_consumers_but(value: ir.Value, node: ir.Node) -> bool:
    """Whether only a node, and operators that read the size alone, consume a value."""
    return all(use.node is node or is_standard(use.node, *SIZES_ONLY) for use in value.uses())
