"""``sensitivity``: quantize modules one by one, and measure what it does to the outputs of the model."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import onnx_ir as ir

from htp_export.capabilities.search.measuring import Measurer, check_repeats
from htp_export.capabilities.search.sensitivity_results import (
    BlockSensitivity,
    ModuleSensitivity,
    Sensitivity,
)
from htp_export.capabilities.search.spaces import deciding_modules, named_apart
from htp_export.editing.flattening import read_flat
from htp_export.errors import InputError, ToolError
from htp_export.format import tags
from htp_export.model.graph_facts import GraphFacts
from htp_export.model.model_faults import names_model_faults
from htp_export.model.tagged import ModelSource, TaggedModel
from htp_export.process.argument_types import MOST_RUNS, check_whole
from htp_export.process.progress import counted
from htp_export.runtime.arrays import Array
from htp_export.runtime.runner import Metric
from htp_export.runtime.sessions import SessionSettings
from htp_export.weights.products import Product, products_of
from htp_export.weights.storing import numbers_of

if TYPE_CHECKING:
    from htp_export.capabilities.quantize.choosing import AutoPrecision
    from htp_export.capabilities.quantize.method import Precision
    from htp_export.runtime.data import Data, Samples


def estimated_errors(
    tagged: TaggedModel,
    paths: Sequence[str],
    precisions: Iterable[Precision],
    samples: Samples,
) -> dict[tuple[str, str], float]:
    """Module path and precision → the error that rounding its weights makes in its results.

    For each product in any region of the module, the sum of the squared changes of its weights
    times the mean square of its inputs is the expected squared change of its results, if the
    elements of the inputs are independent. This is divided by the square of the results, so that it
    compares with ``Deviation.error``. Products of a module add up. For a table that is looked up,
    it is the change of the table divided by its square. The model, without functions, runs once on
    each of the samples.
    """
    uses: dict[str, list[Product]] = {path: [] for path in paths}
    read: dict[ir.Value, None] = {}
    for use in products_of(tagged, tagged.nodes):
        for path in {"", *tagged.index.works[use.node].modules}.intersection(uses):
            uses[path].append(use)
            read.update(dict.fromkeys(_values_of(use)))
    squares = _mean_squares(tagged, list(read), samples)
    errors: dict[tuple[Product, str], float] = {}
    found = {}
    for precision in precisions:
        for path in paths:
            for use in uses[path]:
                if (use, precision.name) not in errors:
                    errors[use, precision.name] = _relative_change(use, precision, squares)
            found[path, precision.name] = sum(errors[use, precision.name] for use in uses[path])
    return found


def _values_of(use: Product) -> tuple[ir.Value, ...]:
    """The value that a weight is multiplied with, and the result; nothing for a table."""
    return () if use.activation is None else (use.activation, use.node.outputs[0])


def _mean_squares(
    tagged: TaggedModel, values: Sequence[ir.Value], samples: Samples
) -> dict[ir.Value, float]:
    """The mean squares of tensors of the main graph."""
    from htp_export.capabilities.quantize.work import activations

    known = {
        *tagged.model.graph.inputs,
        *(value for node in tagged.model.graph for value in node.outputs),
    }
    read = {str(value.name): value for value in values if value in known}
    sums, counts = dict.fromkeys(read.values(), 0.0), dict.fromkeys(read.values(), 0)
    with activations(tagged.model, "the model", samples, list(read)) as runs:
        for arrays in runs:
            for name, array in arrays.items():
                sums[read[name]] += float(np.square(np.asarray(array, np.float64)).sum())
                counts[read[name]] += array.size
    return {value: sums[value] / counts[value] if counts[value] else 0.0 for value in sums}


def _relative_change(
    use: Product, precision: Precision, squares: Mapping[ir.Value, float]
) -> float:
    weight = np.asarray(numbers_of(use.value).numpy(), np.float32)
    wide = weight.astype(np.float64)
    change = float(np.square(wide - rounded(weight, precision, use.reduced, use.channels)).sum())
    if not (values := _values_of(use)):
        whole = float(np.square(wide).sum())
        return change / whole if whole else 0.0
    multiplied, result = (squares.get(value, 0.0) for value in values)
    return change / weight.shape[use.channels] * multiplied / result if result else 0.0


def rounded(weight: Array, precision: Precision, reduced: int = 0, channels: int = -1) -> Array:
    """A weight as a precision represents it; ``reduced``: the axis that is cut into blocks, ``channels``: of results.

    Examples:
        >>> from htp_export.capabilities.quantize.precisions import PRECISIONS
        >>> rounded(np.float32([[127.0, -5.4], [30.2, 254.0]]), PRECISIONS["int8"]).tolist()
        [[127.0, -6.0], [30.0, 254.0]]
    """
    if precision.is_kept or not weight.size:
        return weight
    if precision.method == "cast":
        import ml_dtypes

        kind = np.float16 if precision.weight == "float16" else ml_dtypes.bfloat16
        return np.asarray(weight.astype(kind), np.float32)
    if precision.method == "weights":
        return _in_blocks(weight, precision, reduced % weight.ndim)
    bits = precision.bits - (1 if precision.reduce_range and precision.bits == 8 else 0)
    axes = tuple(
        axis
        for axis in range(weight.ndim)
        if not precision.per_channel or axis != channels % weight.ndim
    )
    scale = np.abs(weight).max(axis=axes, keepdims=True) / (2 ** (bits - 1) - 1)
    return _scaled(weight, scale, bits)


def _in_blocks(weight: Array, precision: Precision, axis: int) -> Array:
    moved = np.moveaxis(weight, axis, -1)
    length = moved.shape[-1]
    padding = [(0, 0)] * (moved.ndim - 1) + [(0, -length % precision.block_size)]
    blocks = np.pad(moved, padding).reshape(*moved.shape[:-1], -1, precision.block_size)
    if precision.symmetric:
        scale = np.abs(blocks).max(axis=-1, keepdims=True) / (2 ** (precision.bits - 1))
        found = _scaled(blocks, scale, precision.bits)
    else:
        low = np.minimum(blocks.min(axis=-1, keepdims=True), 0)
        scale = (np.maximum(blocks.max(axis=-1, keepdims=True), 0) - low) / (2**precision.bits - 1)
        scale = np.where(scale > 0, scale, 1)
        zero = np.round(-low / scale)
        found = (np.clip(np.round(blocks / scale) + zero, 0, 2**precision.bits - 1) - zero) * scale
    restored = found.reshape(*moved.shape[:-1], -1)[..., :length]
    return np.moveaxis(restored, -1, axis)


def _scaled(weight: Array, scale: Array, bits: int) -> Array:
    scale = np.where(scale > 0, scale, 1)
    half = 2 ** (bits - 1)
    return np.asarray(np.clip(np.round(weight / scale), -half, half - 1) * scale)


_Rows: TypeAlias = Mapping[tuple[str, str], ModuleSensitivity]
"""Module path and precision → what is known."""

ESTIMATE_NOTE = "these are estimates: by net, their ranking had a correlation of -0.10 to 1.00 with the measured one"
RANDOM_NOTE = (
    "the inputs are random: errors on real data may be others, and an accuracy means nothing"
)


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

    Every module is quantized alone, and then all modules but this one. The original runs once, and
    every quantized model once on each of the inputs; with ``results``, runs that were finished
    before are not repeated.

    Thread-safe, also for calls on the same model, but not with the same ``results``.

    Args:
        model: A file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
        precisions: Precisions, as in a plan of ``quantize``: names, or `Precision`s. ``auto`` is
            one for all modules.
        data: Inputs, as for ``quantize``; None for random ones, whose errors say little about those
            on real data.
        dims: Name of an open dimension → size. Random inputs have 1 without; ``data`` of other
            sizes are refused.
        shapes: For random inputs: input name → shape.
        select: These modules; see ``TaggedModel.select``. None for the innermost modules with
            weights.
        depth: In place of ``select``: the modules at this level below the root, and those above it
            that hold weights.
        metric: A number of your own, as the accuracy: called with the outputs, name → array, for
            each of the inputs.
        all_but: Measure all modules but one, too.
        estimate: Quantize nothing: estimate errors from weights and inputs (squared change of a
            weight times the mean square of what it is multiplied with).
        by_module: Compare all modules with the original, too, in every model with one quantized
            module.
        runs: Runs that are timed for each model, each beside one of the original; 0 for no times.
        repeats: How often each model is measured, 2 or more, for noisy numbers: ``alone`` has
            medians and ``spread``.
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
    from htp_export.capabilities.quantize.choosing import AutoPrecision
    from htp_export.capabilities.quantize.work import CalibrationData

    check_whole("runs", runs, 0, MOST_RUNS)
    check_repeats(repeats)
    idle = {
        "runs": runs,
        "repeats": repeats,
        "results": results,
        "by_module": by_module,
        "metric": metric,
    }
    if estimate and (given := next((name for name, value in idle.items() if value), None)):
        raise InputError(
            f"{given} has no effect on an estimate, for which nothing is quantized; leave it out"
        )
    tagged = read_flat(model)
    serving = AutoPrecision(tagged, dims, shapes)
    chosen = _precisions(precisions, serving)
    if not estimate:
        tagged.require_exact_tags()
    paths = deciding_modules(tagged, select, depth)
    samples = CalibrationData.of(data, tagged.model, dims=dims, shapes=shapes, seed=seed, passes=2)
    settings = SessionSettings(tuple(providers))
    settings.check()
    measurer = Measurer(
        tagged, samples, metric, runs, settings, results, calibration, repeats=repeats
    )
    estimates = estimated_errors(tagged, paths, chosen.values(), samples)
    rows: _Rows = {
        (path, name): ModuleSensitivity(
            path, tagged.hierarchy[path].class_name, name, estimate=estimates[path, name]
        )
        for path in paths
        for name in chosen
    }
    if not estimate:
        rows = _measured(measurer, rows, chosen, all_but=all_but, by_module=by_module)
    by_path: defaultdict[str, dict[str, ModuleSensitivity]] = defaultdict(dict)
    for (path, name), row in rows.items():
        by_path[path][name] = row
    original = None if estimate else measurer.original
    notes = [
        *serving.notes,
        *[RANDOM_NOTE] * samples.random,
        *([ESTIMATE_NOTE] if estimate else measurer.remarks),
    ]
    notes += [
        f"{path or '(root)'} in {name}: {row.problem}"
        for (path, name), row in rows.items()
        if row.problem
    ]
    return Sensitivity(
        dict(by_path), original, _blocks(tagged, rows), not estimate, tuple(notes), tagged.tag_facts
    )


def _precisions(given: Sequence[Any] | str, serving: AutoPrecision) -> dict[str, Precision]:
    from htp_export.capabilities.quantize.method import Precision
    from htp_export.capabilities.quantize.precisions import PRECISIONS, precision_of

    listed = [given] if isinstance(given, str | Precision | Mapping) else list(given)
    chosen: dict[str, Precision] = {}
    named_apart((serving.precision(precision_of(each)) for each in listed), chosen)
    if not chosen:
        raise InputError(f"give precisions, of {', '.join(PRECISIONS)}")
    kept = [name for name, precision in chosen.items() if precision.is_kept]
    if kept:
        raise InputError(f"precision {kept[0]!r} changes nothing; there is nothing to measure")
    return chosen


def _measured(
    measurer: Measurer,
    rows: _Rows,
    precisions: Mapping[str, Precision],
    *,
    all_but: bool,
    by_module: bool,
) -> _Rows:
    """Rows with what was measured; one of which something cannot be measured has the reason."""
    from htp_export.capabilities.quantize.precisions import PRECISIONS

    found = dict(rows)
    for number, key in enumerate(counted(list(rows) * (1 + all_but), "runs")):
        path, name = key
        if number < len(rows):
            found[key] = _with_alone(measurer, found[key], precisions[name], by_module)
            continue
        others = [
            other for other, each in rows if each == name and found[other, each].alone is not None
        ]
        if len(others) > 1 and path in others:
            plan = {other or ".": precisions[name] for other in others} | {
                path or ".": PRECISIONS["fp32"]
            }
            try:
                found[key] = replace(found[key], all_but=measurer.measure(plan))
            except (InputError, ToolError) as error:
                found[key] = replace(found[key], problem=f"all modules but this one: {error}")
    return found


def _with_alone(
    measurer: Measurer, row: ModuleSensitivity, precision: Precision, by_module: bool
) -> ModuleSensitivity:
    from htp_export.capabilities.verify.file_comparing import compare

    plan, original = {row.path or ".": precision}, measurer.original
    try:
        made = measurer.quantized(plan) if by_module else None
        measured = measurer.measure(plan, made=made)
    except (InputError, ToolError) as error:
        return replace(row, problem=str(error), estimate=None)
    faster = None
    if measured.latency_ms is not None and original.latency_ms is not None:
        faster = original.latency_ms - measured.latency_ms
    row = replace(row, alone=measured, saved_bytes=original.bytes - measured.bytes, saved_ms=faster)
    if made is None:
        return row
    compared = compare(measurer.tagged, made, measurer.feeds[0]).modules
    return replace(
        row,
        by_module={path: each.cosine for path, each in compared.items() if each.cosine is not None},
    )


def _blocks(tagged: TaggedModel, rows: _Rows) -> tuple[BlockSensitivity, ...]:
    """The rows of modules at the same place of repeated blocks, put together."""
    from htp_export.capabilities.fingerprint.families import repeated_blocks

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
            found.append(
                BlockSensitivity(block.name, part, name, mean, max(errors), worst.path, paths)
            )
    return tuple(found)
