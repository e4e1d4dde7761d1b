"""Entries of a ``state_dict``, with the names, shapes and types of the model's parameters."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from htp_export.errors import InputError, nearest_names
from htp_export.files.data_files import DataTensor
from htp_export.format.parameters import Declared
from htp_export.format.recipes import Recipe, is_layout, operands_of, parameters_in
from htp_export.model.assumed_values import ENTIRE, hash_of_entry, only_number
from htp_export.model.hashes import same_numbers
from htp_export.model.tagged import TaggedModel
from htp_export.weights.rebuilding import recipes_of_stored
from htp_export.weights.state_entries import StateEntries

_PREFIXES = ("model.", "module.", "_orig_mod.", "base_model.model.")
"""Prefixes that a wrapper puts in front of all names: transformers' heads, DataParallel, torch.compile, PEFT."""


@dataclass(frozen=True)
class Needed:
    """The entries of the ``state_dict`` that the stored tensors of a model depend on.

    Attributes:
        recipes: Initializer → its recipe, without constants.
        names: The entries in these recipes, in order.
        kinds: Entry → its type at the export, if a stored tensor has this type.
        declared: Parameter → its module and shape in the file's metadata.
        modules: The paths of the modules.
        assumed: Entry → the number that all of its elements have to be, because an optimiser removed
            it from the graph; or the hash of its elements at the export.
    """

    recipes: Mapping[ir.Value, Recipe]
    names: tuple[str, ...]
    kinds: Mapping[str, ir.DataType]
    declared: Mapping[str, Declared]
    modules: Collection[str]
    assumed: Mapping[str, float | str]

    @classmethod
    def of(cls, tagged: TaggedModel) -> Needed:
        """Read the recipes of a model."""
        recipes = recipes_of_stored(tagged.model)
        names = dict.fromkeys(itertools.chain.from_iterable(map(parameters_in, recipes.values())))
        modules = frozenset(tagged.hierarchy)
        declared = tagged.declared or {}
        # of a part of the model, the parameters of its modules
        assumed = {
            name: number
            for name, number in tagged.assumed.items()
            if name.rpartition(".")[0] in modules
        }
        return cls(recipes, tuple(names), _kinds(recipes), declared, modules, assumed)

    def may_be_buffer(self, name: str, tensor: ir.TensorProtocol) -> bool:
        """Whether an entry can be a counter such as BatchNorm's ``num_batches_tracked``, which no node reads."""
        return not tensor.dtype.is_floating_point() and name.rpartition(".")[0] in self.modules

    @functools.cached_property
    def _names(self) -> Mapping[str, Sequence[str]]:
        """First name of a shared parameter → all its names."""
        names: dict[str, list[str]] = {}
        for each in self.declared.values():
            names.setdefault(each.first, []).append(each.name)
        return {first: all_names for first, all_names in names.items() if len(all_names) > 1}

    def same_as(self, name: str) -> list[str]:
        """Return the other names of a parameter that several modules share."""
        if name not in self.declared:
            return []
        names = self._names.get(self.declared[name].first, ())
        return [other for other in names if other != name]


@dataclass(frozen=True)
class Fitted:
    """The entries that a model needs, as far as the weights have them.

    Attributes:
        tensors: Entry → tensor, in the type that the parameter had at the export.
        origins: Entry → its name in the weights.
        missing: Needed entries that the weights do not have.
        unexpected: Entries of the weights that are no parameter of the model.
        unfit: Entry → the reason why it cannot be used: its shape or its type.
        unchanged: Entries that are known to be equal to those of the export: tensors that cannot be
            computed again stay if they depend on these alone.
        notes: Conversions and renamings of entries, one sentence each.
    """

    tensors: Mapping[str, ir.TensorProtocol]
    origins: Mapping[str, str]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    unfit: Mapping[str, str] = field(default_factory=dict)
    unchanged: Set[str] = frozenset()
    notes: tuple[str, ...] = ()


def _kinds(recipes: Mapping[ir.Value, Recipe]) -> dict[str, ir.DataType]:
    """Return the types of entries that are stored in their own type, in any layout."""
    kinds: dict[str, ir.DataType] = {}
    for value, recipe in recipes.items():
        has_type = is_layout(recipe) or _are_scales(recipe)
        if has_type and value.const_value is not None:
            kinds.update(dict.fromkeys(parameters_in(recipe), value.const_value.dtype))
    return kinds


def _are_scales(recipe: Recipe) -> bool:
    """Whether a recipe computes scales of blocks of a matrix; scales have the type of the matrix."""
    if not isinstance(recipe, list) or recipe[0] != "quantize":
        return False
    return bool(recipe[-1][0] == "scales") and all(map(is_layout, operands_of(recipe)))


def fit(entries: StateEntries, needed: Needed, *, cast: bool) -> Fitted:
    """Find the entries that a model needs, and convert them as ``load_state_dict`` does.

    Raises:
        InputError: If no entry has the name of one that the model needs.
    """
    entries, notes = _as_needed(entries, needed)
    origin_of, note = _named(entries, needed)
    tensors: dict[str, ir.TensorProtocol] = {}
    origins: dict[str, str] = {}
    missing: list[str] = []
    unfit: dict[str, str] = {}
    casts: dict[tuple[ir.DataType, ir.DataType], int] = {}
    for name in needed.names:
        origin = origin_of.get(name) or _of_tied(origin_of, needed, name)
        if origin is None:
            missing.append(name)
            continue
        tensor = entries.tensors[origin]
        declared = needed.declared.get(name)
        shape = tuple(tensor.shape.numpy())
        if declared is not None and shape != declared.shape:
            unfit[name] = (
                f"has shape {list(shape)}, and the file was exported with {list(declared.shape)}"
            )
            continue
        rival = _rival(entries, origin_of, needed, name, origin)
        if rival is not None:
            unfit[name] = f"differs from {rival!r}, and both are the same parameter of the model"
            continue
        origins[name] = origin
        wanted = needed.kinds.get(name, _usual(tensor.dtype))
        if tensor.dtype == wanted:
            tensors[name] = tensor
        elif not cast:
            unfit[name] = f"is {tensor.dtype.name}, and the file was exported with {wanted.name}"
        else:
            tensors[name] = converted(tensor, wanted)
            casts[tensor.dtype, wanted] = casts.get((tensor.dtype, wanted), 0) + 1
    lost, changed = _assumed(entries, origin_of, needed)
    missing += lost
    unfit |= changed
    known = {*needed.names, *needed.declared}
    unexpected = tuple(
        name
        for name, origin in origin_of.items()
        if name not in known and not needed.may_be_buffer(name, entries.tensors[origin])
    )
    if note:
        notes.append(note)
    for (kind, wanted), count in casts.items():
        notes.append(f"{count} entries are converted from {kind.name} to {wanted.name}")
    unchanged = _unchanged(tensors, needed)
    return Fitted(tensors, origins, tuple(missing), unexpected, unfit, unchanged, tuple(notes))


def _unchanged(tensors: Mapping[str, ir.TensorProtocol], needed: Needed) -> Set[str]:
    """Return the entries whose elements have the hash that the export recorded."""
    names: set[str] = set()
    for name, wanted in needed.assumed.items():
        if isinstance(wanted, str) and name in tensors and hash_of_entry(tensors[name]) == wanted:
            names.add(name)
    return names


def _assumed(
    entries: StateEntries, origin_of: Mapping[str, str], needed: Needed
) -> tuple[list[str], dict[str, str]]:
    """Return the parameters with an assumed value that are missing, and why others do not fit."""
    missing: list[str] = []
    unfit: dict[str, str] = {}
    for name, wanted in needed.assumed.items():
        if isinstance(wanted, str) and not wanted.startswith(ENTIRE):
            continue  # of an entry that the graph still has
        origin = origin_of.get(name) or _of_tied(origin_of, needed, name)
        if origin is None:
            missing.append(name)
        elif isinstance(wanted, str):
            if not _has_hash(entries.tensors[origin], wanted.removeprefix(ENTIRE)):
                unfit[name] = (
                    "was read by the Python code of the model at the export, which computes with its numbers: "
                    "export the new weights"
                )
        elif only_number(entries.tensors[origin]) != wanted:
            unfit[name] = (
                f"was {wanted:g} everywhere at the export, and the graph computes with this number: an optimiser "
                "removed the parameter, or the Python code of the model read it; bind the file before that "
                "optimiser, or export the new weights"
            )
    return missing, unfit


def _has_hash(tensor: ir.TensorProtocol, wanted: str) -> bool:
    """Whether the elements of an entry have a hash, in one of the types to which weights are converted."""
    kinds = dict.fromkeys((tensor.dtype, _usual(tensor.dtype), *_HALVES))
    return any(hash_of_entry(_in_type(tensor, kind)) == wanted for kind in kinds)


_HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _in_type(tensor: ir.TensorProtocol, kind: ir.DataType) -> ir.TensorProtocol:
    return tensor if tensor.dtype == kind else converted(tensor, kind)


def _usual(kind: ir.DataType) -> ir.DataType:
    """Return the assumed type of a parameter that no stored tensor has in its own type: float32."""
    return ir.DataType.FLOAT if kind.is_floating_point() else kind


def converted(tensor: ir.TensorProtocol, kind: ir.DataType) -> ir.TensorProtocol:
    """Return a tensor in another type, computed on access."""
    read = functools.partial(_converted, tensor, kind)
    return ir.LazyTensor(read, kind, ir.Shape(tensor.shape.numpy()), name=tensor.name)


def _converted(tensor: ir.TensorProtocol, kind: ir.DataType) -> ir.TensorProtocol:
    array = tensor.numpy().astype(kind.numpy())
    if isinstance(tensor, DataTensor):
        tensor.release()
    return ir.Tensor(array, dtype=kind, name=tensor.name)


def _of_tied(origin_of: Mapping[str, str], needed: Needed, name: str) -> str | None:
    """Return the entry of a shared parameter that the weights contain under one of its other names."""
    return next((origin_of[each] for each in needed.same_as(name) if each in origin_of), None)


def _rival(
    entries: StateEntries, origin_of: Mapping[str, str], needed: Needed, name: str, origin: str
) -> str | None:
    """Return another name of a shared parameter under which the weights contain other values; None without one."""
    for other in needed.same_as(name):
        second = origin_of.get(other, origin)
        if second == origin:
            continue
        one, two = entries.tensors[origin], entries.tensors[second]
        if one.dtype != two.dtype or not same_numbers(one, two):
            return other
    return None


def _as_needed(entries: StateEntries, needed: Needed) -> tuple[StateEntries, list[str]]:
    """Return the entries, or those of the model that transformers loads if only they fit, with a note."""
    if _fits(entries, needed):
        return entries, []
    converted = entries.converted()
    if converted is None or not _fits(converted, needed):
        return entries, []
    return converted, [
        "entries have the names and forms in which transformers loads the checkpoint"
    ]


def _fits(entries: StateEntries, needed: Needed) -> bool:
    """Whether the entries have all needed names, as they are or with a prefix removed or added."""
    if not _absent(entries.tensors.keys(), needed):
        return True
    return any(not _absent(names.keys(), needed) for _, names in _renamings(entries.tensors))


def _named(entries: StateEntries, needed: Needed) -> tuple[Mapping[str, str], str]:
    """Return name → entry, with a prefix removed or added if then all names fit, and a note about it."""
    unchanged = {name: name for name in entries.tensors}
    wanted = _absent(unchanged.keys(), needed)
    if not wanted:
        return unchanged, ""
    fitting = []
    for note, names in _renamings(entries.tensors):
        if not _absent(names.keys(), needed):
            fitting.append((names, note))
    if len(fitting) == 1:
        return fitting[0]
    if len(wanted) == len(needed.names):
        near = nearest_names(wanted[0], entries.tensors)
        hint = f"; nearest: {', '.join(map(repr, near))}" if near else ""
        raise InputError(
            f"{entries.source} has none of the {len(wanted)} entries that the file was exported from, "
            f"such as {wanted[0]!r}{hint}"
        )
    return unchanged, ""


def _absent(names: Set[str], needed: Needed) -> list[str]:
    """Return the needed entries that are not among some names, under any name of a shared parameter."""
    return [name for name in needed.names if names.isdisjoint((name, *needed.same_as(name)))]


def _renamings(names: Collection[str]) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield name → entry with each known prefix removed, and with it added."""
    for prefix in _PREFIXES:
        without = {name.removeprefix(prefix): name for name in names}
        if len(without) == len(names):  # otherwise two entries would have one name
            yield f"the prefix {prefix!r} of entries was removed", without
        before = {f"{prefix}{name}": name for name in names}
        yield f"the prefix {prefix!r} was put before all entries", before


def with_changes(
    fitted: Fitted, changes: Mapping[str, ir.TensorProtocol], notes: Iterable[str]
) -> Fitted:
    """Return a copy with other tensors for some entries."""
    return replace(fitted, tensors={**fitted.tensors, **changes}, notes=(*fitted.notes, *notes))
