"""Runs the nodes of each module alone, on the inputs that PyTorch gave to the module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from htp_export.capabilities.verify.checking import CheckedCall, Pair, PairedCall, Tolerances, check_calls, pair_call
from htp_export.capabilities.verify.file_run import FileRun
from htp_export.capabilities.verify.pytorch_run import ModuleCall
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.model.cut_models import cut_model
from htp_export.model.cutting import Cut, Cutter, check_outside
from htp_export.model.tagged import TaggedModel
from htp_export.process.progress import counted
from htp_export.runtime.arrays import ArrayStore, StoredArray
from htp_export.runtime.declared_inputs import in_precision_of
from htp_export.runtime.inputs import Inputs

_ONE_RUN = 1 << 62  # bytes


@dataclass(frozen=True)
class _Task:
    """A module's call that runs alone; ``expected``: input of its cut → values in PyTorch."""

    paired: PairedCall
    cut: Cut
    expected: Mapping[str, StoredArray]

    @property
    def outside(self) -> list[str]:
        """The tensors at its other inputs."""
        return [str(value.name) for name, value in self.cut.inputs.items() if name not in self.expected]


def check_isolated(
    run: FileRun, calls: Sequence[ModuleCall], store: ArrayStore, tolerances: Tolerances
) -> tuple[list[CheckedCall], dict[str, str]]:
    """Run every call alone, and compare its results.

    Tensors that a module needs and PyTorch did not give it, since they are computed outside for several modules at
    once, are taken from a run of the whole file. Returned are the calls that ran, in the same order, and why others did
    not: module path → reason.

    Raises:
        InputError: If the whole file is needed and cannot be run.
    """
    tasks, constant, reasons = _tasks(run.tagged, [pair_call(run.tagged, call) for call in calls])
    outside = run.stored({name: 0 for task in tasks for name in task.outside}, store)
    checked = check_calls(run, constant, tolerances)
    for task in counted(tasks, "modules"):
        try:
            checked.append(_check(run, task, outside, tolerances))
        except InputError as error:
            checked.append(CheckedCall(task.paired, (), (), str(error)))
    ended = {id(call): place for place, call in enumerate(calls)}
    return sorted(checked, key=lambda call: ended[id(call.paired.call)]), reasons


def _tasks(tagged: TaggedModel, calls: Sequence[PairedCall]) -> tuple[list[_Task], list[PairedCall], dict[str, str]]:
    """The calls that run alone, those whose results are constants, and why others do not run: module path → reason."""
    cutter = Cutter(tagged)
    tasks: list[_Task] = []
    constant: list[PairedCall] = []
    reasons: dict[str, str] = {}
    for paired in calls:
        fate = tagged.hierarchy[paired.call.path].fate
        if paired.outputs and all(_is_constant(tagged, pair) for pair in paired.outputs):
            constant.append(paired)
        elif fate.is_merged:
            tasks.extend(_fused_task(tagged, cutter, paired, calls))
        elif fate.has_result:
            try:
                tasks.append(_task(tagged, cutter, paired))
            except InputError as error:
                reasons[paired.call.path] = str(error)
    return tasks, constant, reasons


def _is_constant(tagged: TaggedModel, pair: Pair) -> bool:
    """Whether a tensor does not depend on the inputs of the model."""
    return all(value.is_initializer() or value in tagged.index.constant for value in pair.candidates)


def _task(tagged: TaggedModel, cutter: Cutter, paired: PairedCall) -> _Task:
    call = paired.call
    cut = cutter.cut(call.path, call.number)
    signature = tagged.signature(call.path, call.number)
    arguments = {} if signature is None else signature.inputs
    given = {name for name, value in cut.inputs.items() if arguments.get(name) == value.name}
    task = _Task(paired, cut, {name: array for name, array in call.inputs.items() if name in given})
    check_outside(tagged, task.outside)
    return task


def _fused_task(
    tagged: TaggedModel, cutter: Cutter, paired: PairedCall, calls: Sequence[PairedCall]
) -> Iterator[_Task]:
    """The modules with which one was merged, cut out together; none if the file does not have the module's result."""
    path = paired.call.path
    # What PyTorch gave to any of them, and what modules inside them returned, is known: only merged work runs.
    group = [module for module in (path, *tagged.hierarchy[path].fused_with) if module in tagged]
    if not paired.outputs or any(tagged.hierarchy[module].calls > 1 for module in group):
        return
    outputs = {str(value.name): value for pair in paired.outputs for value in pair.candidates}
    arrays: dict[ir.Value, StoredArray] = {}
    for partner in calls:
        if any(tags.is_under(partner.call.path, module) for module in group):
            known = (pair for pair in (*partner.inputs, *partner.outputs) if len(pair.candidates) == 1)
            arrays.update((pair.candidates[0], pair.expected) for pair in known)
    for value in outputs.values():
        arrays.pop(value, None)
    graph = tagged.model.graph
    members = {node for module in group for node in tagged.index.below.get(module, ()) if node.graph is graph}
    part = replace(cutter.cut_nodes(members, outputs, stops=arrays), path=path)
    if not any(value in part.inputs.values() for value in outputs.values()):
        yield _Task(paired, part, {name: arrays[value] for name, value in part.inputs.items() if value in arrays})


def _check(run: FileRun, task: _Task, outside: Mapping[str, StoredArray], tolerances: Tolerances) -> CheckedCall:
    """Run one cut, and compare its outputs with the results of the module."""
    tagged, inputs = run.tagged, task.cut.inputs.items()
    part = TaggedModel(cut_model(tagged, task.cut), tagged.hierarchy, tagged.source)
    known = {name: (task.expected.get(name) or outside[str(value.name)]).array for name, value in inputs}
    feed = {wanted.name: in_precision_of(wanted, known[wanted.name]) for wanted in Inputs.of(part.model)}
    name = f"module {task.paired.call.path!r} alone"
    # The cut has the same tensors, perhaps under other names.
    counterparts = dict(zip(dict.fromkeys(task.cut.outputs.values()), part.model.graph.outputs, strict=True))
    outputs = tuple(
        replace(pair, candidates=tuple(counterparts[value] for value in pair.candidates if value in counterparts))
        for pair in task.paired.outputs
        if any(value in counterparts for value in pair.candidates)
    )
    paired = replace(task.paired, outputs=outputs, inputs=())
    (checked,) = check_calls(FileRun(part, name, feed, run.settings, _ONE_RUN, use_up=True), [paired], tolerances)
    return checked
