"""What nodes and regions compute, as hashes: equal where operators, wiring, attributes and shapes of weights are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from htp_export.model.graph_facts import GraphFacts

_LATER = "later"
"""The text of an input whose producer follows: of a loop through a function, where no order is right."""

_MOST_NUMBERS = 16
"""Constants of up to so many whole numbers are settings (axes, shapes, pads), and count with their values."""

_MEASURED: Mapping[str, tuple[int, ...]] = {
    "QuantizeLinear": (1, 2), "DequantizeLinear": (1, 2), "MatMulInteger": (2, 3), "ConvInteger": (2, 3),
    "QLinearMatMul": (1, 2, 4, 5, 6, 7), "QLinearConv": (1, 2, 4, 5, 6, 7),
}  # fmt: skip
"""Where scales and zero points stand: numbers that were measured, as weights are, and no settings."""


class Hasher:
    """Hashes of parts of a graph.

    Names, metadata, values of weights, and the order of nodes that do not read each other do not count.
    """

    def __init__(self, facts: GraphFacts) -> None:
        self._facts = facts
        self._own: dict[ir.Node, str] = {}
        self._inputs: dict[ir.Node, tuple[tuple[ir.Value | None, str], ...]] = {}
        self._leaves: dict[ir.Value, str] = {}

    def part(self, nodes: Sequence[ir.Node]) -> str:
        """The hash of a part of a graph, whose nodes come after those that they read."""
        below: dict[ir.Value | None, str] = {}
        members = frozenset(nodes)
        for node in nodes:
            read = [
                below.get(value) or (_LATER if value is not None and value.producer() in members else leaf)
                for value, leaf in self.inputs(node)
            ]
            digest = _digest((self.node(node), *read))
            for place, value in enumerate(node.outputs):
                below[value] = f"{digest}.{place}"
        return _digest(sorted(below.values()))

    def region(self, path: str) -> str:
        """The hash of a module's region, in which whatever enters counts as such; ``""`` is the whole model."""
        index = self._facts.tagged.index
        return self.part(index.below.get(path, ()) if path else index.nodes)

    def node(self, node: ir.Node) -> str:
        """The hash of what a node does to whatever it reads."""
        if node not in self._own:
            written = sorted(item for item in node.attributes.items() if item[0] != "doc_string")
            settings = (f"{name}={self._attribute(attribute)}" for name, attribute in written)
            self._own[node] = _digest((node.domain, node.op_type, *settings))
        return self._own[node]

    def inputs(self, node: ir.Node) -> Sequence[tuple[ir.Value | None, str]]:
        """Each input of a node: the value, if a node computes it, and its text in a part without that node."""
        if node not in self._inputs:
            self._inputs[node] = tuple(self._input(value) for value in node.inputs)
        return self._inputs[node]

    def _input(self, value: ir.Value | None) -> tuple[ir.Value | None, str]:
        if value is None:
            return None, "-"
        if value not in self._leaves:
            self._leaves[value] = self._leaf(value)
        return value if value.producer() is not None else None, self._leaves[value]

    def _leaf(self, value: ir.Value) -> str:
        """What enters: a weight by type and shape, a setting by its value, anything else as such."""
        source = self._facts.tagged.index.initializer(value)
        if source is None:
            return "constant" if self._facts.is_constant(value) else "in"
        array = None if _was_measured(value) else self._facts.array(value)
        if array is not None and array.size <= _MOST_NUMBERS and (array.dtype.kind in "iub" or array.ndim == 0):
            return f"{array.dtype}{array.shape}{array.reshape(-1).tolist()}"
        return f"{self._facts.dtype(source)}{self._facts.shape(source)}"

    def _attribute(self, attribute: ir.Attr) -> str:
        if attribute.is_ref():
            return f"ref {attribute.ref_attr_name}"
        if attribute.type == ir.AttributeType.GRAPH:
            return self.part(list(attribute.as_graph()))
        if attribute.type == ir.AttributeType.GRAPHS:
            return _digest(self.part(list(graph)) for graph in attribute.as_graphs())
        if attribute.type == ir.AttributeType.TENSOR:
            tensor: ir.TensorProtocol = attribute.value  # as_tensor() looks at every method of it
            small = tensor.size <= _MOST_NUMBERS and tensor.dtype != ir.DataType.STRING
            return f"{tensor.dtype}{tuple(tensor.shape.numpy())}{tensor.numpy().reshape(-1).tolist() if small else ''}"
        if attribute.type in (ir.AttributeType.TENSORS, ir.AttributeType.SPARSE_TENSOR):
            return str(attribute.type)
        return repr(attribute.value)


def _was_measured(value: ir.Value) -> bool:
    """Whether a constant is a scale or zero point of quantization."""
    for use in value.uses():
        if use.idx in _MEASURED.get(use.node.op_type, ()):
            return True
        if use.node.op_type == "Mul":  # the scale of a weight and that of what is quantized while the model runs
            others = [factor for factor in use.node.inputs if factor is not None and factor is not value]
            makers = [(factor.producer(), factor.index()) for factor in others]
            if any(maker is not None and maker.op_type == "DynamicQuantizeLinear" and k == 1 for maker, k in makers):
                return True
    return False


def _digest(parts: Iterable[str]) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=12).hexdigest()
