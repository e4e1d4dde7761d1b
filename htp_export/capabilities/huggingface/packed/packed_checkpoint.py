"""A quantized checkpoint as two things: packed weights by parameter, and a ``state_dict`` in float32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from htp_export.capabilities.huggingface.packed.weights import Array, Coded, Layer, Packed
from htp_export.errors import FileError

__all__ = ["PackedCheckpoint", "module_of"]


class PackedCheckpoint(Mapping[str, Array]):
    """A quantized checkpoint; as a mapping, its ``state_dict``: name → array, dequantized to float32 when it is read.

    Attributes:
        path: The folder or file.
        kind: What made it: ``gptq``, ``awq``, ...
        layers: Name of a parameter → its packed weight.
    """

    def __init__(self, path: Path, kind: str, layers: Mapping[str, Layer], others: Mapping[str, Any]) -> None:
        self.path, self.kind, self.layers, self._others = path, kind, layers, others

    def __getitem__(self, name: str) -> Array:
        """A parameter; a `KeyError` if the checkpoint has none of this name."""
        if name not in self._others:
            return self.packed(name).weight()
        array: Array = self._others[name]()
        return array if array.dtype.kind in "iub" else array.astype(np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter({**self.layers, **self._others})

    def __len__(self) -> int:
        return len({*self.layers, *self._others})

    def also(self, names: Mapping[str, str]) -> PackedCheckpoint:
        """The same with more names: name → the one that the checkpoint has."""
        layers = {name: self.layers[known] for name, known in names.items() if known in self.layers}
        others = {name: self._others[known] for name, known in names.items() if known in self._others}
        return PackedCheckpoint(self.path, self.kind, {**self.layers, **layers}, {**self._others, **others})

    def packed(self, name: str) -> Packed | Coded:
        """The packed weight of a parameter; a `FileError` if its tensors do not fit together."""
        try:
            return self.layers[name].read()
        except ValueError as error:
            raise FileError(self.path, f"module {module_of(name)!r}: {error}") from error


def module_of(name: str) -> str:
    """The module of a tensor; bitsandbytes has ``<module>.weight.absmax``."""
    return name.rpartition(".weight.")[0] or name.rpartition(".")[0]
