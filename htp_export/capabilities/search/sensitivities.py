"""``sensitivity``: quantize modules one by one, and measure what it does to the outputs of the model."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from htp_export.capabilities.search.estimates import estimated_errors
from htp_export.capabilities.search.measuring import Measurer, check_repeats
from htp_export.capabilities.search.sensitivity_results import BlockSensitivity, ModuleSensitivity, Sensitivity
from htp_export.capabilities.search.spaces import deciding_modules, two_named
from htp_export.editing.flattening import read_flat
from htp_export.errors import InputError
from htp_export.format import tags
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource, TaggedModel
from htp_export.process.argument_types import MOST_RUNS, check_whole
from htp_export.process.progress import counted
from htp_export.runtime.runner import Metric
from htp_export.runtime.sessions import SessionSettings

if TYPE_CHECKING:
    from htp_export.capabilities.quantize.method import Precision
    from htp_export.capabilities.quantize.serving import Serving
    from htp_export.runtime.data import Data

_Rows: TypeAlias = Mapping[tuple[str, str], ModuleSensitivity]
"""Module path and precision → what is known."""

ESTIMATE_NOTE = "these are estimates: by net, their ranking had a correlation of -0.10 to 1.00 with the measured one"
RANDOM_NOTE = "the inputs are random: errors on real data may be others, and an accuracy means nothing"


@names_model_faults("model")
def sensitivity(
    model: ModelSource,
    precisions: Sequence[Any] | str = ("auto",),
    *,
    data: Data | None = None,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    select: str | Sequence[str] | None = None,
    depth: int | None = None,
    metric: Metric | None = None,
    all_but: bool = True,
    estimate: bool = False,
    by_module: bool = False,
    runs: int = 0,
    repeats: int = 0,
    results: str | os.PathLike[str] | None = None,
    calibration: Data | None = None,
    seed: int = 0,
    providers: Sequence[Any] = ("CPUExecutionProvider",),
) -> Sensitivity:
    """Measure how much the outputs of a model change if single modules are quantized.

    Every module is quantized alone, and then all modules but this one. The original runs once, and every quantized
    model once on each of the inputs; with ``results``, runs that were finished before are not repeated.

    Thread-safe, also for calls on the same model, but not with the same ``results``.

    Args:
        model: A file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
        precisions: Precisions, as in a plan of ``quantize``: names, or `Precision`s. ``auto`` is one for all modules.
        data: Inputs, as for ``quantize``; None for random ones, whose errors say little about those on real data.
        dims: Name of an open dimension → size. Random inputs have 1 without; ``data`` of other sizes are refused.
        shapes: For random inputs: input name → shape.
        select: These modules; see ``TaggedModel.select``. None for the innermost modules with weights.
        depth: In place of ``select``: the modules at this level below the root, and those above it that hold weights.
        metric: A number of your own, as the accuracy: called with the outputs, name → array, for each of the inputs.
        all_but: Measure all modules but one, too.
        estimate: Quantize nothing: estimate errors from weights and inputs (squared change of a weight times the mean
            square of what it is multiplied with).
        by_module: Compare all modules with the original, too, in every model with one quantized module.
        runs: Runs that are timed for each model, each beside one of the original; 0 for no times.
        repeats: How often each model is measured, 2 or more, for noisy numbers: ``alone`` has medians and ``spread``.
        results: A file in which finished runs are kept, a journal of Optuna.
        calibration: Inputs for calibration; None for ``data``.
        seed: Seed of random inputs.
        providers: ONNX Runtime's execution providers, in order of preference.

    Returns:
        The numbers for every module and precision, and ``.ranking``, the largest error first.

    Raises:
        InputError: A precision or the data cannot be used, or no module has weights.
        SelectorError: A selector cannot be read or matches no module.
        UntaggedModelError: The model has no tags.
        FileError: A file cannot be read or written.

    Examples:
        >>> import torch, htp_export
        >>> net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64)).eval()
        >>> program = htp_export.export(net, (torch.randn(2, 64),), verbose=False)
        >>> found = htp_export.sensitivity(program, ["fp16"], data={"input": torch.randn(2, 64)})
        >>> sorted(row.path for row in found.ranking), found.modules["0"]["fp16"].alone.sqnr_db > 40
        (['0', '2'], True)
    """
    from htp_export.capabilities.quantize.calibration_data import CalibrationData
    from htp_export.capabilities.quantize.serving import Serving

    check_whole("runs", runs, 0, MOST_RUNS)
    check_repeats(repeats)
    idle = {"runs": runs, "repeats": repeats, "results": results, "by_module": by_module, "metric": metric}
    if estimate and (given := next((name for name, value in idle.items() if value), None)):
        raise InputError(f"{given} has no effect on an estimate, for which nothing is quantized; leave it out")
    tagged = read_flat(model)
    serving = Serving(tagged, dims, shapes)
    chosen = _precisions(precisions, serving)
    if not estimate:
        tagged.require_exact_tags()
    paths = deciding_modules(tagged, select, depth)
    samples = CalibrationData.of(data, tagged.model, dims=dims, shapes=shapes, seed=seed, passes=2)
    settings = SessionSettings(tuple(providers))
    settings.check()
    measurer = Measurer(tagged, samples, metric, runs, settings, results, calibration, repeats=repeats)
    estimates = estimated_errors(tagged, paths, chosen.values(), samples)
    rows: _Rows = {
        (path, name): ModuleSensitivity(
            path, tagged.hierarchy[path].class_name, name, estimate=estimates[path, precision.name]
        )
        for path in paths
        for name, precision in chosen.items()
    }
    if not estimate:
        rows = _measured(measurer, rows, chosen, all_but=all_but, by_module=by_module)
    by_path: defaultdict[str, dict[str, ModuleSensitivity]] = defaultdict(dict)
    for (path, name), row in rows.items():
        by_path[path][name] = row
    original = None if estimate else measurer.original
    problems = [f"{path or '(root)'} in {name}: {row.problem}" for (path, name), row in rows.items() if row.problem]
    notes = (
        *serving.notes,
        *([RANDOM_NOTE] if samples.random else []),
        *([ESTIMATE_NOTE] if estimate else measurer.remarks),
        *problems,
    )
    return Sensitivity(dict(by_path), original, _blocks(tagged, rows), not estimate, notes, tagged.tag_facts)


def _precisions(given: Sequence[Any] | str, serving: Serving) -> dict[str, Precision]:
    from htp_export.capabilities.quantize.method import Precision
    from htp_export.capabilities.quantize.precisions import PRECISIONS, precision_of

    listed = [given] if isinstance(given, str | Precision | Mapping) else list(given)
    chosen: dict[str, Precision] = {}
    for each in listed:
        precision = serving.precision(precision_of(each))
        if chosen.setdefault(precision.name, precision) != precision:
            raise InputError(two_named(precision.name))
    if not chosen:
        raise InputError(f"give precisions, of {', '.join(PRECISIONS)}")
    kept = [name for name, precision in chosen.items() if precision.is_kept]
    if kept:
        raise InputError(f"precision {kept[0]!r} changes nothing; there is nothing to measure")
    return chosen


def _measured(
    measurer: Measurer, rows: _Rows, precisions: Mapping[str, Precision], *, all_but: bool, by_module: bool
) -> _Rows:
    """Rows with what was measured; one of which something cannot be measured has the reason."""
    from htp_export.capabilities.quantize.precisions import PRECISIONS

    found = dict(rows)
    for number, key in enumerate(counted(list(rows) * (1 + all_but), "runs")):
        path, name = key
        if number < len(rows):
            found[key] = _with_alone(measurer, found[key], precisions[name], by_module)
            continue
        others = [other for other, each in rows if each == name and found[other, each].alone is not None]
        if len(others) > 1 and path in others:
            plan = {other or ".": precisions[name] for other in others} | {path or ".": PRECISIONS["fp32"]}
            try:
                found[key] = replace(found[key], all_but=measurer.measure(plan))
            except InputError as error:
                found[key] = replace(found[key], problem=f"all modules but this one: {error}")
    return found


def _with_alone(measurer: Measurer, row: ModuleSensitivity, precision: Precision, by_module: bool) -> ModuleSensitivity:
    plan, original = {row.path or ".": precision}, measurer.original
    try:
        made = measurer.quantized(plan) if by_module else None
        measured = measurer.measure(plan, made=made)
    except InputError as error:
        return replace(row, problem=str(error), estimate=None)
    faster = None
    if measured.latency_ms is not None and original.latency_ms is not None:
        faster = original.latency_ms - measured.latency_ms
    row = replace(row, alone=measured, saved_bytes=original.bytes - measured.bytes, saved_ms=faster)
    return row if made is None else replace(row, by_module=_cosines(measurer, made))


def _cosines(measurer: Measurer, made: TaggedModel) -> dict[str, float]:
    from htp_export.capabilities.verify.file_comparing import compare

    compared = compare(measurer.tagged, made, measurer.feeds[0])
    return {path: result.cosine for path, result in compared.modules.items() if result.cosine is not None}


def _blocks(tagged: TaggedModel, rows: _Rows) -> tuple[BlockSensitivity, ...]:
    """The rows of modules at the same place of repeated blocks, put together."""
    from htp_export.capabilities.fingerprint.blocks import repeated_blocks

    found = []
    for block in repeated_blocks(GraphFacts(tagged)):
        alike: defaultdict[tuple[str, str], list[ModuleSensitivity]] = defaultdict(list)
        for (path, name), row in rows.items():
            holder = tags.nearest_above(path, block.modules)
            if holder is not None and row.error is not None:
                alike[path.removeprefix(holder).lstrip("."), name].append(row)
        for (part, name), members in alike.items():
            errors = [member.error or 0.0 for member in members]
            worst = members[errors.index(max(errors))]
            mean = sum(errors) / len(errors)
            paths = tuple(member.path for member in members)
            found.append(BlockSensitivity(block.name, part, name, mean, max(errors), worst.path, paths))
    return tuple(found)
