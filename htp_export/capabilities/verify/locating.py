"""Finds which of the modules whose outputs differ are wrong themselves.

A tensor is an *origin* if it differs although all compared tensors from which it is computed agree.
The first module whose call ends with an origin, the innermost, is wrong itself. See
``docs/verify.md``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from htp_export.capabilities.verify.checking import CheckedCall, excesses
from htp_export.capabilities.verify.pytorch_run import ModuleCall
from htp_export.capabilities.verify.results import (
    AGREES,
    COMPARED,
    DIFFERS,
    INHERITS,
    NAN,
    NOT_COMPARED,
    CallResult,
    ModuleResult,
)
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.call_tree import Instance, NodeCalls
from htp_export.format.model_metadata import read_contamination
from htp_export.model.boundaries import input_dependent_values
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.comparing import Tolerance
from htp_export.shapes.operator_kinds import SIZES_ONLY

_SUDDEN = 4
"""How many times the error at its inputs a correct module may have at its output: sums of rounding errors grow."""


@dataclass(frozen=True)
class Blame:
    """The modules that are wrong themselves, in the order in which their calls ended.

    ``calls`` are indices of calls; ``modules``, path → what is wrong, also has modules without a
    tensor of their own.
    """

    calls: tuple[int, ...]
    modules: Mapping[str, str]


def blame_by_graph(tagged: TaggedModel, calls: Sequence[CheckedCall]) -> Blame:
    """Return the modules that return origins of errors; the calls are in the order in which they ended."""
    excess = excesses(calls)
    origins = _origins(tagged, excess)
    blamed: list[int] = []
    modules: dict[str, str] = {}
    explained: set[ir.Value] = set()
    for index, call in enumerate(calls):
        inputs = {value for value, _ in call.inputs}
        for value, result in call.inputs:
            if value in origins - explained and not _is_given_back(value, calls):
                modules.setdefault(
                    _maker(tagged, value), f"makes {result.tensor!r}: {result.difference.problem}"
                )
                explained.add(value)
        for value, result in call.outputs:
            is_origin = value not in inputs and value in origins
            # it is the tensor of another
            is_another = excess[value] <= 1 and not result.difference.agrees
            if (is_origin and value not in explained) or is_another:
                explained.add(value)
                blamed.append(index)
                modules.setdefault(call.path, "")
    return Blame(tuple(dict.fromkeys(blamed)), modules)


def _is_given_back(value: ir.Value, calls: Sequence[CheckedCall]) -> bool:
    return any(
        value in (output for output, _ in call.outputs)
        and value not in (argument for argument, _ in call.inputs)
        for call in calls
    )


def _maker(tagged: TaggedModel, value: ir.Value) -> str:
    """The module that computes a tensor, or the nearest module around all of its owners."""
    producer = value.producer()
    owners = tagged.owners_of(producer) if producer is not None else ()
    return tags.common_ancestor(owners)


def _origins(tagged: TaggedModel, excess: Mapping[ir.Value, float]) -> set[ir.Value]:
    """The tensors that differ although the tensors from which they are computed agree."""
    worst_inputs = {
        value: _worst_read(tagged, value, excess) for value, size in excess.items() if size > 1
    }
    origins = {value for value, most in worst_inputs.items() if most <= 1}
    sudden = {value for value in origins if excess[value] > _SUDDEN * worst_inputs[value]}
    return sudden or origins


def _worst_read(tagged: TaggedModel, value: ir.Value, excess: Mapping[ir.Value, float]) -> float:
    """The largest excess of the nearest compared tensors from which a tensor is computed."""
    return max(
        (excess.get(each, 0.0) for each in computed_from(tagged, _sources(tagged, value), excess)),
        default=0.0,
    )


def computed_from(
    tagged: TaggedModel, values: Iterable[ir.Value], stops: Container[ir.Value] = ()
) -> set[ir.Value]:
    """Tensors, and all that they are computed from, up to the nearest ``stops``, which are among them."""
    seen, queue = set[ir.Value](), [*values]
    while queue:
        value = queue.pop()
        if value not in seen:
            seen.add(value)
            queue.extend(() if value in stops else _sources(tagged, value))
    return seen


def _sources(tagged: TaggedModel, value: ir.Value) -> Iterator[ir.Value]:
    node = value.producer()
    return iter(()) if node is None else tagged.index.reads(node)


def blame_by_nesting(calls: Sequence[CheckedCall]) -> Blame:
    """Return the wrong calls inside of which no other call is wrong, for calls that each ran on the right inputs."""
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
    """Add the root if the file returns fewer tensors than the model."""
    missing = len(root.outputs) - len(tagged.results)
    if missing <= 0:
        return blame
    reason = f"{missing} of the {len(root.outputs)} tensors that PyTorch returns are not among the file's outputs"
    return replace(blame, modules={**blame.modules, root.path: reason})


# --- tags that contradict the graph, whatever the values of the tensors ---

# A tensor with the right values may still be computed by nodes of another module. The graph shows
# this, together with the names of the inputs and outputs of modules in PyTorch (`htp.signatures`).


def with_contradictions(tagged: TaggedModel, blame: Blame, paths: Collection[str]) -> Blame:
    """Add the modules whose tags contradict the graph, after those whose values are wrong."""
    known = blame.modules
    contradicting = {
        path: why
        for path, why in contradictions(tagged).items()
        if path in paths and path not in known
    }
    return replace(blame, modules={**known, **contradicting}) if contradicting else blame


def contradictions(tagged: TaggedModel) -> Mapping[str, str]:
    """Return module path → the contradiction between its tags and the graph.

    - A constant or dead module returns a tensor that depends on the inputs, or that a result depends on.
    - A computed module returns a tensor that no node of its region computes.
    - A call of it has an input that nodes of this call compute, and that is none of its outputs.

    Modules whose boundary differs from PyTorch according to the export (``htp.contamination``) are
    left out.
    """
    if tagged.source != "htp" or not tagged.signatures:
        return {}
    excused = {path for path, *_ in read_contamination(tagged.model.metadata_props)}
    facts = _Facts(tagged)
    reasons = (
        (path, next(facts.reasons(path), ""))
        for path in tagged.paths
        if path and path not in excused
    )
    return {path: reason for path, reason in reasons if reason}


class _Facts:
    def __init__(self, tagged: TaggedModel) -> None:
        self._tagged = tagged
        self._varying = input_dependent_values(tagged.model, tagged.nodes)
        self._useful = _useful(tagged)

    def reasons(self, path: str) -> Iterator[str]:
        fate = self._tagged.hierarchy[path].fate
        calls = self._tagged.signatures.get(path, ())
        outputs = self._values([name for call in calls for name in call.outputs])
        taken = [self._values(list(call.inputs.values())) for call in calls]
        new = [
            value
            for value in outputs
            if not any(value in inputs_of_call for inputs_of_call in taken)
        ]
        if fate.is_folded or fate.is_needless:
            leads = "depends on the inputs" if fate.is_folded else "leads to a result"
            for value in new:
                if fate.is_folded or value in self._useful:
                    yield f"it is said to be {fate}, but {value.name!r}, which it gives back, {leads}"
        elif fate.is_exact:
            for value in new:
                work = self._work(value)
                if path not in work.modules:
                    owners = ", ".join(
                        repr(owner) if owner else "the model itself" for owner in work.owners
                    )
                    yield f"{value.name!r}, which it gives back, is computed by {owners}"
            for number, values in enumerate(taken):
                inside = Instance(path, number)
                for value in values:
                    if value not in outputs and all(
                        inside in part.running for part in self._work(value).parts
                    ):
                        yield f"{value.name!r}, which it is given, is computed by its own nodes"

    def _values(self, names: Sequence[str | None]) -> list[ir.Value]:
        """The tensors with these names that nodes compute from the inputs."""
        values = (
            self._tagged.values.get(name) for name in dict.fromkeys(names) if name is not None
        )
        return [
            value
            for value in values
            if value in self._varying and value is not None and self._work(value).parts
        ]

    def _work(self, value: ir.Value) -> NodeCalls:
        producer = value.producer()
        return NodeCalls() if producer is None else self._tagged.work_of(producer)


def _useful(tagged: TaggedModel) -> set[ir.Value]:
    """The tensors of the main graph on whose values, not only sizes, a result of the model depends."""
    useful = set(tagged.results)
    for node in reversed(tagged.model.graph):
        if node.op_type not in SIZES_ONLY and any(value in useful for value in node.outputs):
            useful.update(tagged.index.reads(node))
    return useful


def tolerance_of(
    tagged: TaggedModel, tolerances: Mapping[str, tuple[float, float]]
) -> Callable[[str], Tolerance | None]:
    """A function from a module to its tolerance, None without one; the last selector that matches applies."""
    check_tolerances(tolerances)
    by_path: dict[str, Tolerance] = {}
    for selector, (absolute, relative) in tolerances.items():
        by_path.update(dict.fromkeys(tagged.select(selector), Tolerance(absolute, relative)))
    return by_path.get


def check_tolerances(tolerances: Mapping[str, tuple[float, float]]) -> None:
    """Refuse tolerances that are no numbers from 0 up."""
    for selector, (absolute, relative) in tolerances.items():
        if not (absolute >= 0 and relative >= 0):
            raise InputError(
                f"tolerance of {selector!r}: {absolute}, {relative} are not two numbers from 0 up"
            )


def module_results(
    tagged: TaggedModel,
    chosen: Collection[str],
    calls: Sequence[CheckedCall],
    blame: Blame,
    reasons: Mapping[str, str],
    *,
    isolated: bool,
) -> dict[str, ModuleResult]:
    """The result of every chosen module, in the order of the module tree; ``reasons`` says why one was not compared."""
    blamed, by_module = set(blame.calls), defaultdict(list)
    for index, call in enumerate(calls):
        by_module[call.path].append(_call_result(tagged, call, index in blamed, isolated=isolated))
    call_reasons = {call.path: call.paired.reason for call in calls if call.paired.reason}
    call_reasons |= {call.path: call.failed for call in calls if call.failed}
    call_reasons |= {path: reason for path, reason in blame.modules.items() if reason}
    return {
        path: _module_result(
            tagged, path, by_module[path], reasons.get(path) or call_reasons.get(path, ""), blame
        )
        for path in tagged.paths
        if path in chosen
    }


def _call_result(
    tagged: TaggedModel, call: CheckedCall, blamed: bool, *, isolated: bool
) -> CallResult:
    agreeing = NAN if any(result.difference.nan for _, result in call.outputs) else AGREES
    status = DIFFERS if blamed else INHERITS if call.wrong else agreeing
    if not call.outputs and not call.failed:
        status = NOT_COMPARED
    elif not isolated and not blamed and tagged.hierarchy[call.path].fate.passes_on:
        # its tensor is another's, who answers for it
        status = str(tagged.hierarchy[call.path].fate)
    return CallResult(
        call.paired.call.number,
        status,
        tuple(result for _, result in call.outputs),
        tuple(result for _, result in call.inputs),
        call.paired.missing,
    )


def _module_result(
    tagged: TaggedModel, path: str, calls: list[CallResult], reason: str, blame: Blame
) -> ModuleResult:
    info = tagged.hierarchy[path]
    calls = sorted(calls, key=lambda call: call.number)
    statuses = {call.status for call in calls}
    status = next((candidate for candidate in COMPARED if candidate in statuses), None)
    if path in blame.modules:
        status = DIFFERS
    missing = sum(call.missing for call in calls)
    merged = f"merged with {', '.join(map(repr, info.fused_with))}" if info.fused_with else ""
    if status is None:
        status = info.fate.remark or NOT_COMPARED
        if info.fate.is_merged:
            reason = merged or reason
        elif status == NOT_COMPARED and not calls:
            reason = reason or "its calls were not seen: its forward was not called as a module"
        elif status == NOT_COMPARED:
            reason = reason or (
                "the file has none of its tensors" if missing else "it gives back no tensor"
            )
    else:
        reason = (
            reason or merged or (f"{missing} of its outputs are not in the file" if missing else "")
        )
    shown = tuple(
        call for call in calls if call.outputs and not (info.fate.passes_on and status == info.fate)
    )
    return ModuleResult(path, info.class_name, info.fate, status, shown, reason)
