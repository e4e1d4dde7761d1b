"""Locate the modules that cause a difference, among all modules whose outputs differ.

A tensor is an *origin* if it differs although all compared tensors from which it is computed agree.
The first, innermost module whose call ends with an origin is wrong itself. See ``docs/verify.md``.
"""

from __future__ import annotations

import itertools
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
    INFINITE,
    INHERITS,
    NAN,
    NOT_COMPARED,
    CallResult,
    ModuleResult,
    NotFinite,
    TensorResult,
)
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.format.call_tree import Instance, NodeCalls
from htp_export.format.fates import Fate
from htp_export.format.hierarchy import ModuleInfo
from htp_export.format.model_metadata import read_contamination
from htp_export.format.torch_metadata import source_of
from htp_export.model.boundaries import dependence, input_dependent_values
from htp_export.model.neighbours import reached
from htp_export.model.tagged import TaggedModel
from htp_export.runtime.comparing import Tolerance
from htp_export.shapes.operator_kinds import SIZES_ONLY

_SUDDEN = 4
"""Ratio of output error to input error that a correct module may have: rounding errors accumulate."""


@dataclass(frozen=True)
class Blame:
    """The modules that are wrong themselves, in the order in which their calls ended.

    ``calls`` are indices of calls. ``modules``, path → problem, also contains modules without a
    tensor of their own.
    """

    calls: tuple[int, ...]
    modules: Mapping[str, str]


def blame_by_graph(tagged: TaggedModel, calls: Sequence[CheckedCall]) -> Blame:
    """Return the modules whose outputs are origins of errors; the calls are in the order in which they ended."""
    excess = excesses(calls)
    origins = _origins(tagged, excess)
    blamed: list[int] = []
    modules: dict[str, str] = {}
    explained: set[ir.Value] = set()
    for index, call in enumerate(calls):
        inputs = {value for value, _ in call.inputs}
        for value, result in call.inputs:
            is_unexplained = value in origins and value not in explained
            if is_unexplained and not _is_result(value, calls):
                # No module returns it: the module that computes it for another one is wrong.
                problem = f"computes {result.tensor!r}: {result.difference.problem}"
                modules.setdefault(computing_module(tagged, value), problem)
                explained.add(value)
        if any(_is_other_tensor(result, excess[value]) for value, result in call.inputs):
            # It received another tensor than in the reference, so that its outputs have to differ.
            explained.update(value for value, _ in call.outputs)
        for value, result in call.outputs:
            is_origin = value not in inputs and value in origins
            is_other_tensor = _is_other_tensor(result, excess[value])
            if (is_origin and value not in explained) or is_other_tensor:
                explained.add(value)
                blamed.append(index)
                modules.setdefault(call.path, "")
    return Blame(tuple(dict.fromkeys(blamed)), modules)


def _is_other_tensor(result: TensorResult, smallest_excess: float) -> bool:
    """Whether a call has another tensor in the place of the right one: the tensor itself is right elsewhere."""
    return smallest_excess <= 1 and not result.difference.agrees


def _is_result(value: ir.Value, calls: Sequence[CheckedCall]) -> bool:
    """Whether a call returns a tensor that is not one of its own inputs."""
    for call in calls:
        is_output = any(output is value for output, _ in call.outputs)
        if is_output and all(argument is not value for argument, _ in call.inputs):
            return True
    return False


def computing_module(tagged: TaggedModel, value: ir.Value) -> str:
    """The module that computes a tensor, or the innermost common parent of its owners."""
    producer = value.producer()
    owners = tagged.owners_of(producer) if producer is not None else ()
    return tags.common_ancestor(owners)


def _origins(tagged: TaggedModel, excess: Mapping[ir.Value, float]) -> set[ir.Value]:
    """Tensors that differ although the tensors from which they are computed agree.

    If there are some whose error is much larger than at their inputs, only these.
    """
    origins: set[ir.Value] = set()
    sudden: set[ir.Value] = set()
    differing = {value: size for value, size in excess.items() if size > 1}
    for value, size in differing.items():
        worst_input = _worst_input(tagged, value, excess)
        if worst_input <= 1:
            origins.add(value)
            if size > _SUDDEN * worst_input:
                sudden.add(value)
    return sudden or origins


def _worst_input(tagged: TaggedModel, value: ir.Value, excess: Mapping[ir.Value, float]) -> float:
    """The largest excess of the nearest compared tensors from which a tensor is computed."""
    nearest = computed_from(tagged, _sources(tagged, value), excess)
    return max((excess.get(source, 0.0) for source in nearest), default=0.0)


def computed_from(
    tagged: TaggedModel, values: Iterable[ir.Value], stops: Container[ir.Value] = ()
) -> set[ir.Value]:
    """Tensors and all tensors that they are computed from, up to and including the nearest ``stops``."""
    return set(reached(values, lambda value: () if value in stops else _sources(tagged, value)))


def _sources(tagged: TaggedModel, value: ir.Value) -> Iterator[ir.Value]:
    """Tensors that the producer of a tensor consumes, also inside its subgraphs."""
    node = value.producer()
    return iter(()) if node is None else tagged.index.reads(node)


def blame_by_nesting(calls: Sequence[CheckedCall]) -> Blame:
    """Return the wrong calls without a wrong call inside, for calls that each ran on the right inputs."""
    blamed: list[int] = []
    latest_wrong = -1  # the latest beginning of a wrong call so far
    for index, call in enumerate(calls):
        began = call.paired.call.began
        if call.wrong:
            if latest_wrong < began:
                blamed.append(index)
            latest_wrong = max(latest_wrong, began)
    return Blame(tuple(blamed), dict.fromkeys((calls[index].path for index in blamed), ""))


def first_not_finite(tagged: TaggedModel, calls: Sequence[CheckedCall]) -> tuple[NotFinite, ...]:
    """Return the first infinity and the first NaN; the calls are in the order in which they ended.

    Elements that are not finite on one side only go before those on both sides: masks are infinite
    on both.
    """
    tensors = list(_tensors_in_order(tagged, calls))
    found = []
    for kind in ("infinite", "nan"):
        for sides in (("compared", "reference"), ("both",)):
            first = next(_not_finite(tensors, kind, sides), None)
            if first is not None:
                found.append(replace(first, source=line_of_tensor(tagged, first.tensor)))
                break
    return tuple(found)


def line_of_tensor(tagged: TaggedModel, name: str) -> str:
    """The line of the model's code that computes a tensor, with the code; ``""`` if it is unknown."""
    value = tagged.values.get(name)
    producer = None if value is None else value.producer()
    line = None if producer is None else source_of(producer)
    return "" if line is None else f"{line.file}:{line.line}  {line.code}".rstrip()


def line_at_fault(tagged: TaggedModel, modules: Mapping[str, ModuleResult], wrong: str) -> str:
    """The line of the model's code that computes the first wrong tensor of a module."""
    if wrong not in modules:
        return ""
    outputs = (output for call in modules[wrong].calls for output in call.outputs)
    tensor = next((output.tensor for output in outputs if not output.difference.agrees), "")
    return line_of_tensor(tagged, tensor)


def _tensors_in_order(
    tagged: TaggedModel, calls: Sequence[CheckedCall]
) -> Iterator[tuple[str, TensorResult]]:
    """Every compared tensor once, with the module that returns it, or computes it for another one."""
    returned = set[ir.Value]()
    for call in calls:
        inputs = {value for value, _ in call.inputs}
        returned.update(value for value, _ in call.outputs if value not in inputs)
    seen = set[ir.Value]()
    for call in calls:
        for value, result in call.inputs:
            if value not in returned and value not in seen:
                yield computing_module(tagged, value), result
                seen.add(value)
        for value, result in call.outputs:
            if value not in seen:
                yield call.path, result
                seen.add(value)


def _not_finite(
    tensors: Iterable[tuple[str, TensorResult]], kind: str, sides: Collection[str]
) -> Iterator[NotFinite]:
    """The tensors with elements of a kind on one of some sides."""
    for path, result in tensors:
        found = result.difference
        both = found.nan if kind == "nan" else found.infinite
        reference, compared = found.nan_sides if kind == "nan" else found.infinite_sides
        counts = {"compared": compared, "reference": reference, "both": both}
        side = next((side for side in sides if counts[side]), None)
        if side is not None:
            yield NotFinite(path, result.tensor, kind, side, counts[side], found.size)


def with_missing_outputs(tagged: TaggedModel, blame: Blame, root: ModuleCall) -> Blame:
    """Add the root if the file has fewer results than the model."""
    missing = len(root.outputs) - len(tagged.results)
    if missing <= 0:
        return blame
    reason = f"{missing} of the {len(root.outputs)} tensors that PyTorch returns are not among the file's outputs"
    return replace(blame, modules={**blame.modules, root.path: reason})


# --- tags that contradict the graph, independent of the values of tensors ---

# A tensor with the right values may still be computed by nodes of another module. The graph shows
# this, together with the names of the inputs and outputs of modules in PyTorch (`htp.signatures`).


def with_contradictions(tagged: TaggedModel, blame: Blame, paths: Collection[str]) -> Blame:
    """Add the modules whose tags contradict the graph, after the modules with wrong values."""
    modules = dict(blame.modules)
    for path, problem in contradictions(tagged).items():
        if path in paths:
            modules.setdefault(path, problem)
    return replace(blame, modules=modules)


def contradictions(tagged: TaggedModel) -> Mapping[str, str]:
    """Return module path → the contradiction between its tags and the graph.

    - A constant or dead module returns a tensor that depends on the inputs, or that a result depends on.
    - A computed module returns a tensor that no node of its region computes.
    - One of its calls has an input that nodes of this call compute, and that is no output of the module.

    Modules whose boundary differs from PyTorch according to the export (``htp.contamination``) are
    skipped.
    """
    if tagged.source != "htp" or not tagged.signatures:
        return {}
    excused = {path for path, *_ in read_contamination(tagged.model.metadata_props)}
    finder = _Contradictions(tagged)
    problems = {}
    for path in tagged.paths:
        if path and path not in excused:
            problem = next(finder.of(path), None)
            if problem is not None:
                problems[path] = problem
    return problems


class _Contradictions:
    """Finds contradictions between the tags of a model and its graph, module by module."""

    def __init__(self, tagged: TaggedModel) -> None:
        self._tagged = tagged
        self._varying = input_dependent_values(tagged.model, tagged.nodes)
        self._useful = _useful(tagged)

    def of(self, path: str) -> Iterator[str]:
        """The contradictions of one module."""
        fate = self._tagged.hierarchy[path].fate
        calls = self._tagged.signatures.get(path, ())
        outputs = self._values(itertools.chain.from_iterable(call.outputs for call in calls))
        inputs = [self._values(call.inputs.values()) for call in calls]
        passed_on = set(itertools.chain.from_iterable(inputs))
        # Inputs that the module returns unchanged are not its work.
        results = [value for value in outputs if value not in passed_on]
        if fate.is_folded:
            for value in results:
                yield f"it is tagged {fate}, but its output {value.name!r} depends on the inputs"
        elif fate.is_needless:
            for value in results:
                if value in self._useful:
                    yield f"it is tagged {fate}, but its output {value.name!r} leads to a result"
        elif fate.is_exact:
            for value in results:
                yield from self._foreign_output(path, value)
            for number, values in enumerate(inputs):
                others = [value for value in values if value not in outputs]
                yield from self._own_inputs(Instance(path, number), others)

    def _own_inputs(self, call: Instance, inputs: Sequence[ir.Value]) -> Iterator[str]:
        """The contradictions that inputs of a call are computed inside of it."""
        for value in inputs:
            if all(call in part.running for part in self._work(value).parts):
                yield f"its input {value.name!r} is computed by its own nodes"

    def _foreign_output(self, path: str, value: ir.Value) -> Iterator[str]:
        """The contradiction that an output of a module is computed outside of it."""
        work = self._work(value)
        if path not in work.modules:
            names = [repr(owner) if owner else "the model itself" for owner in work.owners]
            yield f"its output {value.name!r} is computed by {', '.join(names)}"

    def _values(self, names: Iterable[str | None]) -> list[ir.Value]:
        """The tensors with these names that nodes compute from the inputs."""
        values = []
        for name in dict.fromkeys(names):
            value = None if name is None else self._tagged.values.get(name)
            if value is not None and value in self._varying and self._work(value).parts:
                values.append(value)
        return values

    def _work(self, value: ir.Value) -> NodeCalls:
        """The module calls that the producer of a tensor belongs to."""
        producer = value.producer()
        return NodeCalls() if producer is None else self._tagged.work_of(producer)


def _useful(tagged: TaggedModel) -> set[ir.Value]:
    """Tensors of the main graph on whose values, not only sizes, a result of the model depends."""
    nodes = [node for node in tagged.model.graph if node.op_type not in SIZES_ONLY]
    backwards = ((node.outputs, tagged.index.reads(node)) for node in reversed(nodes))
    return set(dependence(backwards, dict.fromkeys(tagged.results, 1)))


def tolerance_of(
    tagged: TaggedModel, tolerances: Mapping[str, tuple[float, float]]
) -> Callable[[str], Tolerance | None]:
    """Return a function from module path to tolerance, None without one; the last selector that matches applies."""
    check_tolerances(tolerances)
    by_path: dict[str, Tolerance] = {}
    for selector, (absolute, relative) in tolerances.items():
        by_path.update(dict.fromkeys(tagged.select(selector), Tolerance(absolute, relative)))
    return by_path.get


def check_tolerances(tolerances: Mapping[str, tuple[float, float]]) -> None:
    """Refuse negative tolerances, and NaN."""
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
    """Build the result of every chosen module, in the order of the module tree.

    ``reasons``: module path → why it was not compared.
    """
    blamed, by_module = set(blame.calls), defaultdict(list)
    for index, call in enumerate(calls):
        by_module[call.path].append(_call_result(tagged, call, index in blamed, isolated=isolated))
    # From the least important reason to the most important one.
    notes = {call.path: call.paired.reason for call in calls if call.paired.reason}
    notes.update((call.path, call.failed) for call in calls if call.failed)
    notes.update((path, problem) for path, problem in blame.modules.items() if problem)
    notes.update((path, reason) for path, reason in reasons.items() if reason)
    results = {}
    for path in tagged.paths:
        if path in chosen:
            note = notes.get(path, "")
            results[path] = _module_result(tagged, path, by_module[path], note, blame)
    return results


def _call_result(
    tagged: TaggedModel, call: CheckedCall, blamed: bool, *, isolated: bool
) -> CallResult:
    """Build the result of one call."""
    return CallResult(
        call.paired.call.number,
        _call_status(tagged.hierarchy[call.path].fate, call, blamed, isolated=isolated),
        tuple(result for _, result in call.outputs),
        tuple(result for _, result in call.inputs),
        call.paired.missing,
    )


def _call_status(fate: Fate, call: CheckedCall, blamed: bool, *, isolated: bool) -> str:
    """The status of one call of a module with this fate."""
    if not call.outputs and not call.failed:
        return NOT_COMPARED
    if blamed:
        return DIFFERS
    if fate.passes_on and not isolated:
        # It returns a tensor of another module, which has the result for it.
        return str(fate)
    if call.wrong:
        return INHERITS
    if any(result.difference.nan for _, result in call.outputs):
        return NAN
    return INFINITE if any(result.difference.infinite for _, result in call.outputs) else AGREES


def _module_result(
    tagged: TaggedModel, path: str, calls: list[CallResult], note: str, blame: Blame
) -> ModuleResult:
    """Build the result of one module from its calls; ``note`` is the most important remark on it."""
    info = tagged.hierarchy[path]
    calls = sorted(calls, key=lambda call: call.number)
    statuses = {call.status for call in calls}
    status = next((candidate for candidate in COMPARED if candidate in statuses), None)
    if path in blame.modules:
        status = DIFFERS
    if status is None:
        status = info.fate.remark or NOT_COMPARED
        reason = _why_not_compared(info, status, calls, note)
    else:
        missing = sum(call.missing for call in calls)
        lacking = f"{missing} of its outputs are not in the file" if missing else ""
        reason = note or _merged_text(info) or lacking
    # The calls of a module that passes on its input are the results of another module.
    if info.fate.passes_on and status == info.fate:
        calls = []
    compared = tuple(call for call in calls if call.outputs)
    return ModuleResult(path, info.class_name, info.fate, status, compared, reason)


def _why_not_compared(info: ModuleInfo, status: str, calls: Sequence[CallResult], note: str) -> str:
    """The reason why a module was not compared; ``""`` if its fate says it."""
    if info.fate.is_merged:
        return _merged_text(info) or note
    if note or status != NOT_COMPARED:
        return note
    if not calls:
        return "its calls were not seen: its forward was not called as a module"
    if any(call.missing for call in calls):
        return "the file has none of its tensors"
    return "it returns no tensor"


def _merged_text(info: ModuleInfo) -> str:
    """The modules that a fused module is merged with, as a remark; ``""`` if there are none."""
    return f"merged with {', '.join(map(repr, info.fused_with))}" if info.fused_with else ""
