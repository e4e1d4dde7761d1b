"""``compare``: compare two ONNX files of one model, module by module."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from htp_export.capabilities.verify.checking import (
    CheckedCall,
    Tolerances,
    check_calls,
    is_tensor,
    leaving_tensors,
    named_results,
    pair_call,
)
from htp_export.capabilities.verify.file_run import (
    FileRun,
    check_has_modules,
    half_precisions,
    with_sorted_results,
    with_taken_branches,
)
from htp_export.capabilities.verify.float16_overflow import first_overflow
from htp_export.capabilities.verify.locating import (
    blame_by_graph,
    first_not_finite,
    line_at_fault,
    module_results,
    tolerance_of,
)
from htp_export.capabilities.verify.pytorch_run import ModuleCall
from htp_export.capabilities.verify.results import (
    NOT_COMPARED,
    Comparison,
    ModuleResult,
    NotFinite,
    over_runs,
)
from htp_export.editing.flattening import read_flat
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource, TaggedModel, name_of
from htp_export.runtime.arrays import PORTION_BYTES, Array, ArrayStore
from htp_export.runtime.data import Data
from htp_export.runtime.inputs import Feed, Inputs, infer_bound
from htp_export.runtime.samples import Samples
from htp_export.runtime.settings import RunSettings


@names_model_faults("a", "b")
def compare(
    a: ModelSource,
    b: ModelSource,
    data: Data | None = None,
    *,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    select: str | Sequence[str] | None = None,
    seed: int = 0,
    tolerances: Mapping[str, tuple[float, float]] | None = None,
    portion_bytes: int = PORTION_BYTES,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    session_options: Any = None,
) -> Comparison:
    """Compare two ONNX files of one model, module by module: before and after an optimiser, float and quantized.

    Both run on the same inputs, and the outputs of each module are compared. A module without a
    tensor of its own in one of the files, because it was fused, is compared at the innermost module
    around it with a tensor in both. Floats of different widths are compared with the tolerance of
    the narrower type.

    Thread-safe, also for calls on the same model.

    Args:
        a: The reference: a file, or a model in memory.
        b: The model to compare with it.
        data: The inputs of one run or of several, as for `quantize`, with the names of ``a``; None
            for random inputs. Of several runs, a module has the numbers of its worst run.
        dims: Name of an open dimension of ``a`` → size. The default for random inputs is 1;
            ``data`` of other sizes are refused.
        shapes: For random inputs: input name → shape.
        select: Only these modules; see ``TaggedModel.select``.
        seed: Seed of the random inputs.
        tolerances: As for ``verify``.
        portion_bytes: As for ``verify``.
        providers: As for ``verify``.
        session_options: As for ``verify``.

    Returns:
        The result for every module: ``.ok``, ``.first_wrong``, ``.modules[path].max_abs``,
        ``.modules[path].status``; of several runs also ``.modules[path].mean_max_abs``.

    Raises:
        InputError: The files are not of one model, or cannot run on these inputs.
        FileError: A file cannot be read.
        UntaggedModelError: A file has no module tags.

    Examples:
        >>> import torch, htp_export
        >>> net, x = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval(), torch.randn(2, 4)
        >>> one, other = (htp_export.export(net, (x,), verbose=False) for _ in range(2))
        >>> print(htp_export.compare(one, other).summary)
        3 of 3 modules agree (worst 0, (root))
    """
    settings = RunSettings(
        data, dims, shapes, seed, providers=providers, session_options=session_options
    )
    ours, theirs = read_flat(a), read_flat(b)
    first_name, second_name = name_of(a, "model a"), name_of(b, "model b")
    for tagged, name in ((ours, first_name), (theirs, second_name)):
        check_has_modules(tagged, name)
    _check_one_model(ours, theirs, first_name, second_name)
    allowed = tolerance_of(ours, tolerances or {})
    chosen = set(ours.paths if select is None else ours.select(select))
    comparing = _Files(
        ours, theirs, first_name, second_name, settings, portion_bytes, chosen, allowed
    )
    samples = Samples.of(settings, ours.model)
    return over_runs([comparing.compared(feed) for feed in samples.feeds()])


@dataclass(frozen=True)
class _Files:
    """Two files to compare, and how."""

    ours: TaggedModel
    theirs: TaggedModel
    first_name: str
    second_name: str
    settings: RunSettings
    portion_bytes: int
    chosen: Collection[str]
    allowed: Tolerances

    def compared(self, feed: Feed) -> Comparison:
        """Run both files on the inputs of one run, and compare their modules."""
        other_feed = _other_feed(self.ours, self.theirs, feed, self.second_name)
        runs = (
            (self.ours, self.first_name, feed.arrays),
            (self.theirs, self.second_name, other_feed),
        )
        first, second = (
            with_taken_branches(
                with_sorted_results(FileRun(*run, self.settings, self.portion_bytes))
            )
            for run in runs
        )
        with ArrayStore.opened(self.portion_bytes) as store:
            calls = calls_in_file(first, store)
            wanted = [
                call for call in calls if call.path in self.chosen and call.path in second.tagged
            ]
            paired = [pair_call(second.tagged, call) for call in wanted]
            checked = check_calls(second, paired, self.allowed)
        blame = blame_by_graph(second.tagged, checked)
        results = module_results(first.tagged, self.chosen, checked, blame, {}, isolated=False)
        modules = _with_reasons(results, calls, checked, first, second)
        wrong = tuple(path for path in blame.modules if path in modules)
        return Comparison(
            modules,
            wrong,
            tags=(self.ours.tag_facts, self.theirs.tag_facts),
            assumed=feed.notes,
            not_finite=_not_finite(first, second, checked),
            source=line_at_fault(second.tagged, modules, wrong[0]) if wrong else "",
        )


def _not_finite(
    first: FileRun, second: FileRun, checked: Sequence[CheckedCall]
) -> tuple[NotFinite, ...]:
    """The first infinity and the first NaN; without an infinity, one that is in float16 only."""
    found = first_not_finite(second.tagged, checked)
    if any(each.kind == "infinite" for each in found):
        return found
    overflow = first_overflow(first, second)
    return found if overflow is None else (overflow, *found)


def _check_one_model(
    ours: TaggedModel, theirs: TaggedModel, first_name: str, second_name: str
) -> None:
    shared = [path for path in ours if path in theirs]
    for path in shared:
        first, second = ours.hierarchy[path], theirs.hierarchy[path]
        # A fused or generated module may have another class.
        if not first.may_be(second):
            classes = f"the class {first.simple_class} in one, {second.simple_class} in the other"
            problem = f"module {path or '(root)'!r} has {classes}"
            raise InputError(f"{first_name} and {second_name} are not of one model: {problem}")
    if len(shared) <= 1 < min(len(ours), len(theirs)):
        raise InputError(
            f"{first_name} and {second_name} are not of one model: they have no module in common"
        )


def _other_feed(ours: TaggedModel, theirs: TaggedModel, feed: Feed, name: str) -> dict[str, Array]:
    """The same inputs under the names and in the precision of the other file."""
    signature, other_signature = ours.signature(""), theirs.signature("")
    renamed: dict[str, str] = {}
    if signature is not None and other_signature is not None:
        for argument, tensor in signature.inputs.items():
            counterpart = other_signature.inputs.get(argument)
            if tensor is not None and counterpart is not None:
                renamed[tensor] = counterpart
    inputs = Inputs.of(theirs.model)
    arrays = {}
    for name_in_first, array in feed.arrays.items():
        has_same_name = name_in_first in inputs
        other_name = name_in_first if has_same_name else renamed.get(name_in_first, name_in_first)
        arrays[other_name] = array
    try:
        return dict(inputs.feed_again(arrays).arrays)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error


def _with_reasons(
    results: Mapping[str, ModuleResult],
    calls: Iterable[ModuleCall],
    checked: Iterable[CheckedCall],
    first: FileRun,
    second: FileRun,
) -> dict[str, ModuleResult]:
    """Replace the results of modules that were not compared: with the file that lacks their tensors as the reason."""
    compared = {call.path for call in checked if call.outputs}
    in_first = set[str]()
    for call in calls:
        if any(output is not None for output in call.outputs):
            in_first.add(call.path)

    def reason(path: str) -> str:
        if path in compared:
            return ""
        if path not in second.tagged:
            return f"{second.name} has no such module"
        return f"{second.name if path in in_first else first.name} has none of its tensors"

    return {path: _around(results, result, reason(path)) for path, result in results.items()}


def _around(results: Mapping[str, ModuleResult], result: ModuleResult, reason: str) -> ModuleResult:
    """For a module without a tensor in one of the files, add the innermost compared module around it."""
    if result.compared or not (result.status == NOT_COMPARED or result.fate.is_merged):
        return result
    for around in tags.ancestors(result.path):
        if around != result.path and around in results and results[around].compared:
            reason += f"; compared at {around or '(root)'}"
            return replace(result, status=NOT_COMPARED, reason=reason, compared_at=around)
    return replace(result, status=NOT_COMPARED, reason=reason, compared_at=None)


# --- calls of modules according to a file ---


@dataclass(frozen=True)
class _CallTensors:
    """The tensors of one call in a file: arguments → tensor, and results, None for missing ones."""

    path: str
    number: int
    inputs: Mapping[str, ir.Value]
    results: Sequence[ir.Value | None]


def calls_in_file(run: FileRun, store: ArrayStore) -> list[ModuleCall]:
    """Return every module call that a file records, with the values of its tensors, in the order in which they end."""
    call_tensors = _tensors_of_calls(run.tagged)
    shapes = infer_bound(run.tagged.model, {name: array.shape for name, array in run.feed.items()})
    sizes: dict[str, int] = {}
    for call in call_tensors:
        for value in (*call.inputs.values(), *call.results):
            if value is not None and str(value.name) not in sizes:
                sizes[str(value.name)] = shapes.bytes_of(value) or 0
    arrays = run.stored(sizes, store)
    halves = half_precisions(run.tagged)
    calls = []
    for call in call_tensors:
        names = [None if value is None else str(value.name) for value in call.results]
        calls.append(
            ModuleCall(
                call.path,
                call.number,
                inputs={
                    argument: arrays[str(value.name)] for argument, value in call.inputs.items()
                },
                outputs=tuple(None if name is None else arrays[name] for name in names),
                computed_in=tuple(halves.get(name or "", "") for name in names),
            )
        )
    return calls


def _tensors_of_calls(tagged: TaggedModel) -> list[_CallTensors]:
    """The tensors of every module call that a file records, in the order in which the calls end."""
    order = {value: position for position, value in enumerate(tagged.values.values())}
    calls = []
    for path, info in tagged.hierarchy.items():
        for number in range(max(len(tagged.signatures.get(path, ())), info.calls)):
            inputs = _inputs(tagged, path, number)
            calls.append(_CallTensors(path, number, inputs, _results(tagged, path, number)))

    def end(call: _CallTensors) -> tuple[int, int]:
        """The position of the last result; of calls that end with one tensor, the innermost is first."""
        results = [order.get(value, -1) for value in call.results if value is not None]
        depth = call.path.count(".") + bool(call.path)
        return max(results, default=-1), -depth

    return sorted(calls, key=end)


def _inputs(tagged: TaggedModel, path: str, number: int) -> dict[str, ir.Value]:
    """The tensors that a file names as arguments of a call."""
    signature = tagged.signature(path, number)
    if signature is None:
        return {}
    names = signature.inputs.items()
    return {
        argument: tagged.values[name]
        for argument, name in names
        if name is not None and name in tagged.values
    }


def _results(tagged: TaggedModel, path: str, number: int) -> list[ir.Value | None]:
    """The results of a call: named ones, None in place of others than tensors; or the outputs of its nodes."""
    named = next(named_results(tagged, path, number), None)
    if named is None and tagged.source == "none":
        return []
    if named is not None:
        return [
            value if value is not None and is_tensor(tagged, value) else None for value in named
        ]
    try:
        return list(leaving_tensors(tagged, path, number))
    except InputError:
        return []
