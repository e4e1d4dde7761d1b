"""Each module's part of a file run alone, on what PyTorch gave the module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.model.cut_models import cut_model
from htp_export.model.cutting import Cut, Cutter
from htp_export.model.tagged import TaggedModel
from htp_export.process.progress import counted
from htp_export.run.checking import CheckedCall, Tolerances, check_calls, tensor_values
from htp_export.run.pairing import Pair, PairedCall, pair_call, signature_of
from htp_export.run.pytorch_calls import ModuleCall
from htp_export.runtime.arrays import Array, ArrayStore, StoredArray
from htp_export.runtime.runner import Runner
from htp_export.runtime.sessions import SessionSettings

__all__ = ["check_isolated"]


_ONE_RUN = 1 << 62  # bytes


@dataclass(frozen=True)
class _Task:
    """A module's call that can be run alone.

    Attributes:
        paired: The call.
        cut: Its part of the graph.
        given: Input of the cut → PyTorch's values.
        outside: Inputs of the cut that PyTorch did not give to the module.
    """

    paired: PairedCall
    cut: Cut
    given: Mapping[str, StoredArray]
    outside: tuple[str, ...]


def check_isolated(
    tagged: TaggedModel,
    calls: Sequence[ModuleCall],
    feed: Mapping[str, Array],
    runner: Runner,
    settings: SessionSettings,
    store: ArrayStore,
    portion_bytes: int,
    tolerances: Tolerances,
) -> tuple[list[CheckedCall], dict[str, str]]:
    """Run every call alone, and compare what it gives back.

    What a module needs and PyTorch did not give it, since it was computed outside for several modules at once, is taken
    from a run of the whole file.

    Args:
        tagged: The file.
        calls: The calls, in the order in which they ended.
        feed: Inputs of the whole file.
        runner: Runs the whole file.
        settings: Where and how the parts run.
        store: Where tensors of the run of the whole file go.
        portion_bytes: How many bytes of them are taken out of one run.
        tolerances: What may differ at a module.

    Returns:
        The calls that ran, in the same order, and why others did not: module path → reason.

    Raises:
        InputError: If the whole file is needed and cannot be run.
    """
    cutter, reasons, tasks = Cutter(tagged), dict[str, str](), list[_Task]()
    constant: list[PairedCall] = []
    everything = [pair_call(tagged, call) for call in calls]
    for paired in everything:
        call, fate = paired.call, tagged.hierarchy[paired.call.path].fate
        if paired.outputs and all(_is_constant(tagged, pair) for pair in paired.outputs):
            constant.append(paired)
        elif fate == "fused":
            task = _fused_task(tagged, cutter, paired, everything)
            tasks.extend([task] if task is not None else [])
        elif fate not in ("identity", "dead", "uncalled"):
            try:
                tasks.append(_task(tagged, cutter, paired))
            except InputError as error:
                reasons[call.path] = str(error)
    outside = dict.fromkeys(name for task in tasks for name in task.outside)
    values: dict[str, StoredArray] = {}

    def keep(name: str, array: Array) -> None:
        values[name] = store.keep(array)

    tensor_values(tagged, dict.fromkeys(outside, 0), feed, runner, portion_bytes, keep)
    checked = check_calls(tagged, constant, feed, runner, portion_bytes, tolerances)
    for task in counted(tasks, "modules"):
        try:
            checked.append(_run(tagged, task, values, settings, tolerances))
        except InputError as error:
            checked.append(CheckedCall(task.paired, (), (), str(error)))
    ended = {id(call): place for place, call in enumerate(calls)}
    return sorted(checked, key=lambda each: ended[id(each.paired.call)]), reasons


def _is_constant(tagged: TaggedModel, pair: Pair) -> bool:
    """Whether a tensor depends on nothing that the model is given."""
    return all(value.is_initializer() or value in tagged.index.constant for value in pair.candidates)


def _task(tagged: TaggedModel, cutter: Cutter, paired: PairedCall) -> _Task:
    call = paired.call
    cut = cutter.cut(call.path, call.number)
    signature = signature_of(tagged, call.path, call.number)
    inputs_of_module = {}
    for name, value in cut.inputs.items():
        known = signature is not None and signature.inputs.get(name) == value.name
        if known and name in call.inputs:
            inputs_of_module[name] = call.inputs[name]
    outside = tuple(str(value.name) for name, value in cut.inputs.items() if name not in inputs_of_module)
    hidden = next((name for name in outside if name not in tagged.values), None)
    if hidden is not None:
        raise InputError(f"it needs {hidden!r}, which is inside a branch, a loop or a function")
    return _Task(paired, cut, inputs_of_module, outside)


def _fused_task(tagged: TaggedModel, cutter: Cutter, paired: PairedCall, calls: Sequence[PairedCall]) -> _Task | None:
    """The modules with which one was merged, cut out together; None if the file does not have the module's result.

    What PyTorch gave to any of them, and what modules inside them returned, is known: only merged work runs.
    """
    path = paired.call.path
    group = [each for each in (path, *tagged.hierarchy[path].fused_with) if each in tagged]
    if not paired.outputs or any(tagged.hierarchy[each].calls > 1 for each in group):
        return None
    outputs = {str(value.name): value for pair in paired.outputs for value in pair.candidates}
    held: dict[ir.Value, StoredArray] = {}
    for other in calls:
        if any(tags.is_under(other.call.path, each) for each in group):
            known = (pair for pair in (*other.inputs, *other.outputs) if len(pair.candidates) == 1)
            expected = ((pair.candidates[0], pair.expected) for pair in known)
            held.update((value, array) for value, array in expected if value not in outputs.values())
    graph = tagged.model.graph
    members = {node for each in group for node in tagged.index.below.get(each, ()) if node.graph is graph}
    part = replace(cutter.cut_nodes(members, outputs, stops=held), path=path)
    if any(value in part.inputs.values() for value in outputs.values()):
        return None
    given = {name: held[value] for name, value in part.inputs.items() if value in held}
    return _Task(paired, part, given, tuple(name for name in part.inputs if name not in given))


def _run(
    tagged: TaggedModel,
    task: _Task,
    values: Mapping[str, StoredArray],
    settings: SessionSettings,
    tolerances: Tolerances,
) -> CheckedCall:
    """Run one cut, and compare what leaves it with what the module gave back."""
    path = task.paired.call.path
    part = TaggedModel(cut_model(tagged, task.cut), tagged.hierarchy, tagged.source)
    runner = Runner(part.model, f"module {path!r} alone", settings, use_up=True)
    feed = {name: (task.given.get(name) or values[str(value.name)]).array for name, value in task.cut.inputs.items()}
    # The cut has the same tensors, perhaps under other names.
    there = dict(zip(dict.fromkeys(task.cut.outputs.values()), part.model.graph.outputs, strict=True))
    outputs = tuple(
        replace(pair, candidates=tuple(there[value] for value in pair.candidates if value in there))
        for pair in task.paired.outputs
        if any(value in there for value in pair.candidates)
    )
    paired = replace(task.paired, outputs=outputs, inputs=())
    (checked,) = check_calls(part, [paired], feed, runner, _ONE_RUN, tolerances)
    return checked
