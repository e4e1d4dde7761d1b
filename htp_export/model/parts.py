"""Parts of a graph that run separately: constants that each may copy, and tensors between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import onnx_ir as ir

from htp_export.model.boundaries import OUTSIDE
from htp_export.model.cutting import Cutter
from htp_export.model.module_facts import is_weight
from htp_export.model.tagged import TaggedModel
from htp_export.shapes.known import constant_tensor

_FEW_BYTES = 256
"""Vectors of whole numbers up to this size are shapes, axes and permutations."""


class Constants:
    """The constants of a model's main graph, and the sizes that are cheap to compute again.

    A number and a short vector of integers are cheap; every other initializer or ``Constant`` is a
    weight. A value that is computed from cheap ones alone is cheap, and so are sizes of tensors and
    values that are computed from them.

    Attributes:
        weights: The initializers that are weights.
        sizes: The nodes that compute cheap values from sizes of tensors.
    """

    def __init__(self, tagged: TaggedModel, cutter: Cutter) -> None:
        graph = tagged.model.graph
        self.weights = frozenset(
            value for value in graph.initializers.values() if not _is_few(value.const_value)
        )
        self._costly: set[ir.Value] = set(self.weights)
        self._cutter = cutter
        self.sizes: set[ir.Node] = set()
        self._cheap: set[ir.Node] = set()
        for node in graph:
            self._sort(node)

    def comes_along(self, value: ir.Value) -> bool:
        """Whether a value is constant and cheap, so that each part may compute it again."""
        return self._cutter.is_free(value) and value not in self._costly

    def is_repeated(self, node: ir.Node) -> bool:
        """Whether parts may compute all outputs of a node again."""
        return node in self._cheap

    def is_common(self, node: ir.Node) -> bool:
        """Whether a node computes constants or sizes, which belong to no module in particular."""
        return (
            node in self._cheap
            or node in self.sizes
            or all(map(self._cutter.is_free, node.outputs))
        )

    def _sort(self, node: ir.Node) -> None:
        stored = node.op_type == "Constant" and not _is_few(constant_tensor(node.outputs[0]))
        costly = stored or any(value in self._costly for value in self._cutter.reads(node))
        free = all(map(self._cutter.is_free, node.outputs))
        if costly and (free or all(map(self._cutter.is_size, node.outputs))):
            self._costly.update(node.outputs)
        elif free:
            self._cheap.add(node)
        elif not costly and all(map(self._cutter.is_size, node.outputs)):
            self.sizes.add(node)


def weight_bytes(initializers: Iterable[ir.Value]) -> int:
    """Bytes of the values of initializers."""
    return sum(value.const_value.nbytes for value in initializers if value.const_value is not None)


def constant_bytes(node: ir.Node) -> int:
    """Bytes of the weight that a ``Constant`` node stores; 0 for any other node."""
    tensor = constant_tensor(node.outputs[0]) if node.op_type == "Constant" else None
    is_read = tensor is not None and any(
        is_weight(node.outputs[0], reader) for reader, _ in node.outputs[0].uses()
    )
    return tensor.nbytes if tensor is not None and is_read else 0


def _is_few(tensor: ir.TensorProtocol | None) -> bool:
    if tensor is None:
        return True
    return tensor.size <= 1 or (
        not tensor.dtype.is_floating_point() and tensor.nbytes <= _FEW_BYTES
    )


class PartTensor(NamedTuple):
    """A tensor that parts of a main graph pass to each other.

    Attributes:
        producer: The part that produces it; `OUTSIDE` for inputs of the model and for weights.
        consumers: The parts that read it; `OUTSIDE` for an output of the model.
        value: The tensor.
    """

    producer: int
    consumers: frozenset[int]
    value: ir.Value | None = None


def part_tensors(
    tagged: TaggedModel, part_of: Mapping[ir.Node, int], counts: Callable[[ir.Value], bool]
) -> Iterator[PartTensor]:
    """The tensors that parts consume, also in subgraphs, and the tensors that the model returns.

    Args:
        tagged: The model.
        part_of: Node → its part; other nodes are outside.
        counts: Whether a tensor counts.
    """
    consumers: defaultdict[ir.Value, set[int]] = defaultdict(set)
    for node in tagged.model.graph:
        for value in tagged.index.reads(node):
            consumers[value].add(part_of.get(node, OUTSIDE))
    for value in tagged.model.graph.outputs:
        consumers[value].add(OUTSIDE)
    for value, parts in consumers.items():
        if counts(value):
            producer = value.producer()
            yield PartTensor(
                OUTSIDE if producer is None else part_of.get(producer, OUTSIDE),
                frozenset(parts),
                value,
            )
