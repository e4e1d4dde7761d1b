"""Results of modules from those of their calls."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence

from htp_export.capabilities.verify.checking import CheckedCall
from htp_export.capabilities.verify.locating import Blame
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
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.comparing import Tolerance


def tolerance_of(
    tagged: TaggedModel, tolerances: Mapping[str, tuple[float, float]]
) -> Callable[[str], Tolerance | None]:
    """A function from a module to its tolerance; None for modules without one. The last selector that matches applies.

    Raises:
        InputError: If a tolerance is negative or not a number.
        SelectorError: If a selector cannot be read, or matches nothing.
    """
    check_tolerances(tolerances)
    by_path: dict[str, Tolerance] = {}
    for selector, (absolute, relative) in tolerances.items():
        by_path.update(dict.fromkeys(tagged.select(selector), Tolerance(absolute, relative)))
    return by_path.get


def check_tolerances(tolerances: Mapping[str, tuple[float, float]]) -> None:
    """Refuse tolerances that are no numbers from 0 up.

    Raises:
        InputError: If there is one.
    """
    for selector, (absolute, relative) in tolerances.items():
        if not (absolute >= 0 and relative >= 0):
            raise InputError(f"tolerance of {selector!r}: {absolute}, {relative} are not two numbers from 0 up")


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
        path: _module_result(tagged, path, by_module[path], reasons.get(path) or call_reasons.get(path, ""), blame)
        for path in tagged.paths
        if path in chosen
    }


def _call_result(tagged: TaggedModel, call: CheckedCall, blamed: bool, *, isolated: bool) -> CallResult:
    agreeing = NAN if any(result.difference.nan for _, result in call.outputs) else AGREES
    status = DIFFERS if blamed else INHERITS if call.wrong else agreeing
    if not call.outputs and not call.failed:
        status = NOT_COMPARED
    elif not isolated and not blamed and tagged.hierarchy[call.path].fate.passes_on:
        status = str(tagged.hierarchy[call.path].fate)  # its tensor is another's, who answers for it
    return CallResult(
        call.paired.call.number,
        status,
        tuple(result for _, result in call.outputs),
        tuple(result for _, result in call.inputs),
        call.paired.missing,
    )


def _module_result(tagged: TaggedModel, path: str, calls: list[CallResult], reason: str, blame: Blame) -> ModuleResult:
    info = tagged.hierarchy[path]
    calls = sorted(calls, key=lambda call: call.number)
    statuses = {call.status for call in calls}
    status = next((candidate for candidate in COMPARED if candidate in statuses), None)
    if path in blame.modules:
        status = DIFFERS
    missing = sum(call.missing for call in calls)
    if status is None:
        status = info.fate.remark or NOT_COMPARED
        if info.fate.is_merged:
            reason = f"merged with {', '.join(map(repr, info.fused_with))}" if info.fused_with else reason
        elif status == NOT_COMPARED:
            reason = reason or _why_not(calls, missing)
    elif info.fused_with and not reason:
        reason = f"merged with {', '.join(map(repr, info.fused_with))}"
    elif missing and not reason:
        reason = f"{missing} of its outputs are not in the file"
    shown = tuple(call for call in calls if call.outputs and not (info.fate.passes_on and status == info.fate))
    return ModuleResult(path, info.class_name, info.fate, status, shown, reason)


def _why_not(calls: Sequence[CallResult], missing: int) -> str:
    if not calls:
        return "its calls were not seen: its forward was not called as a module"
    return "the file has none of its tensors" if missing else "it gives back no tensor"
