"""`tap` and `untap`: inputs and outputs of modules as outputs of the file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
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
from htp_export.model.module_tensors import OUT, ModuleTensor
from htp_export.model.tagged import ModelSource, TaggedModel, TaggedResult
from htp_export.process.argument_types import check_whole
from htp_export.reporting.columns import Column, many
from htp_export.reporting.result import Table

_MOST_AXES = 64  # as in numpy
_MOST_NAMED = 5  # tensors in a line

Places: TypeAlias = str | Sequence[str] | Mapping[str, str | Sequence[str]]
"""A selector of tensors, ``encoder.layer.*:out``; or name → selector."""


@dataclass(frozen=True)
class TappedTensor:
    """An added output, or an added input.

    Attributes:
        name: Its name.
        places: The tensors of modules that it returns, or that it is added to, as selectors.
        kind: Its type and shape: ``"FLOAT[batch,16]"``.
    """

    name: str
    places: tuple[str, ...]
    kind: str

    @classmethod
    def of(cls, value: ir.Value, places: Sequence[ModuleTensor]) -> TappedTensor:
        """The entry of a value of the graph."""
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
        tensors: The added or removed outputs or inputs.
        said: The change, in one line.
        model: The model.
        file: The file that was written; None if there is none.
    """

    tensors: tuple[TappedTensor, ...]
    said: str = field(repr=False)
    model: ir.Model = field(repr=False)
    file: Path | None = None

    @property
    def summary(self) -> str:
        """The change, in one line."""
        where = f" -> {self.file}" if self.file else ""
        return f"{self.said}{where}"

    def table(self) -> Table | None:
        """The outputs or inputs, one row each."""
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
    """Make inputs and outputs of modules outputs of the file; nothing else in it changes.

    A place is ``PATH:in`` or ``PATH:out``: exactly the argument or result of the module's call in
    PyTorch, as the export recorded it. ``PATH`` is a selector. ``PATH:in[hidden_states]`` and
    ``PATH:out[1]`` name an argument of ``forward`` and a position among its results; the default is
    the first. ``PATH#2:out`` is the third call; by default, each call has an output. See
    ``docs/taps.md``.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``;
            not changed.
        places: Places, which are also the names of their outputs; or name of an output → one place,
            or with ``concat`` several.
        output: The file to write.
        concat: The axis along which the tensors of a name are concatenated.
        share_weights: Leave external weights in the data file of another model in the folder of
            ``output``, and write no copy. If that file changes, ``output`` becomes unreadable.

    Returns:
        The model, and its new outputs.

    Raises:
        SelectorError: A place is invalid, or matches no module, call or tensor.
        InputError: The file has no such tensor, and the message names its module and a solution; a
            name is already used; or tensors cannot be concatenated, or have no such axis.
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
    had_map = tags.MAP in tagged.model.metadata_props
    wanted, missing = named_places(tagged, places)
    if concat is not None:
        check_whole("concat", concat, -_MOST_AXES, _MOST_AXES)
    _check_joins(wanted, given=isinstance(places, Mapping), joins=concat is not None)
    taps = dict(tagged.taps)
    added = list[TappedTensor]()
    others = _untapped(tagged, wanted)
    with Edit(tagged) as edit:
        # All tensors are lifted before outputs are added.
        sources = {}
        for name, tensors in wanted.items():
            sources[name] = [_source(edit, tensor) for tensor in tensors]
        for name, tensors in wanted.items():
            values = [value for value, _ in sources[name]]
            if len(values) == 1:
                typed = _typed(tagged, values[0])
                if concat is not None and typed.shape is not None:
                    _check_axis(name, [typed], concat)
                result = add_output(edit, values[0], name, typed)
            else:
                result = _concatenated(edit, name, values, concat or 0)
            created = [name]
            for _, lifted in sources[name]:
                created.extend(lifted)
            taps[name] = Tap(tuple(tensor.place for tensor in tensors), tuple(created))
            added.append(TappedTensor.of(result, tensors))
    write_taps(tagged.model.metadata_props, taps)
    summary = f"{many(len(added), 'output')} added{others}{missing}"
    return written(tagged, added, summary, output, had_map=had_map, share_weights=share_weights)


@names_model_faults("model")
def untap(
    model: ModelSource,
    names: str | Sequence[str] | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    share_weights: bool = False,
) -> Tapped:
    """Remove outputs of `tap`, and the nodes that only they need: the graph is as it was before.

    Thread-safe, also for calls on the same model.

    Args:
        model: The model, as for `tap`.
        names: The outputs; None for all taps.
        output: The file to write.
        share_weights: As for `tap`.

    Returns:
        The model, and the outputs that were removed.

    Raises:
        InputError: An output is not a tap, or there are no taps.
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
    had_map = tags.MAP in tagged.model.metadata_props
    taps = dict(tagged.taps)
    names = _existing_taps(taps, names)
    values = {value.name: value for value in tagged.model.graph.outputs}
    removed = [
        TappedTensor(name, taps[name].places, type_and_shape(values[name])) for name in names
    ]
    kept = {name: tap for name, tap in taps.items() if name not in names}
    still_needed = set[str]().union(*(tap.made for tap in kept.values()))
    removable = []
    for name in names:
        removable += [created for created in taps[name].made if created not in still_needed]
    remove_outputs(tagged.model, names, removable)
    write_taps(tagged.model.metadata_props, kept)
    summary = f"{many(len(removed), 'output')} removed"
    return written(tagged, removed, summary, output, had_map=had_map, share_weights=share_weights)


def _existing_taps(taps: Mapping[str, Tap], names: str | Sequence[str] | None) -> list[str]:
    """The names as a list, all taps by default; raises an `InputError` if one is not a tap."""
    if names is None:
        names = list(taps)
    elif isinstance(names, str):
        names = [names]
    for name in names:
        if name not in taps:
            listed = ", ".join(map(repr, taps)) or "none"
            raise InputError(f"output {name!r} is no tap of the model; it has {listed}")
    if not names:
        raise InputError("the model has no taps")
    return list(names)


def named_places(
    tagged: TaggedModel, places: Places, suffix: str = ""
) -> tuple[dict[str, list[ModuleTensor]], str]:
    """Name → the tensors of its places, and words for the selected ones that are not in the file.

    The default name is the place with the suffix.

    Raises:
        InputError: There is no place, a name is already used, or a named tensor is not in the file.
    """
    if isinstance(places, Mapping):
        wanted = {str(name): tagged.select_tensors(selector) for name, selector in places.items()}
        for tensor in chain.from_iterable(wanted.values()):
            if tensor.problem:
                raise InputError(f"{tensor.place}: {tensor.problem}")
        missing = ""
    else:
        tensors = tagged.select_tensors(places)
        present = [tensor for tensor in tensors if not tensor.problem]
        wanted = {f"{tensor.place}{suffix}": [tensor] for tensor in present}
        missing = _absent([tensor for tensor in tensors if tensor.problem])
    if not wanted:
        raise InputError("no place is given; give 'PATH:out'")
    outputs = {value.name for value in tagged.model.graph.outputs}
    for name in wanted:
        if not name or name in tagged.values:
            taken = "an output" if name in outputs else "a tensor"
            raise InputError(f"the model has {taken} {name!r} already; give another name")
    return wanted, missing


def _absent(tensors: Sequence[ModuleTensor]) -> str:
    """Words for tensors that are not in the file, with the reason of the first; empty without one."""
    if not tensors:
        return ""
    listed = ", ".join(tensor.place for tensor in tensors[:_MOST_NAMED])
    more = f" and {len(tensors) - _MOST_NAMED} more" if len(tensors) > _MOST_NAMED else ""
    return f"; not in the file: {listed}{more} ({tensors[0].problem})"


def _untapped(tagged: TaggedModel, wanted: Mapping[str, Sequence[ModuleTensor]]) -> str:
    """The results beside a tap of ``PATH:out``, of the first module with several; empty without one."""
    tensors = [*chain.from_iterable(wanted.values())]
    tapped = {tensor.place for tensor in tensors}
    for tensor in tensors:
        if not tensor.first or tensor.side != OUT:
            continue
        calls = tagged.signatures.get(tensor.path, ())
        results = calls[tensor.call or 0].outputs if calls else ()
        places = [f"{tensor.place}[{number}]" for number in range(1, len(results))]
        others = [place for place in places if place not in tapped]
        if others:
            count = many(len(results), "result")
            return f"; {tensor.place} is the first of {count}, beside {', '.join(others)}"
    return ""


def _check_joins(wanted: Mapping[str, Sequence[ModuleTensor]], *, given: bool, joins: bool) -> None:
    """Raise an `InputError` unless several tensors of one name are concatenated, and only then."""
    if joins and not given:
        raise InputError("concat joins the tensors of a name; give a mapping from names to places")
    for name, tensors in wanted.items():
        if len(tensors) > 1 and not joins:
            listed = ", ".join(tensor.place for tensor in tensors[:3])
            raise InputError(
                f"{name!r} names {len(tensors)} tensors ({listed}); give concat, or a name for each"
            )


def _source(edit: Edit, tensor: ModuleTensor) -> tuple[ir.Value, list[str]]:
    """The tensor in the main graph, and the names of the tensors that bring it there."""
    try:
        return lift(edit, tensor.values, tensor.place)
    except InputError as error:
        raise InputError(f"{tensor.place}: {error}") from error


def _typed(tagged: TaggedModel, value: ir.Value) -> ir.Value:
    """The value with its type and shape, inferred if the file does not state them."""
    is_typed = value.dtype is not None and value.shape is not None
    typed = value if is_typed else tagged.inferred.described(value)
    if typed.dtype is None:
        raise InputError(f"the type of tensor {value.name!r} is not known")
    return typed


def _kinds(values: Sequence[ir.Value]) -> str:
    return ", ".join(f"{value.name}: {type_and_shape(value)}" for value in values)


def _check_axis(name: str, values: Sequence[ir.Value], axis: int) -> int:
    """The rank of tensors that have the same; an `InputError` if they do not have the axis."""
    rank = len(values[0].shape or ())
    if -rank <= axis < rank:
        return rank
    raise InputError(f"concat {axis}: the rank of {name!r} is {rank} ({_kinds(values)})")


def _concatenated(edit: Edit, name: str, values: Sequence[ir.Value], axis: int) -> ir.Value:
    """Concatenate tensors along an axis, by a node of the root: the result belongs to no module."""
    tagged = edit.tagged
    typed = [_typed(tagged, value) for value in values]
    kinds = _kinds(typed)
    shapes = [value.shape for value in typed if value.shape is not None]
    ranks = {len(shape) for shape in shapes}
    dtypes = {value.dtype for value in typed}
    if len(ranks) != 1 or len(shapes) < len(typed) or len(dtypes) > 1:
        raise InputError(
            f"{name!r}: tensors of different type or rank cannot be concatenated: {kinds}"
        )
    rank = _check_axis(name, typed, axis)
    for index, sizes in enumerate(zip(*shapes, strict=True)):
        known_sizes = {size for size in sizes if isinstance(size, int)}
        if index != axis % rank and len(known_sizes) > 1:
            raise InputError(
                f"{name!r}: tensors differ in axis {index} too, and cannot be concatenated: {kinds}"
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
    summary: str,
    output: str | os.PathLike[str] | None,
    *,
    had_map: bool,
    share_weights: bool,
) -> Tapped:
    """Write the changed model to ``output``, if any, and return it with the changed tensors.

    ``had_map``: whether the model had a map before the change.
    """
    from htp_export.alignment.origin_map import renew_map

    model = tagged.model
    renew_map(model, had_map=had_map)
    if output is not None:
        write_model(model, output, share_weights=share_weights)
    return Tapped(tuple(tensors), summary, model, None if output is None else Path(output))
