"""Match the tensors of module calls with tensors of a file, and compare their values."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import onnx_ir as ir

from htp_export.capabilities.verify.file_run import FileRun, half_precisions
from htp_export.capabilities.verify.pytorch_run import ModuleCall
from htp_export.capabilities.verify.results import TensorResult
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.signatures import Signature
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.arrays import Array, StoredArray
from htp_export.runtime.comparing import Difference, Tolerance, difference
from htp_export.runtime.declared_inputs import is_float
from htp_export.runtime.inputs import Inputs

Tolerances = Callable[[str], Tolerance | None]
"""Module path → tolerance; None for the entry of ``TOLERANCES`` for the dtype."""


@dataclass(frozen=True)
class Pair:
    """A tensor of a call, by argument or by position among the outputs, and candidates for it in the file.

    There is one candidate if the file names it; otherwise, all tensors with its type and shape.
    """

    name: str
    expected: StoredArray
    candidates: tuple[ir.Value, ...]
    computed_in: str = ""


@dataclass(frozen=True)
class PairedCall:
    """A call with its tensors that the file has, and the number of outputs that the file lacks.

    ``reason``: How its tensors were found if the file does not name them, or why there are none;
    ``""`` otherwise.
    """

    call: ModuleCall
    outputs: tuple[Pair, ...]
    inputs: tuple[Pair, ...] = ()
    missing: int = 0
    reason: str = ""


def input_arguments(tagged: TaggedModel) -> dict[str, str]:
    """Return input of a file → argument of ``forward``; the same name if the file has no record of it."""
    signature = tagged.signature("")
    arguments: dict[str | None, str] = {}
    if signature is not None:
        arguments = {tensor: argument for argument, tensor in signature.inputs.items()}
    names = [declared.name for declared in Inputs.of(tagged.model)]
    return {name: arguments.get(name, name) for name in names}


def pair_call(tagged: TaggedModel, call: ModuleCall) -> PairedCall:
    """Find the tensors of one call in a file.

    The outputs of the model are the graph outputs, in order. The outputs of other modules are named
    in ``htp.signatures``. If a tool renamed or removed these tensors, or there are no signatures,
    candidates are the outputs of the module's region with the same type and shape.
    """
    signature = tagged.signature(call.path, call.number)
    inputs = () if signature is None else tuple(_inputs(tagged, call, signature))
    for listed in named_results(tagged, call.path, call.number):
        results = _of_tensors(call, listed)
        if results is not None:
            return _in_order(call, results, inputs)
    missing = len(call.outputs) - len(tagged.results)
    if not call.path and missing > 0:
        return PairedCall(call, (), inputs, missing)
    return _by_region(tagged, call, inputs)


def named_results(tagged: TaggedModel, path: str, number: int) -> Iterator[list[ir.Value | None]]:
    """Yield lists of the tensors that a file names as results of a call; None stands for a result that it lacks.

    For the root, the graph outputs come first. Nothing is yielded for a call without a signature,
    or whose signature names tensors that the file lacks.
    """
    if not path:
        yield list(tagged.results)
    signature = tagged.signature(path, number)
    if signature is None:
        return
    if all(name is None or name in tagged.values for name in signature.outputs):
        yield [None if name is None else tagged.values[name] for name in signature.outputs]


def _of_tensors(call: ModuleCall, listed: list[ir.Value | None]) -> list[ir.Value | None] | None:
    """The entries of a list of results that are tensors in PyTorch; None if the list has another length."""
    if len(listed) == len(call.outputs):
        return listed
    # The list contains numbers, too: TorchScript converts sizes to tensors.
    if len(listed) == len(call.tensors):
        return [entry for entry, is_tensor in zip(listed, call.tensors, strict=True) if is_tensor]
    return None


def _in_order(
    call: ModuleCall, values: Sequence[ir.Value | None], inputs: tuple[Pair, ...]
) -> PairedCall:
    """Pair the outputs of a call with tensors of the file by position; their numbers are equal."""
    pairs = []
    for position, (array, value) in enumerate(zip(call.outputs, values, strict=True)):
        if array is not None and value is not None:
            pairs.append(_pair(call, position, array, (value,)))
    return PairedCall(call, tuple(pairs), inputs, len(values) - len(pairs))


def _pair(
    call: ModuleCall, position: int, array: StoredArray, candidates: tuple[ir.Value, ...]
) -> Pair:
    """The pair for the output at a position."""
    computed_in = call.computed_in[position] if call.computed_in else ""
    return Pair(str(position), array, candidates, computed_in)


def _inputs(tagged: TaggedModel, call: ModuleCall, signature: Signature) -> Iterable[Pair]:
    """Pair the recorded inputs of a call with the tensors that its signature names."""
    for argument, array in call.inputs.items():
        name = signature.inputs.get(argument)
        if name is not None and name in tagged.values:
            yield Pair(argument, array, (tagged.values[name],))


def _by_region(tagged: TaggedModel, call: ModuleCall, inputs: tuple[Pair, ...]) -> PairedCall:
    """Pair the outputs of a call with the fitting outputs of its region, in the order of computation."""
    if tagged.source == "none" or call.path not in tagged:
        return PairedCall(call, (), inputs, len(call.outputs), "the file has no nodes of it")
    try:
        leaving = leaving_tensors(tagged, call.path, call.number)
    except InputError as error:
        return PairedCall(call, (), inputs, len(call.outputs), str(error))
    pairs = []
    for position, array in enumerate(call.outputs):
        if array is None:
            continue
        candidates = tuple(value for value in leaving if _fits(tagged, value, array))
        if candidates:
            pairs.append(_pair(call, position, array, candidates))
    if pairs:
        reason = "the file does not name its tensors; they are found among the outputs of its nodes"
    elif _is_in_subgraphs(tagged, call.path):
        reason = "its nodes lie inside a branch or a loop"
    else:
        reason = "the file has none of its tensors"
    return PairedCall(call, tuple(pairs), inputs, len(call.outputs) - len(pairs), reason)


def _is_in_subgraphs(tagged: TaggedModel, path: str) -> bool:
    """Whether a module has nodes, and all are inside branches or loops."""
    nodes = tagged[path].nodes
    return bool(nodes) and all(node.graph is not tagged.model.graph for node in nodes)


def leaving_tensors(tagged: TaggedModel, path: str, number: int) -> list[ir.Value]:
    """Outputs of a call's region in the main graph, except outputs of nodes that are fused with other modules."""
    region = tagged[path]
    region = region.call(number) if region.calls > 1 else region
    leaving = []
    for value in region.outputs:
        is_in_main_graph = value.name and tagged.values.get(value.name) is value
        if not is_in_main_graph or not is_tensor(tagged, value):
            continue
        if not _is_fused(tagged, path, value.producer()):
            leaving.append(value)
    return leaving


def is_tensor(tagged: TaggedModel, value: ir.Value) -> bool:
    """Whether a value is a tensor, not a sequence or optional; True if its type is unknown."""
    kind = tagged.inferred.type(value)
    return kind is None or isinstance(kind, ir.TensorType)


def _is_fused(tagged: TaggedModel, path: str, node: ir.Node | None) -> bool:
    """Whether a node was fused from work of a module and of others; a shared node does the whole work of each owner."""
    if node is None or node.metadata_props.get(tags.REASON) == "shared":
        return False
    return not all(path in part.modules for part in tagged.work_of(node).parts)


def _fits(tagged: TaggedModel, value: ir.Value, stored: StoredArray) -> bool:
    """Whether the known or inferred type and shape of a tensor match an array; floats of any width match."""
    if value.dtype is None or value.shape is None:
        value = tagged.typed.get(str(value.name), value)
    return _fits_type(value.dtype, stored.array) and _fits_shape(value.shape, stored.array)


def _fits_type(dtype: ir.DataType | None, array: Array) -> bool:
    """Whether an array has a type, if the type is known; floats of any width match."""
    if dtype is None or dtype == ir.DataType.STRING:
        return True
    if dtype.is_floating_point() and is_float(array):
        return True
    return bool(dtype.numpy() == array.dtype)


def _fits_shape(shape: ir.Shape | None, array: Array) -> bool:
    """Whether an array has a shape, as far as the shape is known."""
    if shape is None:
        return True
    if len(shape) != array.ndim:
        return False
    dims = zip(shape, array.shape, strict=True)
    return all(not isinstance(dim, int) or dim == size for dim, size in dims)


def unmatched_calls(
    tagged: TaggedModel, ran: Mapping[str, int], in_branches: Mapping[str, int]
) -> dict[str, str]:
    """Return the modules whose number of calls differs from the export, with the reason.

    ``ran``: Module path → number of calls now. ``in_branches``: For a module with nodes in
    branches, the number of its calls outside of branches, or in branches that are taken now.
    """
    reasons = {}
    for path, info in tagged.hierarchy.items():
        now = ran.get(path, 0)
        exported = len(tagged.signatures[path]) if path in tagged.signatures else info.calls
        expected = in_branches.get(path, exported)
        if exported and not expected:
            if now:
                reasons[path] = "it runs in a branch that PyTorch took now, and the file did not"
            else:
                reasons[path] = "the branch that it runs in was not taken"
        elif now == expected or not expected or not info.fate.ran:
            continue
        elif now:
            reasons[path] = f"it ran {_times(now)} now and {_times(expected)} in the export"
        else:
            reasons[path] = (
                "its calls cannot be seen: it runs in a branch, its forward is called directly, or the model is traced"
            )
    return reasons


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


# --- comparison ---


class _Comparison(NamedTuple):
    """One comparison of a tensor of PyTorch with one of the file."""

    expected: StoredArray
    actual: ir.Value
    tolerance: Tolerance | None
    computed_in: str


@dataclass(frozen=True)
class CheckedCall:
    """A call with its tensors of the file and their differences; ``failed``: why its part cannot run, or ``""``."""

    paired: PairedCall
    outputs: tuple[tuple[ir.Value, TensorResult], ...]
    inputs: tuple[tuple[ir.Value, TensorResult], ...]
    failed: str = ""

    @property
    def path(self) -> str:
        """The module."""
        return self.paired.call.path

    @property
    def wrong(self) -> bool:
        """Whether an output differs, or its part of the file cannot be run."""
        return bool(self.failed) or any(not result.difference.agrees for _, result in self.outputs)


def check_calls(
    run: FileRun, calls: Sequence[PairedCall], tolerances: Tolerances
) -> list[CheckedCall]:
    """Run a file once, and compare the paired tensors of calls.

    Tensors are compared as soon as they are fetched, so that they need not stay in memory. Equal
    comparisons, of a tensor that several calls return, are made once.
    """
    wanted: defaultdict[ir.Value, dict[_Comparison, None]] = defaultdict(dict)
    for paired in calls:
        tolerance = tolerances(paired.call.path)
        for pair in (*paired.outputs, *paired.inputs):
            for value in pair.candidates:
                wanted[value][_comparison(pair, value, tolerance)] = None
    sizes: dict[str, int] = {}
    by_name: dict[str, ir.Value] = {}
    for value, comparisons in wanted.items():
        name = str(value.name)
        by_name[name] = value
        sizes[name] = max(comparison.expected.nbytes for comparison in comparisons)
    differences: dict[_Comparison, Difference] = {}
    halves = half_precisions(run.tagged)

    def compare(name: str, array: Array) -> None:
        for comparison in wanted[by_name[name]]:
            expected, actual = comparison.expected.compared_with(array)
            computed_in = filter(None, (comparison.computed_in, halves.get(name)))
            differences[comparison] = difference(
                expected, actual, comparison.tolerance, computed_in
            )

    run.fetch(sizes, compare)

    checked = []
    for paired in calls:
        tolerance = tolerances(paired.call.path)
        if paired.reason:
            paired = _each_once(paired, tolerance, differences)
        outputs = _tensor_results(paired.outputs, tolerance, differences)
        inputs = _tensor_results(paired.inputs, tolerance, differences)
        checked.append(CheckedCall(paired, outputs, inputs))
    return checked


def _tensor_results(
    pairs: Iterable[Pair],
    tolerance: Tolerance | None,
    differences: Mapping[_Comparison, Difference],
) -> tuple[tuple[ir.Value, TensorResult], ...]:
    """The compared tensors of pairs, with their differences."""
    results = []
    for pair in pairs:
        for value in pair.candidates:
            compared = differences[_comparison(pair, value, tolerance)]
            results.append((value, TensorResult(pair.name, str(value.name), compared)))
    return tuple(results)


def _comparison(pair: Pair, value: ir.Value, tolerance: Tolerance | None) -> _Comparison:
    """The comparison of a pair with one of its candidates."""
    return _Comparison(pair.expected, value, tolerance, pair.computed_in)


def _each_once(
    paired: PairedCall, tolerance: Tolerance | None, differences: Mapping[_Comparison, Difference]
) -> PairedCall:
    """Match each output of a call with one of its candidates, the nearest first, and each candidate once."""
    options = []
    for pair in paired.outputs:
        for value in pair.candidates:
            compared = differences[_comparison(pair, value, tolerance)]
            if compared.comparable:
                options.append((_rank(compared), pair.name, value))
    options.sort(key=lambda option: option[0])
    matches: dict[str, ir.Value] = {}
    for _, name, value in options:
        if name not in matches and value not in matches.values():
            matches[name] = value
    outputs = tuple(
        replace(pair, candidates=(matches[pair.name],))
        for pair in paired.outputs
        if pair.name in matches
    )
    missing = paired.missing + len(paired.outputs) - len(outputs)
    return replace(paired, outputs=outputs, missing=missing)


def _rank(result: Difference) -> tuple[bool, float]:
    """The order of candidates: agreeing ones first, then by the largest difference, NaN last."""
    return bool(result.problem), math.inf if math.isnan(result.max_abs) else result.max_abs


def excesses(calls: Iterable[CheckedCall]) -> dict[ir.Value, float]:
    """Return compared tensor → the smallest of its differences, in units of the tolerance."""
    smallest: dict[ir.Value, float] = {}
    for call in calls:
        for value, result in (*call.outputs, *call.inputs):
            smallest[value] = min(smallest.get(value, math.inf), result.difference.excess)
    return smallest
