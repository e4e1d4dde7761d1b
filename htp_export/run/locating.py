"""Where an error comes from: which of the modules whose outputs differ are wrong by themselves.

In one run of a whole file an error is seen where it arises and in everything after that. A tensor is an *origin* if it
differs although everything that it is computed from, back to the next tensors that were compared, agrees. The module
that gives the origin back is wrong by itself: the first one to end, which is the innermost.

Errors also fade and grow again on their way, around the line that tolerances draw. A tensor that is just beyond it, but
computed from others that are just within, is no origin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from htp_export.format import tags
from htp_export.model.tagged import TaggedModel
from htp_export.run.checking import CheckedCall, excesses
from htp_export.run.pytorch_calls import ModuleCall

__all__ = ["Blame", "blame_by_graph", "blame_by_nesting", "with_missing_outputs"]

_SUDDEN = 4
"""How many times the error at its inputs a correct module may have at its output: sums of rounding errors grow."""


@dataclass(frozen=True)
class Blame:
    """Who is wrong by itself.

    Attributes:
        calls: Indices of calls, in the order in which they ended.
        modules: Paths of modules, likewise, with those that have no tensor of their own: path → what is wrong there.
    """

    calls: tuple[int, ...]
    modules: Mapping[str, str]


def blame_by_graph(tagged: TaggedModel, calls: Sequence[CheckedCall]) -> Blame:
    """Follow errors back through the graph.

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
        given = {value for value, _ in call.inputs}
        for value, result in call.inputs:
            if value in origins - explained and not _is_given_back(value, calls):
                modules.setdefault(_maker(tagged, value), f"makes {result.tensor!r}: {result.difference.problem}")
                explained.add(value)
        for value, result in call.outputs:
            own = value not in given and value in origins
            other = excess[value] <= 1 and not result.difference.agrees  # it is the tensor of another
            if (own and value not in explained) or other:
                explained.add(value)
                blamed.append(index)
                modules.setdefault(call.path, "")
    return Blame(tuple(dict.fromkeys(blamed)), modules)


def _is_given_back(value: ir.Value, calls: Sequence[CheckedCall]) -> bool:
    """Whether a module computes and returns a tensor."""
    return any(
        value in (out for out, _ in call.outputs) and value not in (given for given, _ in call.inputs) for call in calls
    )


def _maker(tagged: TaggedModel, value: ir.Value) -> str:
    """The module that computes a tensor, or the nearest that holds all who do."""
    producer = value.producer()
    owners = tagged.owners_of(producer) if producer is not None else ()
    return tags.common_ancestor(owners)


def _origins(tagged: TaggedModel, excess: Mapping[ir.Value, float]) -> set[ir.Value]:
    """The tensors that differ, and none of those that they are computed from."""
    worst_inputs = {value: _worst_read(tagged, value, excess) for value, size in excess.items() if size > 1}
    origins = {value for value, most in worst_inputs.items() if most <= 1}
    sudden = {value for value in origins if excess[value] > _SUDDEN * worst_inputs[value]}
    return sudden or origins


def _worst_read(tagged: TaggedModel, value: ir.Value, excess: Mapping[ir.Value, float]) -> float:
    """How far off the tensors are from which one is computed, back to the next ones that were compared."""
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
    """For calls that each ran on the right inputs: wrong by themselves are those in which no wrong one ran.

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
    """The same, with the root where the file gives back fewer tensors than it.

    Args:
        tagged: The file.
        blame: Who else is wrong.
        root: The call of the model itself.
    """
    missing = len(root.outputs) - len(tagged.model.graph.outputs)
    if missing <= 0:
        return blame
    reason = f"{missing} of the {len(root.outputs)} tensors that PyTorch returns are not among the file's outputs"
    return replace(blame, modules={**blame.modules, root.path: reason})
