"""What nodes and regions compute, as hashes: equal where operators, wiring, attributes and shapes of weights are.

A node has a hash for each region that it is in, because what enters a region counts as such and not with its producer.
There are as many of these as nodes times levels, so those of a node are one array.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
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

_Array: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
_Places: TypeAlias = slice | np.ndarray[Any, np.dtype[np.int64]]

_ODD = np.array([[0x9E3779B97F4A7C15], [0xC2B2AE3D27D4EB4F]], np.uint64)
_FACTORS = np.array(
    [[[0xBF58476D1CE4E5B9], [0x94D049BB133111EB]], [[0xFF51AFD7ED558CCD], [0xC4CEB9FE1A85EC53]]], np.uint64
)
"""Two lanes of 64 bits; the constants are those of splitmix64 and of MurmurHash3."""


class Hasher:
    """Hashes of parts of a graph.

    Names, metadata, values of weights, and the order of nodes that do not read each other do not count.
    """

    def __init__(self, facts: GraphFacts) -> None:
        self._facts = facts
        self._own: dict[ir.Node, str] = {}
        self._inputs: dict[ir.Node, tuple[tuple[ir.Value | None, str], ...]] = {}
        self._leaves: dict[ir.Value, str] = {}

    def part(self, nodes: Collection[ir.Node]) -> str:
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


class RegionHashes:
    """Module path → the hash of its region, the same in every process; ``""`` is the whole model."""

    def __init__(self, facts: GraphFacts) -> None:
        self._index, self._hasher = facts.tagged.index, Hasher(facts)
        self._texts: dict[str, _Array] = {}

    def __getitem__(self, path: str) -> str:
        """The hash of a region."""
        number = self._numbers.get(path)
        first, second = (0, 0) if number is None else self._totals[:, number].tolist()
        return f"{first:016x}{second:016x}"[:24]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """Path of a region → its number; those above it have smaller ones."""
        paths = {path for modules in {work.modules for work in self._index.works.values()} for path in modules}
        return {path: number for number, path in enumerate(sorted(paths | {""}, key=len))}

    @cached_property
    def _regions(self) -> dict[ir.Node, np.ndarray[Any, np.dtype[np.int64]]]:
        """Node → the numbers of the regions that it is in, in ascending order."""
        known: dict[AbstractSet[str], np.ndarray[Any, np.dtype[np.int64]]] = {}
        for modules in {work.modules for work in self._index.works.values()}:
            known[modules] = np.array(sorted(self._numbers[path] for path in modules | {""}), np.int64)
        return {node: known[self._index.works[node].modules] for node in self._index.nodes}

    @cached_property
    def _totals(self) -> _Array:
        """The hash of each region, in both lanes: a sum over the values that are computed in it."""
        regions, hashes = self._regions, dict[ir.Node, list[_Array]]()  # of the outputs of each node
        left = Counter(producer for node in self._index.nodes for producer in _producers(node) if producer in regions)
        totals = np.zeros((2, len(self._numbers)), np.uint64)
        for node in self._index.nodes:
            hashed = np.repeat(self._text(self._hasher.node(node)), len(regions[node]), axis=1)
            for value, leaf in self._hasher.inputs(node):
                hashed *= _ODD
                hashed += self._read(node, value, leaf, hashes)
            steps = (self._text(f"output {place}") for place in range(len(node.outputs)))  # tell its outputs apart
            hashes[node] = [_mix(hashed + step) for step in steps]
            for output in hashes[node]:
                totals[:, regions[node]] += output
            for producer in (*_producers(node), node):  # what nobody reads any more needs no memory
                left[producer] -= producer is not node
                if left[producer] == 0:
                    hashes.pop(producer, None)
        return totals

    def _read(self, node: ir.Node, value: ir.Value | None, leaf: str, hashes: dict[ir.Node, list[_Array]]) -> _Array:
        """What a node reads, in each region that it is in."""
        entering = self._text(leaf)
        producer = None if value is None else value.producer()
        if value is None or producer is None or producer not in self._regions:
            return entering
        mine, its = self._regions[node], self._regions[producer]
        made = hashes[producer][value.index() or 0] if producer in hashes else self._text(_LATER)
        if mine is its:
            return made
        here, there = _common(mine, its)
        read = np.repeat(entering, len(mine), axis=1)
        read[:, here] = made[:, there] if producer in hashes else made
        return read

    def _text(self, text: str) -> _Array:
        if text not in self._texts:
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            self._texts[text] = np.frombuffer(digest, "<u8").astype(np.uint64).reshape(2, 1)
        return self._texts[text]


def _producers(node: ir.Node) -> Iterable[ir.Node]:
    for value in node.inputs:
        producer = None if value is None else value.producer()
        if producer is not None:
            yield producer


def _mix(numbers: _Array) -> _Array:
    """Change numbers in place, so that every bit depends on every bit."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        numbers ^= numbers >> np.uint64(shift)
        numbers *= factor
    numbers ^= numbers >> np.uint64(31)
    return numbers


def _common(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> tuple[_Places, _Places]:
    """The places in both arrays of the numbers that are in both."""
    short = min(len(one), len(other))
    if (one[:short] == other[:short]).all():  # regions around one another
        return slice(short), slice(short)
    _, here, there = np.intersect1d(one, other, assume_unique=True, return_indices=True)
    return here, there


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
