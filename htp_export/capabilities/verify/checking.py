"""The tensors of module calls, matched with those of a file, and compared with those of its run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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
    """A tensor of a call, by argument or by position among the outputs, and the tensors of the file that may match it.

    There is one candidate if the file names it; otherwise there are all tensors with its type and
    shape.
    """

    name: str
    expected: StoredArray
    candidates: tuple[ir.Value, ...]
    computed_in: str = ""


@dataclass(frozen=True)
class PairedCall:
    """A call with those of its tensors that the file has, and the number of outputs that it does not have.

    ``reason``: How its tensors were found if the file does not name them, or why there are none;
    ``""`` otherwise.
    """

    call: ModuleCall
    outputs: tuple[Pair, ...]
    inputs: tuple[Pair, ...] = ()
    missing: int = 0
    reason: str = ""


def input_arguments(tagged: TaggedModel) -> dict[str, str]:
    """Return input of a file → argument of ``forward``; the same name if the file does not say which."""
    signature = tagged.signature("")
    arguments = (
        {}
        if signature is None
        else {tensor: argument for argument, tensor in signature.inputs.items()}
    )
    return {
        declared.name: arguments.get(declared.name, declared.name)
        for declared in Inputs.of(tagged.model)
    }


def pair_call(tagged: TaggedModel, call: ModuleCall) -> PairedCall:
    """Find the tensors of one call in a file.

    The outputs of the model are those of the graph, in order. Those of other modules are in
    ``htp.signatures``. If a tool has renamed or removed these tensors, or there are no signatures,
    the outputs of the module's region are taken whose type and shape match.
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
    """The tensors that a file names as results of a call, None for a result that it lacks: in one list, or in several.

    There is none if the file does not name them, or has not all that it names.
    """
    if not path:
        yield list(tagged.results)
    signature = tagged.signature(path, number)
    if signature is not None and all(
        name is None or name in tagged.values for name in signature.outputs
    ):
        yield [None if name is None else tagged.values[name] for name in signature.outputs]


def _of_tensors(call: ModuleCall, listed: list[ir.Value | None]) -> list[ir.Value | None] | None:
    """The entries of a list of results that are tensors in PyTorch; None if the list has another length."""
    if len(listed) == len(call.outputs):
        return listed
    if len(listed) == len(call.tensors):  # numbers, too: under TorchScript, sizes are tensors
        return [entry for entry, is_tensor in zip(listed, call.tensors, strict=True) if is_tensor]
    return None


def _in_order(
    call: ModuleCall, values: Sequence[ir.Value | None], inputs: tuple[Pair, ...]
) -> PairedCall:
    known = enumerate(zip(call.outputs, values, strict=True))
    pairs = [
        _pair(call, k, array, (value,))
        for k, (array, value) in known
        if array and value is not None
    ]
    return PairedCall(call, tuple(pairs), inputs, len(values) - len(pairs))


def _pair(
    call: ModuleCall, place: int, array: StoredArray, candidates: tuple[ir.Value, ...]
) -> Pair:
    return Pair(str(place), array, candidates, call.computed_in[place] if call.computed_in else "")


def _inputs(tagged: TaggedModel, call: ModuleCall, signature: Signature) -> Iterable[Pair]:
    for argument, array in call.inputs.items():
        name = signature.inputs.get(argument)
        if name is not None and name in tagged.values:
            yield Pair(argument, array, (tagged.values[name],))


def _by_region(tagged: TaggedModel, call: ModuleCall, inputs: tuple[Pair, ...]) -> PairedCall:
    if tagged.source == "none" or call.path not in tagged:
        return PairedCall(call, (), inputs, len(call.outputs), "the file has no nodes of it")
    try:
        leaving = leaving_tensors(tagged, call.path, call.number)
    except InputError as error:
        return PairedCall(call, (), inputs, len(call.outputs), str(error))
    pairs = []
    for place, array in enumerate(call.outputs):
        fitting = [value for value in leaving if array is not None and _fits(tagged, value, array)]
        if array is not None and fitting:  # in the order of computation
            pairs.append(_pair(call, place, array, tuple(fitting)))
    reason = "its tensors are those that leave its nodes: the file does not name them"
    if not pairs:
        nodes = tagged[call.path].nodes
        inside = nodes and not any(node.graph is tagged.model.graph for node in nodes)
        reason = (
            "its nodes lie inside a branch or a loop"
            if inside
            else "the file has none of its tensors"
        )
    return PairedCall(call, tuple(pairs), inputs, len(call.outputs) - len(pairs), reason)


def leaving_tensors(tagged: TaggedModel, path: str, number: int) -> list[ir.Value]:
    """The outputs of a call's region in the main graph, without those of nodes that other modules share by fusion."""
    region = tagged[path]
    region = region.call(number) if region.calls > 1 else region
    values = (
        value for value in region.outputs if value.name and tagged.values.get(value.name) is value
    )
    tensors = (value for value in values if is_tensor(tagged, value))
    return [value for value in tensors if not _is_of_others(tagged, path, value.producer())]


def is_tensor(tagged: TaggedModel, value: ir.Value) -> bool:
    """Whether a value is a tensor, and no sequence or optional, as far as its type is known."""
    kind = tagged.inferred.type(value)
    return kind is None or isinstance(kind, ir.TensorType)


def _is_of_others(tagged: TaggedModel, path: str, node: ir.Node | None) -> bool:
    """Whether a node was fused from work of other modules, too; a shared node does the whole work of each owner."""
    if node is None or node.metadata_props.get(tags.REASON) == "shared":
        return False
    return not all(path in part.modules for part in tagged.work_of(node).parts)


def _fits(tagged: TaggedModel, value: ir.Value, stored: StoredArray) -> bool:
    """Whether the known or inferred type and shape of a tensor match an array; floats of any width do."""
    if value.dtype is None or value.shape is None:
        value = tagged.typed.get(str(value.name), value)
    dtype = value.dtype
    known = dtype is not None and dtype != ir.DataType.STRING
    floats = known and dtype.is_floating_point() and is_float(stored.array)  # type: ignore[union-attr]
    if known and not floats and dtype.numpy() != stored.array.dtype:  # type: ignore[union-attr]
        return False
    shape = stored.array.shape
    if value.shape is None:
        return True
    dims = zip(value.shape, shape, strict=False)
    return len(value.shape) == len(shape) and all(
        not isinstance(dim, int) or dim == size for dim, size in dims
    )


def unmatched_calls(
    tagged: TaggedModel, ran: Mapping[str, int], in_branches: Mapping[str, int]
) -> dict[str, str]:
    """Return the modules whose number of calls differs from that in the export, with the reason.

    ``ran``: Module path → how often it ran now. ``in_branches``: Module with nodes in branches →
    how many of its calls are outside, or in branches taken now.
    """
    reasons = {}
    for path, info in tagged.hierarchy.items():
        now = ran.get(path, 0)
        exported = len(tagged.signatures[path]) if path in tagged.signatures else info.calls
        known = in_branches.get(path, exported)
        if exported and not known:
            taken = "it runs in a branch that PyTorch took now, and the file did not"
            reasons[path] = taken if now else "the branch that it runs in was not taken"
        elif now == known or not known or not info.fate.ran:
            continue
        elif now:
            reasons[path] = f"it ran {_times(now)} now and {_times(known)} in the export"
        else:
            reasons[path] = (
                "its calls cannot be seen: it runs in a branch, its forward is called directly, or the model is traced"
            )
    return reasons


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")


# --- comparison ---

_Key = tuple[StoredArray, ir.Value, Tolerance | None, str]


@dataclass(frozen=True)
class CheckedCall:
    """A call with its tensors of the file and their differences; ``failed`` says why its part cannot be run."""

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
    """Run a file, and compare the tensors of calls with those of the file that belong to them."""
    wanted: defaultdict[ir.Value, dict[_Key, None]] = defaultdict(dict)
    for paired in calls:
        for pair in (*paired.outputs, *paired.inputs):
            for value in pair.candidates:
                wanted[value][_key(pair, value, tolerances(paired.call.path))] = None
    sizes = {str(value.name): max(key[0].nbytes for key in keys) for value, keys in wanted.items()}
    by_name = {str(value.name): value for value in wanted}
    differences: dict[_Key, Difference] = {}
    halves = half_precisions(run.tagged)

    def compare(name: str, array: Array) -> None:
        for key in wanted[by_name[name]]:
            computed_in = filter(None, (key[3], halves.get(name)))
            differences[key] = difference(*key[0].compared_with(array), key[2], computed_in)

    run.fetch(sizes, compare)

    checked = []
    for paired in calls:
        tolerance = tolerances(paired.call.path)
        if paired.reason:
            paired = _each_once(paired, tolerance, differences)
        outputs, inputs = (
            tuple(
                (
                    value,
                    TensorResult(
                        pair.name, str(value.name), differences[_key(pair, value, tolerance)]
                    ),
                )
                for pair in pairs
                for value in pair.candidates
            )
            for pairs in (paired.outputs, paired.inputs)
        )
        checked.append(CheckedCall(paired, outputs, inputs))
    return checked


def _key(pair: Pair, value: ir.Value, tolerance: Tolerance | None) -> _Key:
    return pair.expected, value, tolerance, pair.computed_in


def _each_once(
    paired: PairedCall, tolerance: Tolerance | None, differences: Mapping[_Key, Difference]
) -> PairedCall:
    """For a call whose tensors the file does not name, match each tensor with one output, the nearest first."""
    options = [
        (_rank(differences[_key(pair, value, tolerance)]), pair.name, value)
        for pair in paired.outputs
        for value in pair.candidates
        if differences[_key(pair, value, tolerance)].comparable
    ]
    chosen: dict[str, ir.Value] = {}
    for _, name, value in sorted(options, key=lambda option: option[0]):
        if name not in chosen and value not in chosen.values():
            chosen[name] = value
    outputs = tuple(
        replace(pair, candidates=(chosen[pair.name],))
        for pair in paired.outputs
        if pair.name in chosen
    )
    return replace(
        paired, outputs=outputs, missing=paired.missing + len(paired.outputs) - len(outputs)
    )


def _rank(result: Difference) -> tuple[bool, float]:
    return bool(result.problem), math.inf if math.isnan(result.max_abs) else result.max_abs


def excesses(calls: Iterable[CheckedCall]) -> dict[ir.Value, float]:
    """Return compared tensor → the smallest of its differences, in units of the tolerance."""
    largest: dict[ir.Value, float] = {}
    for call in calls:
        for value, result in (*call.outputs, *call.inputs):
            largest[value] = min(largest.get(value, math.inf), result.difference.excess)
    return largest
