"""Packed sequences in PyTorch, and what a file of the TorchScript exporter has in their place.

A ``PackedSequence`` has the steps of all sequences one after another, ``data``, and how many
sequences each step has, ``batch_sizes``. The recurrent operators of ONNX take padded sequences and
their lengths: the exporter leaves ``data`` padded, ``[step, sequence, ...]``, and has the lengths
in place of ``batch_sizes``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from htp_export.runtime.arrays import Array, StoredArray, from_torch


@dataclass(frozen=True, eq=False)
class PackedArray(StoredArray):
    """A tensor of a packed sequence: its data, or its batch sizes."""

    batch_sizes: Array
    is_data: bool

    @property
    def in_file(self) -> Array:
        """The tensor as a file has it: zeros after the end of a sequence, or the lengths."""
        if not self.is_data:
            return self._lengths
        padded = np.zeros(
            (len(self.batch_sizes), int(self.batch_sizes[0]), *self.array.shape[1:]),
            self.array.dtype,
        )
        padded[self._is_step] = self.array
        return padded

    def compared_with(self, actual: Array) -> tuple[Array, Array]:
        """As of `StoredArray`. What lies after the end of a sequence is open, and is not compared."""
        if not self.is_data:
            return (
                (self._lengths, actual)
                if actual.shape == self._lengths.shape
                else (self.array, actual)
            )
        steps, sequences = self._is_step.shape
        is_padded = (
            actual.ndim == self.array.ndim + 1
            and actual.shape[0] >= steps
            and actual.shape[1] == sequences
        )
        return self.array, actual[:steps][self._is_step] if is_padded else actual

    @property
    def _is_step(self) -> Array:
        """Whether a sequence has a step: ``[step, sequence]``, the longest sequence first."""
        return np.asarray(np.arange(int(self.batch_sizes[0])) < self.batch_sizes[:, None])

    @property
    def _lengths(self) -> Array:
        return np.asarray(self._is_step.sum(0), np.int32)


def packed_by(tree: Any) -> dict[int, tuple[Array, bool]]:
    """Return ``id`` of each tensor of the packed sequences among arguments or results → batch sizes, and if it is data.

    Examples:
        >>> import torch
        >>> sequence = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
        >>> [(sizes.tolist(), is_data) for sizes, is_data in packed_by((sequence, None)).values()]
        [([2, 1], True), ([2, 1], False)]
    """
    found: dict[int, tuple[Array, bool]] = {}
    for sequence in _packed_in(tree):
        sizes = from_torch(sequence.batch_sizes)
        found[id(sequence.data)] = sizes, True
        found[id(sequence.batch_sizes)] = sizes, False
    return found


def _packed_in(tree: Any) -> Iterator[Any]:
    from torch.nn.utils.rnn import PackedSequence

    if isinstance(tree, PackedSequence):
        yield tree
    elif isinstance(tree, (tuple, list, Mapping)):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _packed_in(part)
