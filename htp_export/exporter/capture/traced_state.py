"""The parameters and buffers of a traced model, and which of them its Python code reads as numbers.

A trace records no operation for ``self.scale.item()``, ``if self.flag:`` or ``self.weight.data``: the
number, the branch or the tensor becomes a constant of the graph, and fits these values alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import onnx_ir as ir

from htp_export.exporter.capture.torchscript_internals import (
    constant_tensors,
    inputs_behind,
    storage_of,
)
from htp_export.format.recipes import Recipe
from htp_export.model.assumed_values import (
    ENTIRE,
    hash_of_entry,
    hashes_of_assumed,
    only_number,
)


class TracedState:
    """The entries of a model's ``state_dict`` during a trace.

    ``tensors``: name in recipes → tensor, in the order of the inputs of the traced graph.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors
        # address of the memory → the entries there; one that is a view of another shares it
        self._places: dict[int, list[str]] = {}
        for name, tensor in self._tensors.items():
            place = storage_of(tensor)
            if place:
                self._places.setdefault(place, []).append(name)
        self._read: dict[str, None] = {}

    def read(self, tensor: Any) -> None:
        """Record that Python reads the numbers of an entry, or of a tensor computed from entries alone."""
        names = self._places.get(storage_of(tensor)) or self._behind(tensor)
        self._read.update(dict.fromkeys(names))

    def _behind(self, tensor: Any) -> list[str]:
        """The entries from which alone a tensor was computed."""
        entries = [*self._tensors]
        names: list[str] = []
        for position in inputs_behind(len(entries), tensor):
            if position < 0:  # the model's own input: another example may have another number, too
                return []
            names.append(entries[position])
        return names

    def traced(self, graph: Any) -> None:
        """Record the entries that are constants of the traced graph."""
        for tensor in constant_tensors(graph):
            self._read.update(dict.fromkeys(self._places.get(storage_of(tensor), ())))

    def assumed(self, recipes: Iterable[Recipe]) -> dict[str, float | str]:
        """Entry → its numbers, if a file with tensors of these recipes fits no others."""
        assumed: dict[str, float | str] = {**hashes_of_assumed(recipes, _Adapted(self._tensors))}
        for name in self._read:
            tensor = _adapted(self._tensors[name])
            number, hashed = only_number(tensor), hash_of_entry(tensor)
            if number is not None:
                assumed[name] = number
            elif hashed is not None:
                assumed[name] = f"{ENTIRE}{hashed}"
        return assumed


class _Adapted(Mapping[str, ir.TensorProtocol]):
    """Adapters of onnx_ir for torch's tensors, made on access."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> ir.TensorProtocol:
        return _adapted(self._tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _adapted(tensor: Any) -> ir.TensorProtocol:
    from onnx_ir.tensor_adapters import TorchTensor

    return TorchTensor(tensor.detach().cpu())
