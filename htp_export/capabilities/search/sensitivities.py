"""``sensitivity``: quantize modules one by one, and measure the error of the outputs."""

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
from htp_export.process.progress import counted
from htp_export.runtime.arrays import Array
from htp_export.runtime.runner import Metric
from htp_export.runtime.settings import RunSettings
from htp_export.weights.products import Product, products_of
from htp_export.weights.storing import numbers_of

if TYPE_CHECKING:
    from htp_export.capabilities.quantize.choosing import AutoPrecision
    from htp_export.capabilities.quantize.method import Precision
    from htp_export.runtime.data import Data
    from htp_export.runtime.samples import Samples


def estimated_errors(
    tagged: TaggedModel,
    paths: Sequence[str],
    precisions: Iterable[Precision],
    samples: Samples,
) -> dict[tuple[str, str], float]:
    """Module path and name of a precision → the estimated error of rounding its weights.

    For each product in any region of the module, the sum of the squared changes of its weights
    times the mean square of its inputs is the expected squared change of its results, if the
    elements of the inputs are independent. This is divided by the mean square of the results, so
    that it is comparable to ``Deviation.error``. The estimates of the products of a module are
    added. For a lookup table, the estimate is the squared change of the table divided by its
    square. The model, without functions, runs once on each of the samples.
    """
    uses: dict[str, list[Product]] = {path: [] for path in paths}
    measured: dict[ir.Value, None] = {}
    for use in products_of(tagged, tagged.nodes):
        for path in {"", *tagged.index.works[use.node].modules}.intersection(uses):
            uses[path].append(use)
            measured.update(dict.fromkeys(_values_of(use)))
    squares = _mean_squares(tagged, list(measured), samples)
    errors: dict[tuple[Product, str], float] = {}  # a product is in several modules
    estimates: dict[tuple[str, str], float] = {}
    for precision in precisions:
        name = precision.name
        for path in paths:
            for use in uses[path]:
                if (use, name) not in errors:
                    errors[use, name] = _relative_change(use, precision, squares)
            estimates[path, name] = sum(errors[use, name] for use in uses[path])
    return estimates


def _values_of(use: Product) -> tuple[ir.Value, ...]:
    """The value by which a weight is multiplied, and the result; empty for a lookup table."""
    return () if use.activation is None else (use.activation, use.node.outputs[0])


def _mean_squares(
    tagged: TaggedModel, values: Sequence[ir.Value], samples: Samples
) -> dict[ir.Value, float]:
    """The mean squares of tensors of the main graph."""
    from htp_export.capabilities.quantize.work import activations

    in_main_graph = set(tagged.model.graph.inputs)
    for node in tagged.model.graph:
        in_main_graph.update(node.outputs)
    by_name = {str(value.name): value for value in values if value in in_main_graph}
    sums, counts = dict.fromkeys(by_name, 0.0), dict.fromkeys(by_name, 0)
    with activations(tagged.model, "the model", samples, list(by_name)) as runs:
        for arrays in runs:
            for name, array in arrays.items():
                sums[name] += float(np.square(np.asarray(array, np.float64)).sum())
                counts[name] += array.size
    return {value: sums[name] / max(counts[name], 1) for name, value in by_name.items()}


def _relative_change(
    use: Product, precision: Precision, squares: Mapping[ir.Value, float]
) -> float:
    """The estimated error of the results of one product, relative to their square."""
    weight = np.asarray(numbers_of(use.value).numpy(), np.float32)
    wide = weight.astype(np.float64)
    change = float(np.square(wide - rounded(weight, precision, use.reduced, use.channels)).sum())
    values = _values_of(use)
    if not values:
        total = float(np.square(wide).sum())
        return change / total if total else 0.0
    multiplied, result = (squares.get(value, 0.0) for value in values)
    if not result:
        return 0.0
    # The mean over the channels of the results, as their square is a mean, too.
    channels: int = weight.shape[use.channels]
    return change / channels * multiplied / result


def rounded(weight: Array, precision: Precision, reduced: int = 0, channels: int = -1) -> Array:
    """A weight rounded to a precision, as floats.

    Args:
        weight: The weight.
        precision: The precision.
        reduced: The axis that is cut into blocks.
        channels: The axis of the channels of the results.

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
    computed = precision.how.rounded(weight, reduced % weight.ndim)
    if computed is not None:
        return computed
    if precision.method == "weights":
        return _in_blocks(weight, precision, reduced % weight.ndim)
    bits = precision.bits
    if precision.reduce_range and bits == 8:
        bits = 7
    axes = set(range(weight.ndim))
    if precision.per_channel:
        axes.discard(channels % weight.ndim)
    scale = np.abs(weight).max(axis=tuple(sorted(axes)), keepdims=True) / (2 ** (bits - 1) - 1)
    return _scaled(weight, scale, bits)


def _in_blocks(weight: Array, precision: Precision, axis: int) -> Array:
    """A weight rounded in blocks along an axis; without ``symmetric``, blocks have zero points."""
    moved = np.moveaxis(weight, axis, -1)
    length = moved.shape[-1]
    padding = [(0, 0)] * (moved.ndim - 1) + [(0, -length % precision.block_size)]
    blocks = np.pad(moved, padding).reshape(*moved.shape[:-1], -1, precision.block_size)
    if precision.symmetric:
        scale = np.abs(blocks).max(axis=-1, keepdims=True) / (2 ** (precision.bits - 1))
        result = _scaled(blocks, scale, precision.bits)
    else:
        steps = 2**precision.bits - 1
        low = np.minimum(blocks.min(axis=-1, keepdims=True), 0)
        high = np.maximum(blocks.max(axis=-1, keepdims=True), 0)
        scale = (high - low) / steps
        scale = np.where(scale > 0, scale, 1)
        zero = np.round(-low / scale)
        levels = np.clip(np.round(blocks / scale) + zero, 0, steps)
        result = (levels - zero) * scale
    restored = result.reshape(*moved.shape[:-1], -1)[..., :length]
    return np.moveaxis(restored, -1, axis)


def _scaled(weight: Array, scale: Array, bits: int) -> Array:
    """A weight rounded to signed integers with a scale, and converted back."""
    scale = np.where(scale > 0, scale, 1)
    half = 2 ** (bits - 1)
    return np.asarray(np.clip(np.round(weight / scale), -half, half - 1) * scale)


_Rows: TypeAlias = Mapping[tuple[str, str], ModuleSensitivity]
"""Module path and name of a precision → its row."""

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
    """Measure the change of the outputs of a model if single modules are quantized.

    Each module is quantized alone, and then all modules but this one. The original and every
    quantized model run once on each of the inputs; with ``results``, finished runs are not
    repeated.

    Thread-safe, also for calls on the same model, but not with the same ``results``.

    Args:
        model: A file, `TaggedModel`, ``ONNXProgram``, ``ModelProto`` or ``ir.Model``; not changed.
        precisions: Precisions, as in a plan of ``quantize``: names, or `Precision`s. ``auto`` is
            one precision for all modules.
        data: Inputs, as for ``quantize``; None for random inputs, on which errors may differ from
            those on real data.
        dims: Name of an open dimension → size. Random inputs have 1 without; ``data`` of other
            sizes are refused.
        shapes: For random inputs: input name → shape.
        select: These modules; see ``TaggedModel.select``. None for the innermost modules with
            weights.
        depth: In place of ``select``: the modules at this level below the root, and modules above
            it with weights of their own.
        metric: Your own measure, such as the accuracy: a function of the outputs, name → array, for
            each of the inputs.
        all_but: Measure all modules but one, too.
        estimate: Quantize nothing: estimate errors from weights and inputs (squared change of a
            weight times the mean square of the inputs of its product).
        by_module: Compare all modules with the original, too, in every model with one quantized
            module.
        runs: Runs that are timed for each model, each beside one of the original; 0 for no times.
        repeats: How often each model is measured, 2 or more, for noisy numbers: ``alone`` has
            medians and ``spread``.
        results: A file that stores finished runs, a journal of Optuna.
        calibration: Inputs for calibration; None for ``data``.
        seed: Seed of random inputs.
        providers: ONNX Runtime's execution providers, in order of preference.

    Returns:
        The measurements of every module and precision, and ``.ranking``, the largest error first.

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

    settings = RunSettings(data, dims, shapes, seed, providers=providers, runs=runs)
    settings.check_timed_runs(0)
    check_repeats(repeats)
    if estimate:
        _check_idle(runs=runs, repeats=repeats, results=results, by_module=by_module, metric=metric)
    tagged = read_flat(model)
    auto = AutoPrecision(tagged, settings)
    chosen = _precisions(precisions, auto)
    if not estimate:
        tagged.require_exact_tags()
    paths = deciding_modules(tagged, select, depth)
    samples = CalibrationData.of(settings, tagged.model, passes=2)
    settings.check_providers()
    measurer = Measurer(tagged, samples, metric, results, calibration, repeats=repeats)
    estimates = estimated_errors(tagged, paths, chosen.values(), samples)
    rows: dict[tuple[str, str], ModuleSensitivity] = {}
    for path in paths:
        class_name = tagged.hierarchy[path].class_name
        for name in chosen:
            rows[path, name] = ModuleSensitivity(
                path, class_name, name, estimate=estimates[path, name]
            )
    notes = list(auto.notes)
    if samples.random:
        notes.append(RANDOM_NOTE)
    original = None
    if estimate:
        notes.append(ESTIMATE_NOTE)
    else:
        rows = _measured(measurer, rows, chosen, all_but=all_but, by_module=by_module)
        original = measurer.original
        notes += measurer.remarks
    by_path: defaultdict[str, dict[str, ModuleSensitivity]] = defaultdict(dict)
    for (path, name), row in rows.items():
        by_path[path][name] = row
        if row.problem:
            notes.append(f"{path or '(root)'} in {name}: {row.problem}")
    blocks = _blocks(tagged, rows)
    return Sensitivity(
        dict(by_path), original, blocks, not estimate, tuple(notes), tagged.tag_facts
    )


def _check_idle(**arguments: object) -> None:
    """Raise an `InputError` for an argument that has no effect on an estimate."""
    for name, value in arguments.items():
        if value:
            raise InputError(
                f"{name} has no effect on an estimate, for which nothing is quantized; leave it out"
            )


def _precisions(given: Sequence[Any] | str, auto: AutoPrecision) -> dict[str, Precision]:
    """Parse precisions; name → precision, in order."""
    from htp_export.capabilities.quantize.method import Precision
    from htp_export.capabilities.quantize.precisions import PRECISIONS, precision_of

    is_single = isinstance(given, str | Precision | Mapping)
    values: Sequence[Any] = [given] if is_single else list(given)
    chosen: dict[str, Precision] = {}
    named_apart((auto.precision(precision_of(value)) for value in values), chosen)
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
) -> dict[tuple[str, str], ModuleSensitivity]:
    """Rows with measurements; a row that cannot be measured has the reason as its ``problem``."""
    measured = dict(rows)
    # first each module alone: only the modules that can be quantized are in the other plans
    for number, key in enumerate(counted(list(rows) * (1 + all_but), "runs")):
        path, name = key
        if number < len(rows):
            measured[key] = _with_alone(measurer, measured[key], precisions[name], by_module)
            continue
        quantizable = [
            other
            for other, precision in rows
            if precision == name and measured[other, name].alone is not None
        ]
        if len(quantizable) > 1 and path in quantizable:
            plan = {other or ".": precisions[name] for other in quantizable}
            measured[key] = _with_all_but(measurer, measured[key], plan)
    return measured


def _with_all_but(
    measurer: Measurer, row: ModuleSensitivity, plan: Mapping[str, Precision]
) -> ModuleSensitivity:
    """A row with the measurement of a plan in which its module stays in fp32."""
    from htp_export.capabilities.quantize.precisions import PRECISIONS

    try:
        all_but = measurer.measure({**plan, row.path or ".": PRECISIONS["fp32"]})
    except (InputError, ToolError) as error:
        return replace(row, problem=f"all modules but this one: {error}")
    return replace(row, all_but=all_but)


def _with_alone(
    measurer: Measurer, row: ModuleSensitivity, precision: Precision, by_module: bool
) -> ModuleSensitivity:
    """A row with the measurement of the model in which only its module is quantized."""
    from htp_export.capabilities.verify.file_comparing import compare

    plan, original = {row.path or ".": precision}, measurer.original
    try:
        # Only the comparison by module needs the model, if its measurement is known already.
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
    results = compare(measurer.tagged, made, measurer.feeds[0]).modules
    cosines = {path: result.cosine for path, result in results.items()}
    known = {path: cosine for path, cosine in cosines.items() if cosine is not None}
    return replace(row, by_module=known)


def _blocks(tagged: TaggedModel, rows: _Rows) -> tuple[BlockSensitivity, ...]:
    """Combine the rows of modules at the same place of repeated blocks."""
    from htp_export.capabilities.fingerprint.families import repeated_blocks

    blocks: list[BlockSensitivity] = []
    for block in repeated_blocks(GraphFacts(tagged)):
        # path inside the block and precision → the rows of all blocks
        members_of: defaultdict[tuple[str, str], list[ModuleSensitivity]] = defaultdict(list)
        for (path, name), row in rows.items():
            around = tags.nearest_above(path, block.modules)
            if around is not None and row.error is not None:
                members_of[path.removeprefix(around).lstrip("."), name].append(row)
        for (part, name), members in members_of.items():
            errors = [member.error or 0.0 for member in members]
            largest = max(errors)
            worst = members[errors.index(largest)]
            mean = sum(errors) / len(errors)
            paths = tuple(member.path for member in members)
            blocks.append(
                BlockSensitivity(block.name, part, name, mean, largest, worst.path, paths)
            )
    return tuple(blocks)
