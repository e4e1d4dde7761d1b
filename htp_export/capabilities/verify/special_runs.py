"""Runs that are no run of the whole file: of each module alone, and of another engine, of which some tensors are known.

Of another engine, the first wrong module is found as ``git bisect`` finds a commit: the tensor that
halves what is in doubt comes next.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.verify.checking import (
    CheckedCall,
    Pair,
    PairedCall,
    Tolerances,
    check_calls,
    excesses,
    pair_call,
)
from htp_export.capabilities.verify.file_run import FileRun
from htp_export.capabilities.verify.locating import (
    Blame,
    blame_by_graph,
    blame_by_nesting,
    computed_from,
)
from htp_export.capabilities.verify.pytorch_run import ModuleCall
from htp_export.editing.cut_models import cut_model
from htp_export.errors import InputError
from htp_export.files.npz_file import NpzArrays
from htp_export.format import tags
from htp_export.model.cutting import Cut, Cutter, check_outside
from htp_export.model.regions import is_inserted
from htp_export.model.tagged import TaggedModel
from htp_export.process.progress import counted
from htp_export.runtime.arrays import Array, ArrayStore, StoredArray
from htp_export.runtime.declared_inputs import in_precision_of
from htp_export.runtime.inputs import Inputs

Dump = str | os.PathLike[str] | Mapping[str, Any]
"""An ``.npz`` file of tensors by name, or these as arrays."""


@dataclass(frozen=True)
class DumpedRun(FileRun):
    """A file whose tensors are in a dump, tensor → values; what is not there is not known."""

    dumped: Mapping[str, Array] = field(default_factory=dict)

    @classmethod
    def of(cls, run: FileRun, dump: Dump) -> DumpedRun:
        """A file with a dump, whose names are those of the file, or have ``_`` for what is no letter and no digit."""
        arrays = NpzArrays(dump) if isinstance(dump, str | os.PathLike) else dump
        name = os.fspath(dump) if isinstance(dump, str | os.PathLike) else "the dump"
        dumped = _resolved(run.tagged, arrays)
        if not dumped.keys() - run.feed.keys():
            listed = ", ".join(map(repr, list(arrays)[:5])) or "nothing"
            raise InputError(f"{name}: has no tensor that {run.name} computes; it has {listed}")
        for tensor, fed in run.feed.items():
            if tensor in dumped and not _is_same(dumped[tensor], fed):
                raise InputError(
                    f"{name}: was made of another input {tensor!r} than PyTorch is run on; give that one"
                )
        return cls(
            run.tagged, run.name, run.feed, run.settings, run.portion_bytes, run.use_up, dumped
        )

    def fetch(self, sizes: Mapping[str, int], use: Callable[[str, Array], None]) -> None:
        """As of `FileRun`, for tensors in the dump and weights."""
        for name in sizes.keys() & self.dumped.keys():
            use(name, self.dumped[name])
        super().fetch({name: size for name, size in sizes.items() if name not in self.dumped}, use)

    def knows(self, value: ir.Value) -> bool:
        """Whether a tensor is in the dump, or needs no run."""
        return value.name in self.dumped or value.producer() is None


def _is_same(one: Array, other: Array) -> bool:
    return one.shape == other.shape and np.allclose(
        one, other, rtol=1e-5, atol=1e-6, equal_nan=one.dtype.kind == "f"
    )


def _resolved(tagged: TaggedModel, arrays: Mapping[str, Any]) -> dict[str, Array]:
    """Tensor of the file → its values in a dump; a tap gives the tensors that it was made of, too."""
    plain = Counter(_plain(name) for name in tagged.values)
    by_plain = {_plain(name): name for name in tagged.values if plain[_plain(name)] == 1}
    found: dict[str, Array] = {}
    for name, array in arrays.items():
        tensor = name if name in tagged.values else by_plain.get(_plain(name))
        if tensor is not None:
            found.setdefault(tensor, np.asarray(array))
    for tap in tagged.taps.keys() & found.keys():
        node = tagged.values[tap].producer()
        if node is not None and is_inserted(node):
            for value, part in zip(node.inputs, _parts(tagged, node, found[tap]), strict=False):
                if value is not None:
                    found.setdefault(str(value.name), part)
    return found


def _parts(tagged: TaggedModel, node: ir.Node, array: Array) -> list[Array]:
    """What a tap put together: along an axis of which the file knows the sizes, or whose parts are equally long."""
    if node.op_type == "Identity":
        return [array]
    shapes = [tagged.inferred.shape(value) for value in node.inputs]
    if node.op_type != "Concat" or any(
        shape is None or len(shape) != array.ndim for shape in shapes
    ):
        return []
    axis = node.attributes["axis"].as_int()
    sizes = [shape[axis] for shape in shapes if shape is not None]
    if len(set(sizes)) == 1 and array.shape[axis] % len(sizes) == 0:
        return np.split(array, len(sizes), axis)
    numbers = [size for size in sizes if isinstance(size, int)]
    is_whole = len(numbers) == len(sizes) and sum(numbers) == array.shape[axis]
    return np.split(array, np.cumsum(numbers)[:-1], axis) if is_whole else []


def _plain(name: str) -> str:
    return re.sub(r"\W", "_", name).strip("_")


def _with_dumped_tensors(run: DumpedRun, calls: Sequence[PairedCall]) -> list[PairedCall]:
    def known(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
        listed = (
            replace(pair, candidates=tuple(filter(run.knows, pair.candidates))) for pair in pairs
        )
        return tuple(pair for pair in listed if pair.candidates)

    return [
        replace(call, outputs=known(call.outputs), inputs=known(call.inputs), missing=0)
        for call in calls
    ]


def _narrowed(
    run: DumpedRun, calls: Sequence[PairedCall], checked: Sequence[CheckedCall], blame: Blame
) -> tuple[Blame, tuple[str, ...]]:
    """Say where the first wrong module is, as far as a dump tells, and which tensor to ask for next.

    ``calls`` are all, with all tensors that the file names, and ``blame`` has the modules that
    return the first tensors that differ. Returned are the module that is wrong, or that holds all
    that may be; and the next tensor, none if that is the module.
    """
    if not blame.calls:
        return blame, ()
    excess = excesses(checked)
    [bad, *_] = [
        value
        for value, r in checked[blame.calls[0]].outputs
        if excess[value] > 1 or not r.difference.agrees
    ]
    fine = computed_from(run.tagged, (value for value, size in excess.items() if size <= 1))
    doubtful = computed_from(run.tagged, [bad], fine) - fine
    homes: dict[ir.Value, str] = {}
    for call in calls:  # in the order in which they ended: a tensor is that of the innermost module
        for pair in call.outputs:
            if len(pair.candidates) == 1 and pair.candidates[0] in doubtful:
                homes.setdefault(pair.candidates[0], call.call.path)
    open_tensors = [value for value in homes if value is not bad and value not in excess]
    if not open_tensors:
        return blame, ()
    sizes = {
        value: len((computed_from(run.tagged, [value], fine) - fine) & homes.keys())
        for value in open_tensors
    }
    chosen = max(open_tensors, key=lambda value: min(sizes[value], len(homes) - sizes[value]))
    around = tags.common_ancestor(homes.values())
    why = f"{len(homes)} modules that lead to {bad.name!r} are in doubt: it is one of them, or {around or 'the root'!r}"
    return Blame((), {around: why}), (str(chosen.name),)


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
        return [
            str(value.name) for name, value in self.cut.inputs.items() if name not in self.expected
        ]


def _check_isolated(
    run: FileRun, calls: Sequence[ModuleCall], store: ArrayStore, tolerances: Tolerances
) -> tuple[list[CheckedCall], dict[str, str]]:
    """Run every call alone, and compare its results.

    Tensors that a module needs and PyTorch did not give it, since they are computed outside for
    several modules at once, are taken from a run of the whole file. Returned are the calls that
    ran, in the same order, and why others did not: module path → reason.
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


def _tasks(
    tagged: TaggedModel, calls: Sequence[PairedCall]
) -> tuple[list[_Task], list[PairedCall], dict[str, str]]:
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
    return all(
        value.is_initializer() or value in tagged.index.constant for value in pair.candidates
    )


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
    # What PyTorch gave to any of them, and what modules inside them returned, is known: only merged
    # work runs.
    group = [module for module in (path, *tagged.hierarchy[path].fused_with) if module in tagged]
    if not paired.outputs or any(tagged.hierarchy[module].calls > 1 for module in group):
        return
    outputs = {str(value.name): value for pair in paired.outputs for value in pair.candidates}
    arrays: dict[ir.Value, StoredArray] = {}
    for partner in calls:
        if any(tags.is_under(partner.call.path, module) for module in group):
            known = (
                pair for pair in (*partner.inputs, *partner.outputs) if len(pair.candidates) == 1
            )
            arrays.update((pair.candidates[0], pair.expected) for pair in known)
    for value in outputs.values():
        arrays.pop(value, None)
    graph = tagged.model.graph
    members = {
        node
        for module in group
        for node in tagged.index.below.get(module, ())
        if node.graph is graph
    }
    part = replace(cutter.cut_nodes(members, outputs, stops=arrays), path=path)
    if not any(value in part.inputs.values() for value in outputs.values()):
        yield _Task(
            paired,
            part,
            {name: arrays[value] for name, value in part.inputs.items() if value in arrays},
        )


def _check(
    run: FileRun, task: _Task, outside: Mapping[str, StoredArray], tolerances: Tolerances
) -> CheckedCall:
    tagged, inputs = run.tagged, task.cut.inputs.items()
    part = TaggedModel(cut_model(tagged, task.cut), tagged.hierarchy, tagged.source)
    known = {
        name: (task.expected.get(name) or outside[str(value.name)]).in_file
        for name, value in inputs
    }
    feed = {
        wanted.name: in_precision_of(wanted, known[wanted.name]) for wanted in Inputs.of(part.model)
    }
    name = f"module {task.paired.call.path!r} alone"
    # The cut has the same tensors, perhaps under other names.
    counterparts = dict(
        zip(dict.fromkeys(task.cut.outputs.values()), part.model.graph.outputs, strict=True)
    )
    outputs = tuple(
        replace(
            pair,
            candidates=tuple(
                counterparts[value] for value in pair.candidates if value in counterparts
            ),
        )
        for pair in task.paired.outputs
        if any(value in counterparts for value in pair.candidates)
    )
    paired = replace(task.paired, outputs=outputs, inputs=())
    (checked,) = check_calls(
        FileRun(part, name, feed, run.settings, _ONE_RUN, use_up=True), [paired], tolerances
    )
    return checked


def check_run(
    run: FileRun,
    calls: Sequence[ModuleCall],
    store: ArrayStore,
    tolerances: Tolerances,
    *,
    isolated: bool,
) -> tuple[list[CheckedCall], Blame, dict[str, str], tuple[str, ...]]:
    """The compared calls, the modules that are wrong themselves, why others were not compared, and `next_outputs`."""
    if isolated:
        checked, reasons = _check_isolated(run, calls, store, tolerances)
        return checked, blame_by_nesting(checked), reasons, ()
    paired = [pair_call(run.tagged, call) for call in calls if call.path in run.tagged]
    if not isinstance(run, DumpedRun):
        checked = check_calls(run, paired, tolerances)
        return checked, blame_by_graph(run.tagged, checked), {}, ()
    checked = check_calls(run, _with_dumped_tensors(run, paired), tolerances)
    compared = {call.path for call in checked if call.outputs}
    reasons = {
        call.call.path: "the dump has none of its tensors"
        for call in paired
        if call.outputs and call.call.path not in compared
    }
    blame, following = _narrowed(run, paired, checked, blame_by_graph(run.tagged, checked))
    return checked, blame, reasons, following
