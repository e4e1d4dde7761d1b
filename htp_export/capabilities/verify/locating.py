"""Finds which of the modules whose outputs differ are wrong themselves.

In one run of a whole file, an error is visible in all tensors after its cause. A tensor is an *origin* if it differs
although all compared tensors from which it is computed agree. The module that returns the origin is wrong itself: the
first one whose call ends, which is the innermost.

Errors can fall below the tolerance and exceed it again later. A tensor slightly beyond its tolerance that is computed
from tensors slightly within theirs is no origin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from htp_export.capabilities.verify.checking import CheckedCall, excesses
from htp_export.capabilities.verify.pytorch_calls import ModuleCall
from htp_export.format import tags
from htp_export.model.tagged import TaggedModel

__all__ = ["Blame", "blame_by_graph", "blame_by_nesting", "with_missing_outputs"]

_SUDDEN = 4
"""How many times the error at its inputs a correct module may have at its output: sums of rounding errors grow."""


@dataclass(frozen=True)
class Blame:
    """The modules that are wrong themselves.

    Attributes:
        calls: Indices of calls, in the order in which they ended.
        modules: Module path → what is wrong, in the same order; also modules without a tensor of their own.
    """

    calls: tuple[int, ...]
    modules: Mapping[str, str]


def blame_by_graph(tagged: TaggedModel, calls: Sequence[CheckedCall]) -> Blame:
    """Return the modules that return origins of errors.

    Args:
        tagged: The file.
        calls: The calls, in the order in which they ended.
    """
    excess = excesses(calls)
    origins = _origins(tagged, excess)
    blamed: list[int] = []
    modules: dict[str, str] = {}
    explained: set[ir.Value] = set()
    for index, call in enumerate(calls):
        inputs = {value for value, _ in call.inputs}
        for value, result in call.inputs:
            if value in origins - explained and not _is_given_back(value, calls):
                modules.setdefault(_maker(tagged, value), f"makes {result.tensor!r}: {result.difference.problem}")
                explained.add(value)
        for value, result in call.outputs:
            is_origin = value not in inputs and value in origins
            is_another = excess[value] <= 1 and not result.difference.agrees  # it is the tensor of another
            if (is_origin and value not in explained) or is_another:
                explained.add(value)
                blamed.append(index)
                modules.setdefault(call.path, "")
    return Blame(tuple(dict.fromkeys(blamed)), modules)


def _is_given_back(value: ir.Value, calls: Sequence[CheckedCall]) -> bool:
    """Whether a module computes and returns a tensor."""
    return any(
        value in (output for output, _ in call.outputs) and value not in (argument for argument, _ in call.inputs)
        for call in calls
    )


def _maker(tagged: TaggedModel, value: ir.Value) -> str:
    """The module that computes a tensor, or the nearest module around all of its owners."""
    producer = value.producer()
    owners = tagged.owners_of(producer) if producer is not None else ()
    return tags.common_ancestor(owners)


def _origins(tagged: TaggedModel, excess: Mapping[ir.Value, float]) -> set[ir.Value]:
    """The tensors that differ although the tensors from which they are computed agree."""
    worst_inputs = {value: _worst_read(tagged, value, excess) for value, size in excess.items() if size > 1}
    origins = {value for value, most in worst_inputs.items() if most <= 1}
    sudden = {value for value in origins if excess[value] > _SUDDEN * worst_inputs[value]}
    return sudden or origins


def _worst_read(tagged: TaggedModel, value: ir.Value, excess: Mapping[ir.Value, float]) -> float:
    """The largest excess of the nearest compared tensors from which a tensor is computed."""
    worst, seen, queue = 0.0, {value}, list(_sources(tagged, value))
    while queue:
        current = queue.pop()
        if current in seen:
            continue
        seen.add(current)
        if current in excess:
            worst = max(worst, excess[current])
        else:
            queue.extend(_sources(tagged, current))
    return worst


def _sources(tagged: TaggedModel, value: ir.Value) -> Iterator[ir.Value]:
    node = value.producer()
    return iter(()) if node is None else tagged.index.reads(node)


def blame_by_nesting(calls: Sequence[CheckedCall]) -> Blame:
    """Return the wrong calls inside of which no other call is wrong, for calls that each ran on the right inputs.

    Args:
        calls: The calls, in the order in which they ended.
    """
    blamed: list[int] = []
    latest_wrong = -1  # when the last wrong call so far began
    for index, call in enumerate(calls):
        began = call.paired.call.began
        if call.wrong:
            if latest_wrong < began:
                blamed.append(index)
            latest_wrong = max(latest_wrong, began)
    return Blame(tuple(blamed), dict.fromkeys((calls[index].path for index in blamed), ""))


def with_missing_outputs(tagged: TaggedModel, blame: Blame, root: ModuleCall) -> Blame:
    """Add the root if the file returns fewer tensors than the model.

    Args:
        tagged: The file.
        blame: The modules that are wrong themselves.
        root: The call of the model.
    """
    missing = len(root.outputs) - len(tagged.model.graph.outputs)
    if missing <= 0:
        return blame
    reason = f"{missing} of the {len(root.outputs)} tensors that PyTorch returns are not among the file's outputs"
    return replace(blame, modules={**blame.modules, root.path: reason})
