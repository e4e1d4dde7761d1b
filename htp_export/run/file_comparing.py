"""``compare``: two ONNX files of one model, module by module."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from htp_export.errors import InputError, UntaggedModelError
from htp_export.format import tags
from htp_export.model.inlining import read_flat
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource, TaggedModel, name_of
from htp_export.run.checking import check_calls
from htp_export.run.file_calls import calls_in_file
from htp_export.run.locating import blame_by_graph
from htp_export.run.pairing import pair_call, signature_of
from htp_export.run.reporting import module_results, tolerance_of
from htp_export.run.results import NOT_COMPARED, Comparison, ModuleResult
from htp_export.run.taken_branches import with_taken_branches
from htp_export.runtime.arrays import PORTION_BYTES, Array, ArrayStore
from htp_export.runtime.inputs import Feed, Inputs
from htp_export.runtime.runner import Runner
from htp_export.runtime.sessions import SessionSettings

__all__ = ["compare"]


@names_model_faults("a", "b")
def compare(
    a: ModelSource,
    b: ModelSource,
    inputs: Mapping[str, Any] | None = None,
    *,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
    select: str | Sequence[str] | None = None,
    tolerances: Mapping[str, tuple[float, float]] | None = None,
    portion_bytes: int = PORTION_BYTES,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
    session_options: Any = None,
) -> Comparison:
    """Compare two ONNX files of one model, module by module: before and after an optimiser, float and quantized.

    Both run on the same inputs, and the outputs of each module are compared. A module without a tensor of its own in
    one of the files, because it was fused, is compared at the nearest module around it that has one in both. Floats of
    different widths are compared with the tolerance of the narrower.

    Thread-safe, also for calls on the same model.

    Args:
        a: The reference: a file, or a model in memory.
        b: The model to compare with it.
        inputs: Input name of ``a`` → array; None for random inputs.
        dims: Name of an open dimension of ``a`` → size. Random inputs have 1 if it is not given; ``inputs`` of another
            size are rejected.
        shapes: For random inputs: input name → shape.
        seed: Seed of the random inputs.
        select: Only these modules; see ``TaggedModel.select``.
        tolerances: As for ``verify``.
        portion_bytes: As for ``verify``.
        providers: ONNX Runtime's execution providers, in order of preference.
        session_options: An ``onnxruntime.SessionOptions``: threads, custom operators and so on. Optimisation is off
            whatever it says; it is restored afterwards.

    Returns:
        The result for every module: ``.ok``, ``.first_wrong``, ``.modules[path].max_abs``, ``.modules[path].status``.

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
        if tagged.source == "none" and not tagged.signatures:
            raise UntaggedModelError(
                f"{name}: has no module tags; a tool took them off, or it was not exported by htp_export"
            )
    _check_one_model(ours, theirs, first_name, second_name)
    allowed = tolerance_of(ours, tolerances or {})
    chosen = set(ours.paths if select is None else ours.select(select))
    known = Inputs.of(ours.model)
    feed = known.random(dims, shapes, seed) if inputs is None else known.feed(inputs, dims)
    other_feed = _other_feed(ours, theirs, feed, second_name)
    settings = SessionSettings(tuple(providers), session_options)
    facts = (ours.tag_facts, theirs.tag_facts)
    ours = with_taken_branches(ours, feed.arrays, first_name, settings)
    theirs = with_taken_branches(theirs, other_feed, second_name, settings)
    with ArrayStore.opened(portion_bytes) as store:
        calls = calls_in_file(ours, feed, Runner(ours.model, first_name, settings), store, portion_bytes)
        wanted = [call for call in calls if call.path in chosen and call.path in theirs]
        paired = [pair_call(theirs, call) for call in wanted]
        runner = Runner(theirs.model, second_name, settings)
        checked = check_calls(theirs, paired, other_feed, runner, portion_bytes, allowed, across_dtypes=True)
    blame = blame_by_graph(theirs, checked)
    results = module_results(ours, chosen, checked, blame, {}, isolated=False)
    compared_paths = {call.path for call in checked if call.outputs}
    paths_of_first = {call.path for call in calls if any(held is not None for held in call.outputs)}
    lacking = {
        path: _lacking(path, paths_of_first, theirs, first_name, second_name)
        for path in results
        if path not in compared_paths
    }
    modules = {path: _around(results, result, lacking.get(path, "")) for path, result in results.items()}
    wrong = tuple(path for path in blame.modules if path in modules)
    return Comparison(modules, wrong, tags=facts, assumed=feed.notes)


def _check_one_model(ours: TaggedModel, theirs: TaggedModel, first_name: str, second_name: str) -> None:
    shared = [path for path in ours if path in theirs]
    for path in shared:
        first, second = ours.hierarchy[path], theirs.hierarchy[path]
        if first.class_name and second.class_name and first.simple_class != second.simple_class:
            problem = (
                f"module {path or '(root)'!r} is a {first.simple_class} in one and a {second.simple_class} in the other"
            )
            raise InputError(f"{first_name} and {second_name} are not of one model: {problem}")
    if len(shared) <= 1 < min(len(ours), len(theirs)):
        raise InputError(f"{first_name} and {second_name} are not of one model: they have no module in common")


def _other_feed(ours: TaggedModel, theirs: TaggedModel, feed: Feed, name: str) -> dict[str, Array]:
    """The same inputs under the names, and in the float types, that the other file has for them."""
    signature, other_signature = signature_of(ours, "", 0), signature_of(theirs, "", 0)
    renamed: dict[str, str] = {}
    if signature is not None and other_signature is not None:
        pairs = ((tensor, other_signature.inputs.get(argument)) for argument, tensor in signature.inputs.items())
        renamed = {tensor: other for tensor, other in pairs if tensor is not None and other is not None}
    known = Inputs.of(theirs.model)
    given = {each if each in known else renamed.get(each, each): array for each, array in feed.arrays.items()}
    try:
        return dict(known.feed_again(given).arrays)
    except InputError as error:
        raise InputError(f"{name}: {error}") from error


def _lacking(path: str, paths_of_first: Collection[str], theirs: TaggedModel, first_name: str, second_name: str) -> str:
    """Which of the files has no tensor of a module."""
    if path not in theirs:
        return f"{second_name} has no such module"
    return f"{second_name if path in paths_of_first else first_name} has none of its tensors"


def _around(results: Mapping[str, ModuleResult], result: ModuleResult, lacking: str) -> ModuleResult:
    """A module without a tensor in one of the files, with the nearest one around it that has some in both."""
    if result.compared or result.status not in (NOT_COMPARED, "fused"):
        return result
    around = (up for up in tags.ancestors(result.path) if up != result.path and up in results and results[up].compared)
    at = next(around, None)
    where = f"; compared at {at or '(root)'}" if at is not None else ""
    return replace(result, status=NOT_COMPARED, reason=lacking + where, compared_at=at)
