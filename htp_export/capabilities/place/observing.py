"""``placement``: where ONNX Runtime runs each module, and what crosses between execution providers."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from htp_export.capabilities.place.crossings import crossings
from htp_export.capabilities.place.devices import ANNOTATION, SETTINGS, is_device, session_options_with
from htp_export.capabilities.place.parts import Needs, needs_of
from htp_export.capabilities.place.placed import Misplaced, Placement, placed_modules
from htp_export.editing.flattening import read_flat
from htp_export.errors import InputError, OnnxRuntimeError
from htp_export.files.filesystem import temporary_folder
from htp_export.format.model_metadata import read_placement
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource, TaggedModel, load
from htp_export.model.tensor_names import make_node_names_unique
from htp_export.runtime.assignments import HOST, Assignment, assign
from htp_export.runtime.data import Data, single_run
from htp_export.runtime.sessions import RunnableModel, SessionSettings, entry_of

_BORDER_FAULT = "num_nodes_processed == in_degree.size() was false"
_BORDER = (
    "in this version, an execution provider that compiles its nodes takes no part of a graph that borders on nodes of "
    "other devices; place the whole model on it, or nothing"
)


@names_model_faults("model")
def placement(
    model: ModelSource,
    *,
    data: Data | None = None,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    providers: Sequence[Any] = (HOST,),
    session_options: Any = None,
) -> Placement:
    """Show which execution provider of ONNX Runtime runs each module, and what crosses between them.

    ONNX Runtime (1.24 or later) loads the model and says what it gave to which provider; nothing is run. What it merges
    before is attributed to modules as in `htp_export.profile`. A model that `htp_export.place` wrote is loaded with its
    session options, unless ``session_options`` has others.

    Thread-safe, but not for calls with the same ``session_options``.

    Args:
        model: A file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
        data: The inputs of one run, for the sizes of tensors, as in `htp_export.cost`.
        dims: Name of an open dimension → size. Dimensions that are not given are 1.
        shapes: Input name → shape.
        providers: Execution providers, in order of preference, as for ``onnxruntime.InferenceSession``; empty for those
            that ``session_options`` has, as those of plugins.
        session_options: An ``onnxruntime.SessionOptions``. It is restored afterwards.

    Returns:
        Providers by module, the tensors that cross, and nodes that run elsewhere than their device in the file.

    Raises:
        UntaggedModelError: The model has no module tags.
        FileError: The file cannot be read.
        InputError: ONNX Runtime cannot load the model or does not say where nodes run, or a provider is missing.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1)).eval()
        >>> result = htp_export.placement(htp_export.export(net, (torch.randn(2, 4),), verbose=False))
        >>> result.providers, result.modules["1"].device, result.crossings
        ({'CPUExecutionProvider': 2}, 'CPUExecutionProvider', ())
    """
    settings = SessionSettings(tuple(providers), session_options)
    settings.check()
    example = single_run(data, "placement")
    original = load(model)
    tagged = read_flat(original)
    tagged.require_tags()
    entries, remarks = _entries(tagged, session_options)
    named = tagged.clone()
    renamed = make_node_names_unique(named.model.graph)
    with temporary_folder() as folder:
        path = model if isinstance(model, str | os.PathLike) else None
        name = tagged.hierarchy.root.simple_class or "model" if path is None else os.fspath(path)
        if path is not None and tagged is original and not renamed:
            runnable = RunnableModel.of_file(Path(name), named.model, folder)
        else:
            runnable = RunnableModel.of(named.model, name, folder)
        try:
            assignment = assign(runnable, settings, folder, entries)
        except OnnxRuntimeError as error:
            if entries and _BORDER_FAULT in error.problem:
                raise OnnxRuntimeError(error.model, error.action, f"{_BORDER}: {error.problem}") from error
            raise
    return _result(named, assignment, entries, remarks, needs_of(load(assignment.graph), example, dims, shapes))


def _entries(tagged: TaggedModel, options: Any) -> tuple[dict[str, str], tuple[str, ...]]:
    """The configuration entries that the model asks for, if the options have no others; and what is to be said."""
    own = "" if options is None else entry_of(options, SETTINGS)
    try:
        written = read_placement(tagged.model.metadata_props).get(SETTINGS)  # a file may not set any other entry
    except ValueError as error:
        raise InputError(f"model {tagged.model.graph.name!r}: {error}") from error
    if own or written is None:
        return ({SETTINGS: own} if own else {}), ()
    entries = {SETTINGS: written}
    try:
        session_options_with(entries)
    except InputError as error:
        return {}, (str(error),)
    return entries, ()


def _result(
    tagged: TaggedModel,
    assignment: Assignment,
    entries: Mapping[str, str],
    remarks: tuple[str, ...],
    needs: Needs | None,
) -> Placement:
    from htp_export.capabilities.carry.ownership import optimized_works

    works = optimized_works(tagged, assignment.graph)
    sizes = {} if needs is None else needs.sizes
    found = crossings(assignment.graph, assignment.provider_of.get, lambda node: works[node].owners, sizes, HOST)
    copied = assignment.copied
    if copied is not None:
        found = tuple(replace(crossing, copied=crossing.tensor in copied) for crossing in found)
    counts = Counter(node.provider for node in assignment.assigned)
    return Placement(
        modules=placed_modules(tagged, assignment.provider_of, works.__getitem__, found),
        providers={provider: counts[provider] for provider in assignment.providers},
        crossings=found,
        unattributed=tuple(
            (provider, node.op_type, node.name or "")
            for node, provider in assignment.provider_of.items()
            if not works[node].owners
        ),
        misplaced=tuple(_misplaced(tagged, assignment)) if entries else (),
        options=dict(entries),
        remarks=remarks,
        assumed=() if needs is None else needs.notes,
        tags=tagged.tag_facts,
    )


def _misplaced(tagged: TaggedModel, assignment: Assignment) -> Iterator[Misplaced]:
    """The nodes with a device that run elsewhere. A node that ONNX Runtime makes has the name of one before it."""
    named = {node.name: node for node in tagged.model.graph.all_nodes()}
    for entry in assignment.assigned:
        node = named.get(entry.name) or named.get(entry.name.rpartition("/")[0])
        device = None if node is None else node.metadata_props.get(ANNOTATION)
        if node is not None and device is not None and not is_device(device, entry.provider):
            yield Misplaced(entry.name, entry.op_type, tagged.owners_of(node), device, entry.provider)
