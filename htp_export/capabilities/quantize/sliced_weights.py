"""Large weights for ONNX Runtime's quantizer of blocks, a slice at a time.

The quantizer holds a weight three times and more. A block is a part of one column of a matrix, or
of one row of a table, and is rounded by itself: the levels, scales and zero points of consecutive
slices, joined, are those of the whole weight.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

from htp_export.capabilities.quantize.ort_quantizers import PartError
from htp_export.model.strips import strips

SLICE_BYTES = 2 << 20
"""Bytes of a slice, about."""

_LEAST_SLICES = 8
"""Smaller weights are not divided: a group of them takes as much memory."""

_AXES = {"MatMul": 1, "Gather": 0}
"""Operator → the axis of its weight that is divided. The blocks are along the other axis."""


@dataclass(frozen=True)
class SlicedWeight:
    """A matrix or table that is quantized in slices.

    Attributes:
        name: The name of its initializer.
        consumer: Its consumers: ``MatMul`` or ``Gather``.
        tensor: Its values.
    """

    name: str
    consumer: str
    tensor: ir.TensorProtocol

    def slices(self) -> Iterator[ir.Tensor[np.ndarray]]:
        """Yield the slices, in order."""
        axis = _AXES[self.consumer]
        array = self.tensor.numpy()
        for chosen in strips(array.T if axis else array, SLICE_BYTES):
            part = array[:, chosen] if axis else array[chosen]
            yield ir.Tensor(np.ascontiguousarray(part), dtype=self.tensor.dtype, name=self.name)

    def model_of(self, part: ir.TensorProtocol) -> onnx.ModelProto:
        """Return a model with one node, which reads a slice."""
        model = onnx.ModelProto()
        # helpers of onnx would copy the slice twice
        stored = model.graph.initializer.add(name=self.name, data_type=part.dtype)
        stored.dims.extend(part.shape.numpy())
        stored.raw_data = part.tobytes()
        other = f"{self.name}_input"
        inputs = [other, self.name] if self.consumer == "MatMul" else [self.name, other]
        outputs = [f"{self.name}_output"]
        model.graph.node.add(op_type=self.consumer, name="slice", input=inputs, output=outputs)
        return model

    def quantized(
        self, quantize: Callable[[onnx.ModelProto], onnx.ModelProto]
    ) -> list[onnx.TensorProto]:
        """Return the tensors of the quantized weight.

        Args:
            quantize: Runs the quantizer on a model.
        """
        first: dict[str, onnx.TensorProto] = {}
        values: defaultdict[str, list[bytes]] = defaultdict(list)
        sizes: defaultdict[str, int] = defaultdict(int)
        for part in self.slices():
            for tensor in quantize(self.model_of(part)).graph.initializer:
                first.setdefault(tensor.name, tensor)
                values[tensor.name].append(tensor.raw_data)
                sizes[tensor.name] += tensor.dims[0]
        for name, tensor in first.items():
            tensor.raw_data = b"".join(values.pop(name))
            tensor.dims[0] = sizes[name]
        return list(first.values())


def take_large(graph: ir.Graph) -> list[SlicedWeight]:
    """Replace each large matrix and table of a graph by its first slice, and return them whole."""
    taken: list[SlicedWeight] = []
    for name, value in graph.initializers.items():
        tensor = value.const_value
        consumers = {use.node.op_type for use in value.uses()}
        is_divisible = len(consumers) == 1 and consumers <= _AXES.keys()
        if tensor is None or not is_divisible or len(tensor.shape) != 2:
            continue
        if tensor.nbytes <= _LEAST_SLICES * SLICE_BYTES:
            continue
        weight = SlicedWeight(name, consumers.pop(), tensor)
        value.const_value = next(weight.slices())
        taken.append(weight)
    return taken


def put_whole(graph: onnx.GraphProto, weight: SlicedWeight, parts: list[onnx.TensorProto]) -> None:
    """Replace the tensors of a first slice in a quantized graph by those of the whole weight.

    Raises:
        PartError: The quantizer left a consumer of the weight as it was.
    """
    whole = {tensor.name: tensor for tensor in parts}
    for node in graph.node:
        if weight.name in node.input:
            raise PartError(f"the quantizer leaves {node.op_type} {node.name!r} as it is")
        levels = whole.get(node.input[1]) if node.op_type == "MatMulNBits" else None
        if levels is None:
            continue
        for attribute in node.attribute:
            if attribute.name == "N":  # the number of columns
                attribute.i = levels.dims[0]
    for place, tensor in reversed(list(enumerate(graph.initializer))):
        if tensor.name == weight.name:
            del graph.initializer[place]  # some algorithms leave a weight of several consumers
        elif tensor.name in whole:
            tensor.CopyFrom(whole[tensor.name])
