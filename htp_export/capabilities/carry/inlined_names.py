"""The names that tensors of functions had in the flat graph, given back after a tool inlined the functions.

A tool that inlines a function gives its tensors new names for each call: ONNX Runtime writes
``_inlfunc_BertLayer_token_0_linear``, and ``onnx.inliner`` ``linear__1``. What comes before and after the name in the
body is the same for all tensors of a call. Which call that is follows from the weights that its nodes read.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir

from htp_export.editing.flattening import InlinedCall

_Key = tuple[ir.OperatorIdentifier, str, str]  # function, what stands before the name in the body, and after it


def restore_names(after: ir.Model, calls: Sequence[InlinedCall]) -> None:
    """Name the tensors of inlined functions as in the flat graph, where it is known which call they come from.

    Inputs, outputs and initializers of ``after`` keep their names. ``calls`` are in the order in which they ran.
    """
    found = _groups(after, calls)
    by_function: defaultdict[ir.OperatorIdentifier, list[InlinedCall]] = defaultdict(list)
    for call in calls:
        by_function[call.function].append(call)
    kept = {*after.graph.inputs, *after.graph.outputs, *after.graph.initializers.values()}
    used = {value.name for node in after.graph.all_nodes() for value in node.outputs} | {value.name for value in kept}
    renamed: dict[ir.Value, str] = {}
    for function, candidates in by_function.items():
        groups = {key: values for key, values in found.items() if key[0] == function}
        for key, call in _assigned(groups, candidates).items():
            for name, value in groups[key].items():
                wanted = call.values[name].name
                if value not in kept and wanted and wanted not in used:
                    renamed[value] = wanted
                    used.add(wanted)
    for value, name in renamed.items():
        value.name = name


def _groups(after: ir.Model, calls: Iterable[InlinedCall]) -> dict[_Key, dict[str, ir.Value]]:
    """The tensors of each inlined call: name in the body → tensor, for the longest name that fits."""
    names = {call.function: set(call.values) for call in calls}
    found: defaultdict[_Key, dict[str, ir.Value]] = defaultdict(dict)
    for node in after.graph.all_nodes():
        for value in node.outputs:
            for function, inside in names.items():
                split = _split(value.name or "", function[1], inside)
                if split is not None:
                    front, name, back = split
                    found[function, front, back].setdefault(name, value)
    return dict(found)


def _split(text: str, function: str, names: set[str]) -> tuple[str, str, str] | None:
    """What stands before a name of a body, the name, and what stands after it."""
    numbered = re.fullmatch(r"(.+?)(__\d+)", text)
    if numbered and numbered[1] in names:
        return "", numbered[1], numbered[2]
    if function not in text:
        return None
    for start in range(text.index(function) + len(function) + 1, len(text)):
        if text[start - 1] == "_" and text[start:] in names:
            return text[:start], text[start:], ""
    return None


def _assigned(groups: Mapping[_Key, Mapping[str, ir.Value]], calls: Sequence[InlinedCall]) -> dict[_Key, InlinedCall]:
    """Group → the call whose weights its nodes read; in order, where there is one for each call."""
    readers = [{name: _weights(value) for name, value in call.values.items()} for call in calls]
    left, waiting = dict(enumerate(calls)), list(groups)
    found: dict[_Key, InlinedCall] = {}
    for key in groups:
        votes: Counter[int] = Counter()
        for name, value in groups[key].items():
            weights = _weights(value)
            votes.update({number: len(weights & readers[number][name]) for number in left})
        best = votes.most_common(2)
        if best and best[0][1] and (len(best) == 1 or best[0][1] > best[1][1]):
            found[key] = left.pop(best[0][0])
            waiting.remove(key)
    if len(waiting) == len(left):
        found.update(zip(waiting, left.values(), strict=True))
    return found


def _weights(value: ir.Value) -> set[str]:
    """The names of the initializers that the producer of a value reads."""
    producer = value.producer()
    given = () if producer is None else producer.inputs
    return {str(one.name) for one in given if one is not None and one.is_initializer()}
