"""`tap` and `untap`: inputs and outputs of modules as outputs of the file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import onnx_ir as ir

from htp_export.editing.edit import ROOT, Edit
from htp_export.editing.flattening import read_for_change
from htp_export.editing.outputs import add_output, lift, remove_outputs
from htp_export.errors import InputError
from htp_export.files.model_files import write_model
from htp_export.files.targets import check_target
from htp_export.format import tags
from htp_export.format.model_metadata import Tap, write_taps
from htp_export.model.model_faults import names_model_faults
from htp_export.model.module_facts import type_and_shape
from htp_export.model.module_tensors import ModuleTensor
from htp_export.model.tagged import ModelSource, TaggedModel, TaggedResult
from htp_export.reporting.columns import Column, many
from htp_export.reporting.result import Table

Places: TypeAlias = str | Sequence[str] | Mapping[str, str | Sequence[str]]
"""A selector of tensors, ``encoder.layer.*:out``; or name → selector."""


@dataclass(frozen=True)
class TappedTensor:
    """An output that was added, or an input.

    Attributes:
        name: Its name.
        places: The tensors of modules that it gives, or that it is added to, as selectors.
        kind: Its type and shape: ``"FLOAT[batch,16]"``.
    """

    name: str
    places: tuple[str, ...]
    kind: str

    @classmethod
    def of(cls, value: ir.Value, places: Sequence[ModuleTensor]) -> TappedTensor:
        """The same of a value of the graph."""
        return cls(str(value.name), tuple(place.place for place in places), type_and_shape(value))


TAP_COLUMNS: tuple[Column[TappedTensor], ...] = (
    Column("name", "name", right=False),
    Column("kind", "type", right=False),
    Column("places", "of", text=", ".join, right=False),
)


@dataclass(frozen=True)
class Tapped(TaggedResult):
    """The result of `tap`, `untap` and `steer`.

    Attributes:
        tensors: The outputs or inputs that were added, or removed.
        said: What was done, in one line.
        model: The model.
        file: The file that was written; None if there is none.
    """

    tensors: tuple[TappedTensor, ...]
    said: str = field(repr=False)
    model: ir.Model = field(repr=False)
    file: Path | None = None

    @property
    def summary(self) -> str:
        """What was done, in one line."""
        return self.said + (f" -> {self.file}" if self.file else "")

    def table(self) -> Table | None:
        """The outputs or inputs, a line each."""
        return (TAP_COLUMNS, self.tensors) if self.tensors else None


@names_model_faults("model")
def tap(
    model: ModelSource,
    places: Places,
    output: str | os.PathLike[str] | None = None,
    *,
    concat: int | None = None,
    share_weights: bool = False,
) -> Tapped:
    """Make inputs and outputs of modules outputs of the file; nothing else of it changes.

    A place is ``PATH:in`` or ``PATH:out``: what the module's call took or gave in PyTorch, exactly,
    as the export wrote it down. ``PATH`` is a selector; ``PATH:in[hidden_states]`` and
    ``PATH:out[1]`` name an argument of ``forward`` and a position among its results, without which
    it is the first; ``PATH#2:out`` is the third call, without which each call has an output. See
    ``docs/taps.md``.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``;
            not changed.
        places: Places, for outputs that are called as they are; or name of an output → one place,
            or with ``concat`` several.
        output: The file to write.
        concat: The axis along which the tensors of a name are put together.
        share_weights: Leave external weights in the data file of another model in the folder of
            ``output``, and write no copy. If that file changes, ``output`` cannot be read any more.

    Returns:
        The model, and its new outputs.

    Raises:
        SelectorError: A place cannot be read, or matches no module, call or tensor.
        InputError: The file has no such tensor, and the message says which module took it and what
            to do; a name is there already; or tensors cannot be put together.
        UntaggedModelError: The model has no tags of htp_export.
        FileError: A file cannot be read or written; existing files are unchanged.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 4),), verbose=False)
        >>> print(*[(each.name, each.kind) for each in htp_export.tap(program, "*:out").tensors])
        ('0:out', 'FLOAT[2,3]') ('1:out', 'FLOAT[2,3]')
        >>> both = htp_export.tap(program, {"hidden": ["1:in", "1:out"]}, concat=-1)
        >>> [(value.name, str(value.shape)) for value in both.model.graph.outputs]
        [('relu', '[2,3]'), ('hidden', '[2,6]')]
    """
    check_target(output)
    tagged = read_for_change(model)
    wanted = named_places(tagged, places)
    _check_joins(wanted, given=isinstance(places, Mapping), joins=concat is not None)
    taps, added = dict(tagged.taps), list[TappedTensor]()
    with Edit(tagged) as edit:
        sources = {
            name: [_source(edit, tensor) for tensor in listed] for name, listed in wanted.items()
        }
        for name, listed in wanted.items():
            values = [value for value, _ in sources[name]]
            if len(values) == 1:
                result = add_output(edit, values[0], name, _typed(tagged, values[0]))
            else:
                result = _concatenated(edit, name, values, concat or 0)
            lifted = [name_of_lifted for _, made in sources[name] for name_of_lifted in made]
            taps[name] = Tap(tuple(tensor.place for tensor in listed), (name, *lifted))
            added.append(TappedTensor.of(result, listed))
    write_taps(tagged.model.metadata_props, taps)
    said = f"{many(len(added), 'output')} added"
    return written(tagged, added, said, output, share_weights=share_weights)


@names_model_faults("model")
def untap(
    model: ModelSource,
    names: str | Sequence[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    share_weights: bool = False,
) -> Tapped:
    """Remove outputs that `tap` added, and the nodes that only they need: the graph is what it was before.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model, as for `tap`.
        names: The outputs; None for all taps.
        output: The file to write.
        share_weights: As for `tap`.

    Returns:
        The model, and the outputs that were removed.

    Raises:
        InputError: An output is no tap, or there is none.
        FileError: A file cannot be read or written; existing files are unchanged.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
        >>> tapped = htp_export.tap(htp_export.export(net, (torch.randn(2, 4),), verbose=False), "0:out")
        >>> [value.name for value in htp_export.untap(tapped).model.graph.outputs]
        ['relu']
    """
    check_target(output)
    tagged = read_for_change(model)
    taps = dict(tagged.taps)
    gone = list(taps) if names is None else [names] if isinstance(names, str) else list(names)
    if unknown := [name for name in gone if name not in taps]:
        listed = ", ".join(map(repr, taps)) or "none"
        raise InputError(f"output {unknown[0]!r} is no tap of the model; it has {listed}")
    if not gone:
        raise InputError("the model has no taps")
    values = {value.name: value for value in tagged.model.graph.outputs}
    removed = [TappedTensor(name, taps[name].places, type_and_shape(values[name])) for name in gone]
    kept = {name for other, tap in taps.items() if other not in gone for name in tap.made}
    remove_outputs(
        tagged.model, gone, [name for each in gone for name in taps[each].made if name not in kept]
    )
    write_taps(
        tagged.model.metadata_props, {name: tap for name, tap in taps.items() if name not in gone}
    )
    said = f"{many(len(removed), 'output')} removed"
    return written(tagged, removed, said, output, share_weights=share_weights)


def named_places(
    tagged: TaggedModel, places: Places, suffix: str = ""
) -> dict[str, list[ModuleTensor]]:
    """Name → the tensors of its places; a name that was not given is the place itself, and the suffix.

    Raises:
        InputError: If there is none, or a name is that of another tensor.
    """
    if isinstance(places, Mapping):
        wanted = {str(name): tagged.select_tensors(selector) for name, selector in places.items()}
    else:
        wanted = {f"{tensor.place}{suffix}": [tensor] for tensor in tagged.select_tensors(places)}
    if not wanted:
        raise InputError("no place is given; give 'PATH:out'")
    outputs = {value.name for value in tagged.model.graph.outputs}
    for name in wanted:
        if not name or name in tagged.values:
            taken = "an output" if name in outputs else "a tensor"
            raise InputError(f"the model has {taken} {name!r} already; give another name")
    return wanted


def _check_joins(wanted: Mapping[str, Sequence[ModuleTensor]], *, given: bool, joins: bool) -> None:
    """Several tensors have one name if, and only if, they are to be put together."""
    if joins and not given:
        raise InputError("concat puts the tensors of a name together; give name → places")
    for name, tensors in wanted.items():
        if len(tensors) > 1 and not joins:
            listed = ", ".join(tensor.place for tensor in tensors[:3])
            raise InputError(
                f"{name!r} names {len(tensors)} tensors ({listed}); give concat, or a name for each"
            )


def _source(edit: Edit, tensor: ModuleTensor) -> tuple[ir.Value, list[str]]:
    """The tensor in the main graph, and the names of those that bring it there."""
    try:
        return lift(edit, tensor.values, tensor.place)
    except InputError as error:
        raise InputError(f"{tensor.place}: {error}") from error


def _typed(tagged: TaggedModel, value: ir.Value) -> ir.Value:
    known = (
        value
        if value.dtype is not None and value.shape is not None
        else tagged.inferred.described(value)
    )
    if known.dtype is None:
        raise InputError(f"the type of tensor {value.name!r} is not known")
    return known


def _concatenated(edit: Edit, name: str, values: Sequence[ir.Value], axis: int) -> ir.Value:
    """The tensors joined along one of their axes, by a node of the root: it belongs to no module."""
    tagged = edit.tagged
    typed = [_typed(tagged, value) for value in values]
    kinds = ", ".join(f"{value.name}: {type_and_shape(value)}" for value in typed)
    shapes = [value.shape for value in typed if value.shape is not None]
    if (
        len({len(shape) for shape in shapes}) != 1
        or len(shapes) < len(typed)
        or len({v.dtype for v in typed}) > 1
    ):
        raise InputError(
            f"{name!r}: tensors of different type or rank cannot be put together: {kinds}"
        )
    rank = len(shapes[0])
    if not -rank <= axis < rank:
        raise InputError(f"concat {axis}: the tensors of {name!r} have {rank} axes ({kinds})")
    for place, sizes in enumerate(zip(*shapes, strict=True)):
        if place != axis % rank and len({size for size in sizes if isinstance(size, int)}) > 1:
            raise InputError(
                f"{name!r}: tensors differ in axis {place} too, and cannot be put together: {kinds}"
            )
    result = ir.Value(name=name, type=typed[0].type)
    node = edit.node("Concat", values, ROOT, name, {"axis": axis}, outputs=[result])
    edit.graph.append(node)
    tagged.inferred.visit(node)
    result.shape = tagged.inferred.described(result).shape
    edit.graph.outputs.append(result)
    return result


def written(
    tagged: TaggedModel,
    tensors: Sequence[TappedTensor],
    said: str,
    output: str | os.PathLike[str] | None,
    *,
    share_weights: bool,
) -> Tapped:
    """The changed model with its tensors, which is written if there is an output."""
    from htp_export.alignment.origin_map import embed_map

    model = tagged.model
    if tags.MAP in model.metadata_props:
        model = embed_map(model)
    if output is not None:
        write_model(model, output, share_weights=share_weights)
    return Tapped(tuple(tensors), said, model, None if output is None else Path(output))
