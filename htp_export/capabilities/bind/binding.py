"""`bind`: the stored tensors of a file, computed again from the entries of another ``state_dict``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from htp_export.alignment.origin_map import renew_map
from htp_export.capabilities.bind.bound import Bound, LazyArrays, Origin
from htp_export.capabilities.bind.destinations import Destination
from htp_export.capabilities.bind.parts import Selector
from htp_export.capabilities.bind.ranges import Ranges
from htp_export.editing.equal_parameters import tell_apart
from htp_export.errors import InputError
from htp_export.files.targets import files_named_in, files_of
from htp_export.format import tags
from htp_export.format.recipes import CONSTANT, parameters_in, steps_in
from htp_export.model.model_faults import names_model_faults
from htp_export.model.recipes import recipe_of
from htp_export.model.tagged import ModelSource, TaggedModel, for_change, load, name_of
from htp_export.reporting.columns import many
from htp_export.runtime.data import Data
from htp_export.weights.fitting import Fitted, Needed, fit, with_changes
from htp_export.weights.rebuilding import Rebuilt, rebuilt
from htp_export.weights.state_entries import Weights, read_entries

_MOST_NAMED = 3
"""Entries that a message names: the result lists all."""


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
    data: Data | None = None,
    in_place_data: bool = False,
    share_weights: bool = False,
    only: Selector | None = None,
) -> Bound:
    """Load the weights of another checkpoint of the same model into an exported file.

    The file may have been optimised, quantized, pruned, cut or renamed since its export: every
    stored tensor has a recipe, the steps by which it was computed from the ``state_dict``, and these
    are repeated. The tensor is then equal, bit for bit, to that of a new export of the new weights
    and the same steps; or its entries are in ``unbound``, with the reason.

    Masks of pruning, other constants, and without ``data`` measured ranges of activations belong to
    the old weights and stay; ``notes`` list them.

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
        data: Inputs of runs, as for `quantize`: measure the ranges of activations again, with the
            new weights, as ``quantize`` measured them. Ranges for which that is not possible are in
            ``unmeasured``.
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
            ``in_place_data``, a tensor within the ONNX file would have other values; or the ``data`` do
            not fit the file.
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
    _check_arguments(
        weights, check, only, has_other=bool(in_place_data or share_weights or adapters)
    )
    _check_data(data, only, in_place_data=in_place_data)
    destination = Destination.of(
        model,
        output,
        reads=[*_files_read(weights, adapters), *files_named_in([data])],
        in_place_data=in_place_data,
        share_weights=share_weights,
        only=only,
    )
    tagged = _own_copy(model)
    needed = Needed.of(tagged)
    entries = read_entries(weights)
    destination.check(entries.tensors)
    fitted, adapted = _adapted(fit(entries, needed, cast=cast), adapters)
    made = rebuilt(tagged, fitted.tensors, fitted.unfit, fitted.unchanged)
    is_fixed = in_place_data or only is not None  # the ONNX file stays as it is
    own = () if is_fixed else tell_apart(tagged, made.unknown)
    if own:
        needed = Needed.of(tagged)
        made = rebuilt(tagged, fitted.tensors, fitted.unfit, fitted.unchanged)
    tensors, unbound = made.tensors, _unbound(needed, fitted, made)
    if strict:
        _refuse(fitted, unbound)
    tensors = destination.placed(tagged, needed, tensors, fitted.tensors)
    old = _put(tensors)
    tagged.refresh()
    ranges = Ranges.of(tagged, fitted.tensors, data, name_of(model, "the model"))
    tensors = {**tensors, **ranges.tensors}
    old = {**_put(ranges.tensors), **old}
    renew_map(tagged.model, had_map=tags.MAP in tagged.model.metadata_props)
    if check is not None:
        _check(weights, check, tagged)
    result = _result(tagged, needed, fitted, tensors, unbound, ranges)
    if own:
        note = f"{many(len(own), 'initializer')} are new: parameters that were equal at the export differ"
        result = replace(result, notes=(*result.notes, note))
    notes = destination.write(tagged, needed, tensors, old, entries.tensors, is_same_graph=not own)
    return replace(
        result,
        adapted=adapted,
        file=destination.output,
        origin=Origin.of(weights, adapters),
        notes=(*result.notes, *notes),
    )


def _check_arguments(
    weights: Weights, check: tuple[Any, ...] | None, only: Selector | None, *, has_other: bool
) -> None:
    """Refuse arguments that cannot be combined.

    ``has_other``: whether an argument was given that ``only`` does not support.
    """
    if only is not None and (has_other or check is not None):
        raise InputError(
            "only writes a part of the weights: leave in_place_data, share_weights, adapters and check out"
        )
    if check is not None and not hasattr(weights, "forward"):
        raise InputError("check runs the module that has the weights: give an nn.Module as weights")


def _check_data(data: Data | None, only: Selector | None, *, in_place_data: bool) -> None:
    """Refuse new ranges where the ONNX file, which contains them, is not written by this call."""
    if data is not None and (only is not None or in_place_data):
        option = "in_place_data" if in_place_data else "only"
        raise InputError(
            f"data change the ranges of activations, which are in the ONNX file, and {option} leaves it as it is"
        )


def _put(
    tensors: Mapping[ir.Value, ir.TensorProtocol],
) -> dict[ir.Value, ir.TensorProtocol | None]:
    """Give initializers new contents, in place; return initializer → its tensor before."""
    old = {value: value.const_value for value in tensors}
    for value, tensor in tensors.items():
        value.const_value = tensor
    return old


def _own_copy(model: ModelSource) -> TaggedModel:
    """Return a model that may be changed; its functions stay, as they contain no stored tensors."""
    tagged = load(model)
    tagged.require_exact_tags()
    return for_change(tagged, model)


def _adapted(
    fitted: Fitted, adapters: Mapping[str, float] | None
) -> tuple[Fitted, tuple[str, ...]]:
    """Return the entries with the changes of adapters, and the names of those that they change."""
    if not adapters:
        return fitted, ()
    from htp_export.capabilities.lora.entries import add_to_entries

    changes, notes = add_to_entries(fitted.tensors, adapters)
    changed = tuple(name for name in fitted.tensors if name in changes)
    return with_changes(fitted, changes, notes), changed


def _files_read(weights: Weights, adapters: Mapping[str, float] | None) -> list[Path]:
    """Return the files of a checkpoint and of adapters, which the output must not replace."""
    files: list[Path] = []
    for source in (weights, *(adapters or ())):
        if isinstance(source, str | os.PathLike):
            files.extend(files_of(source))
    return files


def _unbound(needed: Needed, fitted: Fitted, made: Rebuilt) -> dict[str, str]:
    """Return the reason for each entry that cannot be bound."""
    unbound: dict[str, str] = {}
    for value, why in made.unknown.items():
        names = list(parameters_in(needed.recipes[value]))
        # A recipe without entries keeps the name of the tensor.
        unbound.update(dict.fromkeys(names or [f"initializer {value.name!r}"], why))
    for name in needed.assumed.keys() & fitted.unfit.keys():
        unbound.setdefault(name, f"{name!r} {fitted.unfit[name]}")
    return unbound


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
    ranges: Ranges,
) -> Bound:
    notes = list(fitted.notes)
    masked = 0
    recipes = {value: recipe_of(value) for value in tensors}
    for value in tensors:
        masked += any(made[0] == "masked" for made in steps_in(recipes[value]))
    if masked:
        notes.append(
            f"{many(masked, 'tensor')} keep the zeros that prune chose for the old weights"
        )
    notes.extend(ranges.notes)
    # scales and zero points of activations follow from the data
    computed = [tensor for value, tensor in tensors.items() if recipes[value] != CONSTANT]
    return Bound(
        tensors=len(computed),
        bytes=sum(tensor.nbytes for tensor in computed),
        missing=fitted.missing,
        unexpected=fitted.unexpected,
        unbound=unbound,
        measured=ranges.measured,
        unmeasured=ranges.unmeasured,
        notes=tuple(notes),
        arrays=LazyArrays(tensors),
        recipes={str(value.name): recipe for value, recipe in recipes.items()},
        model=tagged.model,
    )


def _check(module: Any, args: tuple[Any, ...], tagged: TaggedModel) -> None:
    """Refuse a file with a module that differs from the one in PyTorch."""
    from htp_export.capabilities.verify.verifying import verify

    found = verify(module, tagged.model, args=args)
    if not found.ok:
        raise InputError(f"check: {found.summary}")
