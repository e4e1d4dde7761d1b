"""The result of `bind`: the new tensors, the entries that are not bound, and maps for engines."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.bind.engine_maps import shared_initializers, updatable_tensors
from htp_export.errors import InputError
from htp_export.format.recipes import Recipe, parameters_in
from htp_export.model.tagged import TaggedResult
from htp_export.reporting.columns import many
from htp_export.runtime.arrays import Array
from htp_export.weights.state_entries import Weights

MapFormat: TypeAlias = Literal["recipes", "tensorrt", "safetensors", "genai", "qti"]
"""The forms of `Bound.map`."""


@dataclass(frozen=True)
class Origin:
    """The origin of the new values: equal origins and equal recipes make equal tensors.

    Attributes:
        weights: The ``state_dict`` or module itself, or the name of the checkpoint.
        adapters: Adapter → factor.
    """

    weights: Any
    adapters: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, weights: Weights, adapters: Mapping[str, float] | None) -> Origin:
        """The origin of the arguments of `bind`."""
        if isinstance(weights, str | os.PathLike):
            path = Path(weights)
            weights = str(path.resolve()) if path.exists() else str(weights)
        return cls(weights, dict(adapters or {}))

    def is_that_of(self, other: Origin) -> bool:
        """Whether two origins are the same."""
        if isinstance(self.weights, str) or isinstance(other.weights, str):
            return self.weights == other.weights and self.adapters == other.adapters
        return self.weights is other.weights and self.adapters == other.adapters


class LazyArrays(Mapping[str, Array]):
    """Initializer → its new array, computed on each access, or read from the file that was written."""

    def __init__(self, values: Iterable[ir.Value]) -> None:
        self._values = {str(value.name): value for value in values}

    def __getitem__(self, name: str) -> Array:
        tensor = self._values[name].const_value
        assert tensor is not None
        return np.ascontiguousarray(tensor.numpy()).reshape(tensor.shape.numpy())

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __deepcopy__(self, _memo: dict[int, object]) -> LazyArrays:
        """Return the mapping itself: it is read-only, and computes a new array on each access."""
        return self


@dataclass(frozen=True)
class Bound(TaggedResult):
    """The result of `htp_export.bind`.

    Attributes:
        tensors: Number of stored tensors with new values.
        bytes: Their size.
        missing: Entries that the file was exported from and that are not in the weights.
        unexpected: Entries of the weights that no tensor of the file depends on.
        unbound: Entry → the reason why the tensors that depend on it keep their old values.
        measured: Number of tensors whose ranges were measured with the new weights.
        unmeasured: Scale of an activation → the reason why its range could not be measured again;
            empty without ``data``.
        notes: Conversions and renamings of entries, and constants that still belong to the old weights.
        arrays: Initializer → new array, computed when it is read, as ONNX Runtime's
            ``add_external_initializers`` and TensorRT's ``Refitter`` take them.
        recipes: Initializer → how it is made of entries.
        adapted: Entries that adapters changed.
        file: The file that was written.
        origin: The origin of the new values.
        model: The model.
    """

    tensors: int
    bytes: int
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    unbound: Mapping[str, str]
    measured: int = 0
    unmeasured: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    arrays: Mapping[str, Array] = field(repr=False, default_factory=dict)
    recipes: Mapping[str, Recipe] = field(repr=False, default_factory=dict)
    adapted: tuple[str, ...] = field(repr=False, default=())
    file: Path | None = field(repr=False, default=None)
    origin: Origin = field(repr=False, default=Origin(None))
    model: ir.Model = field(repr=False, kw_only=True)

    @property
    def summary(self) -> str:
        """The result in one line."""
        left = len(self.unbound)
        kept = f"; entries that are not bound: {left:,}" if left else ""
        ranges = f"; {many(self.measured, 'range')} of activations measured again" * bool(
            self.measured
        )
        return f"{many(self.tensors, 'tensor')} computed from the new weights{ranges}{kept}"

    def map(self, form: MapFormat = "recipes", shared_with: Bound | None = None) -> dict[str, Any]:
        """Return a map of the stored tensors, for programs that load weights into an engine themselves.

        Args:
            form: ``"recipes"``: initializer → its recipe (``docs/format.md``). ``"tensorrt"``:
                initializer → the entries that it depends on; `arrays` has the values for
                ``Refitter.set_named_weights``. ``"safetensors"``: initializer → entry, for
                initializers that are equal to an entry. ``"genai"``: ``shared_initializers`` of
                ONNX Runtime GenAI, for tensors in the data file of the output. ``"qti"``: the names
                of updatable tensors for Qualcomm's tools; with adapters, of the tensors that they change.
            shared_with: For ``"genai"``: another bound file in the same folder. Only tensors that
                both have are listed: of the same name, shape and type, with equal recipes, from the
                same weights.

        Raises:
            InputError: There is no such form; or for ``"genai"``, no tensor can be shared.

        Examples:
            >>> import torch, htp_export
            >>> net = torch.nn.Linear(2, 2).eval()
            >>> bound = htp_export.bind(htp_export.export(net, (torch.ones(1, 2),), verbose=False), net)
            >>> bound.map("tensorrt")["weight"], bound.map("qti")
            (['weight'], {'lora_weight_list': ['weight', 'bias']})
        """
        if shared_with is not None and form != "genai":
            raise InputError(f"shared_with is for the map 'genai', not for {form!r}")
        if form == "recipes":
            return dict(self.recipes)
        if form == "tensorrt":
            return {
                name: [*dict.fromkeys(parameters_in(each))] for name, each in self.recipes.items()
            }
        if form == "safetensors":
            return {name: each for name, each in self.recipes.items() if isinstance(each, str)}
        if form == "genai":
            names = self.recipes if shared_with is None else self._shared(shared_with)
            return shared_initializers(self.file, names)
        if form == "qti":
            return updatable_tensors(self.recipes, self.adapted)
        known = ", ".join(get_args(MapFormat))
        raise InputError(f"there is no map {form!r}; there are {known}")

    def _shared(self, other: Bound) -> list[str]:
        """The initializers that another file has with the same contents."""
        if not self.origin.is_that_of(other.origin):
            raise InputError("genai: the files were bound to different weights")
        folders = {None if each.file is None else each.file.parent for each in (self, other)}
        if len(folders) > 1:
            raise InputError("genai: both files have to be in the same folder")
        shared: list[str] = []
        for name, recipe in self.recipes.items():
            if other.recipes.get(name) == recipe and self._kind(name) == other._kind(name):
                shared.append(name)
        if not shared:
            raise InputError(
                "genai: the files have no initializer of one name and recipe in common"
            )
        return shared

    def _kind(self, name: str) -> tuple[ir.DataType, tuple[int, ...]] | None:
        """The type and the shape of an initializer of the main graph."""
        value = self.model.graph.initializers.get(name)
        tensor = None if value is None else value.const_value
        return None if tensor is None else (tensor.dtype, tuple(tensor.shape.numpy()))
