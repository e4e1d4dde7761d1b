"""``compare``: two ONNX files of one model, module by module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from htp_export.capabilities.verify.checking import (
    CheckedCall,
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
from htp_export.capabilities.verify.locating import blame_by_graph, module_results, tolerance_of
from htp_export.capabilities.verify.pytorch_run import ModuleCall
from htp_export.capabilities.verify.results import NOT_COMPARED, Comparison, ModuleResult
from htp_export.editing.flattening import read_flat
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource, TaggedModel, name_of
from htp_export.runtime.arrays import PORTION_BYTES, Array, ArrayStore
from htp_export.runtime.data import Data, Samples
from htp_export.runtime.inputs import Feed, Inputs, infer_bound
from htp_export.runtime.sessions import SessionSettings


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
    tensor of its own in one of the files, because it was fused, is compared at the nearest module
    around it that has one in both. Floats of different widths are compared with the tolerance of
    the narrower.

    Thread-safe, also for calls on the same model.

    Args:
        a: The reference: a file, or a model in memory.
        b: The model to compare with it.
        data: The inputs of one run, as for `quantize`, with the names of ``a``; None for random
            inputs.
        dims: Name of an open dimension of ``a`` → size. Random inputs have 1 without; ``data`` of
            other sizes are refused.
        shapes: For random inputs: input name → shape.
        select: Only these modules; see ``TaggedModel.select``.
        seed: Seed of the random inputs.
        tolerances: As for ``verify``.
        portion_bytes: As for ``verify``.
        providers: As for ``verify``.
        session_options: As for ``verify``.

    Returns:
        The result for every module: ``.ok``, ``.first_wrong``, ``.modules[path].max_abs``,
        ``.modules[path].status``.

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
    ours, theirs = read_flat(a), read_flat(b)
    first_name, second_name = name_of(a, "model a"), name_of(b, "model b")
    for tagged, name in ((ours, first_name), (theirs, second_name)):
        check_has_modules(tagged, name)
    _check_one_model(ours, theirs, first_name, second_name)
    allowed = tolerance_of(ours, tolerances or {})
    chosen = set(ours.paths if select is None else ours.select(select))
    feed = Samples.of(data, ours.model, dims=dims, shapes=shapes, seed=seed).only("compare")
    other_feed = _other_feed(ours, theirs, feed, second_name)
    settings = SessionSettings(tuple(providers), session_options)
    runs = (ours, first_name, feed.arrays), (theirs, second_name, other_feed)
    first, second = (
        with_taken_branches(with_sorted_results(FileRun(*run, settings, portion_bytes)))
        for run in runs
    )
    with ArrayStore.opened(portion_bytes) as store:
        calls = calls_in_file(first, store)
        wanted = [call for call in calls if call.path in chosen and call.path in second.tagged]
        paired = [pair_call(second.tagged, call) for call in wanted]
        checked = check_calls(second, paired, allowed)
    blame = blame_by_graph(second.tagged, checked)
    results = module_results(first.tagged, chosen, checked, blame, {}, isolated=False)
    modules = _with_reasons(results, calls, checked, first, second)
    wrong = tuple(path for path in blame.modules if path in modules)
    return Comparison(modules, wrong, tags=(ours.tag_facts, theirs.tag_facts), assumed=feed.notes)


def _check_one_model(
    ours: TaggedModel, theirs: TaggedModel, first_name: str, second_name: str
) -> None:
    shared = [path for path in ours if path in theirs]
    for path in shared:
        first, second = ours.hierarchy[path], theirs.hierarchy[path]
        if not first.may_be(second):
            classes = f"a {first.simple_class} in one and a {second.simple_class} in the other"
            problem = f"module {path or '(root)'!r} is {classes}"
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
        pairs = (
            (tensor, other_signature.inputs.get(argument))
            for argument, tensor in signature.inputs.items()
        )
        renamed = {
            first: second for first, second in pairs if first is not None and second is not None
        }
    known = Inputs.of(theirs.model)
    arrays = {
        key if key in known else renamed.get(key, key): array for key, array in feed.arrays.items()
    }
    try:
        return dict(known.feed_again(arrays).arrays)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error


def _with_reasons(
    results: Mapping[str, ModuleResult],
    calls: Iterable[ModuleCall],
    checked: Iterable[CheckedCall],
    first: FileRun,
    second: FileRun,
) -> dict[str, ModuleResult]:
    """The results, with the reason for each module that was not compared: which file has no tensor of it."""
    compared = {call.path for call in checked if call.outputs}
    in_first = {call.path for call in calls if any(output is not None for output in call.outputs)}

    def lacking(path: str) -> str:
        if path in compared:
            return ""
        if path not in second.tagged:
            return f"{second.name} has no such module"
        return f"{second.name if path in in_first else first.name} has none of its tensors"

    return {path: _around(results, result, lacking(path)) for path, result in results.items()}


def _around(
    results: Mapping[str, ModuleResult], result: ModuleResult, lacking: str
) -> ModuleResult:
    """For a module without a tensor in one of the files, add the nearest compared module around it."""
    if result.compared or not (result.status == NOT_COMPARED or result.fate.is_merged):
        return result
    around = (
        up
        for up in tags.ancestors(result.path)
        if up != result.path and up in results and results[up].compared
    )
    at = next(around, None)
    where = f"; compared at {at or '(root)'}" if at is not None else ""
    return replace(result, status=NOT_COMPARED, reason=lacking + where, compared_at=at)


# --- the calls that a file knows of ---


def calls_in_file(run: FileRun, store: ArrayStore) -> list[ModuleCall]:
    """Return every call of every module that a file knows of, with its tensors, in the order in which they end."""
    tensors = _tensors_of_calls(run.tagged)
    known = infer_bound(run.tagged.model, {name: array.shape for name, array in run.feed.items()})
    wanted = dict.fromkeys(
        value for _, _, entered, back in tensors for value in (*entered.values(), *back) if value
    )
    arrays = run.stored({str(value.name): known.bytes_of(value) or 0 for value in wanted}, store)
    calls, halves = [], half_precisions(run.tagged)
    for path, number, entered, back in tensors:
        outputs = tuple(arrays[str(value.name)] if value is not None else None for value in back)
        inputs = {argument: arrays[str(value.name)] for argument, value in entered.items()}
        computed_in = tuple(
            halves.get(str(value.name), "") if value is not None else "" for value in back
        )
        calls.append(ModuleCall(path, number, inputs, outputs, computed_in=computed_in))
    return calls


_CallTensors = tuple[str, int, dict[str, ir.Value], list["ir.Value | None"]]


def _tensors_of_calls(tagged: TaggedModel) -> list[_CallTensors]:
    """Path, number, arguments and results of every call that a file knows of, in the order in which they end."""
    order = {value: place for place, value in enumerate(tagged.values.values())}
    calls: list[_CallTensors] = []
    for path, info in tagged.hierarchy.items():
        for number in range(max(len(tagged.signatures.get(path, ())), info.calls)):
            signature = tagged.signature(path, number)
            names = {} if signature is None else signature.inputs
            inputs = {
                arg: tagged.values[name]
                for arg, name in names.items()
                if name is not None and name in tagged.values
            }
            calls.append((path, number, inputs, _results(tagged, path, number)))

    def end(call: _CallTensors) -> tuple[int, int]:
        path, _, _, results = call
        last = max((order.get(value, -1) for value in results if value is not None), default=-1)
        return last, -path.count(".") - bool(path)

    return sorted(calls, key=end)


def _results(tagged: TaggedModel, path: str, number: int) -> list[ir.Value | None]:
    named = next(named_results(tagged, path, number), None)
    if named is not None or tagged.source == "none":
        return [
            value if value is not None and is_tensor(tagged, value) else None
            for value in named or ()
        ]
    try:
        return list(leaving_tensors(tagged, path, number))
    except InputError:
        return []
