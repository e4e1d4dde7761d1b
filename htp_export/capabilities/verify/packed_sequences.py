"""Packed sequences of PyTorch, and their counterparts in files of the TorchScript exporter.

A ``PackedSequence`` consists of ``data``, the elements of all sequences step by step, and
``batch_sizes``, the number of sequences at each step. ONNX's recurrent operators accept padded
sequences and their lengths instead: in a file, the counterpart of ``data`` is padded, ``[step,
sequence, ...]``, and the counterpart of ``batch_sizes`` are the lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from htp_export.runtime.arrays import Array, StoredArray, from_torch


@dataclass(frozen=True, eq=False)
class PackedArray(StoredArray):
    """One tensor of a packed sequence: ``data``, or ``batch_sizes`` if not ``is_data``."""

    batch_sizes: Array
    is_data: bool

    @property
    def in_file(self) -> Array:
        """The counterpart in a file: padded with zeros, or the lengths."""
        if not self.is_data:
            return self._lengths
        mask = self._mask
        padded = np.zeros((*mask.shape, *self.array.shape[1:]), self.array.dtype)
        padded[mask] = self.array
        return padded

    def compared_with(self, actual: Array) -> tuple[Array, Array]:
        """Like `StoredArray.compared_with`; the padding is undefined, and not compared."""
        if not self.is_data:
            is_lengths = actual.shape == self._lengths.shape
            return self._lengths if is_lengths else self.array, actual
        mask = self._mask
        steps, sequences = mask.shape
        if actual.ndim != self.array.ndim + 1 or actual.shape[1] != sequences:
            return self.array, actual
        # The file may be padded to more steps than the longest sequence has.
        if actual.shape[0] < steps:
            return self.array, actual
        return self.array, actual[:steps][mask]

    @property
    def _mask(self) -> Array:
        """``[step, sequence]``: whether the sequence has this step. The longest sequence comes first."""
        return np.asarray(np.arange(int(self.batch_sizes[0])) < self.batch_sizes[:, None])

    @property
    def _lengths(self) -> Array:
        """The length of each sequence."""
        return np.asarray(self._mask.sum(0), np.int32)


def packed_by(tree: Any) -> dict[int, tuple[Array, bool]]:
    """Find packed sequences among arguments or results: ``id`` of each tensor → batch sizes, and whether it is data.

    Examples:
        >>> import torch
        >>> sequence = torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
        >>> [(sizes.tolist(), is_data) for sizes, is_data in packed_by((sequence, None)).values()]
        [([2, 1], True), ([2, 1], False)]
    """
    packed: dict[int, tuple[Array, bool]] = {}
    for sequence in _packed_in(tree):
        sizes = from_torch(sequence.batch_sizes)
        packed[id(sequence.data)] = sizes, True
        packed[id(sequence.batch_sizes)] = sizes, False
    return packed


def _packed_in(tree: Any) -> Iterator[Any]:
    """The packed sequences in tuples, lists and mappings, however deep."""
    from torch.nn.utils.rnn import PackedSequence

    if isinstance(tree, PackedSequence):
        yield tree
    elif isinstance(tree, (tuple, list, Mapping)):
        for part in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _packed_in(part)
