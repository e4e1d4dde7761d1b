"""`place` assigns devices to modules for ONNX Runtime; `placement` shows where it runs them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from htp_export.alignment.origin_map import renew_map
from htp_export.capabilities.place.devices import (
    ANNOTATION,
    SETTINGS,
    assignment_settings,
    check_honoured,
    device_named,
    is_device,
    with_entries,
)
from htp_export.capabilities.place.parts import Needs, needs_of, nodes_that_fit
from htp_export.capabilities.place.placed import (
    DeviceUse,
    Misplaced,
    Placed,
    Placement,
    crossings,
    placed_modules,
)
from htp_export.editing.flattening import read_flat
from htp_export.errors import InputError, OnnxRuntimeError, RuleError
from htp_export.files.filesystem import temporary_folder
from htp_export.files.model_files import write_model
from htp_export.files.targets import check_target
from htp_export.format.model_metadata import read_placement, write_placement
from htp_export.format.tags import MAP, PLACEMENT
from htp_export.model.copies import Copied
from htp_export.model.cutting import Cutter
from htp_export.model.model_faults import names_model_faults
from htp_export.model.regions import all_nodes
from htp_export.model.tagged import ModelSource, TaggedModel, load, name_of
from htp_export.model.tensor_names import make_node_names_unique
from htp_export.plans.rules import assigned
from htp_export.runtime.assignments import Assignment, assign
from htp_export.runtime.data import Data
from htp_export.runtime.sessions import RunnableModel, entry_of
from htp_export.runtime.settings import HOST, RunSettings

_REST = "cpu"
"""The device of nodes that do not fit on another."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)
_LONGEST_SIZE = 30  # characters of a size as text: a number of 400 digits would be infinite
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


@names_model_faults("model")
def place(
    model: ModelSource,
    plan: Mapping[str, str] | None = None,
    output: str | os.PathLike[str] | None = None,
    *,
    budget: Mapping[str, int | str] | None = None,
    slack: float = 0.1,
    data: Data | None = None,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    external_data: str | None = None,
    share_weights: bool = False,
) -> Placed:
    """Assign devices to modules in ONNX Runtime's format: ``layer_ann`` in the metadata of nodes.

    Rules have the meaning of every plan, see `quantize`. A node of several modules with different
    devices is on the device of the first of them, in execution order, that has one. Nodes without a
    device are placed by ONNX Runtime. It uses the devices from version 1.25 on, if the session has
    the options of the result.

    With a budget, as many of the modules that rules assign to a device are placed there as fit; the
    others are placed on the CPU.

    Thread-safe, also for calls on the same model.

    Args:
        model: The tagged model: a file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or
            ``ir.Model``; not changed.
        plan: Selector → device, in order: ``cpu``, ``gpu``, ``cuda``, ``dml``, ``npu``, ``fpga``,
            ``accelerator``, ``gpu:1``, ``gpu:nvidia``, or an execution provider. It is optional
            with a budget for one device.
        output: The file to write.
        budget: Device → bytes for weights and activations: a number, or a text such as ``4GiB`` or
            ``500 MB``.
        slack: Share of the operations on the device that may be given up for fewer tensors between
            devices.
        data: The inputs of one run, for the sizes of tensors, as in `htp_export.cost`.
        dims: Open dimension → size; 1 by default.
        shapes: Input name → shape.
        external_data: Name of a file beside ``output`` for all weights of more than 256 bytes.
        share_weights: As for `htp_export.tap`.

    Returns:
        The device of each module, the tensors between devices, and the session options.

    Raises:
        InputError: A device is unknown, a rule names modules without nodes, or nothing fits into a
            budget.
        SelectorError: A selector cannot be read or matches no module.
        UntaggedModelError: The model has no tags.
        FileError: A file cannot be read or written.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 64),), verbose=False)
        >>> placed = htp_export.place(program, {".": "cpu", "0": "gpu"})
        >>> placed.options["session.layer_assignment_settings"], [crossing.tensor for crossing in placed.crossings]
        ('gpu(=gpu); CPUExecutionProvider(=cpu)', ['input', 'linear'])
        >>> htp_export.place(program, budget={"gpu": "20 kB"}).modules["0"].device
        'gpu'
    """
    settings = RunSettings(data, dims, shapes)
    check_target(output)
    if not 0 <= slack < 1:
        raise InputError(f"slack is a share from 0 to less than 1, not {slack!r}")
    limits = {
        device_named(device): _budget(device, size) for device, size in (budget or {}).items()
    }
    rules = _rules(plan, limits)
    source = load(model)
    original = read_flat(source)
    devices = _devices(original, rules)
    needs = needs_of(original, settings.with_one_run("place"), required=bool(limits))
    for device, memory in limits.items():
        assert needs is not None
        _keep_what_fits(devices, needs, device, memory, slack)
    copied = Copied.of(original)
    placed = copied.tagged
    for node in all_nodes(placed.model):
        node.metadata_props.pop(ANNOTATION, None)
    for node, device in devices.items():
        copied.copy_of[node].metadata_props[ANNOTATION] = device
    options = {SETTINGS: assignment_settings(dict.fromkeys(devices.values()))}
    with_entries(options)
    write_placement(placed.model.metadata_props, options)
    # Nodes of functions are in the graph now.
    renew_map(placed.model, had_map=MAP in placed.model.metadata_props)
    if output is not None:
        write_model(placed.model, output, external_data, share_weights=share_weights)
    remarks = list[str]()
    if source.model.functions:
        remarks.append("its functions were inlined: their nodes may go to different devices")
    if needs is not None:
        remarks.extend(needs.notes)
    return _placed(original, placed.model, devices, needs, limits, options, tuple(remarks))


def _budget(device: str, size: int | str) -> int:
    """The bytes of a budget."""
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = None
    if isinstance(size, str) and len(size) <= _LONGEST_SIZE:
        match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise InputError(
            f"budget of {device}: {size!r} is no size; write bytes, or a number with a unit: 4GiB, 500 MB"
        )
    number, unit, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[unit.lower()])


def _rules(plan: Mapping[str, str] | None, limits: Mapping[str, int]) -> Mapping[str, str]:
    """Selector → device; without a plan, the whole model is for the device of the budget."""
    if not plan:
        if len(limits) != 1:
            raise InputError(
                "the plan has no rules; give selectors and devices, as in {'encoder': 'gpu'}, or one budget"
            )
        return dict.fromkeys(["."], next(iter(limits)))
    wanted = {_device_of(selector, device) for selector, device in plan.items()}
    for device in limits:
        if device == _REST:
            raise InputError(
                f"there is no budget for {_REST}: nodes that fit on no other device run there"
            )
        if device not in wanted:
            raise InputError(f"there is a budget for {device}, but no rule assigns modules to it")
    return plan


def _device_of(selector: str, device: str) -> str:
    try:
        return device_named(device)
    except InputError as error:
        raise RuleError(selector, str(error)) from error


def _devices(tagged: TaggedModel, plan: Mapping[str, str]) -> dict[ir.Node, str]:
    """Node → device; for modules with different devices, that of the first, which runs first."""
    rules = {selector: _device_of(selector, device) for selector, device in plan.items()}
    result = assigned(tagged, rules)
    for selector, nodes in result.reached.items():
        if not nodes:
            raise RuleError(
                selector, "its modules have no nodes: they return their input, or were merged"
            )
    devices = dict(result.nodes)
    for node, device_of_module in result.disputed.items():
        devices[node] = next(iter(device_of_module.values()))
    return {node: devices[node] for node in tagged.nodes if node in devices}


def _keep_what_fits(
    devices: dict[ir.Node, str], needs: Needs, device: str, memory: int, slack: float
) -> None:
    """Move nodes that do not fit off a device; nodes of subgraphs follow their holder."""
    holders = {
        node: [*needs.tagged.index.scopes(node)][-1]
        for node, wanted in devices.items()
        if wanted == device
    }
    candidates = {holder for holder in holders.values() if devices.get(holder) == device}
    fitting = nodes_that_fit(needs, candidates, device, memory, slack)
    for node, holder in holders.items():
        if holder not in fitting:
            devices[node] = _REST


def _placed(
    original: TaggedModel,
    model: ir.Model,
    devices: Mapping[ir.Node, str],
    needs: Needs | None,
    limits: Mapping[str, int],
    options: Mapping[str, str],
    remarks: tuple[str, ...],
) -> Placed:
    """Build the result of `place`."""
    cutter = Cutter(original)
    crossing = crossings(
        original.model,
        devices.get,
        original.owners_of,
        {} if needs is None else needs.sizes,
        _REST,
        lambda value: not cutter.is_free(value),
    )
    nodes = {node: devices.get(node) for node in original.nodes}
    uses = {}
    for device in dict.fromkeys(devices.values()):
        own_nodes = [node for node, chosen in devices.items() if chosen == device]
        if needs is None:
            uses[device] = DeviceUse(len(own_nodes), budget=limits.get(device))
        else:
            item = needs.item(own_nodes)
            weights = item.memory - item.peak
            uses[device] = DeviceUse(len(own_nodes), weights, item.peak, limits.get(device))
    return Placed(
        modules=placed_modules(original, nodes, original.index.works.__getitem__, crossing),
        devices=uses,
        crossings=crossing,
        options=options,
        free=sum(device is None for device in nodes.values()),
        remarks=remarks,
        tags=original.tag_facts,
        given=model,
    )


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
    """Show the execution provider of ONNX Runtime for each module, and the tensors between them.

    ONNX Runtime (1.24 or later) loads the model and reports the provider of each node; nothing is
    run. Nodes that it merges first are attributed to modules as in `htp_export.profile`. A model of
    `htp_export.place` is loaded with its session options, unless ``session_options`` has others.

    Thread-safe, but not for calls with the same ``session_options``.

    Args:
        model: A file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
        data: The inputs of one run, for the sizes of tensors, as in `htp_export.cost`.
        dims: Open dimension → size; 1 by default.
        shapes: Input name → shape.
        providers: Execution providers, in order of preference, as for
            ``onnxruntime.InferenceSession``; empty for the providers in ``session_options``, such
            as plugins.
        session_options: An ``onnxruntime.SessionOptions``. It is restored afterwards.

    Returns:
        Providers by module, the tensors between them, and nodes that run on another device than the
        file states.

    Raises:
        UntaggedModelError: The model has no module tags.
        FileError: The file cannot be read.
        InputError: ONNX Runtime cannot load the model or does not report where nodes run, or a
            provider is missing.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1)).eval()
        >>> result = htp_export.placement(htp_export.export(net, (torch.randn(2, 4),), verbose=False))
        >>> result.providers, result.modules["1"].device, result.crossings
        ({'CPUExecutionProvider': 2}, 'CPUExecutionProvider', ())
    """
    settings = RunSettings(data, dims, shapes, providers=providers, session_options=session_options)
    settings.check_providers()
    settings = settings.with_one_run("placement")
    original = load(model)
    tagged = read_flat(original)
    tagged.require_tags()
    entries, remarks = _entries(
        tagged, session_options, name_of(model, f"model {tagged.model.graph.name!r}")
    )
    named = tagged.clone()
    renamed = make_node_names_unique(named.model.graph)
    with temporary_folder() as folder:
        path = os.fspath(model) if isinstance(model, str | os.PathLike) else None
        if path is not None and tagged is original and not renamed:
            runnable = RunnableModel.of_file(Path(path), named.model, folder)
        else:
            name = tagged.hierarchy.root.simple_class or "model" if path is None else path
            runnable = RunnableModel.of(named.model, name, folder)
        try:
            assignment = assign(runnable, settings, folder, entries)
        except OnnxRuntimeError as error:
            if not entries or _BORDER_FAULT not in error.problem:
                raise
            problem = f"{_BORDER}: {error.problem}"
            raise OnnxRuntimeError(error.model, error.action, problem) from error
    needs = needs_of(load(assignment.graph), settings)
    return _placement(named, assignment, entries, remarks, needs)


def _entries(
    tagged: TaggedModel, options: Any, name: str
) -> tuple[dict[str, str], tuple[str, ...]]:
    """The model's configuration entries, unless the options have their own; and remarks on them."""
    own = "" if options is None else entry_of(options, SETTINGS)
    try:
        # no other entry of a file is used: it could load a library
        written = read_placement(tagged.model.metadata_props).get(SETTINGS)
    except ValueError as error:
        raise InputError(f"{name}: {error}") from error
    if own or written is None:
        return ({SETTINGS: own} if own else {}), ()
    entries = {SETTINGS: written}
    try:
        check_honoured()
    except InputError as error:
        return {}, (str(error),)
    try:
        with_entries(entries)
    except InputError as error:
        raise InputError(f"{name}: its metadata {PLACEMENT!r}: {error}") from error
    return entries, ()


def _placement(
    tagged: TaggedModel,
    assignment: Assignment,
    entries: Mapping[str, str],
    remarks: tuple[str, ...],
    needs: Needs | None,
) -> Placement:
    """Build the result of `placement`."""
    from htp_export.alignment.carried_owners import optimized_works

    works = optimized_works(tagged, assignment.graph)
    sizes = {} if needs is None else needs.sizes
    found = crossings(
        assignment.graph, assignment.provider_of.get, lambda node: works[node].owners, sizes, HOST
    )
    copied = assignment.copied
    if copied is not None:
        found = tuple(replace(crossing, copied=crossing.tensor in copied) for crossing in found)
    counts = Counter(node.provider for node in assignment.assigned)
    unattributed = []
    for node, provider in assignment.provider_of.items():
        if not works[node].owners:
            unattributed.append((provider, node.op_type, node.name or ""))
    return Placement(
        modules=placed_modules(tagged, assignment.provider_of, works.__getitem__, found),
        providers={provider: counts[provider] for provider in assignment.providers},
        crossings=found,
        unattributed=tuple(unattributed),
        misplaced=tuple(_misplaced(tagged, assignment)) if entries else (),
        options=dict(entries),
        remarks=remarks,
        assumed=() if needs is None else needs.notes,
        tags=tagged.tag_facts,
    )


def _misplaced(tagged: TaggedModel, assignment: Assignment) -> Iterator[Misplaced]:
    """The nodes that run elsewhere; ONNX Runtime names a new node after an original one."""
    named = {node.name: node for node in tagged.model.graph.all_nodes()}
    for entry in assignment.assigned:
        node = named.get(entry.name) or named.get(entry.name.rpartition("/")[0])
        device = None if node is None else node.metadata_props.get(ANNOTATION)
        if node is not None and device is not None and not is_device(device, entry.provider):
            owners = tagged.owners_of(node)
            yield Misplaced(entry.name, entry.op_type, owners, device, entry.provider)
