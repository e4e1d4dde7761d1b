"""The hashes of all regions of a model, computed together.

A node has a hash for each region that it is in, because what enters a region counts as such and not with its producer.
There are as many of these as nodes times levels, so those of a node are one array.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from htp_export.model.graph_facts import GraphFacts
from htp_export.model.structural_hash import LATER, Hasher

__all__ = ["RegionDigests"]

_Array: TypeAlias = np.ndarray[Any, np.dtype[np.uint64]]
_Places: TypeAlias = slice | np.ndarray[Any, np.dtype[np.int64]]

_ODD = np.array([[0x9E3779B97F4A7C15], [0xC2B2AE3D27D4EB4F]], np.uint64)
_FACTORS = np.array(
    [[[0xBF58476D1CE4E5B9], [0x94D049BB133111EB]], [[0xFF51AFD7ED558CCD], [0xC4CEB9FE1A85EC53]]], np.uint64
)
"""Two lanes of 64 bits; the constants are those of splitmix64 and of MurmurHash3."""


class RegionDigests:
    """Module path → the hash of its region, the same in every process; ``""`` is the whole model.

    Args:
        facts: The model.
        hasher: The hashes of its nodes.
    """

    def __init__(self, facts: GraphFacts, hasher: Hasher) -> None:
        self._index, self._hasher = facts.tagged.index, hasher
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
            hashes[node] = [_mix(hashed + step) for step in self._steps(len(node.outputs))]
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
        made = hashes[producer][value.index() or 0] if producer in hashes else self._text(LATER)
        if mine is its:
            return made
        here, there = _common(mine, its)
        read = np.repeat(entering, len(mine), axis=1)
        read[:, here] = made[:, there] if producer in hashes else made
        return read

    def _steps(self, count: int) -> list[_Array]:
        """Numbers that tell the outputs of a node apart."""
        return [self._text(f"output {place}") for place in range(count)]

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
