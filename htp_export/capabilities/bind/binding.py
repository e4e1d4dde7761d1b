"""`bind`: the stored tensors of a file, computed again from the entries of another ``state_dict``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import onnx_ir as ir

from htp_export.alignment.origin_map import renew_map
from htp_export.capabilities.bind.data_alone import DataAlone
from htp_export.capabilities.bind.engine_maps import shared_initializers, updatable_tensors
from htp_export.capabilities.bind.entries_as_they_are import (
    as_they_are,
    check_referring,
    write_referring,
)
from htp_export.capabilities.bind.parts import Parts, Selector
from htp_export.errors import InputError
from htp_export.files.model_files import has_external_data, write_model
from htp_export.files.targets import check_target, files_of
from htp_export.format import tags
from htp_export.format.recipes import Recipe, parameters_in, steps_in
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource, TaggedModel, TaggedResult, for_change, load
from htp_export.reporting.columns import many
from htp_export.runtime.arrays import Array
from htp_export.weights.fitting import Fitted, Needed, fit
from htp_export.weights.rebuilding import rebuilt
from htp_export.weights.state_entries import Weights, read_entries

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


_MOST_NAMED = 3
"""Entries that a message names: the result lists all."""


class LazyArrays(Mapping[str, Array]):
    """Initializer → its new array, computed on each access, or read from the file that was written."""

    def __init__(self, values: Iterable[ir.Value]) -> None:
        self._values = {str(value.name): value for value in values}

    def __getitem__(self, name: str) -> Array:
        tensor = self._values[name].const_value
        assert tensor is not None
        return np.asarray(tensor.numpy())

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
        return f"{many(self.tensors, 'tensor')} computed from the new weights{kept}"

    def map(self, form: MapFormat = "recipes", shared_with: Bound | None = None) -> dict[str, Any]:
        """Return a map of the stored tensors, for programs that load weights into an engine themselves.

        Args:
            form: ``"recipes"``: initializer → its recipe (``docs/format.md``). ``"tensorrt"``:
                initializer → the entries that it depends on; `arrays` has the values for
                ``Refitter.set_named_weights``. ``"safetensors"``: initializer → entry, for
                initializers that are equal to an entry. ``"genai"``: ``shared_initializers`` of
                ONNX Runtime GenAI, for tensors in the data file of the output. ``"qti"``: the names
                of updatable tensors for Qualcomm's tools; with adapters, of those that they change.
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


@names_model_faults("model")
def bind(
    model: ModelSource,
    weights: Weights,
    output: str | os.PathLike[str] | None = None,
    *,
    adapters: Mapping[str, float] | None = None,
    strict: bool = True,
    cast: bool = True,
    check: tuple[Any, ...] | None = None,
    in_place_data: bool = False,
    share_weights: bool = False,
    only: Selector | None = None,
) -> Bound:
    """Load the weights of another checkpoint of the same model into an exported file.

    The file may have been optimised, quantized, pruned, cut or renamed since its export: every
    stored tensor has a recipe, the steps by which it was computed from the ``state_dict``, and these
    are repeated. The tensor is then equal, bit for bit, to that of a new export of the new weights
    and the same steps; or its entries are in ``unbound``, with the reason.

    Measured ranges of activations, masks of pruning and other constants belong to the old weights
    and stay; ``notes`` list them.

    Thread-safe, also for calls on the same model.

    Args:
        model: The file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
        weights: A ``state_dict``, an ``nn.Module``, a safetensors file, its index, a folder with one
            of these, a checkpoint of GPTQ, AWQ or bitsandbytes, a GGUF file, or a hub id.
        output: The file to write.
        adapters: Folder of PEFT, or file of ONNX Runtime's adapter format → factor: each adapter is
            added to the weights so many times, always from these.
        strict: Raise an error in place of keeping old values.
        cast: Convert entries of another floating-point type, as ``load_state_dict`` does.
        check: Example inputs: run the module ``weights`` on them, and compare every module of the
            file with it, as `htp_export.verify` does.
        in_place_data: Replace the data file of ``model`` alone: its ONNX file stays byte for byte as
            it is, so that engines that were compiled for it are found again. With ``output``, write
            a file that has all tensors for this in its data file, also small ones.
        share_weights: Write a file without these weights: tensors that are entries as they are refer
            to the safetensors files, which are linked into the folder of ``output``, or copied; all
            others are in its data file.
        only: Selector of modules: write their weights alone, into a data file beside ``output``.
            ``output`` is written by the run after which the weights of all modules are there.

    Returns:
        The model with the new weights, and the entries that could not be bound.

    Raises:
        InputError: With ``strict``, an entry is missing, has another shape, or cannot be bound; no
            entry has a name that fits; ``check`` finds a module that differs; or with
            ``in_place_data``, a tensor within the ONNX file would have other values.
        UntaggedModelError: The model has no tags.
        FileError: A file cannot be read or written; existing files are unchanged.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU()).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 8),), verbose=False)
        >>> half = htp_export.quantize(program, "fp16").model
        >>> tuned = {name: 2 * tensor for name, tensor in net.state_dict().items()}
        >>> bound = htp_export.bind(half, tuned)
        >>> bound.summary, sorted(bound.arrays)
        ('2 tensors computed from the new weights', ['0.bias', '0.weight'])
        >>> bool((bound.arrays["0.bias"] == tuned["0.bias"].half().numpy()).all())
        True
    """
    if only is not None and (in_place_data or share_weights or adapters or check is not None):
        raise InputError(
            "only writes a part of the weights: leave in_place_data, share_weights, adapters and check out"
        )
    alone = DataAlone.of(model, output) if in_place_data else None
    if alone is None:
        check_target(output, reads=_files_read(weights, adapters))
    if check is not None and not hasattr(weights, "forward"):
        raise InputError("check runs the module that has the weights: give an nn.Module as weights")
    tagged = _own_copy(model)
    external = has_external_data(tagged.model)
    needed = Needed.of(tagged)
    entries = read_entries(weights)
    if share_weights:
        check_referring(output, entries.tensors, in_place_data=in_place_data)
    fitted, adapted = _adapted(fit(entries, needed, cast=cast), needed, adapters)
    tensors, unbound = _made(tagged, needed, fitted)
    if strict:
        _refuse(fitted, unbound)
    if external or share_weights or only is not None:
        tensors = as_they_are(tensors, needed.recipes, fitted.tensors)
    old = {value: value.const_value for value in tensors}
    for value, tensor in tensors.items():
        value.const_value = tensor
    renew_map(tagged.model, had_map=tags.MAP in tagged.model.metadata_props)
    tagged.refresh()
    bound = replace(
        _result(tagged, needed, fitted, tensors, unbound),
        adapted=adapted,
        file=None if output is None else Path(output),
        origin=Origin.of(weights, adapters),
    )
    if check is not None:
        _check(weights, check, tagged)
    notes: tuple[str, ...] = ()
    if alone is not None:
        alone.write(tensors, old)
    elif only is not None:
        parts = Parts.of(model, output, needed, tensors, entries.tensors)
        notes = (parts.write(only, tagged),)
    elif share_weights and output is not None:
        notes = write_referring(tagged.model, Path(output), tensors.values())
    elif output is not None:
        outside = tensors.values() if in_place_data else ()
        write_model(tagged.model, output, True if external or outside else None, outside=outside)
    return replace(bound, notes=(*bound.notes, *notes))


def _own_copy(model: ModelSource) -> TaggedModel:
    """Return a model that may be changed; its functions stay, as they contain no stored tensors."""
    tagged = load(model)
    tagged.require_exact_tags()
    return for_change(tagged, model)


def _adapted(
    fitted: Fitted, needed: Needed, adapters: Mapping[str, float] | None
) -> tuple[Fitted, tuple[str, ...]]:
    """Return the entries with the changes of adapters, and the names of those that they change."""
    if not adapters:
        return fitted, ()
    from htp_export.capabilities.bind.adapters import with_adapters

    changed = with_adapters(fitted, needed, adapters)
    names = [name for name in fitted.tensors if changed.tensors[name] is not fitted.tensors[name]]
    return changed, tuple(names)


def _files_read(weights: Weights, adapters: Mapping[str, float] | None) -> list[Path]:
    """Return the files of a checkpoint and of adapters, which the output must not replace."""
    files: list[Path] = []
    for source in (weights, *(adapters or ())):
        if isinstance(source, str | os.PathLike):
            files.extend(files_of(source))
    return files


def _made(
    tagged: TaggedModel, needed: Needed, fitted: Fitted
) -> tuple[Mapping[ir.Value, ir.TensorProtocol], dict[str, str]]:
    """Return the new tensors, and for each entry that cannot be bound the reason."""
    made = rebuilt(tagged, fitted.tensors, fitted.unfit)
    unbound: dict[str, str] = {}
    for value, why in made.unknown.items():
        names = list(parameters_in(needed.recipes[value]))
        # A recipe without entries keeps the name of the tensor.
        unbound.update(dict.fromkeys(names or [f"initializer {value.name!r}"], why))
    return made.tensors, unbound


def _refuse(fitted: Fitted, unbound: Mapping[str, str]) -> None:
    """Refuse weights from which some stored tensor cannot be computed."""
    if fitted.missing:
        listed = ", ".join(map(repr, fitted.missing[:_MOST_NAMED]))
        more = f" and {len(fitted.missing) - _MOST_NAMED} more" * (
            len(fitted.missing) > _MOST_NAMED
        )
        raise InputError(
            f"the weights have no {listed}{more}, that the file was exported from; strict=False keeps the old values"
        )
    if unbound:
        name, why = next(iter(unbound.items()))
        more = f", and {len(unbound) - 1} more entries" * (len(unbound) > 1)
        raise InputError(
            f"{name!r} cannot be bound{more}: {why}; strict=False keeps the old values"
        )


def _result(
    tagged: TaggedModel,
    needed: Needed,
    fitted: Fitted,
    tensors: Mapping[ir.Value, ir.TensorProtocol],
    unbound: Mapping[str, str],
) -> Bound:
    notes = list(fitted.notes)
    masked = 0
    for value in tensors:
        masked += any(made[0] == "masked" for made in steps_in(needed.recipes[value]))
    if masked:
        notes.append(
            f"{many(masked, 'tensor')} keep the zeros that prune chose for the old weights"
        )
    ranges = sum(node.op_type == "QuantizeLinear" for node in tagged.nodes)
    if ranges:
        notes.append(
            f"ranges of activations at {many(ranges, 'place')} are those of the old weights; to measure them again, "
            "give quantize the file as it was before, the data and these weights"
        )
    return Bound(
        len(tensors),
        sum(tensor.nbytes for tensor in tensors.values()),
        fitted.missing,
        fitted.unexpected,
        unbound,
        tuple(notes),
        LazyArrays(tensors),
        {str(value.name): needed.recipes[value] for value in tensors},
        model=tagged.model,
    )


def _check(module: Any, args: tuple[Any, ...], tagged: TaggedModel) -> None:
    """Refuse a file with a module that differs from the one in PyTorch."""
    from htp_export.capabilities.verify.verifying import verify

    found = verify(module, tagged.model, args=args)
    if not found.ok:
        raise InputError(f"check: {found.summary}")
