"""Comparisons without a run of the whole file: each module alone, or a dump of tensors of another engine.

With dumps, the first wrong module is found by bisection, as with ``git bisect``: the next tensor to
dump is the one that halves the modules in doubt.
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
"""An ``.npz`` file of tensors by name, or a mapping from name to array."""


@dataclass(frozen=True)
class DumpedRun(FileRun):
    """A file with a dump of some of its tensors, tensor → values; other tensors are unknown."""

    dumped: Mapping[str, Array] = field(default_factory=dict)

    @classmethod
    def of(cls, run: FileRun, dump: Dump) -> DumpedRun:
        """Combine a run and a dump.

        Names in the dump are tensor names of the file; other characters than letters and digits may
        be replaced by ``_``.
        """
        if isinstance(dump, str | os.PathLike):
            arrays: Mapping[str, Any] = NpzArrays(dump)
            name = os.fspath(dump)
        else:
            arrays, name = dump, "the dump"
        dumped = _resolved(run.tagged, arrays)
        if not dumped.keys() - run.feed.keys():
            listed = ", ".join(map(repr, list(arrays)[:5])) or "nothing"
            raise InputError(f"{name}: has no tensor that {run.name} computes; it has {listed}")
        for tensor, fed in run.feed.items():
            if tensor in dumped and not _is_same(dumped[tensor], fed):
                raise InputError(
                    f"{name}: was computed from another input {tensor!r} than PyTorch is run on; give that one"
                )
        return cls(
            run.tagged, run.name, run.feed, run.settings, run.portion_bytes, run.use_up, dumped
        )

    def fetch(self, sizes: Mapping[str, int], use: Callable[[str, Array], None]) -> None:
        """Like `FileRun.fetch`, for tensors in the dump and weights."""
        for name in sizes.keys() & self.dumped.keys():
            use(name, self.dumped[name])
        super().fetch({name: size for name, size in sizes.items() if name not in self.dumped}, use)

    def knows(self, value: ir.Value) -> bool:
        """Whether a tensor is in the dump, or is an input or initializer."""
        return value.name in self.dumped or value.producer() is None


def _is_same(one: Array, other: Array) -> bool:
    """Whether two inputs are equal up to a rounding, as of another type in between."""
    return one.shape == other.shape and np.allclose(
        one, other, rtol=1e-5, atol=1e-6, equal_nan=one.dtype.kind == "f"
    )


def _resolved(tagged: TaggedModel, arrays: Mapping[str, Any]) -> dict[str, Array]:
    """Tensor of the file → its values in a dump; for a tap, also the tensors that it concatenates."""
    plain_names = {name: _plain(name) for name in tagged.values}
    counts = Counter(plain_names.values())
    by_plain = {plain: name for name, plain in plain_names.items() if counts[plain] == 1}
    values: dict[str, Array] = {}
    for name, array in arrays.items():
        tensor = name if name in tagged.values else by_plain.get(_plain(name))
        if tensor is not None:
            values.setdefault(tensor, np.asarray(array))
    for tap in tagged.taps.keys() & values.keys():
        node = tagged.values[tap].producer()
        if node is None or not is_inserted(node):
            continue
        for value, part in zip(node.inputs, _parts(tagged, node, values[tap]), strict=False):
            if value is not None:
                values.setdefault(str(value.name), part)
    return values


def _parts(tagged: TaggedModel, node: ir.Node, array: Array) -> list[Array]:
    """Split the values of a tap into the inputs of its node; empty if the sizes of the parts are not known."""
    if node.op_type == "Identity":
        return [array]
    shapes = [tagged.inferred.shape(value) for value in node.inputs]
    known_shapes = [shape for shape in shapes if shape is not None and len(shape) == array.ndim]
    if node.op_type != "Concat" or len(known_shapes) != len(shapes):
        return []
    axis = node.attributes["axis"].as_int()
    sizes = [shape[axis] for shape in known_shapes]
    # Equal sizes need not be numbers: an open dimension divides equally, too.
    if len(set(sizes)) == 1 and array.shape[axis] % len(sizes) == 0:
        return np.split(array, len(sizes), axis)
    numbers = [size for size in sizes if isinstance(size, int)]
    if len(numbers) != len(sizes) or sum(numbers) != array.shape[axis]:
        return []
    return np.split(array, np.cumsum(numbers)[:-1], axis)


def _plain(name: str) -> str:
    """A tensor name as file names have it: letters, digits and ``_``."""
    return re.sub(r"\W", "_", name).strip("_")


def _with_dumped_tensors(run: DumpedRun, calls: Sequence[PairedCall]) -> list[PairedCall]:
    """Reduce calls to the tensors in a dump."""

    def known(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
        known_pairs = []
        for pair in pairs:
            candidates = tuple(filter(run.knows, pair.candidates))
            if candidates:
                known_pairs.append(replace(pair, candidates=candidates))
        return tuple(known_pairs)

    return [
        replace(call, outputs=known(call.outputs), inputs=known(call.inputs), missing=0)
        for call in calls
    ]


def _narrowed(
    run: DumpedRun, calls: Sequence[PairedCall], checked: Sequence[CheckedCall], blame: Blame
) -> tuple[Blame, tuple[str, ...]]:
    """Narrow down the first wrong module with the tensors of a dump, and choose the next tensor to dump.

    Args:
        run: The file with the dump.
        calls: All calls, in the order in which they ended, with all tensors that the file names.
        checked: The calls with the tensors of the dump.
        blame: The modules that return the first differing tensors of the dump.

    Returns:
        The wrong module, or the innermost module around all modules in doubt; and the name of the
        next tensor, none if the wrong module is known.
    """
    if not blame.calls:
        return blame, ()
    excess = excesses(checked)
    first_outputs = checked[blame.calls[0]].outputs
    bad = next(
        value
        for value, result in first_outputs
        if excess[value] > 1 or not result.difference.agrees
    )
    fine = computed_from(run.tagged, (value for value, size in excess.items() if size <= 1))
    doubtful = computed_from(run.tagged, [bad], fine) - fine
    # Tensor in doubt → the module that returns it, the innermost one: its call ends first.
    modules: dict[ir.Value, str] = {}
    for call in calls:
        for pair in call.outputs:
            if len(pair.candidates) == 1 and pair.candidates[0] in doubtful:
                modules.setdefault(pair.candidates[0], call.call.path)
    # Unknown tensor in doubt → number of modules in doubt up to this tensor.
    counts: dict[ir.Value, int] = {}
    for value in modules:
        if value is not bad and value not in excess:
            before = computed_from(run.tagged, [value], fine) - fine
            counts[value] = len(before & modules.keys())
    if not counts:
        return blame, ()
    halving = max(counts, key=lambda value: min(counts[value], len(modules) - counts[value]))
    around = tags.common_ancestor(modules.values())
    problem = (
        f"{len(modules)} modules that lead to {bad.name!r} are in doubt: "
        f"it is one of them, or {around or 'the root'!r}"
    )
    return Blame((), {around: problem}), (str(halving.name),)


_ONE_RUN = 1 << 62
"""A limit in bytes that no module reaches: all its tensors are fetched in one run."""


@dataclass(frozen=True)
class _Task:
    """A call that runs alone; ``expected``: input of its cut → values in PyTorch."""

    paired: PairedCall
    cut: Cut
    expected: Mapping[str, StoredArray]

    @property
    def outside(self) -> list[str]:
        """The tensors at its other inputs, which are computed outside of the module."""
        inputs = self.cut.inputs.items()
        return [str(value.name) for name, value in inputs if name not in self.expected]


def _check_isolated(
    run: FileRun, calls: Sequence[ModuleCall], store: ArrayStore, tolerances: Tolerances
) -> tuple[list[CheckedCall], dict[str, str]]:
    """Run every call alone, and compare its results.

    Inputs of a cut that are no arguments of the module, because they are computed outside for
    several modules at once, come from a run of the whole file.

    Returns:
        The calls that ran, in the same order; and module path → reason why it did not run.
    """
    tasks, constant, reasons = _tasks(run.tagged, [pair_call(run.tagged, call) for call in calls])
    outside = run.stored({name: 0 for task in tasks for name in task.outside}, store)
    checked = check_calls(run, constant, tolerances)
    for task in counted(tasks, "modules"):
        try:
            checked.append(_check(run, task, outside, tolerances))
        except InputError as error:
            checked.append(CheckedCall(task.paired, (), (), str(error)))
    order = {id(call): position for position, call in enumerate(calls)}
    return sorted(checked, key=lambda call: order[id(call.paired.call)]), reasons


def _tasks(
    tagged: TaggedModel, calls: Sequence[PairedCall]
) -> tuple[list[_Task], list[PairedCall], dict[str, str]]:
    """Divide calls: tasks that run alone, calls with constant results, and module path → why it does not run."""
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
    """Whether a tensor is independent of the inputs of the model."""
    return all(
        value.is_initializer() or value in tagged.index.constant for value in pair.candidates
    )


def _task(tagged: TaggedModel, cutter: Cutter, paired: PairedCall) -> _Task:
    """Cut out one call of a module."""
    call = paired.call
    cut = cutter.cut(call.path, call.number)
    signature = tagged.signature(call.path, call.number)
    arguments = {} if signature is None else signature.inputs
    # Inputs of the cut are named after the arguments of forward.
    passed = {name for name, value in cut.inputs.items() if arguments.get(name) == value.name}
    expected = {name: array for name, array in call.inputs.items() if name in passed}
    task = _Task(paired, cut, expected)
    check_outside(tagged, task.outside)
    return task


def _fused_task(
    tagged: TaggedModel, cutter: Cutter, paired: PairedCall, calls: Sequence[PairedCall]
) -> Iterator[_Task]:
    """Cut out a fused module together with the modules it is merged with; nothing if the file lacks its result."""
    path = paired.call.path
    group = [module for module in (path, *tagged.hierarchy[path].fused_with) if module in tagged]
    if not paired.outputs or any(tagged.hierarchy[module].calls > 1 for module in group):
        return
    outputs = {str(value.name): value for pair in paired.outputs for value in pair.candidates}
    known = _known_tensors(group, calls)
    for value in outputs.values():
        known.pop(value, None)
    members: set[ir.Node] = set()
    for module in group:
        nodes = tagged.index.below.get(module, ())
        members.update(node for node in nodes if node.graph is tagged.model.graph)
    # The cut begins at the tensors that PyTorch has: only the merged work runs.
    part = replace(cutter.cut_nodes(members, outputs, stops=known), path=path)
    part_inputs = set(part.inputs.values())
    if part_inputs.isdisjoint(outputs.values()):
        expected = {name: known[value] for name, value in part.inputs.items() if value in known}
        yield _Task(paired, part, expected)


def _known_tensors(
    group: Sequence[str], calls: Sequence[PairedCall]
) -> dict[ir.Value, StoredArray]:
    """Inputs and outputs, with PyTorch's values, of all calls of some modules and their descendants."""
    known: dict[ir.Value, StoredArray] = {}
    for call in calls:
        if not tags.is_under_any(call.call.path, group):
            continue
        for pair in (*call.inputs, *call.outputs):
            if len(pair.candidates) == 1:
                known[pair.candidates[0]] = pair.expected
    return known


def _check(
    run: FileRun, task: _Task, outside: Mapping[str, StoredArray], tolerances: Tolerances
) -> CheckedCall:
    """Run one task, and compare its results; ``outside``: tensor of the whole file → values."""
    tagged = run.tagged
    part = TaggedModel(cut_model(tagged, task.cut), tagged.hierarchy, tagged.source)
    feed = {}
    for declared in Inputs.of(part.model):
        name = declared.name
        stored = task.expected.get(name) or outside[str(task.cut.inputs[name].name)]
        feed[name] = in_precision_of(declared, stored.in_file)
    # Tensor of the file → the same tensor in the cut, which may have another name.
    counterparts = dict(
        zip(dict.fromkeys(task.cut.outputs.values()), part.model.graph.outputs, strict=True)
    )
    outputs = []
    for pair in task.paired.outputs:
        candidates = [counterparts[value] for value in pair.candidates if value in counterparts]
        if candidates:
            outputs.append(replace(pair, candidates=tuple(candidates)))
    paired = replace(task.paired, outputs=tuple(outputs), inputs=())
    part_name = f"module {task.paired.call.path!r} alone"
    part_run = FileRun(part, part_name, feed, run.settings, _ONE_RUN, use_up=True)
    (checked,) = check_calls(part_run, [paired], tolerances)
    return checked


def check_run(
    run: FileRun,
    calls: Sequence[ModuleCall],
    store: ArrayStore,
    tolerances: Tolerances,
    *,
    isolated: bool,
) -> tuple[list[CheckedCall], Blame, dict[str, str], tuple[str, ...]]:
    """Compare the tensors of calls with the tensors of a file.

    Returns:
        The compared calls; the modules that are wrong themselves; module path → why it was not
        compared; and ``next_outputs`` of the result.
    """
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
    blame, next_outputs = _narrowed(run, paired, checked, blame_by_graph(run.tagged, checked))
    return checked, blame, reasons, next_outputs
