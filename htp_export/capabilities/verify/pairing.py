"""Matches the tensors of a module's call with those of an ONNX file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import onnx_ir as ir

from htp_export.capabilities.verify.pytorch_calls import ModuleCall
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.signatures import Signature
from htp_export.model.tagged import Region, TaggedModel
from htp_export.runtime.arrays import StoredArray
from htp_export.runtime.declared_inputs import is_float
from htp_export.runtime.inputs import Inputs

__all__ = ["Pair", "PairedCall", "input_arguments", "leaving_tensors", "pair_call", "unmatched_calls"]

_Listed = TypeVar("_Listed")


@dataclass(frozen=True)
class Pair:
    """A tensor of a call and the tensors of the file that may match it.

    Attributes:
        name: The argument, or the position among the outputs.
        expected: Its values.
        candidates: One tensor if the file names it; otherwise all tensors with its type and shape.
        computed_in: As of `ModuleCall`; ``""`` if it is not known.
    """

    name: str
    expected: StoredArray
    candidates: tuple[ir.Value, ...]
    computed_in: str = ""


@dataclass(frozen=True)
class PairedCall:
    """A call with its tensors in the file.

    Attributes:
        call: The call.
        outputs: Its outputs, as far as the file has them.
        inputs: Its inputs, as far as the file names them.
        missing: Number of outputs that the file does not have.
        reason: How its tensors were found if the file does not name them, or why there are none; ``""`` otherwise.
    """

    call: ModuleCall
    outputs: tuple[Pair, ...]
    inputs: tuple[Pair, ...] = ()
    missing: int = 0
    reason: str = ""


def input_arguments(tagged: TaggedModel) -> dict[str, str]:
    """Return input of a file → argument of ``forward``; the same name if the file does not say which."""
    signature = tagged.signature("")
    arguments = {} if signature is None else {tensor: argument for argument, tensor in signature.inputs.items()}
    return {declared.name: arguments.get(declared.name, declared.name) for declared in Inputs.of(tagged.model)}


def pair_call(tagged: TaggedModel, call: ModuleCall) -> PairedCall:
    """Find the tensors of one call in a file.

    The outputs of the model are those of the graph, in order. Those of other modules are in ``htp.signatures``. If a
    tool has renamed or removed these tensors, or there are no signatures, the outputs of the module's region are taken
    whose type and shape match.
    """
    signature = tagged.signature(call.path, call.number)
    inputs = () if signature is None else tuple(_inputs(tagged, call, signature))
    graph_outputs = list(tagged.model.graph.outputs)
    results = None if call.path else _of_tensors(call, graph_outputs)
    if results is not None:
        return _in_order(call, results, inputs)
    names = None if signature is None else _of_tensors(call, signature.outputs)
    if names is not None and not any(name is not None and name not in tagged.values for name in names):
        return _in_order(call, [None if name is None else tagged.values[name] for name in names], inputs)
    if not call.path and len(graph_outputs) < len(call.outputs):
        return PairedCall(call, (), inputs, len(call.outputs) - len(graph_outputs))
    return _by_region(tagged, call, inputs)


def _of_tensors(call: ModuleCall, listed: Sequence[_Listed]) -> Sequence[_Listed] | None:
    """The entries of a list of results that are tensors in PyTorch; None if the list has another length.

    It has an entry for each tensor, or for each tensor and each number: under TorchScript, sizes are tensors.
    """
    if len(listed) == len(call.outputs):
        return listed
    if len(listed) == len(call.tensors):
        return [entry for entry, is_tensor in zip(listed, call.tensors, strict=True) if is_tensor]
    return None


def _in_order(call: ModuleCall, values: Sequence[ir.Value | None], inputs: tuple[Pair, ...]) -> PairedCall:
    known = enumerate(zip(call.outputs, values, strict=True))
    pairs = [_pair(call, k, array, (value,)) for k, (array, value) in known if array and value is not None]
    return PairedCall(call, tuple(pairs), inputs, len(values) - len(pairs))


def _pair(call: ModuleCall, place: int, array: StoredArray, candidates: tuple[ir.Value, ...]) -> Pair:
    return Pair(str(place), array, candidates, call.computed_in[place] if call.computed_in else "")


def _inputs(tagged: TaggedModel, call: ModuleCall, signature: Signature) -> Iterable[Pair]:
    for argument, array in call.inputs.items():
        name = signature.inputs.get(argument)
        if name is not None and name in tagged.values:
            yield Pair(argument, array, (tagged.values[name],))


def _by_region(tagged: TaggedModel, call: ModuleCall, inputs: tuple[Pair, ...]) -> PairedCall:
    """Match outputs with the outputs of the module's region."""
    if tagged.source == "none" or call.path not in tagged:
        return PairedCall(call, (), inputs, len(call.outputs), "the file has no nodes of it")
    region = tagged[call.path]
    try:
        region = region.call(call.number) if region.calls > 1 else region
    except InputError as error:
        return PairedCall(call, (), inputs, len(call.outputs), str(error))
    leaving = leaving_tensors(tagged, region)
    pairs = []
    for place, array in enumerate(call.outputs):
        if array is None:
            continue
        fitting = tuple(value for value in leaving if _fits(tagged, value, array))  # in the order of computation
        if fitting:
            pairs.append(_pair(call, place, array, fitting))
    reason = "its tensors are those that leave its nodes: the file does not name them"
    if not pairs:
        reason = _why_none(tagged, region)
    return PairedCall(call, tuple(pairs), inputs, len(call.outputs) - len(pairs), reason)


def _why_none(tagged: TaggedModel, region: Region) -> str:
    if region.nodes and not any(node.graph is tagged.model.graph for node in region.nodes):
        return "its nodes lie inside a branch or a loop"
    return "the file has none of its tensors"


def leaving_tensors(tagged: TaggedModel, region: Region) -> list[ir.Value]:
    """Return the outputs of a region in the main graph, without those of nodes that other modules share by fusion."""
    values = (value for value in region.outputs if value.name and tagged.values.get(value.name) is value)
    return [value for value in values if not _is_of_others(tagged, region.path, value.producer())]


def _is_of_others(tagged: TaggedModel, path: str, node: ir.Node | None) -> bool:
    """Whether a node was fused from work of other modules, too; a shared node does the whole work of each owner."""
    if node is None or node.metadata_props.get(tags.REASON) == "shared":
        return False
    return not all(path in part.modules for part in tagged.work_of(node).parts)


def _fits(tagged: TaggedModel, value: ir.Value, stored: StoredArray) -> bool:
    """Whether the known or inferred type and shape of a tensor match an array; others are compared after the run.

    Floats of any width match: a tool may have changed it.
    """
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
    return len(value.shape) == len(shape) and all(not isinstance(dim, int) or dim == size for dim, size in dims)


def unmatched_calls(tagged: TaggedModel, ran: Mapping[str, int], in_branches: Mapping[str, int]) -> dict[str, str]:
    """Return the modules whose number of calls differs from that in the export, with the reason.

    Args:
        tagged: The file.
        ran: Module path → how often it ran now.
        in_branches: Module with nodes in branches → how many of its calls are outside, or in branches taken now.
    """
    reasons = {}
    for path, info in tagged.hierarchy.items():
        now = ran.get(path, 0)
        known = len(tagged.signatures[path]) if path in tagged.signatures else info.calls
        if path in in_branches and not in_branches[path] and known:
            reasons[path] = (
                "it runs in a branch that PyTorch took now, and the file did not"
                if now
                else "the branch that it runs in was not taken"
            )
            continue
        known = in_branches.get(path, known)
        if not now and known and info.fate.ran:
            reasons[path] = (
                "its calls cannot be seen: it runs in a branch, its forward is called directly, or the model is traced"
            )
        elif now != known and known and info.fate.ran:
            reasons[path] = f"it ran {_times(now)} now and {_times(known)} in the export"
    return reasons


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
